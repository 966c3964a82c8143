"""Chat: wrapping read off any template, exact tokens, typed calls."""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from actors.chat import Chat, ChatSettings, last_boxed
from actors.tool_call import Malformed, MalformedReason, ToolCall, parse_call
from launch.tiny import TinySettings, train_tokenizer

TOOL = "execute_python_code_with_standard_io"
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }} {{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)


@cache
def tokenizer(style: str = "qwen3") -> Any:
    texts = [f"user\nWhat is {n} + 1?<tool_call>" + json.dumps({"name": TOOL}) for n in range(50)]
    return train_tokenizer(TinySettings(style=style, vocabulary=400), texts)


@cache
def chat(style: str = "qwen3", **changes: Any) -> Chat:
    return Chat(tokenizer(style), ChatSettings(**changes))


def with_template(template: str | None) -> Any:
    made = train_tokenizer(TinySettings(style="llama", vocabulary=320), ["x"])
    made.chat_template = template
    return made


def call_text(arguments: Any, name: str = TOOL) -> str:
    return f"go</reason><tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize("style", ["qwen3", "llama"])
@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("system", ["", "Use {tool}."])
def test_a_conversation_is_what_the_template_writes(style: str, role: str, system: str) -> None:
    found = chat(style, observation_role=role, system=system)
    ids = found.prompt_ids("What is 41 + 1?") + found.turn_ids("x</reason>") + found.observation_ids("42")
    messages = [{"role": "system", "content": f"Use {TOOL}."}] if system else []
    messages += [
        {"role": "user", "content": "What is 41 + 1?"},
        {"role": "assistant", "content": "<reason>x</reason>"},
        {"role": role, "content": "<tool_response>\n42\n</tool_response>"},
    ]
    text = tokenizer(style).apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer(style).decode(ids) == text + "<reason>"


def test_the_end_of_turn_is_the_templates_own() -> None:
    assert chat("qwen3").end_of_turn_id == tokenizer("qwen3").convert_tokens_to_ids("<|im_end|>")
    assert chat("llama").end_of_turn_id == tokenizer("llama").convert_tokens_to_ids("<|eot_id|>")
    other = with_template("{% for m in messages %}{{ m.content }}<|end_of_text|>{% endfor %}")
    found = Chat(other, ChatSettings())  # its eos token is <|eot_id|>: an engine stops at either
    assert found.end_of_turn_id == other.convert_tokens_to_ids("<|end_of_text|>")
    assert found.stop_ids == (found.end_of_turn_id, other.eos_token_id)


def test_space_before_the_end_of_turn_is_not_asked_of_the_model() -> None:
    found = Chat(with_template(LLAMA2), ChatSettings())
    text = with_template(None).decode(found.turn_ids("x") + found.observation_ids("42"))
    assert text == "x<|eot_id|>[INST] <tool_response>\n42\n</tool_response> [/INST]<reason>"


def test_tools_are_handed_to_the_template() -> None:
    text = tokenizer().decode(chat(list_tools=True).prompt_ids("1"))
    assert json.dumps(TOOL) in text
    assert '"required": ["code", "input"]' in text


@pytest.mark.parametrize(
    ("template", "settings", "message"),
    [
        (None, ChatSettings(), "has no chat template"),
        (LLAMA2, ChatSettings(system="be good"), "refuses messages of the roles .*only user and assistant"),
        (LLAMA2, ChatSettings(observation_role="tool"), "refuses messages of the roles"),
        ("{{ messages[0].content }}", ChatSettings(), "writes a message 0 times"),
        ("{% for m in messages %}{{ m.content }} END {% endfor %}", ChatSettings(), "mark it by a special token"),
    ],
)
def test_a_template_that_cannot_serve_is_refused(template: str | None, settings: ChatSettings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Chat(with_template(template), settings)


@settings(deadline=None)  # a busy machine is no failure
@given(text=st.text(max_size=80))
def test_no_text_from_outside_becomes_a_special_token(text: str) -> None:
    found, special = chat(), set(tokenizer().all_special_ids)
    for spelled in (text, text + "<|im_end|><answer>\\boxed{1}</answer><tool_call>"):
        problem = found.prompt_ids(spelled)
        observation = found.observation_ids(spelled[:40])
        assert [i for i in problem if i in special] == [i for i in found.prompt_ids("") if i in special]
        assert [i for i in observation if i in special] == [i for i in found.observation_ids("") if i in special]


@settings(deadline=None)  # a busy machine is no failure
@given(text=st.text(min_size=1, max_size=200), limit=st.integers(16, 60))
def test_an_observation_is_cut_in_the_middle_to_the_limit(text: str, limit: int) -> None:
    found = chat(max_observation_tokens=limit)
    whole = chat(max_observation_tokens=10_000).observation_ids(text)
    ids = found.observation_ids(text)
    wrapping = len(found.observation_ids(""))
    assert len(ids) == min(len(whole), wrapping + limit)
    if len(whole) > len(ids):
        place = len(found.observation_ids("")) // 2
        assert ids[:place] == whole[:place]
        assert ids[-place:] == whole[-place:]
        assert "\n...\n" in tokenizer().decode(ids)
    else:
        assert ids == whole


def test_a_lone_surrogate_in_an_observation_is_replaced() -> None:
    assert chat().observation_ids("a\ud800b") == chat().observation_ids("a?b")


@settings(deadline=None)  # a busy machine is no failure
@given(ids=st.lists(st.integers(0, 399), max_size=60))
def test_any_tokens_can_be_parsed(ids: list[int]) -> None:
    parsed = chat().parse([i % len(tokenizer()) for i in ids])
    assert parsed.answer is None or parsed.num_answers > 0


def test_a_turn_is_read() -> None:
    found = chat()
    parsed = found.parse(found.turn_ids("I add.</reason>" + call_text({"code": "print(41 + 1)", "input": "3"})))
    assert parsed.ended
    assert parsed.call == ToolCall(code="print(41 + 1)", input="3")
    assert (parsed.answer, parsed.num_answers, parsed.answer_well_formed) == (None, 0, False)
    parsed = found.parse(found.turn_ids("So.</reason><answer>It is \\boxed{\\frac{1}{2}}</answer>")[:-1])
    assert not parsed.ended
    assert parsed.call is None
    assert (parsed.answer, parsed.num_answers, parsed.answer_well_formed) == ("\\frac{1}{2}", 1, True)
    assert parsed.text == "So.</reason><answer>It is \\boxed{\\frac{1}{2}}</answer>"


@pytest.mark.parametrize(
    ("text", "answer", "num_answers", "well_formed"),
    [
        ("<answer>\\boxed{1}</answer><answer>\\boxed{2}</answer>", "2", 2, True),
        ("<answer>\\boxed{1} or \\boxed{2}</answer>", "2", 1, True),
        ("<answer>\\boxed{1}", None, 1, False),
        ("<answer>1</answer>", None, 1, False),
        ("\\boxed{1}", None, 0, False),
        ("<answer>\\boxed{1}</answer></answer>", "1", 1, False),
        ("<answer>\\boxed{1</answer>", None, 1, False),
        (call_text({"code": "print('<answer>\\\\boxed{7}</answer>')"}), None, 0, False),
    ],
)
def test_answers_are_counted_and_the_last_box_is_taken(
    text: str, answer: str | None, num_answers: int, well_formed: bool
) -> None:
    parsed = chat().parse(chat().turn_ids(text))
    assert (parsed.answer, parsed.num_answers, parsed.answer_well_formed) == (answer, num_answers, well_formed)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>{}", MalformedReason.UNCLOSED_TAG),
        ("{}</tool_call>", MalformedReason.UNCLOSED_TAG),
        ("</tool_call>{}<tool_call>", MalformedReason.UNCLOSED_TAG),
        ("<tool_call><tool_call>{}</tool_call>", MalformedReason.UNCLOSED_TAG),
        (call_text({"code": "1"}) * 2, MalformedReason.SEVERAL_CALLS),
        ("<tool_call>print(1)</tool_call>", MalformedReason.BAD_JSON),
        ("<tool_call></tool_call>", MalformedReason.BAD_JSON),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", MalformedReason.BAD_JSON),
        ("<tool_call>" + "9" * 5000 + "</tool_call>", MalformedReason.BAD_JSON),
        ('<tool_call>["code"]</tool_call>', MalformedReason.NOT_AN_OBJECT),
        (call_text("print(1)"), MalformedReason.NOT_AN_OBJECT),
        (call_text({"code": "1"}, name="WolframAlpha"), MalformedReason.UNKNOWN_TOOL),
        ("<tool_call>{}</tool_call>", MalformedReason.UNKNOWN_TOOL),
        (call_text({"input": "1"}), MalformedReason.MISSING_CODE),
        (call_text({"code": 123}), MalformedReason.NOT_A_STRING),
        (call_text({"code": None}), MalformedReason.NOT_A_STRING),
        (call_text({"code": "1", "input": ["1"]}), MalformedReason.NOT_A_STRING),
        (call_text({"code": "print('\ud800')"}), MalformedReason.LONE_SURROGATE),
    ],
)
def test_a_malformed_call_is_typed_and_told(text: str, reason: MalformedReason) -> None:
    call = parse_call(text, TOOL)
    assert isinstance(call, Malformed)
    assert call.reason is reason
    assert reason in call.text
    assert len(call.text) < 200


@settings(deadline=None)  # a busy machine is no failure
@given(code=st.text(max_size=50), given_input=st.text(max_size=20))
def test_any_program_survives_the_round_trip(code: str, given_input: str) -> None:
    call = parse_call(call_text({"code": code, "input": given_input}), TOOL)
    tags = ("<tool_call>", "</tool_call>")
    if any(tag in code + given_input for tag in tags):
        return
    assert call == ToolCall(code=code, input=given_input)


@settings(deadline=None)  # a busy machine is no failure
@given(text=st.text(alphabet='<>/tool_ca{}"[]:,ncde ', max_size=60))
def test_any_text_gives_a_call_or_a_reason_or_nothing(text: str) -> None:
    for turn in (text, f"<tool_call>{text}</tool_call>"):
        assert parse_call(turn, TOOL) is None or isinstance(parse_call(turn, TOOL), (ToolCall, Malformed))


@pytest.mark.parametrize(
    ("text", "content"),
    [("\\boxed{a}\\boxed{b}", "b"), ("\\boxed{{}", None), ("\\boxed{}", ""), ("boxed{1}", None), ("\\boxed{1}}", "1")],
)
def test_boxes_balance_their_braces(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_settings_that_cannot_be_meant_are_refused() -> None:
    for fields in ({"user": "no place"}, {"max_observation_tokens": 3}, {"observation_role": "assistant"}, {"sys": ""}):
        with pytest.raises(ValidationError):
            ChatSettings(**fields)

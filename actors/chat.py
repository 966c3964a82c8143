"""Tokens in, tokens out: a conversation as the model sees it.

Consumes    a tokenizer with a chat template, `ChatSettings`, problem and observation texts, the model's tokens
Produces    prompt tokens, observation tokens, parsed turns
Waits for   nothing
Invariant   what the model produced is never encoded again: a context is the prompt, then turns and observations as they
            were; text from problems and observations never becomes a special token

What stands between the messages is not written here: it is read off the tokenizer's chat template, by rendering a
conversation of sentinels once.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jinja2
from pydantic import BaseModel, ConfigDict, Field, field_validator

from actors.tool_call import Malformed, MalformedReason, ToolCall, parse_call, without_calls

__all__ = ["Chat", "ChatSettings", "Malformed", "MalformedReason", "Parsed", "ToolCall"]

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
PROBLEM_MARK, TURN_MARK, OBSERVATION_MARK = "PROBLEM8a1f", "TURN8a1f", "OBSERVATION8a1f"


class ChatSettings(BaseModel):
    """The `[chat]` table of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    system: str = ""
    """System message; empty sends none. `{tool}` is the tool's name."""
    user: str = "{problem}"
    """User message; `{problem}` is the problem's text."""
    list_tools: bool = False
    """Hand the tool's JSON schema to the template, which then puts it where its model expects it."""
    tool_name: str = "execute_python_code_with_standard_io"
    generation_prefix: str = "<reason>"
    """What each of the model's turns is made to begin with."""
    observation_role: Literal["user", "tool"] = "user"
    observation_open: str = "<tool_response>\n"
    """Before an observation's text. Empty where the template of a tool role writes its own."""
    observation_close: str = "\n</tool_response>"
    max_observation_tokens: int = Field(default=256, ge=16)
    """Longer observations are cut in the middle; counts the text and the mark, not the wrapping."""
    cut_mark: str = "\n...\n"
    """Stands where an observation was cut."""

    @field_validator("user")
    @classmethod
    def _user_has_the_problem(cls, value: str) -> str:
        if value.count("{problem}") != 1:
            raise ValueError(f'chat.user = "{value}" must hold {{problem}} once')
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """One turn of the model, read."""

    text: str
    """The turn without its end-of-turn token; the generation prefix is not part of it."""
    ended: bool
    """The model ended the turn itself; False when it ran into a limit."""
    call: ToolCall | Malformed | None
    """The tool call; Malformed when it tried and failed; None when there is none, which ends the rollout."""
    answer: str | None
    """The content of the last `\\boxed{}` inside the last `<answer>`; None without one."""
    num_answers: int
    """`<answer>` tags of the turn."""
    answer_well_formed: bool
    """At least one answer, every tag closed, and a `\\boxed{}` in the last."""


class Chat:
    """Conversations with one tokenizer.

    Example:
        context = chat.prompt_ids(problem.problem)
        turn = generate(context)
        parsed = chat.parse(turn)
        context = context + turn + chat.observation_ids(result_text)
    """

    @classmethod
    def load(cls, folder: Path, settings: ChatSettings) -> "Chat":
        """With the tokenizer of a model's folder."""
        from transformers import AutoTokenizer  # here: it imports torch

        return cls(AutoTokenizer.from_pretrained(folder), settings)

    def __init__(self, tokenizer: Any, settings: ChatSettings) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template: take an instruct "
                "model's tokenizer, or put a chat_template.jinja beside its tokenizer.json"
            )
        self.settings = settings
        self._tokenizer = tokenizer
        prompt_head, prompt_tail, head, tail = self._wrapping()
        self.end_of_turn_id, head = self._end_of_turn(head)
        stops = [self.end_of_turn_id] + ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(stops))
        """Tokens at which an engine ends a turn."""
        self._prompt_head = self._encode(prompt_head, special=True)
        self._prompt_tail = self._encode(prompt_tail + settings.generation_prefix, special=True)
        self._observation_head = self._encode(head, special=True)
        self._observation_tail = self._encode(tail + settings.generation_prefix, special=True)
        self._cut_mark = self._encode(settings.cut_mark, special=False)

    def prompt_ids(self, problem: str) -> list[int]:
        """The context of the first turn, generation prefix included."""
        return self._prompt_head + self._encode(problem, special=False) + self._prompt_tail

    def observation_ids(self, text: str) -> list[int]:
        """What follows the model's end of turn, up to where it goes on: wrapping, text, generation prefix."""
        return self._observation_head + self._cut(self._encode(text, special=False)) + self._observation_tail

    def turn_ids(self, text: str) -> list[int]:
        """A demonstrated turn, end of turn included. Never for what a model produced."""
        return [*self._encode(text, special=True), self.end_of_turn_id]

    def parse(self, output_ids: Sequence[int]) -> Parsed:
        """Reads one turn of the model."""
        ended = bool(output_ids) and output_ids[-1] in self.stop_ids
        body = output_ids[:-1] if ended else output_ids
        text = self._tokenizer.decode(list(body), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        rest = without_calls(text)
        answers = ANSWER.findall(rest)
        answer = last_boxed(answers[-1]) if answers else None
        opened, closed = rest.count("<answer>"), rest.count("</answer>")
        return Parsed(
            text=text,
            ended=ended,
            call=parse_call(text, self.settings.tool_name),
            answer=answer,
            num_answers=opened,
            answer_well_formed=answer is not None and opened == closed == len(answers),
        )

    def _wrapping(self) -> tuple[str, str, str, str]:
        """What the template writes before and after a problem, and before and after an observation."""
        settings = self.settings
        first = [{"role": "user", "content": settings.user.replace("{problem}", PROBLEM_MARK)}]
        if settings.system:
            first.insert(0, {"role": "system", "content": settings.system.replace("{tool}", settings.tool_name)})
        observation = settings.observation_open + OBSERVATION_MARK + settings.observation_close
        more = [
            {"role": "assistant", "content": TURN_MARK},
            {"role": settings.observation_role, "content": observation},
        ]
        prompt = self._split(self._render(first), PROBLEM_MARK)
        after_turn = self._split(self._render(first + more), TURN_MARK)[1]
        return *prompt, *self._split(after_turn, OBSERVATION_MARK)

    def _render(self, messages: list[dict[str, str]]) -> str:
        tools = [tool_schema(self.settings.tool_name)] if self.settings.list_tools else None
        try:
            render = self._tokenizer.apply_chat_template
            text = render(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        except (jinja2.TemplateError, TypeError) as error:
            roles = [message["role"] for message in messages]
            raise ValueError(f"the tokenizer's chat template refuses messages of the roles {roles}: {error}") from error
        return str(text)

    def _split(self, text: str, mark: str) -> tuple[str, str]:
        if text.count(mark) != 1:
            raise ValueError(f"the chat template writes a message {text.count(mark)} times, not once: {text!r:.300}")
        head, _, tail = text.partition(mark)
        return head, tail

    def _end_of_turn(self, text: str) -> tuple[int, str]:
        """The special token that ends a turn, and what follows it; before it stands at most space."""
        added = {token: entry.content for token, entry in self._tokenizer.added_tokens_decoder.items()}
        found = [(text.find(content), -len(content), token) for token, content in added.items() if content in text]
        if not found or text[: min(found)[0]].strip():
            raise ValueError(
                f"the chat template ends the model's turn with {text[:40]!r}, which is no token of its own in the "
                "tokenizer, so a turn cannot be seen to end: mark it by a special token"
            )
        place, length, token = min(found)
        return token, text[place - length :]

    def _encode(self, text: str, *, special: bool) -> list[int]:
        """Tokens of a text; with `special` False, the spelling of a special token stays ordinary text."""
        valid = text.encode("utf-8", "replace").decode("utf-8")
        return list(self._tokenizer.encode(valid, add_special_tokens=False, split_special_tokens=not special))

    def _cut(self, ids: list[int]) -> list[int]:
        limit = self.settings.max_observation_tokens
        if len(ids) <= limit:
            return ids
        room = limit - len(self._cut_mark)
        if room < 2:
            return ids[:limit]
        return ids[: room - room // 2] + self._cut_mark + ids[len(ids) - room // 2 :]


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}`, braces balanced: `\\boxed{\\frac{1}{2}}` gives `\\frac{1}{2}`."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for place in range(begin - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place]
    return None


def tool_schema(name: str) -> dict[str, Any]:
    """The tool as the function-calling convention states it."""
    text = {"type": "string"}
    properties = {
        "code": {**text, "description": "Python code to execute."},
        "input": {**text, "description": "Standard input of the code."},
    }
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "Executes Python code and returns what it printed.",
            "parameters": {"type": "object", "properties": properties, "required": ["code", "input"]},
        },
    }

"""Supervised fine-tuning and what it starts from: loss, order, demonstrations, a model small enough to learn here."""

import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.chat import Chat, ChatSettings
from actors.problems import FamilySettings, ProblemError, ProblemSettings, ProblemStream
from actors.tool_call import ToolCall
from launch.cold_start import ColdStartSettings, cold_start, make_demonstrations
from launch.demonstrations import SOLUTIONS, DemonstrationSettings, demonstrate, encode, faulty
from launch.tiny import TinySettings, new_model, train_tokenizer
from learner.sft import Example, SftProgress, SftSettings, batch_losses, batches, learning_rate, train
from sandbox.api import Status
from tests.reference.execute import Executor

OPTIONS: dict[str, dict[str, Any]] = {
    "products": {"max_digits": 2},
    "chain_sum": {"max_digits": 2, "max_terms": 3},
    "gcd": {"max_value": 99},
    "lcm": {"max_value": 20},
    "count_bits": {"max_n": 999},
    "count_primes": {"min_n": 2, "max_n": 99},
}
PROBLEMS = ProblemSettings(
    families=tuple(FamilySettings(name=name, options=options) for name, options in OPTIONS.items()), num_heldout=20
)


def recipe(output: Path, **sft: Any) -> ColdStartSettings:
    return ColdStartSettings(
        output=str(output),
        num_demonstrations=160,
        problems=PROBLEMS,
        tiny=TinySettings(num_layers=1, width=32, num_heads=2, num_kv_heads=1, mlp_width=64),
        sft=SftSettings(steps=30, learning_rate=1e-2, warmup_steps=5, report_every_steps=10, **sft),
    )


def test_every_known_solution_prints_the_answer_and_every_fault_fails() -> None:
    stream = ProblemStream(PROBLEMS, seed=3)
    with Executor() as executor:
        for index in range(60):
            item = stream.item_at(index)
            code = SOLUTIONS[item["metadata"]["source_dataset"]](item["metadata"])
            assert executor.run(code).stdout == item["answer"] + "\n"
            for draw in range(4):
                assert executor.run(faulty(code, Random(draw))).status is Status.ERROR


def test_demonstrations_come_in_the_stated_shares_and_tell_no_right_guess(tmp_path: Path) -> None:
    settings = recipe(tmp_path).model_copy(update={"num_demonstrations": 2000})
    stream = ProblemStream(PROBLEMS, settings.sft.seed)
    heldout = {problem.problem for problem in stream.heldout}
    with Executor() as executor:
        made = make_demonstrations(settings, lambda code: executor.run(code).to_text())
    turns = [len(demonstration.turns) for demonstration in made]
    for count, share in [(1, 0.60), (3, 0.18), (2, 0.22)]:
        assert abs(turns.count(count) / 2000 - share) < 4 * math.sqrt(share * (1 - share) / 2000)
    for index, demonstration in enumerate(made):
        assert demonstration.problem not in heldout
        right = f"\\boxed{{{stream.at(index).answer}}}" in demonstration.turns[-1]
        assert right == (len(demonstration.turns) > 1)


def test_a_demonstration_reads_back_as_what_it_shows() -> None:
    stream = ProblemStream(PROBLEMS, seed=3)
    chat = Chat(train_tokenizer(TinySettings(vocabulary=320), ["x"]), ChatSettings())
    with Executor() as executor:
        made = demonstrate(
            DemonstrationSettings(guess_share=0, faulty_share=1),
            chat.settings.tool_name,
            stream.at(0).problem,
            stream.item_at(0),
            0,
            lambda code: executor.run(code).to_text(),
        )
    ids, ours = encode(chat, made)
    starts = [place for place in range(len(ids)) if ours[place] and not ours[place - 1]]
    ends = [place + 1 for place in range(len(ids)) if ours[place] and (place + 1 == len(ids) or not ours[place + 1])]
    parsed = [chat.parse(ids[start:end]) for start, end in zip(starts, ends, strict=True)]
    assert all(turn.ended for turn in parsed)
    assert [type(turn.call) for turn in parsed] == [ToolCall, ToolCall, type(None)]
    assert "Error" in made.observations[0]
    assert parsed[-1].answer == stream.at(0).answer == made.observations[1]


def test_a_family_without_a_known_solution_is_named() -> None:
    item = {"answer": "1", "metadata": {"source_dataset": "sudoku"}}
    with pytest.raises(ProblemError, match="no demonstration is known for family sudoku"):
        demonstrate(DemonstrationSettings(), "tool", "?", item, 0, str)


@pytest.mark.parametrize("style", ["qwen3", "llama"])
def test_a_tiny_tokenizer_has_single_digits_and_reads_any_text_back(style: str) -> None:
    tokenizer = train_tokenizer(TinySettings(style=style), ["12 + 34 and a phrase that recurs"] * 20)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1234")] == list("1234")
    assert len(tokenizer.encode(" and a phrase that recurs")) == 1
    for text in ("\u00e9\u4e2d\n\t x", "<reason>a</reason><answer>\\boxed{1}</answer>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    model = new_model(TinySettings(style=style), tokenizer, seed=1)
    again = new_model(TinySettings(style=style), tokenizer, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert model.config.model_type == style


def test_losses_are_those_of_each_example_alone() -> None:
    tokenizer = train_tokenizer(TinySettings(vocabulary=320), ["x"])
    model = new_model(TinySettings(num_layers=1, width=32, num_heads=2, num_kv_heads=1), tokenizer, seed=0).eval()
    long = Example(ids=list(range(30, 50)), ours=[place % 3 == 0 for place in range(20)])
    short = Example(ids=[40, 41, 42], ours=[False, True, True])
    with torch.no_grad():
        both = batch_losses(model, [long, short])
        alone = [batch_losses(model, [example]) for example in (long, short)]
    assert both.tolist() == pytest.approx((alone[0] + alone[1]).tolist(), rel=1e-5)


@settings(deadline=None)  # a busy machine is no failure
@given(count=st.integers(4, 90), size=st.integers(1, 4), seed=st.integers(0, 5))
def test_an_epoch_has_each_example_at_most_once_and_misses_less_than_a_batch(count: int, size: int, seed: int) -> None:
    examples = [Example(ids=[n] * (1 + n % 7), ours=[True]) for n in range(count)]
    stream = batches(examples, SftSettings(batch_size=size, seed=seed))
    seen = [example.ids[0] for _ in range(count // size) for example in next(stream)]
    assert len(seen) == len(set(seen)) > count - size


def test_the_learning_rate_warms_up_and_falls_along_a_cosine() -> None:
    settings = SftSettings(steps=100, warmup_steps=10, learning_rate=1.0)
    rates = [learning_rate(settings, step) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.01)


@pytest.mark.slow
def test_a_cold_start_learns_saves_and_repeats_itself(tmp_path: Path) -> None:
    reports: list[SftProgress] = []
    with Executor() as executor:
        folders = [
            cold_start(recipe(tmp_path / name), lambda code: executor.run(code).to_text(), reports.append)
            for name in ("one", "two")
        ]
    assert reports[2].loss_assistant < 0.5 * reports[0].loss_assistant
    assert reports[:3] == reports[3:]
    one, two = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
    assert all(torch.equal(one[name], two[name]) for name in one)
    chat = Chat(AutoTokenizer.from_pretrained(folders[0]), ChatSettings())
    assert chat.parse(chat.turn_ids("a</reason>")).ended


def test_too_few_examples_for_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sft\.batch_size = 32, but there are 1 examples"):
        train(torch.nn.Linear(1, 1), [Example(ids=[1], ours=[True])], SftSettings(steps=1), print)


def test_shares_above_one_are_refused() -> None:
    with pytest.raises(ValidationError, match="at most 1"):
        DemonstrationSettings(guess_share=0.7, faulty_share=0.4)

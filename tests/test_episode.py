"""Episodes: every way a rollout can go and end."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from actors.engine import EngineDied
from actors.episode import Episode, InfrastructureFailed
from buffer.client import LeaseOver
from buffer.schema import Finish, Lease, Turn
from sandbox.api import Status, Verdict
from sandbox.client import CheckFailed
from tests.episode_parts import PROBLEM, SETTINGS, Python, Script, Store, answer, call, chat


def lease(turns: Sequence[Turn] = ()) -> Lease:
    return Lease(
        group=3, rollout=1, attempt=2, kind="train", base=4, deadline=5, seed=9, problem=PROBLEM, turns=tuple(turns)
    )


async def play(
    script: Script,
    sandbox: Python | None = None,
    *,
    store: Store | None = None,
    turns: Sequence[Turn] = (),
    **limits: int,
) -> tuple[Finish, Store]:
    store = store or Store()
    episode = Episode(
        lease(turns),
        engine=script,
        chat=chat(),
        sandbox=sandbox or Python(),
        push=store.push,
        settings=SETTINGS.model_copy(update=limits),
    )
    return await episode.run(), store


async def test_a_call_and_an_answer() -> None:
    script, python = Script(call("print(6 * 7)"), answer("42")), Python()
    finish, store = await play(script, python)
    assert (finish.reward, finish.verdict, finish.answer, finish.end) == (1.0, "right", "42", "answer")
    assert (finish.num_turns, finish.num_answers, finish.well_formed, finish.statuses) == (2, 1, True, ("ok",))
    first, second = store.turns
    assert (first.code, first.status, first.observation) == ("print(6 * 7)", "ok", "42")
    assert first.prompt_ids.tolist() == chat().prompt_ids(PROBLEM.problem)
    assert first.observation_ids.tolist() == chat().observation_ids("42")
    assert len(second.prompt_ids) == len(second.observation_ids) == 0
    assert [(t.group, t.rollout, t.attempt, t.turn) for t in store.turns] == [(3, 1, 2, 0), (3, 1, 2, 1)]
    parts = [part for t in store.turns for part in (t.prompt_ids, t.output_ids, t.observation_ids)]
    whole = np.concatenate(parts).tolist()
    assert whole[: len(script.contexts[1])] == script.contexts[1]
    assert finish.num_tokens == len(whole)
    assert finish.num_output_tokens == sum(len(t.output_ids) for t in store.turns)
    assert finish.generate_s == 0.5
    assert finish.tool_s >= 0
    assert python.graded == [("42", "42")]


@pytest.mark.parametrize(
    ("said", "reward", "verdict", "end"),
    [
        (answer("41"), 0.0, "wrong", "answer"),
        ("just 42", 0.0, "none", "no_call"),
        ("<answer>42</answer>", 0.0, "none", "answer"),
        (answer("42") + "<answer>", 0.0, "none", "answer"),
        (answer("1") + answer("42"), 1.0, "right", "answer"),
    ],
)
async def test_a_turn_without_a_call_ends_the_rollout(said: str, reward: float, verdict: str, end: str) -> None:
    finish, store = await play(Script(said))
    assert (finish.reward, finish.verdict, finish.end, finish.statuses) == (reward, verdict, end, ())
    assert store.turns[0].status == store.turns[0].code == ""


async def test_a_malformed_call_is_an_observation_that_the_model_sees_and_no_sandbox_runs_it() -> None:
    script, python = Script("<tool_call>{nonsense</tool_call>", answer("42")), Python()
    finish, store = await play(script, python)
    assert finish.statuses == ("malformed",)
    assert finish.reward == 1.0
    assert python.ran == []
    assert "malformed tool call (bad_json)" in store.turns[0].observation
    assert script.contexts[1][-len(store.turns[0].observation_ids) :] == store.turns[0].observation_ids.tolist()


async def test_a_failed_call_is_shown_and_counted() -> None:
    finish, store = await play(Script(call("1/0"), answer("42")), Python(Status.ERROR))
    assert (finish.statuses, finish.reward) == (("error",), 1.0)
    assert store.turns[0].observation == "Gone: no node"


async def test_a_generation_cut_inside_a_call_is_malformed_and_ends_by_length() -> None:
    python = Python()
    finish, store = await play(Script(call("print(" + "1" * 500 + ")")), python, max_new_tokens=60)
    assert (finish.end, finish.statuses, finish.reward, finish.verdict) == ("length", ("malformed",), 0.0, "none")
    assert python.ran == [] == python.graded
    assert len(store.turns[0].output_ids) == 60
    assert len(store.turns[0].observation_ids) == 0


async def test_a_right_answer_in_a_rollout_that_was_cut_off_earns_nothing() -> None:
    python = Python()
    long = answer("42") + "x" * 900
    finish, _ = await play(Script(long), python, max_new_tokens=100)
    assert (finish.end, finish.reward, finish.verdict, python.graded) == ("length", 0.0, "none", [])
    assert finish.well_formed


async def test_the_last_turns_call_is_not_executed() -> None:
    python = Python()
    finish, store = await play(Script(*[call("print(1)")] * 3), python)
    assert (finish.end, finish.num_turns, finish.statuses, finish.reward) == ("turns", 3, ("ok", "ok"), 0.0)
    assert len(python.ran) == 2
    assert (store.turns[2].status, store.turns[2].code) == ("", "")


async def test_generations_stay_within_what_is_left_of_the_rollout() -> None:
    script = Script(call("print(6 * 7)"), "y" * 900)
    finish, _ = await play(script, max_length=400)
    assert script.limits == [min(600, 400 - len(context)) for context in script.contexts]
    assert (finish.end, finish.num_tokens) == ("length", 400)


async def test_an_observation_that_does_not_fit_ends_the_rollout_and_is_not_part_of_it() -> None:
    prompt, output = len(chat().prompt_ids(PROBLEM.problem)), len(chat().turn_ids(call("print('z' * 90)")))
    python = Python()
    finish, store = await play(Script(call("print('z' * 90)")), python, max_length=prompt + output + 20)
    assert (finish.end, finish.statuses, finish.num_tokens) == ("length", ("ok",), prompt + output)
    assert (store.turns[0].status, store.turns[0].observation, len(store.turns[0].observation_ids)) == ("ok", "", 0)


async def test_infrastructure_that_fails_excludes_the_rollout() -> None:
    store = Store()
    with pytest.raises(InfrastructureFailed, match="sandbox: worker_lost Gone: no node") as raised:
        await play(Script(call("print(1)")), Python(Status.WORKER_LOST), store=store)
    assert (raised.value.reason, store.turns) == ("sandbox", [])
    with pytest.raises(InfrastructureFailed, match="grading: answer not graded") as raised:
        await play(Script(answer("42")), Python(error=CheckFailed("answer not graded")), store=store)
    assert (raised.value.reason, len(store.turns)) == ("grading", 1)


async def test_a_verdict_that_timed_out_earns_nothing() -> None:
    finish, _ = await play(Script(answer("42")), Python(verdict=Verdict.TIMEOUT))
    assert (finish.reward, finish.verdict) == (0.0, "timeout")


async def test_a_prompt_without_room_for_an_answer_is_no_fault_of_the_model() -> None:
    with pytest.raises(InfrastructureFailed, match="prompt: problem p has ") as raised:
        await play(Script(), max_length=10, max_new_tokens=5)
    assert raised.value.reason == "prompt"


async def test_a_rollout_goes_on_from_its_durable_turns_and_repeats_nothing() -> None:
    whole, store = await play(Script(call("print(6 * 7)"), answer("42")))
    script, python = Script(answer("42")), Python()
    resumed, later = await play(script, python, turns=store.turns[:1])
    assert python.ran == []
    assert len(script.contexts) == 1
    assert [turn.turn for turn in later.turns] == [1]
    for field in ("reward", "statuses", "num_turns", "num_answers", "num_tokens", "num_output_tokens", "end"):
        assert getattr(resumed, field) == getattr(whole, field), field


@pytest.mark.parametrize("said", [answer("42"), "just 42", "x" * 900])
async def test_a_rollout_whose_last_turn_is_durable_is_only_scored(said: str) -> None:
    whole, store = await play(Script(said))
    resumed, later = await play(Script(), turns=store.turns)
    assert later.turns == []
    assert (resumed.reward, resumed.end, resumed.verdict) == (whole.reward, whole.end, whole.verdict)


async def test_a_durable_turn_whose_observation_did_not_fit_ends_again_by_length() -> None:
    room = len(chat().prompt_ids(PROBLEM.problem)) + len(chat().turn_ids(call("print('z' * 90)"))) + 20
    _, store = await play(Script(call("print('z' * 90)")), max_length=room)
    resumed, _ = await play(Script(), turns=store.turns, max_length=room)
    assert (resumed.end, resumed.statuses) == ("length", ("ok",))


async def test_one_turn_may_be_under_way_to_the_buffer_while_the_next_is_made_and_no_more() -> None:
    store, script = Store(), Script(call("print(1)"), call("print(2)"), answer("42"))
    store.open.clear()
    running = asyncio.create_task(play(script, store=store))
    while len(script.contexts) < 2:
        await asyncio.wait({running}, timeout=0.001)
    for _ in range(20):
        await asyncio.wait({running}, timeout=0.001)
    assert len(script.contexts) == 2  # the third generation waits for the first turn to be durable
    assert not running.done()
    store.open.set()
    outcome, _ = await running
    assert isinstance(outcome, Finish)
    assert [turn.turn for turn in store.turns] == [0, 1, 2]


async def test_the_score_waits_for_the_last_turn_to_be_durable() -> None:
    store, python = Store(), Python()
    store.open.clear()
    running = asyncio.create_task(play(Script(answer("42")), python, store=store))
    for _ in range(20):
        await asyncio.wait({running}, timeout=0.001)
    assert not running.done()
    assert python.graded == []
    store.open.set()
    await running
    assert python.graded == [("42", "42")]


async def test_what_the_buffer_and_the_engine_say_passes_through() -> None:
    store = Store()
    store.error = LeaseOver("lease_over", "in other hands")
    with pytest.raises(LeaseOver):
        await play(Script(call("print(1)"), call("print(2)"), answer("42")), store=store)
    with pytest.raises(EngineDied):
        await play(Script(EngineDied("gone")))

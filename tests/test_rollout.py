"""The rollout actor among real neighbours: buffer, sandbox, RoC filter, weight server, and an engine of its own."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from actors.chat import Chat, ChatSettings
from actors.engine import Engine, EngineDied
from actors.weights import Staged
from buffer.client import BufferClient, Fenced
from buffer.schema import Problem
from launch.tiny import TinySettings, new_model, train_tokenizer
from sandbox.server import SandboxServer
from sandbox.settings import SandboxSettings
from tests.rollout_neighbours import (
    BUFFER,
    LIMIT_S,
    RUN,
    Say,
    StandIn,
    filtering,
    fixed,
    neighbours,
    rows,
    until,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

GROUPS_OF_TURNS = "SELECT group_id, version_runs FROM turns WHERE group_id >= 0"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that knows nothing, with its tokenizer."""
    settings = TinySettings(vocabulary=400, num_layers=2, width=64, num_heads=2, num_kv_heads=1, mlp_width=128)
    tokenizer = train_tokenizer(settings, [f"user\n{n} + 1" for n in range(50)])
    tokenizer.save_pretrained(tmp_path / "model")
    new_model(settings, tokenizer, 1).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
async def test_a_run_from_its_first_version_to_done(tmp_path: Path, model: Path) -> None:
    """Evaluation, four groups on the first version, a swap, the rest on the second, evaluation, done."""
    async with neighbours(tmp_path / "run", model) as (buffer, made, learner):
        running = asyncio.create_task(made.run())
        await learner.begin_a_life()
        await until(learner, lambda status: status["groups"]["at_roc"] == 4, running)
        await learner.begin_a_life()
        second = learner.client.epoch
        await until(learner, lambda s: s["peers"]["rollout-0"]["snapshot"]["gauges"].get("lineage") == second, running)
        filter_ = filtering(buffer)
        await asyncio.wait_for(running, LIMIT_S)
        await asyncio.wait_for(filter_, 10)
    index = tmp_path / "run"
    assert rows(index, "SELECT DISTINCT state, attempt FROM rollouts") == [("finished", 1)]
    assert rows(index, "SELECT count(*) FROM rollouts") == [(6 * 4 + 2 * 3,)]
    lineages = {group: {run[0] for run in json.loads(runs)} for group, runs in rows(index, GROUPS_OF_TURNS)}
    first = second - 1
    assert [lineages[group] for group in range(6)] == [{first}] * 4 + [{second}] * 2
    evaluations = dict(rows(index, "SELECT phase, lineage FROM evaluations"))
    assert evaluations == {"start": first, "end": second}
    assert rows(index, "SELECT lineage, version FROM acknowledgements ORDER BY 1") == [(first, 0), (second, 0)]
    assert rows(index, "SELECT state FROM peers WHERE name = 'rollout-0'") == [("gone",)]


def stand_in(monkeypatch: pytest.MonkeyPatch, say: Say) -> StandIn:
    engine = StandIn(say)

    async def start(*_: Any, **__: Any) -> StandIn:
        return engine

    monkeypatch.setattr(Engine, "start", start)
    return engine


async def test_a_rollout_that_fails_is_excluded_with_its_error_and_the_others_go_on(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def say(number: int, context: Sequence[int]) -> None:
        if number == 5:
            raise RuntimeError("something nobody thought of")

    engine = stand_in(monkeypatch, say)
    async with neighbours(tmp_path / "run", model) as (buffer, made, learner):
        running = asyncio.create_task(made.run())
        await learner.begin_a_life()
        filter_ = filtering(buffer)
        await asyncio.wait_for(running, 30)
        await asyncio.wait_for(filter_, 10)
    states = rows(tmp_path / "run", "SELECT state, excluded_reason, count(*) FROM rollouts GROUP BY 1, 2 ORDER BY 1")
    assert states == [("excluded", "failed", 1), ("finished", "", 29)]
    assert engine.closed


async def test_an_actor_runs_once_its_first_version_is_acknowledged_not_before(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that hangs while it starts or loads stays "starting", which the driver gives a deadline."""
    swapping, may_swap, running = asyncio.Event(), asyncio.Event(), asyncio.Event()
    stages: list[str] = []

    def on_stage(stage: str) -> None:
        if stages[-1:] != [stage]:
            stages.append(stage)
        if stage == "running":
            running.set()

    class Slow(StandIn):
        async def swap(self, staged: Staged) -> float:
            swapping.set()
            await may_swap.wait()
            return await super().swap(staged)

    async def say(number: int, context: Sequence[int]) -> None: ...

    async def start(*_: Any, **__: Any) -> StandIn:
        return Slow(say)

    monkeypatch.setattr(Engine, "start", start)
    async with neighbours(tmp_path / "run", model, on_stage=on_stage) as (_, made, learner):
        work = asyncio.create_task(made.run())
        await until(learner, lambda _: stages == ["starting", "waiting"], work)
        await learner.begin_a_life()
        await asyncio.wait_for(swapping.wait(), 30)
        assert stages == ["starting", "waiting", "starting"]
        may_swap.set()
        await asyncio.wait_for(running.wait(), 30)
        assert stages == ["starting", "waiting", "starting", "running"]
        assert rows(tmp_path / "run", "SELECT loaded_version FROM peers WHERE name = 'rollout-0'") == [(0,)]
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def test_calls_are_run_by_the_sandbox_and_answers_graded(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Chat(AutoTokenizer.from_pretrained(model), ChatSettings())
    arguments = {"code": "print(7 + 1)", "input": ""}
    call = chat.turn_ids(
        f"<tool_call>{json.dumps({'name': chat.settings.tool_name, 'arguments': arguments})}</tool_call>"
    )

    async def say(number: int, context: Sequence[int]) -> list[int]:
        return call if context == chat.prompt_ids("7 + 1") else chat.turn_ids("<answer>\\boxed{8}</answer>")

    problems = [Problem(id=f"p{index}", problem="7 + 1", answer="8") for index in range(6)]
    settings = BUFFER.model_copy(update={"evaluation_problems": 0})
    stand_in(monkeypatch, say)
    sandbox = SandboxServer(SandboxSettings(workers=1))
    endpoint = await sandbox.start()
    try:
        world = neighbours(tmp_path / "run", model, endpoint, settings=settings, problems=problems)
        async with world as (_, made, learner):
            running = asyncio.create_task(made.run())
            await learner.begin_a_life()
            await until(learner, lambda status: status["groups"]["at_roc"] == 4, running)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    finally:
        await sandbox.stop()
    found = rows(tmp_path / "run", "SELECT DISTINCT reward, verdict, answer, num_turns, statuses, end FROM rollouts")
    assert found == [(1.0, "right", "8", 2, '["ok"]', "answer")]


async def test_a_dead_engine_ends_the_actor_and_its_rollouts_are_free_for_others(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def say(number: int, context: Sequence[int]) -> None:
        if number == 5:
            raise EngineDied("its processes are gone")

    engine = stand_in(monkeypatch, say)
    async with neighbours(tmp_path / "run", model) as (_, made, learner):
        await learner.begin_a_life()
        with pytest.raises(EngineDied, match="its processes are gone"):
            await asyncio.wait_for(made.run(), 30)
        assert (await learner.client.status())["rollouts"]["leased"] == 0
    assert rows(tmp_path / "run", "SELECT state FROM peers WHERE name = 'rollout-0'") == [("failed",)]
    assert engine.closed


async def test_a_second_life_under_the_same_name_fences_the_first(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generating, forever = asyncio.Event(), asyncio.Event()

    async def say(number: int, context: Sequence[int]) -> None:
        generating.set()
        await forever.wait()

    stand_in(monkeypatch, say)
    async with neighbours(tmp_path / "run", model) as (buffer, made, learner):
        running = asyncio.create_task(made.run())
        await learner.begin_a_life()
        await asyncio.wait_for(generating.wait(), 30)
        other = BufferClient(fixed(buffer), run=RUN, role="rollout", name="rollout-0")
        await other.connect()
        with pytest.raises(Fenced):
            await asyncio.wait_for(running, 30)
        await other.close()


async def test_stopping_an_actor_takes_its_requests_back_and_says_goodbye(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generating, taken_back = asyncio.Event(), asyncio.Event()

    async def say(number: int, context: Sequence[int]) -> None:
        generating.set()
        try:
            await asyncio.Event().wait()
        finally:
            taken_back.set()

    engine = stand_in(monkeypatch, say)
    async with neighbours(tmp_path / "run", model) as (_, made, learner):
        running = asyncio.create_task(made.run())
        await learner.begin_a_life()
        await asyncio.wait_for(generating.wait(), 30)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert taken_back.is_set()
    assert engine.closed
    assert rows(tmp_path / "run", "SELECT state FROM peers WHERE name = 'rollout-0'") == [("gone",)]

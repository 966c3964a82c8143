"""The rollout actor among real neighbours: buffer, sandbox, RoC filter, weight server, and an engine of its own."""

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from actors.chat import Chat, ChatSettings
from actors.engine import Engine, EngineDied, Generation, Occupancy
from actors.roc import RocSettings
from actors.roc_filter import RocFilter
from actors.rollout import RolloutActor
from actors.settings import RolloutSettings, WeightsSettings
from actors.weights import Staged
from buffer.client import BufferClient, Fenced
from buffer.schema import Problem, VersionRun
from buffer.server import BufferServer
from buffer.settings import BufferSettings
from launch.tiny import TinySettings, new_model, train_tokenizer
from learner.weights import WeightServer, pack
from sandbox.server import SandboxServer
from sandbox.settings import SandboxSettings

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

RUN = "r1"
LIMIT_S = 180.0
"""An engine starts in 15 s on an idle machine, and in a minute on a crowded one."""
GROUPS_OF_TURNS = "SELECT group_id, version_runs FROM turns WHERE group_id >= 0"
ROLLOUT = RolloutSettings(
    dtype="float32", device="cpu", max_length=300, max_new_tokens=60, max_turns=2, concurrency=16, kv_cache_mib=8
)
BUFFER = BufferSettings(
    steps=5, max_staleness=1, groups_per_step=2, group_size=2, num_rollouts=4, heartbeat_s=0.2, dead_after_s=10.0,
    evaluation_problems=3,
)  # fmt: skip


def problem(index: int) -> Problem:
    return Problem(id=f"p{index}", problem=f"{index} + 1", answer=str(index + 1))


def fixed(endpoint: str) -> Callable[[], Awaitable[str]]:
    async def resolve() -> str:
        return endpoint

    return resolve


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that knows nothing, with its tokenizer."""
    settings = TinySettings(vocabulary=400, num_layers=2, width=64, num_heads=2, num_kv_heads=1, mlp_width=128)
    tokenizer = train_tokenizer(settings, [f"user\n{n} + 1" for n in range(50)])
    tokenizer.save_pretrained(tmp_path / "model")
    new_model(settings, tokenizer, 1).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


class Learner:
    """The learner's part that matters here: publications, put on record before they are served."""

    def __init__(self, model: Path, buffer: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.server = WeightServer()
        self.client = BufferClient(fixed(buffer), run=RUN, role="learner", name="learner-0")

    async def begin_a_life(self) -> None:
        """Publishes version 0, under the lineage of a new life."""
        lineage = (await self.client.connect()).epoch
        await self.client.record_publication(lineage, 0)
        tensors = ((name, parameter.detach()) for name, parameter in self._model.named_parameters())
        self.server.publish(pack(tensors, lineage=lineage, version=0, bucket_bytes=1 << 16))


@contextlib.asynccontextmanager
async def neighbours(
    directory: Path, model: Path, sandbox: str = "tcp://127.0.0.1:9"
) -> AsyncIterator[tuple[str, RolloutActor, Learner]]:
    """The buffer's endpoint, an actor that is not running yet, and a learner that has published nothing yet."""
    problems = [problem(index) for index in range(6)]
    held_out = [problem(100 + index) for index in range(3)]
    buffer = BufferServer(BUFFER, directory, RUN, lambda i: problems[i] if i < len(problems) else None, held_out)
    endpoint = await buffer.start()
    learner = Learner(model, endpoint)
    try:
        yield endpoint, actor(model, endpoint, sandbox, learner.server.endpoint), learner
    finally:
        await learner.client.close()
        learner.server.close()
        await buffer.stop()


def actor(model: Path, buffer: str, sandbox: str, weights: str) -> RolloutActor:
    async def sandboxes() -> list[str]:
        return [sandbox]

    return RolloutActor(
        model=model,
        rollout=ROLLOUT,
        weights=WeightsSettings(),
        chat=ChatSettings(),
        buffer_resolve=fixed(buffer),
        sandbox_resolve=sandboxes,
        weights_resolve=fixed(weights),
        name="rollout-0",
        run=RUN,
        heartbeat_s=BUFFER.heartbeat_s,
    )


def filtering(buffer: str) -> asyncio.Task[None]:
    return asyncio.create_task(RocFilter(RocSettings(), 1, fixed(buffer), "filter-0", run=RUN).run())


async def until(learner: Learner, reached: Callable[[dict[str, Any]], bool], *running: asyncio.Task[None]) -> None:
    """Asks the buffer for its status until that is so; whatever ends meanwhile says why."""
    async with asyncio.timeout(LIMIT_S):
        while not reached(await learner.client.status()):
            await asyncio.wait(running, timeout=0.05)
            for task in running:
                if task.done():
                    task.result()


def rows(directory: Path, sql: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(directory / "buffer" / "index.sqlite")) as index:
        return index.execute(sql).fetchall()


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


Say = Callable[[int, Sequence[int]], Awaitable[list[int] | None]]


class StandIn:
    """An engine without a model: what it says is up to `say`, given the number of the generation and the context."""

    def __init__(self, say: Say) -> None:
        self._say, self._generations = say, 0
        self.loaded, self.kv_capacity_tokens, self.block_tokens = (-1, -1), 4096, 32
        self.closed = False

    async def generate(self, context: Sequence[int], *, max_new_tokens: int, **_: Any) -> Generation:
        number, self._generations = self._generations, self._generations + 1
        said = await self._say(number, context)
        ids = np.asarray(said or [300 + number % 50] * max_new_tokens, dtype=np.int32)
        return Generation(
            token_ids=ids,
            logprobs=np.zeros(len(ids), dtype=np.float32),
            version_runs=(VersionRun(lineage=self.loaded[0], version=self.loaded[1], num_tokens=len(ids)),),
            stopped=said is not None,
            cached_tokens=0,
            generate_s=0.0,
        )

    async def swap(self, staged: Staged) -> float:
        self.loaded = (staged.manifest.lineage, staged.manifest.version)
        return 0.0

    async def occupancy(self) -> Occupancy:
        return Occupancy(running=0, waiting=0, kv_tokens=0, kv_capacity_tokens=4096)

    async def close(self) -> None:
        self.closed = True


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
    assert states == [("excluded", "RuntimeError: something nobody thought of", 1), ("finished", "", 29)]
    assert engine.closed


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

    monkeypatch.setattr(
        "tests.test_rollout.problem", lambda index: Problem(id=f"p{index}", problem="7 + 1", answer="8")
    )
    monkeypatch.setattr("tests.test_rollout.BUFFER", BUFFER.model_copy(update={"evaluation_problems": 0}))
    stand_in(monkeypatch, say)
    sandbox = SandboxServer(SandboxSettings(workers=1))
    endpoint = await sandbox.start()
    try:
        async with neighbours(tmp_path / "run", model, endpoint) as (_, made, learner):
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

"""Whom a rollout actor works with, in tests: real buffer, weight server, RoC filter; an engine without a model."""

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.chat import ChatSettings
from actors.engine import Generation, Occupancy
from actors.roc import RocSettings
from actors.roc_filter import RocFilter
from actors.rollout import RolloutActor
from actors.settings import RolloutSettings, WeightsSettings
from actors.weights import Staged
from buffer.client import BufferClient
from buffer.schema import Problem, VersionRun
from buffer.server import BufferServer
from buffer.settings import BufferSettings
from learner.weights import WeightServer, pack

RUN = "r1"
LIMIT_S = 180.0
"""An engine starts in 15 s on an idle machine, and in a minute on a crowded one."""
ROLLOUT = RolloutSettings(
    dtype="float32", device="cpu", max_length=300, max_new_tokens=60, max_turns=2, concurrency=16, kv_cache_mib=8
)
BUFFER = BufferSettings(
    steps=5, max_staleness=1, groups_per_step=2, group_size=2, num_rollouts=4, heartbeat_s=0.2, dead_after_s=10.0,
    evaluation_problems=3,
)  # fmt: skip


def problem(index: int) -> Problem:
    return Problem(id=f"p{index}", problem=f"{index} + 1", answer=str(index + 1))


PROBLEMS = [problem(index) for index in range(6)]
HELD_OUT = [problem(100 + index) for index in range(3)]


def fixed(endpoint: str) -> Callable[[], Awaitable[str]]:
    async def resolve() -> str:
        return endpoint

    return resolve


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
    directory: Path,
    model: Path,
    sandbox: str = "tcp://127.0.0.1:9",
    *,
    settings: BufferSettings = BUFFER,
    problems: Sequence[Problem] = PROBLEMS,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> AsyncIterator[tuple[str, RolloutActor, Learner]]:
    """The buffer's endpoint, an actor that is not running yet, and a learner that has published nothing yet."""
    buffer = BufferServer(settings, directory, RUN, lambda i: problems[i] if i < len(problems) else None, HELD_OUT)
    endpoint = await buffer.start()
    learner = Learner(model, endpoint)
    try:
        yield endpoint, actor(model, endpoint, sandbox, learner.server.endpoint, on_stage), learner
    finally:
        await learner.client.close()
        learner.server.close()
        await buffer.stop()


def actor(
    model: Path,
    buffer: str,
    sandbox: str,
    weights: str,
    on_stage: Callable[[str], None],
) -> RolloutActor:
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
        on_stage=on_stage,
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

"""A buffer in its own process, and peers that make tiny turns: shared by the tests of the buffer.

`python -m tests.buffers DIRECTORY BIND SETTINGS-JSON SNAPSHOT-BYTES` serves until SIGTERM and prints its endpoint
first.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from buffer import journal, spare
from buffer.client import BufferClient
from buffer.schema import Decision, Finish, Lease, Loaded, Problem, Turn, VersionRun
from buffer.server import BufferServer
from buffer.settings import BufferSettings

RUN = "run-1"


def settings(**changes: Any) -> BufferSettings:
    """P = 2, S = 1, G = 2 of 4 rollouts, no evaluation, quick deadlines."""
    fields: dict[str, Any] = {
        "steps": 100,
        "max_staleness": 1,
        "groups_per_step": 2,
        "group_size": 2,
        "num_rollouts": 4,
        "evaluation_problems": 0,
        "heartbeat_s": 0.1,
        "dead_after_s": 30.0,
    }
    return BufferSettings(**(fields | changes))


def problem(index: int) -> Problem:
    return Problem(id=f"p{index}", problem=f"{index} + 1 = ?", answer=str(index + 1))


def turn(lease: Lease, number: int, *, version: int | None = None, num_tokens: int = 5, **changes: Any) -> Turn:
    """A turn whose tokens tell where it belongs."""
    stamp = lease.base if version is None else version
    first = 1000 * (lease.group + 1000) + 100 * lease.rollout + 10 * number
    fields: dict[str, Any] = {
        "group": lease.group,
        "rollout": lease.rollout,
        "attempt": lease.attempt,
        "turn": number,
        "prompt_ids": np.arange(3 if number == 0 else 0, dtype=np.int32),
        "output_ids": np.arange(first, first + num_tokens, dtype=np.int32),
        "logprobs": np.full(num_tokens, -0.25 * (number + 1), np.float32),
        "version_runs": (VersionRun(lineage=1, version=stamp, num_tokens=num_tokens),),
        "observation_ids": np.arange(2, dtype=np.int32),
        "code": "print(1)",
        "status": "ok",
        "observation": "1",
    }
    return Turn(**(fields | changes))


def finish(lease: Lease, num_turns: int, reward: float) -> Finish:
    return Finish(
        group=lease.group,
        rollout=lease.rollout,
        attempt=lease.attempt,
        reward=reward,
        verdict="right" if reward else "wrong",
        answer="1",
        well_formed=True,
        num_answers=1,
        num_turns=num_turns,
        statuses=("ok",) * num_turns,
        num_output_tokens=5 * num_turns,
        num_tokens=3 + 7 * num_turns,
        end="answer",
    )


async def complete(engine: BufferClient, lease: Lease, *, reward: float | None = None) -> None:
    """Two turns and the score: odd rollouts are right."""
    for number in range(len(lease.turns), 2):
        await engine.push_turn(turn(lease, number))
    await engine.finish(finish(lease, 2, float(lease.rollout % 2) if reward is None else reward))


async def decide_all(roc: BufferClient, *, drop: str = "") -> int:
    """Decide on every group that waits; how many."""
    count = 0
    while (headers := await roc.next_group(0.0)) is not None:
        await roc.decide(Decision(group=headers.group, keep=() if drop else (0, 1), drop_reason=drop))
        count += 1
    return count


def client(endpoint: str, role: str, name: str, **options: Any) -> BufferClient:
    async def resolve() -> str:
        return endpoint

    return BufferClient(resolve, run=RUN, role=role, name=name, **options)


def rows(directory: Path, sql: str) -> list[tuple[Any, ...]]:
    """What the index holds."""
    with closing(sqlite3.connect(directory / "buffer" / "index.sqlite")) as db:
        return db.execute(sql).fetchall()


class Peers:
    """Connected clients of one buffer, closed together."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._clients: list[BufferClient] = []

    async def join(self, role: str, name: str, **options: Any) -> BufferClient:
        one = client(self.endpoint, role, name, **options)
        self._clients.append(one)
        await one.connect()
        return one

    async def learner(self) -> BufferClient:
        """Rank 0, with the newest version published under its lineage."""
        one = client(self.endpoint, "learner", "learner-0")
        self._clients.append(one)
        welcome = await one.connect()
        await one.record_publication(welcome.epoch, max(welcome.published_version, 0))
        return one

    async def engine(self, name: str, lineage: int = 1, version: int = 0) -> BufferClient:
        one = await self.join("rollout", name)
        await one.loaded(Loaded(lineage=lineage, version=version, checksum=1, pause_s=0.0))
        return one

    async def close(self) -> None:
        for one in self._clients:
            await one.close()


@asynccontextmanager
async def serving(directory: Path, chosen: BufferSettings, **options: Any) -> AsyncIterator[Peers]:
    """A buffer on this loop."""
    problems, heldout, live = options.get("problems", problem), options.get("heldout", ()), options.get("live", {})
    server = BufferServer(chosen, directory, options.get("run", RUN), problems, heldout, live)
    peers = Peers(await server.start())
    try:
        yield peers
    finally:
        await peers.close()
        await server.stop()


class Process:
    """A buffer in a process of its own, at one address over its lives."""

    def __init__(self, directory: Path, chosen: BufferSettings, snapshot_bytes: int = spare.SNAPSHOT_BYTES) -> None:
        self._directory, self._settings, self._snapshot_bytes = directory, chosen, snapshot_bytes
        self.endpoint = "tcp://127.0.0.1:0"

    async def start(self) -> str:
        told = (str(self._directory), self.endpoint, self._settings.model_dump_json(), str(self._snapshot_bytes))
        arguments = ("-m", "tests.buffers", *told)
        self.child = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
        assert self.child.stdout is not None
        self.endpoint = (await self.child.stdout.readline()).decode().strip()
        return self.endpoint

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        if self.child.returncode is None:
            self.child.send_signal(number)
            self.child.send_signal(signal.SIGCONT)
        return await self.child.wait()


Maker: TypeAlias = Callable[..., Process]
"""Changed settings -> a buffer that is not started yet; the fixture `make_buffer`."""


async def _serve(directory: Path, bind: str, chosen: BufferSettings) -> None:
    server = BufferServer(chosen, directory, RUN, problem, [problem(1000 + index) for index in range(4)])
    print(await server.start(bind), flush=True)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: loop.create_task(server.stop()))
    await server.run_until_stopped()


if __name__ == "__main__":
    spare.SNAPSHOT_BYTES = int(sys.argv[4])
    journal.MAX_FILE_BYTES = min(journal.MAX_FILE_BYTES, spare.SNAPSHOT_BYTES // 4)
    asyncio.run(_serve(Path(sys.argv[1]), sys.argv[2], BufferSettings(**json.loads(sys.argv[3]))))

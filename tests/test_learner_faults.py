"""The learner killed at every fault point, in each order, against the real buffer: real processes, real SIGKILLs.

A point is a moment between two things that a step does: take, train, checkpoint, record, publish, acknowledgement.
One run lives through all of them: each life of the learner dies at the next point of a sequence that holds every
ordered pair, with lives among them that die while they recompute or republish. Then it ends undisturbed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from buffer.client import BufferClient
from learner.checkpoint import complete_steps, read_mark, step_directory
from learner.trainer import Trainer
from tests import audit
from tests.learner_batches import make_model
from tests.learner_process import RUN, spec
from tests.learner_world import World

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

ENGINES = ("received", "acknowledged")
"""points at which the engine, not the learner, has just done something with the new version"""
POINTS = ("taken", "trained", "checkpointed", "packed", "recorded", "published", "acknowledged")
OTHERS = ("restored", "recomputed", "received", "republished")
"""points in between: mostly of a life that has not come to a new step yet"""
EVERY = 2
"""steps between two checkpoints"""


def each_order(points: Sequence[str]) -> list[str]:
    """A shortest sequence in which each point is followed by each, itself included (an Eulerian circuit)."""
    left = {point: list(points) for point in points}
    path, circuit = [points[0]], []
    while path:
        if left[path[-1]]:
            path.append(left[path[-1]].pop())
        else:
            circuit.append(path.pop())
    return circuit[::-1]


def sequence() -> Iterator[str]:
    """Every pair of points; now and then a death while the one before is made up for, or between two of them."""
    for number, point in enumerate(each_order(POINTS)):
        yield point
        if number % 6 == 5:
            yield OTHERS[number // 6 % len(OTHERS)]


def test_the_sequence_holds_every_pair_once() -> None:
    pairs = list(pairwise(each_order(POINTS)))
    assert len(pairs) == len(set(pairs)) == len(POINTS) ** 2


class Lives:
    """One life of the learner after the other; imports are done once, each life is a process of its own."""

    def __init__(self, world: World, model_dir: Path, directory: Path, mother: asyncio.subprocess.Process) -> None:
        self._world, self._model_dir, self._directory, self._mother = world, model_dir, directory, mother
        self._pid = 0
        self._at: tuple[str, int] = ("", -1)
        world.on_phase = self._engine_did

    def _engine_did(self, phase: str, version: int) -> None:
        if phase == self._at[0] and version >= self._at[1]:  # engines may skip versions
            self._at = ("", -1)
            os.kill(self._pid, signal.SIGKILL)

    async def one(self, phase: str = "", step: int = -1) -> tuple[int, list[str]]:
        """A whole life, which ends at a phase of a step if one is given; its exit status and what it printed."""
        assert self._mother.stdin is not None
        self._at = (phase, step) if phase in ENGINES else ("", -1)
        kill = f"{phase}:{step}" if phase and phase not in ENGINES else ""
        arguments = [self._world.endpoint, str(self._model_dir), str(self._directory), "0", "1", "0", kill]
        self._mother.stdin.write(f"{json.dumps(arguments)}\n".encode())
        told = []
        while True:
            told.append(await self._line())
            if told[-1].startswith("born "):
                self._pid = int(told[-1].split()[1])
            elif told[-1].startswith("tcp://"):
                self._world.weights_at(told[-1])
            elif told[-1].startswith("dead "):
                return int(told[-1].split()[1]), told

    async def _line(self) -> str:
        assert self._mother.stdout is not None
        line = await self._mother.stdout.readline()
        assert line, "the mother of all lives has ended"
        return line.decode().strip()


@contextlib.asynccontextmanager
async def lives(world: World, model_dir: Path, directory: Path) -> AsyncIterator[Lives]:
    mother = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.learner_process"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield Lives(world, model_dir, directory, mother)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(mother.pid, signal.SIGKILL)  # the life at hand with it
        await mother.communicate()


class Ledger:
    """What the buffer has on record, read from its index like any other reader; nothing on record may change."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._batches: dict[int, bytes] = {}

    def rows(self, sql: str) -> list[tuple]:
        with contextlib.closing(
            sqlite3.connect(f"file:{self._directory / 'buffer' / 'index.sqlite'}?mode=ro", uri=True)
        ) as db:
            return db.execute(sql).fetchall()

    def published(self) -> int:
        return self.rows("SELECT coalesce(max(version), 0) FROM publications")[0][0]

    def check(self) -> None:
        batches = dict(self.rows("SELECT step, record FROM batches"))
        assert {step: batches.get(step) for step in self._batches} == self._batches
        self._batches = batches
        publications = self.rows("SELECT lineage, version FROM publications ORDER BY unix_s, lineage, version")
        for (lineage, version), (next_lineage, next_version) in pairwise(publications):
            assert next_lineage >= lineage
            assert next_version >= version, publications


def moment(point: str, ledger: Ledger, directory: Path) -> tuple[str, int]:
    """The phase and its step at which the next life comes to `point`."""
    saved, published = max(complete_steps(directory / "checkpoints"), default=0), ledger.published()
    step = max(saved, published)
    if point == "restored":
        return "restored", saved
    if point == "republished":
        return "published", step
    if point == "recomputed":
        return ("trained", saved) if saved < step else ("recorded", step)
    if point == "checkpointed":
        return point, step + EVERY - step % EVERY
    return point, step if point in ("taken", "trained") else step + 1


async def test_killed_at_every_point_in_each_order_each_batch_is_in_the_weights_once(tmp_path: Path) -> None:
    model_dir = make_model(tmp_path / "model", hidden_size=32)
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "recipe.toml").write_text('[roc]\nmode = "off"\n')  # the audit reads it: all rollouts are kept
    ledger, steps = Ledger(directory), 80
    async with World(directory, steps=steps) as world, asyncio.timeout(600):
        async with lives(world, model_dir, directory) as learner:
            for count, point in enumerate(sequence(), 1):
                phase, step = moment(point, ledger, directory)
                assert step < steps, f"the run is over before {point}, death {count}"
                status, told = await learner.one(phase, step)
                assert status == -signal.SIGKILL, f"{phase} of {step} did not come: {told}"
                ledger.check()
            status, told = await learner.one()
            assert status == 0, told
        ledger.check()
        replayed = await replay(world, model_dir, tmp_path / "replay", steps)
    assert_each_batch_once(directory, steps, replayed)
    assert world.loaded == sorted(set(world.loaded)), "engines never go back, nor does the lineage"
    assert [version for _, version in world.loaded] == sorted(version for _, version in world.loaded)
    report = audit.audit(directory)
    assert report.sound, "\n".join(report.lines())


def assert_each_batch_once(directory: Path, steps: int, replayed: dict[str, torch.Tensor]) -> None:
    """By the totals that travel with the weights, by the log of steps, and by the weights, bit for bit."""
    totals = read_mark(step_directory(directory / "checkpoints", steps))[0].totals
    lines = [json.loads(line) for line in (directory / "metrics" / "steps.jsonl").read_text().splitlines()]
    last = {line["step"]: line for line in lines}
    assert (totals.steps, sorted(last)) == (steps, list(range(steps)))
    assert totals.tokens == sum(line["tokens"] for line in last.values())
    assert len(lines) > steps, "steps were recomputed"
    for line in lines:
        assert (line["tokens"], line["reward_mean"], line["ages"]) == (
            last[line["step"]]["tokens"],
            last[line["step"]]["reward_mean"],
            last[line["step"]]["ages"],
        )
    export = exported(directory)
    assert export.keys() == replayed.keys()
    assert all(torch.equal(export[name], replayed[name]) for name in export)


async def replay(world: World, model_dir: Path, directory: Path, steps: int) -> dict[str, torch.Tensor]:
    """The recorded batches once more, in one go, without publication or checkpoint."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums depend on it
    client = BufferClient(world.resolve, run=RUN, role="learner", name="learner-7")
    await client.connect()
    trainer = Trainer(spec(model_dir, directory), rank=0, world=1)
    for step in range(steps):
        batch = await client.take(step, 1.0)
        assert batch is not None
        trainer.train(batch, await client.fetch(trainer.share(batch)))
    trainer.export()
    await client.close()
    torch.set_num_threads(threads)
    return exported(directory)


def exported(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "export" / "model.safetensors")

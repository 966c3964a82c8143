"""A run directory copied with whatever tool while a real buffer works in it: what was acknowledged is in the copy."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import sqlite3
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from buffer.client import BufferClient, LeaseOver
from buffer.codec import decode
from buffer.index import NEEDED, IndexFault
from buffer.schema import Batch, Lease, Turn
from buffer.segments import split
from launch.copying import copy
from tests.buffers import Peers, Process, complete, decide_all, finish, serving, settings, turn
from tests.test_buffer_crash import Trial

pytestmark = pytest.mark.slow

LONG_TOKENS = 4000
"""about twenty turns fill a segment of one MiB"""
SNAPSHOT_BYTES = 1 << 16
STEPS = 100_000
COPIES = 6


class Load(Trial):
    """A run of long turns, whose learner checkpoints after each step so that segments go."""

    work: asyncio.Future[Any]

    async def stop(self) -> None:
        """The buffer goes on without work."""
        self.over.set()
        _, pending = await asyncio.wait([self.work], timeout=3.0)
        if pending:
            self.work.cancel()
            await asyncio.wait([self.work])

    async def rollout(self, engine: BufferClient, lease: Lease, loaded: int) -> None:
        with contextlib.suppress(LeaseOver):
            for number in range(len(lease.turns), 2):
                one = turn(lease, number, version=loaded, num_tokens=LONG_TOKENS)
                await engine.push_turn(one)
                self.acknowledged[lease.group, lease.rollout, number] = one.output_ids.tolist()
                async with self.progress:
                    self.progress.notify_all()
            await engine.finish(finish(lease, 2, float(lease.rollout % 2)))

    async def learner(self) -> None:
        learner = await self.peers.learner()
        self.published.set()
        for step in range(self.steps):
            while (batch := await learner.take(step, 0.3)) is None and not self.over.is_set():
                pass
            if self.over.is_set():
                return
            self.batches[step] = batch
            await learner.record_publication(1, step + 1)
            await learner.record_checkpoint(step + 1)
            self.version = step + 1


@pytest.fixture
async def load(tmp_path: Path) -> AsyncIterator[Load]:
    """Under way, with SQLite's own checkpoints as often as can be."""
    buffer = Process(tmp_path / "run", settings(steps=STEPS, segment_mib=1), SNAPSHOT_BYTES)
    peers = Peers(await buffer.start())
    trial = Load(peers, STEPS)
    checkpoints = asyncio.create_task(asyncio.to_thread(_checkpoint_often, tmp_path / "run", trial.over))
    work = asyncio.gather(trial.learner(), trial.roc(), trial.engine("rollout-0"), trial.engine("rollout-1"))
    trial.work = asyncio.gather(checkpoints, work, return_exceptions=True)
    yield trial
    await trial.stop()
    await peers.close()
    await buffer.kill()


def _checkpoint_often(run: Path, over: asyncio.Event) -> None:
    with closing(sqlite3.connect(run / "buffer" / "index.sqlite", timeout=30.0)) as db:
        while not over.is_set():
            db.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
            time.sleep(0.002)


def in_any_order(source: Path, target: Path, dice: random.Random) -> None:
    """As slow a copy as there is, in an order that no tool would choose."""
    (target / "buffer" / "segments").mkdir(parents=True)
    (target / "buffer" / "spare").mkdir()
    folders = [source / "buffer", source / "buffer" / "spare", source / "buffer" / "segments"]
    for folder in dice.sample(folders, 3):
        names = [path for path in folder.iterdir() if path.is_file()]
        for path in dice.sample(names, len(names)):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(path, target / path.relative_to(source))
        time.sleep(dice.uniform(0.0, 0.05))


async def go_on(directory: Path, steps: list[int]) -> str:
    """A real buffer takes the copy up and gets a step further; why not, where it refuses."""
    try:
        await _step_further(directory, steps)
    except IndexFault as fault:
        return str(fault)
    return ""


async def _step_further(directory: Path, steps: list[int]) -> None:
    async with serving(directory, settings(steps=STEPS, segment_mib=1)) as peers:
        status = await (await peers.join("monitor", "monitor-0")).status()
        assert (status["life"], status["next_step"] > max(steps, default=-1)) == (2, True)
        learner, roc = await peers.learner(), await peers.join("filter", "filter-0")
        version = max(status["published"]["version"], 0)
        await peers.join("rollout", "rollout-1")  # their new lives free what the old ones had in hand
        engine = await peers.engine("rollout-0", lineage=learner.epoch, version=version)
        while (batch := await learner.take(status["next_step"], 0.05)) is None:
            for lease in await engine.lease(100, version, 0.05):
                await complete(engine, lease)
            await decide_all(roc)
        assert isinstance(batch, Batch)


def audit(directory: Path, acknowledged: dict[tuple[int, int, int], list[int]], batches: dict[int, Any]) -> None:
    """Rows of all, payload of all that anybody may still ask for."""
    with closing(sqlite3.connect(directory / "buffer" / "index.sqlite")) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        turns = {
            row[:3]: row[3:]
            for row in db.execute("SELECT group_id, rollout, turn, segment, offset_bytes, length_bytes FROM turns")
        }
        kept = db.execute("SELECT min(version) FROM checkpoints WHERE kept").fetchone()[0] or 0
        needed = {row[0] for row in db.execute(NEEDED, (kept,))}
        taken = set(db.execute("SELECT step, group_id FROM groups WHERE step IS NOT NULL"))
    assert {(step, group.group) for step, batch in batches.items() for group in batch.groups} <= taken
    assert acknowledged.keys() <= turns.keys()
    num_read = 0
    for key, ids in acknowledged.items():
        segment, offset, length = turns[key]
        path = directory / "buffer" / "segments" / f"{segment:08d}.seg"
        if path.exists():
            with path.open("rb") as file:
                file.seek(offset)
                assert decode(Turn, *split(file.read(length), str(path))).output_ids.tolist() == ids
            num_read += 1
        assert path.exists() or segment not in needed
    assert num_read > 0


async def test_every_copy_of_a_running_directory_goes_on_with_all_that_was_acknowledged(
    load: Load, tmp_path: Path
) -> None:
    dice, run = random.Random(7), tmp_path / "run"
    copies: list[tuple[Path, dict[Any, list[int]], dict[int, Any]]] = []
    for number in range(COPIES):
        await load.acknowledges(dice.randrange(20, 60))
        target = tmp_path / f"copy-{number}"
        copies.append((target, dict(load.acknowledged), dict(load.batches)))
        if number % 2:
            await asyncio.to_thread(in_any_order, run, target, dice)
        else:
            command = ("cp", "-r", str(run), str(target))
            await asyncio.to_thread(subprocess.run, command, stderr=subprocess.DEVNULL, check=False)
    proper = (tmp_path / "proper", dict(load.acknowledged), dict(load.batches))
    await asyncio.to_thread(copy, run, proper[0])
    await load.stop()
    refused = 0
    for target, acknowledged, batches in copies:
        if told := await go_on(target, list(batches)):
            assert "copy the run again, with `rocstar copy RUN COPY`" in told
            refused += 1
        else:
            audit(target, acknowledged, batches)
    assert await go_on(proper[0], list(proper[2])) == ""
    audit(*proper)
    assert list((run / "buffer" / "spare").glob("*.sqlite")), "snapshots were made meanwhile"
    assert len(load.batches) > 5
    assert refused < COPIES

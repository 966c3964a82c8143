"""The buffer killed, stopped, starved of disk: real processes, real signals."""

from __future__ import annotations

import asyncio
import random
import resource
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from buffer.client import BufferClient, LeaseOver
from buffer.codec import decode
from buffer.schema import Decision, Lease, Loaded, Turn
from buffer.segments import Place, Segments
from tests.buffers import RUN, Maker, Peers, client, complete, decide_all, problem, serving, settings, turn

pytestmark = pytest.mark.slow


class Trial:
    """A small run around a buffer that is killed again and again; keeps its own log of what was acknowledged."""

    def __init__(self, peers: Peers, steps: int) -> None:
        self.peers, self.steps = peers, steps
        self.acknowledged: dict[tuple[int, int, int], list[int]] = {}
        self.version = 0
        self.batches: dict[int, Any] = {}
        self.over, self.published = asyncio.Event(), asyncio.Event()
        self.progress = asyncio.Condition()
        """notified at each acknowledged turn"""

    async def engine(self, name: str) -> None:
        await self.published.wait()
        engine = await self.peers.engine(name)
        loaded = 0
        while not self.over.is_set():
            if loaded != self.version:
                loaded = self.version
                await engine.loaded(Loaded(lineage=1, version=loaded, checksum=1, pause_s=0.0))
            leases = await engine.lease(3, loaded, 0.2)
            await asyncio.gather(*(self.rollout(engine, lease, loaded) for lease in leases))

    async def rollout(self, engine: BufferClient, lease: Lease, loaded: int) -> None:
        """Generate what is not durable yet; nothing that was acknowledged may be asked for again."""
        for number in range(4):
            known = (lease.group, lease.rollout, number) in self.acknowledged
            assert not known or number < len(lease.turns)
        try:
            for number in range(len(lease.turns), 2):
                one = turn(lease, number, version=loaded)
                await engine.push_turn(one)
                self.acknowledged[lease.group, lease.rollout, number] = one.output_ids.tolist()
                async with self.progress:
                    self.progress.notify_all()
            await complete(engine, Lease(**{name: getattr(lease, name) for name in _FIELDS}, turns=(one, one)))
        except LeaseOver:
            return

    async def acknowledges(self, num_turns: int) -> None:
        """Waits until so many turns more are acknowledged."""
        target = len(self.acknowledged) + num_turns
        async with self.progress:
            await self.progress.wait_for(lambda: len(self.acknowledged) >= target)

    async def roc(self) -> None:
        roc = await self.peers.join("filter", "filter-0")
        while not self.over.is_set():
            headers = await roc.next_group(0.2)
            if headers is not None:
                await roc.decide(Decision(group=headers.group, keep=(0, 1)))

    async def learner(self) -> None:
        learner = await self.peers.learner()
        self.published.set()
        for step in range(self.steps):
            while (batch := await learner.take(step, 1.0)) is None:
                pass
            self.batches[step] = batch
            await learner.fetch([(group.group, rollout) for group in batch.groups for rollout in group.rollouts])
            await learner.record_publication(1, step + 1)
            self.version = step + 1
        while await learner.heartbeat({}) != "done":
            pass
        self.over.set()


_FIELDS = ("group", "rollout", "attempt", "kind", "base", "deadline", "seed", "problem")


async def test_killed_at_random_moments_it_loses_nothing_that_was_acknowledged(
    make_buffer: Maker, tmp_path: Path
) -> None:
    buffer = make_buffer(steps=8, segment_mib=1, evaluation_problems=4)
    peers = Peers(await buffer.start())
    trial = Trial(peers, 8)
    dice = random.Random(5)
    work = asyncio.gather(trial.learner(), trial.roc(), trial.engine("rollout-0"), trial.engine("rollout-1"))
    for _ in range(4):  # 100 turns at most: 8 steps need more
        progress = asyncio.create_task(trial.acknowledges(dice.randrange(1, 26)))
        await asyncio.wait([work, progress], return_when=asyncio.FIRST_COMPLETED)
        assert not work.done()
        await asyncio.sleep(dice.uniform(0.0, 0.02))
        assert await buffer.kill() == -signal.SIGKILL
        await buffer.start()
    await work
    for step, batch in trial.batches.items():
        again = await peers.learner()
        assert await again.take(step, 0.0) == batch
    await peers.close()
    assert await buffer.kill(signal.SIGTERM) == 0
    _audit(tmp_path, trial)


def _audit(directory: Path, trial: Trial) -> None:
    """Every acknowledged turn is in the index once, and its payload is the one that was sent."""
    with sqlite3.connect(directory / "buffer" / "index.sqlite") as db:
        rows = db.execute("SELECT group_id, rollout, turn, segment, offset_bytes, length_bytes FROM turns").fetchall()
        taken = db.execute(
            "SELECT step, group_id FROM groups WHERE step IS NOT NULL ORDER BY step, group_id"
        ).fetchall()
        late = db.execute("SELECT count(*) FROM groups WHERE step > deadline_step OR step < base_version").fetchone()
        active = db.execute("SELECT count(*) FROM groups WHERE state IN ('waiting', 'leased')")
        scored = db.execute("SELECT count(reward) FROM groups JOIN rollouts USING (group_id) WHERE phase != ''")
        assert scored.fetchone() == (8,)
        assert active.fetchone() == (0,)
    assert late == (0,)
    groups = [(step, group.group) for step, batch in trial.batches.items() for group in batch.groups]
    assert taken == sorted(groups)
    assert len({group for _, group in groups}) == len(groups) == 16
    places = [Place(segment=s, offset_bytes=o, length_bytes=n) for *_, s, o, n in rows]
    reader = Segments(directory / "buffer" / "segments", 1 << 20, max(p.segment for p in places), _end(places))
    stored = {}
    for (group, rollout, number, *_), (body, payload) in zip(rows, reader.read(places), strict=True):
        stored[group, rollout, number] = decode(Turn, body, payload).output_ids.tolist()
    reader.close()
    assert len(trial.acknowledged) > 100
    assert {key: stored.get(key) for key in trial.acknowledged} == trial.acknowledged


def _end(places: list[Place]) -> int:
    last = max(place.segment for place in places)
    return max(p.offset_bytes + p.length_bytes for p in places if p.segment == last)


async def test_epochs_attempts_and_records_outlive_the_process(make_buffer: Maker, tmp_path: Path) -> None:
    buffer = make_buffer(heartbeat_s=0.05, dead_after_s=4.0)
    peers = Peers(await buffer.start())
    learner = await peers.learner()
    gone, engine = await peers.engine("rollout-0"), await peers.engine("rollout-1")
    leases = await gone.lease(1, 0, 1.0)
    await gone.push_turn(turn(leases[0], 0))
    rest = await engine.lease(100, 0, 1.0)
    taking = asyncio.create_task(learner.take(0, 120.0))
    waiting = asyncio.create_task(engine.lease(1, 0, 120.0))
    await buffer.kill()
    await buffer.start()
    assert await engine.heartbeat({}) == "running"  # the same life goes on: nobody says HELLO again
    for lease in rest:
        await complete(engine, lease)
    while not waiting.done():  # rollout-0 does not speak any more: it expires from the restart on
        await engine.heartbeat({})
        await asyncio.wait([waiting], timeout=0.05)
    (again,) = await waiting
    assert (again.group, again.rollout, again.attempt) == (leases[0].group, leases[0].rollout, 2)
    assert [one.output_ids.tolist() for one in again.turns] == [turn(leases[0], 0).output_ids.tolist()]
    await complete(engine, again)
    await decide_all(await peers.join("filter", "filter-0"))
    batch = await taking
    assert batch is not None
    assert (await learner.status())["life"] == 2
    await peers.close()
    await buffer.kill()


async def test_a_stopped_buffer_blames_nobody_for_its_own_silence(make_buffer: Maker, tmp_path: Path) -> None:
    buffer = make_buffer(heartbeat_s=0.05, dead_after_s=2.0)
    peers = Peers(await buffer.start())
    await peers.learner()
    engine = await peers.engine("rollout-0")
    (lease,) = await engine.lease(1, 0, 1.0)
    buffer.child.send_signal(signal.SIGSTOP)
    await asyncio.sleep(2.5)
    buffer.child.send_signal(signal.SIGCONT)
    for _ in range(2):  # the second is answered after it has looked who was silent
        status = await engine.status()
    assert status["peers"]["rollout-0"]["state"] == "alive"
    await engine.push_turn(turn(lease, 0))
    await peers.close()
    assert await buffer.kill(signal.SIGTERM) == 0


async def test_a_full_disk_ends_it_and_what_was_acknowledged_is_there(make_buffer: Maker, tmp_path: Path) -> None:
    buffer = make_buffer()
    peers = Peers(await buffer.start())
    await peers.learner()
    engine = await peers.engine("rollout-0")
    (lease,) = await engine.lease(1, 0, 1.0)
    limit = 300_000  # bytes per file, set on the running process: the next segment write beyond it fails
    resource.prlimit(buffer.child.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    await engine.push_turn(turn(lease, 0))
    pushing = asyncio.create_task(engine.push_turn(turn(lease, 1, num_tokens=100_000)))
    assert await buffer.child.wait() == 1
    assert not pushing.done()
    await buffer.start()  # there is room again: resume, nothing deleted by hand
    await pushing
    assert (await engine.status())["life"] == 2
    await peers.close()
    await buffer.kill()
    with sqlite3.connect(tmp_path / "buffer" / "index.sqlite") as db:
        assert db.execute("SELECT num_output_tokens FROM turns ORDER BY turn").fetchall() == [(5,), (100_000,)]


async def test_a_second_buffer_at_the_same_port_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path / "a", settings()) as peers:
        from buffer.server import BufferServer

        second = BufferServer(settings(), tmp_path / "b", RUN, problem)
        with pytest.raises(OSError, match=r"can't be bound: .*choose another buffer\.port"):
            await second.start(peers.endpoint)
        other = client(peers.endpoint, "monitor", "monitor-0")
        assert (await other.status())["run"] == RUN
        await other.close()

"""Acknowledged means synced: payload, then rows, then the answer, in this order, each on the disk before the next."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from buffer.storage import Storage, Unit
from tests.buffers import serving, settings, turn

_ROW = ("INSERT INTO dials (name, value, step, unix_s) VALUES ('x', 1, 0, 0)", ())


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What reaches the disk, in order: the real calls, noted."""
    noted: list[str] = []
    sync = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        sync(descriptor)
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        noted.append(f"{name} synced at {os.fstat(descriptor).st_size}")

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    return noted


def test_payload_is_synced_before_its_rows_commit(tmp_path: Path, events: list[str]) -> None:
    storage = Storage(tmp_path, "run-1", 400)
    storage.index._db.set_trace_callback(lambda sql: events.append("committed") if sql == "COMMIT" else None)
    unit = Unit()
    places = [storage.place(unit, b"body", bytes(100)) for _ in range(5)]
    unit.statements.append(_ROW)
    storage.commit(unit)
    ends = {place.segment: place.offset_bytes + place.length_bytes for place in places}
    assert len(ends) == 2
    assert events == [f"{segment:08d}.seg synced at {end}" for segment, end in ends.items()] + ["committed"]
    storage.close()


def test_the_index_is_synced_at_every_commit(tmp_path: Path) -> None:
    storage = Storage(tmp_path, "run-1", 400)
    full = 2
    assert storage.index._db.execute("PRAGMA synchronous").fetchone() == (full,)
    assert storage.index._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    storage.close()


async def test_nothing_is_acknowledged_before_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_commit, commit = threading.Event(), Storage.commit

    def slow_disk(storage: Storage, unit: Unit) -> None:
        assert may_commit.wait(30.0)
        commit(storage, unit)

    async with serving(tmp_path, settings()) as peers:
        await peers.learner()
        engine = await peers.engine("rollout-0")
        (lease,) = await engine.lease(1, 0, 1.0)
        monkeypatch.setattr(Storage, "commit", slow_disk)
        pushing = asyncio.create_task(engine.push_turn(turn(lease, 0)))
        await asyncio.wait([pushing], timeout=0.5)
        assert not pushing.done()
        may_commit.set()
        await pushing

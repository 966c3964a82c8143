"""The machine's own hardships: a disk that can't be written, a damaged file, a clock that jumps."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from buffer import journal, server
from buffer.index import IndexFault, put_meta
from buffer.run_state import Now
from buffer.schema import SCHEMA
from buffer.server import BufferServer
from buffer.spare import Spare, rebuild
from buffer.storage import Storage, Unit
from launch.copying import copy
from tests.buffers import RUN, Peers, complete, decide_all, problem, rows, serving, settings, turn
from tests.hosts import NEEDS_ROOT, is_root

DAY_S = 86_400.0
RECIPE = '[model]\npath = "none"\n[problems]\nsource = "jsonl"\npath = "none"\n'


async def test_a_clock_that_jumps_a_day_ends_no_lease_and_no_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deadlines run on the monotonic clock; the time of day is only written down."""
    jumped = {"s": 0.0}
    monkeypatch.setattr(server, "_now", lambda: Now(time.monotonic(), time.time() + jumped["s"]))
    chosen = settings(heartbeat_s=0.05, dead_after_s=20.0, lease_s=30.0, group_timeout_s=60.0, groups_per_step=1)
    async with serving(tmp_path, chosen) as peers:
        learner, roc = await peers.learner(), await peers.join("filter", "filter-0")
        engine = await peers.engine("rollout-0")
        leases = await engine.lease(8, 0, 1.0)
        await engine.push_turn(turn(leases[0], 0))
        for jumped["s"] in (-DAY_S, DAY_S, 0.0):
            waiting = asyncio.create_task(learner.take(0, 0.2))
            assert await waiting is None  # a long poll ends when it should
            assert await engine.renew([(one.group, one.rollout) for one in leases]) == []
            for peer in (engine, learner, roc):
                assert await peer.heartbeat({}) == "running"
            status = await engine.status()
            assert {peer["state"] for peer in status["peers"].values()} == {"alive"}
            assert status["groups"]["dropped"] == {}
        jumped["s"] = -DAY_S
        for lease in leases[1:]:
            await complete(engine, lease)
        await engine.push_turn(turn(leases[0], 1))
    async with serving(tmp_path, chosen) as peers:  # taken up a day before what is on record
        await _take_one(peers)
    assert rows(tmp_path, "SELECT count(*) FROM turns") == [(16,)]


async def _take_one(peers: Peers) -> None:
    learner, roc = await peers.learner(), await peers.join("filter", "filter-1")
    engine = await peers.engine("rollout-1", lineage=learner.epoch)
    await decide_all(roc)
    assert await learner.take(0, 5.0) is not None
    (rest,) = [lease for lease in await engine.lease(100, 0, 0.2) if lease.turns]
    assert len(rest.turns) == 2


def _stored(directory: Path, commits: int, *, snapshots: tuple[int, ...] = ()) -> Storage:
    """A run directory with a turn in each of so many commits, and snapshots after some."""
    storage = Storage(directory, RUN, 1 << 20)
    for number in range(commits):
        _commit(storage, number)
        if number + 1 in snapshots:
            storage._spare._renew()
    return storage


def _commit(storage: Storage, number: int) -> None:
    unit = Unit()
    place = storage.place(unit, b"body", bytes(10_000))
    unit.statements.append(
        (
            "INSERT INTO turns VALUES (?, 0, 0, 1, 'rollout-0', 1, ?, ?, ?, 1, 1, 0, '[]', '', 0)",
            (number, place.segment, place.offset_bytes, place.length_bytes),
        )
    )
    if number == 0:
        unit.statements += [put_meta("schema", SCHEMA), put_meta("run", RUN)]
    storage.commit(unit)


def test_an_index_that_was_torn_by_copying_it_is_not_believed(tmp_path: Path) -> None:
    """SQLite empties its log into the file between the copying of the one and of the other."""
    run, torn = tmp_path / "run" / "buffer", tmp_path / "copy" / "buffer"
    storage = _stored(tmp_path / "run", 3)
    with closing(sqlite3.connect(run / "index.sqlite")) as other:
        other.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
        torn.mkdir(parents=True)
        shutil.copyfile(run / "index.sqlite", torn / "index.sqlite")
        for number in range(3, 300):
            _commit(storage, number)
        other.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
        _commit(storage, 300)
    shutil.copyfile(run / "index.sqlite-wal", torn / "index.sqlite-wal")
    shutil.copytree(run / "spare", torn / "spare")
    shutil.copytree(run / "segments", torn / "segments")
    storage.close()
    with closing(sqlite3.connect(f"file:{torn}/index.sqlite?mode=ro", uri=True)) as db:
        try:
            whole = db.execute("SELECT count(*) FROM turns").fetchone() == (301,)
        except sqlite3.DatabaseError:
            whole = False
    assert not whole, "what the copy is protected from"
    again = Storage(tmp_path / "copy", RUN, 1 << 20)
    assert again.index.rows("SELECT count(*) FROM turns") == [(301,)]
    assert again.index.rows("PRAGMA integrity_check") == [("ok",)]
    again.close()


def test_a_torn_segment_of_a_copy_goes_back_to_the_last_whole_turn(tmp_path: Path) -> None:
    _stored(tmp_path / "run", 9).close()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    segment = tmp_path / "copy" / "buffer" / "segments" / "00000001.seg"
    os.truncate(segment, segment.stat().st_size - 15_000)
    assert "up to commit 7;" in rebuild(tmp_path / "copy" / "buffer")
    assert len(rows(tmp_path / "copy", "SELECT * FROM turns")) == 7
    assert Spare(tmp_path / "copy" / "buffer").prepare() == ""  # once is enough


def test_a_snapshot_of_a_later_time_than_the_segments_gives_way_to_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_FILE_BYTES", 1000)
    _stored(tmp_path / "run", 30, snapshots=(5, 10, 20)).close()
    spare = tmp_path / "run" / "buffer" / "spare"
    older, newer = sorted(int(path.stem) for path in spare.glob("*.sqlite"))
    assert (older, newer) == (10, 20)
    assert journal.first_of(journal.files(spare)[0]) > 1  # what leads to the older snapshot alone is deleted
    segment = tmp_path / "run" / "buffer" / "segments" / "00000001.seg"
    record = segment.stat().st_size // 30
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    os.truncate(tmp_path / "copy" / "buffer" / "segments" / segment.name, older * record + 100)
    assert f"up to commit {older};" in rebuild(tmp_path / "copy" / "buffer")
    os.truncate(segment, (older - 1) * record)
    with pytest.raises(IndexFault, match=r"leads to no index that fits .*copy the run again, with `rocstar copy"):
        rebuild(tmp_path / "run" / "buffer")


def test_a_directory_that_was_only_moved_is_no_copy_and_one_without_its_index_is_made_anew(tmp_path: Path) -> None:
    _stored(tmp_path / "run", 3).close()
    (tmp_path / "run").rename(tmp_path / "moved")
    assert Spare(tmp_path / "moved" / "buffer").prepare() == ""
    copy(tmp_path / "moved", tmp_path / "copy")
    assert not (tmp_path / "copy" / "buffer" / "index.sqlite").exists()
    again = Storage(tmp_path / "copy", RUN, 1 << 20)
    assert (again.is_new, again.index.number) == (False, 3)
    again.close()
    assert Spare(tmp_path / "copy" / "buffer").prepare() == ""


def test_a_journal_that_lost_its_end_with_the_power_leads_nowhere_and_a_snapshot_takes_its_place(
    tmp_path: Path,
) -> None:
    _stored(tmp_path / "run", 5).close()
    (log,) = journal.files(tmp_path / "run" / "buffer" / "spare")
    os.truncate(log, log.stat().st_size - 1)
    Storage(tmp_path / "run", RUN, 1 << 20).close()
    copy(tmp_path / "run", tmp_path / "copy")
    assert "up to commit 5;" in rebuild(tmp_path / "copy" / "buffer")


@pytest.mark.slow
def test_the_command_copies_a_run_and_never_over_another(tmp_path: Path) -> None:
    _stored(tmp_path / "run", 2).close()
    (tmp_path / "run" / "recipe.toml").write_text(RECIPE)
    command = [sys.executable, "-m", "launch", "copy", str(tmp_path / "run"), str(tmp_path / "copy")]
    assert subprocess.run(command, capture_output=True, check=True).stderr == b""
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stderr) == (2, f"rocstar: {tmp_path}/copy exists: name a place that does not\n")


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A run directory on a file system that was mounted anew for reading alone."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)], check=True)
    try:
        _stored(place / "run", 2).close()
        (place / "run" / "recipe.toml").write_text(RECIPE)
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        yield place / "run"
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.slow
@pytest.mark.skipif(not is_root(), reason=NEEDS_ROOT)
def test_a_read_only_directory_is_told_and_left_as_it_is(read_only: Path) -> None:
    command = [sys.executable, "-m", "launch", "resume", str(read_only)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stderr) == (
        2,
        f"rocstar: run.directory = {read_only}: {read_only} can't be written\n",
    )
    with pytest.raises(IndexFault, match=r"run can't be written \(read-only\): the buffer needs to"):
        BufferServer(settings(), read_only, RUN, problem)

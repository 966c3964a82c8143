"""The independent log: what was durable while the run went on, as any reader of the index could see it.

Consumes    RUN/buffer/index.sqlite and its segments, read-only, every POLL_S; names of checkpoint directories
Produces    turns with their places and checksums, batches, publications, checkpoints, lives of peers, each as it was
            first seen; what later was gone or different
Waits for   nothing; an index that can't be read at the moment is read at the next look
Invariant   imports nothing of ours; never writes; what is noted is never taken back
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

POLL_S = 0.5

Key: TypeAlias = tuple[int, int, int]
"""group, rollout, turn"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A durable turn: where its payload lies, and the CRC-32 of those bytes."""

    attempt: int
    segment: int
    offset: int
    length: int
    crc: int


@dataclass(kw_only=True, slots=True)
class Notes:
    """Everything that was seen."""

    turns: dict[Key, Seen] = field(default_factory=dict)
    batches: dict[int, int] = field(default_factory=dict)
    """step -> CRC-32 of the record"""
    publications: dict[tuple[int, int], float] = field(default_factory=dict)
    """(lineage, version) -> when it was recorded, seconds since 1970"""
    checkpoints: set[int] = field(default_factory=set)
    hellos: set[tuple[str, int, float]] = field(default_factory=set)
    """(peer, epoch, when)"""
    lives: dict[int, float] = field(default_factory=dict)
    """start of the buffer -> when it was first seen"""
    changed: list[str] = field(default_factory=list)
    """what was durable and then was different"""
    news_s: float = 0.0
    """when something new was seen last, seconds since 1970"""


class Witness:
    """Looks until it is closed; `notes` may be read at any time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.notes = Notes(news_s=time.time())
        self._last_place = (-1, -1)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="witness", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            self.look()

    def look(self) -> None:
        """Note what is new."""
        size = (len(self.notes.turns), len(self.notes.batches), len(self.notes.publications))
        with contextlib.suppress(sqlite3.OperationalError), opened(self._directory) as db:
            db.execute("BEGIN")
            self._look(db)
        for mark in self._directory.glob("checkpoints/step_*/COMPLETE"):
            number = mark.parent.name.removeprefix("step_")
            if number.isdigit():
                self.notes.checkpoints.add(int(number))
        if size != (len(self.notes.turns), len(self.notes.batches), len(self.notes.publications)):
            self.notes.news_s = time.time()

    def _look(self, db: sqlite3.Connection) -> None:
        notes = self.notes
        for key, seen in turns(self._directory, db, self._last_place):
            before = notes.turns.setdefault(key, seen)
            if before != seen:
                notes.changed.append(f"turn {key}: was {before}, is {seen}")
            self._last_place = max(self._last_place, (seen.segment, seen.offset))
        for step, record in db.execute("SELECT step, record FROM batches WHERE step >= ?", (len(notes.batches) - 2,)):
            if notes.batches.setdefault(step, zlib.crc32(record)) != zlib.crc32(record):
                notes.changed.append(f"batch of step {step}: another record")
        for lineage, version, unix_s in db.execute("SELECT lineage, version, unix_s FROM publications"):
            notes.publications.setdefault((lineage, version), unix_s)
        notes.hellos.update(db.execute("SELECT name, epoch, hello_unix_s FROM peers"))
        for (life,) in db.execute("SELECT value FROM meta WHERE key = 'life'"):
            notes.lives.setdefault(life, time.time())


def turns(directory: Path, db: sqlite3.Connection, after: tuple[int, int] = (-1, -1)) -> Iterator[tuple[Key, Seen]]:
    """The turns whose payload lies behind `after` (segment, offset), in that order: the order of their commits."""
    rows = db.execute(
        "SELECT group_id, rollout, turn, attempt, segment, offset_bytes, length_bytes FROM turns "
        "WHERE (segment, offset_bytes) > (?, ?) ORDER BY segment, offset_bytes",
        after,
    )
    number, file = -1, None
    try:
        for group, rollout, turn, attempt, segment, offset, length in rows:
            if segment != number:
                if file is not None:
                    file.close()
                file = open(directory / "buffer" / "segments" / f"{segment:08d}.seg", "rb")  # noqa: SIM115
                number = segment
            assert file is not None, "a segment is open"
            file.seek(offset)
            crc = zlib.crc32(file.read(length))
            yield (group, rollout, turn), Seen(attempt=attempt, segment=segment, offset=offset, length=length, crc=crc)
    finally:
        if file is not None:
            file.close()


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[sqlite3.Connection]:
    """The index, read-only. Raises sqlite3.OperationalError while it is not there."""
    uri = f"file:{directory / 'buffer' / 'index.sqlite'}?mode=ro"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=5.0)
    try:
        yield db
    finally:
        db.close()


def rows(directory: Path, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """What the index holds now."""
    with opened(directory) as db:
        return db.execute(sql, parameters).fetchall()

"""What makes any copy of a run directory one that can be resumed, taken with whatever tool while the run goes on.

Consumes    the index, its commits; at a start, whether this directory is where its files were made
Produces    buffer/spare/: snapshots of the index and the journal since; an index rebuilt from them
Waits for   the disk; snapshots are made in a thread of their own
Invariant   files under spare/ are only appended to, or renamed in whole: a copy of them is consistent, while SQLite's
            own two files are not when they are copied one after the other. So the index of a copy is never used: it is
            rebuilt as the longest beginning of history whose payload the copy holds, in which is everything that was
            acknowledged before the copying began. Where that can't be had the copy is refused

A copy is known by the inode numbers in spare/PLACE. `NNNNNNNNNNNN.sqlite` is the index as of commit NNNNNNNNNNNN.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

from buffer import journal
from buffer.index import ENDS, NEEDED, TABLES, Index, IndexFault, reading
from buffer.journal import End, Journal, Statement

SNAPSHOT_BYTES = 32 << 20
"""of journal after which the next snapshot is due; half the index, where that is more"""
_NUM_SNAPSHOTS = 2
"""kept: one may be of a later time than the segments that were copied before it"""
COPY_COMMAND = "rocstar copy RUN COPY"


class Spare:
    """The spare of one buffer/ directory."""

    def __init__(self, directory: Path) -> None:
        self._buffer, self._directory = directory, directory / "spare"
        self._index = directory / "index.sqlite"
        self._thread = ThreadPoolExecutor(1, "buffer-snapshot")
        self._thread.submit(int)  # the thread is there from the start
        self._making: Future[None] | None = None
        self._bytes = 0
        self._journal: Journal

    def prepare(self) -> str:
        """Before the index is opened: rebuild it where these files are a copy; what was done, "" for nothing.

        Raises:
            IndexFault: the copy can't be resumed; the message names the command that makes one that can.
        """
        place = self._directory / "PLACE"
        if not place.exists() or place.read_text(encoding="ascii") == _place(self._buffer):
            return ""
        return f"{self._buffer} is a copy: {rebuild(self._buffer)}"

    def attach(self, index: Index) -> None:
        """Write down the commits of `index` from now on."""
        self._directory.mkdir(exist_ok=True)
        fresh = not index.meta()
        if not fresh and index.number == 0:
            index.commit([])  # commit 1 is not in the journal: only a snapshot leads to what was there before
        if index.number > 0 and journal.last_number(self._directory, index.number) < index.number:
            self._begin_anew(index.number)  # new here, or the power went before the journal was on disk
        for path in journal.files(self._directory)[-1:]:
            _sync(path)  # the life before may have been killed: from now on only the last file can miss anything
        self._journal = Journal(self._directory, index.number + 1)
        newest = max((_number(path) for path in snapshots(self._directory)), default=0)
        later = (path for path in journal.files(self._directory) if journal.first_of(path) > newest)
        self._bytes = sum(path.stat().st_size for path in later)
        _write(self._directory / "PLACE", _place(self._buffer))
        index.journal = self.append

    def _begin_anew(self, number: int) -> None:
        old = [*snapshots(self._directory), *journal.files(self._directory)]
        made = self._snapshot()
        assert _number(made) == number, "nobody else writes the index"
        for path in old:
            if path != made:
                path.unlink()

    def append(self, number: int, end: End, statements: list[Statement]) -> None:
        """A commit that SQLite is going to run."""
        if self._making is not None and self._making.done():
            self._making.result()
            self._making = None
        self._bytes += self._journal.append(number, end, statements)
        if self._making is None and self._bytes >= max(SNAPSHOT_BYTES, self._index.stat().st_size // 2):
            self._bytes = 0
            self._making = self._thread.submit(self._renew)

    def _renew(self) -> None:
        """Make a snapshot; let go what is older than the one before it."""
        self._snapshot()
        kept = snapshots(self._directory)[-_NUM_SNAPSHOTS:]
        for path in snapshots(self._directory)[:-_NUM_SNAPSHOTS]:
            path.unlink()
        if len(kept) < _NUM_SNAPSHOTS:
            return
        logs = journal.files(self._directory)
        for path, successor in itertools.pairwise(logs):
            if journal.first_of(successor) <= _number(kept[0]) + 1:
                path.unlink()

    def _snapshot(self) -> Path:
        partial = self._directory / "snapshot.partial"
        partial.unlink(missing_ok=True)
        with closing(reading(self._index)) as source, closing(sqlite3.connect(partial)) as target:
            source.backup(target)
            number = target.execute("PRAGMA user_version").fetchone()[0]
        _sync(partial)
        path = self._directory / f"{number:012d}.sqlite"
        partial.replace(path)
        _sync(self._directory)
        return path

    def close(self) -> None:
        self._thread.shutdown()
        self._journal.close()


def snapshots(directory: Path) -> list[Path]:
    """Oldest first."""
    return sorted(directory.glob("*.sqlite"))


def rebuild(buffer: Path) -> str:
    """Put an index in place that is made from spare/ alone; what it holds, in words. The one before is index.old.

    Raises:
        IndexFault: spare/ and the segments don't lead to an index that can go on.
    """
    spare, index = buffer / "spare", buffer / "index.sqlite"
    scratch = buffer / "index.rebuilt"
    held = _held(buffer / "segments")
    logs = journal.files(spare)
    bases: list[Path | None] = [*reversed(snapshots(spare))]
    if logs and journal.first_of(logs[0]) == 1:
        bases.append(None)
    for base in bases:
        with _opened(scratch, base) as db:
            if not _within((db.execute(ENDS).fetchone() or (0, 0)), held):
                continue  # of a later time than the segments
            last = _replay(db, logs, held)
            missing = _missing(db, buffer / "segments")
        if missing:
            raise IndexFault(
                f"{buffer}/segments/{missing:08d}.seg is not there: it was deleted while this copy was made; copy the "
                f"run again, with `{COPY_COMMAND}`"
            )
        _sync(scratch)
        for suffix in ("", "-wal", "-shm"):
            old = index.with_name(index.name + suffix)
            if old.exists():
                old.replace(index.with_name("index.old" + suffix))
        scratch.replace(index)
        _let_go(spare, base, last)
        _write(spare / "PLACE", _place(buffer))
        return f"its index is made anew from spare/ up to commit {last}; the one before is {index.parent}/index.old"
    raise IndexFault(
        f"{spare} leads to no index that fits {buffer}/segments: this copy took too long for the run that went on "
        f"meanwhile, or is not whole; copy the run again, with `{COPY_COMMAND}`"
    )


def _let_go(spare: Path, base: Path | None, last: int) -> None:
    """Nothing may lead anywhere but to commit `last`."""
    for path in snapshots(spare):
        if path != base:
            path.unlink()
    for path in journal.files(spare):
        if journal.first_of(path) > last:
            path.unlink()
    _sync(spare.parent)


@contextmanager
def _opened(scratch: Path, base: Path | None) -> Iterator[sqlite3.Connection]:
    """A database of its own, with what `base` holds."""
    scratch.unlink(missing_ok=True)
    with closing(sqlite3.connect(scratch, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous = OFF")
        if base is None:
            db.executescript(TABLES)
        else:
            with closing(reading(base, immutable=True)) as source:
                source.backup(db)
        yield db


def _replay(db: sqlite3.Connection, logs: list[Path], held: End) -> int:
    """Run the commits that follow, as long as their payload is there; number of the last."""
    number: int = db.execute("PRAGMA user_version").fetchone()[0]
    db.execute("BEGIN")
    for commit in journal.commits(logs, number):
        if not _within(commit.end, held):
            break
        for sql, parameters in commit.groups:
            db.executemany(sql, parameters)
        number = commit.number
    db.execute(f"PRAGMA user_version = {number}")
    db.execute("COMMIT")
    return number


def _held(segments: Path) -> End:
    """Up to where a copy has the payload. Segments before the last one were full when it was begun."""
    last = max(segments.glob("*.seg"), default=None)
    return (0, 0) if last is None else (int(last.stem), last.stat().st_size)


def _within(end: End, held: End) -> bool:
    return end[0] < held[0] or (end[0] == held[0] and end[1] <= held[1]) or end == journal.NO_PAYLOAD


def _missing(db: sqlite3.Connection, segments: Path) -> int:
    """A segment that work goes on with, or a kept checkpoint needs, and that is not there; 0 for none."""
    kept = [row[0] for row in db.execute("SELECT version FROM checkpoints WHERE kept ORDER BY version")]
    for (number,) in db.execute(f"{NEEDED} ORDER BY turns.segment", (kept[0] if len(kept) > 1 else 0,)):
        if not (segments / f"{number:08d}.seg").exists():
            return int(number)
    return 0


def _number(path: Path) -> int:
    return int(path.stem)


def _place(buffer: Path) -> str:
    """The inodes of the files: those of a copy are others."""
    paths = (buffer, buffer / "spare", buffer / "index.sqlite")
    return " ".join(str(path.stat().st_ino) if path.exists() else "none" for path in paths)


def _write(path: Path, text: str) -> None:
    scratch = path.with_suffix(".partial")
    scratch.write_text(text, encoding="ascii")
    _sync(scratch)
    scratch.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)

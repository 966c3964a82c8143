"""Every commit of the index once more, appended to plain files: what a copy of a running directory is rebuilt from.

Consumes    the statements of each commit, before SQLite runs them
Produces    journal files; the commits in them, in order, up to the first that is torn or missing
Waits for   the disk, for a moment: nothing is synced but files that are full
Invariant   a file is only ever appended to, so that whoever copies it gets a whole beginning of it. A commit whose
            number comes again, in a file that begins at it or behind it, was never made durable: the later one counts

On disk (integers little-endian), `spare/NNNNNNNNNNNN.log`, NNNNNNNNNNNN = number of its first commit, in decimal:

    file   := record*
    record := crc32:u32 body_bytes:u32 body      crc32 of body_bytes and body (zlib.crc32)
    body   := msgpack [number, segment, end_bytes, [[sql, [parameters...]]...]]

`segment` and `end_bytes` tell up to where the payload of this commit and all before it reaches; 0 for none of its own.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgpack

Statement: TypeAlias = tuple[str, tuple[Any, ...]]
End: TypeAlias = tuple[int, int]
"""segment, bytes from its start: where payload ends"""

NO_PAYLOAD: End = (0, 0)
MAX_FILE_BYTES = 4 << 20
_HEADER = struct.Struct("<II")
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """One transaction of the index."""

    number: int
    """1 for the first of a run, then one more each"""
    end: End
    groups: list[tuple[str, list[list[Any]]]]
    """statements and the parameters of each time they are run"""


class Journal:
    """Appends the commits of one life of the buffer; its first file begins at commit `first`."""

    def __init__(self, directory: Path, first: int) -> None:
        self._directory = directory
        for path in files(directory):
            if first_of(path) > first:
                path.unlink()  # of commits that were never made durable
        self._file = self._begin(first)
        self._file_bytes = 0

    def append(self, number: int, end: End, statements: Sequence[Statement]) -> int:
        """Write a commit down; the bytes it takes."""
        if self._file_bytes >= MAX_FILE_BYTES:
            os.fdatasync(self._file)
            os.close(self._file)
            self._file, self._file_bytes = self._begin(number), 0
        body = msgpack.packb([number, *end, _grouped(statements)])
        length = _LENGTH.pack(len(body))
        data = memoryview(_HEADER.pack(zlib.crc32(body, zlib.crc32(length)), len(body)) + body)
        self._file_bytes += len(data)
        size = len(data)
        while data:  # a nearly full disk may take a part: the rest is tried at once and raises
            data = data[os.write(self._file, data) :]
        return size

    def _begin(self, first: int) -> int:
        path = self._directory / f"{first:012d}.log"
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)

    def close(self) -> None:
        if self._file >= 0:
            os.fdatasync(self._file)
            os.close(self._file)
            self._file = -1


def _grouped(statements: Sequence[Statement]) -> list[tuple[str, list[tuple[Any, ...]]]]:
    out: list[tuple[str, list[tuple[Any, ...]]]] = []
    for sql, parameters in statements:
        if not out or out[-1][0] != sql:
            out.append((sql, []))
        out[-1][1].append(parameters)
    return out


def files(directory: Path) -> list[Path]:
    """The journal's files, oldest first."""
    return sorted(directory.glob("*.log"))


def first_of(path: Path) -> int:
    """Number of the first commit in a file."""
    return int(path.stem)


def commits(paths: Iterable[Path], after: int) -> Iterator[Commit]:
    """The commits from `after` + 1 on, each number once, up to the first that is missing."""
    ordered = list(paths)
    for path, successor in zip(ordered, [*ordered[1:], None], strict=True):
        limit = None if successor is None else first_of(successor)
        if limit is not None and limit <= after + 1:
            continue
        for commit in _latest(path):
            if limit is not None and commit.number >= limit:
                break
            if commit.number == after + 1:
                yield commit
                after = commit.number
            elif commit.number > after:
                return


def last_number(directory: Path, limit: int) -> int:
    """Of the last commit written down, among those up to `limit`; 0 for none."""
    for path in reversed([path for path in files(directory) if first_of(path) <= limit]):
        numbers = [commit.number for commit in _latest(path) if commit.number <= limit]
        if numbers:
            return numbers[-1]
    return 0


def _latest(path: Path) -> Iterator[Commit]:
    """The commits of a file; of those with one number, which failed but for the last, the last."""
    held: Commit | None = None
    for commit in _read(path):
        if held is not None and commit.number != held.number:
            yield held
        held = commit
    if held is not None:
        yield held


def _read(path: Path) -> Iterator[Commit]:
    data = memoryview(path.read_bytes())
    offset = 0
    while offset + _HEADER.size <= len(data):
        crc, length = _HEADER.unpack_from(data, offset)
        body = data[offset + _HEADER.size : offset + _HEADER.size + length]
        if len(body) < length or zlib.crc32(body, zlib.crc32(_LENGTH.pack(length))) != crc:
            return
        number, segment, end_bytes, groups = msgpack.unpackb(body)
        yield Commit(number=number, end=(segment, end_bytes), groups=groups)
        offset += _HEADER.size + length

"""Append-only payload files: every acknowledged turn's tokens, log-probs and text.

Consumes    encoded turns (body + raw arrays), as they came over the wire
Produces    their place (segment, offset, length), and the bytes back
Waits for   the disk: `append` returns after fdatasync; callers run it in a worker thread
Invariant   a turn whose row is in the index lies whole and synced in a segment: payload is synced before its row
            commits. What lies behind the last indexed record of a segment was never acknowledged and is cut off at open

On disk (all integers little-endian), `segments/NNNNNNNN.seg`, NNNNNNNN = segment number in decimal, from 1:

    file    := file_magic record*
    file_magic := b"RoCseg" schema:u16                              8 bytes; schema = buffer.schema.SCHEMA
    record  := magic crc32:u32 body_bytes:u32 payload_bytes:u32 body payload
    magic   := b"RoCr"
    crc32   of everything behind it in the record: body_bytes, payload_bytes, body, payload (zlib.crc32)
    body    := msgpack array, the fields of buffer.schema.Turn in their order, an array field replaced by its length:
               0 group:int  1 rollout:int  2 attempt:int  3 turn:int  4 num_prompt_ids:int  5 num_output_ids:int
               6 num_logprobs:int  7 version_runs:[[lineage, version, num_tokens]...]  8 num_observation_ids:int
               9 code:str  10 status:str  11 observation:str  12 generate_s:float  13 tool_queue_s:float
               14 tool_run_s:float
    payload := prompt_ids:int32[] output_ids:int32[] logprobs:float32[] observation_ids:int32[], back to back

The index's `turns.offset_bytes` is where the record's magic starts, `turns.length_bytes` the whole record's length.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from buffer.schema import SCHEMA

Bytes: TypeAlias = bytes | memoryview

FILE_MAGIC = b"RoCseg" + struct.pack("<H", SCHEMA)
RECORD_MAGIC = b"RoCr"
_HEADER = struct.Struct("<4sIII")
HEADER_BYTES = _HEADER.size
_LENGTHS = struct.Struct("<II")
_MAX_PIECES = 512


class SegmentError(Exception):
    """A segment file is not what the index says: names file, offset and what was found."""


class SegmentGone(SegmentError):
    """A segment that was deleted because nothing needed it: whoever asks for it is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a record lies."""

    segment: int
    offset_bytes: int
    length_bytes: int


def record_bytes(body: Bytes, payload: Bytes) -> int:
    """Length of the record of `body` and `payload`."""
    return HEADER_BYTES + len(body) + len(payload)


def header(body: Bytes, payload: Bytes) -> bytes:
    """The bytes in front of `body` and `payload`."""
    crc = zlib.crc32(payload, zlib.crc32(body, zlib.crc32(_LENGTHS.pack(len(body), len(payload)))))
    return _HEADER.pack(RECORD_MAGIC, crc, len(body), len(payload))


def split(record: Bytes, where: str) -> tuple[memoryview, memoryview]:
    """Body and payload of a whole record, its checksum verified.

    Raises:
        SegmentError: `record` is torn or altered; `where` names it.
    """
    view = memoryview(record)
    if len(view) < HEADER_BYTES:
        raise SegmentError(f"{where}: {len(view)} bytes are fewer than a record's header")
    magic, crc, num_body, num_payload = _HEADER.unpack_from(view)
    if magic != RECORD_MAGIC:
        raise SegmentError(f"{where}: starts with {magic!r}, not {RECORD_MAGIC!r}")
    if len(view) != HEADER_BYTES + num_body + num_payload:
        raise SegmentError(f"{where}: {len(view)} bytes, its header says {HEADER_BYTES + num_body + num_payload}")
    if zlib.crc32(view[8:]) != crc:
        raise SegmentError(f"{where}: checksum is {zlib.crc32(view[8:]):#010x}, its header says {crc:#010x}")
    return view[HEADER_BYTES : HEADER_BYTES + num_body], view[HEADER_BYTES + num_body :]


def path_of(directory: Path, number: int) -> Path:
    """The file of a segment."""
    return directory / f"{number:08d}.seg"


def read(directory: Path, places: Iterable[Place]) -> list[tuple[memoryview, memoryview]]:
    """(body, payload) at each place, checksums verified.

    Raises:
        SegmentGone: a segment was deleted when no kept checkpoint and no open group needed it any more.
        SegmentError: a record is torn or altered.
    """
    files: dict[int, int] = {}
    out = []
    try:
        for place in places:
            if place.segment not in files:
                files[place.segment] = _open(path_of(directory, place.segment))
            data = os.pread(files[place.segment], place.length_bytes, place.offset_bytes)
            out.append(split(data, f"{path_of(directory, place.segment)} at {place.offset_bytes}"))
    finally:
        for file in files.values():
            os.close(file)
    return out


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise SegmentGone(
            f"{path} is deleted: no kept checkpoint and no open group needed it; buffer.keep_segments = true keeps "
            "every segment"
        ) from error


def scan(path: Path) -> Iterator[tuple[int, memoryview, memoryview]]:
    """(offset, body, payload) of every whole record of a file, up to a torn or altered one."""
    data = memoryview(path.read_bytes())
    offset = len(FILE_MAGIC)
    if bytes(data[:offset]) != FILE_MAGIC:
        return
    while offset + HEADER_BYTES <= len(data):
        _, _, num_body, num_payload = _HEADER.unpack_from(data, offset)
        end = offset + HEADER_BYTES + num_body + num_payload
        if end > len(data):
            return
        try:
            body, payload = split(data[offset:end], f"{path} at {offset}")
        except SegmentError:
            return
        yield offset, body, payload
        offset = end


class Segments:
    """The segment files of one run.

    `place` is for the thread that decides (it only counts), `append` for the thread that writes; calls of `append`
    come in the order of the places. `read` may be called by any thread.
    """

    def __init__(self, directory: Path, segment_bytes: int, last: int, last_end_bytes: int) -> None:
        """Open at the end of what is indexed: segment `last`, `last_end_bytes` into it; (0, 0) for none."""
        self._directory, self._segment_bytes = directory, segment_bytes
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob("*.seg"):
            if int(path.stem) > last:
                path.unlink()  # begun after the last commit: nothing in it was acknowledged
        self._number, self._next = last, last_end_bytes
        self._written = last
        self._file = -1
        if last > 0:
            self._file = self._reopen(last, last_end_bytes)
        else:
            self._next = segment_bytes  # the first place opens segment 1

    def _reopen(self, number: int, end_bytes: int) -> int:
        path = self.path(number)
        if not path.exists():
            raise SegmentError(f"{path} is missing, the index holds turns in it")
        if path.stat().st_size < end_bytes:
            raise SegmentError(f"{path} has {path.stat().st_size} bytes, the index holds turns up to {end_bytes}")
        file = os.open(path, os.O_WRONLY)
        os.ftruncate(file, end_bytes)
        os.lseek(file, end_bytes, os.SEEK_SET)
        return file

    def path(self, number: int) -> Path:
        return path_of(self._directory, number)

    @property
    def number(self) -> int:
        """The segment that places are given out in; 0 before the first."""
        return self._number

    def place(self, length_bytes: int) -> Place:
        """Where the next record of `length_bytes` will lie; a full segment is followed by a new one."""
        if self._next >= self._segment_bytes:
            self._number, self._next = self._number + 1, len(FILE_MAGIC)
        place = Place(segment=self._number, offset_bytes=self._next, length_bytes=length_bytes)
        self._next += length_bytes
        return place

    def append(self, records: Sequence[tuple[Place, Bytes, Bytes]]) -> None:
        """Write (place, body, payload) records in the order of their places, and sync them."""
        pieces: list[Bytes] = []
        for place, body, payload in records:
            if place.segment != self._written:
                self._write(pieces)
                pieces = [FILE_MAGIC]
                self._follow(place.segment)
            pieces += (header(body, payload), body, payload)
        self._write(pieces)
        if records:
            os.fdatasync(self._file)

    def _follow(self, number: int) -> None:
        """Close the present file, synced, and begin file `number`."""
        if self._file >= 0:
            os.fdatasync(self._file)
            os.close(self._file)
        self._file = os.open(self.path(number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._written = number
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)  # the new name must survive as well
        finally:
            os.close(directory)

    def _write(self, pieces: list[Bytes]) -> None:
        for start in range(0, len(pieces), _MAX_PIECES):
            some = pieces[start : start + _MAX_PIECES]
            missing = sum(len(piece) for piece in some) - os.writev(self._file, some)
            if missing:  # a nearly full disk may take a part: the rest is tried at once and raises
                rest = memoryview(b"".join(some))[-missing:]
                while rest:
                    rest = rest[os.write(self._file, rest) :]

    def read(self, places: Iterable[Place]) -> list[tuple[memoryview, memoryview]]:
        """As the function `read`."""
        return read(self._directory, places)

    def numbers(self) -> set[int]:
        """The segments that are on disk."""
        return {int(path.stem) for path in self._directory.glob("*.seg")}

    def delete(self, numbers: Iterable[int]) -> int:
        """Remove whole segments (never the one being written); how many there were."""
        count = 0
        for number in numbers:
            if number < self._written and self.path(number).exists():
                self.path(number).unlink()
                count += 1
        return count

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

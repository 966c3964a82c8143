"""Segment files as they lie on disk, read by their documented format (buffer/segments.py).

Consumes    RUN/buffer/segments/NNNNNNNN.seg
Produces    Record by Record, checksums verified
Waits for   nothing; one segment is in memory at a time
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

FILE_MAGIC = b"RoCseg"
RECORD_MAGIC = b"RoCr"
RECORD_HEADER = struct.Struct("<4sIII")


@dataclass(kw_only=True, slots=True)
class Record:
    """One turn as its segment holds it."""

    segment: int
    offset: int
    length: int
    body: list[Any]
    logprobs: npt.NDArray[np.float32]
    payload_bytes: int


def records(path: Path, number: int) -> Iterator[Record | str]:
    """Every record of a segment file; a text instead of what can't be read, after which nothing follows."""
    data = memoryview(path.read_bytes())
    if bytes(data[: len(FILE_MAGIC)]) != FILE_MAGIC:
        yield f"{path.name}: starts with {bytes(data[:8])!r}"
        return
    offset = len(FILE_MAGIC) + 2
    while offset < len(data):
        if offset + RECORD_HEADER.size > len(data):
            yield f"{path.name} at {offset}: torn header"
            return
        magic, crc, num_body, num_payload = RECORD_HEADER.unpack_from(data, offset)
        start = offset + RECORD_HEADER.size
        end = start + num_body + num_payload
        if magic != RECORD_MAGIC or end > len(data) or zlib.crc32(data[offset + 8 : end]) != crc:
            yield f"{path.name} at {offset}: torn or altered"
            return
        body = msgpack.unpackb(data[start : start + num_body])
        first = start + num_body + 4 * (body[4] + body[5])
        yield Record(
            segment=number,
            offset=offset,
            length=end - offset,
            body=body,
            logprobs=np.frombuffer(data, "<f4", body[6], first),
            payload_bytes=num_payload,
        )
        offset = end

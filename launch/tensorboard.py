"""Scalars of a run as a TensorBoard event file, without TensorBoard.

Consumes    the buffer's status, at each tick of the driver
Produces    RUN/tensorboard/events.out.tfevents.*: at each learner step its figures, the run's rates since the step
            before, each role's shares of its clock
Waits for   nothing but the disk
Invariant   a step is written once; what is written is whole events, so a file that is cut off is read up to there

A file is a row of records: length:u64, masked crc32c of it, data, masked crc32c of that. The data is the message Event
of tensorflow/core/util/event.proto: wall_time = 1 (double), step = 2 (int64), file_version = 3 (string), summary = 5
with value = 1 { tag = 1 (string), simple_value = 2 (float) }.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from launch.monitor.readings import Reading, from_status
from launch.monitor.spans import Span

_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8


class TensorBoard:
    """Use as a context manager; `enabled` False writes nothing."""

    def __init__(self, directory: Path, *, enabled: bool) -> None:
        self._directory, self._enabled = directory / "tensorboard", enabled
        self._file: IO[bytes] | None = None
        self._before: Reading | None = None
        self._step = 0

    def __enter__(self) -> TensorBoard:
        if self._enabled:
            self._directory.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
            self._file = (self._directory / name).open("ab")
            self._file.write(record(event(time.time(), version="brain.Event:2")))
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def update(self, status: Mapping[str, Any], unix_s: float) -> None:
        """Writes the learner's newest step, when it is news."""
        if self._file is None or not status.get("buffer"):
            return
        now = from_status(status, unix_s)
        step = int(now.roles.get("learner-0", {}).get("counters", {}).get("steps", 0))
        if step <= self._step:
            return
        figures = scalars(self._before, now)
        self._step, self._before = step, now
        self._file.write(record(event(unix_s, step=step, figures=figures)))
        self._file.flush()


def scalars(before: Reading | None, now: Reading) -> dict[str, float]:
    """By tag; rates and shares since `before`."""
    earlier = before.roles if before else {}
    spans = {name: Span(earlier.get(name, {}), role) for name, role in now.roles.items()}
    out = {f"learner/{key}": value for key, value in spans["learner-0"].now["gauges"].items()}
    buffer = spans.get("buffer-0")
    if buffer is not None and buffer.seconds > 0:
        out["run/groups_trained_per_min"] = 60 * buffer.count("groups_taken") / buffer.seconds
        out["run/tokens_generated_per_s"] = buffer.count("tokens_generated") / buffer.seconds
        ages = buffer.spread("age").mean
        out |= {} if ages is None else {"run/age_mean": ages}
    tickets = now.standing.get("tickets") or {}
    out |= {"run/tickets_active": tickets["active"]} if tickets else {}
    for name, span in spans.items():
        out |= {f"clock/{name}/{state}": share for state, share in span.shares().items()}
    return {tag: float(value) for tag, value in out.items() if value is not None and math.isfinite(value)}


def event(unix_s: float, *, step: int = 0, version: str = "", figures: Mapping[str, float] | None = None) -> bytes:
    """An Event message."""
    out = b"\x09" + struct.pack("<d", unix_s)
    if step:
        out += b"\x10" + _varint(step)
    if version:
        out += b"\x1a" + _bytes(version.encode())
    if figures:
        values = (b"\x0a" + _bytes(tag.encode()) + b"\x15" + struct.pack("<f", value) for tag, value in figures.items())
        out += b"\x2a" + _bytes(b"".join(b"\x0a" + _bytes(value) for value in values))
    return out


def _bytes(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def record(data: bytes) -> bytes:
    """A framed message."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(length)) + data + struct.pack("<I", _masked(data))


def _masked(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def _table() -> tuple[int, ...]:
    out = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (_POLYNOMIAL if number & 1 else 0)
        out.append(number)
    return tuple(out)


_TABLE = _table()
"""Of crc32c (Castagnoli)."""

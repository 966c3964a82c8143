"""Times within turns, which only their payload holds.

Consumes    the segment files of a run
Produces    seconds that a turn's call ran; None where the payload was deleted
Waits for   nothing but the disk
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import IO

from buffer.codec import unpack
from buffer.segments import split


class Payload:
    """Use as a context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, IO[bytes] | None] = {}
        self._open = ExitStack()

    def __enter__(self) -> Payload:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def run_s(self, segment: int, offset: int, length: int) -> float | None:
        """The last field of the record's body (buffer/segments.py)."""
        file = self._file(segment)
        if file is None:
            return None
        file.seek(offset)
        body, _ = split(file.read(length), f"segment {segment} at {offset}")
        return float(unpack(body, len(body))[-1])

    def _file(self, segment: int) -> IO[bytes] | None:
        if segment not in self._files:
            path = self._folder / f"{segment:08d}.seg"
            self._files[segment] = self._open.enter_context(path.open("rb")) if path.is_file() else None
        return self._files[segment]

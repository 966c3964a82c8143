"""Keeps the beginning and the end of an output stream of any length.

Consumes    chunks of bytes
Produces    text with what was cut out marked, and the number of bytes seen
Waits for   nothing: pure
Invariant   memory is bounded by 4 * KEEP_BYTES plus one chunk
"""

from __future__ import annotations

from sandbox.api import KEEP_BYTES


class HeadTail:
    """The first and last KEEP_BYTES of a stream."""

    __slots__ = ("_head", "_tail", "total")

    def __init__(self) -> None:
        self._head = b""
        self._tail = b""
        self.total = 0
        """Bytes seen."""

    def add(self, chunk: bytes) -> None:
        """Take the next chunk."""
        self.total += len(chunk)
        room = KEEP_BYTES - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        if chunk:
            self._tail += chunk
            if len(self._tail) > 2 * KEEP_BYTES:
                self._tail = self._tail[-KEEP_BYTES:]

    @property
    def truncated(self) -> bool:
        """Whether bytes were cut out of the middle."""
        return self.total > 2 * KEEP_BYTES

    def text(self) -> str:
        """The stream, decoded with replacement."""
        tail = self._tail[-KEEP_BYTES:]
        cut = self.total - len(self._head) - len(tail)
        if not cut:
            return (self._head + tail).decode("utf-8", "replace")
        middle = f"\n... {cut} bytes left out ...\n"
        return self._head.decode("utf-8", "replace") + middle + tail.decode("utf-8", "replace")

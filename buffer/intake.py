"""How much may be taken in while the disk is busy: beyond it messages stay in the sockets, and the peers' windows fill.

Consumes    what waits for the commit under way, the time as an argument
Produces    whether another message may be taken in; for how long none has been
Waits for   nothing: a pure state machine
Invariant   what waits for a commit is bounded, whatever peers send and however long the disk takes
"""

from __future__ import annotations

MAX_STAGED_BYTES = 32 << 20
"""of payload not yet written"""
MAX_HELD_REPLIES = 2048
"""to messages that were answered and are not durable yet, or came behind such"""


class Intake:
    """The gate in front of the buffer's state."""

    def __init__(self) -> None:
        self._shut_since_s: float | None = None

    def is_open(self, staged_bytes: int, held_replies: int, now_s: float) -> bool:
        """Whether the next message may be taken in."""
        if staged_bytes < MAX_STAGED_BYTES and held_replies < MAX_HELD_REPLIES:
            self._shut_since_s = None
            return True
        if self._shut_since_s is None:
            self._shut_since_s = now_s
        return False

    def shut_s(self, now_s: float) -> float:
        """How long it has been shut: nobody can be heard meanwhile."""
        return 0.0 if self._shut_since_s is None else now_s - self._shut_since_s

"""Requests that wait: long polls, asked again after every change, answered empty at their deadline.

Consumes    requests that the service could not answer yet
Produces    their answers, in the order of arrival
Waits for   nothing itself; the server calls `ask` after every change and at each deadline
Invariant   a request sent again by its peer waits once; a life that ended meanwhile is refused as fenced,
            unless it ended by BYE: then nobody waits for an answer
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from buffer.run_state import Now
from buffer.service import PARKED, Request
from buffer.wire import Reason, Refusal

MAX_WAIT_S = 300.0
MAX_PER_PEER = 32


@dataclass(frozen=True, slots=True)
class Parked:
    """A waiting request, the route of its reply, and when it is answered empty."""

    request: Request
    route: bytes
    deadline_s: float


class Parking:
    """All requests that wait."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int, int], Parked] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def park(self, request: Request, route: bytes, now: Now) -> float | None:
        """Keep a request; returns the seconds until its deadline. One that waits already keeps its own: None.

        Raises:
            Refusal: the peer has too many waiting.
        """
        key = (request.peer.name, request.peer.epoch, request.seq)
        if (known := self._waiting.get(key)) is not None:
            self._waiting[key] = Parked(request, route, known.deadline_s)
            return None
        if sum(name == key[0] for name, _, _ in self._waiting) >= MAX_PER_PEER:
            raise Refusal(Reason.NOT_ALLOWED, f"{key[0]}: {MAX_PER_PEER} requests are waiting already")
        wait_s = request.record if isinstance(request.record, float) else request.record.wait_s
        wait_s = min(max(wait_s, 0.0), MAX_WAIT_S)
        self._waiting[key] = Parked(request, route, now.s + wait_s)
        return wait_s

    def ask(self, now: Now, answer: Callable[[Request, Now], Any]) -> list[tuple[Parked, Any]]:
        """Every request that has its answer now, with it; they don't wait any more."""
        out = []
        for key, parked in list(self._waiting.items()):
            if parked.request.peer.state == "gone":
                del self._waiting[key]
                continue
            value = self._value(parked, now, answer)
            if value is not PARKED:
                del self._waiting[key]
                out.append((parked, value))
        return out

    def _value(self, parked: Parked, now: Now, answer: Callable[[Request, Now], Any]) -> Any:
        peer = parked.request.peer
        if peer.state != "alive":
            return Refusal(Reason.FENCED, f"{peer.name}: epoch {peer.epoch} is over")
        heard_s = peer.heard_s
        try:
            value = answer(parked.request, now)
        except Refusal as refusal:
            return refusal
        finally:
            peer.heard_s = heard_s  # to ask again is not to hear from it
        if value is PARKED and now.s >= parked.deadline_s:
            return () if parked.request.kind == "lease" else None
        return value

"""Events of a time line in the trace format of Chrome and Perfetto.

Consumes    slices, marks and counters of roles' tracks, with times of day
Produces    the list of events: times in microseconds from the shown span's beginning
Waits for   nothing: pure
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The seconds that are shown."""

    from_s: float
    to_s: float

    def touches(self, start_s: float, end_s: float) -> bool:
        return start_s < self.to_s and end_s > self.from_s


class Tracks:
    """Collects events; roles and their tracks get numbers as they come."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.events: list[dict[str, Any]] = []
        self._processes: dict[str, int] = {}
        self._tracks: dict[tuple[str, str], int] = {}

    def slice(self, role: str, track: str, name: str, start_s: float, end_s: float, **told: Any) -> None:
        """Something that took its time; left out when it is beyond the shown seconds."""
        if self.span.touches(start_s, end_s):
            from_s = self.span.from_s
            length = max(0, _micros(end_s - from_s) - _micros(start_s - from_s))  # of rounded ends: neighbours meet
            self._add(role, track, "X", name, start_s, dur=length, args=told)

    def mark(self, role: str, track: str, name: str, at_s: float, **told: Any) -> None:
        """Something that happened."""
        if self.span.touches(at_s - 1e-6, at_s + 1e-6):
            self._add(role, track, "i", name, at_s, s="t", args=told)

    def counter(self, role: str, name: str, at_s: float, values: Mapping[str, float]) -> None:
        """Figures at a moment."""
        if self.span.touches(at_s - 1e-6, at_s + 1e-6):
            self._add(role, name, "C", name, at_s, args=dict(values))

    def _add(self, role: str, track: str, kind: str, name: str, at_s: float, **more: Any) -> None:
        process = self._number(role)
        thread = self._tracks.get((role, track))
        if thread is None:
            thread = self._tracks[role, track] = len(self._tracks) + 1
            self._meta("thread_name", process, thread, track)
        start = {"name": name, "ph": kind, "ts": _micros(at_s - self.span.from_s), "pid": process, "tid": thread}
        self.events.append(start | more)

    def _number(self, role: str) -> int:
        if role not in self._processes:
            self._processes[role] = len(self._processes) + 1
            self._meta("process_name", self._processes[role], 0, role)
        return self._processes[role]

    def _meta(self, kind: str, process: int, thread: int, name: str) -> None:
        self.events.append({"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}})


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)

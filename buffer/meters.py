"""Clocks, counters and histograms of a role, and the one snapshot that all readers share.

Consumes    state changes and observations of one role; time is an argument
Produces    `Meters.snapshot(now_s)`: cumulative figures, so that any number of readers may diff them
Imports     nothing of ours; every package may import this file
Invariant   the seconds of a clock's states sum to the wall time since it was started
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

STATES = ("busy", "starved", "blocked", "sync", "down")
"""What a role with one thing to do at a time may be doing: working; waiting for input; waiting for room or
permission; exchanging weights; starting or recovering."""

SECONDS_EDGES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


class StateClock:
    """Accumulates the seconds spent in each state.

    Example:
        clock = StateClock(now_s=0.0)           # starts "down"
        clock.enter("busy", now_s=2.0)
        clock.enter("starved", now_s=5.0, waits_for="buffer")
        clock.seconds(now_s=6.0)                # {"busy": 3.0, "starved": 1.0, "down": 2.0, ...}
    """

    def __init__(self, now_s: float) -> None:
        self._seconds = dict.fromkeys(STATES, 0.0)
        self._state = "down"
        self._since_s = now_s
        self.waits_for = "start"

    def enter(self, state: str, now_s: float, waits_for: str = "") -> None:
        """Leave the present state for `state`; `waits_for` names what is awaited, shown to the user."""
        if state not in self._seconds:
            raise ValueError(f"clock state = {state!r} is none of {', '.join(STATES)}")
        if now_s > self._since_s:
            self._seconds[self._state] += now_s - self._since_s
            self._since_s = now_s
        self._state, self.waits_for = state, waits_for

    def seconds(self, now_s: float) -> dict[str, float]:
        """Seconds in each state up to `now_s`."""
        out = dict(self._seconds)
        out[self._state] += max(0.0, now_s - self._since_s)
        return out


class Histogram:
    """Counts in fixed buckets: bucket i holds values <= edges[i], the last one the rest."""

    def __init__(self, edges: Sequence[float] = SECONDS_EDGES) -> None:
        self._edges = tuple(edges)
        self._counts = [0] * (len(self._edges) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect.bisect_left(self._edges, value)] += count
        self._sum += value * count

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go on from what an earlier life counted, if its buckets were the same."""
        if tuple(snapshot["edges"]) == self._edges:
            self._counts = list(snapshot["counts"])
            self._sum = float(snapshot["sum"])

    def snapshot(self) -> dict[str, Any]:
        return {"edges": list(self._edges), "counts": list(self._counts), "sum": self._sum}


class Meters:
    """All figures of one role.

    Counters only grow; gauges are the value now. The key says what is counted, with its unit.
    """

    def __init__(
        self, role: str, name: str, now_s: float, usage: Callable[[float], dict[str, Any]] = lambda now_s: {}
    ) -> None:
        """`usage` tells what the role's processes have used of their host (buffer/usage.py)."""
        self.role, self.name, self._usage = role, name, usage
        self.clock = StateClock(now_s)
        self._started_s = now_s
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._histograms: dict[str, Histogram] = {}

    def count(self, key: str, amount: float = 1) -> None:
        self._counters[key] = self._counters.get(key, 0) + amount

    def gauge(self, key: str, value: float) -> None:
        self._gauges[key] = value

    def observe(self, key: str, value: float, *, count: int = 1, edges: Sequence[float] = SECONDS_EDGES) -> None:
        histogram = self._histograms.get(key)
        if histogram is None:
            histogram = self._histograms[key] = Histogram(edges)
        histogram.observe(value, count)

    def gauge_value(self, key: str, default: float) -> float:
        """What the gauge was set to last."""
        return self._gauges.get(key, default)

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go on from the counters, gauges and histograms of an earlier life; the clock starts anew."""
        self._counters = dict(snapshot["counters"])
        self._gauges = dict(snapshot["gauges"])
        for key, histogram in snapshot["histograms"].items():
            self._histograms[key] = Histogram(histogram["edges"])
            self._histograms[key].restore(histogram)

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """Cumulative figures; plain types only, so that msgpack and JSON carry it."""
        return {
            "role": self.role,
            "name": self.name,
            "wall_s": now_s - self._started_s,
            "clock": self.clock.seconds(now_s),
            "waits_for": self.clock.waits_for,
            "usage": self._usage(now_s),
            "counters": dict(self._counters),
            "gauges": dict(self._gauges),
            "histograms": {key: histogram.snapshot() for key, histogram in self._histograms.items()},
        }

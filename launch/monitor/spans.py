"""Differences of one role's cumulative figures between two moments.

Consumes    two snapshots of a role (buffer/meters.py), either of them absent
Produces    counts, shares of the clock, distributions of what came between
Waits for   nothing: pure
Invariant   nothing is negative: when the role began another life in between, figures count from that life's start,
            except the buffer's counters and histograms, which a new life takes up from where they were a second before
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.monitor.stage_figures import Times

SAME_LIFE_S = 3.0
"""Wall clocks of two snapshots of one life differ from the time between them by less."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A histogram's growth."""

    edges: Sequence[float]
    counts: Sequence[float]
    total: float

    @property
    def count(self) -> float:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> float:
        """Within its bucket evenly spread; beyond the last edge, that edge."""
        wanted, seen, lower = share * self.count, 0.0, 0.0
        for edge, count in zip(self.edges, self.counts, strict=False):
            if count and seen + count >= wanted:
                return lower + (edge - lower) * (wanted - seen) / count
            seen, lower = seen + count, edge
        return lower

    def times(self) -> Times | None:
        """As seconds; None when nothing came."""
        if not self.count:
            return None
        mean = self.total / self.count
        return Times(count=int(self.count), mean_s=mean, p50_s=self.quantile(0.5), p95_s=self.quantile(0.95))


NOTHING = Spread((), (), 0.0)


class Span:
    """Of one role, from `before` ({}: from its start) to `now`."""

    def __init__(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        self.now = now
        self._taken_up = now.get("role") == "buffer"
        wall_s = now.get("wall_s", 0.0) - before.get("wall_s", 0.0)
        between_s = now.get("unix_s", 0.0) - before.get("unix_s", 0.0)
        self.same_life = bool(before) and wall_s >= 0 and abs(wall_s - between_s) < SAME_LIFE_S
        self._before = before
        self._clock_before = before if self.same_life else {}
        self.seconds = wall_s if self.same_life else now.get("wall_s", 0.0)
        if self._taken_up and before and between_s > 0:
            self.seconds = between_s

    def count(self, key: str) -> float:
        """Growth of a counter."""
        return self._grown(self.now.get("counters", {}).get(key), self._before.get("counters", {}).get(key))

    def _grown(self, now: float | None, before: float | None) -> float:
        """A counter that is less than it was began anew, or was taken up a little before where it was."""
        value, earlier = now or 0.0, before or 0.0
        if value < earlier:
            return 0.0 if self._taken_up else value
        return value - earlier

    def tails(self, prefix: str) -> dict[str, float]:
        """Growth of the counters below a prefix that grew, by what follows it."""
        grown = {
            key.removeprefix(prefix): self.count(key) for key in self.now.get("counters", {}) if key.startswith(prefix)
        }
        return {key: value for key, value in grown.items() if value}

    def total(self, prefix: str) -> float:
        return sum(self.tails(prefix).values())

    def rate(self, key: str) -> float | None:
        """Growth per second."""
        return self.count(key) / self.seconds if self.seconds else None

    def shares(self) -> dict[str, float]:
        """Of the clock's states; {} for a role without a clock, or when no time has passed."""
        earlier = self._clock_before.get("clock", {})
        spent = {state: max(0.0, value - earlier.get(state, 0.0)) for state, value in self.now.get("clock", {}).items()}
        total = sum(spent.values())
        return {state: value / total for state, value in spent.items()} if total > 0 else {}

    def usage(self, key: str) -> float | None:
        """Growth per second of a figure of buffer/usage.py."""
        used = self.now.get("usage") or {}
        if key not in used or not self.seconds:
            return None
        earlier = self._clock_before.get("usage") or {}
        if not earlier:
            return float(used[key]) / self.seconds if key != "host_cpu_s" else None
        between_s = used.get("read_s", self.seconds) - earlier.get("read_s", 0.0)
        return max(0.0, used[key] - earlier[key]) / between_s if between_s > 0 else None

    def spread(self, key: str) -> Spread:
        """Growth of a histogram."""
        now = self.now.get("histograms", {}).get(key)
        if not now:
            return NOTHING
        before = self._before.get("histograms", {}).get(key)
        anew = not before or before["edges"] != now["edges"]
        if anew or (sum(before["counts"]) > sum(now["counts"]) and not self._taken_up):
            return Spread(now["edges"], now["counts"], now["sum"])
        counts = [max(0, new - old) for new, old in zip(now["counts"], before["counts"], strict=True)]
        return Spread(now["edges"], counts, max(0.0, now["sum"] - before["sum"]))

    def gauge(self, key: str) -> float | None:
        value: float | None = self.now.get("gauges", {}).get(key)
        return value


def merged(spreads: Sequence[Spread]) -> Spread:
    """Distributions with the same buckets, together."""
    some = [spread for spread in spreads if spread.count]
    if not some:
        return NOTHING
    counts = [sum(column) for column in zip(*(spread.counts for spread in some), strict=True)]
    return Spread(some[0].edges, counts, sum(spread.total for spread in some))


def over(amount: float | None, by: float | None) -> float | None:
    """A quotient, None where it means nothing."""
    return amount / by if by and amount is not None else None


def mean(values: Sequence[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None

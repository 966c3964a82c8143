"""The window of a run: what each role did in it, and what was seen at each of its readings.

Consumes    the reading before the window and those inside
Produces    spans of roles, means of gauges
Waits for   nothing: pure
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launch.monitor.readings import Reading
from launch.monitor.spans import Span, mean


class Moments:
    """The window's readings, and each role's span over them."""

    def __init__(self, before: Reading | None, inside: Sequence[Reading]) -> None:
        self.before, self.inside = before, inside
        self.now = inside[-1]
        earlier = before.roles if before else {}
        self.spans = {name: Span(earlier.get(name, {}), role) for name, role in self.now.roles.items()}
        self.span_s = self.now.unix_s - before.unix_s if before else 0.0

    def of(self, role: str) -> dict[str, Span]:
        """Spans of the roles of a kind, by name."""
        return {name: span for name, span in self.spans.items() if name.rpartition("-")[0] == role}

    @property
    def buffer(self) -> Span:
        return self.spans.get("buffer-0", Span({}, {}))

    def gauges(self, name: str, key: str) -> float | None:
        """A gauge's mean over the readings."""
        return mean([reading.roles.get(name, {}).get("gauges", {}).get(key) for reading in self.inside])

    def share(self, name: str, key: str, value: float) -> float | None:
        """Share of the readings at which a gauge had this value."""
        known = self._gauge(name, key)
        return sum(one == value for one, _ in known) / len(known) if known else None

    def share_at_least(self, name: str, key: str, other: str) -> float | None:
        """Share of the readings at which a gauge was at least as high as another, and above 0."""
        pairs = [(value, role["gauges"].get(other) or 0) for value, role in self._gauge(name, key)]
        return sum(value >= max(1, bound) for value, bound in pairs) / len(pairs) if pairs else None

    def gauges_while(self, name: str, key: str, other: str, value: float) -> float | None:
        """A gauge's mean over the readings at which another one had this value."""
        return mean([role.get("gauges", {}).get(key) for one, role in self._gauge(name, other) if one == value])

    def _gauge(self, name: str, key: str) -> list[tuple[float, Mapping[str, Any]]]:
        roles = [reading.roles.get(name, {}) for reading in self.inside]
        return [(role["gauges"][key], role) for role in roles if role.get("gauges", {}).get(key) is not None]

    def standing(self, *path: str) -> list[Any]:
        """A figure of where the run stood, at each reading."""
        out = []
        for reading in self.inside:
            value: Any = reading.standing
            for key in path:
                value = value.get(key) if isinstance(value, Mapping) else None
            out.append(value)
        return out

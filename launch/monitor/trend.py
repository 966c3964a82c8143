"""How a run's figures went over its steps.

Consumes    lines of metrics/steps.jsonl, one per step
Produces    series of at most POINTS values, each the mean of as many steps
Waits for   nothing: pure
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from launch.monitor.snapshot import Series

POINTS = 60
LAST_S = 1800.0


def trend(steps: Sequence[Mapping[str, Any]]) -> tuple[Series, ...]:
    """Over the last half hour of training, groups per minute, reward, entropy, tokens of a rollout, age."""
    if not steps:
        return ()
    recent = [step for step in steps if step["time_s"] >= steps[-1]["time_s"] - LAST_S]
    spans = [late["time_s"] - early["time_s"] for early, late in pairwise(recent)]
    rates = [60 * step["groups"] / span for step, span in zip(recent[1:], spans, strict=True) if span > 0]
    series = {
        ("groups", "per min"): rates,
        ("reward", ""): _column(recent, "reward_mean"),
        ("entropy", "nats"): _column(recent, "entropy"),
        ("length", "tokens"): [
            step["tokens"] / step["trajectories"] for step in recent if step.get("trajectories") and step.get("tokens")
        ],
        ("age", "steps"): _column(recent, "age_mean"),
    }
    return tuple(Series(name=name, unit=unit, values=_thin(values)) for (name, unit), values in series.items())


def _column(steps: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [step[name] for step in steps if step.get(name) is not None]


def _thin(values: Sequence[float]) -> tuple[float, ...]:
    """At most POINTS, each the mean of neighbours."""
    if len(values) <= POINTS:
        return tuple(values)
    edges = [round(index * len(values) / POINTS) for index in range(POINTS + 1)]
    return tuple(sum(values[low:high]) / (high - low) for low, high in pairwise(edges) if high > low)

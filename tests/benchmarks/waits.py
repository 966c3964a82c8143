"""Tool times that wait rather than compute, and what a run could do at best.

Consumes    nothing; figures of a run
Produces    a preamble for `sandbox.preamble` that sleeps a time drawn per call; the bound on a run's throughput
Waits for   nothing: pure
Invariant   the n-th call of a node waits equally long in every run
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

SHAPE = 1.5
MEDIAN_S = 0.3
LONGEST_S = 10.0
WALL_S = 15.0
"""`sandbox.wall_s`: above the longest wait, so that no call times out"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pareto:
    """A distribution of waits with a heavy tail, cut at `longest_s`."""

    shape: float = SHAPE
    median_s: float = MEDIAN_S
    longest_s: float = LONGEST_S

    @property
    def least_s(self) -> float:
        """What every wait takes."""
        return float(self.median_s / 2 ** (1 / self.shape))

    def at(self, above: float) -> float:
        """The wait that a share `above` (0 < above <= 1) of all exceeds or equals."""
        return float(min(self.longest_s, self.least_s / above ** (1 / self.shape)))

    def mean_s(self) -> float:
        """Of the cut distribution; shape > 1."""
        tail = (self.least_s / self.longest_s) ** self.shape
        whole = self.shape * self.least_s / (self.shape - 1)
        return whole - tail * self.longest_s / (self.shape - 1)

    def preamble(self) -> str:
        """Python that waits so in a call."""
        draw = f"{self.least_s!r} / (1.0 - _random.Random(call_number).random()) ** {1 / self.shape!r}"
        return f"import random as _random, time as _time\n_time.sleep(min({self.longest_s!r}, {draw}))"


def computing(seconds: float) -> str:
    """A preamble that uses a core for so long."""
    return f"import time as _time\nwhile _time.process_time() < {seconds!r}:\n    pass"


def sleeping(seconds: float) -> str:
    """A preamble that waits so long."""
    return f"import time as _time\n_time.sleep({seconds!r})"


def given(preamble: str) -> str:
    """As an override of a recipe: a TOML string."""
    return f"sandbox.preamble={json.dumps(preamble)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """What no arrangement of the same work exceeds."""

    limited_by: str
    seconds_per_group: Mapping[str, float]
    """of each stage, working without a pause; `cores`: CPU-seconds / cores"""
    groups_per_min: float


def bound(capacities: Mapping[str, float], cpu_s_per_group: float, num_cores: int) -> Bound:
    """max(slowest stage, CPU-seconds / cores), from groups per minute that each stage could do."""
    seconds = {stage: 60 / rate for stage, rate in capacities.items() if rate > 0}
    seconds["cores"] = cpu_s_per_group / num_cores
    slowest = max(seconds, key=lambda stage: seconds[stage])
    return Bound(limited_by=slowest, seconds_per_group=seconds, groups_per_min=60 / seconds[slowest])


def allowed_by_staleness(max_staleness: int, groups_per_step: int, slowest_group_s: float, renewal_s: float) -> float:
    """Groups per minute at which every group may take as long as the slowest of its version does.

    A group that is issued when version v is loaded everywhere must be in step v + S at the latest, which S + 1 steps
    less the time of step v - 1's training and publication lie ahead.
    """
    return 60 * groups_per_step * (max_staleness + 1) / (slowest_group_s + renewal_s)

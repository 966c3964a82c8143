"""What the learner tells of its steps: counters and gauges of the role, and one line per step on disk.

Consumes    step reports, the totals of a restored checkpoint
Produces    figures in the role's Meters; lines of metrics/steps.jsonl (rank 0)
Waits for   nothing
Invariant   counters tell of the present weights: after a restart they go on from the checkpoint's totals; a step that
            is computed again has a line again (the last line of a step counts)
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from buffer.meters import Meters
from learner.checkpoint import Totals
from learner.trainer import StepReport

AGE_EDGES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)
"""Of the histogram token_age, in steps."""


class StepLog:
    """Writes both. `path` None: meters only."""

    def __init__(self, meters: Meters, path: Path | None) -> None:
        self._meters, self._path = meters, path

    def restored(self, totals: Totals) -> None:
        """The weights at hand were trained on this much before."""
        self._count(totals.steps, totals.trajectories, totals.tokens, totals.loss_tokens)
        self._observe(totals.ages)
        self._meters.gauge("token_age_max", max(totals.ages, default=0))

    def step(self, report: StepReport, *, step_s: float, recomputed: bool) -> None:
        """A step was trained; `step_s` includes fetching its trajectories."""
        figures = report.figures
        self._count(1, int(figures["trajectories"]), int(figures["tokens"]), int(figures["loss_tokens"]))
        self._observe(report.ages)
        for key, value in figures.items():
            self._meters.gauge(key, value)
        self._meters.gauge("token_age_max", max(report.totals.ages, default=0))
        self._meters.observe("train_s", report.train_s)
        self._meters.count("steps_recomputed", int(recomputed))
        if self._path is not None:
            line: dict[str, Any] = {"step": report.step, "time_s": time.time(), "recomputed": recomputed}
            line |= {"step_s": step_s, "train_s": report.train_s, **figures, "ages": dict(report.ages)}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _observe(self, ages: Mapping[int, int]) -> None:
        for age, count in ages.items():
            self._meters.observe("token_age", age, count=count, edges=AGE_EDGES)

    def _count(self, steps: int, trajectories: int, tokens: int, loss_tokens: int) -> None:
        self._meters.count("steps", steps)
        self._meters.count("trajectories_trained", trajectories)
        self._meters.count("tokens_trained", tokens)
        self._meters.count("loss_tokens_trained", loss_tokens)

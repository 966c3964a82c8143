"""`rocstar status RUN`: what a run holds and whether it can go on.

Consumes    a run directory, running or not
Produces    lines for people
Waits for   nothing
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.figures import figures
from launch.reach import is_driven


def describe(directory: Path) -> list[str]:
    """The run's state."""
    return list(_lines(directory))


def _lines(directory: Path) -> Iterator[str]:
    known: dict[str, Any] = json.loads((directory / "run.json").read_text(encoding="utf-8"))
    yield f"run          {known['name']} ({known['run']}), {'running' if is_driven(directory) else 'not running'}"
    summary = directory / "summary.json"
    if summary.exists():
        told = json.loads(summary.read_text(encoding="utf-8"))
        yield f"ended        {told['outcome']}: {told['reason']}"
    if not (directory / "buffer" / "index.sqlite").exists():
        yield "buffer       nothing yet; a resume starts from the beginning"
        return
    found = figures(directory)
    yield f"phase        {found['phase']}, version {found['acked']} acknowledged, next step {found['next_step']}"
    yield f"steps        {found['learner_steps']} trained, {found['groups_trained']} groups"
    yield f"groups       {_pairs(found['groups_by_state'])}; dropped: {_pairs(found['groups_dropped']) or 'none'}"
    yield f"age          mean {found['age_mean']:.2f}, max {found['age_max']}, allowed {found['max_staleness']}"
    for phase, evaluation in found["evaluations"].items():
        yield f"evaluation   {phase}: {evaluation['finished']} of {evaluation['problems']}, {_accuracy(evaluation)}"
    for name, (value, step) in found["dials"].items():
        yield f"dial         {name} = {value:g} from step {step} on"
    yield f"checkpoints  {', '.join(map(str, found['checkpoints'])) or 'none'}"
    if found["phase"] != "done" and not is_driven(directory):
        yield f"resume       rocstar resume {directory}"


def _pairs(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _accuracy(evaluation: dict[str, Any]) -> str:
    return "no accuracy yet" if evaluation["accuracy"] is None else f"accuracy {evaluation['accuracy']:.3f}"

"""summary.json: what a person may believe of a run.

Consumes    the figures of the buffer's index, the last snapshot of each role, how the run ended
Produces    summary.json
Waits for   nothing
Invariant   what the index can prove is taken from the index; `python -m tests.audit RUN` recomputes it
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launch.durable import write
from launch.run_directory import SCHEMA
from launch.tree import Recipe

FIGURES = (
    "learner_steps",
    "groups_trained",
    "groups_dropped",
    "groups_by_state",
    "rollouts_finished",
    "age_mean",
    "age_max",
    "age_in_flight_mean",
    "age_in_queue_mean",
    "age_histogram",
    "max_staleness",
    "tokens_generated",
    "tokens_trained",
    "weights_pause_s",
    "publish_lag_s",
    "publish_lag_versions",
)


def write_summary(
    recipe: Recipe,
    directory: Path,
    found: dict[str, Any],
    roles: dict[str, Any],
    *,
    outcome: str,
    reason: str,
    wall_s: float,
) -> dict[str, Any]:
    """Makes and writes it; `found` is empty when the buffer never started."""
    out: dict[str, Any] = {
        "schema": SCHEMA,
        "name": recipe.run.name,
        "seed": recipe.run.seed,
        "roc_mode": recipe.roc.mode,
        "outcome": outcome,
        "reason": reason,
    }
    evaluations = {"start": {}, "end": {}} | found.get("evaluations", {})
    for phase, evaluation in evaluations.items():
        out[f"heldout_accuracy_{phase}"] = evaluation.get("accuracy")
        out[f"tool_error_in_correct_{phase}"] = evaluation.get("tool_error_in_correct")
        out[f"heldout_finished_{phase}"] = evaluation.get("finished", 0)
    out |= {name: found.get(name) for name in FIGURES}
    out["wall_s"] = wall_s
    out["rollouts_per_s"] = (found.get("rollouts_finished") or 0) / wall_s if wall_s else 0.0
    out["roles"] = {name: role_time(snapshot) for name, snapshot in sorted(roles.items())}
    write(directory / "summary.json", json.dumps(out, indent=1) + "\n")
    return out


def role_time(snapshot: dict[str, Any]) -> dict[str, Any]:
    """How a role's time went, in seconds by state, with what it counted."""
    return {
        "wall_s": snapshot["wall_s"],
        "clock": snapshot["clock"],
        "counters": snapshot["counters"],
        "gauges": snapshot["gauges"],
    }


def lines(summary: dict[str, Any]) -> list[str]:
    """The summary for the screen."""
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted((summary["groups_dropped"] or {}).items()))
    return [
        f"outcome        {summary['outcome']}: {summary['reason']}",
        f"held out       accuracy {_share(summary, 'heldout_accuracy')}",
        f"               failed calls in correct rollouts {_share(summary, 'tool_error_in_correct')}",
        f"trained        {summary['learner_steps']} steps, {summary['groups_trained']} groups, "
        f"{summary['tokens_trained']} tokens; dropped: {dropped or 'none'}",
        f"age            mean {_number(summary['age_mean'])}, max {summary['age_max']}, "
        f"allowed {summary['max_staleness']}",
        f"wall           {summary['wall_s']:.1f} s, {summary['rollouts_per_s']:.1f} rollouts/s; "
        f"engines paused {_number(summary['weights_pause_s'])} s for weights",
        f"publish lag    {_lag(summary, 'p50')} s in the middle, {_lag(summary, 'max')} s at most, until all engines "
        "had a version",
    ]


def _share(summary: dict[str, Any], name: str) -> str:
    return f"{_number(summary[f'{name}_start'])} -> {_number(summary[f'{name}_end'])}"


def _lag(summary: dict[str, Any], name: str) -> str:
    return _number((summary["publish_lag_s"] or {}).get(name))


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"

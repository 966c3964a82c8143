"""One audit: figures, findings, and where `summary.json` says otherwise.

Consumes    a run directory
Produces    Report
Waits for   nothing
Invariant   each claim in summary.json that can be recomputed is compared; integers exactly, shares to 1e-6
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.audit.checks import CHECKS
from tests.audit.figures import figures
from tests.audit.load import Run, load

MAX_FINDINGS = 20
"""lines shown of one check; the rest is counted"""
TOLERANCE = 1e-6
CLAIMS = (
    "learner_steps",
    "groups_trained",
    "groups_dropped",
    "groups_by_state",
    "rollouts_finished",
    "age_mean",
    "age_in_flight_mean",
    "age_in_queue_mean",
    "age_max",
    "age_histogram",
    "max_staleness",
    "tokens_generated",
    "tokens_trained",
)
WHERE_CLAIMED = ("publish_lag_s", "publish_lag_versions")
"""checked in a summary that has them"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What was recomputed, and what does not hold."""

    figures: dict[str, Any]
    findings: dict[str, list[str]]
    """by check; empty lists where all is well"""

    @property
    def sound(self) -> bool:
        return not any(self.findings.values())

    def lines(self) -> Iterator[str]:
        """The findings, for people."""
        for check, found in self.findings.items():
            yield from (f"{check}: {line}" for line in found[:MAX_FINDINGS])
            if len(found) > MAX_FINDINGS:
                yield f"{check}: {len(found) - MAX_FINDINGS} more"


def audit(directory: Path) -> Report:
    """Recompute and check a run directory."""
    run = load(directory)
    recomputed = figures(run)
    findings = {name: list(check(run)) for name, check in CHECKS.items()}
    findings["summary"] = list(compare(run.summary, claims(recomputed, run.summary))) if run.summary else []
    return Report(figures=recomputed, findings=findings)


def claims(recomputed: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    """The recomputed figures under the names that summary.json uses."""
    out = {name: recomputed[name] for name in (*CLAIMS, *(one for one in WHERE_CLAIMED if one in summary))}
    for phase, evaluation in recomputed["evaluations"].items():
        out[f"heldout_accuracy_{phase}"] = evaluation["accuracy"]
        out[f"tool_error_in_correct_{phase}"] = evaluation["tool_error_in_correct"]
    return out


def compare(claimed: dict[str, Any], recomputed: dict[str, Any]) -> Iterator[str]:
    """Claims that differ from what was recomputed, or that can't be checked because they are missing."""
    for name, value in recomputed.items():
        if name not in claimed:
            yield f"{name} is missing; recomputed: {value}"
        elif not _equal(claimed[name], value):
            yield f"{name} = {claimed[name]} is claimed; recomputed: {value}"


def _equal(claimed: Any, value: Any) -> bool:
    if isinstance(value, dict) and isinstance(claimed, dict):
        names = value.keys() | claimed.keys()
        return all(_equal(claimed.get(name, 0), value.get(name, 0)) for name in names)
    if isinstance(value, float) and isinstance(claimed, (int, float)):
        return abs(claimed - value) <= TOLERANCE
    return claimed == value


__all__ = ["Report", "Run", "audit", "claims", "compare"]

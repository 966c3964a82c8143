"""Bottlenecks made on purpose, run for real, and what the advisor says of them.

`python -m tests.benchmarks.bottlenecks --json [--only sandbox slots kv learner swap tickets balanced] [--strength 0 1]`

Consumes    idle cores; the quickstart's recipe with small steps, in each case with one thing made scarce by settings
Produces    for each case the verdict after every step from the second on, and whether it named the expected limit by
            the fifth
Waits for   five learner steps per case; each run is interrupted then
Invariant   the verdict is the one that `rocstar monitor RUN` shows at that moment
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.monitor import capacities as stages
from launch.monitor.advisor import BALANCED, MIN_STEPS, Advice
from launch.monitor.show import look
from tests.benchmarks.steps import PATIENCE_S, taken
from tests.benchmarks.waits import computing, given, sleeping
from tests.chaos.victim import Victim

STEPS = 5
BASE = (
    "groups.groups_per_step=4",
    "groups.group_size=4",
    "roc.min_per_side=1",
    "rollout.concurrency=64",
    "learner.lr=1e-6",
    "problems.num_heldout=8",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "run.steps=1000",
)
"""Steps of a second or two, of a policy that stays as it is."""
SLOW_LEARNER = (
    "roc.mode=off",  # everything that is generated is trained
    "groups.group_size=8",
    "learner.micro_batch_tokens=1",  # each trajectory in a pass of its own
    "learner.activation_checkpointing=true",
    "loss.correction=decoupled",  # a pass more
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One thing made scarce."""

    name: str
    expected: str
    """a stage of launch/monitor/capacities.py, or balanced"""
    strengths: tuple[tuple[str, ...], ...]
    """overrides, the milder first"""


CASES = (
    Case(
        name="sandbox",
        expected=stages.SANDBOX,
        strengths=(
            ("sandbox.workers=1", given(computing(0.25))),
            ("sandbox.workers=1", given(computing(0.8))),
        ),
    ),
    Case(name="slots", expected=stages.SLOTS, strengths=(("rollout.concurrency=4",), ("rollout.concurrency=2",))),
    Case(
        name="kv",
        expected=stages.KV,
        strengths=(
            ("staleness.max_staleness=3", "rollout.kv_cache_mib=2"),
            ("staleness.max_staleness=3", "rollout.kv_cache_mib=1"),
        ),
    ),
    Case(
        name="learner",
        expected=stages.LEARNER,
        strengths=(
            SLOW_LEARNER,
            (*SLOW_LEARNER, "learner.zero_stage=3"),
        ),
    ),
    Case(
        name="swap",
        expected=stages.SWAP,
        strengths=(("weights.max_mib_per_s=1",), ("weights.max_mib_per_s=0.5",)),
    ),
    Case(
        name="tickets",
        expected=stages.TICKETS,
        strengths=(
            ("staleness.max_staleness=0", "groups.groups_per_step=2", given(sleeping(0.5))),
            ("staleness.max_staleness=0", "groups.groups_per_step=1", given(sleeping(0.5))),
        ),
    ),
    Case(name=BALANCED, expected=BALANCED, strengths=(("sandbox.workers=2", given(computing(0.3))),)),
)


def run(directory: Path, case: Case, strength: int) -> dict[str, Any]:
    """One case at one strength."""
    overrides = case.strengths[strength]
    victim = Victim(directory, overrides=(*BASE, *overrides))
    told: dict[int, Advice] = {}
    try:
        victim.start()
        begin_s = end_s = taken(victim, 0)
        for step in range(MIN_STEPS, STEPS + 1):
            end_s = taken(victim, step)
            told[step] = look(directory)[1]
        victim.interrupt()
        victim.ended(PATIENCE_S)
    finally:
        victim.close()
    last = told[STEPS]
    return {
        "case": case.name,
        "strength": strength,
        "overrides": list(overrides),
        **judge(case.expected, {step: advice.limit for step, advice in told.items()}),
        "seconds": round(end_s - begin_s, 1),
        "verdict": last.verdict,
        "reasons": list(last.reasons),
        "fixes": [f"{fix.dial}: {fix.now} -> {fix.proposed}" for fix in last.fixes],
        "capacities": {
            one.stage: {"use": round(one.use, 3), "says": one.says} for one in last.capacities if one.use is not None
        },
    }


def tried(directory: Path, case: Case, strength: int) -> dict[str, Any]:
    """The same; a run that does not get so far is a wrong verdict, and the others go on."""
    try:
        found = run(directory, case, strength)
    except SystemExit as error:
        found = {"case": case.name, "strength": strength, "right": False, "verdict": f"no run: {error}"}
    print(
        f"{case.name} {strength}: {'right' if found['right'] else 'WRONG'}: {found['verdict'][:300]}", file=sys.stderr
    )
    return found


def judge(expected: str, limits: Mapping[int, str]) -> dict[str, Any]:
    """Whether the last verdict is right, and from which step on it was."""
    since = None
    for step in sorted(limits, reverse=True):
        if limits[step] != expected:
            break
        since = step
    return {
        "expected": expected,
        "limits": dict(sorted(limits.items())),
        "right": since is not None,
        "right_from_step": since,
    }


def report(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All, and how many were named."""
    return {
        "steps": STEPS,
        "right": sum(one["right"] for one in found),
        "of": len(found),
        "wrong": [f"{one['case']} {one['strength']}: {one['verdict']}" for one in found if not one["right"]],
        "cases": list(found),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bottlenecks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--strength", type=int, nargs="+", choices=(0, 1), default=(0, 1))
    parser.add_argument("--json", action="store_true", help="the only form there is")
    arguments = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in CASES:
            for strength in range(len(case.strengths)):
                if strength in arguments.strength and (arguments.only is None or case.name in arguments.only):
                    found.append(tried(Path(scratch) / f"{case.name}{strength}", case, strength))
    print(json.dumps(report(found), indent=1))


if __name__ == "__main__":
    main()

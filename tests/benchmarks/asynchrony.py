"""What asynchrony is worth: groups per minute by S, with tools that wait rather than compute.

`python -m tests.benchmarks.asynchrony --json [--staleness 0 1 2 4 8] [--steps 12] [--set A=B]`
`python -m tests.benchmarks.asynchrony --draw OUT.png REPORT.json...`: the curve from kept reports

Consumes    idle cores; the quickstart's recipe, whose calls each wait a Pareto time first (waits.py)
Produces    per S: groups trained per minute, the bound max(slowest stage, CPU-seconds / cores), the share of it that
            was reached, what S itself allows (waits.allowed_by_staleness), ages; the ratio S = 2 / S = 0
Waits for   steps; each run is interrupted when it has trained its steps
Invariant   every S does the same work: as many steps are measured, from the step S + 3 on, and the learner, which
            computes what it does in the quickstart, takes steps so small (LEARNING_RATE) that the policy stays as it is
            shipped. One that learns calls its tool more often and has more groups dropped from step to step
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from launch.monitor.advisor import Advice
from launch.monitor.capacities import CORES, ENGINES
from launch.monitor.show import look
from launch.monitor.snapshot import Snapshot
from tests.benchmarks.steps import PATIENCE_S, span, taken
from tests.benchmarks.training import BUSY
from tests.benchmarks.waits import WALL_S, Pareto, allowed_by_staleness, bound, given
from tests.chaos.victim import Victim

STALENESS = (0, 1, 2, 4, 8)
WARM_STEPS = 3
LEARNING_RATE = 1e-6
WORK = ("engines", "sandbox", "filter", "buffer", "learner", "swap")


def measure(directory: Path, staleness: int, steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    """One run at one S."""
    first = WARM_STEPS + staleness
    tree = (
        f"staleness.max_staleness={staleness}",
        f"run.steps={first + steps + 1000}",
        "evaluation.at_start=false",
        f"learner.lr={LEARNING_RATE}",
        f"sandbox.wall_s={WALL_S}",
        given(Pareto().preamble()),
        *overrides,
    )
    victim = Victim(directory, overrides=tree)
    try:
        victim.start()
        begin_s = taken(victim, first)
        before, machine = victim.cpu_seconds(), psutil.cpu_times()
        end_s = taken(victim, first + steps)
        after, machine_after = victim.cpu_seconds(), psutil.cpu_times()
        snapshot, advice = look(directory, end_s - begin_s)
        found = span(directory, first, first + steps)
        victim.interrupt()
        victim.ended(PATIENCE_S)
    finally:
        victim.close()
    spent = {role: round(after[role] - before.get(role, 0.0), 2) for role in sorted(after)}
    busy_s = sum(getattr(machine_after, name) - getattr(machine, name) for name in BUSY)
    return {
        "staleness": staleness,
        **found,
        "calls": None if snapshot.sandbox is None else asdict(snapshot.sandbox),
        "cpu_s": spent,
        "whole_machine_busy_s": round(busy_s, 1),
        "verdict": advice.verdict,
        "allowed_by_staleness_groups_per_min": allowed(found, snapshot),
        **reached(found["groups_per_min"], capacities(snapshot, advice), sum(spent.values()) / found["groups_trained"]),
    }


def allowed(found: Mapping[str, Any], snapshot: Snapshot) -> float | None:
    """What S allows with groups as slow as these."""
    if found["slowest_group_s"] is None or found["renewal_s"] is None:
        return None
    groups = int(snapshot.settings["groups.groups_per_step"])
    most = int(snapshot.settings["staleness.max_staleness"])
    return round(allowed_by_staleness(most, groups, found["slowest_group_s"], found["renewal_s"]), 2)


def capacities(snapshot: Snapshot, advice: Advice) -> dict[str, float]:
    """Groups per minute that each stage could do; an engine whose curve rises counts with its best so far."""
    out = {one.stage: one.groups_per_min for one in advice.capacities if one.stage in WORK and one.groups_per_min}
    rate = snapshot.rates.groups_trained_per_min
    best = sum((engine.capacity_tokens_per_s or 0.0) * (1.0 - (engine.paused or 0.0)) for engine in snapshot.engines)
    speed = sum(engine.tokens_per_s or 0.0 for engine in snapshot.engines)
    if rate and best and speed:
        out[ENGINES] = rate * max(1.0, best / speed)
    return out


def reached(groups_per_min: float, could: Mapping[str, float], cpu_s_per_group: float) -> dict[str, Any]:
    """The bound, and the share of it."""
    limit = bound(could, cpu_s_per_group, os.cpu_count() or 1)
    return {
        "cpu_s_per_group": round(cpu_s_per_group, 3),
        "seconds_per_group": {stage: round(value, 3) for stage, value in limit.seconds_per_group.items()},
        "bound_by": limit.limited_by,
        "bound_groups_per_min": round(limit.groups_per_min, 2),
        "share_of_bound": round(groups_per_min / limit.groups_per_min, 3),
    }


def report(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All runs, and what was asked of them."""
    by_staleness = {run["staleness"]: run for run in runs}
    ratio = None
    if 0 in by_staleness and 2 in by_staleness:
        ratio = round(by_staleness[2]["groups_per_min"] / by_staleness[0]["groups_per_min"], 3)
    waits = Pareto()
    return {
        "waits": {**asdict(waits), "least_s": round(waits.least_s, 4), "mean_s": round(waits.mean_s(), 4)},
        "cores": os.cpu_count(),
        "runs": list(runs),
        "ratio_2_over_0": ratio,
        "share_of_bound_at_2": by_staleness[2]["share_of_bound"] if 2 in by_staleness else None,
    }


def draw(reports: Sequence[Path], out: Path) -> None:
    """Groups per minute with their bound, and ages, by S."""
    from matplotlib.figure import Figure  # a second to import, and only needed here

    told = [json.loads(path.read_text(encoding="utf-8")) for path in reports]
    runs = sorted((run for one in told for run in one.get("report", one)["runs"]), key=lambda run: run["staleness"])
    figure = Figure(figsize=(9.0, 3.4), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2)
    at = [run["staleness"] for run in runs]
    panels[0].plot(at, [run["groups_per_min"] for run in runs], "o-", color="#1f5fa8", linewidth=2.2, label="trained")
    bounds = [run["bound_groups_per_min"] for run in runs]
    panels[0].plot(at, bounds, "--", color="#c8551b", label=f"bound: max(slowest stage, {CORES})")
    by_s = [run["allowed_by_staleness_groups_per_min"] for run in runs]
    panels[0].plot(at, by_s, ":", color="#777777", label="what S allows: (S + 1) P / slowest group")
    panels[0].set_ylim(0, 1.25 * max(bounds))
    panels[0].set_title("groups per minute", fontsize=10)
    panels[0].legend(fontsize=8, frameon=False, loc="lower right")
    panels[1].plot(at, [run["age_mean"] for run in runs], "o-", color="#2f8f5b", linewidth=2.2)
    panels[1].set_ylim(bottom=0)
    panels[1].set_title("mean age of trained tokens, steps", fontsize=10)
    for panel in panels:
        panel.set_xlabel("max_staleness", fontsize=9)
        panel.set_xticks(at)
        panel.tick_params(labelsize=8)
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def main() -> None:
    """Measure and print, or draw what was kept."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.asynchrony", description=__doc__)
    parser.add_argument("reports", type=Path, nargs="*", metavar="REPORT", help="with --draw: kept reports")
    parser.add_argument("--staleness", type=int, nargs="+", default=STALENESS, metavar="S")
    parser.add_argument("--steps", type=int, default=12, help="measured, per run")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A=B")
    parser.add_argument("--draw", type=Path, metavar="OUT.png")
    parser.add_argument("--json", action="store_true", help="the only form there is")
    arguments = parser.parse_args()
    if arguments.draw is not None:
        draw(arguments.reports, arguments.draw)
        return
    with tempfile.TemporaryDirectory() as scratch:
        runs = [
            measure(Path(scratch) / f"s{staleness}", staleness, arguments.steps, arguments.overrides)
            for staleness in arguments.staleness
        ]
    print(json.dumps(report(runs), indent=1))


if __name__ == "__main__":
    main()

"""Throughput of a real training: `python -m tests.benchmarks.training --json [--staleness 2] [--seconds 60]`

Consumes    idle cores; the quickstart's recipe
Produces    rollouts/s of groups that were trained or dropped by RoC over a window that begins with the third batch,
            tokens per rollout, and where the CPU-seconds of the window went: by role, per step, and what stayed idle
Waits for   the third batch, then the window's end; the run is interrupted then
Invariant   CPU-seconds are the kernel's, of every process of the run and those it has reaped; each counts once
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.steps import PATIENCE_S, index, taken
from tests.chaos.victim import Victim
from tests.evidence.times import window

FIRST_STEP = 2
"""the window begins with its batch"""
BUSY = ("user", "nice", "system", "irq", "softirq")
"""of the machine's cores: neither idle, nor waiting for a disk, nor given to others"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.training", description=__doc__)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A=B")
    parser.add_argument("--json", action="store_true", help="the only form there is")
    arguments = parser.parse_args()
    overrides = (
        f"staleness.max_staleness={arguments.staleness}",
        "evaluation.at_start=false",
        "run.steps=1000",
        *arguments.overrides,
    )
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(measure(Path(scratch) / "run", overrides, arguments.seconds), indent=1))


def measure(directory: Path, overrides: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Runs until the window is over."""
    victim = Victim(directory, overrides=overrides)
    try:
        victim.start()
        begin_s = taken(victim, FIRST_STEP)
        before, machine_before = victim.cpu_seconds(), psutil.cpu_times()
        time.sleep(max(0.0, begin_s + seconds - time.time()))
        after, machine_after = victim.cpu_seconds(), psutil.cpu_times()
        if victim.exit_code is not None:
            raise SystemExit(f"the run ended within the window\n{victim.told()}")
        with closing(index(directory)) as db:
            found = window(db, begin_s, seconds)
        victim.interrupt()
        victim.ended(PATIENCE_S)
    finally:
        victim.close()
    assert found is not None
    return {"overrides": list(overrides), **found, "cpu": _table(before, after, machine_before, machine_after, found)}


def _table(
    before: dict[str, float], after: dict[str, float], machine_before: Any, machine_after: Any, found: dict[str, Any]
) -> dict[str, Any]:
    spent = {role: after[role] - before.get(role, 0.0) for role in sorted(after)}
    busy_s = sum(getattr(machine_after, name) - getattr(machine_before, name) for name in BUSY)
    steps = max(1, found["steps_taken"])
    return {
        "cores": os.cpu_count(),
        "seconds": {role: round(value, 2) for role, value in spent.items()},
        "seconds_per_step": {role: round(value / steps, 3) for role, value in spent.items()},
        "share": {role: round(value / max(1e-9, sum(spent.values())), 3) for role, value in spent.items()},
        "run_s": round(sum(spent.values()), 1),
        "whole_machine_busy_s": round(busy_s, 1),
        "available_s": round(found["seconds"] * (os.cpu_count() or 1), 1),
    }


if __name__ == "__main__":
    main()

"""One run whose S is turned 0 -> 4 -> 0 with `rocstar set` while it goes on.

`python -m tests.benchmarks.live_staleness --json [--steps 8] [--set A=B]`

Consumes    idle cores; the quickstart's recipe, whose calls each wait a Pareto time first (waits.py)
Produces    groups per minute and ages at each S, beside what the tuner said before S was turned; the changes as the
            run's record has them; deadlines and findings of `python -m tests.audit`, which recomputes every ticket's
Waits for   steps; the run is interrupted at the end, so that it leaves a summary
Invariant   a stretch begins when the tickets of the S before are used up: the larger S and two steps after the change
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from launch.tune.fit import fit
from launch.tune.records import read
from launch.tune.sweep import predict
from tests.audit.report import audit
from tests.benchmarks.asynchrony import LEARNING_RATE
from tests.benchmarks.steps import PATIENCE_S, index, span, taken
from tests.benchmarks.waits import WALL_S, Pareto, given
from tests.chaos.victim import ROOT, Victim

COURSE = (0, 4, 0)
WARM_STEPS = 3
DIAL = "staleness.max_staleness"


def measure(directory: Path, steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    """The run, its stretches, its record."""
    tree = (
        f"{DIAL}={COURSE[0]}",
        "run.steps=1000",
        "evaluation.at_start=false",
        f"learner.lr={LEARNING_RATE}",
        f"sandbox.wall_s={WALL_S}",
        given(Pareto().preamble()),
        *overrides,
    )
    victim = Victim(directory, overrides=tree)
    stretches, told, said = [], [], {}
    first = WARM_STEPS
    try:
        victim.start()
        for at, staleness in enumerate(COURSE):
            if at == 1:
                said = predictions(directory)
            if at:
                told.append(turn(directory, staleness))
                first = begins(newest(directory), COURSE[at - 1], staleness)
            taken(victim, first + steps)
            stretches.append({"max_staleness": staleness, **span(directory, first, first + steps)})
        victim.interrupt()
        exit_code = victim.ended(PATIENCE_S)
    finally:
        victim.close()
    moved = {"said": said, **moves([stretch["groups_per_min"] for stretch in stretches], said)}
    return {"stretches": stretches, "tuner": moved, "rocstar_set": told, "exit_code": exit_code, **record(directory)}


def predictions(directory: Path) -> dict[int, float]:
    """What the tuner, fitted on the first stretch, says of each S in groups per minute."""
    work = read(directory)
    model = fit(work)
    return {s: predict(model, replace(work.setting, max_staleness=s)).groups_per_min for s in sorted(set(COURSE))}


def moves(measured: Sequence[float], said: Mapping[int, float]) -> dict[str, Any]:
    """By which factor throughput moved at each change, and should have."""
    found = [round(after / before, 3) for before, after in pairwise(measured)]
    expected = [round(said[after] / said[before], 3) for before, after in pairwise(COURSE)]
    errors = [round(abs(one / other - 1.0), 3) for one, other in zip(found, expected, strict=True)]
    return {"moved_by": found, "said_it_would_by": expected, "errors": errors}


def newest(directory: Path) -> int:
    """The step whose batch was taken last."""
    with closing(index(directory)) as db:
        return int(db.execute("SELECT max(step) FROM batches").fetchone()[0])


def begins(changed_at: int, before: int, after: int) -> int:
    """The first step that is taken as the new S has it, if the change was made about the step `changed_at`."""
    return changed_at + max(before, after) + 2


def turn(directory: Path, staleness: int) -> str:
    """`rocstar set`, and what it answered."""
    command = [sys.executable, "-m", "launch", "set", str(directory), f"{DIAL}={staleness}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    if done.returncode:
        raise SystemExit(f"rocstar set: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def record(directory: Path) -> dict[str, Any]:
    """What the run's own files say of it."""
    report = audit(directory)
    with closing(index(directory)) as db:
        dials = db.execute("SELECT value, step FROM dials WHERE name = ? ORDER BY id", (DIAL,)).fetchall()
        tickets = db.execute(
            "SELECT max_staleness, count(*), sum(step > deadline_step), sum(deadline_step - base_version <>"
            " max_staleness) FROM groups WHERE kind = 'train' AND step IS NOT NULL GROUP BY max_staleness"
        ).fetchall()
    return {
        "recorded": [{"value": value, "from_step": step} for value, step in dials],
        "tickets": [
            {"max_staleness": staleness, "trained": count, "missed": missed, "deadline_is_not_base_plus_s": odd}
            for staleness, count, missed, odd in tickets
        ],
        "audit": {"sound": report.sound, "findings": list(report.lines())},
        "course_is_recorded": [value for value, _ in dials] == list(COURSE),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.live_staleness", description=__doc__)
    parser.add_argument("--steps", type=int, default=8, help="measured, per stretch; the tuner needs six")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A=B")
    parser.add_argument("--json", action="store_true", help="the only form there is")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(measure(Path(scratch) / "run", arguments.steps, arguments.overrides), indent=1))


if __name__ == "__main__":
    main()

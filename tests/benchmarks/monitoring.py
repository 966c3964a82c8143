"""What monitoring costs: CPU-seconds of recording, sending and showing figures, as a share of the run's.

`python -m tests.benchmarks.monitoring --json [--seconds 60] [--looks] [--set A=B]`

Consumes    idle cores; the quickstart's recipe
Produces    the share over a window that begins with the third batch, by function and by role; with --looks also what a
            reader costs that asks once a second, in a process of its own
Waits for   the third batch, then the window's end; the run is interrupted then
Invariant   a CPU clock of the thread runs around every function that measures (injected/sitecustomize.py has their
            names), in every process of a real run. Its own cost is in the figures: they are rather too high. Runs with
            and without figures would differ by some percent among themselves, many times what is sought
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.monitor.show import as_json, look
from tests.benchmarks.steps import PATIENCE_S, taken
from tests.benchmarks.training import FIRST_STEP
from tests.chaos.victim import Victim

INJECTED = Path(__file__).parent / "injected"
Spent = Mapping[tuple[str, str], tuple[float, float]]
"""(role, function) -> calls, CPU-seconds"""


def measure(scratch: Path, seconds: float, looks: bool, overrides: Sequence[str]) -> dict[str, Any]:
    """One run."""
    clocked = scratch / "clocked"
    clocked.mkdir()
    found = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(INJECTED), *([found] if found else [])])
    os.environ["ROCSTAR_CLOCKED"] = str(clocked)
    tree = ("evaluation.at_start=false", "run.steps=1000", *overrides)
    victim = Victim(scratch / "run", overrides=tree)
    try:
        victim.start()
        taken(victim, FIRST_STEP)
        before, clocks_before, own_s = victim.cpu_seconds(), read(clocked), 0.0
        end_s, num_looks = time.monotonic() + seconds, 0
        while (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(1.0, left_s))
            if looks:
                begun_s = time.process_time()
                as_json(*look(victim.directory))
                own_s += time.process_time() - begun_s
                num_looks += 1
        after, clocks_after = victim.cpu_seconds(), read(clocked)
        victim.interrupt()
        victim.ended(PATIENCE_S)
    finally:
        victim.close()
        for name, value in (("PYTHONPATH", found), ("ROCSTAR_CLOCKED", None)):
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    run_s = sum(after.values()) - sum(before.values())
    reader = {"looks": num_looks, "cpu_s": round(own_s, 2), "share": round(own_s / run_s, 4)} if looks else None
    return {"seconds": seconds, **shares(clocks_before, clocks_after, run_s), "reader": reader}


def read(directory: Path) -> Spent:
    """What all processes have told by now."""
    total: dict[tuple[str, str], tuple[float, float]] = {}
    for path in directory.glob("*.json"):
        told = json.loads(path.read_text(encoding="utf-8"))
        for name, (calls, spent_s) in told["spent"].items():
            key = (told["role"], name)
            known = total.get(key, (0.0, 0.0))
            total[key] = (known[0] + calls, known[1] + spent_s)
    return total


def shares(before: Spent, after: Spent, run_s: float) -> dict[str, Any]:
    """Of the run's CPU-seconds."""
    spent = {
        key: tuple(now - old for now, old in zip(after[key], before.get(key, (0.0, 0.0)), strict=True)) for key in after
    }

    def by(part: int) -> dict[str, float]:
        names: Iterable[str] = sorted({key[part] for key in spent})
        seconds = {name: sum(value[1] for key, value in spent.items() if key[part] == name) for name in names}
        return {name: round(value, 3) for name, value in sorted(seconds.items(), key=lambda item: -item[1])}

    total_s = sum(value[1] for value in spent.values())
    return {
        "run_cpu_s": round(run_s, 2),
        "monitoring_cpu_s": round(total_s, 3),
        "share": round(total_s / run_s, 5),
        "cpu_s_by_role": by(0),
        "cpu_s_by_function": by(1),
        "calls": int(sum(value[0] for value in spent.values())),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.monitoring", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--looks", action="store_true", help="ask for the snapshot once a second meanwhile")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A=B")
    parser.add_argument("--json", action="store_true", help="the only form there is")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        told = measure(Path(scratch), arguments.seconds, arguments.looks, arguments.overrides)
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()

"""What monitoring costs: CPU-seconds of recording, sending and showing figures, as a share of the run's.

`python -m tests.benchmarks.monitoring --json [--seconds 60] [--looks] [--set A=B]`

Consumes    idle cores; the quickstart's recipe
Produces    the share over a window that begins with the third batch, by function and by role; as clocked, and less what
            the clocks themselves cost; with --looks also what a reader costs that asks once a second
Waits for   the third batch, then the window's end; the run is interrupted then
Invariant   a CPU clock of the thread runs around every function that measures (injected/sitecustomize.py has their
            names), in every process of a real run, and tells what it costs itself. Runs with and without figures
            would differ by some percent among themselves, many times what is sought
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from launch.monitor.show import as_json, look
from tests.benchmarks.steps import PATIENCE_S, taken
from tests.benchmarks.training import FIRST_STEP
from tests.chaos.victim import Victim

INJECTED = Path(__file__).parent / "injected"


class Clocked(NamedTuple):
    """Of one function in one role."""

    calls: float = 0.0
    spent_s: float = 0.0
    """CPU-seconds as clocked"""
    own_s: float = 0.0
    """of them, what the clocks themselves cost"""

    @property
    def net_s(self) -> float:
        return max(0.0, self.spent_s - self.own_s)

    def __add__(self, other: Clocked) -> Clocked:  # type: ignore[override]
        return Clocked(*(mine + its for mine, its in zip(self, other, strict=True)))

    def __sub__(self, other: Clocked) -> Clocked:
        return Clocked(*(mine - its for mine, its in zip(self, other, strict=True)))


Spent = Mapping[tuple[str, str], Clocked]
"""by (role, function)"""


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
    total: dict[tuple[str, str], Clocked] = {}
    for path in directory.glob("*.json"):
        told = json.loads(path.read_text(encoding="utf-8"))
        clocked_s, nested_s = told["own_s"]
        for name, (calls, spent_s, nested) in told["spent"].items():
            key, own_s = (told["role"], name), calls * clocked_s + nested * nested_s
            total[key] = total.get(key, Clocked()) + Clocked(calls, spent_s, own_s)
    return total


def shares(before: Spent, after: Spent, run_s: float) -> dict[str, Any]:
    """Of the run's CPU-seconds."""
    spent = {key: now - before.get(key, Clocked()) for key, now in after.items()}

    def by(part: int, tell: Callable[[Clocked], Any]) -> dict[str, Any]:
        sums: dict[str, Clocked] = {}
        for key, value in spent.items():
            sums[key[part]] = sums.get(key[part], Clocked()) + value
        return {name: tell(value) for name, value in sorted(sums.items(), key=lambda item: -item[1].net_s)}

    total = sum(spent.values(), Clocked())
    return {
        "run_cpu_s": round(run_s, 2),
        "monitoring_cpu_s": round(total.net_s, 3),
        "share": round(total.net_s / run_s, 5),
        "share_with_clocks": round(total.spent_s / run_s, 5),
        "cpu_s_by_role": by(0, lambda value: round(value.net_s, 4)),
        "calls_and_cpu_s_by_function": by(1, lambda value: [int(value.calls), round(value.net_s, 4)]),
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

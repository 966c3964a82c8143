"""What a run holds on to: `python -m tests.benchmarks.soak --json [--minutes 40] [--settle 5]`

Consumes    a machine for that long; the small recipe of chaos, with payload files of 1 MiB, so that retention works
Produces    by role: the slope of resident memory, descriptors and threads at the window's begin and end; the run
            directory's size by part; `amiss` says what grows
Waits for   the first batch, then the minutes; the run is interrupted then
Invariant   counted are the processes that live through the whole window. A role that has none, or whose are not all
            there to the end, was started anew, which is amiss as well
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.benchmarks.steps import PATIENCE_S, index, taken
from tests.chaos.plan import ROLES
from tests.chaos.victim import SMALL, Victim

LASTING = ("buffer.keep_segments=false", "buffer.segment_mib=1", "learner.lr=1e-6", "run.steps=1000000")
"""Hardly anything is learnt, so that the run does not end because all is right."""
EVERY_S = 5.0
SLOPE_MIB_PER_MIN = 0.5
PARTS = ("buffer/segments", "buffer/spare", "buffer", "checkpoints", "metrics", "logs")


class Sight(NamedTuple):
    """One process at one moment."""

    rss_mib: float
    descriptors: int
    threads: int


Look = Mapping[str, Mapping[tuple[int, float], Sight]]
"""role -> (pid, birth) -> what was seen of it"""


def look(victim: Victim) -> Look:
    """All processes of the run now."""
    out: dict[str, dict[tuple[int, float], Sight]] = {}
    for role, family in victim.families().items():
        for process in family.values():
            with contextlib.suppress(psutil.Error):
                sight = Sight(process.memory_info().rss / 2**20, process.num_fds(), process.num_threads())
                out.setdefault(role, {})[process.pid, process.create_time()] = sight
    return out


def sizes(directory: Path) -> dict[str, float]:
    """MiB of the run directory's parts; "buffer" is the index with its log and what else lies there."""
    sums = dict.fromkeys(PARTS, 0.0)
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            part = next((p for p in PARTS if path.is_relative_to(directory / p)), None)
            if part is not None and path.is_file():
                sums[part] += path.stat().st_size / 2**20
    return sums


def slope(minutes: Sequence[float], values: Sequence[float]) -> float:
    """Of the least-squares line, per minute."""
    return statistics.linear_regression(minutes, values).slope


def of_role(minutes: Sequence[float], looks: Sequence[Mapping[tuple[int, float], Sight]]) -> dict[str, Any] | None:
    """Of the processes that are in every look; None if there are none."""
    lasting = set.intersection(*(set(seen) for seen in looks)) if looks else set()
    if not lasting:
        return None
    series = [[sum(seen[key][part] for key in lasting) for seen in looks] for part in range(3)]
    edge = max(1, len(minutes) // 8)

    def edges(values: Sequence[float]) -> list[float]:
        return [statistics.median(values[:edge]), statistics.median(values[-edge:])]

    return {
        "processes": len(lasting),
        "rss_mib": [round(value, 1) for value in edges(series[0])],
        "rss_mib_per_min": round(slope(minutes, series[0]), 3),
        "rss_mib_each_minute": [round(rss) for rss in series[0][:: max(1, round(60 / EVERY_S))]],
        "descriptors": edges(series[1]),
        "descriptors_max": max(series[1]),
        "threads": edges(series[2]),
        "threads_max": max(series[2]),
    }


def judged(roles: Mapping[str, dict[str, Any] | None]) -> list[str]:
    """What grows."""
    out = []
    for role in ROLES:
        told = roles.get(role)
        if told is None:
            out.append(f"{role}: no process of it lived through the window")
            continue
        if told["rss_mib_per_min"] > SLOPE_MIB_PER_MIN:
            out.append(f"{role}: memory grows by {told['rss_mib_per_min']} MiB/min, {SLOPE_MIB_PER_MIN} are allowed")
        for what in ("descriptors", "threads"):
            begin, end = told[what]
            if end > begin:
                out.append(f"{role}: {what} went from {begin:g} to {end:g}")
    return out


def measure(directory: Path, minutes: float, settle_min: float, overrides: Sequence[str]) -> dict[str, Any]:
    """One run."""
    victim = Victim(directory, overrides=(*SMALL, *LASTING, *overrides))
    times_min: list[float] = []
    looks: list[Look] = []
    parts: list[dict[str, float]] = []
    try:
        victim.start()
        taken(victim, 0)
        begun_s = time.monotonic()
        while (now_min := (time.monotonic() - begun_s) / 60) < minutes and victim.exit_code is None:
            if now_min >= settle_min:
                times_min.append(now_min)
                looks.append(look(victim))
                parts.append(sizes(directory))
            time.sleep(EVERY_S)
        ended = victim.exit_code
        steps = _steps(directory)
        if ended is None:
            victim.interrupt()
            victim.ended(PATIENCE_S)
    finally:
        victim.close()
    roles = {role: of_role(times_min, [seen.get(role, {}) for seen in looks]) for role in (*ROLES, "rest")}
    return {
        "minutes": minutes,
        "settle_min": settle_min,
        "looks": len(looks),
        "steps": steps,
        "roles": roles,
        "disk_mib": {p: [round(parts[0][p], 2), round(parts[-1][p], 2)] for p in PARTS} if parts else {},
        "disk_mib_max": {p: round(max(one[p] for one in parts), 2) for p in PARTS} if parts else {},
        "disk_mib_per_min": {p: round(slope(times_min, [one[p] for one in parts]), 4) for p in PARTS} if parts else {},
        "amiss": [*judged(roles), *([] if ended is None else [f"the run ended by itself, exit code {ended}"])],
    }


def _steps(directory: Path) -> int:
    with contextlib.closing(index(directory)) as db:
        return int(db.execute("SELECT count(*) FROM batches").fetchone()[0])


def main() -> int:
    """Measure and print; 1 when something grows."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--settle", type=float, default=5.0, help="minutes at the start that are not counted")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A=B")
    parser.add_argument("--json", action="store_true", help="the only form there is")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        told = measure(Path(scratch) / "run", arguments.minutes, arguments.settle, arguments.overrides)
    print(json.dumps({"benchmark": "soak", "cores": os.cpu_count(), **told}, indent=1))
    return 1 if told["amiss"] else 0


if __name__ == "__main__":
    sys.exit(main())

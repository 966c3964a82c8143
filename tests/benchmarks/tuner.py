"""The tuner against real runs: `python -m tests.benchmarks.tuner --json [--seconds 60] [--keep FOLDER]`

Consumes    idle cores; the quickstart's recipe, with so low a learning rate that its work stays as it is
Produces    groups/min and mean age at S = 0, 2, 4 and at half and double concurrency, as a model fitted on one run at
            S = 1 predicts them and as they are; the same for the setting that the tuner recommends
Waits for   each run's window, then its end: it is interrupted
Invariant   predictions are made before the settings run; a run that lies in FOLDER already is not run again
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from launch.tune.fit import fit
from launch.tune.records import read
from launch.tune.shapes import Recorded, Setting
from launch.tune.show import words
from launch.tune.sweep import predict, recommend, sweep
from tests.benchmarks.steps import PATIENCE_S, taken
from tests.chaos.victim import Victim

BASE = Setting(max_staleness=1, groups_per_step=8, group_size=4, concurrency=64)
FIXED = (
    "learner.lr=1e-7",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "problems.num_heldout=8",
    "run.steps=100000",
    f"groups.groups_per_step={BASE.groups_per_step}",
    f"groups.group_size={BASE.group_size}",
)
TRIED = {
    "S = 0": replace(BASE, max_staleness=0),
    "S = 2": replace(BASE, max_staleness=2),
    "S = 4": replace(BASE, max_staleness=4),
    "half concurrency": replace(BASE, concurrency=BASE.concurrency // 2),
    "double concurrency": replace(BASE, concurrency=2 * BASE.concurrency),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.tuner", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run, from its first steady step")
    parser.add_argument("--keep", type=Path, help="folder for the runs; those that it holds are not run again")
    parser.add_argument("--only", action="append", default=[], help="predict and run just these")
    parser.add_argument("--json", action="store_true", help="the only form there is")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        print(json.dumps(measure(folder, arguments.seconds, arguments.only), indent=1))


def measure(folder: Path, seconds: float, only: list[str]) -> dict[str, Any]:
    """Fits, predicts, runs."""
    base = recorded(folder / "base", BASE, seconds)
    model = fit(base)
    tried = {name: setting for name, setting in TRIED.items() if not only or name in only}
    predicted = {name: predict(model, setting) for name, setting in {"S = 1": BASE, **tried}.items()}
    found = {name: recorded(folder / name.replace(" ", ""), setting, seconds) for name, setting in tried.items()}
    rows = {
        name: _row(outcome.groups_per_min, outcome.mean_age, found.get(name, base))
        for name, outcome in predicted.items()
    }
    errors = [row["rate_error"] for name, row in rows.items() if name != "S = 1"]
    ages = [row["age_error"] for name, row in rows.items() if name != "S = 1"]
    out = {"fitted_on": asdict(BASE), "settings": rows, "rate_errors": _errors(errors), "age_errors": _errors(ages)}
    if only:
        return out
    chosen = recommend(sweep(model), BASE)
    run = next((run for name, run in found.items() if TRIED[name] == chosen.setting), None)
    if run is None:
        run = base if chosen.setting == BASE else recorded(folder / "recommended", chosen.setting, seconds)
    best = max(base.groups_per_min, run.groups_per_min, *(one.groups_per_min for one in found.values()))
    row = _row(chosen.outcome.groups_per_min, chosen.outcome.mean_age, run)
    out["recommended"] = {"setting": words(chosen.setting), **row, "of_best": round(run.groups_per_min / best, 3)}
    return out


def _row(rate: float, age: float, run: Recorded) -> dict[str, Any]:
    return {
        "predicted_groups_per_min": round(rate, 1),
        "measured_groups_per_min": round(run.groups_per_min, 1),
        "rate_error": round(abs(rate / run.groups_per_min - 1.0), 3),
        "predicted_age": round(age, 3),
        "measured_age": round(run.mean_age, 3),
        "age_error": round(abs(age - run.mean_age) / max(run.mean_age, age, 1e-9), 3),
        "steps": len(run.steps),
    }


def _errors(errors: list[float]) -> dict[str, float]:
    return {"median": statistics.median(errors), "worst": max(errors)}


def recorded(directory: Path, setting: Setting, seconds: float) -> Recorded:
    """What a run under `setting` measures in its window."""
    if not (directory / "summary.json").is_file():
        dials = tuple(f"{name}={value}" for name, value in words(setting).items())
        victim = Victim(directory, overrides=(*FIXED, *dials))
        try:
            victim.start()
            begin_s = taken(victim, setting.max_staleness + 1)
            time.sleep(max(0.0, begin_s + seconds - time.time()))
            if victim.exit_code is not None:
                raise SystemExit(f"the run ended within the window\n{victim.told()}")
            victim.interrupt()
            victim.ended(PATIENCE_S)
        finally:
            victim.close()
    return read(directory)


if __name__ == "__main__":
    main()

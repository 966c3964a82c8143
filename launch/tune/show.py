"""`rocstar tune RUN`: what the run would do under other settings, and the one to take.

Consumes    a run directory, a bound on the mean age
Produces    lines for people; the recommendation as an overlay, a TOML file that `--set @FILE` puts over a recipe
Waits for   the simulations
Invariant   what the model says of the recorded setting stands beside what was recorded, so that a bad fit is seen
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from launch.tune.fit import fit
from launch.tune.records import read
from launch.tune.shapes import Model, Setting
from launch.tune.sweep import Row, alike, frontier, predict, recommend, sweep

NAME = "tuned.toml"
FAR = 0.15
"""relative error at the recorded setting from which the figures are doubted"""
HEAD = " S    P   2G  conc engines:ranks groups/min   age  learner waits"


def tune(directory: Path, max_age: float | None, output: Path | None, seed: int) -> list[str]:
    """Fits, sweeps, writes the overlay; what to print.

    Raises:
        ConfigError: too little is on record; no setting is that fresh.
    """
    model = fit(read(directory))
    now = model.work.setting
    rows = sweep(model, seed)
    chosen = recommend(rows, now, max_age)
    target = output or directory / NAME
    target.write_text(overlay(chosen, directory), encoding="utf-8")
    return [*_checked(model, seed), "", *table(rows, model, chosen), "", *_told(chosen, max_age, target)]


def _checked(model: Model, seed: int) -> Iterator[str]:
    work, found = model.work, predict(model, model.work.setting, seed)
    error = found.groups_per_min / work.groups_per_min - 1.0
    yield f"fitted on {len(work.steps)} steps, {len(work.groups)} groups, {len(work.swaps)} swaps"
    yield (
        f"recorded {work.groups_per_min:.1f} groups/min, mean age {work.mean_age:.2f}; the model says "
        f"{found.groups_per_min:.1f} and {found.mean_age:.2f}"
    )
    if abs(error) > FAR:
        yield f"the model is off by {error:+.0%} there: what follows is a hint only"


def table(rows: list[Row], model: Model, chosen: Row) -> Iterator[str]:
    """Every setting, the freshest first; marks: * on the frontier, > recommended, = as recorded."""
    mode_off, now = model.work.roc.mode == "off", model.work.setting
    best = frontier(alike(rows, now))
    yield "   " + HEAD
    for row in sorted(rows, key=lambda one: (one.outcome.mean_age, one.setting.concurrency)):
        marks = f"{'=' if row.setting == now else ' '}{'>' if row is chosen else '*' if row in best else ' '} "
        yield marks + _line(row, 1 if mode_off else 2)


def _line(row: Row, generated: int) -> str:
    setting, outcome = row.setting, row.outcome
    return (
        f"{setting.max_staleness:>2} {setting.groups_per_step:>4} {generated * setting.group_size:>4} "
        f"{setting.concurrency:>5} {f'{setting.engines}:{setting.ranks}':>13} {outcome.groups_per_min:>10.1f} "
        f"{outcome.mean_age:>5.2f}  {outcome.learner_waits:>13.0%}"
    )


def _told(chosen: Row, max_age: float | None, target: Path) -> Iterator[str]:
    under = "" if max_age is None else f" under a mean age of {max_age:g}"
    rate, age = chosen.outcome.groups_per_min, chosen.outcome.mean_age
    yield f"recommended{under}: {rate:.1f} groups/min at mean age {age:.2f}"
    yield " ".join(f"--set {name}={value}" for name, value in words(chosen.setting).items())
    yield f"the same as an overlay: rocstar run RECIPE --set @{target}"


def words(setting: Setting) -> dict[str, int]:
    """The dials of a recommendation."""
    return {
        "staleness.max_staleness": setting.max_staleness,
        "rollout.concurrency": setting.concurrency,
        "rollout.engines": setting.engines,
        "learner.ranks": setting.ranks,
    }


def overlay(chosen: Row, directory: Path) -> str:
    """As TOML."""
    rate, age = chosen.outcome.groups_per_min, chosen.outcome.mean_age
    lines = [f"# from `rocstar tune {directory}`: {rate:.1f} groups/min at mean age {age:.2f}"]
    tables: dict[str, list[str]] = {}
    for name, value in words(chosen.setting).items():
        table_name, _, key = name.partition(".")
        tables.setdefault(table_name, []).append(f"{key} = {value}")
    for table_name, values in tables.items():
        lines += [f"[{table_name}]", *values]
    return "\n".join(lines) + "\n"

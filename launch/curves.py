"""`python -m launch.curves RUN... --out docs/curves.png`: what RoC does, as a picture of two curves.

Consumes    run directories: recipe.toml (roc.mode) and buffer/index.sqlite; several seeds of each mode
Produces    a PNG: accuracy, and failed calls in correct rollouts, over learner steps; a thin line per run, the
            median of a mode's runs thick; the same figures as JSON with --json
Waits for   nothing; the index is only read
Invariant   a point at step k is made of every finished rollout whose first token version k sampled, before RoC chose:
            groups that were dropped count like those that were trained
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from buffer.index import reading
from sandbox.api import Status, is_failure, is_infra

MIN_ROLLOUTS = 16
"""a version that began fewer gives no point"""
LABELS = {"paper": "GRPO-RoC", "released": "GRPO-RoC, published code's sort", "off": "GRPO without RoC"}
COLOURS = {"paper": "#1f5fa8", "released": "#2f8f5b", "off": "#c8551b"}
ROLLOUTS = """
    SELECT turns.version_runs, rollouts.reward, rollouts.statuses
    FROM rollouts JOIN turns USING (group_id, rollout) JOIN groups USING (group_id)
    WHERE groups.kind = 'train' AND rollouts.state = 'finished' AND turns.turn = 0
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """What the rollouts begun by one version came to."""

    version: int
    """learner steps in the weights"""
    num_rollouts: int
    accuracy: float
    tool_error_in_correct: float | None
    """failed calls / calls in correct rollouts; None without a call"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One run."""

    run: str
    mode: str
    """roc.mode"""
    seed: int
    points: tuple[Point, ...]


class NotARun(ValueError):
    """A directory without a recipe or an index; the user gives another."""


def read(directory: Path, min_rollouts: int = MIN_ROLLOUTS) -> Curve:
    """The curve of a run directory.

    Raises:
        NotARun: recipe.toml or buffer/index.sqlite is missing.
    """
    recipe_path, index = directory / "recipe.toml", directory / "buffer" / "index.sqlite"
    for path in (recipe_path, index):
        if not path.is_file():
            raise NotARun(f"{path} is not there: give the directory of a run")
    recipe = tomllib.loads(recipe_path.read_text(encoding="utf-8"))
    with closing(reading(index)) as db:
        rows = [
            (json.loads(runs)[0][1], reward, [Status(status) for status in json.loads(statuses)])
            for runs, reward, statuses in db.execute(ROLLOUTS)
        ]
    return Curve(
        run=directory.name,
        mode=recipe.get("roc", {}).get("mode", "paper"),
        seed=recipe.get("run", {}).get("seed", 1),
        points=points(rows, min_rollouts),
    )


def points(rows: Iterable[tuple[int, float, list[Status]]], min_rollouts: int) -> tuple[Point, ...]:
    """A point per version from (version, reward, statuses) of rollouts."""
    by_version: dict[int, list[tuple[float, list[Status]]]] = defaultdict(list)
    for version, reward, statuses in rows:
        by_version[version].append((reward, statuses))
    out = []
    for version, rollouts in sorted(by_version.items()):
        right = [[status for status in statuses if not is_infra(status)] for reward, statuses in rollouts if reward > 0]
        num_calls = sum(map(len, right))
        num_failed = sum(is_failure(status) for statuses in right for status in statuses)
        if len(rollouts) >= min_rollouts:
            out.append(
                Point(
                    version=version,
                    num_rollouts=len(rollouts),
                    accuracy=len(right) / len(rollouts),
                    tool_error_in_correct=num_failed / num_calls if num_calls else None,
                )
            )
    return tuple(out)


def median(curves: Sequence[Curve], field: str) -> tuple[list[int], list[float]]:
    """Versions and the median of `field` over the runs, where more than half of them have a value."""
    values: dict[int, list[float]] = defaultdict(list)
    for curve in curves:
        for point in curve.points:
            value = getattr(point, field)
            if value is not None:
                values[point.version].append(value)
    versions = sorted(version for version, some in values.items() if 2 * len(some) > len(curves))
    return versions, [statistics.median(values[version]) for version in versions]


def draw(curves: Sequence[Curve], out: Path) -> None:
    """Write the picture."""
    from matplotlib.figure import Figure  # a second to import, and only needed here

    figure = Figure(figsize=(9.0, 3.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2)
    _panel(panels[0], curves, "accuracy", "accuracy")
    _panel(panels[1], curves, "tool_error_in_correct", "failed calls in correct rollouts")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9, frameon=False
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def _panel(axes: Any, curves: Sequence[Curve], field: str, title: str) -> None:
    for mode in sorted({curve.mode for curve in curves}, key=list(LABELS).index):
        some = [curve for curve in curves if curve.mode == mode]
        for curve in some:
            shown = [point for point in curve.points if getattr(point, field) is not None]
            axes.plot(
                [point.version for point in shown],
                [getattr(point, field) for point in shown],
                color=COLOURS[mode],
                linewidth=0.7,
                alpha=0.45,
            )
        runs = "1 run" if len(some) == 1 else f"median of {len(some)} seeds"
        axes.plot(*median(some, field), color=COLOURS[mode], linewidth=2.4, label=f"{LABELS[mode]} ({runs})")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("learner steps", fontsize=9)
    axes.set_xlim(left=0)
    axes.set_ylim(0.0, 1.02 if field == "accuracy" else None)
    axes.tick_params(labelsize=8)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.curves", description="accuracy and tool errors of runs")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories, any modes and seeds")
    parser.add_argument("--out", type=Path, default=Path("curves.png"), help="the picture (default: curves.png)")
    parser.add_argument("--json", action="store_true", help="print the points")
    parser.add_argument("--min-rollouts", type=int, default=MIN_ROLLOUTS, help="rollouts that a point needs at least")
    options = parser.parse_args(arguments)
    try:
        curves = [read(directory, options.min_rollouts) for directory in options.runs]
    except NotARun as error:
        print(error, file=sys.stderr)
        return 2
    draw(curves, options.out)
    if options.json:
        print(json.dumps([asdict(curve) for curve in curves], indent=1))
    else:
        print(f"{options.out}: {len(curves)} runs, {sum(len(curve.points) for curve in curves)} points")
    return 0


if __name__ == "__main__":
    sys.exit(main())

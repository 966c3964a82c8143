"""Runs as they were recorded, small enough to be kept: `python -m tests.recorded RUN NAME` makes tests/recorded/NAME.

Consumes    the directory of a real run
Produces    its run.json, recipe, summary and metrics, thinned to a few moments of its training; the golden screen
            (`--golden` alone: only the screens of all that are there)
Waits for   nothing
Invariant   what is kept is what was recorded; only the machine's name and places are replaced
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launch.monitor.show import look
from launch.monitor.text import screen

ROOT = Path(__file__).parent / "recorded"
MOMENTS = 8


def keep(run: Path, name: str) -> None:
    """A small copy of a run."""
    target = ROOT / name
    (target / "metrics").mkdir(parents=True, exist_ok=True)
    for file in ("run.json", "recipe.toml", "summary.json"):
        if (run / file).exists():
            (target / file).write_text(_anonymous((run / file).read_text(), run))
    standings = (run / "metrics" / "run.jsonl").read_text().splitlines()
    wanted = _moments([json.loads(line) for line in standings])
    for path in sorted((run / "metrics").glob("*.jsonl")):
        lines = path.read_text().splitlines()
        if path.stem != "steps":
            lines = _until(lines, wanted)
        (target / "metrics" / path.name).write_text(_anonymous("".join(f"{line}\n" for line in lines), run))


def _moments(standings: list[dict[str, object]]) -> list[float]:
    """A few of training, and the last of all."""
    times = [float(str(one["unix_s"])) for one in standings if one["phase"] == "train"]
    step = max(1, len(times) // MOMENTS)
    return [*times[::step], times[-1], float(str(standings[-1]["unix_s"]))]


def _until(lines: list[str], wanted: list[float]) -> list[str]:
    """The last line up to each moment."""
    times = [json.loads(line)["unix_s"] for line in lines]
    found = {max((at for at, time in enumerate(times) if time <= moment), default=-1) for moment in wanted}
    return [lines[at] for at in sorted(found - {-1})]


def _anonymous(text: str, run: Path) -> str:
    for found, shown in ((str(run), "runs/quickstart"), (str(Path.cwd()) + "/", ""), ('"host":"vm"', '"host":"node"')):
        text = text.replace(found, shown)
    return text


def shown(name: str) -> str:
    """The screen of a recorded run."""
    return "".join(f"{line.rstrip()}\n" for line in screen(*look(ROOT / name)))


if __name__ == "__main__":
    if sys.argv[1:] != ["--golden"]:
        keep(Path(sys.argv[1]).absolute(), sys.argv[2])
    for folder in sorted(ROOT.iterdir()):
        (folder / "screen.txt").write_text(shown(folder.name))
        print(folder)

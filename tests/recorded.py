"""Runs as they were recorded, small enough to be kept: `python -m tests.recorded RUN NAME` makes tests/recorded/NAME.

Consumes    the directory of a real run
Produces    its run.json, recipe, summary and metrics, thinned to a few moments of its training; its index with the
            rollouts of its newest groups; the golden screen and, where there is an index, the golden drill-downs
            (`--golden` alone: only these, of all that are there)
Waits for   nothing
Invariant   what is kept is what was recorded; only the machine's name and places are replaced
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path

from launch.monitor.desk import VIEWS, Desk
from launch.monitor.show import look
from launch.monitor.sources import Directory
from launch.monitor.text import screen

ROOT = Path(__file__).parent / "recorded"
MOMENTS = 8
NUM_GROUPS = 6
"""whose rollouts are kept"""
FEW = "group_id IN (SELECT group_id FROM groups WHERE decided_unix_s IS NOT NULL ORDER BY group_id DESC LIMIT ?)"


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
    if (run / "buffer" / "index.sqlite").exists():
        keep_records(run, target)


def keep_records(run: Path, target: Path) -> None:
    """The index, a segment with the payload of the turns that stay in it, the tokenizer."""
    (target / "buffer" / "segments").mkdir(parents=True, exist_ok=True)
    path = target / "buffer" / "index.sqlite"
    path.unlink(missing_ok=True)
    index = f"file:{run}/buffer/index.sqlite?mode=ro"
    with closing(sqlite3.connect(index, uri=True)) as source, closing(sqlite3.connect(path)) as db:
        source.backup(db)
        db.executescript("PRAGMA journal_mode = DELETE; PRAGMA foreign_keys = OFF")
        for table in ("rollouts", "turns"):
            db.execute(f"DELETE FROM {table} WHERE NOT {FEW}", (NUM_GROUPS,))
        _pack(db, run / "buffer" / "segments", target / "buffer" / "segments" / "00000001.seg")
        db.commit()
        db.executescript("PRAGMA page_size = 1024; VACUUM")
    (target / "export").mkdir(exist_ok=True)
    (target / "export" / "tokenizer.json").write_bytes((run / "export" / "tokenizer.json").read_bytes())


def _pack(db: sqlite3.Connection, segments: Path, target: Path) -> None:
    rows = db.execute("SELECT group_id, rollout, turn, segment, offset_bytes, length_bytes FROM turns ORDER BY 4, 5")
    with target.open("wb") as file:
        file.write((segments / "00000001.seg").read_bytes()[:8])
        for *key, segment, offset, length in rows.fetchall():
            record = (segments / f"{segment:08d}.seg").read_bytes()[offset : offset + length]
            where = "SET segment = 1, offset_bytes = ? WHERE group_id = ? AND rollout = ? AND turn = ?"
            db.execute(f"UPDATE turns {where}", (file.tell(), *key))
            file.write(record)


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


def drilled(name: str) -> dict[str, str]:
    """The drill-downs of a recorded run, by view; times of day as they are in UTC."""
    out = {}
    for key, view in VIEWS.items():
        desk = Desk(Directory(ROOT / name, None, lambda snapshot, fix: ""))
        desk.press(key)
        page = desk.page()
        assert not page.failed, page.failed
        out[view] = "".join(f"{line.rstrip()}\n" for line in page.lines)
    return out


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"
    time.tzset()
    if sys.argv[1:] != ["--golden"]:
        keep(Path(sys.argv[1]).absolute(), sys.argv[2])
    for folder in sorted(ROOT.iterdir()):
        (folder / "screen.txt").write_text(shown(folder.name))
        if (folder / "buffer").is_dir():
            for view, text in drilled(folder.name).items():
                (folder / f"{view}.txt").write_text(text)
        print(folder)

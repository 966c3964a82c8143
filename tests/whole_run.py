"""A small run of a shipped recipe by its commands, and what is asked of it: shared by the tests of whole runs.

Consumes    a directory; overrides
Produces    `rocstar` processes that carry a mark, so that what they leave behind can be found and ended
Waits for   their ends, steps on record: each at most PATIENCE_S
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

from launch import warden
from tests import audit

ROOT = Path(__file__).parents[1]
SMALL = (
    "groups.groups_per_step=2",
    "groups.group_size=4",
    "roc.min_per_side=1",
    "problems.num_heldout=16",
    "rollout.concurrency=32",
    "learner.checkpoint_every=2",
    "buffer.keep_segments=true",
)
ENDLESS = ("run.steps=100000", "learner.lr=1e-5", "evaluation.at_start=false")
"""So little is learnt that there always is something left to learn from: a run goes on until something ends it."""
PATIENCE_S = 240.0


class Command:
    """`rocstar` commands for one run directory, whose processes all carry a mark."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.marks = {"ROCSTAR_TEST": uuid.uuid4().hex}
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        log = open(self.directory.with_suffix(".out"), "ab")  # noqa: SIM115 - the child's
        with log:
            process = subprocess.Popen(
                [sys.executable, "-m", "launch", *arguments],
                cwd=ROOT,
                env=os.environ | self.marks | {"OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process

    def run(self, *overrides: str, recipe: str = "quickstart") -> subprocess.Popen[bytes]:
        sets = [part for override in (*SMALL, *overrides) for part in ("--set", override)]
        return self.start("run", f"launch/recipes/{recipe}.toml", "--set", f"run.directory={self.directory}", *sets)

    def ended(self, process: subprocess.Popen[bytes], code: int) -> None:
        assert process.wait(PATIENCE_S) == code, self.told()

    def told(self) -> str:
        logs = [self.directory.with_suffix(".out"), *sorted((self.directory / "logs").glob("*.log"))]
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in logs)

    def until_step(self, step: int) -> None:
        """Returns once the batch of `step` is on record."""
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            if self.steps_taken() > step:
                return
            time.sleep(0.2)
        raise AssertionError(f"no step {step} within {PATIENCE_S} s\n{self.told()}")

    def steps_taken(self) -> int:
        index = self.directory / "buffer" / "index.sqlite"
        if not index.exists():
            return 0
        with closing(sqlite3.connect(f"file:{index}?mode=ro", uri=True)) as db:
            try:
                return int(db.execute("SELECT count(*) FROM batches").fetchone()[0])
            except sqlite3.OperationalError:  # the table is not there yet
                return 0

    def nothing_left(self, within_s: float = 0.0) -> None:
        end_s = time.monotonic() + within_s
        while (left := warden.marked(self.marks)) and time.monotonic() < end_s:
            time.sleep(0.1)
        assert left == []

    def close(self) -> None:
        """Ends what is left, the run's own warden among it: only where a test has failed."""
        warden.kill_marked(self.marks)
        for process in self._started:
            process.wait(PATIENCE_S)

    def summary(self) -> dict[str, Any]:
        out: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return out


def sound(directory: Path) -> dict[str, Any]:
    """The audit's figures; nothing it found wrong."""
    report = audit.report.audit(directory)
    assert report.sound, "\n".join(report.lines())
    return report.figures

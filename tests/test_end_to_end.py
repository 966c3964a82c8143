"""The whole system, for real: Ray, vLLM, the sandbox, the buffer, DeepSpeed; a few steps of the repository's models."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from launch import warden
from tests import audit

pytestmark = pytest.mark.slow

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
UNLEARNING = ("learner.lr=1e-5", "evaluation.at_start=false")
"""So little is learnt that there always is something left to learn from: no run ends before its last step."""
PATIENCE_S = 240.0


class Command:
    """`rocstar` commands for one run directory, whose processes all carry a mark."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.marks = {"ROCSTAR_TEST": uuid.uuid4().hex}

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        log = open(self.directory.with_suffix(".out"), "ab")  # noqa: SIM115 - the child's
        with log:
            return subprocess.Popen(
                [sys.executable, "-m", "launch", *arguments],
                cwd=ROOT,
                env=os.environ | self.marks | {"OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

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

    def summary(self) -> dict[str, Any]:
        out: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return out


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    command = Command(tmp_path / "run")
    yield command
    warden.kill_marked(command.marks)  # the run's own warden among them, so only where a test has failed


def sound(directory: Path) -> dict[str, Any]:
    """The audit's figures; nothing it found wrong."""
    report = audit.report.audit(directory)
    assert report.sound, "\n".join(report.lines())
    return report.figures


def test_three_steps_train_end_in_order_and_leave_nothing_behind(command: Command) -> None:
    command.ended(command.run("run.steps=3"), 0)
    command.nothing_left()
    summary, figures = command.summary(), sound(command.directory)
    assert (summary["outcome"], summary["learner_steps"], figures["groups_trained"]) == ("reached", 3, 6)
    assert summary["age_max"] <= summary["max_staleness"] == 1
    assert summary["heldout_finished_start"] == summary["heldout_finished_end"] == 16
    names = {"buffer-0", "filter-0", "learner-0", "rollout-0", "sandbox-0"}
    assert names == set(summary["roles"])
    assert names <= {path.stem for path in (command.directory / "metrics").iterdir()}
    for name in ("buffer-0", "filter-0", "learner-0"):
        role = summary["roles"][name]
        assert sum(role["clock"].values()) == pytest.approx(role["wall_s"], rel=0.01)
    assert (command.directory / "export" / "config.json").exists()

    command.ended(command.start("resume", str(command.directory), "--set", "run.steps=4"), 0)
    assert command.summary()["reason"] == "all 4 steps are trained"
    figures = sound(command.directory)
    assert figures["groups_trained"] == 8
    assert set(figures["evaluations"]) == {"start", "step_3_life_1", "end"}


def test_a_run_goes_on_after_its_driver_was_killed_and_after_a_signal(command: Command) -> None:
    driver = command.run("run.steps=8", *UNLEARNING)
    command.until_step(1)
    driver.kill()
    driver.wait()
    command.nothing_left(within_s=15.0)

    taken = command.steps_taken()
    driver = command.start("resume", str(command.directory))
    command.until_step(taken)
    driver.send_signal(signal.SIGTERM)
    command.ended(driver, 75)
    command.nothing_left()
    assert command.summary()["outcome"] == "interrupted"

    command.ended(command.start("resume", str(command.directory)), 0)
    command.nothing_left()
    assert command.summary()["learner_steps"] == 8
    assert sound(command.directory)["groups_trained"] == 16


def test_another_model_and_template_train_by_their_recipe_alone(command: Command) -> None:
    command.ended(command.run("run.steps=3", "staleness.max_staleness=0", recipe="tiny-llama"), 0)
    command.nothing_left()
    summary, figures = command.summary(), sound(command.directory)
    assert (summary["outcome"], figures["groups_trained"], summary["age_max"]) == ("reached", 6, 0)
    assert sum(row["calls"] for row in figures["versions"]) > 0  # in correct rollouts: its calls are understood
    steps = [json.loads(line) for line in (command.directory / "metrics" / "steps.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    assert max(step["logprob_diff_max"] for step in steps) < 1e-3  # the engine serves each version the learner made

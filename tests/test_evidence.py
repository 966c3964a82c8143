"""What evidence says of the times in a run, by hand; every kept file names the commit and command that made it."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.evidence.times import times
from tests.run_writer import write_run

KEPT = sorted((Path(__file__).parent / "evidence").glob("*.json"))


def test_the_times_of_a_run_are_those_of_its_index(tmp_path: Path) -> None:
    """Batches are taken at second 0, versions published at 10, 20 and 30, every turn received at 0."""
    write_run(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    os.utime(tmp_path / "run.json", (-2.0, -2.0))
    with closing(sqlite3.connect(tmp_path / "buffer" / "index.sqlite")) as db, db:
        for group, decided_s in ((0, 5.0), (1, 61.0), (2, 60.0), (3, -1.0)):
            db.execute("UPDATE groups SET decided_unix_s = ? WHERE group_id = ?", (decided_s, group))
        db.execute("UPDATE groups SET deadline_step = 1 WHERE group_id = 3")
        db.execute("UPDATE rollouts SET num_tokens = 11, num_output_tokens = 5")
        turns = db.execute("SELECT count(*) FROM turns").fetchone()[0]
    told = times(tmp_path)
    assert (told["first_batch_s"], told["first_step_published_s"], told["learner_computing_s"]) == (2.0, 12.0, 60.0)
    assert told["turns_received_while_learner_computed"] == 3 * turns
    assert (told["deadlines_met"], told["deadlines_missed"]) == (2, 1)
    assert told["window"] == {
        "seconds": 60.0,
        "groups": 2,
        "rollouts": 8,
        "rollouts_per_s": 0.1,
        "tokens_per_rollout": 11.0,
        "output_tokens_per_rollout": 5.0,
        "steps_taken": 3,
    }


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_every_kept_file_says_where_it_comes_from(path: Path) -> None:
    told = json.loads(path.read_text())
    assert {"commit", "command", "machine"} <= set(told)
    assert "summary" in told or "report" in told

"""The audit finds what it is for: a small run is sound, each falsified copy of it is not."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.audit import audit
from tests.run_writer import write_run


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that keeps its promises."""
    directory = tmp_path_factory.mktemp("sound")
    write_run(directory)
    return directory


SUMMARY = {
    "learner_steps": 3,
    "groups_trained": 3,
    "groups_dropped": {"all_right": 1},
    "groups_by_state": {"released": 3, "dropped": 1},
    "rollouts_finished": 16,
    "age_mean": 16 / 30,
    "age_in_flight_mean": 6 / 30,
    "age_in_queue_mean": 10 / 30,
    "age_max": 1,
    "age_histogram": {"0": 14, "1": 16},
    "max_staleness": 1,
    "tokens_generated": 4 * 4 * 5 + 4 * 5,
    "tokens_trained": 30,
    "heldout_accuracy_start": 0.5,
    "heldout_accuracy_end": 1.0,
    "tool_error_in_correct_start": 1.0,
    "tool_error_in_correct_end": 1.0,
}


def changed(sound: Path, tmp_path: Path, *sql: str) -> Path:
    """A copy of the run, with its index changed."""
    copy = tmp_path / "run"
    shutil.copytree(sound, copy)
    with sqlite3.connect(copy / "buffer" / "index.sqlite") as db:
        for statement in sql:
            assert db.execute(statement).rowcount > 0, statement
    db.close()
    (copy / "summary.json").write_text(json.dumps(SUMMARY))
    return copy


def test_a_sound_run_is_found_sound_and_its_figures_are_those_worked_out_by_hand(sound: Path, tmp_path: Path) -> None:
    report = audit(changed(sound, tmp_path))
    assert list(report.lines()) == []
    assert [row["version"] for row in report.figures["versions"]] == [0, 1]
    assert report.figures["versions"][0]["tool_error_in_correct"] == 3 / 4


@pytest.mark.parametrize(
    ("check", "sql"),
    [
        ("batches", "UPDATE groups SET step = 0 WHERE group_id = 1"),
        ("batches", "DELETE FROM batches WHERE step = 1"),
        ("batches", "UPDATE rollouts SET reward = 0.0, verdict = 'wrong' WHERE group_id = 0 AND rollout = 1"),
        ("staleness", "UPDATE groups SET deadline_step = 0, max_staleness = 0 WHERE group_id = 1"),
        ("staleness", "UPDATE turns SET version_runs = '[[1, 0, 2]]' WHERE group_id = 3 AND rollout = 0 AND turn = 1"),
        ("staleness", "UPDATE turns SET version_runs = '[[1, 9, 2]]' WHERE group_id = 3 AND rollout = 0 AND turn = 1"),
        ("staleness", "UPDATE turns SET version_runs = '[[1, 2, 3]]' WHERE group_id = 1000 AND turn = 0"),
        ("problems", "UPDATE groups SET problem_index = 0 WHERE group_id = 1"),
        ("problems", "UPDATE groups SET problem_index = problem_index + 1 WHERE kind = 'train'"),
        (
            "problems",
            "UPDATE groups SET problem = (SELECT problem FROM groups WHERE group_id = 1000) WHERE group_id = 3",
        ),
        ("selection", "UPDATE groups SET kept = '[1, 7]' WHERE group_id = 0"),
        ("selection", "UPDATE groups SET kept = '[0, 1]' WHERE group_id = 0"),
        ("selection", "UPDATE groups SET p_err = '[0.0, 0.0, 0.0, 0.0]' WHERE group_id = 0"),
        ("selection", "UPDATE rollouts SET reward = 0.0, verdict = 'wrong' WHERE group_id = 2 AND rollout = 0"),
        ("scores", "UPDATE rollouts SET statuses = '[\"ok\"]' WHERE group_id = 0 AND rollout = 0"),
        ("scores", "UPDATE rollouts SET reward = 1.0, verdict = 'right' WHERE group_id = 0 AND rollout = 3"),
        ("scores", "UPDATE rollouts SET num_output_tokens = 6 WHERE group_id = 0 AND rollout = 3"),
        ("scores", "DELETE FROM turns WHERE group_id = 2 AND rollout = 3 AND turn = 0"),
        ("payload", "UPDATE turns SET num_observation_tokens = 9 WHERE group_id = 2 AND rollout = 3 AND turn = 0"),
        ("payload", "DELETE FROM turns WHERE group_id = 2 AND rollout = 3 AND turn = 0"),
        ("payload", "UPDATE turns SET offset_bytes = offset_bytes + 1 WHERE group_id = 2 AND rollout = 3 AND turn = 0"),
    ],
)
def test_each_broken_promise_is_found(sound: Path, tmp_path: Path, check: str, sql: str) -> None:
    assert audit(changed(sound, tmp_path, sql)).findings[check]


def test_a_flipped_byte_and_a_missing_segment_are_found(sound: Path, tmp_path: Path) -> None:
    run = changed(sound, tmp_path)
    first = min((run / "buffer" / "segments").glob("*.seg"))
    data = bytearray(first.read_bytes())
    data[200] ^= 1
    first.write_bytes(data)
    assert "torn or altered" in audit(run).findings["payload"][0]
    last = max((run / "buffer" / "segments").glob("*.seg"))
    last.unlink()
    assert any("is gone" in line for line in audit(run).findings["payload"])


def test_what_was_written_behind_the_last_acknowledged_turn_is_no_finding(sound: Path, tmp_path: Path) -> None:
    run = changed(sound, tmp_path)
    with max((run / "buffer" / "segments").glob("*.seg")).open("ab") as file:
        file.write(b"RoCr torn by a crash")
    assert audit(run).sound


@pytest.mark.parametrize("name", SUMMARY)
def test_each_false_claim_is_found(sound: Path, tmp_path: Path, name: str) -> None:
    run = changed(sound, tmp_path)
    true = SUMMARY[name]
    false = {**true, next(iter(true)): 7} if isinstance(true, dict) else true + 0.01  # type: ignore[operator]
    (run / "summary.json").write_text(json.dumps(SUMMARY | {name: false}))
    assert audit(run).findings["summary"][0].startswith(f"{name} = ")
    (run / "summary.json").write_text(json.dumps({key: value for key, value in SUMMARY.items() if key != name}))
    assert audit(run).findings["summary"][0].startswith(f"{name} is missing")


def test_the_command_exits_with_what_it_found(sound: Path, tmp_path: Path) -> None:
    def command(run: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tests.audit", str(run)],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parents[1],
        )

    run = changed(sound, tmp_path)
    held = command(run)
    assert (held.returncode, held.stdout.splitlines()[-1]) == (0, "all claims hold"), held.stderr
    (run / "summary.json").write_text(json.dumps(SUMMARY | {"age_max": 0}))
    differs = command(run)
    assert differs.returncode == 1
    assert "age_max = 0 is claimed; recomputed: 1" in differs.stdout
    assert command(tmp_path / "nowhere").returncode == 2


def test_the_audit_imports_nothing_of_ours() -> None:
    code = "import sys, tests.audit.__main__; print(sorted(m.split('.')[0] for m in sys.modules))"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    assert not {"buffer", "actors", "learner", "sandbox", "launch"} & set(eval(shown.stdout))

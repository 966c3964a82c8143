"""The audit finds what it is for: a small run written by the real index and segments is sound, each falsified copy not.

The run: P = 1, S = 1, G = 2 of 4, three trained steps, one group dropped as all right, an evaluation at both ends.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgpack
import numpy as np
import pytest

from buffer.codec import encode
from buffer.index import Index, Statement, put_meta
from buffer.schema import Batch, BatchGroup, Turn, VersionRun
from buffer.segments import Place, Segments, record_bytes
from tests.audit import audit

GROUP = """INSERT INTO groups (group_id, kind, phase, problem_index, problem_id, problem, num_rollouts, base_version,
    deadline_step, max_staleness, issued_unix_s, state, drop_reason, kept, p_err, p_format, step)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?, ?, ?, ?)"""
ROLLOUT = """INSERT INTO rollouts (group_id, rollout, state, attempt, reward, verdict, answer, well_formed, num_answers,
    num_turns, statuses, num_output_tokens, num_tokens, end)
    VALUES (?, ?, 'finished', 1, ?, ?, ?, 1, 1, 2, ?, 5, 11, 'answer')"""
TURN = """INSERT INTO turns (group_id, rollout, turn, attempt, engine, epoch, segment, offset_bytes, length_bytes,
    num_prompt_tokens, num_output_tokens, num_observation_tokens, version_runs, status, received_unix_s)
    VALUES (?, ?, ?, 1, 'rollout-0', 1, ?, ?, ?, ?, ?, ?, ?, ?, 0)"""


class Writer:
    """Collects a run's statements and records, and writes them as the buffer does."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.segments = Segments(directory / "buffer" / "segments", 1500, 0, 0)
        self.statements: list[Statement] = []
        self.records: list[tuple[Place, bytes, bytes]] = []

    def group(
        self, number: int, kind: str, phase: str, versions: tuple[int, int], rights: str, **fields: object
    ) -> None:
        """A group whose rollouts call the tool in turn 0 and answer in turn 1; `rights` has a digit per rollout."""
        statuses = ["ok" if at % 2 else "error" for at in range(len(rights))]
        train = kind == "train"
        problem = msgpack.packb([f"{kind}-{number}", f"{kind} {number} + 1 = ?", str(number + 1), "", ""])
        row = {"state": "scored", "drop_reason": "", "kept": [], "step": None} | fields
        position, base = number if train else number % 10, versions[0]
        values = (number, kind, phase, position, f"{kind}-{number}", problem, len(rights), base)
        values += (base + 1, 1) if train else (-1, 0)
        values += (row["state"], row["drop_reason"], json.dumps(row["kept"]))
        values += (json.dumps([float(status == "error") for status in statuses]), json.dumps([0.0] * len(rights)))
        self.statements.append((GROUP, (*values, row["step"])))
        for rollout, right in enumerate(rights):
            self.rollout(number, rollout, right == "1", statuses[rollout], versions)

    def rollout(self, group: int, rollout: int, right: bool, status: str, versions: tuple[int, int]) -> None:
        answer = group + 1 if right else group
        score = (group, rollout, float(right), "right" if right else "wrong", str(answer), json.dumps([status]))
        self.statements.append((ROLLOUT, score))
        for number in (0, 1):
            num_prompt, num_output, num_observation = ((4, 3, 2), (0, 2, 0))[number]
            runs = (VersionRun(lineage=1, version=versions[number], num_tokens=num_output),)
            turn = Turn(
                group=group,
                rollout=rollout,
                attempt=1,
                turn=number,
                prompt_ids=np.arange(num_prompt, dtype=np.int32),
                output_ids=np.arange(num_output, dtype=np.int32),
                logprobs=np.full(num_output, -0.5, np.float32),
                version_runs=runs,
                observation_ids=np.arange(num_observation, dtype=np.int32),
                status="" if number else status,
            )
            body, payload = encode(Turn, turn)
            place = self.segments.place(record_bytes(body, payload))
            self.records.append((place, body, payload))
            where = (place.segment, place.offset_bytes, place.length_bytes, num_prompt, num_output, num_observation)
            covered = json.dumps([[run.lineage, run.version, run.num_tokens] for run in runs])
            self.statements.append((TURN, (group, rollout, number, *where, covered, turn.status)))

    def take(self, step: int, number: int, base: int, kept: tuple[int, int], rewards: tuple[float, float]) -> None:
        group = BatchGroup(
            group=number,
            base=base,
            deadline=base + 1,
            rollouts=kept,
            rewards=rewards,
            num_tokens=(11, 11),
            num_output_tokens=(5, 5),
        )
        record, _ = encode(Batch, Batch(step=step, groups=(group,)))
        self.statements.append(("INSERT INTO batches VALUES (?, 0, ?, ?)", (step, base, record)))
        self.statements.append(("INSERT INTO publications VALUES (1, ?, 0)", (step + 1,)))

    def close(self) -> None:
        self.segments.append(self.records)
        self.segments.close()
        index = Index(self.directory / "buffer" / "index.sqlite")
        index.commit(self.statements)
        index.close()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that keeps its promises."""
    writer = Writer(tmp_path_factory.mktemp("sound"))
    writer.statements += [put_meta(*pair) for pair in (("run", "r"), ("max_staleness", 1), ("group_size", 2))]
    for phase, version, rights in (("start", 0, "0"), ("end", 3, "1")):
        writer.statements.append(("INSERT INTO evaluations VALUES (?, 1, ?, 2, 0, 0)", (phase, version)))
        for problem in (1000, 1001):
            number = problem + 10 * version
            writer.group(number, "eval", phase, (version, version), "1" if problem == 1001 else rights)
    writer.group(0, "train", "", (0, 0), "1100", state="taken", kept=[1, 2], step=0)
    writer.group(1, "train", "", (0, 1), "1010", state="taken", kept=[0, 3], step=1)
    writer.group(2, "train", "", (1, 1), "1111", state="dropped", drop_reason="all_right")
    writer.group(3, "train", "", (1, 2), "0111", state="taken", kept=[0, 3], step=2)
    writer.take(0, 0, 0, (1, 2), (1.0, 0.0))
    writer.take(1, 1, 0, (0, 3), (1.0, 0.0))
    writer.take(2, 3, 1, (0, 3), (0.0, 1.0))
    writer.close()
    return writer.directory


SUMMARY = {
    "learner_steps": 3,
    "groups_trained": 3,
    "groups_dropped": {"all_right": 1},
    "age_mean": (0 * 10 + 1 * 6 + 0 * 4 + 1 * 6 + 0 * 4) / 30,
    "age_max": 1,
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
    assert report.figures["age_histogram"] == {"0": 18, "1": 12}
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
    false = {"all_wrong": 1} if name == "groups_dropped" else SUMMARY[name] + 0.01  # type: ignore[operator]
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

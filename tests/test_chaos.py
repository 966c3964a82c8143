"""Chaos judges rightly: what it does follows from its seed, and each kind of loss that it looks for is found."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import zlib
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch import warden
from tests.chaos import verdict
from tests.chaos.__main__ import Deeds, sound, too_short, torment
from tests.chaos.plan import ROLES, plan
from tests.chaos.verdict import Dealt
from tests.chaos.victim import ROOT, SMALL, boot_error_s, connections
from tests.chaos.witness import Notes, Witness
from tests.run_writer import write_run

CHECKSUMS = [10, 11, 12, 13]


def line(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "groups": 1,
        "trajectories": 2,
        "tokens": 22,
        "reward_mean": 0.5,
        "recomputed": False,
    } | changes


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("written")
    write_run(directory)
    (directory / "metrics").mkdir()
    lines = [line(0), line(1), line(1, recomputed=True), line(2)]
    (directory / "metrics" / "steps.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    with sqlite3.connect(directory / "buffer" / "index.sqlite") as db:
        rows = [(lineage, version, checksum) for version, checksum in enumerate(CHECKSUMS) for lineage in (1, 2)]
        db.executemany("INSERT INTO checksums VALUES (?, ?, ?)", rows)
        db.execute("INSERT INTO checkpoints VALUES (1, 0, 1)")
        db.execute("INSERT INTO meta VALUES ('meters', '{}')")
    return directory


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    """A copy, to be falsified."""
    return Path(shutil.copytree(written, tmp_path / "run"))


def seen(directory: Path) -> Notes:
    witness = Witness(directory)
    witness.look()
    return witness.notes


def change(directory: Path, sql: str, *values: Any) -> None:
    with sqlite3.connect(directory / "buffer" / "index.sqlite") as db:
        assert db.execute(sql, values).rowcount > 0


def test_blows_follow_from_the_seed_and_leave_nobody_out() -> None:
    blows = list(islice(plan(7), 60))
    assert blows == list(islice(plan(7), 60))
    assert blows != list(islice(plan(8), 60))
    for first in range(0, 60, len(ROLES) + 1):
        some = blows[first : first + len(ROLES) + 1]
        kinds = Counter(blow.kind for blow in some)
        assert kinds["kill"] == len(ROLES)
        assert {blow.role for blow in some if blow.kind == "kill"} == set(ROLES)


def test_a_run_that_kept_everything_is_found_whole(run: Path) -> None:
    notes = seen(run)
    assert len(notes.turns) == 40
    assert verdict.lost(run, notes) == verdict.twice(run, notes) == []
    assert verdict.not_once(run, notes, CHECKSUMS) == {}
    assert verdict.older_than_promised(run) == (0, 0)


def test_a_turn_that_is_gone_or_altered_is_lost(run: Path) -> None:
    notes = seen(run)
    change(run, "DELETE FROM turns WHERE group_id = 2 AND rollout = 1 AND turn = 1")
    path = run / "buffer" / "segments" / f"{notes.turns[0, 0, 0].segment:08d}.seg"
    data = bytearray(path.read_bytes())
    data[notes.turns[0, 0, 0].offset + 30] ^= 1
    path.write_bytes(bytes(data))
    lost = verdict.lost(run, notes)
    assert len(lost) == 2
    assert lost[0].startswith("turn (0, 0, 0)")
    assert lost[1].startswith("turn (2, 1, 1)")


def test_a_turn_that_an_engine_heard_acknowledged_and_nobody_ever_read_is_missing(run: Path) -> None:
    """The index can't tell: it never held it."""
    change(run, "UPDATE turns SET epoch = 2 WHERE group_id = 3")
    stored = dict(verdict.rows(run, "SELECT epoch, count(*) FROM turns GROUP BY epoch"))
    notes = Notes(hellos={("rollout-0", 1, 10.0), ("rollout-0", 2, 20.0), ("filter-0", 3, 20.0)})

    def told(unix_s: float, count: int) -> str:
        return json.dumps({"unix_s": unix_s, "histograms": {"push_s": {"counts": [1, count - 1]}}}) + "\n"

    path = run / "metrics" / "rollout-0.jsonl"
    silent = json.dumps({"unix_s": 9.0, "histograms": {}}) + "\n"
    path.write_text(silent + told(11.0, 3) + told(19.0, stored[1]) + told(21.0, stored[2]) + '{"unix_s": 22')
    assert verdict.missing(run, notes) == []
    path.write_text(told(19.0, stored[1]) + told(20.0, stored[2] + 1))
    assert verdict.missing(run, notes) == [
        f"rollout-0, epoch 2: {stored[2] + 1} turns were acknowledged, {stored[2]} are on record"
    ]


def test_a_turn_that_came_twice_is_found(run: Path) -> None:
    witness = Witness(run)
    witness.look()
    last = max(witness.notes.turns.values(), key=lambda turn: (turn.segment, turn.offset))
    path = run / "buffer" / "segments" / f"{last.segment:08d}.seg"
    data = path.read_bytes()
    path.write_bytes(data + data[last.offset : last.offset + last.length])
    change(
        run,
        "UPDATE turns SET offset_bytes = ? WHERE segment = ? AND offset_bytes = ?",
        len(data),
        last.segment,
        last.offset,
    )
    witness.look()
    assert len(witness.notes.changed) == 1
    assert any("is in the segments 2 times" in text for text in verdict.twice(run, witness.notes))


def test_turns_that_the_buffer_had_to_refuse_count_as_twice(run: Path) -> None:
    change(run, "UPDATE meta SET value = ? WHERE key = 'meters'", json.dumps({"counters": {"refused/out_of_order": 3}}))
    assert verdict.twice(run, Notes()) == ["3 turns came again that were durable already"]


STEPS: dict[str, tuple[list[dict[str, Any]], list[int]]] = {
    "steps are left out": ([line(0), line(2)], [-1, 0, 1]),
    "a life begins where no checkpoint was": ([line(0), line(1), line(0), line(1), line(2), line(2)], [-1]),
    "other tokens": ([line(0), line(1, tokens=21), line(2)], [1]),
    "another reward": ([line(0), line(1), line(2, reward_mean=1.0)], [2]),
}
"""the log's lines, and which steps are amiss (-1: the order of lives)"""


@pytest.mark.parametrize("name", STEPS)
def test_a_batch_that_is_not_once_in_the_weights_is_found_in_the_log(run: Path, name: str) -> None:
    lines, amiss = STEPS[name]
    (run / "metrics" / "steps.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    change(run, "DELETE FROM checkpoints")
    assert sorted(verdict.not_once(run, Notes(), CHECKSUMS)) == amiss


def test_weights_that_the_recorded_batches_do_not_give_are_found(run: Path) -> None:
    change(run, "UPDATE checksums SET checksum = 7 WHERE lineage = 2 AND version = 2")
    assert list(verdict.not_once(run, Notes(), CHECKSUMS)) == [1]
    assert list(verdict.not_once(run, Notes(), CHECKSUMS[:2])) == [1, 2], "a replay that broke off proves nothing"


def test_a_version_whose_weights_nobody_knows_proves_nothing(run: Path) -> None:
    change(run, "DELETE FROM checksums WHERE version = 3")
    assert verdict.not_once(run, Notes(), CHECKSUMS) == {2: "version 3 was never published: its weights are not known"}


def test_an_ancestry_has_each_step_once_across_lives() -> None:
    lines = [line(step) for step in (0, 1, 2, 3, 2, 3, 4, 4, 5)]
    known, faults = verdict.ancestry(lines, {2, 4})
    assert faults == []
    assert known[6] == (0, 1, 2, 3, 4, 5)
    _, faults = verdict.ancestry(lines, {2})
    assert faults == ["a life began at version 4, of which no checkpoint was ever seen"]


def test_a_token_beyond_the_promise_is_counted(run: Path) -> None:
    change(run, "UPDATE groups SET max_staleness = 0 WHERE group_id = 1")
    assert verdict.older_than_promised(run) == (6, 1)


def dealt(role: str, at_s: float) -> Dealt:
    return Dealt(role=role, kind="kill", at_s=at_s, pid=1, hit=True)


def test_recovery_is_the_first_product_of_a_later_life(run: Path) -> None:
    change(run, "UPDATE turns SET received_unix_s = 100 + group_id, status = ''")
    change(run, "UPDATE turns SET epoch = 2, received_unix_s = 150 WHERE group_id = 3")
    notes = Notes(publications={(1, 0): 90.0, (1, 1): 105.0, (2, 1): 130.0})
    notes.hellos = {("rollout-0", 1, 80.0), ("rollout-0", 2, 120.0), ("learner-0", 1, 80.0), ("learner-0", 2, 120.0)}
    blows = [dealt("rollout", 101.5), dealt("learner", 101.5), dealt("buffer", 100.5), dealt("buffer", 140.0)]
    assert verdict.recoveries(run, notes, blows, 400.0) == {
        "rollout": [48.5],
        "learner": [28.5],
        "buffer": [0.5, 10.0],
    }
    assert verdict.recoveries(run, notes, [dealt("learner", 200.0)], 400.0) == {"learner": [None]}
    assert verdict.recoveries(run, notes, [dealt("learner", 399.0)], 400.0) == {}, "the end came first"
    change(run, "UPDATE groups SET decided_unix_s = 100 + group_id WHERE group_id >= 0")
    notes.hellos |= {("filter-0", 1, 80.0), ("filter-0", 2, 102.5)}
    told = verdict.recoveries(run, notes, [dealt("filter", 100.5)], 400.0)
    assert told == {"filter": [2.5]}, "a decision that the dead one had sent is none of the next one's"
    twice_killed = [dealt("rollout", 101.5), dealt("rollout", 110.0)]
    assert verdict.recoveries(run, notes, twice_killed, 400.0) == {"rollout": [40.0]}


def test_a_run_that_ends_before_its_minutes_is_a_finding() -> None:
    assert too_short(Deeds(minutes=10.4), 20.0) == ["the run was over after 10.4 of 20 minutes"]
    assert too_short(Deeds(minutes=20.0), 20.0) == too_short(Deeds(minutes=10.4), 0.0) == []


def test_a_cut_counts_what_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0]:
            own, ours = psutil.Process(), client.getsockname()[1]
            assert connections(own, port) == {(ours, port), (port, ours)}
            assert connections(own, port + 1 if port < 65535 else 1) == set()
            client.close()
            assert (ours, port) not in connections(own, port)


def test_the_birth_of_a_process_is_told_to_a_part_of_a_second() -> None:
    before_s = time.time()
    with subprocess.Popen(["sleep", "100"]) as process:
        after_s = time.time()
        born_s = psutil.Process(process.pid).create_time() + boot_error_s()
        process.kill()
    assert before_s - 0.05 < born_s < after_s + 0.05


@pytest.mark.parametrize(("share", "expected"), [(0.5, 3), (0.95, 5), (0.2, 1), (0.21, 2)])
def test_quantiles_are_values_that_occurred(share: float, expected: int) -> None:
    assert verdict.quantile([5, 3, 1, 2, 4], share) == expected
    assert verdict.quantile([], share) is None


def test_a_witness_without_a_run_waits_for_one(tmp_path: Path) -> None:
    notes = seen(tmp_path)
    assert not notes.turns
    assert notes.changed == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_chaos_that_is_ended_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    marks = {"ROCSTAR_TEST": f"chaos-{zlib.crc32(str(tmp_path).encode())}-{os.getpid()}"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos", "--directory", str(tmp_path / "run")], cwd=ROOT, env=os.environ | marks
    )
    try:
        end_s = time.monotonic() + 120.0
        while not (tmp_path / "run" / "logs" / "buffer-0.log").exists() and time.monotonic() < end_s:
            time.sleep(0.1)
        assert len(warden.marked(marks)) > 5
        process.send_signal(number)
        process.wait(60.0)
        end_s = time.monotonic() + 30.0
        while warden.marked(marks) and time.monotonic() < end_s:
            time.sleep(0.1)
        assert warden.marked(marks) == []
    finally:
        process.kill()
        warden.kill_marked(marks)


@pytest.mark.slow
def test_three_minutes_of_chaos_lose_double_and_break_nothing(tmp_path: Path) -> None:
    told = torment(tmp_path / "run", minutes=3.0, seed=1, steps=None, roles=ROLES, gap_s=15.0, overrides=SMALL)
    assert sound(told), json.dumps(told, indent=1)
    assert set(told["kills"]) == set(ROLES)
    assert told["turns_acked"] > 100
    assert told["steps"] > 5
    assert told["age_minus_s_max"] <= 0

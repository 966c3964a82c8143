"""The pure parts of benchmarks that start whole runs, by hand."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import statistics
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from launch.config import parse
from tests.benchmarks import asynchrony, bottlenecks, live_staleness, monitoring
from tests.benchmarks.steps import span
from tests.benchmarks.waits import Pareto, allowed_by_staleness, bound, computing, given, sleeping
from tests.run_writer import write_run

LEAST = {"model": {"path": "m"}, "problems": {"families": [{"name": "products"}]}}


def test_waits_are_paretos_with_the_stated_median_and_cut() -> None:
    waits = Pareto()
    assert waits.at(0.5) == pytest.approx(0.3)
    assert waits.at(1.0) == pytest.approx(0.3 / 2 ** (2 / 3))
    assert waits.at(0.5 / 8) == pytest.approx(0.3 * 4)  # 8 times rarer is 8 ** (2 / 3) times longer
    assert waits.at(1e-9) == 10.0
    assert waits.mean_s() == pytest.approx(
        statistics.fmean(waits.at((at + 0.5) / 200_000) for at in range(200_000)), rel=1e-3
    )


def test_the_preamble_sleeps_what_was_drawn_for_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    waits = Pareto()
    for number in range(1000):
        exec(waits.preamble(), {"call_number": number})
    assert slept[7] == pytest.approx(waits.at(1.0 - random.Random(7).random()))
    assert statistics.median(slept) == pytest.approx(0.3, rel=0.1)
    assert statistics.fmean(slept) == pytest.approx(waits.mean_s(), rel=0.15)
    assert max(slept) <= 10.0


@pytest.mark.parametrize("text", [Pareto().preamble(), computing(0.2), sleeping(0.5)])
def test_preambles_reach_the_recipe_whole(text: str) -> None:
    assert parse(LEAST, [given(text)], "r.toml").sandbox.preamble == text


def test_the_bound_is_the_slowest_stage_or_the_cores() -> None:
    by_cores = bound({"learner": 60.0, "swap": 600.0}, cpu_s_per_group=3.0, num_cores=2)
    assert (by_cores.limited_by, by_cores.groups_per_min) == ("cores", 40.0)
    assert by_cores.seconds_per_group == {"learner": 1.0, "swap": 0.1, "cores": 1.5}
    assert bound({"learner": 30.0}, cpu_s_per_group=3.0, num_cores=2).limited_by == "learner"


def test_what_s_allows_is_that_the_slowest_group_of_each_version_is_in_time() -> None:
    assert allowed_by_staleness(0, 8, slowest_group_s=7.0, renewal_s=1.0) == 60.0
    assert allowed_by_staleness(2, 8, slowest_group_s=7.0, renewal_s=1.0) == 180.0


def test_the_report_compares_what_was_asked() -> None:
    runs = [
        {"staleness": 0, "groups_per_min": 50.0, "share_of_bound": 0.5},
        {"staleness": 2, "groups_per_min": 90.0, "share_of_bound": 0.9},
    ]
    told = asynchrony.report(runs)
    assert (told["ratio_2_over_0"], told["share_of_bound_at_2"]) == (1.8, 0.9)
    assert asynchrony.report(runs[:1])["ratio_2_over_0"] is None


def test_the_curve_is_drawn_from_reports_kept_in_several_files(tmp_path: Path) -> None:
    run = {
        "groups_per_min": 50.0,
        "bound_groups_per_min": 80.0,
        "age_mean": 0.5,
        "allowed_by_staleness_groups_per_min": 70.0,
    }
    (tmp_path / "a.json").write_text(json.dumps({"report": {"runs": [run | {"staleness": 2}]}}))
    (tmp_path / "b.json").write_text(json.dumps({"runs": [run | {"staleness": 0}]}))
    asynchrony.draw([tmp_path / "a.json", tmp_path / "b.json"], tmp_path / "out" / "curve.png")
    assert (tmp_path / "out" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_verdict_is_right_if_the_last_one_is_and_since_when() -> None:
    assert bottlenecks.judge("kv", {2: "unclear", 3: "kv", 4: "kv", 5: "kv"})["right_from_step"] == 3
    assert bottlenecks.judge("kv", {2: "kv", 3: "slots", 5: "kv", 4: "kv"})["right_from_step"] == 4
    assert not bottlenecks.judge("kv", {4: "kv", 5: "cores"})["right"]


def test_every_case_is_a_recipe_and_all_six_have_two_strengths() -> None:
    for case in bottlenecks.CASES:
        for overrides in case.strengths:
            parse(LEAST, [*bottlenecks.BASE, *overrides], case.name)
    assert [len(case.strengths) for case in bottlenecks.CASES] == [2] * 6 + [1]


def test_a_stretch_begins_when_older_tickets_are_gone() -> None:
    assert live_staleness.begins(11, 0, 4) == 17
    assert live_staleness.begins(25, 4, 0) == 31


def test_moves_of_throughput_are_compared_with_what_was_said() -> None:
    told = live_staleness.moves([100.0, 220.0, 110.0], {0: 50.0, 4: 100.0})
    assert told == {"moved_by": [2.2, 0.5], "said_it_would_by": [2.0, 0.5], "errors": [0.1, 0.0]}


def test_a_span_of_steps_tells_rate_and_age(tmp_path: Path) -> None:
    """Group 3 was dropped; two tokens of each kept rollout's five are of its second version."""
    write_run(tmp_path)
    with closing(sqlite3.connect(tmp_path / "buffer" / "index.sqlite")) as db, db:
        for step in range(3):
            db.execute("UPDATE batches SET taken_unix_s = ? WHERE step = ?", (10.0 * step, step))
        db.execute("UPDATE groups SET decided_unix_s = 5.0 WHERE group_id IN (1, 2)")
        db.execute("UPDATE rollouts SET finished_unix_s = 4.0, tool_s = 0.5 WHERE group_id = 1")
        db.execute("UPDATE groups SET issued_unix_s = 1.0, scored_unix_s = 7.5 WHERE group_id = 1")
        db.execute("UPDATE acknowledgements SET unix_s = 10.0 * version - 3.0")
        ages = [
            (step - version, count)
            for step, runs in db.execute(
                "SELECT g.step, t.version_runs FROM groups g JOIN turns t USING (group_id) WHERE g.step < 2"
                " AND t.rollout IN (SELECT value FROM json_each(g.kept)) AND g.kind = 'train'"
            )
            for _, version, count in json.loads(runs)
        ]
    told = span(tmp_path, 0, 2)
    assert (told["steps"], told["seconds"], told["groups_trained"], told["groups_per_min"]) == (2, 20.0, 2, 6.0)
    assert told["age_mean"] == pytest.approx(sum(a * n for a, n in ages) / sum(n for _, n in ages), abs=1e-3)
    assert told["calls_per_rollout"] == 1.0
    assert told["tool_s_per_call"] == 0.5
    assert (told["slowest_group_s"], told["renewal_s"]) == (6.5, 7.0)


def test_the_cost_of_monitoring_is_what_was_added_in_the_window() -> None:
    clocked = monitoring.Clocked
    before = {("buffer", "a"): clocked(10, 1.0, 0.1)}
    after = {("buffer", "a"): clocked(30, 1.5, 0.2), ("learner", "b"): clocked(5, 0.25, 0.05)}
    told = monitoring.shares(before, after, run_s=100.0)
    assert (told["monitoring_cpu_s"], told["share"], told["share_with_clocks"]) == (0.6, 0.006, 0.0075)
    assert told["cpu_s_by_role"] == {"buffer": 0.4, "learner": 0.2}
    assert told["calls_and_cpu_s_by_function"] == {"a": [20, 0.4], "b": [5, 0.2]}


def test_clocks_are_put_on_functions_that_measure_and_nothing_is_counted_twice(tmp_path: Path) -> None:
    program = (
        "import time; from buffer.meters import Meters; meters = Meters('r', 'r-0', 0.0)\n"
        "for _ in range(50): meters.observe('x', 1.0)\n"
        "meters.snapshot(1.0); time.sleep(0.6); meters.snapshot(2.0)"
    )
    environment = os.environ | {
        "ROCSTAR_CLOCKED": str(tmp_path),
        "ROCSTAR_ROLE": "r-0",
        "PYTHONPATH": os.pathsep.join([str(monitoring.INJECTED), str(Path(__file__).parents[1])]),
    }
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    told = monitoring.read(tmp_path)
    calls = {name: clocked.calls for (_, name), clocked in told.items()}
    snapshot = "buffer.meters.Meters.snapshot"
    assert calls == {"buffer.meters.Meters.observe": 50, snapshot: 2, f"{snapshot}, on its way": 1}
    assert all(0 < clocked.own_s < 0.01 and 0 < clocked.spent_s < 0.1 for clocked in told.values())

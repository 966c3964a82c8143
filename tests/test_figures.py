"""Figures of a run: what summary and status say, the audit recomputes; the view's rates; Prometheus."""

from __future__ import annotations

import io
import json
import sqlite3
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from buffer.meters import Meters
from launch.config import parse
from launch.figures import figures
from launch.monitor.trace import trace
from launch.monitor.web_records import details
from launch.progress import Progress, headline, screen
from launch.prometheus import Exporter
from launch.run_directory import RunDirectory
from launch.status import describe
from launch.summary import lines, write_summary
from launch.view import view
from tests import audit, run_writer
from tests.test_config import LEAST


@pytest.fixture
def run(tmp_path: Path) -> Path:
    recipe = parse(LEAST, [f"run.directory={tmp_path / 'run'}"], "r.toml")
    opened = RunDirectory.open(recipe, "sha256:0")
    opened.lock.close()
    run_writer.write_run(opened.path)
    return opened.path


def test_the_summary_is_what_the_audit_recomputes(run: Path) -> None:
    recipe = parse(LEAST, [f"run.directory={run}"], "r.toml")
    meters = Meters("learner", "learner-0", now_s=0.0)
    summary = write_summary(
        recipe, run, figures(run), {"learner-0": meters.snapshot(1.0)}, outcome="reached", reason="r", wall_s=2.0
    )
    report = audit.report.audit(run)
    assert report.findings["summary"] == []
    assert summary["learner_steps"] == 3
    assert summary["groups_dropped"] == {"all_right": 1}
    assert sum(summary["roles"]["learner-0"]["clock"].values()) == pytest.approx(1.0)
    assert summary["publish_lag_s"] == {"p50": 1.0, "max": 1.5}  # 0.5, 1 and 1.5 s after their publications
    assert summary["publish_lag_versions"] == {"p50": 0, "max": 0}
    assert "1.500 s at most" in lines(summary)[-1]
    (run / "summary.json").write_text(json.dumps(summary | {"publish_lag_s": {"p50": 1.0, "max": 1.4}}))
    assert audit.report.audit(run).findings["summary"][0].startswith("publish_lag_s = ")


def test_what_was_thrown_away_is_told_beside_what_was_trained(run: Path) -> None:
    told, found = figures(run), audit.report.audit(run).figures
    released = sum(count for state, count in told["groups_by_state"].items() if state in ("taken", "released"))
    assert sum(told["groups_by_state"].values()) == found["groups_issued"]
    assert told["groups_by_state"]["dropped"] == sum(told["groups_dropped"].values()) > 0
    assert released == told["groups_trained"] > 0
    assert 0 < told["tokens_trained"] < told["tokens_generated"]


def test_a_version_that_engines_skip_lags_by_those_that_came_meanwhile(run: Path) -> None:
    """Version 1 is loaded by no engine before version 3 is out; a learner that starts again publishes 2 once more."""
    with closing(sqlite3.connect(run / "buffer" / "index.sqlite")) as index, index:
        index.execute("DELETE FROM acknowledgements WHERE version < 3")
        index.execute("INSERT INTO publications VALUES (2, 2, 25.0)")
    expected = {"publish_lag_s": {"p50": 6.5, "max": 21.5}, "publish_lag_versions": {"p50": 1, "max": 2}}
    assert {name: figures(run)[name] for name in expected} == expected
    assert {name: audit.report.audit(run).figures[name] for name in expected} == expected


def test_a_false_summary_is_found(run: Path) -> None:
    recipe = parse(LEAST, [f"run.directory={run}"], "r.toml")
    told = figures(run)
    told["age_max"] += 1
    write_summary(recipe, run, told, {}, outcome="reached", reason="r", wall_s=2.0)
    assert any("age_max" in line for line in audit.report.audit(run).findings["summary"])


def test_status_tells_what_a_run_holds(run: Path) -> None:
    told = "\n".join(describe(run))
    assert "3 trained" in told
    assert "not running" in told


def buffer_status(finished: int, reward: float, errors: int, kept: int, life: int = 1) -> dict[str, Any]:
    meters = Meters("buffer", "buffer-0", now_s=0.0)
    meters.count("rollouts_finished/train", finished)
    meters.count("reward/train", reward)
    meters.count("calls/train/error", errors)
    meters.count("calls/train/ok", finished - errors)
    meters.count("calls/train/overloaded", 1000)
    meters.count("groups_kept", kept)
    meters.count("groups_dropped/all_right", kept)
    return {"phase": "train", "life": life, "next_step": 2, "steps": 3, "buffer": meters.snapshot(1.0), "peers": {}}


def test_rates_are_differences_over_the_window() -> None:
    seen = view(buffer_status(300, 150, 60, 20), buffer_status(100, 50, 20, 10), 10.0, {"buffer-0": "running"})
    assert seen.rollouts_per_s == pytest.approx(20.0)
    assert seen.groups_per_min == pytest.approx(120.0)
    assert seen.reward == pytest.approx(0.5)
    assert seen.tool_error == pytest.approx(0.2)  # infrastructure is no call
    assert seen.dropped == pytest.approx(0.5)
    assert "0.50 reward, 20% failed calls, 50% dropped" in headline(seen)


def test_a_restarted_buffer_makes_no_negative_rates() -> None:
    seen = view(buffer_status(299, 150, 60, 20, life=2), buffer_status(300, 150, 60, 20), 10.0, {})
    assert not seen.rollouts_per_s


def test_a_restarted_buffer_makes_no_rates_out_of_the_whole_run() -> None:
    seen = view(buffer_status(310, 155, 62, 21, life=2), buffer_status(300, 150, 60, 20), 10.0, {})
    assert seen.rollouts_per_s == pytest.approx(1.0)


def test_a_restarted_role_makes_no_negative_shares() -> None:
    def status(state: str, wall_s: float) -> dict[str, Any]:
        meters = Meters("learner", "learner-0", 0.0)
        meters.clock.enter(state, 0.0)
        return {"peers": {"learner-0": {"snapshot": meters.snapshot(wall_s)}}}

    seen = view(status("busy", 4.0), status("starved", 100.0), 10.0, {"learner-0": "running"})
    assert seen.roles[0].does == "busy 100%"


def test_nothing_known_is_shown_as_nothing() -> None:
    seen = view({}, {}, 0.0, {"buffer-0": "starting"})
    assert headline(seen) == "starting: step 0/0, version 0"


def test_prometheus_gives_what_the_snapshot_holds(unused_tcp_port: int) -> None:
    meters = Meters("learner", "learner-0", now_s=0.0)
    meters.count("steps", 3)
    meters.gauge("lr", 0.5)
    for value in (0.0005, 0.3, 1000.0):
        meters.observe("train_s", value)
    with Exporter(unused_tcp_port) as exporter:
        exporter.update({"learner-0": meters.snapshot(2.0)}, {})
        with urllib.request.urlopen(f"http://127.0.0.1:{unused_tcp_port}/metrics") as answer:
            text = answer.read().decode()
    samples = {
        (sample.name, sample.labels.get("key", sample.labels.get("state")), sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["rocstar_counter_total", "steps", None] == 3
    assert samples["rocstar_gauge", "lr", None] == 0.5
    assert samples["rocstar_clock_seconds_total", "down", None] == 2.0
    assert samples["rocstar_histogram_bucket", "train_s", "0.5"] == 2
    assert samples["rocstar_histogram_bucket", "train_s", "+Inf"] == 3
    assert samples["rocstar_histogram_sum", "train_s", None] == pytest.approx(1000.3005)


def test_output_that_takes_no_more_ends_no_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = parse(LEAST, [f"run.directory={tmp_path / 'run'}"], "r.toml")
    with io.TextIOWrapper(open("/dev/full", "wb", buffering=0), write_through=True) as full:
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(OSError, match="No space left"):
            print("this is how full it is")
        with Progress(recipe, tmp_path) as progress:
            progress.say("a sentence")
            progress.show({}, {"buffer-0": "starting"})
        monkeypatch.undo()


def test_the_live_view_names_each_role_and_what_it_waits_for() -> None:
    learner = Meters("learner", "learner-0", now_s=0.0)
    learner.clock.enter("starved", now_s=1.0, waits_for="the batch of step 2")
    status = buffer_status(300, 150, 60, 20)
    status["tickets"] = {"active": 16, "bound": 16, "waits_for": "step 1's version to be acknowledged"}
    status["peers"] = {"learner-0": {"snapshot": learner.snapshot(4.0)}}
    seen = view(status, {}, 10.0, {"learner-0": "running", "rollout-0": "failed"})
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(screen(seen, "quickstart", 12.0))
    text = console.export_text()
    assert "tickets: 16 of 16 active, waits for step 1's version to be acknowledged" in text
    assert "starved 75% down 25%, waits for the batch of step 2" in text
    assert "rollout-0" in text
    assert "failed" in text


def test_a_directory_with_signs_of_an_address_in_its_name_is_read(tmp_path: Path) -> None:
    run, odd = tmp_path / "run", tmp_path / "100% #1?"
    run.mkdir()
    run_writer.write_run(run)
    run.rename(odd)
    assert figures(odd)["learner_steps"] == audit.report.audit(odd).figures["learner_steps"] > 0
    assert trace(odd, 3600.0)["traceEvents"]
    assert details(odd, "view=groups")["closed"]

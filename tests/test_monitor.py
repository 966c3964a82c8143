"""The snapshot and its screen, over recorded runs, a live buffer, and what is left of others."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from buffer.meters import Meters
from launch.config import ConfigError
from launch.monitor.advisor import advise
from launch.monitor.measure import Facts, measure
from launch.monitor.readings import History, from_status, read_directory, tail
from launch.monitor.show import as_json, look
from launch.monitor.snapshot import SCHEMA, from_json, to_json
from launch.monitor.spans import Span, Spread
from launch.monitor.stages import curve, interpolate
from launch.monitor.text import WIDTH, bar, screen, spark
from launch.monitor.trend import POINTS, trend
from tests.buffers import complete, decide_all, serving, settings
from tests.recorded import ROOT, shown

RECORDED = sorted(folder.name for folder in ROOT.iterdir())
MAX_LINES = 46


@pytest.mark.parametrize("name", RECORDED)
def test_the_screen_of_a_recorded_run_is_the_golden_one(name: str) -> None:
    golden = (ROOT / name / "screen.txt").read_text()
    assert shown(name) == golden
    assert all(len(line) <= WIDTH for line in golden.splitlines())
    assert len(golden.splitlines()) <= MAX_LINES


@pytest.mark.parametrize("name", RECORDED)
def test_clocks_sum_and_the_snapshot_reads_back_equal(name: str) -> None:
    snapshot, _ = look(ROOT / name)
    clocks = [role.shares for role in snapshot.roles if role.shares]
    assert len(clocks) >= 4
    assert all(abs(sum(shares.values()) - 1.0) < 0.01 for shares in clocks)
    plain = json.loads(json.dumps(to_json(snapshot)))
    assert plain["schema"] == SCHEMA
    assert from_json(plain) == snapshot
    with pytest.raises(ValueError, match="schema 999 of the snapshot is not"):
        from_json(plain | {"schema": 999})


def test_the_json_holds_snapshot_and_advice() -> None:
    plain = json.loads(as_json(*look(ROOT / "finished")))
    assert plain["run"]["state"] == "reached"
    assert {one["stage"] for one in plain["advice"]["capacities"]} >= {"engines", "sandbox", "learner", "swap", "cores"}


def test_of_a_finished_run_the_window_is_its_training() -> None:
    snapshot, _ = look(ROOT / "finished")
    assert snapshot.window.what == "all of training"
    assert snapshot.learner is not None
    assert snapshot.learner.steps >= 5
    assert snapshot.staleness is not None
    assert sum(snapshot.staleness.histogram.values()) > 0
    assert snapshot.run.eta_s is None


def test_the_window_of_a_live_run_begins_no_earlier_than_its_training() -> None:
    """Its engine had a version at the eighth reading; the last minute began before that."""
    readings = read_directory(ROOT / "interrupted").readings
    snapshot = measure(History(readings=readings, live=True), Facts(name="r"))
    assert readings[-1].unix_s - readings[0].unix_s < 60
    assert snapshot.window.span_s == pytest.approx(readings[-1].unix_s - readings[7].unix_s)
    starting = measure(History(readings=readings[:5], live=True), Facts(name="r"))
    assert starting.window.span_s == pytest.approx(readings[4].unix_s - readings[0].unix_s)


def test_an_empty_directory_is_shown_as_one(tmp_path: Path) -> None:
    snapshot, advice = look(tmp_path)
    lines = screen(snapshot, advice)
    assert lines[0].startswith(f"{tmp_path.name}  empty")
    assert "nothing was measured yet: metrics/ is empty" in lines
    assert advice.verdict == "unclear: there are no figures"
    with pytest.raises(ConfigError, match="nowhere: is no directory"):
        look(tmp_path / "nowhere")


def test_a_run_whose_driver_was_killed_is_stopped(tmp_path: Path) -> None:
    copy(tmp_path, without="summary.json")
    standings = tmp_path / "metrics" / "run.jsonl"
    standings.write_text("".join(standings.read_text().splitlines(keepends=True)[:-1]))
    assert look(tmp_path)[0].run.state == "stopped"


def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path) -> None:
    copy(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    ended = {"outcome": "interrupted", "reason": "a signal came; go on with `rocstar resume runs/quickstart`"}
    (tmp_path / "summary.json").write_text(json.dumps(summary | ended))
    snapshot, advice = look(tmp_path)
    assert snapshot.run.state == "interrupted"
    assert screen(snapshot, advice)[1] == f"ended: {ended['reason']}"


def test_a_line_that_is_half_written_is_left_out(tmp_path: Path) -> None:
    copy(tmp_path)
    whole = look(tmp_path)
    for path in (tmp_path / "metrics").glob("*-0.jsonl"):
        with path.open("a") as file:
            file.write('{"unix_s": 17')
    assert look(tmp_path) == whole


def copy(target: Path, without: str = "") -> None:
    (target / "metrics").mkdir()
    source = ROOT / "finished"
    for path in [*source.glob("*.json"), *source.glob("*.toml"), *source.glob("metrics/*.jsonl")]:
        if path.name != without:
            (target / path.relative_to(source)).write_bytes(path.read_bytes())


@pytest.mark.slow
async def test_a_live_buffer_and_its_files_tell_the_same(tmp_path: Path) -> None:
    facts = Facts(name="r", settings={"groups.groups_per_step": 2})
    async with serving(tmp_path, settings()) as peers:
        learner = await peers.learner()
        engine, roc = await peers.engine("rollout-0"), await peers.join("filter", "filter-0")
        first = from_status(await learner.status(), time.time())
        for lease in await engine.lease(100, 0, 1.0):
            await complete(engine, lease)
        await decide_all(roc)
        await learner.take(0, 1.0)
        await engine.heartbeat(Meters("rollout", "rollout-0", 0.0).snapshot(5.0))
        last = from_status(await learner.status(), time.time())
        live = measure(History(readings=(first, last), live=True), facts)
        while not any(line.get("next_step") for line in tail(tmp_path / "metrics" / "run.jsonl", None)):
            await learner.heartbeat({})
    assert live.run.state == "running"
    assert live.useful is not None
    assert (live.useful.groups, live.useful.kept) == (4, 1.0)
    assert live.rates.groups_trained_per_min is not None
    assert live.rates.groups_trained_per_min > 0
    filed = measure(read_directory(tmp_path), facts)
    assert (filed.run.step, filed.run.steps) == (live.run.step, live.run.steps) == (1, 100)
    assert filed.tickets is not None
    assert live.tickets is not None
    assert filed.tickets.bound == live.tickets.bound
    assert filed.tickets.by_state == live.tickets.by_state == {"taken": 2, "finished": 2}


def snapshots(*walls_s: float, steps: float = 3) -> list[dict[str, object]]:
    out = []
    for at, wall_s in enumerate(walls_s):
        meters = Meters("learner", "learner-0", 0.0)
        meters.clock.enter("busy", 1.0)
        meters.count("steps", steps * (at + 1))
        meters.observe("train_s", 0.3, count=at + 1)
        out.append(meters.snapshot(wall_s) | {"unix_s": 100.0 + wall_s})
    return out


def test_rates_are_differences_over_the_window() -> None:
    before, now = snapshots(10.0, 20.0)
    span = Span(before, now)
    assert (span.seconds, span.count("steps"), span.rate("steps")) == (10.0, 3, 0.3)
    assert span.shares() == {"busy": 1.0, "starved": 0.0, "blocked": 0.0, "sync": 0.0, "down": 0.0}
    assert span.spread("train_s").count == 1


def test_a_role_that_began_another_life_has_no_negative_figures() -> None:
    before, now = snapshots(100.0, 4.0)
    span = Span(before, now | {"unix_s": 205.0, "counters": {"steps": 2.0}})
    assert (span.seconds, span.count("steps")) == (4.0, 2.0)
    assert span.shares()["busy"] == pytest.approx(0.75)
    slow = Span(before, now | {"wall_s": 101.0, "unix_s": 300.0})  # lived again for longer than before
    assert not slow.same_life
    assert slow.seconds == 101.0


def test_a_buffer_that_took_its_figures_up_a_second_back_shows_no_growth() -> None:
    buffer = Meters("buffer", "buffer-0", 0.0)
    buffer.count("turns", 100)
    buffer.observe("commit_s", 0.003, count=50)
    durable = buffer.snapshot(5.0)
    buffer.count("turns", 7)
    buffer.observe("commit_s", 0.003, count=3)
    seen = buffer.snapshot(5.9) | {"unix_s": 105.9}
    revived = Meters("buffer", "buffer-0", 20.0)
    revived.restore(durable)
    span = Span(seen, revived.snapshot(21.0) | {"unix_s": 121.0})
    assert not span.same_life
    assert span.seconds == pytest.approx(15.1)
    assert (span.count("turns"), span.total("turn"), span.spread("commit_s").count) == (0.0, 0.0, 0)
    revived.count("turns", 10)
    assert Span(seen, revived.snapshot(22.0) | {"unix_s": 122.0}).count("turns") == 3


def test_quantiles_lie_within_their_buckets() -> None:
    spread = Spread((1.0, 2.0, 4.0), (0, 10, 0, 0), 15.0)
    assert spread.quantile(0.5) == pytest.approx(1.5)
    assert Spread((1.0, 2.0), (0, 0, 5), 50.0).quantile(0.5) == 2.0
    assert Spread((), (), 0.0).times() is None


def test_an_engines_curve_is_read_from_its_counters() -> None:
    counters = {"rate_tokens@8": 400.0, "rate_s@8": 16.0, "rate_tokens@16": 600.0, "rate_s@16": 32.0}
    points = curve({"counters": counters | {"rate_tokens@128": 9.0, "rate_s@128": 0.1}})
    assert [(point.concurrency, point.tokens_per_s) for point in points] == [(8, 200.0), (16, 300.0)]
    assert interpolate(points, 12) == 250.0
    assert interpolate(points, 4) == 100.0
    assert interpolate(points, 64) == 300.0
    assert interpolate((), 4) is None


def test_only_the_asked_seconds_of_a_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps({"unix_s": at, "fill": "x" * 500}) + "\n" for at in range(1000)))
    assert [line["unix_s"] for line in tail(path, 3.0)] == [996, 997, 998, 999]
    assert len(list(tail(path, None))) == 1000
    assert list(tail(tmp_path / "none.jsonl", None)) == []


def test_a_long_trend_is_thinned_to_means() -> None:
    steps = [
        {"step": at, "time_s": 10.0 * at, "groups": 8, "reward_mean": at, "tokens": 40, "trajectories": 8}
        for at in range(150)
    ]
    series = {one.name: one for one in trend(steps)}
    assert len(series["reward"].values) == POINTS
    assert series["groups"].values[0] == pytest.approx(48.0)
    assert series["reward"].values[-1] == pytest.approx(148.0, abs=1.0)
    assert series["entropy"].values == ()
    assert trend([]) == ()


def test_bars_and_sparks() -> None:
    assert bar({"busy": 0.5, "starved": 0.3, "blocked": 0.2}, 10) == "#####...xx"
    assert len(bar({"busy": 1 / 3, "starved": 1 / 3, "blocked": 1 / 3}, 20)) == 20
    assert bar({}) == ""
    assert spark([1.0, 2.0, 3.0])[0] == "_"
    assert spark([1.0, 2.0, 3.0])[-1] == "#"
    assert spark([2.0, 2.0]) == "__"


def test_unknown_is_shown_as_unknown() -> None:
    snapshot = measure(History(live=True), Facts(name="r"))
    assert snapshot.run.state == "running"
    assert advise(snapshot).limit == "unclear"

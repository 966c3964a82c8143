"""The tuner reads what a run recorded, finds the parameters it came from, and recommends what its figures say."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch.cli import app
from launch.config import ConfigError, parse, read_toml
from launch.monitor.advisor import advise
from launch.monitor.fixes import Fix
from launch.monitor.show import look
from launch.tune.check import CHANGES, coarse, contradicted
from launch.tune.fit import call_cpu_share, fit, guess, line, pass_time, step_line
from launch.tune.model import simulate
from launch.tune.records import read
from launch.tune.shapes import (
    Generated,
    GroupWork,
    Machine,
    Model,
    Outcome,
    PassTime,
    RatePoint,
    Recorded,
    Setting,
    StepTime,
    SwapTime,
)
from launch.tune.show import tune
from launch.tune.sweep import Row, candidates, frontier, recommend
from tests import tune_runs
from tests.recorded import ROOT
from tests.snapshots import MADE
from tests.tune_models import SETTING, group, model, recorded, rollout, setting


def test_a_run_directory_is_read_as_it_was_written(tmp_path: Path) -> None:
    tune_runs.write(tmp_path / "run", 12)
    found = read(tmp_path / "run")
    assert found.setting == Setting(max_staleness=1, groups_per_step=1, group_size=2, concurrency=8)
    assert found.groups_per_min == pytest.approx(30.0)
    assert found.mean_age == pytest.approx(3 / 5)
    assert {(step.num_tokens, round(step.wall_s, 6)) for step in found.steps} == {(22, 1.0)}
    assert {(round(swap.receive_s, 6), swap.pause_s) for swap in found.swaps} == {(0.1, 0.1)}
    assert found.rollout_rest_s == pytest.approx(0.2)
    assert found.decide_s == pytest.approx(0.1)
    assert found.rates == (RatePoint(concurrency=8, token_s=pytest.approx(0.4), weight_s=found.rates[0].weight_s),)
    assert found.token_cpu_s == pytest.approx(0.5 / 20)
    assert found.call_cpu_s == pytest.approx(0.1 / 4)
    assert found.store_token_cpu_s == pytest.approx(0.1 / 20)
    assert found.step_cpu_s == pytest.approx(0.25 * 2)
    assert found.machines == (Machine(cores=2, others=pytest.approx(0.25)),)
    assert (found.workers, found.kv_tokens, found.longest_tokens) == (2, 4096, 11)
    kept = [one for one in found.groups if len({work.finish.reward for work in one.rollouts}) > 1]
    assert 2 * len(kept) == pytest.approx(len(found.groups), abs=1)
    assert {tuple(turn.num_tokens for turn in work.turns) for one in kept for work in one.rollouts} == {(3, 2)}


def test_calls_without_payload_get_their_part_of_the_rollouts_time(tmp_path: Path) -> None:
    tune_runs.write(tmp_path / "run", 12)
    with_payload = read(tmp_path / "run").groups[0].rollouts[0].turns
    for path in (tmp_path / "run" / "buffer" / "segments").glob("*.seg"):
        path.unlink()
    without = read(tmp_path / "run").groups[0].rollouts[0].turns
    assert [turn.run_s for turn in with_payload] == [0.0, 0.0]
    assert [turn.run_s for turn in without] == [0.3, 0.0]


@pytest.mark.parametrize(
    ("num_steps", "words"),
    [(0, "nothing is recorded yet"), (5, "5 steps are on record, a fit needs 9: 6 after the first 2")],
)
def test_a_run_with_too_little_says_what_it_lacks(tmp_path: Path, num_steps: int, words: str) -> None:
    if num_steps:
        tune_runs.write(tmp_path / "run", num_steps)
    else:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "recipe.toml").write_text(tune_runs.RECIPE)
    with pytest.raises(ConfigError, match=words):
        read(tmp_path / "run")
    with pytest.raises(ConfigError, match="holds no run"):
        read(tmp_path / "nowhere")


def shared() -> Model:
    """Engine, learner and sandbox compete for two cores; a third of the groups is dropped."""
    groups = [group(*[(4 + at + more, 6) for more in range(4)], kept=at % 3 != 0, run_s=0.05) for at in range(12)]
    work = recorded(
        groups=tuple(groups),
        swaps=(SwapTime(receive_s=0.1, pause_s=0.2),),
        call_cpu_s=0.05,
        machines=(Machine(cores=2.0, others=0.2),),
        setting=replace(SETTING, groups_per_step=4, concurrency=16),
    )
    return model(
        work,
        pass_time=PassTime(fixed_s=0.05, token_s=0.01),
        engine_cores=1.0,
        beside_cpu_s=0.002,
        step_fixed_s=2.0,
        learner_share=1.0,
        learner_cores=1.0,
        call_cpu_share=1.0,
    )


def told(truth: Model, outcome: Outcome) -> Recorded:
    """What a run that is `truth` would record of itself: durations longer for sharing, CPU seconds as they are."""
    rates = tuple(
        RatePoint(concurrency=at, token_s=met.wall_s / met.tokens, weight_s=met.wall_s / at)
        for at, met in outcome.measured.items()
    )
    return replace(
        truth.work,
        steps=(StepTime(num_tokens=200, wall_s=outcome.step_wall_s),),
        swaps=(SwapTime(receive_s=0.1, pause_s=outcome.pause_s),),
        rates=rates,
        token_cpu_s=truth.engine_cores * outcome.engine_s + truth.beside_cpu_s + outcome.loading_s,
        step_cpu_s=truth.step_fixed_s,
        rollout_rest_s=truth.rest_s + outcome.beside_s,
    )


@pytest.mark.slow
def test_a_fit_recovers_the_model_that_the_record_came_from() -> None:
    truth = shared()
    base = truth.work.setting
    found = fit(told(truth, simulate(truth, base, steps=40, warmup=4)))
    assert found.pass_time.of(1.0, 12) == pytest.approx(truth.pass_time.of(1.0, 12), rel=0.06)
    assert found.step_token_s * 200 + found.step_fixed_s == pytest.approx(2.0, rel=0.06)
    assert found.engine_cores == pytest.approx(1.0, rel=0.06)
    assert found.beside_cpu_s == pytest.approx(truth.beside_cpu_s, abs=0.001)
    for other in (base, replace(base, max_staleness=0), replace(base, max_staleness=3), replace(base, concurrency=8)):
        expected, got = (simulate(one, other, steps=30, warmup=6) for one in (truth, found))
        assert got.groups_per_min == pytest.approx(expected.groups_per_min, rel=0.05), other
        assert got.mean_age == pytest.approx(expected.mean_age, rel=0.1, abs=0.03), other


def test_a_line_is_found_and_neither_part_is_below_0() -> None:
    assert line([(1, 3.0, 1.0), (2, 5.0, 1.0), (4, 9.0, 2.0)]) == (pytest.approx(1.0), pytest.approx(2.0))
    assert line([(1, 5.0, 1.0), (3, 1.0, 1.0)]) == (3.0, 0.0)
    assert line([(1, 0.0, 1.0), (3, 8.0, 1.0)]) == (0.0, 2.0)


def test_the_first_guess_counts_a_context_token_as_much_as_a_sampled_one() -> None:
    """A generation more brings a token of its own to each pass and, a context of 10 for 5 sampled, two of contexts."""
    rates = tuple(RatePoint(concurrency=at, token_s=0.1 + 0.03 * at, weight_s=5.0) for at in (4, 8, 16))
    found = guess(recorded(groups=(group((5,), (5,)),), rates=rates, computed_share=1.0))
    assert (found.fixed_s, found.token_s) == (pytest.approx(0.1), pytest.approx(0.01))


def test_passes_are_found_from_generations_that_met_one_another_otherwise_than_they_will() -> None:
    """At each concurrency they took twice what the simulation said; what they held tells the parts."""
    before = PassTime(fixed_s=0.05, token_s=0.01)
    met = {
        at: Generated(tokens=10.0, wall_s=3.0 * before.of(10.0, 10.0 * held), passes=10.0, pass_tokens=10.0 * held)
        for at, held in ((4, 6.0), (8, 30.0), (16, 20.0))
    }
    outcome = replace(row(1, 1.0, 1.0).outcome, measured=met)
    rates = [RatePoint(concurrency=at, token_s=2.0 * met[at].wall_s / 10.0, weight_s=1.0) for at in met]
    found = pass_time(rates, outcome, before)
    assert (found.fixed_s, found.token_s) == (pytest.approx(0.1), pytest.approx(0.02))
    assert pass_time([RatePoint(concurrency=64, token_s=1.0, weight_s=1.0)], outcome, before) is before


def test_calls_wait_if_they_take_far_longer_than_their_cpu_seconds() -> None:
    rare = group(*[(5, 5)] * 4, run_s=0.004), group(*[(5, 5)] * 4, run_s=2.0)
    assert call_cpu_share(recorded(groups=rare, call_cpu_s=0.8)) == pytest.approx(0.8 / 1.002)
    assert call_cpu_share(recorded(groups=rare, call_cpu_s=0.1)) == 0.0
    assert call_cpu_share(recorded()) == 0.0


@pytest.mark.slow
def test_where_tools_wait_a_model_fitted_at_small_s_knows_what_a_larger_s_is_worth() -> None:
    """Calls wait a Pareto time, as in tests/benchmarks/waits.py; on record the engine never had as much to do."""
    rng = random.Random(1)
    groups = tuple(
        GroupWork(
            num_rollouts=4,
            rollouts=tuple(rollout((6, 6), at % 2 == 0, min(10.0, 0.19 * rng.paretovariate(1.5))) for at in range(4)),
        )
        for _ in range(64)
    )
    like = shared()
    slots = replace(like.work.setting, concurrency=128)
    work = replace(like.work, groups=groups, call_cpu_s=0.02, setting=slots)
    fast = PassTime(fixed_s=0.02, token_s=0.002)
    truth = replace(like, work=work, pass_time=fast, step_fixed_s=0.4, call_cpu_share=0.0)
    base = truth.work.setting
    found = fit(told(truth, simulate(truth, base, steps=16, warmup=4)))
    small, large = (simulate(truth, replace(base, max_staleness=at), steps=40, warmup=8) for at in (1, 4))
    got = simulate(found, replace(base, max_staleness=4), steps=40, warmup=8)
    assert large.groups_per_min > 1.3 * small.groups_per_min
    assert got.groups_per_min == pytest.approx(large.groups_per_min, rel=0.05)


def test_steps_of_one_length_are_taken_in_proportion_and_others_as_a_line() -> None:
    even = [StepTime(num_tokens=100 + at % 2, wall_s=2.0) for at in range(6)]
    assert step_line(even) == (0.0, pytest.approx(2.0 / 100.5))
    uneven = [StepTime(num_tokens=tokens, wall_s=1.0 + tokens / 100) for tokens in (100, 200, 300)]
    assert step_line(uneven) == (pytest.approx(1.0), pytest.approx(0.01))


def row(staleness: int, rate: float, age: float, **parts: int) -> Row:
    outcome = Outcome(
        groups_per_min=rate,
        mean_age=age,
        max_age=staleness,
        step_wall_s=1.0,
        learner_waits=0.0,
        generating=1.0,
        cores_used=1.0,
    )
    return Row(setting=setting(max_staleness=staleness, **parts), outcome=outcome)


def test_the_freshest_of_the_best_is_recommended_and_never_other_groups_or_more_processes() -> None:
    rows = [row(0, 50, 0.0), row(1, 90, 0.5), row(2, 99, 1.0), row(4, 100, 3.0)]
    bigger = [row(1, 200, 0.2, group_size=1), row(1, 300, 0.2, groups_per_step=9), row(1, 400, 0.2, engines=2)]
    assert recommend([*rows, *bigger], SETTING) is rows[2]
    assert recommend(rows, SETTING, max_age=0.7) is rows[1]
    assert recommend(rows, SETTING, max_age=0.0) is rows[0]
    assert frontier([*rows, row(8, 95, 3.5)]) == rows
    with pytest.raises(ConfigError, match=r"--max-age 0.2: no setting is that fresh, the least mean age is 0.50"):
        recommend(rows[1:], SETTING, max_age=0.2)


def test_all_dials_are_swept() -> None:
    tried = candidates(model(recorded(setting=setting(group_size=8, ranks=2, concurrency=8))))
    assert {one.max_staleness for one in tried} == {0, 1, 2, 4, 8}
    assert {one.concurrency for one in tried} == {4, 8, 16}
    assert {one.groups_per_step for one in tried} == {1, 2, 4}
    assert {one.group_size for one in tried} == {4, 8, 16}
    assert {(one.engines, one.ranks) for one in tried} == {(1, 2), (2, 1), (2, 2)}
    assert len(tried) == len(set(tried))


@pytest.mark.slow
def test_the_command_writes_an_overlay_that_a_recipe_takes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tune_runs.write(run, 12)
    result = CliRunner().invoke(app, ["tune", str(run), "--max-age", "0"])
    assert result.exit_code == 0, result.output
    assert "recorded 30.0 groups/min, mean age 0.60" in result.output
    assert "recommended under a mean age of 0:" in result.output
    tree = parse(read_toml(run / "recipe.toml"), [f"@{run / 'tuned.toml'}", "learner.lr=1e-4"], "r")
    assert tree.staleness.max_staleness == 0
    assert tree.learner.lr == 1e-4
    assert tree.groups.group_size == 2
    before = (run / "tuned.toml").read_text()
    assert tune(run, 0.0, tmp_path / "again.toml", seed=0)
    assert (tmp_path / "again.toml").read_text() == before


@pytest.mark.slow
@pytest.mark.parametrize("limit", [*MADE, "finished"])
def test_no_fix_of_the_advisor_is_contradicted_by_the_simulation(limit: str) -> None:
    snapshot = look(ROOT / limit)[0] if limit == "finished" else MADE[limit](2)
    assert coarse(snapshot) is not None
    fixes = advise(snapshot).fixes
    assert [said for fix in fixes if (said := contradicted(snapshot, fix))] == []
    judged = {"sandbox", "slots", "kv", "learner", "swap", "tickets", "finished"}
    assert any(fix.dial in CHANGES for fix in fixes) == (limit in judged)


def test_a_fix_that_something_speaks_against_is_not_given() -> None:
    snapshot = MADE["slots"](1)
    asked: list[str] = []
    advice = advise(snapshot, lambda seen, fix: asked.append(fix.dial) or "slower")
    assert asked == [fix.dial for fix in advise(snapshot).fixes] != []
    assert advice == replace(advise(snapshot), fixes=())


@pytest.mark.slow
def test_a_fix_that_slows_the_run_is_contradicted() -> None:
    snapshot = MADE["tickets"](1)
    base = replace(snapshot, settings={**snapshot.settings, "staleness.max_staleness": 2})
    worse = Fix(
        dial="staleness.max_staleness", now=2, proposed=0, reason="", expect="faster", expect_groups_per_min=999.0
    )
    assert contradicted(base, worse).startswith("simulated, staleness.max_staleness = 0 makes ")
    assert contradicted(replace(base, engines=()), worse) == ""

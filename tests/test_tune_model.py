"""The tuner's simulation: throughputs that can be told by hand, and the promise over any work."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest
import simpy
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from simpy.events import Event

from launch.tune.machine import Engine, Host, Thread
from launch.tune.model import World, simulate
from launch.tune.shapes import GroupWork, Machine, PassTime, SwapTime
from tests.tune_models import flat, group, model, recorded, rollout, setting


def test_a_slow_learner_is_the_bottleneck_exactly() -> None:
    slow = model(step_fixed_s=10.0)
    outcome = simulate(slow, setting(max_staleness=2), steps=10, warmup=4)
    assert outcome.groups_per_min == pytest.approx(60 * 2 / 10)
    assert outcome.learner_waits == pytest.approx(0.0)


def test_a_slow_engine_is_the_bottleneck_exactly() -> None:
    """0.05 s of the engine per token, whatever runs at once: 40 tokens of a group take it 2 s."""
    slow = model(pass_time=PassTime(fixed_s=0.0, token_s=0.05))
    outcome = simulate(slow, setting(max_staleness=4), steps=20, warmup=6)
    assert outcome.groups_per_min == pytest.approx(30, rel=0.06)


def test_no_staleness_serialises_generation_swap_and_training() -> None:
    work = recorded(swaps=(SwapTime(receive_s=0.25, pause_s=0.5),), rollout_rest_s=0.1, decide_s=0.15)
    outcome = simulate(model(work), setting(max_staleness=0), steps=5, warmup=1)
    assert outcome.step_wall_s == pytest.approx(1.0)
    cycle_s = 10 * 0.1 + 0.1 + 0.15 + 1.0 + 0.25 + 0.5
    assert outcome.groups_per_min == pytest.approx(60 * 2 / cycle_s)
    assert (outcome.mean_age, outcome.max_age) == (0.0, 0)
    assert outcome.learner_waits == pytest.approx(1 - 1.0 / cycle_s)


def test_staleness_overlaps_them() -> None:
    work = recorded(swaps=(SwapTime(receive_s=0.0, pause_s=0.5),))
    serial = simulate(model(work), setting(max_staleness=0), steps=8, warmup=2)
    overlapped = simulate(model(work), setting(max_staleness=2), steps=8, warmup=4)
    assert overlapped.groups_per_min > 1.5 * serial.groups_per_min
    assert 0.0 < overlapped.mean_age <= 2.0


def test_waiting_calls_hold_no_worker_and_computing_ones_do() -> None:
    """8 rollouts of S = 0 sleep together, or compute 1 s each on the only worker, one after the other."""
    sleeping = recorded(groups=(group(*[(10, 10)] * 4, run_s=5.0),))
    outcome = simulate(model(sleeping), setting(max_staleness=0), steps=4, warmup=1)
    assert outcome.groups_per_min == pytest.approx(60 * 2 / (1.0 + 5.0 + 1.0 + 1.0))
    computing = recorded(groups=(group(*[(10, 10)] * 4),), call_cpu_s=1.0)
    outcome = simulate(model(computing), setting(max_staleness=0), steps=4, warmup=1)
    assert outcome.groups_per_min == pytest.approx(60 * 2 / (1.0 + 8.0 + 1.0 + 1.0))


def test_slots_bound_what_runs_at_once() -> None:
    """Two slots for eight rollouts: four rounds of generation."""
    outcome = simulate(model(), setting(max_staleness=0, concurrency=2), steps=4, warmup=1)
    assert outcome.groups_per_min == pytest.approx(60 * 2 / (4 * 1.0 + 1.0))
    two = simulate(model(), setting(max_staleness=0, concurrency=2, engines=2), steps=4, warmup=1)
    assert two.groups_per_min == pytest.approx(60 * 2 / (2 * 1.0 + 1.0))


def test_dropped_groups_are_replaced_at_once() -> None:
    """With half of the groups dropped, half of what is decided is trained."""
    mixed = recorded(groups=(group((10,), (10,), (10,), (10,)), group((10,), (10,), (10,), (10,), kept=False)))
    slow = model(mixed, pass_time=PassTime(fixed_s=0.0, token_s=0.05))
    outcome = simulate(slow, setting(max_staleness=4), steps=60, warmup=6)
    assert outcome.groups_per_min == pytest.approx(15, rel=0.15)


def test_the_same_seed_gives_the_same_outcome_and_another_another() -> None:
    work = recorded(groups=tuple(group((3, at), (at,), (5,), (2 * at,), run_s=0.3) for at in range(4, 12)))
    one, same, other = (simulate(model(work), setting(), steps=8, warmup=3, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_cores_are_shared_and_a_job_without_company_has_its_own() -> None:
    env = simpy.Environment()
    host = Host(env, Machine(cores=1.0, others=0.0))
    engine = Engine(env, host, "rollout-0", flat(1.0), cores=1.0)
    ends: dict[str, float] = {}
    for name, event in (("job", host.job(3.0)), ("generation", engine.generate(6))):
        assert event.callbacks is not None
        event.callbacks.append(lambda _, name=name: ends.setdefault(name, env.now))
    env.run()
    assert ends == {"job": pytest.approx(6.0), "generation": pytest.approx(9.0)}
    assert host.used_s == pytest.approx(9.0)


def test_tokens_of_a_generation_belong_to_the_versions_that_sampled_them() -> None:
    env = simpy.Environment()
    engine = Engine(env, Host(env, Machine(cores=8.0, others=0.0)), "rollout-0", flat(1.0), cores=0.0)
    generation = engine.generate(10)
    env.run(until=4.0)
    engine.pause()
    env.run(until=6.0)
    engine.resume(1)
    env.run(until=7.0)
    late = engine.generate(2)
    env.run()
    assert generation.value == {0: pytest.approx(4.0), 1: pytest.approx(6.0)}
    assert late.value == {1: pytest.approx(2.0)}
    assert env.now == pytest.approx(12.0)


def ends(engine: Engine, begins: dict[str, tuple[float, int, int]]) -> dict[str, float]:
    """When generations are over that begin at a time, with so many tokens and so many of a context."""
    found: dict[str, float] = {}

    def one(name: str, at_s: float, tokens: int, context: int) -> Generator[Event, Any, None]:
        yield engine.env.timeout(at_s)
        yield engine.generate(tokens, context)
        found[name] = engine.env.now

    for name, begin in begins.items():
        engine.env.process(one(name, *begin))
    engine.env.run()
    return found


def alone(pass_time: PassTime) -> Engine:
    env = simpy.Environment()
    return Engine(env, Host(env, Machine(cores=8.0, others=0.0)), "rollout-0", pass_time, cores=1.0)


def test_generations_that_begin_together_share_passes_and_a_late_one_waits_for_the_next() -> None:
    engine = alone(PassTime(fixed_s=1.0, token_s=0.5))
    assert ends(engine, {"a": (0.0, 4, 0), "b": (0.0, 2, 0), "late": (2.5, 2, 0)}) == {
        "b": pytest.approx(2 * 2.0),
        "late": pytest.approx(4.0 + 2 * 2.0),
        "a": pytest.approx(4.0 + 2 * 2.0),
    }
    assert (engine.passes, engine.pass_tokens) == (4.0, pytest.approx(8.0))
    assert engine.alone_s == pytest.approx(8.0)


def test_a_context_makes_the_pass_longer_in_which_its_generation_joins_for_all() -> None:
    engine = alone(PassTime(fixed_s=1.0, token_s=0.1))
    assert ends(engine, {"a": (0.0, 3, 0), "b": (1.0, 1, 20)}) == {
        "b": pytest.approx(1.1 + 1.2 + 2.0),
        "a": pytest.approx(1.1 + 1.2 + 2.0 + 1.1),
    }


def test_what_ran_while_generations_lasted_is_measured_with_them() -> None:
    engine = alone(PassTime(fixed_s=1.0, token_s=0.5))
    ends(engine, {"a": (0.0, 2, 6), "b": (0.0, 2, 6)})
    assert list(engine.measured) == [2]
    found = engine.measured[2]
    assert (found.tokens, found.passes, found.pass_tokens) == (4.0, 4.0, pytest.approx(2 * (2 * 2 + 12) - 6))
    assert found.wall_s == pytest.approx(2 * (2 * 2.0 + 12 * 0.5))


def test_a_role_that_does_one_thing_at_a_time_never_uses_two_cores() -> None:
    env = simpy.Environment()
    host = Host(env, Machine(cores=4.0, others=0.0))
    thread = Thread(host)
    over = [thread.work(1.0) for _ in range(5)]
    env.run(until=over[2])
    assert env.now == pytest.approx(3.0)
    env.run()
    assert (env.now, host.used_s) == (pytest.approx(5.0), pytest.approx(5.0))


def test_rollouts_begin_one_after_the_other_where_their_engine_takes_a_core_for_each() -> None:
    """S = 0: 8 rollouts of 10 tokens, each of which costs the engine's process 0.01 s before a pass can begin."""
    slow = model(beside_cpu_s=0.01)
    outcome = simulate(slow, setting(max_staleness=0), steps=4, warmup=1)
    assert outcome.groups_per_min == pytest.approx(60 * 2 / (8 * 0.1 + 1.0 + 1.0))
    assert outcome.beside_s == pytest.approx(0.1 * (1 + 8) / 2)


def test_a_call_that_computes_for_long_has_a_core_for_long() -> None:
    """One core; the only other thing that needs it is the call of another rollout."""
    turns = (group((5, 5), (5, 5), (5, 5), (5, 5), run_s=2.0),)
    work = recorded(groups=turns, call_cpu_s=1.0, workers=8, machines=(Machine(cores=1.0, others=0.0),))
    outcome = simulate(model(work, call_cpu_share=0.5), setting(max_staleness=0), steps=4, warmup=1)
    assert outcome.groups_per_min == pytest.approx(60 * 2 / (0.5 + 8 * 0.5 * 2.0 + 0.5 + 1.0))


def test_every_recorded_group_is_met_as_often_as_any_other() -> None:
    """One of four is dropped, in each round of four: of 12 that are decided, 9 are trained."""
    groups = (*(group((at,), (at,), (at,), (at,)) for at in (1, 2, 3)), group((4,), (4,), (4,), (4,), kept=False))
    world = World(model(recorded(groups=groups)), setting(max_staleness=0, groups_per_step=1), 9, seed=3)
    drawn = [world._draw(number) for number in range(12)]
    assert sorted(one.rollouts[0].turns[0].num_tokens for one in drawn) == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert sum(bool(one.drop_reason) for one in drawn) == 3


@st.composite
def any_group(draw: st.DrawFn) -> GroupWork:
    turns = st.lists(st.integers(1, 20), min_size=1, max_size=3).map(tuple)
    rights = draw(st.lists(st.booleans(), min_size=4, max_size=4))
    return GroupWork(num_rollouts=4, rollouts=tuple(rollout(draw(turns), one, 0.2) for one in rights))


@pytest.mark.slow
@hypothesis_settings(max_examples=60, deadline=None)
@given(
    st.lists(any_group(), min_size=1, max_size=5),
    st.integers(0, 5),
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(1, 3),
    st.floats(0.05, 8.0),
    st.tuples(st.floats(0.0, 6.0), st.floats(0.0, 2.0)),
    st.floats(1.0, 4.0),
)
def test_no_token_is_older_than_s_over_any_work(
    groups: list[GroupWork],
    staleness: int,
    size: int,
    slots: int,
    engines: int,
    step_s: float,
    swap: tuple[float, float],
    cores: float,
) -> None:
    """`simulate` checks each token when it is taken; deadlock would end it with no event left."""
    work = recorded(
        groups=(*groups, group((5,), (9,), (2, 4), (7,))),
        swaps=(SwapTime(receive_s=swap[0], pause_s=swap[1]),),
        call_cpu_s=0.05,
        machines=(Machine(cores=cores, others=0.3),),
    )
    busy = model(work, step_fixed_s=step_s, learner_share=1.0, engine_cores=1.0, beside_cpu_s=0.01)
    wanted = setting(max_staleness=staleness, groups_per_step=size, concurrency=slots, engines=engines)
    outcome = simulate(busy, wanted, steps=6, warmup=2)
    assert 0 <= outcome.mean_age <= outcome.max_age <= staleness
    assert outcome.groups_per_min <= 60 * size / step_s * (1 + 1e-6)
    assert outcome.cores_used <= 1 + 1e-6


def test_contexts_that_a_version_makes_engines_compute_anew_hold_generation_up() -> None:
    """S = 1 with a step that takes 4 s: each version meets 8 rollouts in the engine, whose prompts have 10 tokens."""
    kept = model(pass_time=PassTime(fixed_s=0.6, token_s=0.05), step_fixed_s=4.0)
    anew = replace(kept, work=replace(kept.work, recomputes=True))
    without, with_anew = (simulate(one, setting(), steps=12, warmup=4) for one in (kept, anew))
    assert with_anew.engine_s > 1.1 * without.engine_s
    assert with_anew.groups_per_min < 0.95 * without.groups_per_min

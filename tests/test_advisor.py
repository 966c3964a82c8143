"""The advisor names what limits a made run, gives fixes that change something, and is unclear where evidence is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.monitor.advisor import BALANCED, NAMES, UNCLEAR, advise
from launch.monitor.capacities import capacities
from launch.monitor.snapshot import Host, Snapshot, Tickets
from launch.monitor.text import WIDTH, screen
from tests import snapshots
from tests.snapshots import MADE, SETTINGS, clock, engine, exhausted, learner, role, run, with_role

FIRST = {
    "sandbox": ("sandbox.workers", 2, 3),
    "slots": ("rollout.concurrency", 8, 16),
    "kv": ("rollout.kv_cache_mib", 64, 128),
    "learner": ("learner.ranks", 1, 2),
    "swap": ("weights.bucket_mib", 64, 128),
    "tickets": ("staleness.max_staleness", 0, 1),
    "cores": ("launch/rollout.sh", "this host", "another host"),
}


@pytest.mark.parametrize("strength", [1, 2])
@pytest.mark.parametrize("limit", MADE)
def test_a_made_limit_is_named(limit: str, strength: int) -> None:
    advice = advise(MADE[limit](strength))
    assert advice.limit == limit, advice.verdict
    assert advice.verdict.startswith(NAMES[limit])


@pytest.mark.parametrize("limit", MADE)
def test_its_first_fix_turns_the_right_dial(limit: str) -> None:
    advice = advise(MADE[limit](1))
    first = advice.fixes[0]
    assert (first.dial, first.now, first.proposed) == FIRST[limit]
    assert len(advice.fixes) <= 3


def test_capacity_is_the_rate_over_the_use() -> None:
    found = {one.stage: one for one in capacities(run())}
    assert found["learner"].use == pytest.approx(0.53)
    assert found["learner"].groups_per_min == pytest.approx(120 / 0.53)
    assert found["engines"].use == pytest.approx(0.5 / 0.99)
    assert found["swap"].groups_per_min == pytest.approx(120 / 0.05)
    assert found["cores"].use == pytest.approx(1.7 / 4)


def test_an_engine_whose_curve_still_rises_has_no_known_capacity() -> None:
    found = {one.stage: one for one in capacities(run(engines=(engine(points=snapshots.RISING),)))}
    assert found["engines"].groups_per_min is None
    assert "still rising at 8 at once" in found["engines"].says


def test_a_busy_time_without_a_core_is_not_the_learners() -> None:
    waiting = with_role(run(), role("learner-0", clock(busy=0.9), wait=0.5))
    found = {one.stage: one for one in capacities(waiting)}
    assert found["learner"].use == pytest.approx(0.4)
    assert "50% of it without a core" in found["learner"].says


def test_engines_at_the_top_of_a_flat_curve_limit() -> None:
    one = engine(tokens_per_s=1000.0, full=0.9, held_when_full=64.0)
    advice = advise(exhausted(run(engines=(one,)), waiting_mean=4.0))
    assert advice.limit == "engines"
    assert advice.fixes[0].dial == "rollout.engines"


def test_a_limit_on_what_the_learner_sends_is_the_first_to_be_raised() -> None:
    limited = replace(MADE["swap"](1), settings=SETTINGS | {"weights.max_mib_per_s": 1.5})
    first = advise(limited).fixes[0]
    assert (first.dial, first.now, first.proposed) == ("weights.max_mib_per_s", 1.5, 3.0)


def test_two_least_capacities_within_a_tenth_are_balanced() -> None:
    one = engine(tokens_per_s=0.92 * 1060 * 0.99, full=0.9, held_when_full=64.0)
    base = with_role(run(engines=(one,), learner=learner(3.6, 0.3)), role("learner-0", clock(busy=0.88)))
    advice = advise(exhausted(base, finished_mean=5.0))
    assert advice.limit == BALANCED
    assert advice.verdict == "balanced: engines and learner could do 130 and 136 groups/min"
    apart = with_role(base, role("learner-0", clock(busy=0.80)))
    assert advise(exhausted(apart, finished_mean=5.0)).limit == "engines"


@pytest.mark.parametrize(
    ("snapshot", "words"),
    [
        (run(), "nothing is used to the full: learner 53% in use"),
        (run(learner=replace(learner(), steps=1)), "1 learner steps in the window"),
        (run(rates=replace(run().rates, groups_trained_per_min=0.0)), "learner steps in the window"),
        (run(run=replace(run().run, state="evaluating", phase="start")), "an evaluation goes on"),
        (with_role(run(), role("rollout-0", clock(down=0.8))), "rollout-0 was not there"),
        (with_role(run(), role("learner-0", clock(busy=0.95))), "learner is 95% in use"),
        (with_role(snapshots.slow_sandbox(1), role("learner-0", clock(busy=0.98))), "unclear|learner"),
    ],
)
def test_where_the_evidence_is_unclear_so_is_the_verdict(snapshot: Snapshot, words: str) -> None:
    advice = advise(snapshot)
    if "|" not in words:
        assert words in advice.verdict
    assert advice.limit == UNCLEAR
    assert advice.fixes == ()
    assert advice.reasons


def test_no_workers_are_proposed_where_no_core_is_left() -> None:
    full = replace(snapshots.slow_sandbox(2), hosts=(Host(name="node", cores=2, run_used=1.8, used=1.8),))
    fixes = advise(full).fixes
    assert "sandbox.nodes" in {fix.dial for fix in fixes}
    assert "sandbox.workers" not in {fix.dial for fix in fixes}


def test_more_staleness_is_not_proposed_to_a_loss_without_correction() -> None:
    base = snapshots.few_tickets(1)
    uncorrected = replace(base, settings={**base.settings, "loss.correction": "none"})
    assert "staleness.max_staleness" not in {fix.dial for fix in advise(uncorrected).fixes}


def test_slow_checkpoints_come_first() -> None:
    base = replace(snapshots.slow_learner(1), learner=learner(2.0, 0.1, checkpoint_s=1.5))
    assert advise(base).fixes[0].dial == "learner.checkpoint_every"


shares = st.floats(0.0, 1.0)


@st.composite
def any_run(draw: st.DrawFn) -> Snapshot:
    """Every figure on its own."""
    busy = draw(shares)
    sync = draw(st.floats(0.0, 1.0 - busy))
    points = draw(st.sampled_from([snapshots.FLAT, snapshots.RISING, ()]))
    slots = draw(st.integers(1, 256))
    one = engine(
        points=points,
        slots=slots,
        full=draw(st.none() | shares),
        held_when_full=draw(st.none() | st.floats(0.0, slots)),
        tokens_per_s=draw(st.none() | st.floats(0.0, 1060.0)),
        paused=draw(st.floats(0.0, 0.9)),
    )
    cores = draw(st.integers(1, 64))
    used = draw(st.floats(0.0, cores))
    base = run(
        engines=(one,) * draw(st.integers(0, 2)),
        hosts=(Host(name="node", cores=cores, run_used=used, used=used),) * draw(st.integers(0, 1)),
        tickets=draw(st.none() | st.builds(tickets, st.integers(1, 40), shares, shares)),
        sandbox=draw(st.none() | st.just(replace(snapshots.slow_sandbox(1).sandbox, backlog=draw(shares)))),  # type: ignore[type-var]
        learner=draw(st.none() | st.just(learner(draw(st.floats(0.0, 9.0)), 1.0, draw(st.floats(0.0, 3.0))))),
        settings={**SETTINGS, "rollout.concurrency": slots, "staleness.max_staleness": draw(st.integers(0, 8))},
        swap=draw(st.none() | st.just(replace(snapshots.slow_swap(1).swap, receive_s=draw(st.floats(0.0, 9.0))))),  # type: ignore[type-var]
    )
    return with_role(base, role("learner-0", clock(busy=busy, sync=sync), wait=draw(st.floats(0.0, 2.0))))


def tickets(bound: int, active: float, waiting: float) -> Tickets:
    return Tickets(
        bound=bound,
        active=round(active * bound),
        active_mean=active * bound,
        by_state={},
        waiting_mean=waiting * bound,
        finished_mean=0.0,
        waits_for="",
        batch_waits_for="",
    )


@settings(max_examples=150, deadline=None)
@given(any_run())
def test_advice_holds_its_promises_over_any_figures(snapshot: Snapshot) -> None:
    advice = advise(snapshot)
    rate = snapshot.rates.groups_trained_per_min or 0.0
    assert advice == advise(snapshot)
    assert advice.limit in {*NAMES, BALANCED, UNCLEAR}
    assert all(one.use is None or 0.0 <= one.use <= 1.0 + 1e-9 for one in advice.capacities)
    assert all(one.groups_per_min is None or one.groups_per_min >= rate * (1 - 1e-9) for one in advice.capacities)
    assert len(advice.fixes) <= 3
    assert len({fix.dial for fix in advice.fixes}) == len(advice.fixes)
    for fix in advice.fixes:
        assert fix.proposed != fix.now
        assert fix.expect_groups_per_min is None or fix.expect_groups_per_min >= rate * (1 - 1e-9)
    if advice.limit == UNCLEAR:
        assert advice.fixes == ()
    assert all(len(line) <= WIDTH for line in screen(snapshot, advice))


@settings(max_examples=100, deadline=None)
@given(any_run())
def test_a_named_stage_has_the_least_capacity_of_those_that_work(snapshot: Snapshot) -> None:
    advice = advise(snapshot)
    known = {one.stage: one for one in advice.capacities if one.groups_per_min is not None}
    if advice.limit in ("engines", "sandbox", "learner", "swap", "cores"):
        working = [one.groups_per_min for stage, one in known.items() if stage not in ("slots", "kv", "tickets")]
        assert known[advice.limit].groups_per_min == min(working, key=float)


def test_cores_that_the_sandbox_uses_up_are_not_for_more_tickets_to_fill() -> None:
    """As a run with as many busy workers as cores told: sandbox 95% and cores 99% in use, all tickets active."""
    sandbox = snapshots.slow_sandbox(1).sandbox
    assert sandbox is not None
    hosts = (Host(name="node", cores=2, run_used=1.9, used=1.978),)
    told = exhausted(
        run(sandbox=replace(sandbox, backlog=0.947), hosts=hosts, engines=(engine(points=snapshots.RISING),))
    )
    hungry = with_role(with_role(told, role("sandbox-0", {}, cores=1.6)), role("rollout-0", clock(busy=0.9), cores=0.2))
    assert advise(hungry).limit == BALANCED
    engines = with_role(
        with_role(told, role("sandbox-0", {}, cores=0.2)), role("rollout-0", clock(busy=0.9), cores=1.6)
    )
    assert advise(engines).limit == "tickets"


def test_cores_that_others_use_are_named_first() -> None:
    hosts = (Host(name="node", cores=4, run_used=1.5, used=3.9),)
    fix = advise(replace(snapshots.full_cores(1), hosts=hosts)).fixes[0]
    assert (fix.dial, fix.now, fix.proposed) == ("host", "shared", "its own")
    assert fix.reason == "others use 2.4 of 4 cores of node"

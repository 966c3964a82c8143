"""The ledger: random histories of whole runs keep the law, and what each method answers and refuses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.ledger import Ledger
from buffer.membership import Member
from buffer.tickets import FencedError, LedgerError, Ticket, check_promise
from tests.law.judge import plan_of
from tests.law.world import World, run_history

SEEDS = st.integers(0, 2**32)


def running(P: int = 2, S: int = 1, steps: int = 100) -> Ledger:
    """A ledger with one live engine at version 0."""
    ledger = Ledger(P, S, steps)
    ledger.join("rollout-0", 1)
    ledger.acknowledge("rollout-0", 1, 0)
    return ledger


def issue_all(ledger: Ledger) -> list[Ticket]:
    issued = []
    while (ticket := ledger.issue(ledger.next_problem)) is not None:
        issued.append(ticket)
    return issued


def finish_all(ledger: Ledger) -> None:
    for ticket in ledger.outstanding:
        if ticket.state != "finished":
            ledger.finish(ticket.group)


# Whole runs


@settings(max_examples=100, deadline=None, database=None)
@given(seed=SEEDS)
def test_random_histories_keep_every_sentence_of_the_law(seed: int) -> None:
    run_history(plan_of(seed))


@settings(max_examples=15, deadline=None, database=None)
@given(seed=SEEDS, S=st.integers(0, 3))
def test_a_filter_that_drops_everything_does_not_stall(seed: int, S: int) -> None:
    world = run_history(plan_of(seed, drop=1.0, S=S, problems=40))
    tickets = world.shell.disk.tickets.values()
    assert [t.problem_index for t in tickets] == list(range(40))
    kept_by_timeout = sum(t.state == "released" for t in tickets)
    assert world.shell.ledger.drops.total() + kept_by_timeout == 40
    assert world.shell.ledger.drops["all_right"] > 20


@settings(max_examples=25, deadline=None, database=None)
@given(seed=SEEDS)
def test_S_0_is_the_synchronous_loop(seed: int) -> None:
    """Step k trains what was issued at version k and kept, in order, and every token of it is of version k."""
    world = run_history(plan_of(seed, S=0, moves_S=False))
    disk = world.shell.disk
    for step in range(disk.next_step):
        groups = [t for t in disk.tickets.values() if t.step == step]
        assert all((t.base, t.deadline) == (step, step) for t in groups)
        sampled = {
            v for (group, _), versions in disk.tokens.items() for v in versions if disk.tickets[group].step == step
        }
        assert sampled == {step}


def test_without_disturbance_every_batch_but_the_last_ones_is_whole_and_nothing_is_dropped() -> None:
    world = run_history(plan_of(5, events=0, drop=0.0, P=3, S=2, steps=6, problems=100, stuck_joiner=False))
    assert all(sum(t.step == step for t in world.shell.disk.tickets.values()) == 3 for step in range(6))


def test_an_exhausted_source_ends_in_a_short_batch() -> None:
    plan = plan_of(3, events=0, drop=0.0, P=4, S=1, steps=9, problems=10, num_rollouts=1, stuck_joiner=False)
    world = run_history(plan)
    sizes = [sum(t.step == step for t in world.shell.disk.tickets.values()) for step in range(3)]
    assert sizes == [4, 4, 2 - world.shell.ledger.drops["timed_out"]]


# Issue and release


def test_the_example_of_the_module() -> None:
    ledger = running(P=8, S=1)
    first = issue_all(ledger)
    assert [(t.base, t.deadline) for t in first] == [(0, 1)] * 16
    finish_all(ledger)
    taken = ledger.take(0)
    assert taken is not None
    assert [t.group for t in taken] == list(range(8))
    assert issue_all(ledger) == []
    released = ledger.acknowledge("rollout-0", 1, 1)
    assert [(t.group, t.state) for t in released] == [(group, "released") for group in range(8)]
    assert [(t.base, t.deadline) for t in issue_all(ledger)] == [(1, 2)] * 8


def test_the_slowest_live_engine_holds_acked_and_its_death_lets_go() -> None:
    ledger = running(P=1, S=0)
    ledger.join("slow", 1)
    ledger.acknowledge("slow", 1, 0)
    issue_all(ledger)
    finish_all(ledger)
    ledger.take(0)
    assert ledger.acknowledge("rollout-0", 1, 1) == []
    assert ledger.acked == 0
    assert [t.state for t in ledger.remove("slow")] == ["released"]
    assert ledger.acked == 1


def test_news_about_an_earlier_life_do_not_end_the_next() -> None:
    ledger = running()
    ledger.join("rollout-0", 2)
    ledger.acknowledge("rollout-0", 2, 0)
    ledger.remove("rollout-0", 1)
    assert [m.epoch for m in ledger.live] == [2]
    with pytest.raises(FencedError, match="epoch 1"):
        ledger.acknowledge("rollout-0", 1, 0)
    with pytest.raises(FencedError, match="epoch 1 is over"):
        ledger.join("rollout-0", 1)


def test_an_engine_can_neither_go_back_nor_ahead_of_the_learner() -> None:
    ledger = running(P=1, S=1)
    issue_all(ledger)
    finish_all(ledger)
    ledger.take(0)
    with pytest.raises(LedgerError, match=r"version 2.*next step to be taken is 1"):
        ledger.acknowledge("rollout-0", 1, 2)
    ledger.acknowledge("rollout-0", 1, 1)
    with pytest.raises(LedgerError, match="never go back"):
        ledger.acknowledge("rollout-0", 1, 0)


def test_a_problem_is_used_once_even_when_dropped() -> None:
    ledger = running(P=1, S=0)
    first = ledger.issue(0)
    assert first is not None
    assert ledger.drop(first.group, "all_wrong")[0].drop_reason == "all_wrong"
    assert ledger.drops == {"all_wrong": 1}
    with pytest.raises(LedgerError, match="problem 0 is used"):
        ledger.issue(0)
    second = ledger.issue(1)
    assert second is not None
    assert (second.group, second.problem_index) == (1, 1)


def test_waiting_has_a_reason_for_people() -> None:
    ledger = Ledger(1, 0, 5)
    assert "version 0" in ledger.issue_waits_for()
    ledger = running(P=1, S=0)
    issue_all(ledger)
    assert "1 are active, the bound is 1" in ledger.issue_waits_for()
    assert "groups [0]" in ledger.take_waits_for()


def test_errors_carry_ticket_base_deadline_and_step() -> None:
    ledger = running(P=1, S=0)
    issue_all(ledger)
    ledger.finish(0)
    with pytest.raises(LedgerError, match=r"group 0 \(finished, base 0, deadline 0\).*step 0"):
        ledger.finish(0)
    with pytest.raises(LedgerError, match="step 3 can't be taken: the next one is 0"):
        ledger.take(3)
    with pytest.raises(LedgerError, match=r"group 9.*no active ticket"):
        ledger.drop(9, "failed")
    with pytest.raises(LedgerError, match="needs a reason"):
        ledger.drop(0, "")


def test_the_check_at_the_learner_uses_S_at_issue() -> None:
    ticket = Ticket(group=1, problem_index=1, base=4, deadline=6)
    check_promise(ticket, 6, 4)
    with pytest.raises(LedgerError, match=r"base 4, deadline 6\): a token of version 4 is 3 steps old at step 7"):
        check_promise(ticket, 7, 4)


def test_goal_ends_issuing_and_counts_what_is_left() -> None:
    ledger = running(P=1, S=1)
    issue_all(ledger)
    finish_all(ledger)
    ledger.take(0)
    assert [(t.group, t.state) for t in ledger.goal_reached(1)] == [(1, "unused")]
    assert ledger.unused == 1
    assert [t.state for t in ledger.acknowledge("rollout-0", 1, 1)] == ["released"]
    assert ledger.active == 0
    assert not ledger.can_issue()


# S changed live


def test_lowering_S_pauses_issuing_and_keeps_deadlines() -> None:
    ledger = running(P=2, S=2)
    before = issue_all(ledger)
    ledger.set_staleness(0)
    assert ledger.bound == 2
    for ticket in before[:4]:
        assert issue_all(ledger) == []
        ledger.drop(ticket.group, "all_right")
    assert issue_all(ledger) == []
    ledger.drop(before[4].group, "all_right")
    assert [(t.base, t.deadline) for t in issue_all(ledger)] == [(0, 0)]
    assert ledger.tickets[0].deadline == 2


# Restart


@settings(max_examples=40, deadline=None, database=None)
@given(seed=SEEDS, cut=st.integers(0, 150))
def test_what_is_on_disk_gives_the_same_ledger_back(seed: int, cut: int) -> None:
    world = World(plan_of(seed, events=150), literal=True)
    world.warm_up()
    weights = world.draw_weights()
    for _ in range(cut):
        world.chaos(weights)
        world.shell.pump()
    before = world.shell.ledger
    world.shell.start()
    world.shell.pump()
    after = world.shell.ledger
    for name in ("tickets", "acked", "next_step", "S", "bound", "next_group", "next_problem", "exhausted", "drops"):
        assert getattr(after, name) == getattr(before, name), name
    assert sorted(m.name for m in after.live) == sorted(m.name for m in before.live)


@pytest.mark.parametrize(
    ("ticket", "message"),
    [
        (Ticket(group=3, problem_index=3, base=0, deadline=1, state="finished"), "outstanding on disk"),
        (Ticket(group=3, problem_index=3, base=0, deadline=1, state="taken", step=0), "written in parts"),
        (Ticket(group=3, problem_index=3, base=0, deadline=1, state="taken", step=2), "written in parts"),
    ],
)
def test_a_change_written_in_parts_is_refused(ticket: Ticket, message: str) -> None:
    with pytest.raises(LedgerError, match=message):
        Ledger(2, 1, 9).restore([ticket], 1, [Member(name="rollout-0", epoch=1, version=1)], 2, 1)

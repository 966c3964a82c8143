"""Leases: one pair of hands per rollout, nothing lost when an engine is, nothing heard from who has lost it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.leases import Leases, worth_closing
from buffer.tickets import FencedError, LedgerError


def leases(num_rollouts: int = 2) -> Leases:
    """Two train groups: 7 (base 4, deadline 6), 8 (base 5, deadline 5)."""
    table = Leases(num_rollouts, lease_s=60.0, group_timeout_s=600.0)
    table.open(7, 4, 6, "train")
    table.open(8, 5, 5, "train")
    return table


def test_the_example_of_the_module() -> None:
    table = leases()
    assert table.grant("a", 1, 4, 8, 0.0) == [(7, 0, 1), (7, 1, 1)]
    assert not table.done(7, 0, 1, "a", 1)
    assert table.release_engine("a") == [(7, 1)]
    assert table.grant("b", 2, 4, 8, 1.0) == [(7, 1, 2)]
    with pytest.raises(FencedError, match="leased by b in epoch 2, attempt 2"):
        table.check(7, 1, 1, "a", 1)
    assert table.done(7, 1, 2, "b", 2)
    assert table.close(7) == [0, 1]


def test_earliest_deadline_first_then_the_group_closest_to_complete() -> None:
    table = leases()
    table.open(9, 5, 5, "train")
    assert table.grant("a", 1, 5, 1, 0.0) == [(8, 0, 1)]
    table.done(8, 0, 1, "a", 1)
    assert [key[:2] for key in table.grant("a", 1, 5, 9, 0.0)] == [(8, 1), (9, 0), (9, 1), (7, 0), (7, 1)]


def test_a_late_joiner_gets_no_ticket_newer_than_its_weights() -> None:
    table = leases()
    assert table.num_waiting(3) == 0
    assert table.grant("old", 1, 3, 8, 0.0) == []
    assert {group for group, _, _ in table.grant("old", 1, 4, 8, 0.0)} == {7}
    assert {group for group, _, _ in table.grant("new", 1, 9, 8, 0.0)} == {8}


def check_evaluation_runs_on_one_version(table_class: type[Leases]) -> None:
    table = table_class(2, lease_s=60.0, group_timeout_s=600.0)
    table.open(100, 4, -1, "eval")
    assert table.grant("older", 1, 3, 8, 0.0) == []
    assert table.grant("newer", 1, 5, 8, 0.0) == []
    assert table.grant("exact", 1, 4, 8, 0.0) == [(100, 0, 1)]
    assert table.done(100, 0, 1, "exact", 1)


def test_an_evaluation_runs_on_one_version() -> None:
    check_evaluation_runs_on_one_version(Leases)

    class AnyNewerVersion(Leases):
        def open(self, group: int, base: int, deadline: int, kind: object, num_rollouts: int | None = None) -> None:
            super().open(group, base, deadline, "train", 1)

    with pytest.raises(AssertionError):
        check_evaluation_runs_on_one_version(AnyNewerVersion)


def test_a_lease_that_is_not_renewed_expires_and_its_holder_is_told() -> None:
    table = leases()
    table.grant("a", 1, 5, 2, 0.0)
    assert table.renew("a", 1, [(8, 0)], 30.0) == []
    assert table.expired(61.0) == [(8, 1)]
    assert table.renew("a", 1, [(8, 0), (8, 1), (99, 0)], 61.0) == [(8, 1), (99, 0)]
    assert table.held_by("a") == [(8, 0)]
    assert table.grant("b", 1, 5, 1, 62.0) == [(8, 1, 2)]


def test_only_the_current_epoch_is_heard() -> None:
    table = leases()
    table.grant("a", 1, 5, 1, 0.0)
    for attempt, engine, epoch in ((2, "a", 1), (1, "b", 1), (1, "a", 2)):
        with pytest.raises(FencedError, match="group 8, rollout 0"):
            table.done(8, 0, attempt, engine, epoch)
    assert table.release_engine("a", 2) == []
    assert table.release_engine("a", 1) == [(8, 0)]


def test_late_turns_of_a_closed_group_are_fenced() -> None:
    table = leases()
    table.grant("a", 1, 5, 2, 0.0)
    table.done(8, 1, 1, "a", 1)
    assert table.close(8) == [1]
    with pytest.raises(FencedError, match="the group is closed"):
        table.check(8, 0, 1, "a", 1)
    assert table.close(8) == []


def test_excluded_rollouts_complete_a_group_but_are_not_kept() -> None:
    table = leases()
    table.grant("a", 1, 5, 2, 0.0)
    assert not table.excluded(8, 0, 1, "a", 1)
    assert table.done(8, 1, 1, "a", 1)
    assert table.is_complete(8)
    assert table.close(8) == [1]


def test_the_group_timeout_counts_from_the_first_lease_and_stops_without_an_engine() -> None:
    table = leases()
    table.timed_out(0.0, True)
    table.timed_out(1000.0, True)
    table.grant("a", 1, 5, 1, 1000.0)
    assert table.timed_out(1500.0, True) == []
    table.release_engine("a")
    assert table.timed_out(5000.0, False) == []
    table.grant("b", 1, 5, 1, 5000.0)
    assert table.timed_out(5099.0, True) == []
    assert table.timed_out(5101.0, True) == [8]


def test_a_complete_group_is_not_stuck() -> None:
    table = leases(1)
    table.grant("a", 1, 5, 1, 0.0)
    table.done(8, 0, 1, "a", 1)
    table.timed_out(0.0, True)
    assert table.timed_out(9999.0, True) == []


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [([1.0, 0.0], True), ([1.0, 0.0, 0.0], True), ([1.0], False), ([1.0, 1.0, 1.0], False), ([], False)],
)
def test_a_stuck_group_needs_G_rollouts_of_both_kinds(rewards: list[float], kept: bool) -> None:
    assert worth_closing(rewards, 2) is kept


def test_numbers_are_shared_by_both_kinds() -> None:
    with pytest.raises(LedgerError, match="group 7 is open already"):
        leases().open(7, 4, -1, "eval")


def test_a_restart_keeps_hands_attempts_and_ends() -> None:
    table = leases()
    table.grant("a", 1, 5, 3, 0.0)
    table.done(8, 0, 1, "a", 1)
    table.release_engine("b")
    rows = [state for key in ((7, 0), (8, 0), (8, 1)) if (state := table.state(*key)) is not None]
    again = leases()
    again.restore(rows, 1000.0)
    again.check(8, 1, 1, "a", 1)
    with pytest.raises(FencedError, match="it is done"):
        again.check(8, 0, 1, "a", 1)
    assert again.expired(1059.0) == []
    assert again.expired(1061.0) == [(7, 0), (8, 1)]
    assert again.grant("b", 2, 5, 8, 1061.0) == [(8, 1, 2), (7, 0, 2), (7, 1, 1)]
    with pytest.raises(LedgerError, match="group 8, rollout 1: on disk, but the group is not open"):
        Leases(2, 60.0, 600.0).restore(rows[2:], 0.0)


@settings(max_examples=60, deadline=None, database=None)
@given(seed=st.integers(0, 2**32))
def test_random_engines_never_share_a_rollout_and_every_rollout_ends_once(seed: int) -> None:
    rng = random.Random(seed)
    table = Leases(3, lease_s=5.0, group_timeout_s=1e9)
    for group in range(4):
        table.open(group, rng.randrange(3), rng.randrange(3, 6), "train")
    hands: dict[tuple[int, int], tuple[int, str, int]] = {}
    epochs = {"a": 1, "b": 1}
    ended: set[tuple[int, int]] = set()
    now_s = 0.0
    for _ in range(400):
        now_s += 0.5
        engine = rng.choice(("a", "b"))
        draw = rng.random()
        if draw < 0.4:
            for group, rollout, attempt in table.grant(engine, epochs[engine], rng.randrange(4), 2, now_s):
                assert (group, rollout) not in hands
                hands[group, rollout] = (attempt, engine, epochs[engine])
        elif draw < 0.5:
            for key in table.release_engine(engine):
                assert hands.pop(key)[1] == engine
            epochs[engine] += 1
        elif draw < 0.6:
            table.renew(engine, epochs[engine], [key for key, who in hands.items() if who[1] == engine], now_s)
        elif draw < 0.9 and hands:
            key = rng.choice(sorted(hands))
            attempt, holder, epoch = hands.pop(key)
            with pytest.raises(FencedError):
                table.check(*key, attempt, holder, epoch + 1)
            (table.done if rng.random() < 0.8 else table.excluded)(*key, attempt, holder, epoch)
            assert key not in ended
            ended.add(key)
        for key in table.expired(now_s):
            hands.pop(key)
        assert sorted(table.held_by("a") + table.held_by("b")) == sorted(hands)
    for engine in ("a", "b"):
        table.release_engine(engine)
    for group, rollout, attempt in table.grant("a", 99, 9, 99, now_s):
        table.done(group, rollout, attempt, "a", 99)
        ended.add((group, rollout))
    assert len(ended) == 12
    assert all(table.is_complete(group) for group in range(4))

"""RoC's draws against exact probabilities, and its properties over any group.

Inclusion probabilities come from enumerating every sequence of draws without replacement.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from math import sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.roc import ALL_RIGHT, ALL_WRONG, TOO_FEW, RocSettings, num_wrong_kept, penalties, select
from buffer.schema import GroupHeaders
from tests.roc_groups import FAILED, INFRA, PAPER, finish, headers, split

# Draws


def inclusion_probabilities(weights: tuple[float, ...], count: int) -> list[float]:
    """Exact, by summing over every sequence of `count` draws without replacement."""

    @cache
    def included(left: tuple[int, ...], draws: int) -> tuple[float, ...]:
        out = [0.0] * len(weights)
        if draws == 0:
            return tuple(out)
        total = sum(weights[at] for at in left)
        for first in left:
            chance = weights[first] / total
            rest = included(tuple(at for at in left if at != first), draws - 1)
            out = [have + chance * more for have, more in zip(out, rest, strict=True)]
            out[first] += chance
        return tuple(out)

    return list(included(tuple(range(len(weights))), count))


PENALTIES = [("ok",), ("ok", "error"), ("error",), (), ("ok", "ok", "timeout"), ("ok",), ("error", "memory"), ("ok",)]


@pytest.mark.parametrize(("num_right", "num_wrong"), [(2, 6), (3, 5), (4, 4), (5, 3), (6, 2), (7, 1), (8, 8)])
def test_inclusion_probabilities_are_those_of_sequential_draws(num_right: int, num_wrong: int) -> None:
    group_size, trials = (num_right + num_wrong) // 2, 2500
    group = [finish(at, 1.0, PENALTIES[at]) for at in range(num_right)]
    group += [finish(at, 0.0, ("error",)) for at in range(num_right, num_right + num_wrong)]
    seen = Counter(
        number
        for trial in range(trials)
        for number in select(headers(group, group_size, group=trial), PAPER, run_seed=7).keep
    )
    wrong_kept = num_wrong_kept(num_right, num_wrong, group_size, PAPER)
    weights = tuple(1 / (PAPER.epsilon + sum(penalties(one))) for one in group[:num_right])
    exact = inclusion_probabilities(weights, group_size - wrong_kept) + [wrong_kept / num_wrong] * num_wrong
    assert sum(exact) == pytest.approx(group_size)
    for number, chance in enumerate(exact):
        error = sqrt(chance * (1 - chance) / trials)
        assert abs(seen[number] / trials - chance) <= 4 * error + 1e-12, (number, chance, seen[number] / trials)


def test_a_small_epsilon_turns_the_draw_into_the_sort() -> None:
    sharp = RocSettings(epsilon=1e-9)
    group = [finish(at, 1.0, ("error",) * (at % 2) + ("ok",)) for at in range(8)] + split(0, 8)
    group = [finish(at, one.reward, one.statuses) for at, one in enumerate(group)]
    for number in range(50):
        keep = select(headers(group, 8, group=number), sharp, run_seed=3).keep
        assert [at for at in keep if at < 8] == [0, 2, 4, 6]


def test_the_choice_of_a_seed_and_group_is_frozen() -> None:
    # Literal expectations: another Python, host or refactoring must not change what a run trains.
    group = [finish(at, 1.0, PENALTIES[at]) for at in range(8)] + [finish(at, 0.0) for at in range(8, 16)]
    choices = [select(headers(group, 8, group=number), PAPER, run_seed=1).keep for number in range(3)]
    assert choices == [
        (0, 1, 5, 7, 9, 10, 12, 14),
        (0, 5, 6, 7, 9, 10, 14, 15),
        (0, 3, 5, 7, 10, 11, 12, 13),
    ]
    assert select(headers(group, 8, group=0), PAPER, run_seed=2).keep != choices[0]


# Properties

STATUSES = st.lists(st.sampled_from(("ok", "session_lost", *FAILED, *INFRA)), max_size=5).map(tuple)


@st.composite
def groups(draw: st.DrawFn) -> GroupHeaders:
    """Any group: odd sizes, short ones, in any order, with anything in its rollouts."""
    group_size = draw(st.integers(1, 20))
    numbers = draw(st.permutations(range(2 * group_size)))
    present = draw(st.one_of(st.just(2 * group_size), st.integers(0, 2 * group_size)))
    rollouts = [
        finish(
            number,
            draw(st.sampled_from((0.0, 1.0))),
            draw(STATUSES),
            well_formed=draw(st.booleans()),
            num_answers=draw(st.integers(0, 4)),
        )
        for number in numbers[:present]
    ]
    return headers(rollouts, group_size, group=draw(st.integers(0, 1 << 40)))


@settings(max_examples=100, deadline=None)
@given(groups(), st.sampled_from(("paper", "released", "off")), st.integers(1, 12), st.integers(0, 1 << 40))
def test_any_group_is_decided_soundly(group: GroupHeaders, mode: str, min_per_side: int, seed: int) -> None:
    roc = RocSettings(mode=mode, min_per_side=min_per_side)  # type: ignore[arg-type]
    decision = select(group, roc, seed)
    reward = {one.rollout: one.reward for one in group.rollouts}
    assert decision.drop_reason in ("", ALL_RIGHT, ALL_WRONG, TOO_FEW)
    assert bool(decision.keep) != bool(decision.drop_reason)
    assert len(decision.p_err) == len(decision.p_format) == len(group.rollouts)
    assert all(0 <= share <= 1 for share in decision.p_err + decision.p_format)
    assert list(decision.keep) == sorted(set(decision.keep) & set(reward))
    if decision.keep:
        rights = [reward[number] for number in decision.keep]
        assert set(rights) == {0.0, 1.0}
        if mode != "off":
            minimum = min(min_per_side, len(rights) // 2)
            assert rights.count(1.0) >= min(minimum, list(reward.values()).count(1.0))
            assert rights.count(0.0) >= min(minimum, list(reward.values()).count(0.0))
    if len(group.rollouts) == 2 * group.group_size and set(reward.values()) == {0.0, 1.0} and group.group_size > 1:
        assert len(decision.keep) == (len(reward) if mode == "off" else group.group_size)


@settings(max_examples=50, deadline=None)
@given(groups(), st.integers(0, 1 << 40), st.randoms(use_true_random=False))
def test_the_choice_does_not_depend_on_the_order_of_arrival(group: GroupHeaders, seed: int, rng: random.Random) -> None:
    shuffled = list(group.rollouts)
    rng.shuffle(shuffled)
    again = headers(shuffled, group.group_size, group=group.group)
    assert select(again, PAPER, seed).keep == select(group, PAPER, seed).keep

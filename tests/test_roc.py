"""RoC by hand: counts of every split, penalties, drop reasons, and infrastructure failures that must change nothing.

The counts of `paper` below are worked out by hand from the rule; the table of `released` was observed in the
published code (32 rollouts, 16 kept).
"""

from __future__ import annotations

import random

import pytest
from pydantic import ValidationError

from actors.roc import ALL_RIGHT, ALL_WRONG, TOO_FEW, RocSettings, penalties, select
from buffer.schema import GroupHeaders
from tests.roc_groups import FAILED, INFRA, OFF, PAPER, RELEASED, finish, headers, split


def kept_counts(num_right: int, num_wrong: int, group_size: int, mode: RocSettings = PAPER) -> tuple[int, int]:
    """(right, wrong) kept of a group that was issued 2 * group_size rollouts."""
    decision = select(headers(split(num_right, num_wrong), group_size), mode, run_seed=1)
    right = sum(number < num_right for number in decision.keep)
    return right, len(decision.keep) - right


# Counts


@pytest.mark.parametrize(
    ("num_right", "right", "wrong"),
    [(1, 1, 3), (2, 2, 2), (3, 2, 2), (4, 2, 2), (5, 2, 2), (6, 2, 2), (7, 3, 1)],
)
def test_every_split_of_8_by_hand(num_right: int, right: int, wrong: int) -> None:
    # 3 right, 5 wrong: 5 // 2 = 2 wrong. 6 right, 2 wrong: 1 is raised to min_per_side 2. 7 right: the only wrong one.
    assert kept_counts(num_right, 8 - num_right, 4) == (right, wrong)


PAPER_32 = {1: (1, 15), 2: (2, 14)}
# 3 right, 29 wrong: 29 // 2 = 14 wrong, 2 right; one more right at each odd number of right ones, until
# 28 right, 4 wrong: 2 wrong, 14 right. 29 and 30 right: 1 wrong is raised to 2. 31 right: the only wrong one.
PAPER_32 |= dict(zip(range(3, 29), [(at, 16 - at) for at in range(2, 15) for _ in range(2)], strict=True))
PAPER_32 |= {29: (14, 2), 30: (14, 2), 31: (15, 1)}


@pytest.mark.parametrize("num_right", range(1, 32))
def test_every_split_of_32_by_hand(num_right: int) -> None:
    assert kept_counts(num_right, 32 - num_right, 16) == PAPER_32[num_right]


@pytest.mark.parametrize(
    ("num_right", "num_wrong", "right", "wrong"),
    [
        (7, 6, 3, 3),  # 13 left of 16: 6 places, 6 // 2 = 3 wrong
        (1, 10, 1, 4),  # 11 left: 5 places, 5 wrong would leave none for the right one
        (10, 1, 4, 1),  # the only wrong one stays
        (2, 9, 2, 3),  # 5 places, 4 wrong are lowered to 3: min_per_side right ones
        (3, 2, 1, 1),  # 5 left: 2 places, one each
        (3, 3, 2, 1),  # 6 left: 3 places hold only one of each for sure; 3 // 2 = 1 wrong
        (1, 3, 1, 1),  # 4 left: 2 places
        (3, 1, 1, 1),
        (1, 2, 0, 0),  # 3 left: one place can't hold both kinds
        (1, 1, 0, 0),
        (0, 0, 0, 0),
    ],
)
def test_short_groups_of_16_keep_half_of_what_they_have(num_right: int, num_wrong: int, right: int, wrong: int) -> None:
    assert kept_counts(num_right, num_wrong, 8) == (right, wrong)


@pytest.mark.parametrize(
    ("num_rights", "counts"),
    [((1,), (1, 15)), (range(2, 6), (2, 14)), ((16,), (8, 8)), (range(27, 31), (14, 2)), ((31,), (15, 1))],
)
def test_released_reproduces_the_observed_count_table(num_rights: range, counts: tuple[int, int]) -> None:
    for num_right in num_rights:
        assert kept_counts(num_right, 32 - num_right, 16, RELEASED) == counts


def test_released_rounds_halves_to_even_where_paper_rounds_the_wrong_down() -> None:
    assert kept_counts(11, 21, 16, RELEASED) == (6, 10)  # 5.5 and 10.5
    assert kept_counts(11, 21, 16, PAPER) == (6, 10)
    assert kept_counts(9, 23, 16, RELEASED) == (4, 12)  # 4.5 and 11.5
    assert kept_counts(9, 23, 16, PAPER) == (5, 11)


def test_released_drops_below_g_keeps_g_whole_and_never_trips_on_odd_sizes() -> None:
    assert kept_counts(5, 10, 16, RELEASED) == (0, 0)
    assert kept_counts(5, 11, 16, RELEASED) == (5, 11)
    assert kept_counts(7, 7, 7, RELEASED) == (4, 3)  # the published code chose 8 of 14 here, and died of it
    assert kept_counts(3, 3, 3, RELEASED) == (2, 1)


def test_released_sorts_the_right_by_penalty_and_takes_the_first_wrong() -> None:
    statuses = [("error", "ok"), ("ok",), (), ("ok",)]
    group = [finish(at, 1.0, calls) for at, calls in enumerate(statuses)] + [finish(at, 0.0) for at in range(4, 8)]
    assert select(headers(group, 4), RELEASED, run_seed=1).keep == (1, 3, 4, 5)


def test_off_keeps_every_rollout_and_drops_equal_rewards() -> None:
    assert select(headers(split(3, 5), 8, 8), OFF, run_seed=1).keep == tuple(range(8))
    assert select(headers(split(8, 0), 8, 8), OFF, run_seed=1).drop_reason == ALL_RIGHT


@pytest.mark.parametrize("mode", [PAPER, RELEASED, OFF], ids=lambda mode: mode.mode)
def test_equal_rewards_are_dropped_with_their_reason(mode: RocSettings) -> None:
    assert select(headers(split(16, 0), 8), mode, run_seed=1).drop_reason == ALL_RIGHT
    assert select(headers(split(0, 16), 8), mode, run_seed=1).drop_reason == ALL_WRONG
    assert select(headers([], 8), mode, run_seed=1).drop_reason == TOO_FEW
    assert select(headers(split(1, 0), 8), mode, run_seed=1).drop_reason == TOO_FEW


# Penalties


def test_one_clean_answer_in_one_turn_costs_nothing() -> None:
    assert penalties(finish(0, 1.0, ("ok",), num_turns=1)) == (0.0, 0.0)
    assert penalties(finish(0, 1.0)) == (0.5, 0.0)  # no call: between flawless and all failed


def test_calls_are_judged_by_status_never_by_text() -> None:
    assert penalties(finish(0, 1.0, ("ok",), answer="relative error 1e-9")) == (0.0, 0.0)
    for status in FAILED:
        assert penalties(finish(0, 1.0, (status, "ok"))) == (0.5, 0.0), status


def test_format_costs_by_true_turns_and_without_an_answer_all() -> None:
    assert penalties(finish(0, 0.0, ("ok",), num_answers=2, num_turns=2))[1] == 0.5
    assert penalties(finish(0, 0.0, ("ok",), num_answers=9, num_turns=2))[1] == 1.0
    assert penalties(finish(0, 0.0, ("ok",), well_formed=False, num_answers=0, verdict="none"))[1] == 1.0


def test_a_lost_session_is_no_failure() -> None:
    assert penalties(finish(0, 1.0, ("session_lost", "error"))) == (0.5, 0.0)
    assert penalties(finish(0, 1.0, ("session_lost", "ok"))) == (0.0, 0.0)


# Infrastructure


def recorded(rng: random.Random, num_groups: int, group_size: int) -> list[GroupHeaders]:
    """Groups as a run records them: half right, a third of the calls failing."""
    statuses = ("ok", "ok", "ok", "ok", "error", "timeout", "malformed")
    return [
        headers(
            [
                finish(at, float(rng.random() < 0.5), tuple(rng.choices(statuses, k=rng.randrange(4))))
                for at in range(2 * group_size)
            ],
            group_size,
            group=number,
        )
        for number in range(num_groups)
    ]


def test_infrastructure_failures_at_5_percent_change_no_penalty_reward_or_choice() -> None:
    rng = random.Random(5)
    groups, injected = recorded(rng, 100, 8), 0
    for group in groups:
        disturbed = []
        for one in group.rollouts:
            statuses: list[str] = []
            for status in one.statuses:
                if rng.random() < 0.05:  # the call failed for our reasons, and was repeated
                    statuses.append(rng.choice(INFRA))
                    injected += 1
                statuses.append(status)
            disturbed.append(finish(one.rollout, one.reward, tuple(statuses), num_turns=one.num_turns))
        noisy = headers(disturbed, group.group_size, group=group.group)
        assert [one.reward for one in noisy.rollouts] == [one.reward for one in group.rollouts]
        assert select(noisy, PAPER, run_seed=1) == select(group, PAPER, run_seed=1)
    assert injected > 50


def test_rollouts_excluded_for_infrastructure_leave_the_others_as_they_are() -> None:
    rng, excluded = random.Random(6), 0
    for group in recorded(rng, 100, 8):
        stay = [at for at in range(16) if rng.random() >= 0.05]
        excluded += 16 - len(stay)
        short = headers([group.rollouts[at] for at in stay], 8, group=group.group)
        whole, decision = select(group, PAPER, run_seed=1), select(short, PAPER, run_seed=1)
        assert decision.p_err == tuple(whole.p_err[at] for at in stay)
        assert decision.p_format == tuple(whole.p_format[at] for at in stay)
        assert len(decision.keep) == len(stay) // 2
        assert set(decision.keep) <= {group.rollouts[at].rollout for at in stay}
        assert len(short.rollouts) == short.num_rollouts - (16 - len(stay))
    assert excluded > 40


# Settings


def test_impossible_settings_are_refused_with_bound_and_remedy() -> None:
    with pytest.raises(ValueError, match=r"size = 3 is below 2 \* roc.min_per_side = 4: .*min_per_side = 1"):
        PAPER.require(3)
    PAPER.require(4)
    with pytest.raises(ValidationError, match=r"greater than or equal to 0\.000000001"):
        RocSettings(epsilon=0)
    with pytest.raises(ValidationError, match="Extra inputs"):
        RocSettings(epsilonn=0.1)  # type: ignore[call-arg]

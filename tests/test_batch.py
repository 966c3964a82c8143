"""Batches: the staleness check, shares of ranks, micro-batches."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.schema import Batch, BatchGroup
from learner.batch import (
    BatchError,
    StalenessError,
    batch_advantages,
    build_micro_batches,
    check_share,
    plan_step,
    token_ages,
)
from learner.settings import LossSettings
from tests.learner_batches import make_batch


def header_batch(lengths):
    """A batch of headers alone; half of each trajectory is sampled."""
    return Batch(
        step=0,
        groups=tuple(
            BatchGroup(
                group=number,
                base=0,
                deadline=0,
                rollouts=tuple(range(len(group))),
                rewards=(1.0,) * len(group),
                num_tokens=tuple(group),
                num_output_tokens=tuple(length // 2 for length in group),
            )
            for number, group in enumerate(lengths)
        ),
    )


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(2, 90), min_size=1, max_size=8), min_size=1, max_size=8),
    world=st.integers(1, 5),
    budget=st.integers(1, 400),
)
def test_a_plan_holds_each_trajectory_once_within_the_budget_and_the_same_count_on_every_rank(lengths, world, budget):
    batch = header_batch(lengths)
    plan = plan_step(batch, world, budget)
    length = {(g.group, r): n for g in batch.groups for r, n in zip(g.rollouts, g.num_tokens, strict=True)}
    keys = [key for share in plan.shares for micro in share for key in micro]
    assert sorted(keys) == sorted(length)
    assert len(plan.shares) == world
    assert {len(share) for share in plan.shares} == {len(plan.loss_tokens)}
    assert plan.num_loss_tokens == sum(n // 2 for n in length.values())
    for share in plan.shares:
        for micro, most in zip(share, plan.loss_tokens, strict=True):
            padded = len(micro) * max((length[key] for key in micro), default=0)
            assert padded <= budget or len(micro) == 1
            assert sum(length[key] // 2 for key in micro) <= most
    tokens = [sum(length[key] for micro in share for key in micro) for share in plan.shares]
    assert max(tokens) - min(tokens) <= max(length.values()), "balanced to within the longest trajectory"


def test_an_idle_rank_gets_fillers():
    plan = plan_step(header_batch([[10, 4]]), 3, 100)
    assert plan.shares == ((((0, 0),),), (((0, 1),),), ((),))
    batch, trajectories = make_batch(num_groups=1, group_size=2)
    plan = plan_step(batch, 3, 100)
    (filler,) = build_micro_batches(plan, 2, trajectories, batch_advantages(batch, LossSettings()))
    assert filler.mask_M.tolist() == [0.0]
    assert filler.most_loss_tokens == plan.loss_tokens[0]


def test_micro_batches_point_at_the_position_before_each_sampled_token():
    batch, trajectories = make_batch(num_groups=1, group_size=3, seed=3)
    advantages = batch_advantages(batch, LossSettings())
    plan = plan_step(batch, 1, 10**6)
    (micro,) = build_micro_batches(plan, 0, trajectories, advantages)
    rows, width = micro.ids_BT.shape
    assert (rows, width) == (3, max(t.ids.size for t in trajectories))
    place = 0
    for row, key in enumerate(plan.shares[0][0]):
        trajectory = trajectories[key[1]]
        for position in np.flatnonzero(trajectory.sampled):
            assert micro.index_M[place] == row * width + position - 1
            assert (
                micro.ids_BT.reshape(-1)[micro.index_M[place] + 1] == micro.targets_M[place] == trajectory.ids[position]
            )
            assert micro.engine_logp_M[place] == trajectory.logprobs[position]
            assert micro.advantage_M[place] == np.float32(advantages[key])
            place += 1
    assert place == micro.mask_M.sum() == plan.num_loss_tokens


def test_ages_are_counted_over_sampled_tokens_alone():
    batch, trajectories = make_batch(step=4, versions=(2, 3, 4))
    ages = token_ages(4, trajectories)
    assert set(ages) == {0, 1, 2}
    assert sum(ages.values()) == sum(sum(group.num_output_tokens) for group in batch.groups)
    assert token_ages(4, []) == {}


def test_a_lawful_batch_passes_the_check():
    batch, trajectories = make_batch(step=4, versions=(3, 4))
    check_share(batch, 4, trajectories)
    check_share(batch, 4, trajectories[:3])


def test_a_token_older_than_its_ticket_raises_with_the_numbers():
    batch, trajectories = make_batch(step=4, versions=(3, 4))
    trajectories[5].versions[np.flatnonzero(trajectories[5].sampled)[0]] = 2
    with pytest.raises(
        StalenessError, match=r"group 1, rollout 1: base 3, deadline 5, step 4, .* version 2: age 2, .* 0 to 2"
    ):
        check_share(batch, 4, trajectories)


def test_a_token_of_a_version_that_is_not_trained_yet_raises():
    batch, trajectories = make_batch(step=4, versions=(3, 5))
    with pytest.raises(StalenessError, match=r"step 4, .* version 5: age -1"):
        check_share(batch, 4, trajectories)


def test_a_group_past_its_deadline_raises_on_every_rank():
    batch, _ = make_batch(step=4, versions=(1, 2))
    late = Batch(step=6, groups=batch.groups)
    with pytest.raises(StalenessError, match=r"group 0: base 1, deadline 5, but step 6"):
        check_share(late, 6, [])


def test_another_step_another_length_or_another_rollout_is_refused():
    batch, trajectories = make_batch()
    first = trajectories[0]
    with pytest.raises(BatchError, match="asked for the batch of step 5, got that of step 4"):
        check_share(batch, 5, trajectories)
    with pytest.raises(BatchError, match="announced were"):
        check_share(batch, 4, [dataclasses.replace(first, ids=first.ids[:-1])])
    with pytest.raises(BatchError, match="rollout 9 is not among the kept"):
        check_share(batch, 4, [dataclasses.replace(first, rollout=9)])
    with pytest.raises(BatchError, match="group 99 is not in the batch"):
        check_share(batch, 4, [dataclasses.replace(first, group=99)])
    with pytest.raises(BatchError, match="sampled tokens"):
        check_share(batch, 4, [dataclasses.replace(first, sampled=np.ones_like(first.sampled))])
    with pytest.raises(BatchError, match="not finite"):
        check_share(batch, 4, [dataclasses.replace(first, logprobs=np.full_like(first.logprobs, np.nan))])
    with pytest.raises(BatchError, match="no trajectory for"):
        build_micro_batches(plan_step(batch, 1, 100), 0, trajectories[1:], batch_advantages(batch, LossSettings()))


def test_an_empty_batch_is_refused():
    with pytest.raises(BatchError, match="nothing to train"):
        plan_step(Batch(step=0, groups=()), 1, 100)

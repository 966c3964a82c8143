"""Advantages over the kept rollouts, against figures worked out by hand."""

import math

import numpy as np
import pytest

from learner.advantage import group_advantages


def test_two_of_four_right():
    expected = 0.5 / (0.5 + 1e-6)
    np.testing.assert_allclose(group_advantages([1, 0, 0, 1]), [expected, -expected, -expected, expected], rtol=1e-12)


def test_one_of_eight_right_by_hand():
    std = math.sqrt(7) / 8  # of [1, 0 x 7]: mean 1/8, mean square 1/8
    advantages = group_advantages([1, 0, 0, 0, 0, 0, 0, 0])
    assert advantages[0] == pytest.approx((7 / 8) / (std + 1e-6), rel=1e-12)
    assert advantages[1] == pytest.approx((-1 / 8) / (std + 1e-6), rel=1e-12)
    assert advantages.sum() == pytest.approx(0, abs=1e-12)


def test_sample_std_divides_by_one_less_and_none_divides_by_nothing():
    assert group_advantages([1, 0], "sample")[0] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-6), rel=1e-12)
    assert group_advantages([1, 0], "none")[0] == 0.5


def test_equal_rewards_have_no_advantage():
    assert not group_advantages([1, 1, 1]).any()
    assert not group_advantages([1], "sample").any()


@pytest.mark.parametrize("rewards", [[], [1.0, math.nan]])
def test_no_reward_or_a_reward_that_is_no_number_is_refused(rewards):
    with pytest.raises(ValueError, match="finite"):
        group_advantages(rewards)

"""Advantages of a group against plain loops."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.errors import TaskError
from inflight.rollouts import group_advantages

ESTIMATORS = ("mean", "leave_one_out", "std")
REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16).filter(lambda rewards: len(set(rewards)) > 1)


def reference(rewards, estimator):
    size = len(rewards)
    mean = sum(rewards) / size
    match estimator:
        case "mean":
            return [r - mean for r in rewards]
        case "leave_one_out":
            return [r - sum(rewards[:i] + rewards[i + 1 :]) / (size - 1) for i, r in enumerate(rewards)]
        case "std":
            std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (size - 1))
            return [(r - mean) / (std + 1e-4) for r in rewards]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(rewards=REWARDS)
@settings(deadline=None)
def test_advantages_equal_a_plain_loop(estimator, rewards):
    # float64: 16 values up to 10; dividing by std + 1e-4 amplifies rounding by up to 1e4.
    assert group_advantages(rewards, estimator) == pytest.approx(reference(rewards, estimator), rel=1e-9, abs=1e-9)


def test_known_group_has_known_advantages():
    assert group_advantages([1, 0, 0, 0], "mean") == [0.75, -0.25, -0.25, -0.25]
    # float64.
    assert group_advantages([1, 0, 0, 0], "leave_one_out") == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3], rel=1e-15)
    assert group_advantages([1, 0, 0, 0], "std") == pytest.approx([0.75 / 0.5001, *[-0.25 / 0.5001] * 3], rel=1e-14)


@given(rewards=REWARDS)
@settings(deadline=None)
def test_leave_one_out_is_the_mean_baseline_scaled_up(rewards):
    size = len(rewards)
    scaled = [size / (size - 1) * a for a in group_advantages(rewards, "mean")]
    # float64: values up to 20.
    assert group_advantages(rewards, "leave_one_out") == pytest.approx(scaled, abs=1e-13)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.1] * 7, [-2.3] * 10, [1.0], []])
def test_group_of_equal_rewards_gives_exact_zeros(estimator, rewards):
    assert group_advantages(rewards, estimator) == [0.0] * len(rewards)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_reward_that_is_not_finite_is_refused_by_name(wrong):
    with pytest.raises(TaskError, match=f"reward 1 of a group of 3 is {wrong}"):
        group_advantages([0.0, wrong, 1.0], "mean")

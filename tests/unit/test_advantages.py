"""Advantages of a group against plain loops."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.errors import InvalidRequestError, TaskError
from inflight.rollouts import batch_advantages, group_advantages

ESTIMATORS = ("mean", "leave_one_out", "std", "population_std", "leave_one_out_std", "opo", "maxrl", "zero")
REWARDS = st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=2, max_size=16).filter(
    lambda rewards: len(set(rewards)) > 1
)


def lengths_of(rewards):
    return [3 + (7 * i) % 5 for i in range(len(rewards))]


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
        case "population_std":
            std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / size)
            return [(r - mean) / (std + 1e-8) for r in rewards]
        case "leave_one_out_std":
            advantages = []
            for i, r in enumerate(rewards):
                others = rewards[:i] + rewards[i + 1 :]
                centre = sum(others) / len(others)
                variance = sum((o - centre) ** 2 for o in others) / (len(others) - 1) if len(others) > 1 else 0.0
                advantages.append((r - centre) / (math.sqrt(variance) + 1e-6) if len(set(others)) > 1 else r - centre)
            return advantages
        case "opo":
            lengths = lengths_of(rewards)
            baseline = sum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)
            return [r - baseline for r in rewards]
        case "maxrl":
            return [(r - mean) / mean if mean > 0 else 0.0 for r in rewards]
        case "zero":
            return [0.0] * size


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(rewards=REWARDS)
def test_advantages_equal_a_plain_loop(estimator, rewards):
    # float64: 16 values up to 10; dividing by a standard deviation of at least 0.06.
    advantages = group_advantages(rewards, estimator, lengths_of(rewards))
    assert advantages == pytest.approx(reference(rewards, estimator), rel=1e-9, abs=1e-9)


def test_known_group_has_known_advantages():
    assert group_advantages([1, 0, 0, 0], "mean") == [0.75, -0.25, -0.25, -0.25]
    # float64.
    assert group_advantages([1, 0, 0, 0], "leave_one_out") == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3], rel=1e-15)
    assert group_advantages([1, 0, 0, 0], "std") == pytest.approx([0.75 / 0.5001, *[-0.25 / 0.5001] * 3], rel=1e-14)


@given(rewards=REWARDS)
def test_leave_one_out_is_the_mean_baseline_scaled_up(rewards):
    size = len(rewards)
    scaled = [size / (size - 1) * a for a in group_advantages(rewards, "mean")]
    # float64: values up to 20.
    assert group_advantages(rewards, "leave_one_out") == pytest.approx(scaled, abs=1e-13)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.1] * 7, [-2.3] * 10, [1.0], []])
def test_group_of_equal_rewards_gives_exact_zeros(estimator, rewards):
    assert group_advantages(rewards, estimator) == [0.0] * len(rewards)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1e308, -1e10, 10**400])
def test_reward_that_cannot_be_trained_on_is_refused_by_name(wrong):
    with pytest.raises(TaskError, match=re.escape(f"reward 1 of a group of 3 is {wrong}")):
        group_advantages([0.0, wrong, 1.0], "mean")


def test_batch_std_is_over_all_groups():
    groups = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.5], [3.0, 1.0]]
    centred = [[r - sum(group) / len(group) for r in group] for group in groups]
    everything = [a for group in centred for a in group]
    mean = sum(everything) / 8
    std = math.sqrt(sum((a - mean) ** 2 for a in everything) / 7)
    advantages = batch_advantages(groups, "batch_std")
    for group, expected in zip(advantages, centred, strict=True):
        assert group == pytest.approx([a / (std + 1e-4) for a in expected], rel=1e-12)  # float64
    assert advantages[1] == [0.0] * 3
    assert batch_advantages([[1.0]], "batch_std") == [[0.0]]


def test_batch_of_groups_is_each_group_by_itself_for_other_estimators():
    groups, lengths = [[1.0, 0.0, 0.5], [2.0, 1.0]], [[3, 4, 5], [1, 9]]
    for estimator in ESTIMATORS:
        expected = [group_advantages(group, estimator, of) for group, of in zip(groups, lengths, strict=True)]
        assert batch_advantages(groups, estimator, lengths) == expected


def test_estimators_say_what_they_lack():
    with pytest.raises(InvalidRequestError, match="pass the completions' lengths"):
        group_advantages([1.0, 0.0], "opo")
    with pytest.raises(InvalidRequestError, match="call batch_advantages"):
        group_advantages([1.0, 0.0], "batch_std")
    with pytest.raises(InvalidRequestError, match="as many lengths as rewards"):
        batch_advantages([[1.0, 0.0]], "opo", [[3]])

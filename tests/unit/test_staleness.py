"""The strict bound per token, and what admission does and does not give."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.rollouts import MaxLag


@given(
    max_lag=st.integers(0, 10), versions=st.lists(st.integers(0, 50), max_size=20), trainer_version=st.integers(0, 50)
)
@settings(deadline=None)
def test_tokens_above_the_largest_lag_are_masked_and_no_others(max_lag, versions, trainer_version):
    mask = MaxLag(max_lag).mask(versions, trainer_version)
    assert mask == [not trainer_version - version > max_lag for version in versions]


def test_later_tokens_of_an_old_completion_are_kept():
    assert MaxLag(2).mask([3, 3, 5, 6, 7], trainer_version=7) == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("max_lag", "groups_per_step", "expected"), [(0, 8, 8), (1, 8, 16), (3, 2.5, 10), (0, 2.5, 3), (0, 0.2, 1)]
)
def test_outstanding_groups_are_bounded_by_the_steps_that_the_lag_allows(max_lag, groups_per_step, expected):
    assert MaxLag(max_lag).max_outstanding_groups(groups_per_step) == expected


def largest_lag(policy, groups_per_step, *, finishes_in_order, num_steps=200):
    """Train on groups issued under the admission bound; return the largest lag at issue that was trained."""
    bound = policy.max_outstanding_groups(groups_per_step)
    dice = random.Random(0)
    in_flight, finished, version, largest = deque(), [], 0, 0
    while version < num_steps:
        while len(in_flight) + len(finished) < bound:
            in_flight.append(version)
        if not finishes_in_order:
            in_flight.rotate(-dice.randrange(len(in_flight)))
        finished.append(in_flight.popleft())
        if len(finished) == groups_per_step:
            largest = max(largest, *(version - issued for issued in finished))
            finished.clear()
            version += 1
    return largest


@pytest.mark.parametrize("max_lag", [0, 1, 4])
def test_admission_bounds_the_lag_exactly_when_groups_are_trained_in_order(max_lag):
    assert largest_lag(MaxLag(max_lag), 4, finishes_in_order=True) == max_lag


def test_admission_alone_does_not_bound_the_lag_of_slow_completions():
    assert largest_lag(MaxLag(2), 4, finishes_in_order=False) > 2

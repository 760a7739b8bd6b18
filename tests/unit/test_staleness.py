"""The strict bound per token, and what admission does and does not give."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.errors import TrainerError
from inflight.rollouts import EssGuard, MaxLag
from inflight.rollouts.staleness import STALENESS


@given(
    max_lag=st.integers(0, 10), versions=st.lists(st.integers(0, 50), max_size=20), trainer_version=st.integers(0, 50)
)
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


def trained_lags(policy, groups_per_step, seed, *, restarts=()):
    """Train at random on what a policy lets through; return each trained completion's token lags, and the order.

    Completions finish in random order and span several versions. At each restart what is under way is lost, and the
    policy starts from its saved state.
    """
    dice = random.Random(seed)
    version, serial = 0, 0
    running, waiting, lags, order = {}, {}, [], []
    for tick in range(400):
        if tick in restarts:
            running, waiting = {}, {}
            state = policy.state()
            policy.restore(state)
        while len(running) + len(waiting) < policy.max_outstanding_groups(groups_per_step):
            running[serial] = [version]
            serial += 1
        for group in list(running):
            if dice.random() < 0.5:
                running[group].append(version)
            if dice.random() < 0.2:
                waiting[group] = running.pop(group)
        oldest = min([*running, serial])
        ids = sorted(waiting)
        allowed = [g for g, ok in zip(ids, policy.trainable(ids, oldest, groups_per_step), strict=True) if ok]
        for group in [g for g in ids if not any(policy.mask(waiting[g], version))]:
            del waiting[group]
            allowed = [g for g in allowed if g != group]
        if len(allowed) >= groups_per_step:
            for group in allowed[:groups_per_step]:
                versions = waiting.pop(group)
                kept = policy.mask(versions, version)
                lags.append([version - v for v, ok in zip(versions, kept, strict=True) if ok])
                order.append((group, oldest))
            version += 1
            policy.after_step(version, dice.random())
    return lags, order


@pytest.mark.parametrize("name", STALENESS)
@given(
    max_lag=st.integers(0, 5),
    groups_per_step=st.integers(1, 6),
    seed=st.integers(0, 10_000),
    restarts=st.sets(st.integers(1, 399), max_size=3),
    is_guarded=st.booleans(),
)
@settings(max_examples=40)
def test_no_policy_trains_on_a_token_beyond_its_lag(name, max_lag, groups_per_step, seed, restarts, is_guarded):
    policy = STALENESS[name](max_lag=max_lag)
    if is_guarded:
        policy = EssGuard(policy, 0.3)
    lags, order = trained_lags(policy, groups_per_step, seed, restarts=restarts)
    assert lags  # it never starves
    assert max((lag for token_lags in lags for lag in token_lags), default=0) <= max_lag
    if name == "windowed_fifo":
        window = STALENESS[name](max_lag=max_lag).window(groups_per_step)
        assert all(group < oldest + window for group, oldest in order)


@pytest.mark.parametrize("name", ["eta_gate", "trajectory"])
def test_a_completion_is_trained_whole_or_not_at_all(name):
    policy = STALENESS[name](max_lag=2)
    assert policy.mask([5, 6, 8], 7) == [True] * 3
    assert policy.mask([4, 6, 8], 7) == [False] * 3


def test_the_gate_of_areal_admits_no_burst_after_a_recovery():
    """AReaL #1345: with eta 1 and 4 groups per step, a run that resumes at version 10 may have 8 under way, not 48."""
    assert STALENESS["eta_gate"](max_lag=1).max_outstanding_groups(4) == 8


def test_a_low_effective_sample_size_waits_for_on_policy_data_or_stops_the_run():
    policy = EssGuard(MaxLag(4), threshold=0.5)
    policy.after_step(7, 0.9)
    assert policy.mask([5, 6, 7], 7) == [True] * 3
    policy.after_step(8, 0.4)
    assert policy.mask([6, 7, 8], 8) == [False, False, True]
    resumed = EssGuard(MaxLag(4), threshold=0.5)
    resumed.restore(policy.state())
    assert resumed.mask([7, 8, 9], 9) == [False, True, True]
    policy.after_step(9, None)  # a loss without ratios
    with pytest.raises(TrainerError, match=r"version 3 is 0\.400, below rollouts\.min_ess 0\.5"):
        EssGuard(MaxLag(4), threshold=0.5, stops=True).after_step(3, 0.4)


@pytest.mark.parametrize("name", STALENESS)
@given(
    max_lag=st.integers(0, 4),
    first=st.integers(0, 9),
    steps=st.lists(st.integers(0, 2), max_size=8),
    age=st.integers(0, 9),
    is_guarded=st.booleans(),
)
def test_what_can_be_trained_on_no_more_is_masked_whatever_comes(name, max_lag, first, steps, age, is_guarded):
    policy = STALENESS[name](max_lag=max_lag)
    policy = EssGuard(policy, 0.3) if is_guarded else policy
    versions = [first]
    for step in steps:
        versions.append(versions[-1] + step)
    trainer_version = first + age
    if not policy.can_train(first, trainer_version):
        assert not any(policy.mask(versions, max(trainer_version, versions[-1])))
    elif name in ("eta_gate", "trajectory"):
        assert all(policy.mask([first, trainer_version], trainer_version))

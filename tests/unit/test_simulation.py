"""Schedulers in simulated time: nothing is lost, nothing runs twice, and each does what its paper claims."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.rollouts import HistoryStore
from inflight.rollouts.schedulers import SCHEDULERS, HistoPipe, LeastLoaded, OverProvision
from inflight.rollouts.simulation import Endpoint, Outcome, simulate

GROUP_SIZE = 3


def lengths_of(seed: int, num_prompts: int, sigma: float = 0.9) -> Callable[[int], tuple[int, ...]]:
    """Log-normal lengths by prompt; completions of one prompt are alike."""

    def lengths(item: int) -> tuple[int, ...]:
        base = random.Random(f"{seed}:{item % num_prompts}").lognormvariate(math.log(100), sigma)
        churn = random.Random(f"{seed}:{item}")
        return tuple(max(1, min(2000, round(base * churn.lognormvariate(0, 0.15)))) for _ in range(GROUP_SIZE))

    return lengths


@pytest.mark.parametrize("name", SCHEDULERS)
@given(
    capacities=st.lists(st.integers(GROUP_SIZE, 20), min_size=1, max_size=4),
    groups_per_step=st.integers(1, 12),
    max_lag=st.integers(0, 3),
    conventional=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_every_step_is_made_and_no_item_is_trained_twice(
    name: str, capacities: list[int], groups_per_step: int, max_lag: int, conventional: bool, seed: int
) -> None:
    """The simulator refuses a completion that is issued twice, and an endpoint that is given too much."""
    history = HistoryStore()
    outcome = simulate(
        SCHEDULERS[name](group_size=GROUP_SIZE, history=history),
        [Endpoint(f"endpoint-{i}", capacity) for i, capacity in enumerate(capacities)],
        lengths_of(seed, 20),
        history=history,
        groups_per_step=groups_per_step,
        num_steps=6,
        step_time=50.0,
        max_lag=max_lag,
        conventional=conventional,
        prompt=lambda item: str(item % 20),
    )
    assert len(outcome.trained) == len({*outcome.trained}) == 6 * groups_per_step


def rank_groups(*, linear: bool, alternate: bool) -> Outcome:
    """Sixteen endpoints that run one completion at a time, and prompts whose lengths are exponential in their rank."""
    num_prompts = 256
    history = HistoryStore()
    for item in range(num_prompts):
        history.record(str(item), exponential(item), (0.0,))
    scheduler = HistoPipe(
        1, history, groups_per_round=num_prompts, linear=linear, alternate=alternate, outlier=math.inf
    )
    return simulate(
        scheduler,
        [Endpoint(f"endpoint-{i:02}", 1) for i in range(16)],
        exponential,
        history=history,
        groups_per_step=num_prompts,
        num_steps=12,
        max_lag=1,
        prompt=lambda item: str(item % num_prompts),
    )


def exponential(item: int) -> tuple[int, ...]:
    return (round(10 * math.exp(4 * (item % 256) / 256)),)


def test_histopipe_keeps_endpoints_busy_by_linear_rank_groups_in_alternating_order() -> None:
    """systems.md gives 0.26, 0.52 and 0.92 for one step, pairs of steps, and linear pairs (RhymeRL, section 5)."""
    plain = rank_groups(linear=False, alternate=False)
    paired = rank_groups(linear=False, alternate=True)
    linear = rank_groups(linear=True, alternate=True)
    assert plain.utilisation < 0.35
    assert 0.45 < paired.utilisation < 0.55
    assert linear.utilisation > 0.9
    assert max(linear.group_lags) <= 1


def test_longest_first_gains_beyond_the_knee_and_nothing_below() -> None:
    """systems.md gives 1.00 at the knee, and beyond it 1.06 for LPT and 1.23 for algorithm 2 (StreamRL) with an oracle.

    Here the plain one is `LeastLoaded`, which refills an endpoint as completions end.
    """

    def length(item: int) -> tuple[int, ...]:
        return (max(1, min(819, round(random.Random(item).lognormvariate(math.log(150), 0.9)))),)

    def time(name: str, per_endpoint: int, endpoint: Endpoint, **params: float) -> float:
        history = HistoryStore()
        for item in range(8 * per_endpoint):
            history.record(str(item), length(item), (0.0,))
        return simulate(
            SCHEDULERS[name](group_size=1, history=history, **params),
            [Endpoint(f"{endpoint.name}-{i}", endpoint.capacity, endpoint.knee) for i in range(4)],
            length,
            history=history,
            groups_per_step=4 * per_endpoint,
            num_steps=2,
            conventional=True,
        ).time

    at_the_knee, beyond = Endpoint("endpoint", 64, 32.0), Endpoint("endpoint", 64, 16.0)
    assert time("skew_aware", 32, at_the_knee, knee=32.0) == pytest.approx(time("least_loaded", 32, at_the_knee))
    plain = time("least_loaded", 128, beyond)
    assert plain / time("skew_aware", 128, beyond, tail=0.0) > 1.02
    assert plain / time("skew_aware", 128, beyond, knee=16.0) > 1.08


def test_over_provisioning_ends_the_wait_for_the_last_completion_and_loses_no_token() -> None:
    def outcome(kind: type[OverProvision] | type[LeastLoaded]) -> Outcome:
        history = HistoryStore()
        return simulate(
            kind(group_size=GROUP_SIZE, history=history),
            [Endpoint(f"endpoint-{i}", 24) for i in range(2)],
            lengths_of(3, 50),
            history=history,
            groups_per_step=16,
            num_steps=10,
            conventional=True,
            prompt=lambda item: str(item % 50),
        )

    assert outcome(OverProvision).tokens_per_time > 1.5 * outcome(LeastLoaded).tokens_per_time

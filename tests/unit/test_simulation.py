"""Schedulers in simulated time: nothing is lost, nothing runs twice, and each does what its paper claims."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.planning import Endpoint, Prompted, Setup, SimulationResult, TokenTime, TrainerCost, simulate
from inflight.rollouts import HistoryStore, MaxLag
from inflight.rollouts.schedulers import SCHEDULERS, HistoPipe, LeastLoaded, OverProvision
from inflight.rollouts.staleness import EtaGate

GROUP_SIZE = 3


def prompts_of(seed: int, num_prompts: int, sigma: float = 0.9) -> Callable[[int, int], Prompted]:
    """Log-normal lengths by prompt; completions of one prompt are alike."""

    def prompted(item: int, version: int) -> Prompted:
        base = random.Random(f"{seed}:{item % num_prompts}").lognormvariate(math.log(100), sigma)
        churn = random.Random(f"{seed}:{item}")
        lengths = (max(1, min(2000, round(base * churn.lognormvariate(0, 0.15)))) for _ in range(GROUP_SIZE))
        return Prompted(tuple(lengths), str(item % num_prompts))

    return prompted


@pytest.mark.parametrize("name", SCHEDULERS)
@given(
    capacities=st.lists(st.integers(GROUP_SIZE, 20), min_size=1, max_size=4),
    groups_per_step=st.integers(1, 12),
    max_lag=st.integers(0, 3),
    conventional=st.booleans(),
    burst=st.integers(1, 5),
    whole_requests=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25)
def test_every_step_is_made_and_no_item_is_trained_twice(
    name: str,
    capacities: list[int],
    groups_per_step: int,
    max_lag: int,
    conventional: bool,
    burst: int,
    whole_requests: bool,
    seed: int,
) -> None:
    """The simulator refuses a completion that is issued twice, and an endpoint that is given too much."""
    history = HistoryStore()
    outcome = simulate(
        Setup(
            SCHEDULERS[name](group_size=GROUP_SIZE, history=history),
            history,
            [Endpoint(f"endpoint-{i}", capacity) for i, capacity in enumerate(capacities)],
            prompts_of(seed, 20),
            groups_per_step,
            num_steps=6,
            unit="groups",
            staleness=MaxLag(max_lag),
            conventional_steps=int(conventional),
            burst=burst,
            trainer=TrainerCost(50.0),
            whole_requests=whole_requests,
        )
    )
    num_trained = len(outcome.trained)
    assert num_trained == len({*outcome.trained}) >= 6 * groups_per_step
    assert conventional or num_trained == 6 * groups_per_step  # a conventional phase trains on all that it finished


def rank_groups(*, linear: bool, alternate: bool) -> SimulationResult:
    """Sixteen endpoints that run one completion at a time, and prompts whose lengths are exponential in their rank."""
    num_prompts = 256
    history = HistoryStore()
    for item in range(num_prompts):
        history.record(str(item), exponential(item, 0).lengths, (0.0,))
    scheduler = HistoPipe(
        1, history, groups_per_round=num_prompts, linear=linear, alternate=alternate, outlier=math.inf
    )
    return simulate(
        Setup(
            scheduler,
            history,
            [Endpoint(f"endpoint-{i:02}", 1) for i in range(16)],
            exponential,
            num_prompts,
            num_steps=12,
            unit="groups",
            staleness=MaxLag(1),
        )
    )


def exponential(item: int, version: int) -> Prompted:
    return Prompted((round(10 * math.exp(4 * (item % 256) / 256)),), str(item % 256))


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

    def prompted(item: int, version: int) -> Prompted:
        return Prompted((max(1, min(819, round(random.Random(item).lognormvariate(math.log(150), 0.9)))),), str(item))

    def time(name: str, per_endpoint: int, flat_to: float, **params: float) -> float:
        history = HistoryStore()
        for item in range(8 * per_endpoint):
            history.record(str(item), prompted(item, 0).lengths, (0.0,))
        return simulate(
            Setup(
                SCHEDULERS[name](group_size=1, history=history, **params),
                history,
                [Endpoint(f"endpoint-{i}", 64, TokenTime.roofline(1.0, flat_to)) for i in range(4)],
                prompted,
                4 * per_endpoint,
                num_steps=2,
                unit="groups",
                conventional_steps=1,
            )
        ).time

    assert time("skew_aware", 32, 32.0, knee=32.0) == pytest.approx(time("least_loaded", 32, 32.0))
    plain = time("least_loaded", 128, 16.0)
    assert plain / time("skew_aware", 128, 16.0, tail=0.0) > 1.02
    assert plain / time("skew_aware", 128, 16.0, knee=16.0) > 1.08


def test_over_provisioning_ends_the_wait_for_the_last_completion_and_loses_no_token() -> None:
    def outcome(kind: type[OverProvision] | type[LeastLoaded]) -> SimulationResult:
        history = HistoryStore()
        return simulate(
            Setup(
                kind(group_size=GROUP_SIZE, history=history),
                history,
                [Endpoint(f"endpoint-{i}", 24) for i in range(2)],
                prompts_of(3, 50),
                16,
                num_steps=10,
                unit="groups",
                conventional_steps=1,
            )
        )

    assert outcome(OverProvision).tokens_per_time > 1.5 * outcome(LeastLoaded).tokens_per_time


@pytest.mark.parametrize("seed", range(20))
def test_completions_that_end_together_may_make_others_too_old(seed: int) -> None:
    """The first completes a step, and the gate of the next withdraws groups whose completions end at that moment."""
    draw, history = random.Random(seed), HistoryStore()
    lengths = [draw.choice((3, 3, 5, 40)) for _ in range(500)]
    outcome = simulate(
        Setup(
            SCHEDULERS["least_loaded"](group_size=1, history=history),
            history,
            [Endpoint(f"endpoint-{i}", 16, TokenTime.roofline(1.0, 8)) for i in range(2)],
            lambda item, _: Prompted((lengths[item % 500],), str(item)),
            16,
            20,
            unit="groups",
            staleness=EtaGate(1),
            trainer=TrainerCost(1.0),
        )
    )
    assert len(outcome.steps) == 20
    assert max(outcome.group_lags) <= 1


@pytest.mark.parametrize("capacity", [24, 64, 256])
@pytest.mark.parametrize("sigma", [0.1, 0.8])
def test_a_slow_trainer_never_waits_and_trains_on_tokens_that_are_at_most_three_steps_old(
    capacity: int, sigma: float
) -> None:
    """The lag bound of 8 steps alone would let tokens become that old: endpoints could sample many steps ahead."""
    history = HistoryStore()
    step_time = 400.0
    outcome = simulate(
        Setup(
            LeastLoaded(GROUP_SIZE, history),
            history,
            [Endpoint("endpoint", capacity)],
            prompts_of(1, 20, sigma),
            4,
            num_steps=40,
            unit="groups",
            staleness=MaxLag(8),
            trainer=TrainerCost(step_time),
        )
    )
    steady = outcome.steady(10)
    assert steady.train_share > 0.99
    assert steady.lag < 3

"""Devices between generation and training: StreamRL's algorithm 1, and LlamaRL's theorem on what is gained by it."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.errors import InvalidRequestError
from inflight.rollouts.split import best_split

Times = list[float]
times = st.lists(st.floats(0.1, 10.0), min_size=12, max_size=12)


@given(num_devices=st.integers(2, 12), generation=times, training=times, unit=st.integers(1, 3))
def test_the_best_split_is_the_best_of_all(num_devices: int, generation: Times, training: Times, unit: int) -> None:
    def tried() -> float:
        sizes = [n for n in range(1, num_devices + 1) if n % unit == 0]
        return min(max(generation[x - 1], training[y - 1]) for x, y in product(sizes, sizes) if x + y <= num_devices)

    if num_devices < 2 * unit:
        with pytest.raises(InvalidRequestError, match="cannot be divided"):
            best_split(num_devices, lambda x: generation[x - 1], lambda y: training[y - 1], unit=unit)
        return
    split = best_split(num_devices, lambda x: generation[x - 1], lambda y: training[y - 1], unit=unit)
    assert split.num_generating + split.num_training <= num_devices
    assert split.step_s == tried() == max(generation[split.num_generating - 1], training[split.num_training - 1])


# ---------------------------------------------------------------------------------------------------------------
# LlamaRL's theorem (arXiv 2505.24034): with W bytes of weights, a model that trains takes 4 W, and each sample of a
# micro-batch, or running at a time, takes some bytes more. Both stages cost less per sample the larger their batch.


def falling(steps: list[float]) -> list[float]:
    """Cost per sample at batch 1, 2, ...: strictly falling, and above 0."""
    costs = [sum(steps) + 1.0]
    for step in steps:
        costs.append(costs[-1] - step)
    return costs


costs = st.lists(st.floats(0.01, 1.0), min_size=5, max_size=12).map(falling)


def largest(memory: float, weights: float, per_sample: float, limit: int) -> int:
    return min(limit, math.floor((memory - weights) / per_sample))


@given(
    train=costs,
    generate=costs,
    weights=st.integers(1, 8),
    per_sample=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    memory=st.integers(0, 80),
)
def test_stages_apart_are_never_slower_and_equal_only_where_neither_batch_could_grow(
    train: list[float], generate: list[float], weights: int, per_sample: tuple[int, int], memory: int
) -> None:
    """Together, both models share each device's memory, and the stages take turns on all devices. Apart, each stage has
    the whole memory of its share of the devices, theta and 1 - theta, and both work at the same time."""
    memory += 5 * weights + sum(per_sample)  # so that one sample of each fits beside both models
    together = [
        (train[b_t - 1] + generate[b_g - 1], b_t, b_g)
        for b_t, b_g in product(range(1, len(train) + 1), range(1, len(generate) + 1))
        if 5 * weights + b_t * per_sample[0] + b_g * per_sample[1] <= memory
    ]
    t_sync, b_t, b_g = min(together)
    apart = (
        largest(memory, 4 * weights, per_sample[0], len(train)),
        largest(memory, weights, per_sample[1], len(generate)),
    )
    eta_t, eta_g = train[apart[0] - 1], generate[apart[1] - 1]
    theta = eta_t / (eta_t + eta_g)
    t_async = max(eta_t / theta, eta_g / (1 - theta))
    assert t_async <= t_sync * (1 + 1e-12)
    assert (t_async >= t_sync * (1 - 1e-12)) == ((b_t, b_g) == apart)
    # What a search over whole devices finds comes as near to it as they allow.
    num_devices = 60
    split = best_split(num_devices, lambda x: eta_g / x, lambda y: eta_t / y)
    smaller = min(split.num_generating, split.num_training)
    assert t_async / num_devices <= split.step_s * (1 + 1e-12) <= t_async / num_devices * (1 + 2 / smaller)

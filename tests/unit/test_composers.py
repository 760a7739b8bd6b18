"""What composers make a step of: groups, completions of them, and tokens of those."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.rollouts import MaxLag, WaitingGroups, group_advantages, sample_pairs, shuffle_batch
from inflight.rollouts.composers import COMPOSERS, ConstantTokens, ShuffledPairs, SolvableOnly, TokenBudget
from inflight.run.sampling.batches import make_batch
from inflight.types import Group, Rollout
from inflight.wire import VersionSpan


def group(number: int, lengths: list[int], rewards: list[float]) -> Group:
    rollouts = [
        Rollout([1, 2, 3], list(range(n)), [-1.0] * n, [VersionSpan(version=0, start=0, end=n)], "stop", reward, 1.0)
        for n, reward in zip(lengths, rewards, strict=True)
    ]
    return Group(number, number, rollouts)


LENGTHS = st.lists(st.lists(st.integers(1, 40), min_size=2, max_size=6), min_size=1, max_size=12)


@given(LENGTHS, st.integers(1, 120))
def test_constant_tokens_trains_on_exactly_its_budget_in_every_step(lengths: list[list[int]], budget: int) -> None:
    composer = ConstantTokens(tokens_per_step=999, budget=budget)
    waiting = WaitingGroups(MaxLag(2), composer)
    for i, of_group in enumerate(lengths):
        waiting.add(group(i, of_group, [float(j) for j in range(len(of_group))]))
    while waiting.ready():
        batch = make_batch(waiting.take(), 0, "mean", MaxLag(2), composer)
        assert sum(sum(sample.loss_mask) for sample in batch.samples) == budget == batch.token_lags.total()
        assert all(sample.loss_mask[0] for sample in batch.samples)
    assert sum(n for of_group in lengths for n in of_group) < budget or waiting.num_groups < len(lengths)


def test_the_number_of_trained_tokens_varies_less_than_with_a_budget_of_training_tokens() -> None:
    lengths = [[10 + i, 12, 11 + 7 * (i % 5)] for i in range(60)]
    spread = {}
    for composer in (TokenBudget(200), ConstantTokens(200, 100)):
        waiting = WaitingGroups(MaxLag(2), composer)
        for i, of_group in enumerate(lengths):
            waiting.add(group(i, of_group, [0.0, 1.0, 2.0]))
        sizes = []
        while waiting.ready():
            batch = make_batch(waiting.take(), 0, "mean", MaxLag(2), composer)
            sizes.append(sum(sum(sample.loss_mask) for sample in batch.samples))
        spread[type(composer)] = statistics.pstdev(sizes) / statistics.fmean(sizes)
    assert spread[ConstantTokens] == 0 < spread[TokenBudget]


def test_shuffled_pairs_draws_completions_of_contrast_and_keeps_the_size_of_the_batch() -> None:
    composer = ShuffledPairs(1, keep=0.5)
    groups = [group(i, [5] * 4, [0.0, 0.05 + 0.1 * i, 0.9, 1.0]) for i in range(6)]
    batch = make_batch(groups, 3, "mean", MaxLag(9), composer)
    assert len(batch.samples) == sum(len(it.rollouts) for it in groups)
    for i, it in enumerate(groups):
        advantages = [reward.reward for reward in it.rollouts]
        kept = {j for pair in sample_pairs(advantages, keep=0.5) for j in pair}
        drawn = {it.rollouts.index(sample.rollout) for sample in batch.samples if sample.group_index == i}
        assert drawn <= kept
    again = make_batch(groups, 3, "mean", MaxLag(9), composer)
    other = make_batch(groups, 4, "mean", MaxLag(9), composer)
    assert [*batch.samples] == [*again.samples] != [*other.samples]


def plain_shuffle(groups: list[list[float]], keep: float, num_rounds: int, seed: int) -> list[tuple[int, int]]:
    """Shuffle-R1 as its paper says it, in plain loops; returns (group, completion) of each place of the batch.

    A round draws pairs one after another, without replacement: among those that are left, a pair of weight w comes
    next with probability w over the weights that are left. That is the order in which alarms ring that are set to
    random times, exponential with rate w.
    """
    pairs = []
    for g, advantages in enumerate(groups):
        left = list(range(len(advantages)))
        mine = []
        while len(left) > 1:
            best = max(left, key=lambda i: (advantages[i], -i))
            worst = min(left, key=lambda i: (advantages[i], -i))
            mine.append((abs(advantages[best]) + abs(advantages[worst]), (g, best), (g, worst)))
            left = [i for i in left if i not in (best, worst)]
        pairs += mine[: max(1, int(keep * len(mine)))]
    dice = random.Random(seed)
    wanted = sum(map(len, groups)) // 2
    batch = []
    for round_index in range(num_rounds):
        alarms = []
        for i, (weight, *_) in enumerate(pairs):
            u = 1.0 - dice.random()
            alarms.append((-math.log(u) / weight if weight else math.inf, i))
        num_left = wanted - len(batch) // 2
        for _, i in sorted(alarms)[: math.ceil(num_left / (num_rounds - round_index))]:
            batch += pairs[i][1:]
    return batch


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("keep", [0.25, 0.5, 1.0])
def test_shuffled_pairs_equals_a_plain_loop_on_the_same_seed(seed: int, keep: float) -> None:
    dice = random.Random(seed)
    groups = [group(i, [5] * 8, [dice.random() for _ in range(8)]) for i in range(6)]
    composer = ShuffledPairs(1, keep=keep, seed=seed)
    batch = make_batch(groups, 7, "std", MaxLag(9), composer)
    of_groups = [group_advantages([rollout.reward for rollout in it.rollouts], "std") for it in groups]
    drawn = [(s.group_index, groups[s.group_index].rollouts.index(s.rollout)) for s in batch.samples]
    assert drawn == plain_shuffle(of_groups, keep, 8, seed + 7)


def test_pairs_of_a_round_have_the_probabilities_of_draws_one_after_another() -> None:
    """Of all ordered pairs of draws, by hand: w_i / sum, then w_j / (sum - w_i)."""
    weights, num = [3.0, 1.0, 2.0, 0.5], 20_000
    seen = Counter(tuple(shuffle_batch(weights, 2, num_rounds=1, seed=seed)) for seed in range(num))
    total = sum(weights)
    statistic = 0.0
    for i, j in itertools.permutations(range(4), 2):
        expected = num * weights[i] / total * weights[j] / (total - weights[i])
        statistic += (seen[i, j] - expected) ** 2 / expected
    assert statistic < 31.3  # of chi-square with 11 degrees of freedom, one in a thousand is larger


def test_solvable_only_leaves_out_groups_that_are_all_right_or_all_wrong() -> None:
    composer = SolvableOnly(100)
    assert [composer.accepts(group(0, [3, 3], rewards)) for rewards in ([0, 0.2], [1, 0.9], [0, 1])] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("name", COMPOSERS)
def test_no_composer_makes_a_step_of_nothing(name: str) -> None:
    assert not COMPOSERS[name](tokens_per_step=10).compose([], [])

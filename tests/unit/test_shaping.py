"""What is done to rewards and batches before a loss sees them."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.errors import InvalidRequestError
from inflight.rollouts import has_signal, overlong_penalty, sample_pairs, shuffle_batch, within_budget


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(1, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (101, -1.0), (500, -1.0)]
)
def test_long_completions_lose_reward_along_a_slope(num_tokens, penalty):
    assert overlong_penalty(num_tokens, max_tokens=100, buffer=20) == penalty


@pytest.mark.parametrize("buffer", [0, 101])
def test_buffer_that_makes_no_slope_is_refused(buffer):
    with pytest.raises(InvalidRequestError, match=rf"between 1 and max_tokens \(100\), not {buffer}"):
        overlong_penalty(5, max_tokens=100, buffer=buffer)


def test_group_of_equal_rewards_has_no_signal():
    assert not has_signal([1.0, 1.0])
    assert not has_signal([])
    assert has_signal([1.0, 0.0])


def test_pairs_are_of_largest_contrast_first():
    advantages = [0.1, -1.0, 2.0, -0.2, 0.3, -2.0]
    assert sample_pairs(advantages, keep=1.0) == [(2, 5), (4, 1), (0, 3)]
    assert sample_pairs(advantages) == [(2, 5)]
    assert sample_pairs(advantages, keep=0.1) == [(2, 5)]
    assert sample_pairs([1.0]) == []
    with pytest.raises(InvalidRequestError, match="keep must be"):
        sample_pairs(advantages, keep=0.0)


@given(advantages=st.lists(st.floats(-3, 3), max_size=17), keep=st.floats(0.01, 1.0))
def test_pairs_use_each_completion_at_most_once_and_contrast_falls(advantages, keep):
    pairs = sample_pairs(advantages, keep=keep)
    used = [i for pair in pairs for i in pair]
    assert len(set(used)) == len(used)
    contrasts = [advantages[better] - advantages[worse] for better, worse in pairs]
    assert contrasts == sorted(contrasts, reverse=True)
    assert all(contrast >= 0 for contrast in contrasts)


def test_shuffle_draws_by_weight_and_at_most_once_a_round():
    weights = [1.0, 4.0, 0.0, 1.0, 2.0]
    counts = Counter()
    for seed in range(400):
        drawn = shuffle_batch(weights, 8, num_rounds=4, seed=seed)
        assert len(drawn) == 8
        for start in range(0, 8, 2):
            assert len(set(drawn[start : start + 2])) == 2
        counts.update(drawn)
    # The chance of being among two of four, by hand: 1/8 and what the others leave. 3,200 draws: +-0.03 is 3.5 sigma.
    expected = {i: _chance_of_two(weights, i) for i in range(5)}
    for i, chance in expected.items():
        assert counts[i] / 1600 == pytest.approx(chance, abs=0.05)
    assert counts[2] == 0


def _chance_of_two(weights, index):
    """Probability of being drawn first or second, without replacement."""
    total = sum(weights)
    chance = weights[index] / total
    for first, weight in enumerate(weights):
        if first != index:
            chance += weight / total * weights[index] / (total - weight)
    return chance


def test_shuffle_is_the_same_for_the_same_seed_and_another_for_another():
    weights = [1.0 + i % 3 for i in range(40)]
    assert shuffle_batch(weights, 40, seed=1) == shuffle_batch(weights, 40, seed=1)
    assert shuffle_batch(weights, 40, seed=1) != shuffle_batch(weights, 40, seed=2)


@pytest.mark.parametrize(
    ("weights", "size", "message"),
    [
        ([1.0, -1.0], 2, "at least 0"),
        ([math.nan], 1, "finite"),
        ([1.0, 1.0], 17, "8 rounds over 2 items cannot yield 17"),
    ],
)
def test_shuffle_refuses_what_it_cannot_draw(weights, size, message):
    with pytest.raises(InvalidRequestError, match=message):
        shuffle_batch(weights, size)


@given(lengths=st.lists(st.integers(0, 50), max_size=20), budget=st.integers(1, 400))
def test_tokens_within_a_budget_fill_it_in_order(lengths, budget):
    taken = within_budget(lengths, budget)
    assert sum(taken) == min(budget, sum(lengths))
    cut = next((i for i, (t, n) in enumerate(zip(taken, lengths, strict=True)) if t < n), len(lengths))
    assert taken[:cut] == lengths[:cut]
    assert not any(taken[cut + 1 :])


def test_budget_of_nothing_is_refused():
    with pytest.raises(InvalidRequestError, match="at least 1 token, not 0"):
        within_budget([1], 0)

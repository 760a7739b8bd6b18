"""Properties of token-budget packing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.errors import InvalidRequestError
from inflight.rollouts import pack

MAX_TOKENS = 100
LENGTHS = st.lists(st.integers(1, MAX_TOKENS), max_size=60)
RANKS = st.integers(1, 6)


def rank_tokens(packed, lengths):
    return [sum(lengths[i] for micro_batch in rank for i in micro_batch) for rank in packed]


@given(lengths=LENGTHS, num_ranks=RANKS)
def test_every_sample_is_packed_exactly_once(lengths, num_ranks):
    packed = pack(lengths, MAX_TOKENS, num_ranks)
    assert sorted(i for rank in packed for micro_batch in rank for i in micro_batch) == list(range(len(lengths)))


@given(lengths=LENGTHS, num_ranks=RANKS)
def test_every_rank_has_the_same_number_of_micro_batches_and_none_is_too_full(lengths, num_ranks):
    packed = pack(lengths, MAX_TOKENS, num_ranks)
    assert len(packed) == num_ranks
    assert len({len(rank) for rank in packed}) == 1
    assert all(sum(lengths[i] for i in micro_batch) <= MAX_TOKENS for rank in packed for micro_batch in rank)


@given(lengths=LENGTHS.filter(bool), num_ranks=RANKS)
def test_ranks_differ_by_no_more_than_the_longest_sample(lengths, num_ranks):
    tokens = rank_tokens(pack(lengths, MAX_TOKENS, num_ranks), lengths)
    assert max(tokens) - min(tokens) <= max(lengths)


@given(lengths=LENGTHS.filter(bool), num_ranks=RANKS)
def test_micro_batches_are_few(lengths, num_ranks):
    packed = pack(lengths, MAX_TOKENS, num_ranks)
    fullest = max(rank_tokens(packed, lengths))
    # First-fit leaves at most one micro-batch half empty or less, so 2 tokens / max_tokens bounds their number.
    assert len(packed[0]) <= max(1, -(-2 * fullest // MAX_TOKENS))
    assert any(rank[-1] for rank in packed)


@given(lengths=LENGTHS, num_ranks=RANKS)
def test_fuller_micro_batches_come_first(lengths, num_ranks):
    for rank in pack(lengths, MAX_TOKENS, num_ranks):
        loads = [sum(lengths[i] for i in micro_batch) for micro_batch in rank]
        assert loads == sorted(loads, reverse=True)


def test_known_lengths_are_packed_as_lpt_and_first_fit_decreasing_say():
    assert pack([60, 10, 50, 40, 30, 10], 100, 1) == [[[0, 3], [2, 4, 1, 5]]]
    assert pack([60, 10, 50, 40, 30, 10], 100, 2) == [[[0, 4, 1]], [[2, 3, 5]]]


def test_rank_without_samples_gets_empty_micro_batches():
    assert pack([70, 80], 100, 3) == [[[1]], [[0]], [[]]]


def test_no_samples_make_no_micro_batches():
    assert pack([], 100, 2) == [[], []]


def test_too_long_sample_is_refused_with_its_length_and_the_remedy():
    with pytest.raises(InvalidRequestError, match=r"sample 1 has 101 tokens .* 100: raise .* at least 101"):
        pack([5, 101], 100, 2)

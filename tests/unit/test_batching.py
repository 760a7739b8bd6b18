"""Steps are cut by training tokens, first in first out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.errors import InvalidRequestError
from inflight.rollouts import BatchComposer
from inflight.types import Group, Rollout


def group(index, num_tokens):
    prompt = [0] * (num_tokens // 2)
    rollout = Rollout(prompt, [0] * (num_tokens - len(prompt)), [], [], "stop", 0.0, 1.0)
    return Group(group_id=index, item_index=index, rollouts=[rollout])


@given(
    sizes=st.lists(st.integers(1, 30), max_size=40), tokens_per_worker=st.integers(1, 50), num_workers=st.integers(1, 3)
)
@settings(deadline=None)
def test_steps_are_the_shortest_prefixes_that_reach_the_budget(sizes, tokens_per_worker, num_workers):
    composer = BatchComposer(tokens_per_worker, num_workers)
    budget = tokens_per_worker * num_workers
    waiting, taken = [], []
    for index, size in enumerate(sizes):
        composer.add(group(index, size))
        waiting.append(size)
        assert (composer.num_tokens, composer.num_groups) == (sum(waiting), len(waiting))
        assert composer.ready() == (sum(waiting) >= budget)
        if composer.ready():
            step = composer.take()
            tokens = [g.num_tokens for g in step]
            assert sum(tokens) >= budget > sum(tokens[:-1])
            taken += [g.item_index for g in step]
            waiting = waiting[len(step) :]
    assert taken == list(range(len(taken)))
    assert len(taken) + composer.num_groups == len(sizes)


def test_groups_beyond_the_budget_stay_for_the_next_step():
    composer = BatchComposer(tokens_per_worker=10, num_workers=2)
    for index, size in enumerate([12, 9, 30, 1]):
        composer.add(group(index, size))
    assert [g.item_index for g in composer.take()] == [0, 1]
    assert [g.item_index for g in composer.take()] == [2]
    assert (composer.num_tokens, composer.num_groups) == (1, 1)


def test_step_that_is_not_ready_is_refused_and_nothing_is_lost():
    composer = BatchComposer(tokens_per_worker=10, num_workers=2)
    composer.add(group(0, 19))
    with pytest.raises(InvalidRequestError, match="needs 20 training tokens and 19 wait"):
        composer.take()
    assert composer.num_groups == 1

"""Steps are cut by training tokens, first in first out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.errors import InvalidRequestError
from inflight.rollouts import MaxLag, TokenBudget, WaitingGroups
from inflight.run.sampling.batches import make_batch
from inflight.types import Group, Rollout
from inflight.wire import VersionSpan

POLICY = MaxLag(max_lag=2)


def group(index, num_tokens):
    prompt = [0] * (num_tokens // 2)
    completion = [0] * (num_tokens - len(prompt))
    spans = [VersionSpan(version=0, start=0, end=len(completion))]
    rollout = Rollout(prompt, completion, [], spans, "stop", 0.0, 1.0)
    return Group(group_id=index, item_index=index, rollouts=[rollout])


def sampled(index, prompt_tokens, versions_of_completions):
    """A group whose completions have tokens of these versions, in this order."""
    rollouts = []
    for versions in versions_of_completions:
        changes = [i for i in range(1, len(versions)) if versions[i] != versions[i - 1]]
        bounds = [0, *changes, len(versions)] if versions else []
        spans = [VersionSpan(version=versions[a], start=a, end=b) for a, b in pairwise(bounds)]
        rollouts.append(Rollout([0] * prompt_tokens, [0] * len(versions), [], spans, "stop", 0.0, 1.0))
    return Group(group_id=index, item_index=index, rollouts=rollouts)


@given(sizes=st.lists(st.integers(1, 30), max_size=40), budget=st.integers(1, 150))
def test_steps_are_the_shortest_prefixes_that_reach_the_budget(sizes, budget):
    waiting = WaitingGroups(POLICY, TokenBudget(budget))
    sizes_waiting, taken = [], []
    for index, size in enumerate(sizes):
        waiting.add(group(index, size))
        sizes_waiting.append(size)
        assert (waiting.num_tokens, waiting.num_groups) == (sum(sizes_waiting), len(sizes_waiting))
        assert waiting.ready() == (sum(sizes_waiting) >= budget)
        if waiting.ready():
            step = waiting.take()
            tokens = [g.num_tokens for g in step]
            assert sum(tokens) >= budget > sum(tokens[:-1])
            taken += [g.item_index for g in step]
            sizes_waiting = sizes_waiting[len(step) :]
    assert taken == list(range(len(taken)))
    assert len(taken) + waiting.num_groups == len(sizes)


def test_groups_beyond_the_budget_stay_for_the_next_step():
    waiting = WaitingGroups(POLICY, TokenBudget(20))
    for index, size in enumerate([12, 9, 30, 1]):
        waiting.add(group(index, size))
    assert [g.item_index for g in waiting.take()] == [0, 1]
    assert [g.item_index for g in waiting.take()] == [2]
    assert (waiting.num_tokens, waiting.num_groups) == (1, 1)


def test_step_that_is_not_ready_is_refused_and_nothing_is_lost():
    waiting = WaitingGroups(POLICY, TokenBudget(20))
    waiting.add(group(0, 19))
    with pytest.raises(InvalidRequestError, match="the 19 waiting training tokens are too few for a step"):
        waiting.take()
    assert waiting.num_groups == 1


GROUPS = st.lists(
    st.tuples(
        st.integers(1, 5),
        st.lists(st.lists(st.integers(0, 8), max_size=12).map(sorted), min_size=1, max_size=3),
    ),
    max_size=20,
)


@given(groups=GROUPS, budget=st.integers(1, 40), versions=st.lists(st.integers(0, 12), min_size=1, max_size=6))
def test_a_step_has_its_budget_in_tokens_that_are_trained_whatever_is_masked(groups, budget, versions):
    """What `make_batch` leaves of a step is at least the budget; no group is lost, and only groups that are old go."""
    waiting = WaitingGroups(POLICY, TokenBudget(budget))
    arriving = [sampled(index, prompt, completions) for index, (prompt, completions) in enumerate(groups)]
    left_out = {group.item_index for group in arriving if not waiting.add(group)}
    taken = set()
    for version in sorted(versions):
        old = waiting.advance(version)
        for group in old:
            ages = [version - v for rollout in group.rollouts for v in rollout.token_versions()]
            assert all(age > POLICY.max_lag for age in ages)
        left_out |= {group.item_index for group in old}
        if waiting.ready():
            step = waiting.take()
            batch = make_batch(step, version, "mean", POLICY)
            assert batch.num_tokens >= budget
            assert sum(sum(sample.loss_mask) for sample in batch.samples) == batch.token_lags.total() > 0
            taken |= {group.item_index for group in step}
    assert len(left_out) + len(taken) + waiting.num_groups == len(groups)
    assert not left_out & taken


def test_a_step_is_not_ready_while_most_of_its_tokens_would_be_masked():
    waiting = WaitingGroups(POLICY, TokenBudget(40))
    waiting.add(sampled(0, 2, [[0] * 50 + [5]]))
    assert waiting.ready()
    assert waiting.advance(5) == []
    assert not waiting.ready()
    assert waiting.num_tokens == 3  # the prompt and one token

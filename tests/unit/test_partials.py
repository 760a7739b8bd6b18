"""Partial completions: what is asked of the endpoint that continues, and what becomes of the parts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.rollouts import continuation, joined
from inflight.wire import Completion, GenerateRequest, SamplingParams, VersionSpan


def completion_of(tokens, reason, index=0):
    """Return the completion of (token id, logprob, version) triples."""
    edges = [i for i in range(len(tokens)) if i == 0 or tokens[i][2] != tokens[i - 1][2]]
    return Completion(
        index=index,
        token_ids=[token for token, _, _ in tokens],
        logprobs=[logprob for _, logprob, _ in tokens],
        version_spans=[
            VersionSpan(version=tokens[start][2], start=start, end=end)
            for start, end in pairwise([*edges, len(tokens)])
        ],
        finish_reason=reason,
    )


TOKENS = st.lists(
    st.tuples(st.integers(0, 9), st.floats(-20, 0), st.integers(0, 2)),
    max_size=12,
)


@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 12), max_size=4), index=st.integers(0, 7))
def test_a_completion_cut_anywhere_and_joined_is_itself(tokens, cuts, index):
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    first, *others = [tokens[start:end] for start, end in pairwise(edges)]
    whole = completion_of(first, "abort", index)
    for part in others:
        whole = joined(whole, completion_of(part, "abort"))
    assert whole == completion_of(tokens, "abort", index)


def test_the_continuation_says_how_the_whole_ended():
    parts = completion_of([(1, -1.0, 0)], "abort", index=3), completion_of([(2, -2.0, 1)], "stop")
    assert joined(*parts) == completion_of([(1, -1.0, 0), (2, -2.0, 1)], "stop", index=3)


REQUEST = GenerateRequest(
    request_id="a",
    prompt_token_ids=(7, 8),
    sampling=SamplingParams(n=4, max_tokens=20, temperature=0.5, top_p=0.9, seed=3, stop=("x",), stop_token_ids=(5,)),
)


@given(tokens=TOKENS, later=TOKENS)
def test_a_continuation_asks_for_the_rest_of_one_completion(tokens, later):
    partial = completion_of(tokens, "abort", index=2)
    once = continuation(REQUEST, partial, "b")
    assert once.request_id == "b"
    assert once.prompt_token_ids == (*REQUEST.prompt_token_ids, *partial.token_ids)
    assert once.sampling.n == 1
    assert once.sampling.max_tokens == 20 - len(tokens)
    unchanged = {"n": 4, "max_tokens": 20, "seed": 3}
    assert once.sampling.model_copy(update=unchanged) == REQUEST.sampling

    rest = completion_of(later[: 19 - len(tokens)], "abort")
    twice, at_once = continuation(once, rest, "c"), continuation(REQUEST, joined(partial, rest), "c")
    new = {"seed": None}
    assert twice.model_copy(update={"sampling": twice.sampling.model_copy(update=new)}) == at_once.model_copy(
        update={"sampling": at_once.sampling.model_copy(update=new)}
    )


def test_no_continuation_has_the_seed_of_another():
    tokens = [(1, -1.0, 0)] * 4
    seeds = [REQUEST.sampling.seed]
    for index in range(4):
        request = REQUEST
        for num_tokens in (0, 1, 4, 4):
            request = continuation(request, completion_of(tokens[:num_tokens], "abort", index), "b")
            index = 0
            seeds.append(request.sampling.seed)
    assert len(set(seeds)) == len(seeds)
    GenerateRequest.model_validate(request.model_dump())  # which tests the range of the seed


def test_without_a_seed_or_a_limit_the_continuation_has_none():
    request = REQUEST.model_copy(update={"sampling": SamplingParams()})
    sampling = continuation(request, completion_of([(1, -1.0, 0)], "abort"), "b").sampling
    assert sampling == SamplingParams()


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_completion_that_ended_by_itself_has_no_continuation(reason):
    with pytest.raises(ValueError, match=rf"completion 1 of 'a' cannot be continued: it ended with '{reason}'"):
        continuation(REQUEST, completion_of([(1, -1.0, 0)], reason, index=1), "b")


def test_nothing_is_left_of_a_completion_with_all_its_tokens():
    with pytest.raises(ValueError, match="after all of its 20 tokens"):
        continuation(REQUEST, completion_of([(1, -1.0, 0)] * 20, "abort"), "b")

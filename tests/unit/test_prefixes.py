"""Which tokens of packed sequences have the same prefix, against plain comparisons; and packing by them."""

from __future__ import annotations

from base64 import b64encode

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.errors import InvalidRequestError
from inflight.losses import collate
from inflight.model.prefixes import prefix_ids, prefix_ids_of_texts
from inflight.rollouts.packing import Packing
from inflight.types import Rollout, Sample
from inflight.wire import PromptImage, RoutedExperts, VersionSpan

MAX_TOKENS = 30
PLACEHOLDER = 3
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def experts_of(rows: list[int] | None) -> RoutedExperts | None:
    if rows is None:
        return None
    return RoutedExperts(
        num_tokens=len(rows), num_layers=1, num_chosen=1, dtype="uint8", data=b64encode(bytes(rows)).decode()
    )


def rollout(
    prompt: list[int],
    completion: list[int],
    images: tuple[PromptImage, ...] = (),
    experts: list[int] | None = None,
) -> Rollout:
    spans = [VersionSpan(version=0, start=0, end=len(completion))]
    logprobs = [-1.0] * len(completion)
    return Rollout(
        prompt, completion, logprobs, spans, "stop", 0.0, 1.0, images=images, routed_experts=experts_of(experts)
    )


@st.composite
def rollouts(draw: st.DrawFn, *, with_inputs: bool = False) -> list[Rollout]:
    found = []
    for prompt, completion in draw(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=12)):
        num_tokens = len(prompt) + len(completion)
        images: tuple[PromptImage, ...] = ()
        experts = None
        if with_inputs and draw(st.booleans()):
            start = draw(st.integers(0, len(prompt) - 1))
            prompt = [PLACEHOLDER if i == start else token for i, token in enumerate(prompt)]
            url = f"data:image/png;base64,{draw(st.sampled_from(['AAAA', 'BBBB']))}"
            images = (PromptImage(url=url, start=start, num_tokens=1),)
        if with_inputs and draw(st.booleans()):
            experts = draw(st.lists(st.integers(0, 1), min_size=num_tokens - 1, max_size=num_tokens - 1))
        found.append(rollout(prompt, completion, images, experts))
    return found


def inputs(one: Rollout, length: int) -> object:
    """Everything that decides the hidden state after ``length`` tokens."""
    images = [image for image in one.images if image.start < length]
    recorded = b"" if one.routed_experts is None else one.routed_experts.to_bytes()
    experts = recorded.ljust(one.num_tokens, b"\xff")[:length]  # the largest number stands for "not known"
    return [*one.prompt_token_ids, *one.completion_token_ids][:length], images, experts


def tokens_of(packed: list[Rollout]) -> list[tuple[Rollout, int]]:
    return [(one, length) for one in packed for length in range(1, one.num_tokens + 1)]


@given(packed=st.one_of(rollouts(), rollouts(with_inputs=True)))
def test_tokens_have_the_id_of_the_first_one_with_the_same_tokens_images_and_experts_up_to_there(
    packed: list[Rollout],
) -> None:
    prefixes = [inputs(*token) for token in tokens_of(packed)]
    assert prefix_ids(packed).tolist() == [prefixes.index(prefix) for prefix in prefixes]


@given(packed=rollouts(), num_shares=st.integers(1, 4))
def test_every_sample_is_packed_once_and_no_micro_batch_computes_too_much(
    packed: list[Rollout], num_shares: int
) -> None:
    samples = [
        Sample(one, [0.0] * len(one.completion_token_ids), [True] * len(one.completion_token_ids)) for one in packed
    ]
    found = Packing(MAX_TOKENS, num_shares, share_prefixes=True).pack(samples)
    assert len(found) == num_shares
    assert len({len(share) for share in found}) == 1
    assert sorted(i for share in found for micro_batch in share for i in micro_batch) == list(range(len(samples)))
    for share in found:
        for micro_batch in share:
            tokens = tokens_of([packed[i] for i in micro_batch])
            assert len({str(inputs(*token)) for token in tokens}) <= MAX_TOKENS
            assert len(tokens) <= 2 * MAX_TOKENS


def test_a_group_is_kept_together_and_takes_fewer_micro_batches() -> None:
    groups = [[rollout([g] * 20, [g, k]) for k in range(3)] for g in range(3)]
    samples = [Sample(groups[g][k], [0.0] * 2, [True] * 2, group_index=g) for k in range(3) for g in range(3)]
    (micro_batches,) = Packing(40, 1, share_prefixes=True).pack(samples)
    assert [sorted({samples[i].group_index for i in it}) for it in micro_batches] == [[0], [1], [2]]
    (separate,) = Packing(40, 1).pack(samples)
    assert len(separate) == 9
    with pytest.raises(InvalidRequestError, match="has 22 tokens but a micro-batch holds 21"):
        Packing(21, 1, share_prefixes=True).pack(samples)


def test_whole_sequences_of_a_micro_batch_have_at_most_twice_its_tokens() -> None:
    """Eight completions of one token after a long prompt compute 28 tokens, and attend over 168."""
    samples = [Sample(rollout([7] * 20, [k]), [0.0], [True]) for k in range(8)]
    (micro_batches,) = Packing(30, 1, share_prefixes=True).pack(samples)
    assert [len(ids) for ids in micro_batches] == [2, 2, 2, 2]


def test_a_prefix_does_not_end_within_an_image() -> None:
    """The recorded experts of the second placeholder differ, but an image is placed as a whole."""
    image = PromptImage(url="data:image/png;base64,AAAA", start=1, num_tokens=3)
    pair = [rollout([7, 9, 9, 9, 8], [5], (image,), [0, 0, experts, 0, 0]) for experts in (0, 1)]
    assert prefix_ids(pair).tolist() == [0, 1, 2, 3, 4, 5, 0, 7, 8, 9, 10, 11]


def test_samples_without_common_prefixes_are_packed_as_without_sharing() -> None:
    samples = [Sample(rollout([k] * 12, [k] * n), [0.0] * n, [True] * n) for k, n in enumerate((8, 2, 8, 2))]
    assert Packing(34, 1, share_prefixes=True).pack(samples) == Packing(34, 1).pack(samples)


def test_only_a_micro_batch_that_is_asked_for_it_states_what_is_shared() -> None:
    samples = [Sample(rollout([1, 2], [k]), [0.0], [True]) for k in (5, 6)]
    assert collate(samples).prefix_ids_T is None
    ids_T = collate(samples, share_prefixes=True).prefix_ids_T
    assert ids_T is not None
    assert ids_T.tolist() == [0, 1, 2, 0, 1, 5]


@given(rollouts())
def test_token_ids_alone_have_the_prefixes_of_rollouts(drawn: list[Rollout]) -> None:
    texts = [np.array((*it.prompt_token_ids, *it.completion_token_ids), np.int64) for it in drawn]
    assert prefix_ids_of_texts(texts).tolist() == prefix_ids(drawn).tolist()
    packing = Packing(MAX_TOKENS, 2, share_prefixes=True)
    samples = [Sample(it, [0.0] * len(it.completion_token_ids), [True] * len(it.completion_token_ids)) for it in drawn]
    assert packing.pack_texts(texts) == packing.pack(samples)

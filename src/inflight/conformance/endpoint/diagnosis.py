"""Small experiments that run after a check of logprobs has failed and show whether the model's computation is at fault.

A fault in an attention window, at the edge of a chunk, in a position or in rounding makes checks of caches, pages,
labels or ids fail. Under the checkpoint's weights, prompts that were never sent before show such a fault without
involving caches, pages, labels or ids.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from inflight.base.shortened import shortened
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.endpoint.waiting import SLOWNESS
from inflight.conformance.reference import chosen, distribution
from inflight.wire import Completion, GenerateRequest, SamplingParams

Asked = tuple[GenerateRequest, Completion]


class Diagnosis(NamedTuple):
    """What the experiments showed."""

    words: str
    is_right: bool = False
    """Whether every experiment had the right logprobs."""


_LENGTHS = (2, 5, 16, 17, 33, 65, 129, 257, 520, 1030, 2050, 4100, 3, 4, 8, 9, 24, 48, 100, 400)
"""Lengths of prompts, the most informative ones first."""
_NUM_DECODED = 48
_LIMIT_S = 10.0
_ROUNDED = 3.0
"""Differences of at most this many times a dtype's rounding error are attributed to that dtype."""
_RIGHT = (
    "prompts of {} to {} tokens that were never sent before have correct logprobs under the weights of the "
    "checkpoint: the model itself is computed correctly, and the fault lies in what was kept, labelled or loaded"
)
_FILTERS = ("temperature", "top_p", "top_k", "min_p")
_EDGE = "an edge of chunks or of a kernel's blocks, not a page, cache, label or id"


def other_parameters(asked: Iterable[SamplingParams]) -> str:
    """Return a list, as text, of the temperatures and filters among these parameters that no experiment requests; empty
    if there are none."""
    plain = SamplingParams()
    values: dict[str, set[float]] = {
        name: {getattr(it, name) for it in asked} - {getattr(plain, name)} for name in _FILTERS
    }
    words = [f"{name}={value:.3g}" for name in _FILTERS for value in sorted(values[name])]
    return ", ".join(words[:6]) + (" or others" if len(words) > 6 else "")


async def diagnose(subject: EndpointSubject) -> Diagnosis:
    """Return what the experiments show about the endpoint, which must serve the checkpoint's weights.

    The experiments sample at temperature 1 without filters, so they do not show whether these are applied correctly.
    No experiment begins after `_LIMIT_S` seconds; slow endpoints get more time.
    """
    longest, ends = subject.context_len - 1, time.monotonic() + _LIMIT_S * SLOWNESS.get()
    asked: dict[int, Asked] = {}
    for length in dict.fromkeys((longest, *(min(length, longest) for length in _LENGTHS))):
        if time.monotonic() < ends:
            asked[length] = await _ask_unseen(subject, length)
    gaps = {length: subject.gap(subject.reference.weights, *asked[length]) for length in sorted(asked)}
    wrong = [length for length, gap in gaps.items() if gap > subject.tolerance]
    if not wrong:
        words = await _of_decoded(subject)
        return Diagnosis(words or _RIGHT.format(min(gaps), max(gaps)), is_right=not words)
    return Diagnosis(await _of_prompts(subject, asked, gaps, wrong))


async def _of_prompts(
    subject: EndpointSubject, asked: Mapping[int, Asked], gaps: Mapping[int, float], wrong: Sequence[int]
) -> str:
    """Return a description of the prompts whose lengths are in ``wrong``, and of what they have in common."""
    largest = max(gaps.values())
    words = f"prompts that were never sent before are wrong too, by up to {largest:.3g} under the checkpoint's weights"
    if (dtype := _rounding(subject, [asked[length] for length in wrong], largest)) is not None:
        return f"{words}, as much as computing in {dtype} causes: rounding, not a page, cache, label or id"
    if later := [length for length in gaps if length > wrong[0] and length not in wrong]:
        return f"{words}: those of {wrong} tokens, but not those of {later}: {_EDGE}"
    if not (right := [length for length in gaps if length < wrong[0]]):
        return f"{words}, even those of {wrong[0]} tokens: the model's computation, not a page, cache, label or id"
    last = await _last_right(subject, right[-1], wrong[0])
    request, completion = asked[wrong[-1]]
    for window in (last, last - 1, last + 1):
        logits_TV = partial(subject.reference.logits, subject.reference.weights, window=max(1, window))
        seen_TV = distribution(logits_TV(request.prompt_token_ids, completion.token_ids), request.sampling)
        if subject.difference(completion.logprobs, chosen(seen_TV, completion.token_ids)) <= subject.tolerance:
            return f"{words}, exactly as if a token saw only the last {window} tokens: a window, not a page or cache"
    return (
        f"{words}, if they have more than {last} tokens: a table of positions, a window or a chunk's edge, not a page, "
        "cache or label"
    )


async def _of_decoded(subject: EndpointSubject) -> str:
    """Return what is wrong with tokens that are sampled one after another, or an empty string if they are right."""
    num_tokens = min(_NUM_DECODED, subject.context_len // 2)
    request, completion = await _ask_unseen(subject, num_tokens // 6, num_tokens)
    if subject.gap(subject.reference.weights, request, completion) <= subject.tolerance:
        return ""
    exact_T = subject.reference.logprobs(
        subject.reference.weights, request.prompt_token_ids, completion.token_ids, request.sampling
    )
    wrong_T = (torch.tensor(completion.logprobs, dtype=torch.float64) - exact_T).abs() > subject.tolerance
    positions = [len(request.prompt_token_ids) + i for i in wrong_T.nonzero()[:, 0].tolist()]
    return (
        f"the first token after a prompt that was never sent before is correct, and later ones are wrong, at "
        f"positions {shortened(positions, 8)}: the step that decodes, its positions, mask or kernel, not a page, "
        "cache, label or id"
    )


async def _ask_unseen(subject: EndpointSubject, length: int, num_tokens: int = 1) -> Asked:
    """Return a request with a prompt that was never sent before, and its completion."""
    return await subject.ask(subject.prompt(length, seed=time.time_ns()), max_tokens=num_tokens)


async def _last_right(subject: EndpointSubject, right: int, wrong: int) -> int:
    """Return the greatest prompt length, at least ``right`` and below ``wrong``, after which a token is still right."""
    while wrong - right > 1:
        middle = (right + wrong) // 2
        is_right = subject.gap(subject.reference.weights, *await _ask_unseen(subject, middle)) <= subject.tolerance
        right, wrong = (middle, wrong) if is_right else (right, middle)
    return right


def _rounding(subject: EndpointSubject, asked: Sequence[Asked], largest: float) -> str | None:
    """Return the dtype, if any, in which transformers' own logprobs deviate as much as the endpoint's."""
    for dtype in ("bfloat16", "float16"):
        rounded = 0.0
        for request, completion in asked:
            logits = partial(subject.reference.logits, subject.reference.weights)
            ids = completion.token_ids
            both = [logits(request.prompt_token_ids, ids, dtype=it) for it in ("float32", dtype)]
            exact_T, rounded_T = (chosen(distribution(it, request.sampling), ids) for it in both)
            rounded = max(rounded, float((rounded_T - exact_T).abs().max()))
        if dtype != subject.capabilities.dtype and rounded / 20 <= largest <= _ROUNDED * rounded:
            return dtype
    return None

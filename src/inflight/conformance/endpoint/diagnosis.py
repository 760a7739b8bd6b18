"""Small experiments after a check of logprobs has failed: is it the model's computation, or what happens to requests?

A window, an edge of a chunk, a position or a rounding makes checks fail that are about caches, pages, labels or ids.
Prompts that were never sent before, under the weights of the checkpoint, show such a fault without any of those.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.reference import chosen, distribution
from inflight.wire import Completion, GenerateRequest

_LENGTHS = (2, 3, 4, 5, 8, 9, 16, 17, 24, 33, 48, 65, 100, 129, 257, 400, 520, 1030, 2050, 4100)
_NUM_TOKENS = 6
_LIMIT_S = 12.0
_ROUNDED = 3.0
"""Differences of at most this many times the rounding of a dtype are explained by it."""
_RIGHT = (
    "prompts of {} to {} tokens that were never sent before have right logprobs under the weights of the checkpoint: "
    "the model itself is computed right, and the fault lies in what was kept, labelled or loaded"
)


async def diagnose(subject: EndpointSubject) -> str:
    """Return what experiments say about the endpoint, which must serve the checkpoint's weights; at most `_LIMIT_S`."""
    try:
        async with asyncio.timeout(_LIMIT_S):
            return await _diagnose(subject)
    except TimeoutError:
        return ""


async def _diagnose(subject: EndpointSubject) -> str:
    longest = subject.context_len - _NUM_TOKENS
    lengths = sorted({min(length, longest) for length in _LENGTHS} | {longest})
    lengths = [length for length in lengths if subject.pace.allows_prompt(4 * length)]
    asked = {length: await _ask_unseen(subject, length) for length in lengths}
    gaps = {length: subject.gap(subject.reference.weights, *asked[length]) for length in lengths}
    wrong = [length for length in lengths if gaps[length] > subject.tolerance]
    if not wrong:
        return _RIGHT.format(lengths[0], lengths[-1])
    largest = max(gaps.values())
    words = f"prompts that were never sent before are wrong too, by up to {largest:.3g} under the checkpoint's weights"
    if (dtype := _rounding(subject, [asked[length] for length in wrong], largest)) is not None:
        return f"{words}, as much as computing in {dtype} makes: a rounding, not a page, cache, label or id"
    right = [length for length in lengths if length < wrong[0]]
    if right and len(wrong) < len([length for length in lengths if length >= wrong[0]]):
        return f"{words}: those of {wrong} tokens, but not those of {[n for n in lengths if n not in wrong]}: {_EDGE}"
    if not right:
        return f"{words}, even those of {wrong[0]} tokens: the model's computation, not a page, cache, label or id"
    first = await _first_wrong(subject, right[-1], wrong[0])
    request, completion = await _ask_unseen(subject, max(wrong))
    for window in (first, first - 1, first + 1):
        logits_TV = partial(subject.reference.logits, subject.reference.weights, window=max(1, window))
        seen_TV = distribution(logits_TV(request.prompt_token_ids, completion.token_ids), request.sampling)
        if subject.difference(completion.logprobs, chosen(seen_TV, completion.token_ids)) <= subject.tolerance:
            return f"{words}, exactly as if a token saw the last {window} tokens only: a window, not a page or cache"
    return (
        f"{words}, from {first} tokens on: a table of positions, a window or a chunk's edge, not a page, cache or label"
    )


_EDGE = "an edge of chunks or of a kernel's blocks, not a page, cache, label or id"


async def _ask_unseen(subject: EndpointSubject, length: int) -> tuple[GenerateRequest, Completion]:
    """Return a request with a prompt that was never sent before, and its completion."""
    return await subject.ask(subject.prompt(length, seed=time.time_ns()), max_tokens=_NUM_TOKENS)


async def _first_wrong(subject: EndpointSubject, right: int, wrong: int) -> int:
    """Return the number of tokens, prompt included, after which logprobs are wrong, between these lengths."""
    while wrong - right > 1:
        middle = (right + wrong) // 2
        request, completion = await subject.ask(subject.prompt(middle, seed=time.time_ns()), max_tokens=1)
        if subject.gap(subject.reference.weights, request, completion) > subject.tolerance:
            wrong = middle
        else:
            right = middle
    return right


def _rounding(
    subject: EndpointSubject, asked: Sequence[tuple[GenerateRequest, Completion]], largest: float
) -> str | None:
    """Return the dtype in which transformers' own logprobs are as far away as the endpoint's, if there is one."""
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

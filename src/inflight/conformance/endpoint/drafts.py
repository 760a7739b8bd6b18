"""Level tokens: drafts from recorded completions change how fast tokens come, and nothing else.

Shape suffixes: T tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import torch

from inflight.conformance.checks import check, fail, look_at, require
from inflight.conformance.endpoint.sampling import DRAW_TEMPERATURE, require_pairs_drawn
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.reference import distribution
from inflight.contracts import DraftingEndpoint
from inflight.wire import Completion, DraftHistory, GenerateRequest, PromptHistory, SamplingParams

LEVEL = "tokens"
_DRAFTED = 32
"""The likeliest first tokens, for each of which the history says how the completion goes on."""
_COPIES = 8
"""Of each recorded completion, which thereby outnumber the few that run beside a request."""
_NUM_DRAWS, _DRAWS_PER_REQUEST = 1024, 64
_FEWEST_DRAWS, _DRAW_S = 256, 20.0
"""A slow endpoint may stop at this many draws, after this long."""
_TOKENS = 4
_SCORED = 64
"""Completions of each kind whose logprobs are compared."""


@check("E-70", "model drafts", deadline_s=90)
@look_at(
    "the token that is drawn instead of a rejected one (from the distribution without the draft, renormalised), and "
    "whether random numbers and temperatures reach the verification"
)
async def drafts(subject: EndpointSubject) -> None:
    """Drafts change neither the distribution that tokens are drawn from nor their logprobs, whether the recorded
    completions are the likeliest ones or every draft is wrong."""
    endpoint, prompt = subject.endpoint, subject.prompt(seed=2)
    if not isinstance(endpoint, DraftingEndpoint):
        fail(f"drafts are declared, but {type(endpoint).__name__} has no record_history")
    for kind, is_likeliest in (("likely", True), ("wrong", False)):
        await endpoint.record_history(_history(subject, prompt, is_likeliest))
        answered = await _drawn(subject, prompt)
        worst = max(
            subject.gap(subject.reference.weights, request, completion)
            for request, completion in answered[:: max(1, len(answered) // _SCORED)]
        )
        subject.note(**{f"largest logprob difference, {kind} drafts": worst})
        pairs = Counter(completion.token_ids[:2] for _, completion in answered)
        require_pairs_drawn(subject, f"pairs of tokens behind {kind} drafts", prompt, pairs)
        require(
            worst <= subject.tolerance,
            f"with {kind} drafts, logprobs differ by up to {worst:.3g} from the reference's (tolerance "
            f"{subject.tolerance:g})",
        )


async def _drawn(subject: EndpointSubject, prompt: Sequence[int]) -> list[tuple[GenerateRequest, Completion]]:
    answered: list[tuple[GenerateRequest, Completion]] = []
    started = time.monotonic()
    while len(answered) < _NUM_DRAWS:
        request = subject.request(
            prompt, n=_DRAWS_PER_REQUEST, max_tokens=_TOKENS, temperature=DRAW_TEMPERATURE, seed=None
        )
        answered += [(request, completion) for completion in (await subject.endpoint.generate(request)).completions]
        if len(answered) >= _FEWEST_DRAWS and time.monotonic() - started > _DRAW_S:
            break
    return answered


def _history(subject: EndpointSubject, prompt: Sequence[int], is_likeliest: bool) -> DraftHistory:
    """Return completions that begin with the likeliest tokens and go on with the likeliest, or the least likely."""
    params = SamplingParams(temperature=DRAW_TEMPERATURE)

    def logprobs(*behind: int) -> torch.Tensor:
        reference = subject.reference
        return distribution(reference.logits(reference.weights, (*prompt, *behind), (0,)), params)[0]

    completions = []
    for first in logprobs().topk(min(_DRAFTED, subject.capabilities.vocab_size)).indices.tolist():
        tokens = [first]
        while len(tokens) < _TOKENS - 1:
            next_V = logprobs(*tokens)
            tokens.append(int(next_V.argmax() if is_likeliest else next_V.argmin()))
        completions += [tuple(tokens)] * _COPIES
    entry = PromptHistory(
        prompt_token_ids=tuple(prompt), completions=tuple(completions), rewards=(0.0,) * len(completions)
    )
    return DraftHistory(entries=(entry,))

"""Level ``tokens``: drafts from recorded completions change how fast tokens are sampled, and nothing else.

Shape suffixes: T tokens, V vocabulary.
"""

from __future__ import annotations

import asyncio
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
"""Number of likeliest first tokens for which the history contains completions."""
_COPIES = 8
"""Number of copies of each recorded completion, so that they outnumber the few completions that run alongside a
request."""
_NUM_DRAWS, _DRAWS_PER_REQUEST = 1024, 64
_FEWEST_DRAWS, _DRAW_S = 256, 20.0
"""Drawing ends early once at least this many draws have been made and this many seconds have passed."""
_TOKENS = 4
_COUNTED = 48
"""Number of tokens of the completions whose drafts are counted."""
_SCORED = 64
"""Number of completions of each kind whose logprobs are compared."""


@check("E-70", "model drafts", deadline_s=90)
@look_at(
    "the token that is drawn instead of a rejected one (from the distribution without the draft, renormalized), and "
    "whether random numbers and temperatures reach the verification"
)
async def drafts(subject: EndpointSubject) -> None:
    """Drafts change neither the distribution from which tokens are drawn nor the tokens' logprobs, both when the
    recorded completions are the likeliest ones and when every draft is wrong."""
    endpoint, prompt = subject.endpoint, subject.prompt(seed=2)
    if not isinstance(endpoint, DraftingEndpoint):
        fail(f"drafts are reported as supported, but {type(endpoint).__name__} has no record_history")
    for kind, is_likeliest in (("likely", True), ("wrong", False)):
        await endpoint.record_history(_history(subject, prompt, is_likeliest))
        answered = await _drawn(subject, prompt)
        worst = max(
            subject.gap(subject.reference.weights, request, completion)
            for request, completion in answered[:: max(1, len(answered) // _SCORED)]
        )
        subject.note(**{f"largest logprob difference, {kind} drafts": worst})
        pairs = Counter(completion.token_ids[:2] for _, completion in answered)
        require_pairs_drawn(subject, f"pairs of tokens with {kind} drafts", prompt, pairs)
        require(
            worst <= subject.tolerance,
            f"with {kind} drafts, logprobs differ by up to {worst:.3g} from the reference's (tolerance "
            f"{subject.tolerance:g})",
        )


@check("E-71", "model drafts draft_counts")
@look_at("which drafts are counted: those of one completion, or all that the engine has verified since it started")
async def own_drafts_are_counted(subject: EndpointSubject) -> None:
    """Each completion reports only the drafts that were verified for it: a repeated completion reports accepted tokens,
    and a concurrent one whose drafts are all wrong reports none."""
    endpoint = subject.endpoint
    assert isinstance(endpoint, DraftingEndpoint)

    def asked(seed: int) -> GenerateRequest:
        return subject.request(subject.prompt(seed=seed), max_tokens=_COUNTED, temperature=0.0, seed=None)

    first, other = [(await endpoint.generate(asked(seed))).completions[0].token_ids for seed in (3, 4)]
    misled = [(token + 1) % subject.capabilities.vocab_size for token in other]
    await endpoint.record_history(
        DraftHistory(
            entries=tuple(
                PromptHistory(prompt_token_ids=subject.prompt(seed=seed), completions=(tuple(ids),), rewards=(0.0,))
                for seed, ids in ((3, first), (4, misled))
            )
        )
    )
    answers = await asyncio.gather(*(endpoint.generate(asked(seed)) for seed in (3, 4)))
    accepted = []
    for answer in answers:
        (completion,) = answer.completions
        counts = completion.draft_counts
        if counts is None:
            fail("draft_counts are reported as supported, but a completion has none")
        num_tokens = len(completion.token_ids)
        require(
            counts.num_accepted + counts.num_verifications <= num_tokens,
            f"a completion of {num_tokens} tokens counts {counts.num_accepted} accepted and {counts.num_verifications} "
            "verifications, each of which adds one more token",
        )
        accepted.append(counts.num_accepted)
    subject.note(**{"accepted tokens of right drafts": accepted[0], "accepted tokens of wrong drafts": accepted[1]})
    require(accepted[0] > 0, f"a completion of {_COUNTED} tokens that was recorded before has no accepted token")
    require(accepted[1] == 0, f"{accepted[1]} tokens of drafts that are all wrong were accepted")


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
    """Return completions that begin with the likeliest tokens and continue with the likeliest or least likely ones."""
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

"""Level ``tokens``: no filter, penalty or temperature applies unless the request specifies it.

A likelihood ratio reveals a sampler that applies its own default. For each of several defaults, the ratio is how many
times likelier the sampled tokens are under the default than under the requested distribution. Under the requested
distribution, each ratio has mean 1, whatever was drawn before, so the probability that any of K ratios exceeds K /
`_FALSE_ALARM` is at most `_FALSE_ALARM` (Markov's inequality). The only approximation is the reference's rounding, for
which the limit allows.

Shape suffixes: T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from inflight.conformance.checks import check, look_at, require
from inflight.conformance.endpoint.endings import known_ids, prompt_before
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.wire import Completion, GenerateRequest

LEVEL = "tokens"
_FALSE_ALARM = 1e-6
_TEMPERATURES = (0.5, 2.0, 1.0, 0.5, 0.5)
"""Temperatures of the requests: 0.5 shows penalties, and 2, OpenAI's maximum, shows the tail that filters cut off."""
_COMPLETIONS, _TOKENS = 16, 32
_PROMPT_LENGTH = 128
_DRAW_S = 15.0
"""After this many seconds, no further tokens are requested from a slow endpoint."""
_NUM_SPECIAL, _MOST_DRAWS, _DRAWS_PER_REQUEST = 24, 2048, 128
"""Expected number of special tokens, the maximum number of draws that this may take, and the draws per request. The
probability that a correct sampler draws no special token is exp(-_NUM_SPECIAL)."""
_DOUBT = 0.05
"""Share of the requested distribution mixed into that of each default, so that no single token rules out a default."""

_TOP_K = (10, 20, 30, 40, 50, 64, 100, 128, 200, 256, 500, 1000)
_TOP_P = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
_MIN_P = (0.01, 0.02, 0.05, 0.1, 0.2)
_REPETITION = (1.02, 1.05, 1.1, 1.2, 1.5)
_PRESENCE = (0.5, 1.0, 1.5)
_OTHER_TEMPERATURES = (0.3, 0.6, 0.7, 0.8, 1.2)
_NUM_DEFAULTS = sum(map(len, (_TOP_K, _TOP_P, _MIN_P, _REPETITION, _PRESENCE, _OTHER_TEMPERATURES)))


@check("E-62", "model", deadline_s=60)
@look_at(
    "what the engine does with parameters that are not sent: transformers has a top_k of 50, and engines take "
    "defaults from the checkpoint's generation_config.json"
)
async def nothing_unasked(subject: EndpointSubject) -> None:
    """Where a request asks for no filter, tokens are drawn from the whole distribution: no default of the engine and no
    generation_config.json cuts off its tail, penalises a token or changes its temperature."""
    gains: dict[str, float] = {}
    powers: dict[str, float] = {}
    allowed, num_tokens, started = 0.0, 0, time.monotonic()
    length = min(_PROMPT_LENGTH, subject.context_len - _TOKENS)
    for i, temperature in enumerate(_TEMPERATURES):
        if num_tokens and time.monotonic() - started > _DRAW_S:
            break
        drawn: dict[str, Any] = {"temperature": temperature, "seed": None if i % 2 else i}
        request = subject.request(subject.prompt(length, seed=20 + i), n=_COMPLETIONS, max_tokens=_TOKENS, **drawn)
        for completion in (await subject.endpoint.generate(request)).completions:
            num_tokens += len(completion.token_ids)
            # An error of e in the logits moves a ratio by about e squared per token; e is about tolerance / 4.
            allowed += len(completion.token_ids) * (subject.tolerance / 4 / temperature) ** 2
            for name, gain, power in _gains(subject, request, completion):
                gains[name] = gains.get(name, 0.0) + gain
                powers[name] = powers.get(name, 0.0) + power
    largest = math.log(_NUM_DEFAULTS / _FALSE_ALARM) + allowed
    name = max(gains, key=lambda name: gains[name])
    subject.note(
        tokens=num_tokens,
        **{
            "likeliest default": f"{name}, by {gains[name]:.1f} nats; {largest:.1f} are too many",
            "defaults that would not show": sorted(name for name in powers if powers[name] < 1.5 * largest),
        },
    )
    require(
        gains[name] <= largest,
        f"{num_tokens} tokens that were requested without any filter are drawn as if {name} were in force: they are "
        f"likelier then by {gains[name]:.1f} nats; {largest:.1f} occur by chance in {_FALSE_ALARM:g} of all runs",
    )
    await _require_special_tokens_drawn(subject)


async def _require_special_tokens_drawn(subject: EndpointSubject) -> None:
    """Require that special tokens are drawn, even as the first token of a completion."""
    tokenizer = subject.reference.tokenizer
    ends = subject.reference.eos_token_ids
    special = set() if tokenizer is None else set(tokenizer.all_special_ids) - ends
    for name, among in (("tokens that end a sequence", ends), ("other special tokens", special)):
        if not (ids := known_ids(subject, among)):
            continue
        prompt, temperature, likelihood = prompt_before(subject, ids)
        num_draws = math.ceil(_NUM_SPECIAL / max(likelihood, 1e-9))
        subject.note(**{f"likelihood of {name}": likelihood})
        if num_draws > subject.pace.shortened(_MOST_DRAWS):
            continue  # too unlikely for their absence to prove anything
        drawn, started = 0, time.monotonic()
        sampling: dict[str, Any] = {"max_tokens": 1, "temperature": temperature, "ignore_eos": False, "seed": None}
        for _ in range(0, num_draws, _DRAWS_PER_REQUEST):
            request = subject.request(prompt, n=_DRAWS_PER_REQUEST, **sampling)
            completions = (await subject.endpoint.generate(request)).completions
            drawn += sum(completion.token_ids[0] in ids for completion in completions)
            if drawn or time.monotonic() - started > _DRAW_S / 2:
                break
        else:
            require(
                drawn, f"none of {num_draws} first tokens is one of the {name}, although {_NUM_SPECIAL} are expected"
            )


def _gains(
    subject: EndpointSubject, request: GenerateRequest, completion: Completion
) -> Iterator[tuple[str, float, float]]:
    """Yield each default, how many nats likelier these tokens are under it, and how many nats likelier tokens would be
    on average if the default were in force."""
    tokens, temperature = completion.token_ids, request.sampling.temperature
    prompt = request.prompt_token_ids
    logits_TV = subject.reference.logits(subject.reference.weights, prompt, tokens).double()
    asked_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
    index_T1 = torch.tensor(tokens)[:, None]
    asked_T = asked_TV.gather(1, index_T1)[:, 0]
    sorted_TV = asked_TV.sort(dim=-1, descending=True).values
    mass_TV = sorted_TV.exp().cumsum(dim=-1)
    rank_T = (asked_TV > asked_T[:, None]).sum(dim=-1)
    for name, kept_T in _filters(sorted_TV, mass_TV):
        inside_T = mass_TV.gather(1, kept_T[:, None] - 1)[:, 0].clamp(max=1.0)
        if float(inside_T.min()) == 1.0:
            continue  # nothing would be cut off
        ratio_T = (1 - _DOUBT) / inside_T + _DOUBT
        gain_T = torch.where(rank_T < kept_T, ratio_T.log(), math.log(_DOUBT))
        power_T = inside_T * ratio_T * ratio_T.log() + (1 - inside_T) * _DOUBT * math.log(_DOUBT)
        yield name, float(gain_T.sum()), float(power_T.sum())
    for name, other_TV in _shifts(logits_TV, prompt, tokens, temperature):
        both_TV = torch.logaddexp(other_TV + math.log(1 - _DOUBT), asked_TV + math.log(_DOUBT))
        ratio_TV = both_TV - asked_TV
        yield name, float(ratio_TV.gather(1, index_T1).sum()), float((both_TV.exp() * ratio_TV).sum())


def _filters(sorted_TV: torch.Tensor, mass_TV: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each filter that a sampler may have by default, and int64 [T]: the number of tokens that it keeps."""
    num_tokens, vocab_size = sorted_TV.shape
    for top_k in _TOP_K:
        if top_k < vocab_size:
            yield f"top_k={top_k}", torch.full((num_tokens,), top_k)
    for top_p in _TOP_P:
        yield f"top_p={top_p:g}", ((mass_TV < top_p).sum(dim=-1) + 1).clamp(max=vocab_size)
    for min_p in _MIN_P:
        yield f"min_p={min_p:g}", (sorted_TV >= sorted_TV[:, :1] + math.log(min_p)).sum(dim=-1)


def _shifts(
    logits_TV: torch.Tensor, prompt: Sequence[int], tokens: Sequence[int], temperature: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each penalty or temperature that a sampler may have by default, and the log-probabilities [T, V] under
    it."""
    written_TV = torch.zeros_like(logits_TV, dtype=torch.bool)
    for t, token in enumerate(tokens):
        written_TV[t + 1 :, token] = True
    seen_TV = written_TV.clone()
    seen_TV[:, torch.tensor(prompt)] = True
    for penalty in _REPETITION:
        penalised_TV = torch.where(logits_TV > 0, logits_TV / penalty, logits_TV * penalty)
        changed_TV = torch.where(seen_TV, penalised_TV, logits_TV)
        yield f"repetition_penalty={penalty:g}", torch.log_softmax(changed_TV / temperature, dim=-1)
    for penalty in _PRESENCE:
        yield f"presence_penalty={penalty:g}", torch.log_softmax((logits_TV - penalty * written_TV) / temperature, -1)
    if temperature == 1.0:  # which a client may leave out, as the usual default
        for other in _OTHER_TEMPERATURES:
            yield f"temperature={other:g}", torch.log_softmax(logits_TV / other, dim=-1)

"""Level ``tokens``: whether tokens are drawn from the requested distribution, as determined by the seed."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from inflight.base.tasks import run_together
from inflight.conformance.checks import check, fail, look_at, require
from inflight.conformance.endpoint.endings import require_each_stopped
from inflight.conformance.endpoint.filters import logprob_bounds
from inflight.conformance.endpoint.repeats import require_repeated
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.models import make_tiny_model
from inflight.conformance.reference import ReferenceCheckpoint, chosen, distribution
from inflight.errors import InvalidRequestError, UnsupportedError
from inflight.wire import Completion, GenerateRequest, SamplingParams

LEVEL = "tokens"
DRAW_TEMPERATURE = 0.7
_NUM_DRAWS = 1024
_DRAWS_PER_REQUEST = 64
_VARIED = 2.0
"""A temperature that no engine refuses and at which even a confident model hardly ever samples the same 16 tokens
twice."""
_OTHER_SEEDS = (1000, 2**64 - 4, -(2**63))
"""The last two lie at the ends of the unsigned and the signed 64-bit range. If seeds are cut to fewer bits, they
repeat."""
_LARGE_VOCABULARY = 10_000
"""In a vocabulary of at least this size, the intervals of tokens are so narrow that rounding in 16 bits changes most
draws."""
_FEWEST_DRAWS, _DRAW_S = 256, 20.0
"""Drawing ends early once at least this many draws have been made and this many seconds have passed."""
_LEAST_EXPECTED = 5.0
"""Tokens with at least this many expected draws have their own bin in the chi-square test; the others share one."""
_LEAST_P = 1e-6
"""Probability with which a correct sampler fails the test."""
_LARGE_NUCLEUS = 9_000
"""Size of a vocabulary of which filters keep more tokens than samplers with fixed buffers."""
_MANY = 100
"""A top_k above the limits that samplers with fixed buffers have."""
_FILTERS = "order of the filters, whether the kept set is renormalized, and which tensor the logprob is read from"


@check("E-12", "model", deadline_s=60)
@look_at("whether the logprob is read before or after the logits are divided by the temperature")
async def temperature(subject: EndpointSubject) -> None:
    """Tokens are sampled at the requested temperature, from 0.01 to 5, and logprobs are of the kind that logprob_kind
    reports. A temperature above 2 may be refused."""
    await _require_sampled(subject, {"temperature": 0.7}, {"temperature": 1.5})
    await _require_sampled(subject, {"temperature": 0.05}, {"temperature": 2.0}, num_prompts=2)
    await _require_sampled(subject, {"temperature": 0.01}, num_prompts=2)
    try:
        await _require_sampled(subject, {"temperature": 5.0}, num_prompts=2)
    except (InvalidRequestError, UnsupportedError) as error:
        subject.note(**{"temperature=5": f"refused: {error}"})


@check("E-13", "model", deadline_s=60, look_at=_FILTERS)
async def top_p(subject: EndpointSubject) -> None:
    """Under top-p, no token outside the nucleus is sampled, however many tokens it contains, and processed logprobs are
    renormalized over it. A request whose filters keep thousands of tokens may be refused with UnsupportedError."""
    # Renormalizing raises a kept token's logprob by at most -log(top_p). That must exceed the tolerance, or processed
    # and raw logprobs could not be distinguished.
    top_p = min(0.5, math.exp(-3 * subject.tolerance))
    await _require_sampled(subject, {"top_p": top_p}, {"top_p": top_p, "temperature": 1.5})
    await _require_sampled(subject, {"top_p": 1e-4}, num_prompts=1)
    await _require_large_nucleus(subject)


async def _require_large_nucleus(subject: EndpointSubject) -> None:
    """Require that thousands of tokens are kept where filters keep them, or that the request is refused.

    The check starts another endpoint, which serves a model with a larger vocabulary.
    """
    if subject.capabilities.logprob_kind == "raw" or subject.is_coarse or subject.missing("fresh") is not None:
        return  # raw logprobs do not show the filters, and rounding makes thousands of logits equal
    reference = ReferenceCheckpoint(make_tiny_model(subject.directory / "nucleus", vocab_size=_LARGE_NUCLEUS))
    endpoint = (await subject.fresh(reference.path)).endpoint
    reference.cast((await endpoint.capabilities()).dtype)
    prompt = [token % reference.vocab_size for token in subject.prompt()]
    kept: tuple[dict[str, Any], ...] = ({"top_p": 0.999}, {"min_p": 1e-3}, {"top_k": _LARGE_NUCLEUS // 2})
    for filters in kept:
        request = subject.request(prompt, max_tokens=24, temperature=2.0, **filters)
        try:
            completion = (await endpoint.generate(request)).completions[0]
        except UnsupportedError as error:
            subject.note(**{f"{filters}, {_LARGE_NUCLEUS} tokens": f"refused: {error}"})
            continue
        gap = subject.gap(reference.weights, request, completion, reference)
        subject.note(**{f"largest logprob difference, {filters}, {_LARGE_NUCLEUS} tokens": gap})
        words = f"with {filters}, which keeps thousands of {_LARGE_NUCLEUS} tokens, logprobs differ by up to {gap:.3g}"
        require(gap <= subject.tolerance, words)


@check("E-14", "model", deadline_s=60, look_at=_FILTERS)
async def top_k_and_min_p(subject: EndpointSubject) -> None:
    """Under top-k and min-p, no token outside the kept set is sampled, and filters are applied in the order
    temperature, top-k, top-p, min-p; alternatively, their combination is refused with UnsupportedError."""
    together = {"temperature": 1.4, "top_k": 8, "top_p": 0.7, "min_p": 0.15}
    await _require_sampled(subject, {"top_k": 5}, {"min_p": 0.3})
    every_token = {"temperature": 1.5, "top_k": subject.capabilities.vocab_size + 1}
    await _require_sampled(subject, {"top_k": 1}, {"min_p": 0.95}, every_token, num_prompts=1)
    many = {"temperature": 2.0, "top_k": min(_MANY, subject.capabilities.vocab_size // 2)}
    await _require_sampled(subject, many)
    try:
        await _require_sampled(subject, together)
    except UnsupportedError as error:
        subject.note(all_filters_together=f"refused: {error}")


@check("E-15", "model", deadline_s=60)
@look_at("the sampler itself: temperature, random numbers used twice, a generator that is recreated for every token")
async def draws(subject: EndpointSubject) -> None:
    """Tokens are drawn from the requested distribution, each independently of the previous one."""
    prompt = subject.prompt(seed=2)
    pairs: list[tuple[int, ...]] = []
    started = time.monotonic()
    for i in range(_NUM_DRAWS // _DRAWS_PER_REQUEST):
        drawn: dict[str, Any] = {"temperature": DRAW_TEMPERATURE, "seed": i if i % 4 else None}
        response = await subject.endpoint.generate(subject.request(prompt, n=_DRAWS_PER_REQUEST, max_tokens=2, **drawn))
        pairs += [completion.token_ids for completion in response.completions]
        if len(pairs) >= _FEWEST_DRAWS and time.monotonic() - started > _DRAW_S:
            break
    subject.note(draws=len(pairs))
    require(all(len(pair) == 2 for pair in pairs), "a completion of max_tokens=2 does not have two tokens")
    first = _expected(subject, prompt, len(pairs))
    _require_drawn(subject, "first tokens", Counter(pair[0] for pair in pairs), first)
    require_pairs_drawn(subject, "pairs of tokens", prompt, Counter(pairs))


@check("E-16", "model", deadline_s=60)
@look_at("what temperature 0 does to the logits, and whether greedy rows take another code path")
async def greedy(subject: EndpointSubject) -> None:
    """At temperature 0, whatever filter is asked for, every token is the most likely one, with the log-softmax of the
    unscaled logits as its logprob."""
    pairs = []
    filters: tuple[dict[str, Any], ...] = ({}, {"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3})
    for i, sampling in enumerate(filters):
        prompt = subject.prompt(seed=i)
        first = await subject.generate(prompt, temperature=0.0, max_tokens=24, **sampling)
        logits_TV = subject.reference.logits(subject.reference.weights, prompt, first.token_ids)
        behind, index = map(float, (logits_TV.amax(dim=-1) - chosen(logits_TV, first.token_ids)).max(dim=0))
        likeliest = int(logits_TV[int(index)].argmax())
        require(
            behind <= 2 * subject.tolerance,
            f"token {index:g} is {first.token_ids[int(index)]}, {likeliest} is more likely by {behind:.3g} nats",
        )
        gap = subject.difference(first.logprobs, chosen(distribution(logits_TV), first.token_ids))
        subject.note(
            **{f"prompt {i}": f"logprob difference {gap:.3g}, less likely than the best token by {behind:.3g}"}
        )
        asked = "".join(f", {key}={value:g}" for key, value in sampling.items())
        require(
            gap <= subject.tolerance,
            f"at temperature 0{asked}, logprobs differ by {gap:.3g} from the log-softmax of the unscaled logits",
        )
        pairs.append((first, await subject.generate(prompt, temperature=0.0, max_tokens=24, seed=1234)))
    require_repeated(subject, pairs, "decoded greedily again")


@check("E-17", "seeds", deadline_s=60, look_at="a generator per sequence, not one per batch or server")
async def seeds(subject: EndpointSubject) -> None:
    """The same seed gives the same tokens whatever else runs, and another seed gives different ones."""

    is_coarse = subject.rounding > 0 and subject.capabilities.vocab_size > _LARGE_VOCABULARY
    sampling = {"max_tokens": 16, "temperature": 0.3 if is_coarse else 1.0}

    async def drawn(offset: int, sign: int = 1) -> list[Completion]:
        return [await subject.generate(subject.prompt(seed=i), seed=offset + sign * i, **sampling) for i in range(4)]

    first = await drawn(0)
    require_repeated(subject, zip(first, await drawn(0), strict=True), "with the same seed")
    num_others = min(4, subject.capabilities.max_concurrent_sequences - 1)
    if num_others:
        await subject.start_running(num_others)
        require_repeated(subject, zip(first, await drawn(0), strict=True), "with the same seed while others run")
    for offset in _OTHER_SEEDS:
        other = await drawn(offset)
        same = sum(one.token_ids == another.token_ids for one, another in zip(first, other, strict=True))
        words = f"with the seeds from {offset} on, {same} of {len(first)} completions are those of the seeds from 0 on"
        require(same == 0, words)
    negated = zip(first[1:], (await drawn(0, -1))[1:], strict=True)
    same = sum(one.token_ids == another.token_ids for one, another in negated)
    require(same == 0, f"{same} of {len(first) - 1} completions are the same with the negated seed")


@check("E-18", "seeds", deadline_s=60, look_at="how the seed of completion i is derived from the request's")
async def several_completions(subject: EndpointSubject) -> None:
    """A request for n completions gets n independent draws; if it has a seed, completion i depends only on the seed and
    i."""

    async def drawn(n: int, seed: int | None) -> tuple[Completion, ...]:
        request = subject.request(n=n, seed=seed, max_tokens=16, temperature=_VARIED)
        completions = (await subject.endpoint.generate(request)).completions
        require(len(completions) == n, f"n={n} returned {len(completions)} completions")
        num_different = len({completion.token_ids for completion in completions})
        require(num_different == n, f"of {n} completions with seed {seed}, {num_different} are different")
        return completions

    four = await drawn(4, 11)
    pairs = [pair for n in (4, 2, 1) for pair in zip(four, await drawn(n, 11), strict=False)]
    require_repeated(subject, pairs, "n=4 and n=4, 2 and 1 with the same seed")
    unseeded = {completion.token_ids for completion in await drawn(4, None)}
    again = unseeded & {completion.token_ids for completion in four}
    require(not again, "without a seed, a seeded completion was returned")
    await require_each_stopped(subject, seed=12)


@check("E-28", look_at="a default seed, or a cache of answers")
async def no_seed(subject: EndpointSubject) -> None:
    """Without a seed, two equal requests get different answers."""
    sampling: dict[str, Any] = {"seed": None, "max_tokens": 16, "temperature": _VARIED}
    answers = [await subject.generate(**sampling) for _ in range(2)]
    answers += await asyncio.gather(*(subject.generate(**sampling) for _ in range(2)))
    num_different = len({completion.token_ids for completion in answers})
    subject.note(requests=len(answers), different=num_different)
    require(num_different == len(answers), f"{len(answers)} unseeded requests have {num_different} different answers")


async def _require_sampled(subject: EndpointSubject, *settings: Mapping[str, Any], num_prompts: int = 4) -> None:
    """Require that tokens and logprobs come from the distribution that each of these settings defines."""
    for sampling in settings:
        name = ", ".join(f"{key}={value:.3g}" for key, value in sampling.items())
        away = {"processed": 0.0, "raw": 0.0}
        requests = [
            subject.request(subject.prompt(seed=10 + i), n=2, seed=i, max_tokens=16, **sampling)
            for i in range(num_prompts)
        ]
        responses = await run_together(*map(subject.endpoint.generate, requests))
        for request, response in zip(requests, responses, strict=True):
            for completion in response.completions:
                for kind, gap in _differences(subject, request, completion, name).items():
                    away[kind] = max(away[kind], gap)
        reported = subject.capabilities.logprob_kind
        other = "raw" if reported == "processed" else "processed"
        subject.note(**{f"{name}: largest difference from {kind}": gap for kind, gap in away.items()})
        require(
            away[reported] <= 0,
            f"under {name}, logprobs are reported as {reported} and are up to {away[reported]:.3g} away from that, "
            f"beyond the tolerance, and {away[other]:.3g} from {other}",
        )
        require(
            away[other] > 0, f"under {name}, processed and raw logprobs are the same here: the check is inconclusive"
        )


def _differences(
    subject: EndpointSubject, request: GenerateRequest, completion: Completion, name: str
) -> dict[str, float]:
    """Return, for each kind of logprob, the excess over the tolerance; fail the check if a dropped token was
    sampled."""
    tokens = completion.token_ids
    logits_TV = subject.reference.logits(subject.reference.weights, request.prompt_token_ids, tokens)
    least_TV, most_TV = logprob_bounds(logits_TV, request.sampling, subject.tolerance)
    least_T, most_T = chosen(least_TV, tokens), chosen(most_TV, tokens)
    if bool((dropped_T := most_T.isneginf()).any()):
        index = int(dropped_T.nonzero()[0])
        num_kept = int((~most_TV[index].isneginf()).sum())
        fail(f"under {name}, token {index} is {tokens[index]}, which is not among the {num_kept} that are kept")
    found_T = torch.tensor(completion.logprobs, dtype=torch.float64)
    raw_T = (found_T - chosen(distribution(logits_TV), tokens)).abs() - subject.tolerance
    processed_T = torch.maximum(least_T - found_T, found_T - most_T)
    beyond = {"processed": processed_T, "raw": raw_T}
    return {kind: float(gap_T.nan_to_num(nan=math.inf).clamp(min=0).max()) for kind, gap_T in beyond.items()}


def _expected(subject: EndpointSubject, prompt: Sequence[int], num_draws: float) -> dict[int, float]:
    """Return how many of ``num_draws`` draws are expected to give each token that has its own bin."""
    logits_TV = subject.reference.logits(subject.reference.weights, prompt, (0,))
    mean_V = num_draws * distribution(logits_TV, SamplingParams(temperature=DRAW_TEMPERATURE))[0].exp()
    return {token: float(mean_V[token]) for token in (mean_V >= _LEAST_EXPECTED).nonzero()[:, 0].tolist()}


def require_pairs_drawn(
    subject: EndpointSubject, what: str, prompt: Sequence[int], pairs: Counter[tuple[int, ...]]
) -> None:
    """Require that the first two tokens of completions are draws at `DRAW_TEMPERATURE`."""
    joint = {
        (token, other): mean_of_pair
        for token, mean in _expected(subject, prompt, pairs.total()).items()
        for other, mean_of_pair in _expected(subject, (*prompt, token), mean).items()
    }
    _require_drawn(subject, what, pairs, joint)


def _require_drawn(subject: EndpointSubject, what: str, counts: Counter[Any], expected: Mapping[Any, float]) -> None:
    """Require that the counts fit draws from the expected distribution, by Pearson's chi-square test."""
    num_draws = counts.total()
    bins = [(counts[key], mean) for key, mean in expected.items()]
    rest = num_draws - sum(count for count, _ in bins), num_draws - sum(mean for _, mean in bins)
    if rest[1] >= _LEAST_EXPECTED:
        bins.append(rest)
    require(len(bins) > 1, f"{what} are nearly certain here: the check is inconclusive")
    # An error of e in the logits moves the statistic by the mean of e squared per draw; e is about tolerance / 4.
    rounding = num_draws * (subject.tolerance / 4 / DRAW_TEMPERATURE) ** 2
    statistic = sum((count - mean) ** 2 / mean for count, mean in bins)
    halves = torch.tensor([len(bins) - 1, max(0.0, statistic - rounding)], dtype=torch.float64) / 2
    p = float(torch.special.gammaincc(halves[0], halves[1]))  # probability of a larger statistic
    subject.note(**{what: f"{num_draws} draws in {len(bins)} bins, chi-square {statistic:.1f}, p {p:.2g}"})
    require(
        p > _LEAST_P,
        f"{num_draws} {what} are not draws from the reference's distribution at temperature {DRAW_TEMPERATURE}: "
        f"chi-square {statistic:.1f} in {len(bins)} bins, p {p:.2g}",
    )

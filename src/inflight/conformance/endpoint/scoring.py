"""Level ``tokens``: whether logprobs of given tokens are correct, which weights computed them, and which requests are
refused.

Shape suffixes: N scored tokens, V vocabulary, K alternatives.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence

import torch

from inflight.base.shortened import shortened
from inflight.base.tasks import run_together
from inflight.conformance.checks import check, fail, look_at, require, skip
from inflight.conformance.endpoint.holding import held_up
from inflight.conformance.endpoint.kinds import UpdateChain, supported_kinds
from inflight.conformance.endpoint.rounding import roundings, unexplained_difference
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.reference import ReferenceCheckpoint, ReferenceWeights, chosen, distribution
from inflight.contracts import ScoringEndpoint
from inflight.errors import InvalidRequestError, UnsupportedError
from inflight.wire import MAX_ALTERNATIVES, EndpointState, ScoreRequest, ScoreResponse

LEVEL = "tokens"
_NUM_TOKENS, _SEEN = 24, 48
"""Lengths of scored sequences. Sequences that the endpoint has seen before have the second length, which fills pages of
16 tokens."""
_LONGER = 300
"""Length of a scored sequence that is longer than a window, chunk or page of most engines."""
_TOP_K, _NUM_CANDIDATES = 5, 3
_OTHER_CANDIDATES = 2000
"""Seed of the candidates of tokens that are scored again."""
_FEW_SCORED = 6
"""Length of the sequence for which the largest number of alternatives is requested. Some engines score all candidates
of a request for each of its tokens."""
_FEW, _MOVED = 8, 0.75
"""Rounding may change the logprobs of all scored tokens too much if there are fewer than `_FEW`, and otherwise of at
most the share `_MOVED`. Scored tokens are not sampled from the weights that score them, so most of them are
unlikely."""
_NUM_UPDATES, _NUM_SCORERS = 4, 3


@check("E-82", "model scoring", deadline_s=60)
@look_at(
    "which step a logprob is read from (token i is scored after the tokens before it), and whether the logits of a "
    "prompt are divided by a temperature"
)
async def scores(subject: EndpointSubject) -> None:
    """Scored logprobs, likeliest tokens and candidates are those of the reference for the same tokens, at temperature
    1, wherever scoring starts, however many alternatives are requested, whatever was scored before and whatever else is
    running."""
    num_tokens = min(_NUM_TOKENS, subject.context_len - 1)
    running = await subject.start_running(min(4, subject.capabilities.max_concurrent_sequences), max_tokens=160)
    token_ids = subject.prompt(num_tokens, seed=21)
    starts = sorted({1, 2, num_tokens // 2, num_tokens - 1})
    requests = [_request(subject, token_ids, start) for start in starts]
    requests.append(_request(subject, (token_ids[0],) * num_tokens, 1))
    longer = subject.prompt(min(_LONGER, subject.context_len - 1), seed=23)
    requests += [_request(subject, longer, start) for start in sorted({1, max(1, len(longer) - 6)})]
    for request, response in zip(requests, await _scored(subject, requests), strict=True):
        _require_scores(subject, subject.reference.weights, request, response, f"from token {request.start} on")
    await _require_scored_again(subject, token_ids)
    await asyncio.gather(*(task for _, task in running))


async def _require_scored_again(subject: EndpointSubject, token_ids: Sequence[int]) -> None:
    """Require correct scores for tokens that were scored before: with other candidates, and with as many alternatives
    as possible."""
    weights, most = subject.reference.weights, min(subject.capabilities.max_top_k, MAX_ALTERNATIVES)
    for start in (1, 3):
        if start < len(token_ids):
            request = _request(subject, token_ids, start, seed=_OTHER_CANDIDATES)
            (response,) = await _scored(subject, [request])
            _require_scores(subject, weights, request, response, f"scored again from token {start} on")
    ids = token_ids[:_FEW_SCORED]
    request = _request(subject, ids, 1, top_k=most, num_candidates=max(most, _NUM_CANDIDATES))
    (response,) = await _scored(subject, [request])
    _require_scores(subject, weights, request, response, f"with {most} likeliest tokens")


@check("E-83", "updates scoring", deadline_s=60)
@look_at("whether cached prefixes, or whole answers, are kept across an update for score requests")
async def scores_after_an_update(subject: EndpointSubject) -> None:
    """After an update of any kind, even to a version that was served before, tokens that were scored or sampled before
    are scored by the new weights alone, and version spans name the new version."""
    token_ids, chain = subject.prompt(min(_SEEN, subject.context_len - 1), seed=22), UpdateChain(subject)
    policies, kinds = subject.capabilities.in_flight_policies, supported_kinds(subject, turn=1)
    for i in range(max(len(kinds), len(policies) + 1)):
        kind, policy = kinds[i % len(kinds)], policies[i % len(policies)]
        await subject.generate(token_ids[:-1], max_tokens=1)
        (_,) = await _scored(subject, [_request(subject, token_ids, 1)])
        weights = await chain.publish(kind, policy)
        for start in (1, len(token_ids) - 2):
            request = _request(subject, token_ids, start)
            (response,) = await _scored(subject, [request])
            what = f"after {kind.name} under {policy}, from token {start} on"
            _require_scores(subject, weights, request, response, what)
            versions = {span.version for span in response.version_spans}
            require(versions == {subject.publisher.version}, f"{what}, spans name the versions {sorted(versions)}")
    subject.publisher.lose_group()
    other = subject.reference.perturbed("B", seed=3)
    another = subject.another_publisher()
    again = _request(subject, token_ids, 1)
    for weights, what in ((other, "of another run"), (subject.reference.weights, "with other weights")):
        await another.publish(weights, version=subject.publisher.version)
        (response,) = await _scored(subject, [again])
        _require_scores(subject, weights, again, response, f"after the version served was published again, {what}")


@check("E-84", "updates scoring", deadline_s=90)
@look_at("when the version of an answer is read: it must be the one whose weights computed the logits")
async def scores_during_updates(subject: EndpointSubject) -> None:
    """While weights change, each score is that of the version that its span names, and versions that a client sees
    never decrease."""
    chain, kinds = UpdateChain(subject), supported_kinds(subject)
    policy = subject.pausing_policies()[0]
    is_over = False
    answers: list[list[tuple[ScoreRequest, ScoreResponse]]] = [[] for _ in range(_NUM_SCORERS)]

    async def score(number: int) -> None:
        token_ids = subject.prompt(subject.context_len - 1, seed=30 + number)
        while not is_over:
            request = _request(subject, token_ids, len(token_ids) - 8)
            (response,) = await _scored(subject, [request])
            answers[number].append((request, response))

    scorers = [subject.begin(score(number)) for number in range(_NUM_SCORERS)]
    for i in range(_NUM_UPDATES):
        num_before = sum(map(len, answers))
        sent = await chain.send(kinds[2 * i % len(kinds)], policy)
        async with held_up(subject):
            await chain.commit(sent)
        while sum(map(len, answers)) < num_before + _NUM_SCORERS:
            if failed := [task for task in scorers if task.done()]:
                failed[0].result()
            await asyncio.sleep(0.005)
    is_over = True
    await asyncio.gather(*scorers)
    published = chain.published
    for number, of_one in enumerate(answers):
        newest = 0
        for request, response in of_one:
            for span in response.version_spans:
                require(span.version >= newest, f"client {number} saw version {span.version} after {newest}")
                newest = span.version
                if span.version not in published:
                    fail(f"a span names version {span.version}, which was never published")
            require_scores_of_spans(subject, published, request, response)
    subject.note(scored=sum(map(len, answers)), versions=len(published))


@check("E-85", "scoring")
@look_at("where score requests are validated: before they reach the engine")
async def refused_scores(subject: EndpointSubject) -> None:
    """A score request that does not fit is refused with InvalidRequestError, and one that asks for more than is
    supported is refused with UnsupportedError; neither disturbs anything."""
    can = subject.capabilities
    longest = can.max_model_len
    for token_ids, what in (
        (subject.prompt(longest + 1), f"{longest + 1} tokens in a context of {longest}"),
        ((1, can.vocab_size), f"token id {can.vocab_size} in a vocabulary of {can.vocab_size}"),
    ):
        request = plain_request(subject, token_ids, 1)
        await subject.require_raises(_endpoint(subject).score(request), InvalidRequestError, what)
    request = plain_request(subject, subject.prompt(), 1).model_copy(update={"top_k": can.max_top_k + 1})
    refusals = (UnsupportedError, InvalidRequestError)  # the latter if no message may request so many
    await subject.require_raises(_endpoint(subject).score(request), refusals, f"top_k {can.max_top_k + 1}")
    if can.candidates:
        request = plain_request(subject, (1, 2), 1).model_copy(update={"candidates": ((3, can.vocab_size),)})
        what = f"candidate {can.vocab_size} in a vocabulary of {can.vocab_size}"
        await subject.require_raises(_endpoint(subject).score(request), InvalidRequestError, what)
    else:
        request = plain_request(subject, (1, 2), 1).model_copy(update={"candidates": ((3,),)})
        await subject.require_raises(_endpoint(subject).score(request), UnsupportedError, "candidates")
    await subject.require_state(EndpointState.READY, "after the refusals")
    largest = can.vocab_size - 1
    request = plain_request(subject, (*subject.prompt(), largest), 1)
    if can.candidates:
        request = request.model_copy(update={"candidates": ((largest,),) * request.num_scored})
    try:
        (response,) = await _scored(subject, [request])
    except InvalidRequestError as error:
        fail(f"a score request with token id {largest} in a vocabulary of {can.vocab_size} was refused: {error}")
    subject.note(scored=len(response.logprobs))


@check("E-86")
@look_at("whether the request is answered by something other than a score")
async def no_scores(subject: EndpointSubject) -> None:
    """Where scoring is not supported, a score request is refused with UnsupportedError."""
    if subject.capabilities.scoring:
        skip("scoring is supported")
    endpoint = subject.endpoint
    if isinstance(endpoint, ScoringEndpoint):
        await subject.require_raises(
            endpoint.score(plain_request(subject, subject.prompt(), 1)), UnsupportedError, "a score request"
        )


async def require_right_scores(
    subject: EndpointSubject,
    token_ids: Sequence[int],
    start: int,
    what: str,
    weights: ReferenceWeights | None = None,
) -> None:
    """Require that each token from ``start`` on has the score that ``weights`` (by default, the checkpoint's) give it
    in the context of the preceding tokens.
    """
    request = _request(subject, token_ids, start)
    (response,) = await _scored(subject, [request])
    _require_scores(subject, weights or subject.reference.weights, request, response, what)


async def score_the_end(subject: EndpointSubject, token_ids: Sequence[int]) -> tuple[ScoreRequest, ScoreResponse]:
    """Return a score request for the last tokens of a sequence, and its answer."""
    request = _request(subject, token_ids, max(1, len(token_ids) - _FEW_SCORED))
    (response,) = await _scored(subject, [request])
    return request, response


def plain_request(subject: EndpointSubject, token_ids: Sequence[int], start: int) -> ScoreRequest:
    """Return a score request without alternatives or candidates."""
    return ScoreRequest(request_id=subject.request().request_id, token_ids=tuple(token_ids), start=start)


def _request(
    subject: EndpointSubject,
    token_ids: Sequence[int],
    start: int,
    *,
    top_k: int = _TOP_K,
    num_candidates: int = _NUM_CANDIDATES,
    seed: int = 1000,
) -> ScoreRequest:
    """Return a request for everything that the endpoint supports, with random candidates."""
    can, num = subject.capabilities, len(token_ids) - start
    candidates: tuple[tuple[int, ...], ...] = ()
    if can.candidates:
        candidates = tuple(subject.prompt(num_candidates, seed=seed + i) for i in range(num))
    return ScoreRequest(
        request_id=subject.request().request_id,
        token_ids=tuple(token_ids),
        start=start,
        top_k=min(top_k, can.max_top_k),
        candidates=candidates,
    )


def _endpoint(subject: EndpointSubject) -> ScoringEndpoint:
    endpoint = subject.endpoint
    if not isinstance(endpoint, ScoringEndpoint):
        fail(f"scoring is reported as supported, but {type(endpoint).__name__} has no score")
    return endpoint


async def _scored(subject: EndpointSubject, requests: Sequence[ScoreRequest]) -> list[ScoreResponse]:
    responses = await run_together(*(_endpoint(subject).score(request) for request in requests))
    for request, response in zip(requests, responses, strict=True):
        found = (response.request_id, response.start, len(response.logprobs))
        wanted = (request.request_id, request.start, request.num_scored)
        require(found == wanted, f"a request with (id, start, number of tokens) {wanted} was answered with {found}")
        for name, num in (("top_token_ids", request.top_k), ("candidate_logprobs", request.num_candidates)):
            shape = [len(row) for row in getattr(response, name)]
            require(
                shape == ([num] * request.num_scored if num else []),
                f"{name} has rows of the lengths {shortened(shape, 8)}",
            )
    return responses


def require_scores_of_spans(
    subject: EndpointSubject,
    published: Mapping[int, ReferenceWeights],
    request: ScoreRequest,
    response: ScoreResponse,
) -> None:
    """Require that tokens are scored by the weights of the versions that the answer names."""
    for span in response.version_spans:
        weights = published[span.version]
        logprobs_NV = _logprobs(subject, weights, request)
        gap = _gap(subject, weights, logprobs_NV, request, response, span.start, span.end)
        require(
            gap <= subject.tolerance,
            f"scores that name version {span.version} differ by up to {gap:.3g} from those of its weights",
        )


def _require_scores(
    subject: EndpointSubject, weights: ReferenceWeights, request: ScoreRequest, response: ScoreResponse, what: str
) -> None:
    """Require that every value in a response matches what ``weights`` give."""
    logprobs_NV = _logprobs(subject, weights, request)
    gap = _gap(subject, weights, logprobs_NV, request, response)
    subject.note(**{f"largest logprob difference, {what}": gap})
    require(
        gap <= subject.tolerance,
        f"{what}, scores differ by up to {gap:.3g} from those of weights {weights.label} (tolerance "
        f"{subject.tolerance:g})",
    )
    for row_V, found in zip(logprobs_NV, response.top_logprobs, strict=False):
        best = row_V.topk(len(found)).values.tolist()
        require(list(found) == sorted(found, reverse=True), f"{what}, the likeliest tokens are not in order: {found}")
        worst = max(abs(a - b) for a, b in zip(found, best, strict=True))
        require(
            subject.is_coarse or worst <= subject.tolerance,
            f"{what}, the {len(found)} likeliest tokens have logprobs {found}, but the reference's are {best}",
        )


def _logprobs(
    subject: EndpointSubject,
    weights: ReferenceWeights,
    request: ScoreRequest,
    reference: ReferenceCheckpoint | None = None,
    dtype: str = "float32",
) -> torch.Tensor:
    """Return the reference's logprobs at the position of each scored token, computed in ``dtype``, float64 [N, V]."""
    ids, start = request.token_ids, request.start
    return distribution((reference or subject.reference).logits(weights, ids[:start], ids[start:], dtype=dtype))


def _gap(
    subject: EndpointSubject,
    weights: ReferenceWeights,
    logprobs_NV: torch.Tensor,
    request: ScoreRequest,
    response: ScoreResponse,
    start: int = 0,
    end: int | None = None,
) -> float:
    """Return the largest difference between a response's logprobs and those of the reference.

    The logprobs of scored tokens, likeliest tokens and candidates are compared with ``logprobs_NV``, the reference's
    logprobs under ``weights``. In 16 bits, alternatives are left out, and so are unlikely tokens whose logprobs under
    these weights are changed too much by rounding alone: by the rounding of activations or, since that may leave a
    logprob unchanged by chance, by other roundings of the weights.
    """
    part = slice(start, end)
    scored_N = chosen(logprobs_NV, request.token_ids[request.start :])[part]
    found_N = torch.tensor(response.logprobs, dtype=torch.float64)[part]
    if subject.is_coarse:
        dtype, ids = subject.capabilities.dtype, request.token_ids[request.start :]
        rounded = (
            chosen(_logprobs(subject, weights, request, *it), ids)[part] for it in roundings(subject.reference, dtype)
        )
        most = 1.0 if len(scored_N) < _FEW else _MOVED
        return unexplained_difference(found_N, scored_N, rounded, subject.tolerance, dtype, most)
    gaps = [subject.difference(found_N.tolist(), scored_N)]
    rows = zip(logprobs_NV, response.top_token_ids, response.top_logprobs, strict=False)
    gaps += [subject.difference(found, row_V[list(ids)]) for row_V, ids, found in itertools.islice(rows, start, end)]
    asked = zip(logprobs_NV, request.candidates, response.candidate_logprobs, strict=False)
    gaps += [subject.difference(found, row_V[list(ids)]) for row_V, ids, found in itertools.islice(asked, start, end)]
    return max(gaps)

"""Level ``partials``: requests that are aborted and then continued where they ended.

A second request that began later and has been answered shows how far the aborted request must have progressed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from inflight.conformance.checks import check, fail, look_at, require, skip
from inflight.conformance.endpoint.aftermath import until_running
from inflight.conformance.endpoint.forms import assembled
from inflight.conformance.endpoint.pauses import start_recomputed_later
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.endpoint.tokens import fill_slots
from inflight.conformance.endpoint.versions import check_spans, publish_next
from inflight.conformance.endpoint.waiting import GRACE_S, SLACK_S, until, within
from inflight.conformance.reference import ReferenceWeights
from inflight.rollouts import continuation, joined
from inflight.wire import (
    AbortRequests,
    Completion,
    CompletionChunk,
    GenerateRequest,
    GenerateResponse,
    InFlightPolicy,
    VersionSpan,
)
from inflight.wire import check_spans as spans_cover

LEVEL = "partials"
_NUM_TOKENS = 600
"""Number of tokens that a request asks for: more than it has sampled when it is aborted."""
_SEED = 67
"""Seed of the aborted request. No other check uses it, because an engine with drafts could otherwise repeat an earlier
request in a few steps."""
_OTHER_SEED = 68
"""Seed of the request that is answered meanwhile. No other check uses it either, for the same reason."""
_SAMPLED = 64
"""Number of tokens that the request must have when it is aborted."""
_NUM_LATE = 8
"""How many of these tokens may be missing: an engine drops the results of the steps that are in flight when the abort
arrives."""
_NUM_TRIES = 4
_PAUSING = (InFlightPolicy.KEEP, InFlightPolicy.RECOMPUTE)
_MEANWHILE = 12
"""Number of tokens of another request, which runs to let time pass between two events."""
_HALF_SEED, _HALF_TRIES = 76, 6
"""First seed and number of attempts to abort a request when exactly one of its two completions has ended."""
_REPORTED_S = 1.0
"""How long num_running may take to change, because an engine may update it only occasionally."""
_MAX_SLOTS = 256
_LIMIT_S = 20.0
_WHOLE_S = 60.0
"""Time limit for a whole request of `_NUM_TOKENS`, on any engine."""
_LEAST_S, _TIMES_SLOWER = 2.0, 5.0
"""Time limit for another request while others fill the endpoint: this many seconds, plus this many times the seconds
that it took before any request was aborted."""


@check("E-67", "partial_rollouts updates", deadline_s=60)
@look_at(
    "what the engine reports of a request that it aborts, and whether the continuation finds its prompt in a prefix "
    "cache that older weights filled"
)
async def continues_under_new_weights(subject: EndpointSubject) -> None:
    """A request that is aborted returns the tokens that it has, with their logprobs, and can be continued after an
    update: the continuation is sampled from the new weights, which also compute its keys and values. This also
    holds if the update came before the abort and the request kept older keys and values until then."""
    _require_two_slots(subject)
    if subject.capabilities.streaming:
        await _abort_a_stream(subject)
    weights, other = subject.reference.weights, subject.reference.perturbed("B")
    before = (await subject.endpoint.weight_version()).version
    ((request, answer),) = await subject.start_running(1, max_tokens=_length(subject), seed=_SEED)
    await subject.generate(max_tokens=_SAMPLED, seed=_OTHER_SEED)
    first = await _aborted(subject, request, answer)
    num = len(first.token_ids)
    words = f"an aborted request has {num} tokens, and one that began later already had {_SAMPLED}"
    require(num >= _SAMPLED - _NUM_LATE, words)
    _require_version(first, before, "the first part")
    subject.require_sampled_from(weights, request, first, "a request that was aborted")
    await subject.publisher.publish(other)
    rest = continuation(request, first, f"{request.request_id}-rest")
    second = (await subject.endpoint.generate(rest)).completions[0]
    _require_version(second, subject.publisher.version, "the continuation")
    subject.require_sampled_from(other, rest, second, "its continuation")
    whole = joined(first, second)
    subject.note(tokens=(num, len(second.token_ids)), spans=_short(whole.version_spans))
    require(
        (whole.finish_reason, len(whole.token_ids)) == ("length", request.sampling.max_tokens),
        f"both parts have {len(whole.token_ids)} of {request.sampling.max_tokens} tokens: {whole.finish_reason}",
    )
    if InFlightPolicy.KEEP in subject.capabilities.in_flight_policies:
        await _require_continued_afresh(subject, weights)


async def _require_continued_afresh(subject: EndpointSubject, weights: ReferenceWeights) -> None:
    """Require that a continuation uses none of the keys and values that its first part kept through an update, even if
    no further update follows."""
    ((request, answer),) = await subject.start_running(1, max_tokens=_length(subject), seed=_SEED)
    await subject.generate(max_tokens=_MEANWHILE, seed=_OTHER_SEED)
    await subject.publisher.publish(weights, in_flight=InFlightPolicy.KEEP)
    await subject.generate(max_tokens=_MEANWHILE, seed=_OTHER_SEED)
    first = (await _end(subject, request, answer)).completions[0]
    if first.finish_reason != "abort":
        return  # the request had already ended: the update took long, or the endpoint is fast
    rest = continuation(request, first, f"{request.request_id}-afresh")
    second = (await subject.endpoint.generate(rest)).completions[0]
    what = "the continuation, without a further update, of a request that ran through an update under keep"
    subject.require_sampled_from(weights, rest, second, what)


async def _abort_a_stream(subject: EndpointSubject) -> None:
    """Require that an aborted stream ends immediately, with the tokens that it has so far."""
    request = subject.request(max_tokens=_length(subject), seed=_SEED, stream=True)
    chunks: list[CompletionChunk] = []

    async def read() -> None:
        async for chunk in subject.streaming.generate_stream(request):
            chunks.append(chunk)

    reading = subject.begin(read())
    await until(lambda: len(chunks) > _MEANWHILE, _LIMIT_S, "a stream has no tokens", [reading])
    await within(_LIMIT_S, subject.aborting.abort_requests(_named(request)), "abort_requests of a stream")
    await within(SLACK_S, reading, "a stream that was aborted")
    completion = assembled(0, chunks)
    reason, num = completion.finish_reason, len(completion.token_ids)
    require(
        reason == "abort" and num < _length(subject),
        f"a stream that was aborted ended with finish reason {reason!r} after {num} tokens",
    )
    subject.require_sampled_from(subject.reference.weights, request, completion, "a stream that was aborted")


@check("E-68", "partial_rollouts updates spans", deadline_s=90)
@look_at("whether the labels and logprobs of a request that is aborted are those recorded at each token")
async def spans_of_both_parts(subject: EndpointSubject) -> None:
    """In each part of a request that was aborted and continued, every token names the version that sampled it and has
    that version's logprob, whether weights change within a part or between the parts."""
    _require_two_slots(subject)
    for policy in subject.pausing_policies():
        for _ in range(_NUM_TRIES):  # on a busy machine, an update may arrive before a part has begun
            published: dict[int, ReferenceWeights] = {}
            await publish_next(subject, published)
            ((request, answer),) = await subject.start_running(1, max_tokens=_length(subject), seed=_SEED)
            await subject.generate(max_tokens=_MEANWHILE)
            await publish_next(subject, published, policy)
            await subject.generate(max_tokens=_MEANWHILE)
            first = await _aborted(subject, request, answer)
            await publish_next(subject, published)
            rest = continuation(request, first, f"{request.request_id}-rest")
            continuing = subject.begin(subject.endpoint.generate(rest))
            await subject.generate(max_tokens=_MEANWHILE)
            await publish_next(subject, published, policy)
            second = (await continuing).completions[0]
            whole = joined(first, second)
            subject.note(**{f"spans under {policy}": (_short(first.version_spans), _short(second.version_spans))})
            for asked, part in ((request, first), (rest, second), (request, whole)):
                check_spans(subject, asked, part, published)
            num_spans = len(first.version_spans), len(second.version_spans)
            if min(num_spans) > 1:
                break
        require(min(num_spans) > 1, f"no update under {policy} happened during one of the parts: {num_spans} spans")


@check("E-69", "partial_rollouts model", deadline_s=150)
@look_at(
    "whether requests are matched by their whole ids, and whether those that the engine has queued, for the first time "
    "or to be recomputed, or that have not reached it yet, end too"
)
async def only_those_requests_end(subject: EndpointSubject) -> None:
    """Once abort_requests has returned, no part of these requests is running, even if they were waiting to be
    recomputed; completions that were waiting for the first time end without a token, other requests continue, and ids
    that are not running are ignored, even if requests with these ids arrive later."""
    num_slots = subject.capabilities.max_concurrent_sequences
    _require_two_slots(subject)
    if num_slots > _MAX_SLOTS:
        skip(f"{num_slots} sequences run at a time, and the kit fills at most {_MAX_SLOTS} slots")
    before_s = await fill_slots(subject, "before any request was aborted", _LIMIT_S)
    ((other, answer),) = await subject.start_running(1, max_tokens=_length(subject), seed=_SEED)
    several = subject.request(n=2 * num_slots, max_tokens=subject.remaining_tokens(), seed=1)
    alike = f"{several.request_id}0"  # begins with the id of `several`
    similar = subject.request(max_tokens=_length(subject)).model_copy(update={"request_id": alike})
    answers = [subject.begin(subject.endpoint.generate(request)) for request in (similar, several)]
    await until_running(subject, num_slots, _LIMIT_S, f"fewer than {num_slots} sequences ran")
    for completion in (await _end(subject, several, answers[1], "never-asked-for")).completions:
        reason = completion.finish_reason
        require(
            reason == "abort",
            f"completion {completion.index} of a request that was aborted ended with finish reason {reason!r}",
        )
    await within(
        SLACK_S, subject.aborting.abort_requests(_named(several)), "abort_requests of a request that has ended"
    )
    await _until_at_most(subject, 2)
    await _abort_several(subject, "never-asked-for")
    await _require_sampled(subject, "never-asked-for")
    await _abort_half_done(subject)
    if subject.missing("updates") is None:
        await _abort_during_a_pause(subject)
        if InFlightPolicy.RECOMPUTE in subject.capabilities.in_flight_policies:
            await _abort_while_recomputed(subject)
    for request, task in ((other, answer), (similar, answers[0])):
        (completion,) = (
            await within(_WHOLE_S, task, "a request with an id similar to that of an aborted one")
        ).completions
        require(completion.finish_reason == "length", f"a request that was not aborted: {completion.finish_reason}")
        subject.require_sampled_from(subject.reference.weights, request, completion, "a request that was not aborted")
    await fill_slots(subject, f"after {2 * num_slots} completions were aborted", _LEAST_S + _TIMES_SLOWER * before_s)


async def _abort_several(subject: EndpointSubject, unknown: str) -> None:
    """Require that one call aborts several requests, even if the first id belongs to no running request and another is
    named twice."""
    requests = [subject.request(max_tokens=subject.remaining_tokens(), seed=70 + i) for i in range(3)]
    answers = [subject.begin(subject.endpoint.generate(request)) for request in requests]
    await subject.generate(max_tokens=_MEANWHILE)
    named = [request.request_id for request in requests]
    ids = AbortRequests(request_ids=(unknown, *named, named[0]))
    await within(_LIMIT_S, subject.aborting.abort_requests(ids), "abort_requests of several requests")
    for answer in answers:
        (completion,) = (await within(SLACK_S, answer, "one of several requests that were aborted")).completions
        words = f"one of several requests that were aborted ended with {completion.finish_reason!r}"
        require(completion.finish_reason == "abort", words)


async def _require_sampled(subject: EndpointSubject, aborted: str) -> None:
    """Require that a request whose id was aborted before it was sent is sampled like any other."""
    request = subject.request(max_tokens=_MEANWHILE).model_copy(update={"request_id": aborted})
    answering = subject.endpoint.generate(request)
    (completion,) = (await within(_LIMIT_S, answering, "a request whose id was aborted before it was sent")).completions
    num, reason = len(completion.token_ids), completion.finish_reason
    require(
        (num, reason) == (_MEANWHILE, "length"),
        f"a request whose id was aborted before it was sent ended with {reason!r} and {num} of {_MEANWHILE} tokens",
    )


async def _abort_while_recomputed(subject: EndpointSubject) -> None:
    """Require that aborting requests that wait to be recomputed ends them.

    After the update, the engine has to recompute more tokens than it computes in a step, so that some requests wait.
    """
    await subject.publisher.form_group()
    running = await start_recomputed_later(subject, subject.capabilities.max_concurrent_sequences - 2)
    await subject.publisher.publish(subject.reference.weights, in_flight=InFlightPolicy.RECOMPUTE)
    ids = AbortRequests(request_ids=tuple(request.request_id for request, _ in running))
    when = "just after an update under recompute"
    await within(_LIMIT_S, subject.aborting.abort_requests(ids), f"abort_requests {when}")
    for _, answer in running:
        (completion,) = (await within(SLACK_S, answer, f"a request that was aborted {when}")).completions
        reason, num = completion.finish_reason, len(completion.token_ids)
        require(reason == "abort", f"a request that was aborted {when} ended with {reason!r} after {num} tokens")
    await asyncio.sleep(GRACE_S)  # none of them may start again
    await _until_at_most(subject, 2, f"{len(running)} requests were aborted {when}")


async def _abort_during_a_pause(subject: EndpointSubject) -> None:
    """Require that requests that are aborted during a pause end no later than the pause."""
    policy = next((it for it in _PAUSING if it in subject.capabilities.in_flight_policies), None)
    if policy is None:
        return
    publisher = subject.publisher
    await publisher.form_group()
    request = subject.request(max_tokens=subject.remaining_tokens(), seed=75)
    answer = subject.begin(subject.endpoint.generate(request))
    await subject.generate(max_tokens=_MEANWHILE)
    update = await publisher.request(subject.reference.weights, in_flight=policy)
    aborting = subject.begin(subject.aborting.abort_requests(_named(request)))
    await asyncio.sleep(GRACE_S)
    await publisher.abort(update)
    await within(_LIMIT_S, aborting, "abort_requests during a pause")
    (completion,) = (await within(SLACK_S, answer, "a request that was aborted during a pause")).completions
    reason, num = completion.finish_reason, len(completion.token_ids)
    require(reason == "abort", f"a request that was aborted during a pause ended with {reason!r} after {num} tokens")


async def _abort_half_done(subject: EndpointSubject) -> None:
    """Require that a completion that had ended when its request was aborted keeps its finish reason."""
    if not subject.capabilities.seeds or subject.capabilities.max_concurrent_sequences < 4:
        return
    for seed in range(_HALF_SEED, _HALF_SEED + _HALF_TRIES):
        asked: dict[str, Any] = {"n": 2, "seed": seed, "max_tokens": subject.remaining_tokens()}
        free = await subject.endpoint.generate(subject.request(**{**asked, "max_tokens": 2 * _SAMPLED}))
        first, second = (completion.token_ids for completion in free.completions)
        if (stop := next((token for token in first[:_MEANWHILE] if token not in second), None)) is None:
            continue
        request = subject.request(**asked, stop_token_ids=(stop,))
        answer = subject.begin(subject.endpoint.generate(request))
        await subject.generate(max_tokens=_SAMPLED, seed=_OTHER_SEED)
        completions = (await _end(subject, request, answer)).completions
        has_stopped = [completion.token_ids[-1:] == (stop,) for completion in completions]
        for completion, is_stop in zip(completions, has_stopped, strict=True):
            require(
                completion.finish_reason == ("stop" if is_stop else "abort"),
                f"completion {completion.index} of a request that was aborted has {len(completion.token_ids)} tokens, "
                f"of which the last one {'is' if is_stop else 'is not'} its stop token, and ended with "
                f"{completion.finish_reason!r}",
            )
        if len(set(has_stopped)) == 2:
            return
    subject.note(half_done=f"in {_HALF_TRIES} attempts, no request was aborted when only one of its completions ran")


def _require_two_slots(subject: EndpointSubject) -> None:
    if subject.capabilities.max_concurrent_sequences < 2:
        skip("one sequence runs at a time")


def _length(subject: EndpointSubject) -> int:
    return min(_NUM_TOKENS, subject.remaining_tokens() // 2)


def _named(request: GenerateRequest, *others: str) -> AbortRequests:
    return AbortRequests(request_ids=(request.request_id, *others))


async def _end(
    subject: EndpointSubject, request: GenerateRequest, answer: asyncio.Task[GenerateResponse], *others: str
) -> GenerateResponse:
    """Abort a request, and ``others``, which are not running; return the request's answer, which must arrive
    immediately."""
    await within(_LIMIT_S, subject.aborting.abort_requests(_named(request, *others)), "abort_requests")
    response = await within(SLACK_S, answer, "a request that was aborted")
    for completion in response.completions:
        try:
            spans_cover(completion.version_spans, len(completion.token_ids))
        except ValueError as error:
            fail(f"a request that was aborted: {error}")
        num_logprobs, num_tokens = len(completion.logprobs), len(completion.token_ids)
        require(num_logprobs == num_tokens, f"{num_tokens} tokens came with {num_logprobs} logprobs")
    return response


async def _aborted(
    subject: EndpointSubject, request: GenerateRequest, answer: asyncio.Task[GenerateResponse]
) -> Completion:
    """Return what a running request had sampled by the time it was aborted."""
    (completion,) = (await _end(subject, request, answer)).completions
    num, most = len(completion.token_ids), request.sampling.max_tokens
    words = (
        f"a request that was aborted ended with finish reason {completion.finish_reason!r} and {num} of {most} tokens"
    )
    require(completion.finish_reason == "abort" and num < (most or 0), words)
    return completion


def _require_version(completion: Completion, version: int, what: str) -> None:
    named = [span.version for span in completion.version_spans]
    require(named == [version], f"{what} was sampled only under version {version}, but names {named}")


async def _until_at_most(subject: EndpointSubject, num: int, when: str = "a request was aborted") -> None:
    deadline = time.monotonic() + _REPORTED_S
    while (found := (await subject.endpoint.weight_version()).num_running) > num:
        words = f"{_REPORTED_S:g} s after {when}, {found} sequences run, but only {num} requests were not aborted"
        require(time.monotonic() < deadline, words)
        await asyncio.sleep(0.005)


def _short(spans: Sequence[VersionSpan]) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in spans]

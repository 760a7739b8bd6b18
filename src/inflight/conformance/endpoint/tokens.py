"""Level ``tokens``: ids and logprobs, refusals, concurrent requests, and callers that disconnect."""

from __future__ import annotations

import asyncio
import math
import time
from functools import partial
from typing import Any

from inflight.base.shortened import shortened
from inflight.base.tasks import cancel_and_wait
from inflight.conformance.checks import check, fail, look_at, require, skip
from inflight.conformance.endpoint.aftermath import until_running
from inflight.conformance.endpoint.repeats import require_repeated
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.endpoint.waiting import within
from inflight.errors import InvalidRequestError
from inflight.wire import EndpointState, GenerateRequest, GenerateResponse, check_spans

LEVEL = "tokens"
_GONE_S = 5.0
"""Maximum time from a caller's disconnection until no part of its request is running, in seconds."""
_MOST_COMPLETIONS = 1024
_MAX_SLOTS = 256
_LONGEST_ID = 256
"""Maximum number of characters in the id of a request."""
_MIXED: tuple[dict[str, Any], ...] = (
    {"max_tokens": 1},
    {"temperature": 0.0},
    {"top_k": 2},
    {"top_p": 0.4},
    {"temperature": 1.5},
    {"min_p": 0.3},
    {"top_k": 40},
    {},
)
"""Sampling parameters of requests that run at the same time."""
_LONG, _SHORT = 512, 4
"""Number of tokens of the requests that fill the endpoint, and of the additional request."""
_ADMITTED_S = 0.2
"""How long sent requests may take to be admitted."""
_TIMES_SLOWER = 5.0
_FIRST_S = 20.0
"""Time limit for the first attempt: an engine may compile while it is filled."""


@check("E-10", "model", deadline_s=40)
@look_at("whether ids pass through text, whether a first token is added, and which step a logprob is read from")
async def ids_as_sent(subject: EndpointSubject) -> None:
    """The token ids of a prompt are used unchanged: logprobs are those of the reference after the same ids."""
    # No text would be encoded as these ids.
    weights = subject.reference.weights
    prompts = [subject.prompt(length, seed=length) for length in (1, 2, 3, 12, 40)]
    prompts.append(tuple(range(subject.capabilities.vocab_size - 8, subject.capabilities.vocab_size)))
    prompts.append((subject.prompt(1, seed=5)[0],) * 9)
    for prompt in prompts:
        gap = subject.gap(weights, *await subject.ask(prompt[: subject.context_len - 8]))
        subject.note(**{f"logprob difference after {len(prompt)} ids from {prompt[0]}": gap})
        require(
            gap <= subject.tolerance,
            f"after the {len(prompt)} ids {list(prompt[:8])}, logprobs differ by up to {gap:.3g} from the reference's "
            f"(tolerance {subject.tolerance:g})",
        )


@check("E-11", look_at="how the answer is assembled from the engine's output")
async def one_logprob_per_token(subject: EndpointSubject) -> None:
    """Every sampled token is listed with one finite logprob and covered by a version span, under the request's id."""
    request = subject.request(n=3, max_tokens=32)
    response = await subject.endpoint.generate(request)
    version = (await subject.endpoint.weight_version()).version
    _require_id(request, response)
    indexes = [completion.index for completion in response.completions]
    require(indexes == [0, 1, 2], f"completions of n=3 have the indexes {indexes}")
    for completion in response.completions:
        ids, logprobs = completion.token_ids, completion.logprobs
        require(len(ids) == 32, f"{len(ids)} tokens were returned for max_tokens=32 without an end of sequence")
        require(len(logprobs) == len(ids), f"{len(ids)} tokens came with {len(logprobs)} logprobs")
        outside = [i for i in ids if not 0 <= i < subject.capabilities.vocab_size]
        require(not outside, f"token ids {shortened(outside, 4)} are outside the vocabulary")
        wrong = [p for p in logprobs if not (math.isfinite(p) and p <= 0)]
        require(not wrong, f"{shortened(wrong, 4)} are not logarithms of probabilities")
        try:
            check_spans(completion.version_spans, len(ids))
        except ValueError as error:
            fail(str(error))
        versions = {span.version for span in completion.version_spans}
        require(versions == {version}, f"spans name versions {sorted(versions)}, but version {version} is served")
        require(completion.finish_reason == "length", f"the finish reason is {completion.finish_reason!r}, not length")
    subject.note(completions=len(indexes), tokens=sum(len(c.token_ids) for c in response.completions))


@check("E-22", deadline_s=60)
@look_at("where requests are validated: before the engine truncates them or looks them up by id")
async def refusals(subject: EndpointSubject) -> None:
    """A request that does not fit, or whose id is in use, is refused with InvalidRequestError and disturbs nothing."""
    longest, refusal = subject.capabilities.max_model_len, InvalidRequestError
    ((running, answer),) = await subject.start_running(1, max_tokens=min(300, subject.remaining_tokens()))
    twice = subject.request(max_tokens=4).model_copy(update={"request_id": running.request_id})
    for what in ("the id of a running request, used again,", "a running request's id, used a third time,"):
        await subject.require_raises(subject.endpoint.generate(twice), refusal, what)
    if subject.capabilities.streaming:
        stream = _read(subject, twice.model_copy(update={"stream": True}))
        await subject.require_raises(stream, refusal, "a stream with the id of a running request")
    for length, max_tokens in ((longest, 1), (longest + 100, 1), (longest + 100, None), (12, longest), (12, 10**6)):
        request = subject.request(subject.prompt(length), max_tokens=max_tokens)
        what = f"a prompt of {length} with max_tokens={max_tokens} in a context of {longest}"
        await subject.require_raises(subject.endpoint.generate(request), refusal, what)
    await subject.require_state(EndpointState.READY, "after the refusals")
    completion = (await answer).completions[0]
    num, num_asked = len(completion.token_ids), running.sampling.max_tokens
    require(num == num_asked, f"the request that ran during the refusals has {num} of {num_asked} tokens")
    again = await subject.endpoint.generate(twice)
    subject.note(running=num, served_again=len(again.completions[0].token_ids))
    require(len(again.completions[0].token_ids) == 4, "an id whose request had ended was not served again")
    await _require_id_is_free(subject, request.request_id, "a request that did not fit was refused")
    if subject.capabilities.streaming:
        request = subject.request(max_tokens=subject.remaining_tokens(), seed=77, stream=True)
        reader = subject.begin(_read(subject, request))
        await until_running(subject, 1, _FIRST_S, "a stream was not the only request that ran")
        twice = subject.request(max_tokens=4).model_copy(update={"request_id": request.request_id})
        await subject.require_raises(subject.endpoint.generate(twice), refusal, "the id of a stream, used again,")
        twice = twice.model_copy(update={"stream": True})
        await subject.require_raises(_read(subject, twice), refusal, "a second stream with the id of a stream")
        await asyncio.sleep(_ADMITTED_S)
        reason = reader.result() if reader.done() else "length"  # a fast endpoint may have filled its context
        require(reason == "length", f"a stream whose id was used again ended with {reason!r}")
        await cancel_and_wait(reader)
    await _require_waiting_id_in_use(subject)
    await _require_whole_ids(subject)


async def _require_whole_ids(subject: EndpointSubject) -> None:
    """Require that two requests are kept apart if their ids have the maximum length and differ only at the end."""
    requests = [
        it.model_copy(update={"request_id": it.request_id.rjust(_LONGEST_ID, "-")})
        for it in (subject.request(max_tokens=16, seed=i) for i in range(2))
    ]
    try:
        responses = await asyncio.gather(*(subject.endpoint.generate(request) for request in requests))
    except InvalidRequestError as error:
        fail(f"of two concurrent requests with ids of {_LONGEST_ID} characters, one was refused: {error}")
    for request, response in zip(requests, responses, strict=True):
        _require_id(request, response)


async def _require_waiting_id_in_use(subject: EndpointSubject) -> None:
    """Require that the id of a request that waits for a slot cannot be used again, and that the request is answered."""
    num_slots = subject.capabilities.max_concurrent_sequences
    if num_slots > _MAX_SLOTS:
        return
    others = await subject.start_running(1, n=2 * num_slots)
    waiting = subject.request(max_tokens=_SHORT)
    answer = subject.begin(subject.endpoint.generate(waiting))
    await asyncio.sleep(_ADMITTED_S)
    if not answer.done():
        call = subject.endpoint.generate(waiting.model_copy())
        await subject.require_raises(call, InvalidRequestError, "the id of a request that waits, used again,")
    await cancel_and_wait(*(task for _, task in others))
    num = len((await answer).completions[0].token_ids)
    require(num == _SHORT, f"a request whose id was used again while it waited has {num} of {_SHORT} tokens")


@check("E-25", deadline_s=60)
@look_at("whether a cancelled call or a closed connection aborts the request inside the engine")
async def a_caller_leaves(subject: EndpointSubject) -> None:
    """A request ends when its caller disconnects: a few seconds later, no part of it is running."""
    # With so many long completions, the request cannot have ended on its own.
    wanted = min(_MOST_COMPLETIONS, 4 * subject.capabilities.max_concurrent_sequences)
    ((request, answer),) = await subject.start_running(1, n=wanted)
    answer.cancel()
    await _require_idle(subject, "generate")
    await _require_id_is_free(subject, request.request_id, "the caller of its request disconnected")
    if subject.capabilities.streaming:
        request = subject.request(stream=True, n=wanted, max_tokens=subject.remaining_tokens())
        reader = subject.begin(_read(subject, request))
        while (await subject.endpoint.weight_version()).num_running == 0:
            require(not reader.done(), "a stream of thousands of tokens ended immediately")
            await asyncio.sleep(0.005)
        await cancel_and_wait(reader)
        await _require_idle(subject, "generate_stream")


@check("E-26", "model", deadline_s=60)
@look_at(
    "the attention mask and positions of a batch, sampling parameters of other requests in it, and how answers find "
    "their requests"
)
async def neighbours(subject: EndpointSubject) -> None:
    """Concurrent requests do not disturb one another: each gets its own answer, as if it were alone."""
    num_others = min(16, subject.capabilities.max_concurrent_sequences - 1)
    if num_others < 1:
        skip("one sequence runs at a time")
    prompts = [subject.prompt(length, seed=length) for length in (3, 12, 33)]
    alone = [await subject.generate(prompt, temperature=0.0, max_tokens=24) for prompt in prompts]
    others = await subject.start_running(num_others, max_tokens=160)
    requests = [subject.request(prompt, temperature=0.0, max_tokens=24) for prompt in prompts]
    responses = await asyncio.gather(*(subject.endpoint.generate(request) for request in requests))
    crowded = [response.completions[0] for response in responses]
    answered = [*zip(requests, responses, strict=True), *[(request, await task) for request, task in others]]
    largest = 0.0
    for request, response in answered:
        _require_id(request, response)
        gap = subject.gap(subject.reference.weights, request, response.completions[0])
        largest = max(largest, gap)
        words = f"of {len(answered)} concurrent requests, one has logprobs that are off by {gap:.3g}"
        require(gap <= subject.tolerance, words)
    subject.note(**{f"largest logprob difference of {len(answered)} concurrent requests": largest})
    require_repeated(subject, zip(alone, crowded, strict=True), "alone and among others")
    await _require_own_sampling(subject)


async def _require_own_sampling(subject: EndpointSubject) -> None:
    """Require that each of several concurrent requests is sampled with its own parameters."""
    asked = _MIXED if subject.capabilities.seeds else ({"temperature": 0.0},)
    for is_shared in (False, True):
        prompts = [subject.prompt(seed=0 if is_shared else i) for i in range(len(asked))]
        alone, again = (
            [subject.request(prompt, **{"max_tokens": 16, "seed": i, **asked[i]}) for i, prompt in enumerate(prompts)]
            for _ in range(2)
        )
        first = [(await subject.endpoint.generate(request)).completions[0] for request in alone]
        responses = await asyncio.gather(*(subject.endpoint.generate(request) for request in again))
        pairs = [(one, response.completions[0]) for one, response in zip(first, responses, strict=True)]
        whose = "the same prompt" if is_shared else "other prompts"
        require_repeated(subject, pairs, f"alone and among requests with {whose} and other sampling parameters")


async def _require_idle(subject: EndpointSubject, call: str) -> None:
    left = time.monotonic()
    await until_running(subject, 0, _GONE_S, f"the request whose caller cancelled {call} was still running")
    subject.note(**{f"seconds until idle, {call}": round(time.monotonic() - left, 3)})


async def _require_id_is_free(subject: EndpointSubject, request_id: str, when: str) -> None:
    """Require that a new request may have this id no later than a few seconds after ``when``."""
    request = subject.request(max_tokens=4).model_copy(update={"request_id": request_id})
    deadline = time.monotonic() + _GONE_S
    while True:
        try:
            await subject.endpoint.generate(request)
        except InvalidRequestError as error:
            if time.monotonic() > deadline:
                fail(f"a request with id {request_id!r} is refused {_GONE_S:g} s after {when}: {error}")
            await asyncio.sleep(0.05)
        else:
            return


def _require_id(request: GenerateRequest, response: GenerateResponse) -> None:
    found = response.request_id
    require(found == request.request_id, f"{request.request_id!r} was answered as {found!r}")


async def _read(subject: EndpointSubject, request: GenerateRequest) -> str | None:
    """Read a stream to its end; return the last chunk's finish reason."""
    reason = None
    async for chunk in subject.streaming.generate_stream(request):
        reason = chunk.finish_reason
    return reason


@check("E-63", deadline_s=90)
@look_at(
    "whether a request that is cancelled ends in the engine, running or waiting, or only in the bookkeeping, and what "
    "its end releases"
)
async def slots_are_released(subject: EndpointSubject) -> None:
    """A request whose caller disconnects releases its slot: even after more callers than there are slots have
    disconnected, as many sequences run at a time as the endpoint reports."""
    num_slots = subject.capabilities.max_concurrent_sequences
    if num_slots > _MAX_SLOTS:
        skip(f"{num_slots} sequences run at a time, and the kit fills at most {_MAX_SLOTS} slots")
    before_s = await fill_slots(subject, "before any caller disconnected", _FIRST_S)
    limit_s = _GONE_S + _TIMES_SLOWER * before_s
    subject.note(**{"seconds until one more was answered, before": before_s, "limit": limit_s})
    num_left = 0
    for is_streamed in (False, *((True,) if subject.capabilities.streaming else ())):
        num_left += await _leave(subject, 2 * num_slots, is_streamed)
        when = f"after the callers of {num_left} requests disconnected"
        after_s = await fill_slots(subject, when, limit_s)
        subject.note(**{f"seconds until one more was answered, {when}": after_s})


async def fill_slots(subject: EndpointSubject, when: str, limit_s: float) -> float:
    """Fill all slots but one, and require that one more request is answered while all the others run.

    Return the seconds from the first request until the additional one was answered.
    """
    num_others = subject.capabilities.max_concurrent_sequences - 1
    for num_tokens in subject.lengths(_LONG):
        started = time.monotonic()
        others = [task for _, task in subject.start(num_others, num_tokens)]
        await asyncio.sleep(_ADMITTED_S)
        what = f"{when}, one request next to {num_others} others"
        await within(limit_s, subject.generate(max_tokens=_SHORT), what)
        seconds = time.monotonic() - started
        num_ended = sum(task.done() for task in others)
        await cancel_and_wait(*others)
        if num_ended == 0:
            return seconds
    fail(
        f"{when}, one request of {_SHORT} tokens was answered only once {num_ended} of {num_others} requests of "
        f"{num_tokens} tokens had ended: fewer than the reported {num_others + 1} sequences run at a time"
    )


async def _leave(subject: EndpointSubject, num: int, is_streamed: bool) -> int:
    """Start requests that fill the context, some of which have to wait; cancel them and return their number."""
    requests = [
        subject.request(subject.prompt(seed=i), max_tokens=subject.remaining_tokens(), seed=i, stream=is_streamed)
        for i in range(num)
    ]
    ask = partial(_read, subject) if is_streamed else subject.endpoint.generate
    callers: list[asyncio.Task[Any]] = [subject.begin(ask(request)) for request in requests]
    await asyncio.sleep(_ADMITTED_S)
    for caller in callers:
        if caller.done():
            caller.result()
    await cancel_and_wait(*callers)
    return num

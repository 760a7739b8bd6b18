"""Requirements after a fault: the endpoint serves one complete set of weights or none, and requests are complete."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from inflight.conformance.checks import fail, require
from inflight.conformance.endpoint.subject import EndpointSubject, Running
from inflight.conformance.endpoint.waiting import GRACE_S, SERVED_S, SLACK_S, SLOWNESS, within
from inflight.conformance.reference import ReferenceWeights
from inflight.contracts import InferenceEndpoint
from inflight.errors import PoisonedError
from inflight.wire import Completion, EndpointState, GenerateRequest, GenerateResponse, WeightVersion

_READY_S = 8.0
"""Time limit for what a check left behind to end, such as the lease of a pause."""
_IDS = 8
"""Maximum number of a check's ids that are used again."""


async def until_running(subject: EndpointSubject, num: int, seconds: float, what: str) -> None:
    """Return once this many sequences are running. Fail the check if that takes too long."""
    deadline = time.monotonic() + seconds
    while (found := (await subject.endpoint.weight_version()).num_running) != num:
        require(time.monotonic() < deadline, f"{what} after {seconds:.2g} s (num_running is {found})")
        await asyncio.sleep(0.005)


async def require_ended_early(
    subject: EndpointSubject, others: Sequence[asyncio.Task[GenerateResponse]], alone_s: float, what: str
) -> None:
    """Require that all requests except ``others`` end soon; ``others`` is one request that fills the context, or none.

    If there is such a request, the rest must end within `SERVED_S` and in less than half of that request's running
    time, because whatever slows the server down slows both. Otherwise they must end within ``alone_s``.
    """
    limit_s = SERVED_S if others else alone_s
    started = time.monotonic()
    while (await subject.endpoint.weight_version()).num_running > len(others):
        words = f"{what} was still being decoded after {limit_s:.2g} s"
        require(time.monotonic() - started < limit_s, words)
        await asyncio.sleep(0.005)
    ended_s = time.monotonic() - started
    if others:
        await asyncio.wait(others, timeout=ended_s)
    for other in others:
        if other.done():
            other.result()
            fail(f"{what} ran for more than half of the time that an equally long request next to it needed to finish")
    subject.note(**{f"seconds until {what} had ended": ended_s})


async def wait_until_settled(
    subject: EndpointSubject, when: str, seconds: float = SLACK_S, *, endpoint: InferenceEndpoint | None = None
) -> WeightVersion:
    """Return the version of the endpoint, by default the one under test, once no update is open. Fail the check if that
    takes too long."""
    endpoint, deadline = endpoint or subject.endpoint, time.monotonic() + seconds
    while True:
        version = await within(SLACK_S, endpoint.weight_version(), f"{when}, weight_version")
        if version.state in (EndpointState.READY, EndpointState.POISONED):
            return version
        if time.monotonic() > deadline:
            fail(f"{when}, the endpoint is still {version.state} {seconds:g} s later")
        await asyncio.sleep(0.02)


def require_right_logprobs(
    subject: EndpointSubject, request: GenerateRequest, completion: Completion, what: str
) -> None:
    """Require that every token has the logprob that the checkpoint gives it, if the checkpoint is known."""
    if subject.known_reference is not None and completion.token_ids:
        num_tokens, num_logprobs = len(completion.token_ids), len(completion.logprobs)
        require(num_tokens == num_logprobs, f"{num_tokens} tokens of {what} came with {num_logprobs} logprobs")
        subject.require_sampled_from(subject.reference.weights, request, completion, what)


async def require_old_weights(
    subject: EndpointSubject, when: str, *, seconds: float = SLACK_S, may_be_torn: bool = False
) -> None:
    """Require that the update left no trace: the endpoint is READY with the checkpoint's weights under the previous
    version.

    If bytes of the update had arrived (``may_be_torn``), the endpoint may also be POISONED, provided that it generates
    nothing.
    """
    started = time.monotonic()
    version = await wait_until_settled(subject, when, seconds)
    subject.note(**{f"state {when}": f"{version.state} ({time.monotonic() - started:.2g} s)"})
    if may_be_torn and version.state is EndpointState.POISONED:
        await subject.require_raises(subject.generate(), PoisonedError, f"{when}, a request to a poisoned endpoint")
        return
    require_serving(version, subject.publisher.version, f"{when}, weight_version")
    await subject.require_serves(subject.reference.weights, when)


def require_serving(answer: WeightVersion, version: int, what: str) -> None:
    """Require that the answer reports READY at this version."""
    require(
        answer.state is EndpointState.READY and answer.version == version and answer.updating_to is None,
        f"{what} answered {answer.state} at version {answer.version} (updating to {answer.updating_to}), "
        f"not ready at {version}",
    )


async def require_undisturbed(running: Running, what: str) -> None:
    """Require that requests that have already ended are complete: a fast endpoint may have filled their contexts."""
    await require_all_whole([it for it in running if it[1].done()], what)


async def require_refused_while_running(
    subject: EndpointSubject, num: int, num_tokens: int, act: Callable[[], Coroutine[Any, Any, None]], what: str
) -> Running:
    """Require that ``act``, which waits for running requests to end, is refused; return the requests.

    On a busy machine, requests of ``num_tokens`` may have ended before ``act`` reaches the endpoint, which then rightly
    accepts it; the attempt is repeated with longer requests. ``act`` must therefore restore the weights that were
    served if it is accepted.
    """
    for length in subject.lengths(num_tokens):
        running = await subject.start_running(num, max_tokens=length)
        acting = subject.begin(act())
        await asyncio.wait([acting], timeout=SERVED_S * SLOWNESS.get())
        if acting.done() and acting.exception() is None:
            await asyncio.wait([task for _, task in running], timeout=GRACE_S)
            if all(task.done() for _, task in running):
                await require_all_whole(running, f"a request that ended before {what} was accepted")
                continue
        await subject.require_refused(acting, what)
        return running
    fail(f"{what} was accepted (it began while requests of {length} tokens were running)")


async def require_recovers(subject: EndpointSubject, when: str) -> None:
    """Require that a complete update over a new group succeeds and is served."""
    other = subject.reference.with_final_norm(0.5, "A halved")
    subject.publisher.lose_group()
    await subject.publisher.publish(other)
    await subject.require_serves(other, f"after a complete update {when}")


async def require_all_sampled_from(
    subject: EndpointSubject, weights: ReferenceWeights, running: Running, what: str
) -> None:
    """Require that requests ended as `require_all_whole` demands, with all tokens sampled from ``weights``."""
    for (request, _), completion in zip(running, await require_all_whole(running, what), strict=True):
        subject.require_sampled_from(weights, request, completion, what)


async def require_all_whole(running: Running, what: str) -> list[Completion]:
    """Require that each request ends under its own id with exactly its max_tokens tokens; return the completions."""
    completions = []
    for request, task in running:
        response = await within(SERVED_S, task, what)
        (completion,) = response.completions
        num_tokens = request.sampling.max_tokens
        require(response.request_id == request.request_id, f"{what} was answered under {response.request_id!r}")
        require(
            completion.finish_reason == "length" and len(completion.token_ids) == num_tokens,
            f"{what} ended with {completion.finish_reason!r} and {len(completion.token_ids)} of {num_tokens} tokens",
        )
        completions.append(completion)
    return completions


def _used_ids(asked: Sequence[GenerateRequest]) -> list[str]:
    """Return at most `_IDS` ids of a check's requests: those of the last requests, up to half of that number, and then
    those of the last request of each kind (streamed or not, continued or not, and which parameters it sets)."""
    of_kinds: dict[tuple[object, ...], str] = {}
    for request in asked:
        kind = request.stream, request.num_continued > 0, frozenset(request.sampling.model_fields_set)
        of_kinds[kind] = request.request_id
    last = [request.request_id for request in asked[: -_IDS // 2 - 1 : -1]]
    return list(dict.fromkeys([*last, *reversed(of_kinds.values())]))[:_IDS]


async def require_left_usable(subject: EndpointSubject) -> None:
    """Require that a check has left the endpoint usable: READY and idle, with every id free, and serving.

    If the weights have not been touched, the logprobs of a request must be those of the checkpoint.
    """
    when = "after everything that this check did"
    version = await wait_until_settled(subject, when, _READY_S * SLOWNESS.get())
    require(version.state is EndpointState.READY, f"{when}, the endpoint is {version.state}")
    if subject.target.url is None:  # a server at a URL may have other clients
        await until_running(subject, 0, SLACK_S * SLOWNESS.get(), f"{when}, requests were still being decoded")
    requests = [subject.request(max_tokens=2)]
    requests += [
        subject.request(max_tokens=1).model_copy(update={"request_id": used}) for used in _used_ids(subject.asked[:-1])
    ]
    answers = [subject.begin(subject.endpoint.generate(request)) for request in requests]
    for request, answer in zip(requests, answers, strict=True):
        completion = (await within(SERVED_S, answer, f"{when}, a request")).completions[0]
        if not subject.publisher.touched and not subject.pace.is_slow:
            require_right_logprobs(subject, request, completion, f"a request {when}")

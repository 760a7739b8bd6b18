"""Level ``control``: how a pause treats running requests and requests that arrive during it, and what happens if a
drain times out."""

from __future__ import annotations

import asyncio
import time

from inflight.base.tasks import cancel_and_wait
from inflight.conformance.checks import check, fail, look_at, require
from inflight.conformance.endpoint.aftermath import (
    require_all_sampled_from,
    require_all_whole,
    require_old_weights,
    require_refused_while_running,
    until_running,
)
from inflight.conformance.endpoint.forms import assembled
from inflight.conformance.endpoint.subject import EndpointSubject, Running
from inflight.conformance.endpoint.waiting import GRACE_S, SERVED_S, SLOWNESS, until, within
from inflight.conformance.reference import ReferenceWeights
from inflight.wire import CompletionChunk, EndpointState, GenerateRequest, InFlightPolicy, WeightUpdate

LEVEL = "control"

WATCHED_S = 0.8
"""For how many seconds a pause is watched for tokens."""
_NUM_TRIES = 3
_NUM_TOKENS_OF_A_DRAIN = 600
"""Number of tokens per request: enough to outlast the time during which answers may still be in transit."""
_NUM_TOKENS = 150
"""Number of tokens of each running request: enough for it to still be running when a pause follows immediately."""
_NUM_OF_ALL = 2400
"""Number of tokens of all requests together that fill an endpoint's slots before a drain."""
_SHORT_DRAIN_S = 0.03
_NUM_OUT_OF_TIME = 500
"""Number of tokens per request: enough to outlast the shortest drain."""
_MOST_SLOTS = 64
"""Maximum number of slots that a check fills to make further requests wait."""
_ADMITTED_S = 0.1
"""How long sent requests may take to be queued."""
_NUM_RECOMPUTED, _LENGTH_RECOMPUTED, _RECOMPUTED_S = 16, 1000, 4.0
"""Requests whose prompts an engine computes in many steps: the maximum number of requests, the length of each prompt,
and the seconds that all prompts may take together. Slow endpoints receive shorter prompts."""
_NUM_BEYOND = 4
"""Number of completions of a request that wait for a slot while its other completions run."""
_PAUSE = "whether the pause is acknowledged only after the engine has finished the step in flight and stopped"
_PAUSED = "what pausing and resuming do to running requests: they must be neither answered, nor lost, nor restarted"
_DRAIN = "whether new requests stay in the queue while a drain continues, and what enforces its deadline"


@check("E-30", "updates keep", look_at=_PAUSE, policy=InFlightPolicy.KEEP)
@check("E-31", "updates recompute", look_at=_PAUSE, policy=InFlightPolicy.RECOMPUTE)
async def nothing_sampled(subject: EndpointSubject, policy: InFlightPolicy) -> None:
    """Under {policy}, no token is sampled from the moment request_weight_update returns until the pause ends."""
    if not subject.capabilities.streaming:
        await _watch_without_streams(subject, policy)
        return
    publisher = subject.publisher
    await publisher.form_group()
    for _ in range(_NUM_TRIES):  # on a busy machine, streams may end before the pause
        counts, streams = await _start_streams(subject, 4)
        update = await publisher.request(subject.reference.weights, in_flight=policy)
        await asyncio.sleep(GRACE_S)
        if not any(stream.done() for stream in streams):
            break
        await publisher.abort(update)
        await cancel_and_wait(*streams)
    else:
        fail(f"in all {_NUM_TRIES} tries, a stream to the end of the context ended before the pause")
    before = sum(counts)
    await asyncio.sleep(WATCHED_S)
    during = sum(counts) - before
    subject.note(**{"tokens before": before, f"tokens in {WATCHED_S:g} s of the pause": during})
    words = f"{during} tokens arrived in {WATCHED_S:g} s, beginning {GRACE_S:g} s after the pause was acknowledged"
    require(during == 0, words)
    await publisher.abort(update)
    await until(lambda: sum(counts) > before, SERVED_S, "after the pause was aborted, no token arrived")


async def _watch_without_streams(subject: EndpointSubject, policy: InFlightPolicy) -> None:
    """Pause for longer than the running requests would have taken; require that none of them ends."""
    await subject.publisher.form_group()
    for num_tokens in subject.lengths(_NUM_TOKENS):
        started = time.monotonic()
        (alone,) = await subject.start_running(1, max_tokens=num_tokens)
        await within(SERVED_S, alone[1], f"a request for {num_tokens} tokens")
        usual_s = time.monotonic() - started
        running = await subject.start_running(2, max_tokens=num_tokens)
        update = await subject.publisher.request(subject.reference.weights, in_flight=policy)
        await asyncio.sleep(GRACE_S)
        paused = [task for _, task in running if not task.done()]
        if paused:
            break
        await subject.publisher.abort(update)
    require(paused, f"all requests, of up to {num_tokens} tokens, had ended when the pause was acknowledged")
    await asyncio.sleep(2 * usual_s)
    num_ended = sum(task.done() for task in paused)
    subject.note(**{"seconds that one takes": usual_s, "paused": len(paused), "ended during the pause": num_ended})
    require(
        num_ended == 0, f"{num_ended} of {len(paused)} requests ended during a pause of {2 * usual_s + GRACE_S:.2g} s"
    )
    await subject.publisher.abort(update)
    await require_all_whole(running, "a request that was paused")


async def _start_streams(subject: EndpointSubject, num: int) -> tuple[list[int], list[asyncio.Task[None]]]:
    """Start streams that fill the context; once all are running, return their token counts, which keep growing, and
    their tasks."""
    num = min(num, subject.capabilities.max_concurrent_sequences)
    counts = [0] * num

    async def read(i: int) -> None:
        prompt = subject.prompt(seed=100 + i)
        request = subject.request(prompt, max_tokens=subject.remaining_tokens(prompt), seed=i, stream=True)
        async for chunk in subject.streaming.generate_stream(request):
            counts[i] += len(chunk.token_ids)

    streams = [subject.begin(read(i)) for i in range(num)]
    await until(lambda: all(counts), SERVED_S, f"{num} streams gave no first token", streams)
    return counts, streams


@check("E-32", "updates", deadline_s=60, look_at=_PAUSED)
async def paused_requests_finish(subject: EndpointSubject) -> None:
    """Both after an abort and after a commit, paused requests finish under their own ids with all of their tokens."""
    policies = subject.pausing_policies()
    await subject.publisher.form_group()
    for policy in policies:
        for ending in ("an abort", "a commit"):
            for num_tokens in subject.lengths(_NUM_TOKENS):
                if num_paused := await _pause_and_end(subject, policy, ending, num_tokens):
                    break
            subject.note(**{f"paused by {policy} until {ending}": num_paused})
            require(num_paused, f"no request was still running when the pause by {policy} was acknowledged")


async def _pause_and_end(subject: EndpointSubject, policy: InFlightPolicy, ending: str, num_tokens: int) -> int:
    """Pause running requests and require that they finish completely; return how many were running during the pause."""
    running = await subject.start_running(4, max_tokens=num_tokens)
    update = await subject.publisher.request(subject.reference.weights, in_flight=policy)
    num_paused = sum(not task.done() for _, task in running)
    await _end(subject, update, subject.reference.weights, ending)
    await require_all_whole(running, f"a request that was paused by {policy}, until {ending},")
    return num_paused


async def _end(subject: EndpointSubject, update: WeightUpdate, weights: ReferenceWeights, ending: str) -> None:
    """End a pause with an abort, or with a commit of these weights."""
    if ending == "an abort":
        await subject.publisher.abort(update)
    else:
        await subject.publisher.complete(update, weights)


@check("E-33", "updates", deadline_s=40, look_at=_PAUSED)
async def newcomers_wait(subject: EndpointSubject) -> None:
    """Requests that arrive during a pause wait, and are then served by the weights that are in service when it ends."""
    other = subject.reference.perturbed("B")  # weights whose keys and values differ too
    for weights, ending in ((subject.reference.weights, "an abort"), (other, "a commit")):
        update = await subject.publisher.request(other)
        waiting = subject.start(3, 16)
        await asyncio.sleep(0.5)
        require(
            not any(task.done() for _, task in waiting), "a request that arrived during a pause was answered during it"
        )
        await _end(subject, update, other, ending)
        what = f"a request that arrived during a pause that ended with {ending}"
        await require_all_sampled_from(subject, weights, waiting, what)


@check("E-34", "updates drain", deadline_s=60, look_at=_DRAIN)
async def drain_finishes_requests(subject: EndpointSubject) -> None:
    """Under drain, running requests finish under the old weights before the pause is acknowledged, even those
    awaiting recomputation; new ones wait. A request whose caller disconnects no longer delays the pause."""
    publisher, other = subject.publisher, subject.reference.with_final_norm(-1.0, "B")
    num_tokens = min(_NUM_TOKENS_OF_A_DRAIN, subject.context_len // 2)
    await publisher.form_group()
    running = await subject.start_running(4, max_tokens=num_tokens)
    streams = [await _begin_stream(subject, num_tokens)] if subject.capabilities.streaming and len(running) > 3 else []
    pausing = subject.begin(publisher.request(other, in_flight=InFlightPolicy.DRAIN, deadline_s=3 * SERVED_S))
    while (await subject.endpoint.weight_version()).state is EndpointState.READY and not pausing.done():
        await asyncio.wait([pausing], timeout=0.005)
    late = subject.start(1, 16)
    update = await pausing
    await _require_ended(running, "when the drain was acknowledged")
    await require_all_sampled_from(subject, subject.reference.weights, running, "a request that was drained")
    for request, chunks, reading in streams:
        await asyncio.wait([reading], timeout=GRACE_S)
        require(reading.done(), "a stream was still running when the drain was acknowledged")
        completion = assembled(0, chunks)
        num, reason = len(completion.token_ids), completion.finish_reason
        require(num == num_tokens, f"a stream that was drained has {num} of {num_tokens} tokens: {reason}")
        subject.require_sampled_from(subject.reference.weights, request, completion, "a stream that was drained")
    require(not late[0][1].done(), "a request that arrived during the drain was answered before the update")
    await publisher.complete(update, other)
    await require_all_sampled_from(subject, other, late, "a request that arrived during the drain")
    await _drain_what_is_cancelled(subject)
    if InFlightPolicy.RECOMPUTE in subject.capabilities.in_flight_policies:
        await _drain_what_is_recomputed(subject)


async def _drain_what_is_recomputed(subject: EndpointSubject) -> None:
    """Fill all slots, let other requests wait, and drain right after an update under recompute; require that no request
    has tokens from both before and after the drain."""
    publisher, weights = subject.publisher, subject.reference.weights
    num_slots = min(subject.capabilities.max_concurrent_sequences, _MOST_SLOTS)
    num_tokens = subject.pace.shortened(min(_NUM_TOKENS, _NUM_OF_ALL // num_slots, subject.context_len // 2))
    requests = await subject.start_running(num_slots, max_tokens=num_tokens)
    requests += subject.start(num_slots + 1, num_tokens)  # one waits even if slots free up
    await asyncio.sleep(_ADMITTED_S)
    await publisher.publish(weights, in_flight=InFlightPolicy.RECOMPUTE)
    deadline_s = 3 * SERVED_S * SLOWNESS.get()
    drain = await publisher.request(weights, in_flight=InFlightPolicy.DRAIN, deadline_s=deadline_s)
    await publisher.complete(drain, weights)
    for completion in await require_all_whole(requests, "a request sent before a recompute update and a drain"):
        versions = [span.version for span in completion.version_spans]
        words = f"a request running at the drain for version {drain.version} has tokens of versions {versions}"
        require(drain.version not in versions or len(versions) == 1, words)


async def _drain_what_is_cancelled(subject: EndpointSubject) -> None:
    """Require that a drain ends once the callers of all running requests have disconnected."""
    running = await subject.start_running(2)
    update = subject.publisher.announcement(
        subject.reference.weights, in_flight=InFlightPolicy.DRAIN, deadline_s=3 * SERVED_S * SLOWNESS.get()
    )
    subject.publisher.begin(update)
    pausing = subject.begin(subject.endpoint.request_weight_update(update))
    await asyncio.sleep(_ADMITTED_S)
    await cancel_and_wait(*(task for _, task in running))
    await within(SERVED_S, pausing, "a drain during which the callers of all running requests disconnected")
    await subject.publisher.abort(update)


async def _require_ended(running: Running, when: str) -> None:
    await asyncio.wait([task for _, task in running], timeout=GRACE_S)
    num_left = sum(not task.done() for _, task in running)
    require(num_left == 0, f"{num_left} of {len(running)} requests were still running {when}")


async def _begin_stream(
    subject: EndpointSubject, num_tokens: int
) -> tuple[GenerateRequest, list[CompletionChunk], asyncio.Task[None]]:
    """Begin a stream; after its first token, return the request, the growing list of chunks, and the reading task."""
    request = subject.request(max_tokens=num_tokens, seed=79, stream=True)
    chunks: list[CompletionChunk] = []

    async def read() -> None:
        async for chunk in subject.streaming.generate_stream(request):
            chunks.append(chunk)

    reading = subject.begin(read())
    await until(lambda: chunks, SERVED_S, "a stream gave no token", [reading])
    return request, chunks, reading


@check("E-35", "updates drain", deadline_s=60, look_at=_DRAIN)
async def drain_out_of_time(subject: EndpointSubject) -> None:
    """A drain that takes longer than the update's deadline is refused, even during the commit of a staged update, and
    every request continues; once all have ended, new requests are served."""
    publisher, options = subject.publisher, {"in_flight": InFlightPolicy.DRAIN, "deadline_s": _SHORT_DRAIN_S}
    await publisher.form_group()

    async def drain() -> None:
        update = await publisher.request(subject.reference.weights, **options)
        await publisher.abort(update)
        await publisher.form_group()

    length = min(_NUM_OUT_OF_TIME, subject.context_len * 3 // 4)
    what = "a drain that exceeds its deadline"
    running = await require_refused_while_running(subject, 4, length, drain, what)
    if subject.capabilities.max_concurrent_sequences > len(running):
        await require_all_whole(subject.start(1, 16), "a request after a drain was refused")
    await require_old_weights(subject, "after a drain was refused")
    await require_all_whole(running, "a request that ran while a drain was refused")
    await require_all_whole(subject.start(1, 16), "a request after those that a refused drain waited for had ended")
    if subject.capabilities.staging:
        await _drain_out_of_time_at_the_commit(subject)


async def _drain_out_of_time_at_the_commit(subject: EndpointSubject) -> None:
    """Require that a staged update ends if its commit cannot drain in time, and that every request continues."""
    publisher, other = subject.publisher, subject.reference.with_final_norm(-1.0, "B")
    options = {"in_flight": InFlightPolicy.DRAIN, "deadline_s": _SHORT_DRAIN_S, "staged": True}

    async def stage() -> WeightUpdate:
        update = await publisher.request(other, **options)
        await publisher.send_all(update, other)
        return update

    update = await stage()

    async def commit() -> None:
        nonlocal update
        await publisher.commit(update)
        await publisher.publish(subject.reference.weights)
        update = await stage()

    what = "the commit of a staged update whose drain exceeds its deadline"
    length = min(_NUM_OUT_OF_TIME, subject.context_len * 3 // 4)
    running = await require_refused_while_running(subject, 2, length, commit, what)
    publisher.lose_group()
    when = "after the commit of a staged update failed to drain in time"
    await require_all_whole(running, f"a request that ran {when}")
    await require_all_whole(subject.start(1, 16), f"a request that was sent {when} and earlier requests had ended")
    await require_old_weights(subject, when)


@check("E-36", "updates abort", deadline_s=75)
@look_at(
    "whether aborted requests are answered with their tokens, before the pause is acknowledged, and whether those that "
    "wait to be recomputed, and completions that wait while others of their request run, end too"
)
async def abort_ends_requests(subject: EndpointSubject) -> None:
    """Under abort, every request for which a token has been sampled ends as a whole, with the tokens that it has and
    finish reason abort, even if it is waiting to be recomputed or some of its completions are waiting for a slot; other
    waiting requests end without a token, or are served by the weights that are in service when the pause ends."""
    await subject.publisher.form_group()
    num_slots = subject.capabilities.max_concurrent_sequences
    others = await subject.start_running(num_slots) if num_slots <= _MOST_SLOTS else await subject.start_running(4)
    waiting = subject.start(2, 16) if num_slots <= _MOST_SLOTS else []
    await asyncio.sleep(_ADMITTED_S)
    other = subject.reference.with_final_norm(-1.0, "B")
    update = await subject.publisher.request(other, in_flight=InFlightPolicy.ABORT)
    await _require_ended(others, "after a pause by abort")
    lengths = []
    for request, task in others:
        completion = task.result().completions[0]
        lengths.append(len(completion.token_ids))
        require(
            completion.finish_reason == "abort",
            f"a request ended with finish reason {completion.finish_reason!r}, not 'abort'",
        )
        if completion.token_ids and len(lengths) <= 4:
            subject.require_sampled_from(subject.reference.weights, request, completion, "a request that was aborted")
    # Some may not have been reached yet: an endpoint may count requests from when they are sent.
    require(any(lengths), f"{len(lengths)} requests that were being decoded ended without a token")
    await subject.publisher.complete(update, other)
    ended = [
        it for it in waiting if (await within(SERVED_S, it[1], "a request that waited")).completions[0].token_ids == ()
    ]
    reasons = {task.result().completions[0].finish_reason for _, task in ended}
    require(reasons <= {"abort"}, f"requests that waited for a place ended without a token, for the reasons {reasons}")
    rest = [it for it in waiting if it not in ended]
    await require_all_sampled_from(subject, other, rest, "a request that waited for a place during a pause by abort")
    subject.note(**{"tokens of the aborted requests": lengths, "ended while they waited": len(ended)})
    streams = [await _begin_stream(subject, subject.remaining_tokens())] if subject.capabilities.streaming else []
    update = await subject.publisher.request(subject.reference.weights, in_flight=InFlightPolicy.ABORT)
    for _, chunks, reading in streams:
        await asyncio.wait([reading], timeout=GRACE_S)
        require(reading.done(), "a stream was still running after a pause by abort")
        reason = assembled(0, chunks).finish_reason
        require(reason == "abort", f"a stream that ran when a pause by abort began ended with {reason!r}")
    await subject.publisher.abort(update)
    await subject.require_serves(other, "after a pause by abort was abandoned")
    await _abort_what_has_begun(subject)


async def _abort_what_has_begun(subject: EndpointSubject) -> None:
    """Require that a pause by abort also ends requests with tokens that wait to be recomputed, and completions that
    wait for a slot while others of their request run."""
    publisher, weights = subject.publisher, subject.reference.weights
    num_slots = subject.capabilities.max_concurrent_sequences
    if InFlightPolicy.RECOMPUTE in subject.capabilities.in_flight_policies:
        running = await start_recomputed_later(subject, num_slots)
        await publisher.publish(weights, in_flight=InFlightPolicy.RECOMPUTE)
        what = "a request that an update under recompute had just interrupted"
        await _require_ended_as_a_whole(subject, running, what)
    if num_slots <= _MOST_SLOTS:
        num = num_slots + _NUM_BEYOND
        running = await subject.start_running(1, n=num)
        await until_running(subject, num_slots, SERVED_S, f"of {num} completions, {num_slots} were not being decoded")
        await asyncio.sleep(_ADMITTED_S)
        await _require_ended_as_a_whole(subject, running, f"a request for {num} completions in {num_slots} slots")


async def start_recomputed_later(subject: EndpointSubject, num: int) -> Running:
    """Start requests that an engine cannot recompute in one step, and return them once their prompts are computed."""
    num = max(1, min(num, _NUM_RECOMPUTED))
    length = min(_LENGTH_RECOMPUTED, subject.context_len // 3, subject.pace.prompt_len(_RECOMPUTED_S / num))
    running: Running = []
    for i in range(num):
        running += await subject.start_running(1, prompt=subject.prompt(length, seed=200 + i))
    deadline = time.monotonic() + SERVED_S * SLOWNESS.get()
    while (found := (await subject.endpoint.weight_version()).num_running) < num:
        require(time.monotonic() < deadline, f"{num} requests were not being decoded in time (num_running is {found})")
        await asyncio.sleep(0.005)
    await asyncio.sleep(num * length * subject.pace.prompt_token_s)  # it may count requests once they are sent
    return running


async def _require_ended_as_a_whole(subject: EndpointSubject, running: Running, what: str) -> None:
    """Pause by abort, and commit; require that each request that has a token when the pause begins ends with it.

    The other requests must be sampled under the new weights alone.
    """
    weights = subject.reference.weights
    update = await subject.publisher.request(weights, in_flight=InFlightPolicy.ABORT)
    await asyncio.wait([task for _, task in running], timeout=GRACE_S)
    left = [task for _, task in running if not task.done()]
    await subject.publisher.complete(update, weights)
    for task in left:
        completions = (await within(2 * SERVED_S, task, f"{what}, after a pause by abort")).completions
        named = sorted({span.version for it in completions for span in it.version_spans})
        require(
            not named or named[0] >= update.version,
            f"{what} had tokens when a pause by abort began, but continued after it: version {update.version} was "
            f"published, and its completions name versions {named}",
        )
    ended = [(request, task.result()) for request, task in running if task not in left]
    for request, response in ended:
        for completion in response.completions:
            reason, num_tokens = completion.finish_reason, len(completion.token_ids)
            words = f"{what} ended with {reason!r} and {num_tokens} tokens at a pause by abort"
            require(reason == "abort" or num_tokens == request.sampling.max_tokens, words)
    num_aborted = sum(it.finish_reason == "abort" for _, response in ended for it in response.completions)
    subject.note(**{f"ended at a pause by abort, {what}": (len(ended), f"{num_aborted} completions aborted")})

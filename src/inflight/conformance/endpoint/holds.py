"""Level control, what a hold does to requests: those that run, those that come, and those that run out of time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from inflight.conformance.checks import check, require
from inflight.conformance.endpoint.aftermath import GRACE_S, SLACK_S, require_old_weights, until, within
from inflight.conformance.endpoint.subject import EndpointSubject, cancelled_at_the_end
from inflight.wire import Completion, EndpointState, GenerateRequest, GenerateResponse, InFlightPolicy, WeightUpdate

LEVEL = "control"
Running = Sequence[tuple[GenerateRequest, asyncio.Task[GenerateResponse]]]

WATCHED_S = 0.8
"""How long a hold is watched for tokens that must not come."""
SERVED_S = 15.0
"""For a few hundred tokens of a few requests, on any engine."""
_NUM_TOKENS_OF_A_DRAIN = 600
"""So many that they last longer than the time in which answers are still on their way."""
_NUM_TOKENS = 150
"""Of each running request: enough to be there still when a hold comes at once."""
_SHORT_DRAIN_S = 0.1
_HOLD = "whether the hold is acknowledged when the engine has stopped, after the step that was under way, not before"
_HELD = "what pausing and resuming do to running requests: they are neither answered, nor lost, nor started again"
_DRAIN = "whether new requests stay in the queue while a drain goes on, and who watches its deadline"


@check("E-30", needs=("updates", "keep"), look_at=_HOLD, policy=InFlightPolicy.KEEP)
@check("E-31", needs=("updates", "recompute"), look_at=_HOLD, policy=InFlightPolicy.RECOMPUTE)
async def nothing_sampled(subject: EndpointSubject, policy: InFlightPolicy) -> None:
    """Under {policy}, no token is sampled from the moment request_weight_update returns until the hold ends."""
    if not subject.capabilities.streaming:
        await _watch_without_streams(subject, policy)
        return
    publisher = subject.publisher
    await publisher.form_group()
    counts, streams = await _start_streams(subject, 4)
    update = await publisher.request(subject.reference.weights, in_flight=policy)
    await asyncio.sleep(GRACE_S)
    require(
        not any(stream.done() for stream in streams), "a stream to the end of the context had ended before the hold"
    )
    before = sum(counts)
    await asyncio.sleep(WATCHED_S)
    during = sum(counts) - before
    subject.note(**{"tokens before": before, f"tokens in {WATCHED_S:g} s of the hold": during})
    require(
        during == 0, f"{during} tokens came in {WATCHED_S:g} s, beginning {GRACE_S:g} s after the hold was acknowledged"
    )
    await publisher.abort(update)
    await until(lambda: sum(counts) > before, SERVED_S, "after the hold was aborted, no token came")


async def _watch_without_streams(subject: EndpointSubject, policy: InFlightPolicy) -> None:
    """Hold for longer than the running requests would have taken: none of them may end."""
    await subject.publisher.form_group()
    for num_tokens in subject.lengths(_NUM_TOKENS):
        started = time.monotonic()
        (alone,) = await subject.start_running(1, max_tokens=num_tokens)
        await within(SERVED_S, alone[1], f"a request for {num_tokens} tokens")
        usual_s = time.monotonic() - started
        running = await subject.start_running(2, max_tokens=num_tokens)
        update = await subject.publisher.request(subject.reference.weights, in_flight=policy)
        await asyncio.sleep(GRACE_S)
        held = [task for _, task in running if not task.done()]
        if held:
            break
        await subject.publisher.abort(update)
    require(held, f"all requests, of up to {num_tokens} tokens, had ended when the hold was acknowledged")
    await asyncio.sleep(2 * usual_s)
    num_ended = sum(task.done() for task in held)
    subject.note(**{"seconds that one takes": usual_s, "held": len(held), "ended during the hold": num_ended})
    require(num_ended == 0, f"{num_ended} of {len(held)} requests ended during a hold of {2 * usual_s + GRACE_S:.2g} s")
    await subject.publisher.abort(update)
    await require_all_whole(running, "a request that was held")


async def _start_streams(subject: EndpointSubject, num: int) -> tuple[list[int], list[asyncio.Task[None]]]:
    """Start streams to the end of the context; return once all run, with the number of tokens that came of each."""
    num = min(num, subject.capabilities.max_concurrent_sequences)
    counts = [0] * num

    async def read(i: int) -> None:
        prompt = subject.prompt(seed=100 + i)
        longest = subject.capabilities.max_model_len - len(prompt)
        async for chunk in subject.streaming.generate_stream(
            subject.request(prompt, max_tokens=longest, seed=i, stream=True)
        ):
            counts[i] += len(chunk.token_ids)

    streams = [asyncio.ensure_future(read(i)) for i in range(num)]
    await subject.enter(cancelled_at_the_end(streams))
    await until(lambda: all(counts) or any(s.done() for s in streams), SERVED_S, f"{num} streams gave no first token")
    for stream in streams:
        if stream.done():
            stream.result()
    return counts, streams


async def require_all_whole(running: Running, what: str) -> list[Completion]:
    """Require that each request ends under its own id, with its max_tokens exactly; return the completions."""
    completions = []
    for request, task in running:
        response = await within(SERVED_S, task, what)
        (completion,) = response.completions
        num_tokens = request.sampling.max_tokens
        require(response.request_id == request.request_id, f"{what} was answered under {response.request_id!r}")
        require(
            completion.finish_reason == "length" and len(completion.token_ids) == num_tokens,
            f"{what} ended by {completion.finish_reason!r} with {len(completion.token_ids)} of {num_tokens} tokens",
        )
        completions.append(completion)
    return completions


@check("E-32", needs=("updates",), deadline_s=60, look_at=_HELD)
async def held_requests_finish(subject: EndpointSubject) -> None:
    """Requests that were held finish under their own id with all their tokens, after an abort and after a commit."""
    policies = subject.pausing_policies()
    await subject.publisher.form_group()
    for policy in policies:
        for ending in ("an abort", "a commit"):
            for num_tokens in subject.lengths(_NUM_TOKENS):
                if num_held := await _hold_and_end(subject, policy, ending, num_tokens):
                    break
            subject.note(**{f"held by {policy} until {ending}": num_held})
            require(num_held, f"no request was running any more when the hold by {policy} was acknowledged")


async def _hold_and_end(subject: EndpointSubject, policy: InFlightPolicy, ending: str, num_tokens: int) -> int:
    """Hold running requests and require that they finish whole; return how many were running under the hold."""
    publisher, weights = subject.publisher, subject.reference.weights
    running = await subject.start_running(4, max_tokens=num_tokens)
    update = await publisher.request(weights, in_flight=policy)
    num_held = sum(not task.done() for _, task in running)
    if ending == "an abort":
        await publisher.abort(update)
    else:
        await publisher.send(update, weights, 0)
        await publisher.commit(update)
    await require_all_whole(running, f"a request that was held by {policy}, until {ending},")
    return num_held


@check("E-33", needs=("updates",), deadline_s=40, look_at=_HELD)
async def newcomers_wait(subject: EndpointSubject) -> None:
    """Requests that come during a hold wait, and are served by the weights that it ends with."""
    other = subject.reference.with_final_norm(-1.0, "B")
    for weights, ending in ((subject.reference.weights, "an abort"), (other, "a commit")):
        update = await subject.publisher.request(other)
        waiting = await start(subject, 3, 16)
        await asyncio.sleep(0.5)
        require(not any(task.done() for _, task in waiting), "a request that came during a hold was answered during it")
        if ending == "an abort":
            await subject.publisher.abort(update)
        else:
            await subject.publisher.send(update, other, 0)
            await subject.publisher.commit(update)
        what = f"a request that came during a hold which ended by {ending}"
        completions = await require_all_whole(waiting, what)
        for (request, _), completion in zip(waiting, completions, strict=True):
            subject.require_sampled_from(weights, request, completion, what)


async def start(subject: EndpointSubject, num: int, max_tokens: int) -> Running:
    """Start requests, whether they can run now or not."""
    requests = [subject.request(subject.prompt(seed=i), max_tokens=max_tokens, seed=i) for i in range(num)]
    tasks = [asyncio.ensure_future(subject.endpoint.generate(request)) for request in requests]
    await subject.enter(cancelled_at_the_end(tasks))
    return list(zip(requests, tasks, strict=True))


@check("E-34", needs=("updates", "drain"), deadline_s=60, look_at=_DRAIN)
async def drained(subject: EndpointSubject) -> None:
    """Under drain, running requests finish under the old weights before the hold is acknowledged; new ones wait."""
    publisher, other = subject.publisher, subject.reference.with_final_norm(-1.0, "B")
    num_tokens = min(_NUM_TOKENS_OF_A_DRAIN, subject.capabilities.max_model_len // 2)
    await publisher.form_group()
    running = await subject.start_running(4, max_tokens=num_tokens)
    holding = asyncio.ensure_future(publisher.request(other, in_flight=InFlightPolicy.DRAIN, deadline_s=3 * SERVED_S))
    await subject.enter(cancelled_at_the_end([holding]))
    await _leaves_ready(subject, holding)
    late = await start(subject, 1, 16)
    update = await holding
    await asyncio.wait([task for _, task in running], timeout=GRACE_S)
    num_left = sum(not task.done() for _, task in running)
    require(num_left == 0, f"{num_left} requests were still running when the drain was acknowledged")
    for (request, _), completion in zip(running, await require_all_whole(running, "a request"), strict=True):
        subject.require_sampled_from(subject.reference.weights, request, completion, "a request that was drained")
    require(not late[0][1].done(), "a request that came during the drain was answered before the update")
    await publisher.send(update, other, 0)
    await publisher.commit(update)
    (completion,) = await require_all_whole(late, "a request that came during the drain")
    subject.require_sampled_from(other, late[0][0], completion, "a request that came during the drain")


async def _leaves_ready(subject: EndpointSubject, holding: asyncio.Future[WeightUpdate]) -> None:
    """Return once the endpoint says that it is not READY any more, or the hold was acknowledged."""
    while (await subject.endpoint.weight_version()).state is EndpointState.READY:
        if (await asyncio.wait([holding], timeout=0.005))[0]:
            return


@check("E-35", needs=("updates", "drain"), deadline_s=40, look_at=_DRAIN)
async def drain_out_of_time(subject: EndpointSubject) -> None:
    """A drain that takes longer than the update's deadline is refused, and every request goes on."""
    await subject.publisher.form_group()
    num_tokens = min(500, subject.capabilities.max_model_len // 2)
    running = await subject.start_running(4, max_tokens=num_tokens)
    drain = subject.publisher.request(
        subject.reference.weights, in_flight=InFlightPolicy.DRAIN, deadline_s=_SHORT_DRAIN_S
    )
    started = time.monotonic()
    error = await subject.require_refused(
        within(_SHORT_DRAIN_S + SLACK_S, drain, "a drain out of time"), "a drain out of time"
    )
    subject.note(refusal=str(error), seconds=time.monotonic() - started)
    late = await start(subject, 1, 16)
    await require_all_whole(late, "a request after a drain was refused")
    await require_old_weights(subject, "after a drain was refused")
    await require_all_whole(running, "a request that ran while a drain was refused")


@check(
    "E-36",
    needs=("updates", "abort"),
    look_at="whether aborted requests are answered with their tokens, before the hold is acknowledged",
)
async def aborted(subject: EndpointSubject) -> None:
    """Under abort, running requests end with the tokens they have, and finish reason abort."""
    await subject.publisher.form_group()
    running = await subject.start_running(4)
    update = await subject.publisher.request(subject.reference.weights, in_flight=InFlightPolicy.ABORT)
    await asyncio.wait([task for _, task in running], timeout=GRACE_S)
    num_left = sum(not task.done() for _, task in running)
    require(num_left == 0, f"{num_left} of {len(running)} requests were still running after a hold by abort")
    lengths = []
    for request, task in running:
        completion = task.result().completions[0]
        lengths.append(len(completion.token_ids))
        require(completion.finish_reason == "abort", f"a request ended by {completion.finish_reason!r}, not by 'abort'")
        require(completion.token_ids, "a request that was being decoded ended without a token")
        subject.require_sampled_from(subject.reference.weights, request, completion, "a request that was aborted")
    subject.note(**{"tokens of the aborted requests": lengths})
    await subject.publisher.abort(update)
    await require_old_weights(subject, "after a hold by abort was given up")

"""Level faults, things that happen at the same time: admissions, publishers, aborts, commits, clients that leave."""

from __future__ import annotations

import asyncio
import time

from inflight.conformance.checks import check, require
from inflight.conformance.endpoint.aftermath import GRACE_S, require_old_weights, settled, within
from inflight.conformance.endpoint.holds import SERVED_S, require_all_whole, start
from inflight.conformance.endpoint.subject import EndpointSubject, cancelled_at_the_end
from inflight.conformance.reference import Weights
from inflight.errors import UpdateAbortedError, UpdateRefusedError
from inflight.wire import EndpointState, GenerateResponse, WeightUpdate, WeightVersion

LEVEL = "faults"
_NUM_CLIENTS = 12
_NUM_HOLDS = 3
_NUM_ROUNDS = 6
_MANY_HOLDS = 20
_SHORT = 8
"""Tokens of a request that is over soon."""
_ORDER = "whether what comes from several connections goes through one queue, and is looked at again after each wait"


@check("U-53", needs=("updates",), deadline_s=60, look_at=_ORDER)
async def holds_under_admission(subject: EndpointSubject) -> None:
    """A hold is whole, and loses no request, while requests are admitted and finish all the time."""
    ended_at: list[float] = []
    over = asyncio.Event()

    async def client(seed: int) -> None:
        while not over.is_set():
            completion = await subject.generate(subject.prompt(seed=seed), max_tokens=_SHORT, seed=seed)
            require(
                len(completion.token_ids) == _SHORT and completion.finish_reason == "length",
                f"a request during holds ended by {completion.finish_reason!r} with {len(completion.token_ids)} tokens",
            )
            ended_at.append(time.monotonic())

    clients = [asyncio.ensure_future(client(seed)) for seed in range(_NUM_CLIENTS)]
    await subject.enter(cancelled_at_the_end(clients))
    await subject.publisher.form_group()
    for i in range(_NUM_HOLDS):
        num_before = len(ended_at)
        update = await subject.publisher.request(subject.reference.weights)
        since = time.monotonic()
        await asyncio.sleep(2 * GRACE_S)
        late = [seconds - since for seconds in ended_at if seconds > since + GRACE_S]
        require(not late, f"hold {i}: {len(late)} requests were answered, {late[:1]} s after it was acknowledged")
        if i % 2:
            await subject.publisher.send(update, subject.reference.weights, 0)
            await subject.publisher.commit(update)
        else:
            await subject.publisher.abort(update)
        await _until_more(ended_at, num_before + _NUM_CLIENTS, clients)
    over.set()
    for task in clients:
        await within(SERVED_S, task, "a client of short requests, after all holds,")
    subject.note(holds=_NUM_HOLDS, clients=_NUM_CLIENTS, requests=len(ended_at))


async def _until_more(ended_at: list[float], num: int, clients: list[asyncio.Task[None]]) -> None:
    deadline = time.monotonic() + SERVED_S
    while len(ended_at) < num:
        done, _ = await asyncio.wait(clients, timeout=0.01, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        require(time.monotonic() < deadline, f"after a hold, requests were not answered within {SERVED_S:g} s")


@check("U-54", needs=("updates",), deadline_s=40, look_at=_ORDER)
async def one_publisher_wins(subject: EndpointSubject) -> None:
    """Of several updates that are announced at the same time, one is accepted and the others are refused."""
    publisher, other = subject.publisher, subject.reference.with_final_norm(-1.0, "B")
    for _ in range(_NUM_ROUNDS):
        await publisher.form_group()
        updates = [publisher.announcement(other, version=publisher.version + 1 + i) for i in range(4)]
        connections = [await subject.another_connection() for _ in updates]
        calls = [
            connection.request_weight_update(update) for connection, update in zip(connections, updates, strict=True)
        ]
        answers = await within(SERVED_S, asyncio.gather(*calls, return_exceptions=True), "four announcements at once")
        accepted = [u for u, answer in zip(updates, answers, strict=True) if answer is None]
        others = [answer for answer in answers if answer is not None]
        require(
            len(accepted) == 1, f"of four updates that were announced at the same time {len(accepted)} were accepted"
        )
        require(
            all(isinstance(answer, UpdateRefusedError) for answer in others),
            f"of four updates that were announced at the same time the others raised {others}",
        )
        await publisher.send(accepted[0], other, 0)
        answer = await publisher.commit(accepted[0])
        require(answer.version == accepted[0].version, f"version {accepted[0].version} won, {answer.version} is served")
    await subject.require_serves(other, "after the update that was accepted")


@check("U-55", needs=("updates",), deadline_s=40, look_at=_ORDER)
async def commit_races_with_abort(subject: EndpointSubject) -> None:
    """Of a commit and an abort that come at the same time one wins, and both answers agree with what is served."""
    publisher, reference = subject.publisher, subject.reference
    colours = (reference.with_final_norm(-1.0, "B"), reference.weights)
    second = await subject.another_connection()
    serves, winners = reference.weights, []
    for i in range(_NUM_ROUNDS):
        weights = colours[i % 2] if serves is colours[(i + 1) % 2] else colours[(i + 1) % 2]
        before = publisher.version
        update = await publisher.request(weights)
        await publisher.send(update, weights, 0)
        calls = [subject.endpoint.commit_weight_update(update.ref), second.abort_weight_update(update.ref)]
        ordered = calls if i % 3 else calls[::-1]
        answers = await within(SERVED_S, asyncio.gather(*ordered, return_exceptions=True), "a commit beside an abort")
        answers = answers if i % 3 else answers[::-1]
        version = await settled(subject, "after a commit beside an abort")
        if version.state is EndpointState.POISONED:  # bytes were applied as they arrived
            await _leave_poisoned(subject, answers, serves, before)
            winners.append("abort, POISONED")
            continue
        committed = _race_was_won_by_the_commit(version, update, answers)
        serves = weights if committed else serves
        publisher.version = update.version if committed else before
        winners.append("commit" if committed else "abort")
        await subject.require_serves(serves, f"after the {winners[-1]} won")
        publisher.lose_group()
    subject.note(winners=winners)


async def _leave_poisoned(
    subject: EndpointSubject, answers: list[WeightVersion | BaseException], weights: Weights, version: int
) -> None:
    """Require that neither call said that the update was applied, and lead out with a complete one."""
    commit, abort = answers
    require(not isinstance(commit, WeightVersion), "a commit beside an abort was answered, and left POISONED")
    require(isinstance(abort, WeightVersion | UpdateRefusedError), f"an abort beside a commit raised {abort!r}")
    subject.publisher.version = version
    subject.publisher.lose_group()
    await subject.publisher.publish(weights)
    await subject.require_serves(weights, "after a complete update")


def _race_was_won_by_the_commit(
    version: WeightVersion, update: WeightUpdate, answers: list[WeightVersion | BaseException]
) -> bool:
    """Require that both answers agree with what is served; return whether that is the update."""
    commit, abort = answers
    require(version.state is EndpointState.READY, f"after a commit beside an abort the state is {version.state}")
    committed = isinstance(commit, WeightVersion)
    require(
        committed or isinstance(commit, UpdateRefusedError | UpdateAbortedError),
        f"a commit beside an abort raised {commit!r}",
    )
    require(isinstance(abort, WeightVersion | UpdateRefusedError), f"an abort beside a commit raised {abort!r}")
    require(
        committed == (version.version == update.version),
        f"a commit of {update.version} beside an abort answered {commit!r}, and version {version.version} is served",
    )
    if isinstance(abort, WeightVersion):
        require(
            abort.version == version.version,
            f"an abort beside a commit answered version {abort.version}, and {version.version} is served",
        )
    return committed


@check(
    "U-56",
    needs=("updates",),
    deadline_s=40,
    look_at="what is lost or counted twice when a hold begins: a step in flight, a pending wake-up",
)
async def many_holds(subject: EndpointSubject) -> None:
    """However often sampling is held and released, every running request finishes as if it had never been."""
    await subject.publisher.form_group()
    num_tokens = min(200, subject.capabilities.max_model_len // 2)
    running = await subject.start_running(4, max_tokens=num_tokens)
    for _ in range(_MANY_HOLDS):
        await subject.publisher.abort(await subject.publisher.request(subject.reference.weights))
    await require_all_whole(running, f"a request that was held {_MANY_HOLDS} times")
    for request, task in running:
        completion = task.result().completions[0]
        subject.require_sampled_from(subject.reference.weights, request, completion, "a request that was held often")
    await require_old_weights(subject, f"after {_MANY_HOLDS} holds")


@check(
    "U-57",
    needs=("updates",),
    deadline_s=40,
    look_at="whether an engine that is paused still takes cancellations, or takes them when it goes on",
)
async def client_leaves_during_a_hold(subject: EndpointSubject) -> None:
    """A client that disconnects during a hold ends its request, running or waiting, and it does not come back."""
    await subject.publisher.form_group()
    limit = subject.capabilities.max_model_len - len(subject.prompt())
    started = time.monotonic()
    await subject.generate(max_tokens=(probed := min(100, limit)))
    usual_s = (time.monotonic() - started) * limit / probed
    running = await subject.start_running(4)
    update = await subject.publisher.request(subject.reference.weights)
    waiting = await start(subject, 2, limit)
    await asyncio.sleep(0.1)
    leaving: list[asyncio.Task[GenerateResponse]] = [task for _, task in (*running, *waiting)]
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    await asyncio.sleep(GRACE_S)
    await subject.publisher.abort(update)
    since = time.monotonic()
    num_running = len(leaving)
    while num_running and time.monotonic() < since + usual_s:
        await asyncio.sleep(0.01)
        num_running = (await subject.endpoint.weight_version()).num_running
    left_s = time.monotonic() - since
    subject.note(**{"seconds until none ran": left_s, "seconds that they would have run": usual_s})
    require(
        num_running == 0 and left_s < max(usual_s / 2, GRACE_S),
        f"{num_running} of the requests whose clients left during a hold still ran {left_s:.2g} s after it",
    )
    await require_old_weights(subject, "after clients left during a hold")

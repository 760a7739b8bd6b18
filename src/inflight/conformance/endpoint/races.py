"""Level ``faults``: concurrent admissions, publishers, aborts and commits, and clients that disconnect."""

from __future__ import annotations

import asyncio
import time

from inflight.base.tasks import cancel_and_wait
from inflight.conformance.checks import check, look_at, require
from inflight.conformance.endpoint.aftermath import (
    require_all_sampled_from,
    require_ended_early,
    require_old_weights,
    until_running,
    wait_until_settled,
)
from inflight.conformance.endpoint.repeats import require_repeated
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.endpoint.waiting import GRACE_S, SERVED_S, until, within
from inflight.errors import UpdateAbortedError, UpdateRefusedError
from inflight.wire import EndpointState, WeightUpdate, WeightVersion

LEVEL = "faults"
_NUM_CLIENTS = 12
_NUM_PAUSES = 3
_NUM_ROUNDS = 6
_MANY_PAUSES = 20
_SHORT = 8
"""Number of tokens of a request that ends soon."""
_ORDER = (
    "whether calls from several connections go through one queue, and whether state is checked again after each wait"
)


@check("U-53", "updates", deadline_s=60, look_at=_ORDER)
async def pauses_under_admission(subject: EndpointSubject) -> None:
    """A pause is complete and loses no request even while requests are constantly being admitted and finishing."""
    ended_at: list[float] = []
    num_wanted = 0
    over = asyncio.Event()

    def enough() -> bool:
        return len(ended_at) >= num_wanted

    async def client(seed: int) -> None:
        while not over.is_set():
            completion = await subject.generate(subject.prompt(seed=seed), max_tokens=_SHORT, seed=seed)
            require(
                len(completion.token_ids) == _SHORT and completion.finish_reason == "length",
                f"a request during pauses ended with {completion.finish_reason!r} and {len(completion.token_ids)} "
                "tokens",
            )
            ended_at.append(time.monotonic())

    clients = [subject.begin(client(seed)) for seed in range(_NUM_CLIENTS)]
    await subject.publisher.form_group()
    for i in range(_NUM_PAUSES):
        num_wanted = len(ended_at) + _NUM_CLIENTS
        update = await subject.publisher.request(subject.reference.weights)
        since = time.monotonic()
        await asyncio.sleep(2 * GRACE_S)
        late = [seconds - since for seconds in ended_at if seconds > since + GRACE_S]
        words = f"{len(late)} requests were answered after pause {i} was acknowledged"
        require(not late, f"{words}, the last one {max(late, default=0.0):.2g} s after it")
        if i % 2:
            await subject.publisher.complete(update, subject.reference.weights)
        else:
            await subject.publisher.abort(update)
        await until(enough, SERVED_S, "after a pause, requests were not answered", clients)
    over.set()
    for task in clients:
        await within(SERVED_S, task, "a client of short requests, after all pauses,")
    subject.note(pauses=_NUM_PAUSES, clients=_NUM_CLIENTS, requests=len(ended_at))


@check("U-54", "updates", deadline_s=40, look_at=_ORDER)
async def one_publisher_wins(subject: EndpointSubject) -> None:
    """Of several updates that are announced at the same time, one is accepted and the others are refused."""
    publisher, other = subject.publisher, subject.reference.with_final_norm(-1.0, "B")
    for _ in range(_NUM_ROUNDS):
        await publisher.form_group()
        updates = [publisher.announcement(other, version=publisher.version + 1 + i) for i in range(4)]
        connections = [await subject.another_connection() for _ in updates]
        calls = [client.request_weight_update(update) for client, update in zip(connections, updates, strict=True)]
        answers = await within(SERVED_S, asyncio.gather(*calls, return_exceptions=True), "concurrent announcements")
        accepted = [update for update, answer in zip(updates, answers, strict=True) if answer is None]
        others = [answer for answer in answers if answer is not None]
        what = "of four updates that were announced at the same time"
        require(len(accepted) == 1, f"{what} {len(accepted)} were accepted")
        are_refused = all(isinstance(answer, UpdateRefusedError) for answer in others)
        require(are_refused, f"{what} the others raised {others}")
        answer = await publisher.complete(accepted[0], other)
        require(
            answer.version == accepted[0].version, f"version {accepted[0].version} won, but {answer.version} is served"
        )
    await subject.require_serves(other, "after the update that was accepted")


@check("U-55", "updates", deadline_s=40, look_at=_ORDER)
async def commit_races_with_abort(subject: EndpointSubject) -> None:
    """If a commit and an abort are concurrent, one wins, and both answers agree with what is then served."""
    publisher, served = subject.publisher, subject.reference.weights
    other = subject.reference.with_final_norm(-1.0, "B")
    second = await subject.another_connection()
    winners = []
    for i in range(_NUM_ROUNDS):
        update = await publisher.request(other)
        await publisher.send(update, other, 0)
        calls = [subject.endpoint.commit_weight_update(update.ref), second.abort_weight_update(update.ref)]
        order = 1 if i % 3 else -1
        racing = asyncio.gather(*calls[::order], return_exceptions=True)
        commit, abort = (await within(SERVED_S, racing, "a commit during an abort"))[::order]
        version = await wait_until_settled(subject, "after a commit during an abort")
        is_legal = isinstance(abort, WeightVersion | UpdateRefusedError)
        require(is_legal, f"an abort during a commit raised {abort!r}")
        if version.state is EndpointState.POISONED:  # bytes were applied as they arrived
            require(
                not isinstance(commit, WeightVersion),
                "a commit during an abort was answered, but left the state POISONED",
            )
            winners.append("abort, POISONED")
            publisher.lose_group()
            await publisher.publish(served)
            await subject.require_serves(served, "after a complete update")
            continue
        _require_answers_agree(version, update, commit, abort)
        winners.append("commit" if isinstance(commit, WeightVersion) else "abort")
        if winners[-1] == "commit":
            served, other, publisher.version = other, served, update.version
        await subject.require_serves(served, f"after the {winners[-1]} won")
        publisher.lose_group()
    subject.note(winners=winners)


def _require_answers_agree(version: WeightVersion, update: WeightUpdate, commit: object, abort: object) -> None:
    """Require that the answers of a concurrent commit and abort agree with what is served."""
    require(version.state is EndpointState.READY, f"after a commit during an abort, the state is {version.state}")
    committed = isinstance(commit, WeightVersion)
    is_legal = committed or isinstance(commit, UpdateRefusedError | UpdateAbortedError)
    require(is_legal, f"a commit during an abort raised {commit!r}")
    require(
        committed == (version.version == update.version),
        f"a commit of {update.version} during an abort returned {commit!r}, but version {version.version} is served",
    )
    if isinstance(abort, WeightVersion):
        words = f"an abort during a commit returned version {abort.version}, but {version.version} is served"
        require(abort.version == version.version, words)


@check("U-56", "updates", deadline_s=40)
@look_at("what is lost or counted twice when a pause begins: a step in flight, a pending wake-up")
async def many_pauses(subject: EndpointSubject) -> None:
    """However often sampling is paused and resumed, every running request finishes as if it had never been paused."""
    await subject.publisher.form_group()
    num_tokens = min(200, subject.context_len // 2)
    running = await subject.start_running(4, max_tokens=num_tokens)
    for _ in range(_MANY_PAUSES):
        await subject.publisher.abort(await subject.publisher.request(subject.reference.weights))
    what = f"a request that was paused {_MANY_PAUSES} times"
    await require_all_sampled_from(subject, subject.reference.weights, running, what)
    await require_old_weights(subject, f"after {_MANY_PAUSES} pauses")
    if subject.capabilities.seeds:
        again = [request.model_copy(update={"request_id": f"{request.request_id}-again"}) for request, _ in running]
        responses = await asyncio.gather(*map(subject.endpoint.generate, again))
        pairs = zip(
            (task.result().completions[0] for _, task in running), (it.completions[0] for it in responses), strict=True
        )
        require_repeated(subject, pairs, f"paused {_MANY_PAUSES} times and never paused")


@check("U-57", "updates", deadline_s=40)
@look_at("whether a paused engine still handles cancellations, or handles them when it continues")
async def client_leaves_during_a_pause(subject: EndpointSubject) -> None:
    """When a client disconnects during a pause, its request ends for good, whether it was running or waiting."""
    await subject.publisher.form_group()
    is_alone = subject.capabilities.max_concurrent_sequences < 2
    usual_s = await subject.seconds_to_fill_the_context() if is_alone else 0.0
    running = await subject.start_running(4)
    staying = [] if is_alone else [running.pop()[1]]
    update = await subject.publisher.request(subject.reference.weights)
    leaving = [*running, *subject.start(2, subject.remaining_tokens())]
    await asyncio.sleep(0.1)
    await cancel_and_wait(*(task for _, task in leaving))
    await asyncio.sleep(GRACE_S)
    await subject.publisher.abort(update)
    if not is_alone:
        await subject.generate(max_tokens=1)  # it was sent last, so requests that were not cancelled have started
    what = "a request whose client disconnected during a pause"
    await require_ended_early(subject, staying, max(usual_s / 2, GRACE_S), what)
    await cancel_and_wait(*staying)
    await until_running(subject, 0, SERVED_S, "a request that was cancelled was still being decoded")
    await require_old_weights(subject, "after clients disconnected during a pause")

"""Level ``control``: calls of named sessions that are repeated or late, and trainers that are replaced."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from inflight.conformance.checks import check, fail, look_at, require
from inflight.conformance.endpoint.aftermath import require_old_weights, require_serving
from inflight.conformance.endpoint.control import require_open
from inflight.conformance.endpoint.publishing import SteppedPublisher
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.endpoint.waiting import GRACE_S, SERVED_S, SLACK_S, within
from inflight.conformance.reference import ReferenceWeights
from inflight.errors import FencedError, InflightError, UpdateRefusedError
from inflight.wire import EndpointState, InFlightPolicy, UpdateRef, WeightUpdate, WeightVersion

LEVEL = "control"
T = TypeVar("T")
_NUM_DRAINED = 150
"""Number of tokens of each request that a drain waits for."""
_NUM_REPORTED = 16
"""Number of runs whose incarnations an endpoint reports."""
_NUM_BETWEEN, _NUM_UNOPENED = 20, 220
"""How many sessions are aborted after they were requested, and how many before, until an earlier one is called again.
Endpoints remember 256 ended sessions."""
_LEASE_S, _BETWEEN_S = 1.2, 0.1
"""Lease of an update during which late calls of another session arrive, and the time between them."""
_NAMES = "whether run, version and session are remembered for open, served and ended updates"


@check("E-47", "updates", deadline_s=40, look_at=_NAMES)
async def repeated_calls(subject: EndpointSubject) -> None:
    """A call of a named session may be repeated, even while the first call is in progress: a second request, bucket,
    commit or abort changes nothing and gets the same answer as the first."""
    publisher, endpoint = subject.publisher, subject.endpoint
    other = subject.reference.with_final_norm(-1.0, "B")
    update = await publisher.request(other, session_id="first", bucket_bytes=other.size_bytes // 2)
    await _again(endpoint.request_weight_update(update.model_copy()), "request_weight_update")
    await require_open(subject, update, "after request_weight_update was repeated")
    for index in range(len(update.buckets)):
        await publisher.send(update, other, index)
        for arrived in range(index + 1):
            await _again(endpoint.receive_weights(publisher.transfer(update, arrived)), f"bucket {arrived}")
        await _again(endpoint.request_weight_update(update.model_copy()), f"request_weight_update after bucket {index}")
        await require_open(subject, update, f"after the calls up to bucket {index} were repeated")
    answer = await publisher.commit(update)
    _require_same(answer, await _again(endpoint.commit_weight_update(update.ref), "the commit"), "the commit")
    await subject.require_serves(other, "after a session whose calls were repeated")
    ended = await _again(endpoint.abort_weight_update(update.ref), "an abort of a committed update")
    _require_same(answer, ended, "an abort of a committed update")

    second = await publisher.request(subject.reference.weights, session_id="second")
    await publisher.send(second, subject.reference.weights, 0)
    aborted = await publisher.abort(second)
    _require_same(answer, aborted, "an abort of the next session")
    _require_same(aborted, await _again(publisher.abort(second), "the abort"), "the abort")
    await subject.require_serves(other, "after a session that was aborted twice")
    await _repeat_while_in_progress(subject)
    if InFlightPolicy.DRAIN in subject.capabilities.in_flight_policies:
        await _repeat_during_a_drain(subject)


async def _repeat_while_in_progress(subject: EndpointSubject) -> None:
    """Require that a receive or commit that is repeated while the first call is in progress gets the same result."""
    publisher, endpoint, weights = subject.publisher, subject.endpoint, subject.reference.weights
    publisher.lose_group()
    update = await publisher.request(weights, session_id="in-progress")
    for index in range(len(update.buckets)):
        transfer = publisher.transfer(update, index)
        first = subject.begin(endpoint.receive_weights(transfer))
        await asyncio.sleep(_BETWEEN_S)
        second = subject.begin(endpoint.receive_weights(transfer.model_copy()))
        await asyncio.sleep(_BETWEEN_S)
        await publisher.send_only(publisher.bucket(update, weights, index))
        for call in (first, second):
            await _again(call, f"receive_weights of bucket {index} while it was arriving")
    commits = [subject.begin(endpoint.commit_weight_update(update.ref)) for _ in range(2)]
    answers = [await _again(commit, "a commit while it was in progress") for commit in commits]
    _require_same(answers[0], answers[1], "a commit in progress")
    publisher.version = update.version
    await subject.require_serves(weights, "after a session whose calls were repeated while they were in progress")


async def _repeat_during_a_drain(subject: EndpointSubject) -> None:
    """Require that a request that is repeated during its own drain returns once the drain has ended."""
    publisher, endpoint = subject.publisher, subject.endpoint
    publisher.lose_group()
    await publisher.form_group()
    running = await subject.start_running(2, max_tokens=min(_NUM_DRAINED, subject.context_len // 2))
    update = publisher.announcement(
        subject.reference.weights, session_id="third", in_flight=InFlightPolicy.DRAIN, deadline_s=3 * SERVED_S
    )
    publisher.begin(update)
    calls = [subject.begin(endpoint.request_weight_update(it)) for it in (update, update.model_copy())]
    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait([task for _, task in running], timeout=GRACE_S)
    num_left = sum(not task.done() for _, task in running)
    require(
        num_left == 0,
        f"a request for an update was repeated during its drain and returned while {num_left} requests still ran",
    )
    await within(SLACK_S, asyncio.gather(*calls), "a request for an update and its repetition")
    await publisher.abort(update)


@check("E-48", "updates", deadline_s=50, look_at=_NAMES)
async def late_calls(subject: EndpointSubject) -> None:
    """A call of a named session that was aborted or replaced, or whose lease has expired, is refused, even if the abort
    overtook it or other sessions have ended since; a repeated abort succeeds. Such a call neither disturbs an open
    update nor renews the lease of that update."""
    publisher, endpoint = subject.publisher, subject.endpoint
    other = subject.reference.with_final_norm(-1.0, "B")
    bucket_bytes = other.size_bytes // 2
    first = await publisher.request(other, session_id="first", bucket_bytes=bucket_bytes)
    await publisher.send(first, other, 0)
    await publisher.abort(first)
    publisher.lose_group()
    await publisher.form_group()
    overtaken = publisher.announcement(other, session_id="overtaken")
    await publisher.abort(overtaken)
    await subject.require_refused(endpoint.request_weight_update(overtaken), "a request that its abort has overtaken")
    for call, what in _calls(subject, first):
        await subject.require_refused(call(), f"{what} of a session that was aborted")
    await require_old_weights(subject, "after the calls of a session that was aborted")

    second = await publisher.request(other, session_id="second", bucket_bytes=bucket_bytes)
    for index in range(len(second.buckets)):
        abort = (lambda: endpoint.abort_weight_update(first.ref), "abort_weight_update")
        for call, what in (*_calls(subject, first), abort):
            await subject.require_refused(call(), f"{what} of an aborted session, while the next one is open,")
            await require_open(subject, second, f"after {what} of an aborted session")
        await publisher.send(second, other, index)
    answer = await publisher.commit(second)
    require(
        (answer.version, answer.session_id) == (second.version, "second"),
        f"the commit of session 'second' reports version {answer.version} and session {answer.session_id!r}",
    )
    for call, what in _calls(subject, first):
        await subject.require_refused(call(), f"{what} of an aborted session whose version another one has committed")
    await subject.require_serves(other, "after the second attempt")
    await publisher.publish(subject.reference.weights, session_id="third")
    for call, what in _calls(subject, second):
        await subject.require_refused(call(), f"{what} of a session that another one has replaced")
    await require_old_weights(subject, "after the calls of a session that was replaced")

    expired = await _expire_during_late_calls(subject, first, other)
    for call, what in _calls(subject, expired):
        await subject.require_refused(call(), f"{what} of a session whose lease has expired")
    require_serving(await publisher.abort(expired), publisher.version, "an abort of a session whose lease has expired")
    await require_old_weights(subject, "after the calls of a session whose lease has expired")
    aborted = await publisher.request(other, session_id="aborted")
    overtaken = publisher.announcement(other, session_id="overtaken-long-ago")
    for update in (aborted, overtaken):
        await publisher.abort(update)
    for i in range(_NUM_BETWEEN):
        await publisher.abort(await publisher.request(other, session_id=f"between-{i}"))
    for i in range(_NUM_UNOPENED):
        await publisher.abort(publisher.announcement(other, session_id=f"unopened-{i}"))
    num_since = _NUM_BETWEEN + _NUM_UNOPENED
    for update, what in ((aborted, "aborted"), (overtaken, "aborted before it was requested")):
        requesting = endpoint.request_weight_update(update)
        await subject.require_refused(requesting, f"a request of a session that was {what}, {num_since} sessions ago,")
    await require_old_weights(subject, "after the request of a session that was aborted long ago")


async def _expire_during_late_calls(
    subject: EndpointSubject, ended: WeightUpdate, weights: ReferenceWeights
) -> WeightUpdate:
    """Make calls of a session that has ended until the lease of an open update expires; return that update.

    Require that the lease expires in time even though the calls continue.
    """
    update = await subject.publisher.request(weights, session_id="expired", lease_s=_LEASE_S)
    opened, num_calls = time.monotonic(), 0
    while (found := await subject.endpoint.weight_version()).state is not EndpointState.READY:
        open_s = time.monotonic() - opened
        require(
            open_s < _LEASE_S + SLACK_S,
            f"an update with a lease of {_LEASE_S:g} s is still {found.state} {open_s:.2g} s after its only call, "
            f"while {num_calls} calls of a session that had ended were made",
        )
        for call, _ in _calls(subject, ended):
            with contextlib.suppress(UpdateRefusedError):
                await within(SLACK_S, call(), "a call of a session that had ended")
            num_calls += 1
        await asyncio.sleep(_BETWEEN_S)
    subject.note(**{"late calls until the lease had expired": num_calls})
    return update


def _calls(subject: EndpointSubject, update: WeightUpdate) -> list[tuple[Callable[[], Awaitable[object]], str]]:
    """Return the calls of a session, except its abort."""
    endpoint, last = subject.endpoint, len(update.buckets) - 1
    return [
        (lambda: endpoint.request_weight_update(update), "request_weight_update"),
        (lambda: endpoint.receive_weights(subject.publisher.transfer(update, last)), "receive_weights"),
        (lambda: endpoint.commit_weight_update(update.ref), "commit_weight_update"),
    ]


@check("E-49", "updates", deadline_s=40)
@look_at("whether the incarnation is checked before the open update is touched")
async def replaced_trainer(subject: EndpointSubject) -> None:
    """Once a later incarnation of a run has made a call, init_process_group and request_weight_update by an earlier one
    raise FencedError, and the later one's group and update continue."""
    first, endpoint = subject.publisher, subject.endpoint
    other, third = subject.reference.with_final_norm(-1.0, "B"), subject.reference.with_final_norm(0.5, "C")
    earlier = subject.another_publisher(run_id=first.run_id, incarnation=1)
    await earlier.publish(subject.reference.weights)
    later = subject.another_publisher(run_id=first.run_id, incarnation=2)
    later.version = earlier.version
    update = await later.request(other, session_id="later", bucket_bytes=other.size_bytes // 2)
    calls: tuple[tuple[Callable[[], Awaitable[None]], str], ...] = (
        (lambda: endpoint.init_process_group(earlier.open_group(SLACK_S / 2)), "init_process_group"),
        (lambda: endpoint.request_weight_update(earlier.announcement(third)), "request_weight_update"),
    )
    for index in range(len(update.buckets)):
        for call, method in calls:
            what = f"{method} of an earlier incarnation"
            await subject.require_raises(call(), FencedError, what)
            await require_open(subject, update, f"after {what} was refused")
        await later.send(update, other, index)
    await later.commit(update)
    await subject.require_serves(other, "after the later incarnation's update")
    found = await endpoint.weight_version()
    require(
        (found.owner_run_id, found.incarnation) == (later.run_id, 2),
        f"incarnation 2 of run {later.run_id!r} has taken over, but incarnation {found.incarnation} of "
        f"{found.owner_run_id!r} is reported",
    )
    await later.publish(third)
    await subject.require_serves(third, "after the later incarnation's next update, over the same group")


@check("E-88", "updates", deadline_s=40)
@look_at("whether the incarnations of runs other than the owner are remembered, reported and compared")
async def returning_run(subject: EndpointSubject) -> None:
    """A run that returns after another run has published takes the incarnation after its highest one, which the
    endpoint reports, and is not fenced; its earlier incarnations are, also while the other run owns the endpoint."""
    weights, endpoint = [subject.reference.with_final_norm(-1.0, "B"), subject.reference.weights], subject.endpoint
    run_id = subject.publisher.run_id
    earlier: list[SteppedPublisher] = []
    owner = subject.publisher
    for number, own_run in enumerate((True, True, False, True)):  # the run twice, another run, the run again
        incarnation = 1 + (await endpoint.weight_version()).incarnations.get(run_id, 0) if own_run else 1
        wanted = len(earlier) + 1
        require(
            not own_run or incarnation == wanted,
            f"run {run_id!r} has published as incarnations 1 to {wanted - 1}, but incarnation {incarnation - 1} of it "
            f"is reported in incarnations after run {owner.run_id!r} has published",
        )
        version = owner.version
        owner = subject.another_publisher(run_id=run_id if own_run else None, incarnation=incarnation)
        owner.version = version
        update = await owner.request(weights[number % 2], session_id=f"session-{number}")
        for replaced in earlier if own_run else earlier[:-1]:
            what = f"init_process_group of incarnation {replaced.incarnation} of run {run_id!r}"
            spec = replaced.open_group(SLACK_S / 2)
            await subject.require_raises(endpoint.init_process_group(spec), FencedError, what)
            await require_open(subject, update, f"after {what} was refused")
        await owner.send_all(update, weights[number % 2])
        await owner.commit(update)
        await subject.require_serves(weights[number % 2], f"after incarnation {incarnation} of run {owner.run_id!r}")
        earlier += [owner] if own_run else []
    for _ in range(_NUM_REPORTED):
        await subject.another_publisher(incarnation=1).form_group()
    latest = earlier[-1]
    what = f"init_process_group of incarnation {latest.incarnation} of run {run_id!r}, after {_NUM_REPORTED} other runs"
    call = endpoint.init_process_group(latest.open_group(SLACK_S / 2))
    await subject.require_raises(call, FencedError, what)
    later = subject.another_publisher(run_id=run_id, incarnation=latest.incarnation + 1)
    await later.publish(subject.reference.weights)


async def _again(call: Awaitable[T], what: str) -> T:
    """Repeat a call that was made before, and return the answer. Fail the check if the call is refused."""
    try:
        return await within(SLACK_S, call, f"{what}, repeated,")
    except InflightError as error:
        fail(f"{what}, repeated, raised {type(error).__name__} ({error}) although it changes nothing")


def _require_same(first: WeightVersion, again: WeightVersion, what: str) -> None:
    """Require that two answers report that the same weights are served."""
    served = [(a.state, UpdateRef(run_id=a.run_id or "none", version=a.version), a.session_id) for a in (first, again)]
    require(served[0] == served[1], f"{what} returned {served[1]}, the previous call {served[0]}")

"""Level ``faults``: control messages that are repeated, out of order or from another run, and callers that
disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from inflight.base.tasks import cancel_and_wait, start
from inflight.conformance.checks import CheckFailed, check, fail, look_at, require
from inflight.conformance.endpoint.aftermath import (
    require_all_whole,
    require_old_weights,
    require_recovers,
    require_refused_while_running,
    require_serving,
    wait_until_settled,
)
from inflight.conformance.endpoint.publishing import SteppedPublisher
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.endpoint.waiting import SLACK_S, SLOWNESS, within
from inflight.conformance.reference import ReferenceWeights
from inflight.errors import InflightError, TransferError, UpdateAbortedError, UpdateRefusedError
from inflight.wire import EndpointState, InFlightPolicy

LEVEL = "faults"
_SEEN_LENGTH = 64
"""Length of a prompt that is sent again. Engines cache whole pages of 16 tokens or more."""
_SHORT_S = 0.7
"""Timeout for calls that fail, and the lease of a pause whose publisher stops sending messages."""
_SESSION = "the state machine of an update: which message it expects next, and whether it checks run, version and index"


@check("U-45", "updates", deadline_s=40, look_at=_SESSION)
async def messages_sent_twice(subject: EndpointSubject) -> None:
    """In every state, a control message that arrives a second time is refused or changes nothing."""
    publisher, endpoint = subject.publisher, subject.endpoint
    other = subject.reference.with_final_norm(-1.0, "B")
    spec = publisher.open_group(_SHORT_S)
    await publisher.join_group(spec)
    try:
        await within(_SHORT_S + SLACK_S, endpoint.init_process_group(spec), "init_process_group, sent again,")
    except InflightError as error:
        subject.note(**{"init_process_group again": str(error)})
    await require_old_weights(subject, "after init_process_group was sent twice")
    await publisher.form_group()

    update = await publisher.request(other, bucket_bytes=other.size_bytes // 2)

    call = endpoint.request_weight_update(update)
    await subject.require_refused(call, "request_weight_update, sent again while paused,")
    for index in range(len(update.buckets)):
        transfer, what = publisher.transfer(update, index), f"receive_weights of bucket {index}"
        first = subject.begin(endpoint.receive_weights(transfer))
        await asyncio.sleep(0.05)
        await subject.require_refused(endpoint.receive_weights(transfer), f"{what}, sent again while it is pending,")
        await publisher.send_only(publisher.bucket(update, other, index))
        await within(SLACK_S, first, what)
        await subject.require_refused(endpoint.receive_weights(transfer), f"{what}, sent again after it arrived,")
    call = endpoint.request_weight_update(update)
    await subject.require_refused(call, "request_weight_update, sent again while updating,")
    await publisher.commit(update)
    await _refused_or_unchanged(subject, endpoint.commit_weight_update(update.ref), "a commit after the commit")
    await _refused_or_unchanged(subject, endpoint.abort_weight_update(update.ref), "an abort after the commit")
    await subject.require_serves(other, "after an update whose messages were sent twice")


async def _refused_or_unchanged(subject: EndpointSubject, call: Awaitable[Any], what: str) -> None:
    """Require that a call is refused or returns the served version."""
    try:
        answer = await within(SLACK_S, call, what)
    except UpdateRefusedError as error:
        subject.note(**{what: str(error)})
    else:
        require_serving(answer, subject.publisher.version, what)


@check("U-46", "updates", deadline_s=40, look_at=_SESSION)
async def messages_out_of_order(subject: EndpointSubject) -> None:
    """Control messages that arrive out of order are refused and change nothing; afterwards, the correct order works."""
    publisher, endpoint, refused = subject.publisher, subject.endpoint, subject.require_refused
    other = subject.reference.with_final_norm(-1.0, "B")
    update = await publisher.request(other, bucket_bytes=other.size_bytes // 3)
    last = len(update.buckets) - 1
    await refused(endpoint.commit_weight_update(update.ref), "a commit before the first bucket")
    await refused(endpoint.receive_weights(publisher.transfer(update, 1)), "bucket 1 before bucket 0")
    await refused(endpoint.receive_weights(publisher.transfer(update, last)), "the last bucket before the first")
    foreign = publisher.transfer(update, 0).model_copy(update={"version": update.version + 1})
    await refused(endpoint.receive_weights(foreign), "a bucket of another version")
    await publisher.abort(update)
    await refused(endpoint.commit_weight_update(update.ref), "a commit after the abort")
    await refused(endpoint.receive_weights(publisher.transfer(update, 0)), "a bucket after the abort")
    await require_old_weights(subject, "after messages out of order")
    if InFlightPolicy.DRAIN in subject.capabilities.in_flight_policies:
        await _commit_before_the_pause(subject, other)

    update = await publisher.request(other, bucket_bytes=other.size_bytes // 3)
    await publisher.complete(update, other)
    await refused(endpoint.receive_weights(publisher.transfer(update, 0)), "a bucket after the commit")
    await subject.require_serves(other, "after messages in the right order")


async def _commit_before_the_pause(subject: EndpointSubject, weights: ReferenceWeights) -> None:
    """Send every bucket while the endpoint drains; require that a commit is refused until the pause is in effect."""
    publisher, endpoint = subject.publisher, subject.endpoint
    num_tokens = min(200, subject.context_len // 2)
    were_over: list[bool] = []
    """For each accepted commit, whether the pause was in effect before it."""

    async def commit() -> None:
        update = publisher.announcement(weights, in_flight=InFlightPolicy.DRAIN)
        publisher.begin(update)
        pausing = subject.begin(endpoint.request_weight_update(update))
        await asyncio.sleep(0.03)
        try:
            await publisher.send(update, weights, 0)
        except UpdateRefusedError as error:  # before the pause, a bucket may be refused or staged
            subject.note(**{"a bucket before the pause": str(error)})
        is_over = pausing.done()
        try:
            await publisher.commit(update)
            were_over.append(is_over)
        except UpdateRefusedError:
            await pausing
            await publisher.abort(update)
            raise
        finally:
            publisher.lose_group()
        await publisher.publish(subject.reference.weights)

    what = "a commit during a drain"
    try:
        running = await require_refused_while_running(subject, 2, num_tokens, commit, what)
    except CheckFailed:
        if len(were_over) < len(subject.lengths(num_tokens)) or not any(were_over):
            raise
        subject.note(**{what: "not checked: a bucket arrives only once the pause is in effect"})
        return
    await require_all_whole(running, "a request that was drained while messages arrived out of order")


@check("U-47", "updates", deadline_s=40)
@look_at("whether a pending transfer over the old group can be ended without a late effect on the new one")
async def new_group_ends_the_update(subject: EndpointSubject) -> None:
    """Forming a group while an update is open ends that update, and the next update uses the new group."""
    publisher, other = subject.publisher, subject.reference.perturbed("B")
    update = await publisher.request(other, bucket_bytes=other.size_bytes // 2)
    await publisher.send(update, other, 0)
    pending = subject.begin(subject.endpoint.receive_weights(publisher.transfer(update, 1, 3 * SLACK_S)))
    await asyncio.sleep(0.1)
    second = subject.another_publisher()
    await within(3 * SLACK_S, second.form_group(), "forming a group while an update is open")
    errors = (TransferError, UpdateAbortedError)
    await subject.require_raises(pending, errors, "receiving over a group that was replaced")
    await require_old_weights(subject, "after a new group was formed", may_be_torn=True)
    await subject.require_refused(publisher.commit(update), "a commit of an update whose group was replaced")
    third = subject.reference.perturbed("C", seed=2)
    await second.publish(third)
    await subject.require_serves(third, "after an update over the new group")


@check("U-50", "updates", deadline_s=60)
@look_at("what a cancelled handler leaves behind: a pause without a lease, a half-applied commit")
async def callers_go_away(subject: EndpointSubject) -> None:
    """When the caller of a control call disconnects, the update ends on its own or is applied completely."""
    publisher, endpoint, short_s = subject.publisher, subject.endpoint, _SHORT_S * SLOWNESS.get()
    other = subject.reference.with_final_norm(-1.0, "B")
    await publisher.form_group()
    if InFlightPolicy.DRAIN in subject.capabilities.in_flight_policies:
        running = await subject.start_running(2, max_tokens=min(200, subject.context_len // 2))
        drain = publisher.announcement(other, in_flight=InFlightPolicy.DRAIN, deadline_s=short_s, lease_s=short_s)
        await _cancelled_after(0.05, endpoint.request_weight_update(drain))
        await require_old_weights(subject, "after a drain whose caller disconnected", seconds=2 * short_s + SLACK_S)
        for _, task in running:
            await within(15.0, task, "a request that ran when the caller of a drain disconnected")

    update = await publisher.request(other, lease_s=2 * short_s)
    await _cancelled_after(0.1, endpoint.receive_weights(publisher.transfer(update, 0, short_s)))
    when = "after a receive whose caller disconnected"
    await require_old_weights(subject, when, seconds=3 * short_s + SLACK_S, may_be_torn=True)
    publisher.lose_group()

    served: list[str] = []
    for delay_s in (0.0, 0.001, 0.005):
        before = publisher.version
        update = await publisher.request(other, lease_s=short_s)
        await publisher.send(update, other, 0)
        await _cancelled_after(delay_s, endpoint.commit_weight_update(update.ref))
        when = "after a commit whose caller disconnected"
        version = await wait_until_settled(subject, when, short_s + SLACK_S)
        if version.state is EndpointState.POISONED:  # the commit never arrived, and bytes were applied as they arrived
            await require_old_weights(subject, when, may_be_torn=True)
            served.append("none")
        else:
            require(version.state is EndpointState.READY, f"{when}, {version.state}")
            words = f"after a commit of {update.version} whose caller disconnected, version {version.version} is served"
            require(version.version in (before, update.version), words)
            applied = version.version == update.version
            served.append("new" if applied else "old")
            weights = other if applied else subject.reference.weights
            await subject.require_serves(weights, f"{when}, at version {version.version}")
        publisher.lose_group()  # as the endpoint has if the lease ended an update halfway
        await publisher.publish(subject.reference.weights, version=update.version)
    subject.note(**{"served after a commit that was cancelled": served})
    await require_recovers(subject, "after calls whose callers disconnected")


async def _cancelled_after(seconds: float, call: Awaitable[object]) -> None:
    task = start(call)
    await asyncio.wait([task], timeout=seconds)
    await cancel_and_wait(task)


@check("U-58", "updates", deadline_s=30)
@look_at("whether versions are compared, and caches keyed, by run, incarnation and version")
async def another_run_starts_lower(subject: EndpointSubject) -> None:
    """Another run, or a later incarnation of the same run, may start at a lower version, even one that was served
    before with other weights; requests use nothing that those weights computed. The same applies to every update of a
    later incarnation until one is committed, however its earlier updates ended."""
    # A trainer that resumes from a checkpoint does this.
    publisher, reference = subject.publisher, subject.reference
    prompt = subject.prompt(min(_SEEN_LENGTH, subject.context_len // 2))
    other, third = reference.perturbed("B"), reference.perturbed("C", seed=2)
    for weights in (other, reference.weights):
        await publisher.publish(weights)
    await subject.require_serves(reference.weights, "after two updates of one run", prompt)
    another = publisher
    for weights, version, incarnation in (
        *((other, publisher.version, 0), (reference.weights, 1, 0), (other, 1, 0)),
        *((third, 1, 1), (reference.weights, 0, 2), (other, 1, 3)),
    ):
        run_id = another.run_id if incarnation else None
        another.lose_group()
        another = subject.another_publisher(run_id=run_id, incarnation=incarnation)
        answer = await another.publish(weights, version=version)
        when = f"after {f'incarnation {incarnation} of a run' if incarnation else 'another run'} published {version}"
        require(
            (answer.run_id, answer.version) == (another.run_id, version),
            f"{when}, version {answer.version} of run {answer.run_id!r} is reported as served",
        )
        await subject.require_serves(weights, f"{when}, with other weights than before", prompt)
    (completion,) = await require_all_whole(subject.start(1, 16), "a request under another run")
    versions = {span.version for span in completion.version_spans}
    require(versions == {1}, f"under version 1 of another run, spans name {sorted(versions)}")
    await _start_lower_after_an_abort(subject, another)


async def _start_lower_after_an_abort(subject: EndpointSubject, earlier: SteppedPublisher) -> None:
    """Require that a later incarnation whose first update was aborted may still start at a lower version."""
    weights, other, served = subject.reference.weights, subject.reference.perturbed("D", seed=3), 5
    await earlier.publish(weights, version=served)
    later = subject.another_publisher(run_id=earlier.run_id, incarnation=earlier.incarnation + 1)
    earlier.lose_group()
    aborted = await later.request(other, version=served + 1)
    answer = await later.abort(aborted)
    when = "after the first update of a later incarnation was aborted"
    require_serving(answer, served, "the abort of the first update of a later incarnation")
    await subject.require_serves(weights, when)
    try:
        lower = await later.publish(other, version=served - 2)
    except UpdateRefusedError as error:
        fail(f"{when}, version {served - 2} of that incarnation was refused although none has been committed: {error}")
    require(
        lower.version == served - 2, f"{when}, it published {served - 2}, but {lower.version} is reported as served"
    )
    await subject.require_serves(other, f"{when}, and it published a lower version")

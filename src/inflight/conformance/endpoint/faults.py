"""Level faults, transfers that do not happen, happen late, or happen in part."""

from __future__ import annotations

import asyncio
import socket
import time

from inflight.conformance.checks import check, require
from inflight.conformance.endpoint.aftermath import SLACK_S, require_old_weights, require_recovers, within
from inflight.conformance.endpoint.holds import SERVED_S, require_all_whole, start
from inflight.conformance.endpoint.publishing import TRANSFER_TIMEOUT_S
from inflight.conformance.endpoint.subject import EndpointSubject, cancelled_at_the_end
from inflight.conformance.reference import Weights
from inflight.errors import TransferError, UpdateAbortedError
from inflight.wire import EndpointState, WeightUpdate

LEVEL = "faults"
_SHORT_S = 0.7
"""Timeout of what will not happen, and lease of a hold that falls silent."""
_LATE_S = 1.2
"""How late a slow sender is; well within the timeout."""
_DEADLINES = "whether the timeout of the message is the one that the collective gets, and a blocked call can be left"


@check("U-40", needs=("updates",), deadline_s=30, look_at=_DEADLINES)
async def sender_never_joins(subject: EndpointSubject) -> None:
    """If the group is not formed, init_process_group raises TransferError in time, and the endpoint serves on."""
    absent = subject.publisher.open_group(_SHORT_S)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # and does not listen
        unreachable = absent.model_copy(update={"master_address": "127.0.0.1", "master_port": probe.getsockname()[1]})
        for spec, what in ((absent, "a group that nobody else joins"), (unreachable, "a group without a store")):
            since = time.monotonic()
            joining = asyncio.ensure_future(subject.endpoint.init_process_group(spec))
            await subject.enter(cancelled_at_the_end([joining]))
            await require_all_whole(await start(subject, 1, 16), f"a request while the endpoint joins {what}")
            error = await subject.require_raises(
                within(_SHORT_S + SLACK_S, joining, f"joining {what}"), (TransferError,), f"joining {what}"
            )
            subject.note(**{what: str(error), f"seconds, {what}": time.monotonic() - since})
    await require_old_weights(subject, "after groups that were not formed")
    await require_recovers(subject, "after groups that were not formed")


@check("U-41", needs=("updates",), deadline_s=30, look_at=_DEADLINES)
async def bucket_never_sent(subject: EndpointSubject) -> None:
    """If a bucket is not sent, receive_weights raises TransferError within its timeout."""
    publisher = subject.publisher
    update = await publisher.request(subject.reference.with_final_norm(-1.0, "B"))
    since = time.monotonic()
    receiving = subject.endpoint.receive_weights(publisher.transfer(update, 0, _SHORT_S))
    what = "receiving a bucket that is not sent"
    error = await subject.require_raises(within(_SHORT_S + SLACK_S, receiving, what), (TransferError,), what)
    subject.note(error=str(error), timeout_s=_SHORT_S, seconds=time.monotonic() - since)
    await require_old_weights(subject, "after a bucket that was not sent", may_be_torn=True)
    await require_recovers(subject, "after a bucket that was not sent")


@check("U-44", needs=("updates",), deadline_s=30, look_at=_DEADLINES)
async def slow_sender(subject: EndpointSubject) -> None:
    """A bucket that is sent late but within the timeout of its transfer arrives."""
    publisher, other = subject.publisher, subject.reference.with_final_norm(-1.0, "B")
    update = await publisher.request(other, bucket_bytes=other.size_bytes // 2)
    for index in range(len(update.buckets)):
        await publisher.send(update, other, index, delay_s=0.0 if index else _LATE_S)
    await publisher.commit(update)
    subject.note(delay_s=_LATE_S, timeout_s=TRANSFER_TIMEOUT_S)
    await subject.require_serves(other, "after an update whose sender was slow")


@check(
    "U-48",
    needs=("updates",),
    deadline_s=30,
    look_at="whether buckets are staged beside the model, and what is left in the stage for the next update",
)
async def torn_update(subject: EndpointSubject) -> None:
    """An update that ends after some of its buckets arrived leaves no trace: old weights, exactly, or POISONED."""
    publisher, other = subject.publisher, subject.reference.perturbed("B")
    running, is_poisoned = await start(subject, 2, 32), False
    for ending in ("an abort", "its lease"):
        update = await _send_half(subject, other, lease_s=20.0 if ending == "an abort" else _SHORT_S)
        if ending == "an abort":
            await publisher.abort(update)
        when = f"after half of an update, ended by {ending}"
        await require_old_weights(subject, when, seconds=_SHORT_S + SLACK_S, may_be_torn=True)
        is_poisoned |= (await subject.endpoint.weight_version()).state is EndpointState.POISONED
        publisher.lose_group()
    what = "a request that runs while updates end half way"
    if is_poisoned:  # nothing is left to sample it from
        ended = asyncio.gather(*(task for _, task in running), return_exceptions=True)
        await within(SERVED_S, ended, what)
    else:
        await require_all_whole(running, what)
    third = subject.reference.perturbed("C", seed=2)
    await publisher.publish(third, bucket_bytes=third.size_bytes // 4)
    await subject.require_serves(third, "after a complete update")


async def _send_half(subject: EndpointSubject, weights: Weights, lease_s: float) -> WeightUpdate:
    update = await subject.publisher.request(weights, bucket_bytes=weights.size_bytes // 4, lease_s=lease_s)
    num_sent = len(update.buckets) // 2
    require(num_sent, "the update travels in one bucket")
    for index in range(num_sent):
        await subject.publisher.send(update, weights, index)
    subject.note(buckets=len(update.buckets), sent=num_sent)
    return update


@check(
    "U-49",
    needs=("updates",),
    deadline_s=30,
    look_at="whether the abort gives the group up, so that a blocked collective ends or is left behind",
)
async def abort_while_receiving(subject: EndpointSubject) -> None:
    """An abort from another connection ends a pending receive_weights, and both end at once."""
    publisher, other = subject.publisher, await subject.another_connection()
    update = await publisher.request(subject.reference.with_final_norm(-1.0, "B"))
    pending = asyncio.ensure_future(subject.endpoint.receive_weights(publisher.transfer(update, 0, 3 * SLACK_S)))
    await subject.enter(cancelled_at_the_end([pending]))
    await asyncio.sleep(0.2)
    require(not pending.done(), "receive_weights returned though nothing was sent")
    since = time.monotonic()
    await within(SLACK_S, other.abort_weight_update(update.ref), "an abort while a bucket is awaited")
    error = await subject.require_raises(
        within(SLACK_S, pending, "receiving a bucket of an update that was aborted"),
        (TransferError, UpdateAbortedError),
        "receiving a bucket of an update that was aborted",
    )
    subject.note(error=str(error), **{"seconds until both had ended": time.monotonic() - since})
    await require_old_weights(subject, "after an abort while a bucket was awaited", may_be_torn=True)
    await require_recovers(subject, "after an abort while a bucket was awaited")

"""Level ``faults``: publisher and server processes that stop or die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from typing import Any

from inflight.conformance.checks import check, look_at
from inflight.conformance.doomed import DoomedSender, SendCommand, start_doomed_sender
from inflight.conformance.endpoint.aftermath import require_all_whole, require_old_weights, require_recovers
from inflight.conformance.endpoint.publishing import SteppedPublisher
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.endpoint.waiting import SLACK_S
from inflight.errors import DeadlineError, TransferError, UnreachableError
from inflight.http.client import HttpEndpoint
from inflight.wire import WeightUpdate

LEVEL = "faults"
_LEASE_S = 1.0
_RECEIVE_S = 1.0
"""Timeout of a bucket that is never sent."""
_CALL_S = 1.0
"""Deadline of calls to a stopped server."""
_GROUP_S = 10.0


@check("U-42", "updates", deadline_s=60)
@look_at("whether the endpoint needs the group's store, or its rank 0, for anything but a transfer")
async def publisher_killed_during_a_pause(subject: EndpointSubject) -> None:
    """When the publisher's process dies during a pause, the pause ends with its lease and the old weights stay in
    service."""
    sender: DoomedSender = await subject.enter(start_doomed_sender())
    update = await _begin(subject, sender, num_buckets=0, lease_s=_LEASE_S)
    await subject.endpoint.request_weight_update(update)
    waiting = subject.start(1, 16)
    sender.kill()
    await require_old_weights(subject, "after its publisher was killed", seconds=_LEASE_S + SLACK_S)
    await require_all_whole(waiting, "a request that arrived while the publisher was being killed")
    await require_recovers(subject, "after its publisher was killed")


@check("U-43", "updates", deadline_s=60)
@look_at("whether a collective that its peer has left can be ended from outside, and what is discarded then")
async def publisher_lost_in_a_bucket(subject: EndpointSubject) -> None:
    """When the publisher's process stops or dies while a bucket is due, receive_weights fails within its timeout."""
    sender: DoomedSender = await subject.enter(start_doomed_sender())
    for what in ("stopped", "killed"):
        update = await _begin(subject, sender, num_buckets=1, lease_s=20.0)
        await subject.endpoint.request_weight_update(update)
        await subject.endpoint.receive_weights(subject.publisher.transfer(update, 0))
        pending = subject.begin(subject.endpoint.receive_weights(subject.publisher.transfer(update, 1, _RECEIVE_S)))
        await asyncio.sleep(0.1)
        (sender.stop if what == "stopped" else sender.kill)()
        receiving = f"receiving from a publisher that was {what}"
        await subject.require_raises(pending, TransferError, receiving, _RECEIVE_S + SLACK_S)
        await require_old_weights(
            subject, f"after its publisher was {what} in the middle of a bucket", may_be_torn=True
        )
        if what == "stopped":
            sender.resume()
            await require_recovers(subject, "after its publisher was stopped in the middle of a bucket")
            await subject.publisher.publish(subject.reference.weights)
    await require_recovers(subject, "after its publisher was killed in the middle of a bucket")


async def _begin(subject: EndpointSubject, sender: DoomedSender, *, num_buckets: int, lease_s: float) -> WeightUpdate:
    """Make the endpoint and the sending process join a group; return the update, which the process sends in several
    buckets."""
    publisher, other = subject.publisher, subject.reference.perturbed("B")
    update = publisher.announcement(other, bucket_bytes=other.size_bytes // 2, lease_s=lease_s)
    publisher.lose_group()
    publisher.touched = True
    command = SendCommand(
        transport=publisher.transport(),
        num_ranks=subject.capabilities.num_ranks,
        update=update,
        weights=subject.reference.save(other, subject.directory / "doomed") / "model.safetensors",
        num_buckets=num_buckets,
        timeout_s=_GROUP_S,
    )
    await subject.endpoint.init_process_group(await sender.begin(command))
    return update


@check("U-51", "updates process fresh", deadline_s=120)
@look_at("which other process holds the server's sockets: a launcher, a forked worker, a proxy")
async def server_killed(subject: EndpointSubject) -> None:
    """When the server's process dies, every pending call to it ends with UnreachableError."""
    opened = await subject.fresh(subject.reference.path)
    assert opened.process is not None
    publisher = SteppedPublisher(opened.endpoint, subject.capabilities)
    update = await publisher.request(subject.reference.weights)
    pending: dict[str, asyncio.Task[Any]] = {
        "generate": subject.begin(opened.endpoint.generate(subject.request())),  # waits: sampling is paused
        "receive_weights": subject.begin(opened.endpoint.receive_weights(publisher.transfer(update, 0))),  # never sent
    }
    await asyncio.sleep(0.3)
    opened.process.kill()
    for method, task in pending.items():
        await subject.require_raises(task, UnreachableError, f"{method}, pending on a server that was killed,")
    what = "weight_version of a server that was killed"
    await subject.require_raises(opened.endpoint.weight_version(), UnreachableError, what)
    publisher.lose_group()


@check("U-52", "updates process", deadline_s=40)
@look_at("whether the lease uses a clock that continues while the process is stopped, and expires once it continues")
async def server_stopped(subject: EndpointSubject) -> None:
    """While the server's process is stopped, calls to it end with DeadlineError; a lease that runs out
    in the meantime has expired by the time the process continues."""
    process, url = subject.opened.process, subject.opened.url
    assert process is not None
    assert url is not None
    update = await subject.publisher.request(subject.reference.with_final_norm(-1.0, "B"), lease_s=_LEASE_S)
    waiting = subject.start(1, 16)
    impatient = HttpEndpoint(url, token=subject.opened.token, control_timeout_s=_CALL_S, generate_timeout_s=_CALL_S)
    await subject.enter(contextlib.aclosing(impatient))
    os.killpg(process.pid, signal.SIGSTOP)
    try:
        since = time.monotonic()
        pending: dict[str, asyncio.Task[Any]] = {
            "weight_version": subject.begin(impatient.weight_version()),
            "generate": subject.begin(impatient.generate(subject.request())),
            "commit_weight_update": subject.begin(impatient.commit_weight_update(update.ref)),
        }
        for method, task in pending.items():
            what = f"{method} on a server that is stopped"
            await subject.require_raises(task, DeadlineError, what, _CALL_S + SLACK_S)
        await asyncio.sleep(max(0.0, 1.5 * _LEASE_S - (time.monotonic() - since)))
    finally:
        os.killpg(process.pid, signal.SIGCONT)
    await require_old_weights(subject, "after the server continued with its lease expired")
    await subject.require_refused(subject.publisher.commit(update), "a commit of the update whose lease has expired")
    await require_all_whole(waiting, "a request that waited while the server was stopped")
    await require_recovers(subject, "after the server was stopped")

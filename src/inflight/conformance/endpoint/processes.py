"""Level faults, processes that stop or die: the publisher's, and the server's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator

from inflight.conformance.checks import check
from inflight.conformance.doomed import DoomedSender, Errand, doomed_sender
from inflight.conformance.endpoint.aftermath import (
    SLACK_S,
    require_old_weights,
    require_recovers,
    within,
)
from inflight.conformance.endpoint.holds import require_all_whole, start
from inflight.conformance.endpoint.publishing import SteppedPublisher
from inflight.conformance.endpoint.subject import EndpointSubject, cancelled_at_the_end
from inflight.conformance.reference import Weights
from inflight.errors import DeadlineError, TransferError, UnreachableError
from inflight.http.client import HttpEndpoint
from inflight.wire import WeightUpdate

LEVEL = "faults"
_LEASE_S = 1.0
_RECEIVE_S = 1.0
"""For a bucket of which no byte will come."""
_CALL_S = 1.0
"""Deadline of the calls on a server that stopped."""
_GROUP_S = 10.0


@check(
    "U-42",
    needs=("updates",),
    deadline_s=60,
    look_at="whether the endpoint needs the group's store, or its rank 0, for anything but a transfer",
)
async def publisher_killed_while_holding(subject: EndpointSubject) -> None:
    """When the publisher's process dies during a hold, the lease ends it and the old weights serve on."""
    sender: DoomedSender = await subject.enter(doomed_sender())
    update, _ = await _begin(subject, sender, num_buckets=0, lease_s=_LEASE_S)
    await subject.endpoint.request_weight_update(update)
    waiting = await start(subject, 1, 16)
    sender.kill()
    silent_since = time.monotonic()
    await require_old_weights(subject, "after its publisher was killed", seconds=_LEASE_S + SLACK_S)
    subject.note(lease_s=_LEASE_S, **{"seconds until it released itself": time.monotonic() - silent_since})
    await require_all_whole(waiting, "a request that came while the publisher was being killed")
    await require_recovers(subject, "after its publisher was killed")


@check(
    "U-43",
    needs=("updates",),
    deadline_s=60,
    look_at="whether a collective that its peer has left can be ended from outside, and what is thrown away then",
)
async def publisher_lost_in_a_bucket(subject: EndpointSubject) -> None:
    """When the publisher's process stops or dies while a bucket is due, receive_weights fails within its timeout."""
    sender: DoomedSender = await subject.enter(doomed_sender())
    for what in ("stopped", "killed"):
        update, _ = await _begin(subject, sender, num_buckets=1, lease_s=20.0)
        await subject.endpoint.request_weight_update(update)
        await subject.endpoint.receive_weights(subject.publisher.transfer(update, 0))
        pending = asyncio.ensure_future(
            subject.endpoint.receive_weights(subject.publisher.transfer(update, 1, _RECEIVE_S))
        )
        await subject.enter(cancelled_at_the_end([pending]))
        await asyncio.sleep(0.1)
        (sender.stop if what == "stopped" else sender.kill)()
        since = time.monotonic()
        error = await subject.require_raises(
            within(_RECEIVE_S + SLACK_S, pending, f"receiving from a publisher that was {what}"),
            (TransferError,),
            f"receiving from a publisher that was {what}",
        )
        subject.note(**{what: str(error), f"seconds after it was {what}": time.monotonic() - since})
        await require_old_weights(subject, f"after its publisher was {what} in a bucket", may_be_torn=True)
        if what == "stopped":
            sender.go_on()
            await require_recovers(subject, "after its publisher was stopped in a bucket")
            await subject.publisher.publish(subject.reference.weights)
    await require_recovers(subject, "after its publisher was killed in a bucket")


async def _begin(
    subject: EndpointSubject, sender: DoomedSender, *, num_buckets: int, lease_s: float
) -> tuple[WeightUpdate, Weights]:
    """Join the endpoint and the process in a group; return what the process would send, in two buckets or more."""
    publisher, other = subject.publisher, subject.reference.perturbed("B")
    update = publisher.announcement(other, bucket_bytes=other.size_bytes // 2, lease_s=lease_s)
    publisher.lose_group()
    publisher.touched = True
    errand = Errand(
        backend=publisher.backend(),
        num_ranks=subject.capabilities.num_ranks,
        update=update,
        weights=subject.reference.save(other, subject.directory / "doomed") / "model.safetensors",
        num_buckets=num_buckets,
        timeout_s=_GROUP_S,
    )
    await subject.endpoint.init_process_group(await sender.begin(errand))
    return update, other


@check(
    "U-51",
    needs=("updates", "process", "fresh"),
    deadline_s=120,
    look_at="who else holds the server's sockets: a launcher, a forked worker, a proxy",
)
async def server_killed(subject: EndpointSubject) -> None:
    """When the server's process dies, every pending call on it ends with UnreachableError."""
    opened = await subject.fresh(subject.reference.path)
    assert opened.process is not None
    publisher = SteppedPublisher(opened.endpoint, subject.capabilities)
    update = await publisher.request(subject.reference.weights)
    calls = {
        "generate": opened.endpoint.generate(subject.request()),  # waits: sampling is held
        "receive_weights": opened.endpoint.receive_weights(publisher.transfer(update, 0)),  # and nothing is sent
    }
    tasks = {what: asyncio.ensure_future(call) for what, call in calls.items()}
    await subject.enter(cancelled_at_the_end(list(tasks.values())))
    await asyncio.sleep(0.3)
    opened.process.kill()
    since = time.monotonic()
    for what, task in tasks.items():
        await subject.require_raises(
            within(SLACK_S, task, f"{what} on a server that was killed"),
            (UnreachableError,),
            f"{what}, pending on a server that was killed,",
        )
    await subject.require_raises(
        within(SLACK_S, opened.endpoint.weight_version(), "weight_version of a server that was killed"),
        (UnreachableError,),
        "weight_version of a server that was killed",
    )
    subject.note(**{"seconds until all calls had ended": time.monotonic() - since})
    publisher.lose_group()


@check(
    "U-52",
    needs=("updates", "process"),
    deadline_s=40,
    look_at="whether the lease is measured by a clock that goes on, and is over whenever it is looked at too late",
)
async def server_stopped(subject: EndpointSubject) -> None:
    """While the server's process is stopped calls end with DeadlineError, and a lease that ends meanwhile is over when
    it goes on."""
    process, url = subject.opened.process, subject.opened.url
    assert process is not None
    assert url is not None
    update = await subject.publisher.request(subject.reference.with_final_norm(-1.0, "B"), lease_s=_LEASE_S)
    waiting = await start(subject, 1, 16)
    impatient = HttpEndpoint(url, token=subject.opened.token, control_timeout_s=_CALL_S, generate_timeout_s=_CALL_S)
    await subject.enter(contextlib.aclosing(impatient))
    with _stopped(process.pid):
        since = time.monotonic()
        calls = {
            "weight_version": impatient.weight_version(),
            "generate": impatient.generate(subject.request()),
            "commit_weight_update": impatient.commit_weight_update(update.ref),
        }
        tasks = {what: asyncio.ensure_future(call) for what, call in calls.items()}
        await subject.enter(cancelled_at_the_end(list(tasks.values())))
        for what, task in tasks.items():
            await subject.require_raises(
                within(_CALL_S + SLACK_S, task, f"{what} on a server that is stopped"),
                (DeadlineError,),
                f"{what} on a server that is stopped",
            )
        subject.note(**{"seconds until all calls had ended": time.monotonic() - since})
        await asyncio.sleep(max(0.0, 1.5 * _LEASE_S - (time.monotonic() - since)))
    await require_old_weights(subject, "after the server went on, its lease over")
    await subject.require_refused(subject.publisher.commit(update), "a commit of the update whose lease is over")
    await require_all_whole(waiting, "a request that waited while the server was stopped")
    await require_recovers(subject, "after the server was stopped")


@contextlib.contextmanager
def _stopped(process_id: int) -> Iterator[None]:
    """Stop a process and its group for as long as this lasts."""
    os.killpg(process_id, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(process_id, signal.SIGCONT)

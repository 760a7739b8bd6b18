"""Level stores: updates over transports that store what is sent."""

from __future__ import annotations

from inflight.conformance.checks import check
from inflight.conformance.endpoint.aftermath import settled
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.wire import Backend

LEVEL = "stores"
_STORE = (
    "where the transport's part of docs/contract.md puts a bucket, and whether it is copied before its memory is "
    "written again"
)


@check("U-60", needs=("updates", "shm"), deadline_s=40, look_at=_STORE)
async def stored_in_memory(subject: EndpointSubject) -> None:
    """An update over shm arrives, and what is served does not change when its memory is written again or goes."""
    await _publish_over(subject, "shm")


@check("U-61", needs=("updates", "file"), deadline_s=40, look_at=_STORE)
async def stored_in_files(subject: EndpointSubject) -> None:
    """An update over file arrives, and what is served does not change when its files are replaced."""
    await _publish_over(subject, "file")


@check("U-62", needs=("updates", "http"), deadline_s=40, look_at=_STORE)
async def stored_behind_http(subject: EndpointSubject) -> None:
    """An update over http arrives, and what is served does not change when the trainer's server is gone."""
    await _publish_over(subject, "http")


async def _publish_over(subject: EndpointSubject, store: Backend) -> None:
    """Publish twice, store a third update and abort it, publish over another group, and remove the store."""
    publisher = subject.another_publisher(backend=store)
    first, second = subject.reference.perturbed("B"), subject.reference.perturbed("C", seed=2)
    third = subject.reference.with_final_norm(-1.0, "D")
    bucket_bytes = first.size_bytes // 3
    for weights in (first, second):
        await publisher.publish(weights, bucket_bytes=bucket_bytes)
        await subject.require_serves(weights, f"after an update over {store}")
    update = await publisher.request(third, bucket_bytes=bucket_bytes)
    for index in range(len(update.buckets)):
        await publisher.send(update, third, index)
    await publisher.abort(update)
    await settled(subject, "after the abort of what was stored")
    await subject.require_serves(second, "after the next update was stored, and aborted")
    publisher.lose_group()
    await publisher.publish(first, bucket_bytes=bucket_bytes)
    publisher.lose_group()
    await subject.require_serves(first, f"after an update over another group of {store}, which is gone")

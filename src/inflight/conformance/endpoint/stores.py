"""Level ``stores``: updates over transports that store the buckets."""

from __future__ import annotations

from inflight.conformance.checks import check, look_at
from inflight.conformance.endpoint.aftermath import wait_until_settled
from inflight.conformance.endpoint.encodings import require_damage_refused
from inflight.conformance.endpoint.loras import SPEC, make_lora, merge_lora
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.wire import TransportName

LEVEL = "stores"


@check("U-60", "updates shm", deadline_s=40, store="shm", event="its memory is overwritten or removed")
@check("U-61", "updates file", deadline_s=40, store="file", event="its files are replaced")
@check("U-62", "updates http", deadline_s=40, store="http", event="the trainer's server has ended")
@check("U-63", "updates ipc", deadline_s=40, store="ipc", event="its memory is overwritten or removed")
@look_at(
    "where the transport's section of docs/contract.md places a bucket, and whether it is copied before its memory is "
    "written again"
)
async def updates_over_stores(subject: EndpointSubject, store: TransportName, event: str) -> None:
    """An update over {store} arrives, and the served weights do not change when {event}. A bucket that does not match
    its checksum is refused with TransferError, and the old weights stay in service."""
    # Two updates, a third that is stored and aborted, one over another group; then the store is removed.
    publisher = subject.another_publisher(transport=store)
    first, second = subject.reference.perturbed("B"), subject.reference.perturbed("C", seed=2)
    third = subject.reference.with_final_norm(-1.0, "D")
    bucket_bytes = first.size_bytes // 3
    if subject.capabilities.staging:
        await require_damage_refused(subject, first, f"a damaged bucket over {store}", {}, publisher=publisher)
        publisher.lose_group()
    for weights in (first, second):
        await publisher.publish(weights, bucket_bytes=bucket_bytes)
        await subject.require_serves(weights, f"after an update over {store}")
    if subject.capabilities.lora:
        await publisher.publish(second, bucket_bytes=bucket_bytes, keep=True)
        for i, ends in enumerate(((".down_proj",), (".o_proj",), (".down_proj",))):  # whose base the first one stored
            lora = make_lora(second, i, ends)
            await publisher.publish(lora, lora=SPEC)
            await subject.require_serves(merge_lora(second, lora), f"after {lora.label} over {store}")
        await publisher.publish(second, bucket_bytes=bucket_bytes)
    update = await publisher.request(third, bucket_bytes=bucket_bytes)
    await publisher.send_all(update, third)
    await publisher.abort(update)
    await wait_until_settled(subject, "after the abort of a stored update")
    await subject.require_serves(second, "after the next update was stored, and aborted")
    publisher.lose_group()
    await publisher.publish(first, bucket_bytes=bucket_bytes)
    publisher.lose_group()
    await subject.require_serves(first, f"after an update over another group of {store}, when {event}")

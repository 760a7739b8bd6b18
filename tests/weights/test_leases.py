"""Accepted calls of an update renew its lease, including repeated ones, until the update is being applied."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import torch

from inflight.weights.encode.bucket_bytes import checksum
from inflight.weights.encode.buckets import plan_buckets
from inflight.weights.receive.receiver import UpdateReceiver
from inflight.weights.receive.staged_sink import StagedSink
from inflight.wire import BucketTransfer, DirectorySpec, EndpointState, InFlightPolicy, Manifest, WeightUpdate
from tests.weights.test_publisher_machine import DECLARED, RUN, SPECS, RecordingEndpoint, Wire

LEASE_S = 60.0
BYTES = torch.zeros(3 * 160, dtype=torch.uint8)
UPDATE = WeightUpdate(
    run_id=RUN,
    version=1,
    session_id="session",
    manifest=Manifest(tensors=SPECS),
    buckets=plan_buckets(SPECS, BYTES.numel()),
    in_flight=InFlightPolicy.KEEP,
    deadline_s=5,
    lease_s=LEASE_S,
)
BUCKET = BucketTransfer(
    run_id=RUN,
    version=1,
    session_id="session",
    bucket_index=0,
    size_bytes=BYTES.numel(),
    checksum=checksum(BYTES),
    timeout_s=5,
)


class Applying(RecordingEndpoint):
    """An engine that waits for `may_apply` before it applies an update."""

    def __init__(self, sink: StagedSink) -> None:
        super().__init__(sink)
        self.may_apply = asyncio.Event()

    async def apply(self, update: WeightUpdate) -> None:
        await self.may_apply.wait()
        await super().apply(update)


async def opened() -> tuple[Applying, UpdateReceiver]:
    wire = Wire()
    wire.sent[UPDATE.ref, 0] = BYTES
    sink = StagedSink(lambda _: wire)
    engine = Applying(sink)
    engine.updates = UpdateReceiver(engine, sink, SPECS, DECLARED)
    await engine.updates.join(DirectorySpec(run_id=RUN, transport="file", directory="/", timeout_s=1))
    await engine.updates.request(UPDATE)
    return engine, engine.updates


async def renews(receiver: UpdateReceiver, call: Callable[[], Awaitable[None]]) -> bool:
    """Make a call a little later; return whether the lease now ends later than before."""

    def ends() -> float:
        assert receiver._open is not None
        assert receiver._open.lease is not None
        return receiver._open.lease.when()

    before = ends()
    await asyncio.sleep(0.02)
    await call()
    return ends() > before


def test_a_repeated_request_renews_the_lease() -> None:
    async def test() -> None:
        _, receiver = await opened()
        assert await renews(receiver, lambda: receiver.request(UPDATE))
        await receiver.aclose()

    asyncio.run(test())


def test_a_bucket_and_its_repetition_renew_the_lease() -> None:
    async def test() -> None:
        _, receiver = await opened()
        assert await renews(receiver, lambda: receiver.receive(BUCKET))
        assert await renews(receiver, lambda: receiver.receive(BUCKET))
        await receiver.aclose()

    asyncio.run(test())


def test_an_update_that_is_being_applied_gets_no_lease_by_a_repetition() -> None:
    async def test() -> None:
        engine, receiver = await opened()
        await receiver.receive(BUCKET)
        committing = asyncio.create_task(receiver.commit(UPDATE.ref))
        await asyncio.sleep(0)
        for call in (receiver.request(UPDATE), receiver.receive(BUCKET)):
            await call
            assert receiver._open is not None
            assert receiver._open.lease is not None
            assert receiver._open.lease.cancelled()
        engine.may_apply.set()
        await committing
        assert (receiver.session.state, receiver.session.version) == (EndpointState.READY, 1)
        await receiver.aclose()

    asyncio.run(test())

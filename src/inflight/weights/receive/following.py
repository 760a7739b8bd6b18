"""A follower of a stored run keeps an endpoint at the newest version, or relays that version to another host.

A follower makes the same contract calls as a publisher, so the endpoint cannot tell the difference. It skips versions
that were superseded while an update was under way. It leases the version that it reads, so that the trainer does not
remove that version in the meantime; even a slow follower therefore makes progress. `inflight.weights.send.storing` is
the writing side.

With a relay, each version crosses the link to its source once, regardless of how many servers read it from the relay:
servers on the relay's host through memory, others over HTTP. Readers follow a relay as they would follow the trainer. A
relay may follow another relay, so relays can form a tree.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import pydantic

from inflight.base.backoff import Backoff
from inflight.base.tasks import combine_failures
from inflight.base.threads import run_abandonable
from inflight.base.validation import describe_problems
from inflight.contracts import InferenceEndpoint
from inflight.errors import ConfigError, InflightError, TransferError, UpdateAbortedError
from inflight.types import EndpointOutcome, WeightBucket
from inflight.weights.encode.bucket_bytes import checksum, pack, payload_spec
from inflight.weights.send.endpoint_update import serves, update_endpoint
from inflight.weights.transports.bucket_files import LEASE_S, StoredUpdate
from inflight.weights.transports.files import DirectoryReceiver, DirectorySender
from inflight.weights.transports.http_files import HttpFileReceiver
from inflight.wire import BucketTransfer, DirectorySpec, HttpFileSpec, InFlightPolicy, UpdateRef

FIRST_PAUSE_S = 0.5
"""Delay in seconds between the first failure and the first retry."""
MAX_PAUSE_S = 30.0
_JOIN_S = 60.0
"""How long, in seconds, an endpoint may take to find the stored versions."""
_READ_S = 10.0
"""How long, in seconds, reading the relay's own directory may take."""
_LEASE_SLACK_S = 5.0
_RENEW_S = LEASE_S / 10


def store_spec(place: str, run_id: str, token: str | None) -> DirectorySpec | HttpFileSpec:
    """Return the spec of the place, a directory or a URL, where a run's versions are stored. Raises `ConfigError`."""
    is_url = place.startswith(("http://", "https://"))
    if is_url and token is None:
        raise ConfigError(f"the store at {place} requires a token; write it to a file and pass the name of that file")
    try:
        if is_url:
            url = place.rstrip("/")
            return HttpFileSpec(run_id=run_id, transport="http", url=url, token=token or "", timeout_s=_JOIN_S)
        directory = str(Path(place).absolute())
        return DirectorySpec(run_id=run_id, transport="file", directory=directory, timeout_s=_JOIN_S)
    except pydantic.ValidationError as error:
        raise ConfigError(f"run {run_id!r} cannot be followed at {place!r}: {describe_problems(error)}") from error


async def follow(
    endpoint: InferenceEndpoint,
    spec: DirectorySpec | HttpFileSpec,
    *,
    in_flight: InFlightPolicy = InFlightPolicy.KEEP,
    poll_s: float = 0.2,
    deadline_s: float = 60.0,
    note: Callable[[str], None],
) -> NoReturn:
    """Keep an endpoint at the newest stored version, until cancelled.

    Each update has ``deadline_s`` seconds. A failed update leaves the endpoint in the state that the contract
    specifies, and is retried after a pause. ``note`` receives a message for each failure, except when the same message
    repeats.
    """

    async def has(ref: UpdateRef) -> bool:
        return serves(await endpoint.weight_version(), ref)

    async def take(_: StoredRun, stored: StoredUpdate) -> None:
        await _update_to(endpoint, spec, stored, in_flight, deadline_s)
        note(f"serving version {stored.update.version} of run {spec.run_id!r}")

    await take_each_newest(spec, has, take, poll_s=poll_s, deadline_s=deadline_s, note=note)


async def take_each_newest(
    spec: DirectorySpec | HttpFileSpec,
    has: Callable[[UpdateRef], Awaitable[bool]],
    take: Callable[[StoredRun, StoredUpdate], Coroutine[Any, Any, None]],
    *,
    poll_s: float,
    deadline_s: float,
    note: Callable[[str], None],
) -> NoReturn:
    """Call ``take`` with the newest stored version whenever ``has`` returns False for it, until cancelled.

    The version is leased during the call. Each call has ``deadline_s`` seconds; failures are reported and retried after
    a pause.
    """
    source = StoredRun(spec)
    noted, backoff = "", Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
    ref: UpdateRef | None = None
    taken = failed = ref
    try:
        while True:
            ref = None
            try:
                async with asyncio.timeout(deadline_s):
                    ref = await source.latest(deadline_s)
                    if ref is not None and ref != taken:
                        if not await has(ref):
                            ref = await source.lease_newest(ref, deadline_s)
                            stored = await source.read_manifest(ref, deadline_s)
                            await _while_held(source, ref, take(source, stored))
                        taken = ref
            except (TimeoutError, InflightError) as error:
                why = str(error) or f"the newest version was not applied within {deadline_s:g} s"
                if why != noted:
                    note(f"following run {spec.run_id!r}: {why}; retrying")
                noted = why
                if ref != failed:
                    backoff.reset()
                failed = ref
                await asyncio.sleep(backoff.next(time.monotonic()))
            else:
                noted = ""
                backoff.reset()
                await asyncio.sleep(poll_s)
    finally:
        source.close()


async def _while_held(source: StoredRun, ref: UpdateRef, taking: Coroutine[Any, Any, None]) -> None:
    """Await ``taking`` while renewing the version's lease. Raises `TransferError` as soon as the version is removed."""

    async def hold() -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            await source.lease(ref)

    try:
        async with asyncio.TaskGroup() as tasks:
            holding = tasks.create_task(hold())
            await taking
            holding.cancel()
    except ExceptionGroup as group:
        raise combine_failures(group.exceptions) from group


async def _update_to(
    endpoint: InferenceEndpoint,
    spec: DirectorySpec | HttpFileSpec,
    stored: StoredUpdate,
    in_flight: InFlightPolicy,
    deadline_s: float,
) -> None:
    """Update an endpoint to a stored version. If a call fails, the update is aborted and the error is raised."""
    can = await endpoint.capabilities()
    update = stored.update.model_copy(
        update={
            "staged": can.staging,
            "in_flight": in_flight,
            "deadline_s": deadline_s,
            "lease_s": deadline_s + _LEASE_SLACK_S,
        }
    )
    await endpoint.init_process_group(spec.model_copy(update={"incarnation": update.incarnation}))
    report = await update_endpoint(endpoint, update, _transfers(stored, deadline_s), asyncio.timeout(deadline_s))
    if report.outcome is not EndpointOutcome.APPLIED:
        raise UpdateAbortedError(f"{report.endpoint} {report.outcome} version {update.version}: {report.detail}")


async def _transfers(stored: StoredUpdate, timeout_s: float) -> AsyncGenerator[BucketTransfer, None]:
    ref = stored.update.ref
    for index, bucket in enumerate(stored.buckets):
        yield BucketTransfer(
            run_id=ref.run_id,
            version=ref.version,
            session_id=ref.session_id,
            bucket_index=index,
            encoding=bucket.encoding,
            size_bytes=bucket.size_bytes,
            checksum=bucket.checksum,
            timeout_s=timeout_s,
        )


async def relay(
    spec: DirectorySpec | HttpFileSpec,
    directory: Path,
    *,
    poll_s: float = 0.2,
    deadline_s: float = 60.0,
    note: Callable[[str], None],
) -> NoReturn:
    """Keep in ``directory`` a copy of the newest version at ``spec``, until cancelled.

    Every bucket is verified against its checksum before it is stored, and a version becomes visible only when it is
    complete. The previous version is then removed, unless a reader leases it. Each version has ``deadline_s`` seconds.
    A failure is reported and the version is retried; the previous version stays.
    """
    sender = DirectorySender(directory, is_durable=False)
    sender.specs(spec.run_id, [1], deadline_s)
    here = DirectorySpec(run_id=spec.run_id, transport="file", directory=str(sender.directory), timeout_s=_READ_S)

    async def has(ref: UpdateRef) -> bool:
        with closing(StoredRun(here)) as stored:
            return await stored.latest(_READ_S) == ref

    async def take(source: StoredRun, stored: StoredUpdate) -> None:
        await run_abandonable(lambda: _copy(source, stored, sender, deadline_s), "inflight-relay")
        size = sum(bucket.size_bytes for bucket in stored.buckets)
        note(f"version {stored.update.version} of run {spec.run_id!r} is stored on this host, {size / 1e6:,.1f} MB")

    try:
        await take_each_newest(spec, has, take, poll_s=poll_s, deadline_s=deadline_s, note=note)
    finally:
        sender.abort()


def _copy(source: StoredRun, stored: StoredUpdate, sender: DirectorySender, deadline_s: float) -> None:
    sender.begin(stored.update)
    is_done = False
    try:
        for bucket in source.buckets(stored, deadline_s):
            sender.send(bucket, deadline_s)
        is_done = True
    finally:
        sender.end(is_done=is_done)


class StoredRun:
    """The stored versions of a run, in a directory or at a URL. No call blocks the event loop."""

    def __init__(self, spec: DirectorySpec | HttpFileSpec) -> None:
        self._receiver = DirectoryReceiver(spec) if isinstance(spec, DirectorySpec) else HttpFileReceiver(spec)
        self._lease = f"lease-{secrets.token_hex(8)}"

    async def latest(self, timeout_s: float) -> UpdateRef | None:
        """Return the newest complete version, or None if there is none."""
        return await run_abandonable(lambda: self._receiver.latest(timeout_s), "inflight-follow")

    async def lease(self, ref: UpdateRef) -> None:
        """Lease a version, and end the lease on the previous one. Raises `TransferError` if the version was removed."""
        await run_abandonable(lambda: self._receiver.lease(ref, self._lease, LEASE_S), "inflight-follow")

    async def lease_newest(self, ref: UpdateRef, timeout_s: float) -> UpdateRef:
        """Lease ``ref``, or the newest version if ``ref`` has been removed. Return the leased version."""
        while True:
            try:
                await self.lease(ref)
            except TransferError:
                newest = await self.latest(timeout_s)
                if newest is None or newest == ref:
                    raise
                ref = newest
            else:
                return ref

    async def read_manifest(self, ref: UpdateRef, timeout_s: float) -> StoredUpdate:
        """Return the manifest of a stored version. Raises `TransferError` if the version has been removed."""
        return await run_abandonable(lambda: self._receiver.read_manifest(ref, timeout_s), "inflight-follow")

    def buckets(self, stored: StoredUpdate, deadline_s: float) -> Iterator[WeightBucket]:
        """Yield the buckets of a stored version, verified against their checksums. Blocks. Raises `TransferError`."""
        ref, deadline = stored.update.ref, time.monotonic() + deadline_s
        self._receiver.begin(ref)
        for announced, bucket in zip(stored.update.buckets, stored.buckets, strict=True):
            specs = stored.update.manifest.tensors[announced.start : announced.stop]
            if bucket.encoding != "raw":
                specs = (payload_spec(bucket.size_bytes),)
            tensors = tuple(self._receiver.receive(specs, max(0.001, deadline - time.monotonic())))
            if checksum(pack(tensors)) != bucket.checksum:
                raise TransferError(f"bucket {announced.index} of version {ref.version} does not match its checksum")
            yield WeightBucket(announced.index, specs, tensors, bucket.encoding, bucket.checksum, ref)

    def close(self) -> None:
        self._receiver.abort()

"""Following: beside a server, bring it to the newest version that is stored of a run, whenever there is a newer one.

It drives the endpoint by the calls of its own contract, as a publisher would, so that an endpoint knows no difference.
Versions that came and went while an update was under way are left out. What is being read is leased, so that whoever
stores does not remove it meanwhile: a slow follower gets on, too.
`inflight.weights.storing` is the other side.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pydantic

from inflight.contracts import InferenceEndpoint
from inflight.errors import ConfigError, InflightError, TransferError, UpdateAbortedError
from inflight.types import Outcome
from inflight.weights.bringing import bring
from inflight.weights.threads import run_abandonable
from inflight.weights.transports.bucket_files import LEASE_S, StoredUpdate
from inflight.weights.transports.files import latest, lease, read_manifest
from inflight.weights.transports.pull import PullReceiver
from inflight.wire import BucketTransfer, Capabilities, DirectorySpec, InFlightPolicy, PullSpec, UpdateRef

T = TypeVar("T")

FIRST_PAUSE_S = 0.5
"""After a failure, before the next try; each pause is twice the one before."""
MAX_PAUSE_S = 30.0
_LEASE_SLACK_S = 5.0
_RENEW_S = LEASE_S / 10


def store_spec(place: str, run_id: str, token: str | None, timeout_s: float = 60.0) -> DirectorySpec | PullSpec:
    """Return where a run's versions are: in a directory, or at an URL. Raises `ConfigError`."""
    is_url = place.startswith(("http://", "https://"))
    if is_url and token is None:
        raise ConfigError(f"the store at {place} asks for a token; write it into a file and name that file")
    try:
        if is_url:
            return PullSpec(
                run_id=run_id, backend="http", url=place.rstrip("/"), token=token or "", timeout_s=timeout_s
            )
        directory = str(Path(place).absolute())
        return DirectorySpec(run_id=run_id, backend="file", directory=directory, timeout_s=timeout_s)
    except pydantic.ValidationError as error:
        (where, why), *_ = ((problem["loc"], problem["msg"]) for problem in error.errors(include_url=False))
        raise ConfigError(
            f"run {run_id!r} cannot be followed at {place!r}: {'.'.join(map(str, where))}: {why}"
        ) from error


async def follow(
    endpoint: InferenceEndpoint,
    spec: DirectorySpec | PullSpec,
    *,
    in_flight: InFlightPolicy = InFlightPolicy.KEEP,
    poll_s: float = 0.2,
    deadline_s: float = 60.0,
    note: Callable[[str], None],
) -> NoReturn:
    """Keep an endpoint at the newest version that is stored; runs until it is cancelled.

    Each update has ``deadline_s`` seconds. One that fails leaves the endpoint as its contract says, is told to
    ``note``, and is tried again after a pause; the same trouble is told once until there is another, or none.
    """
    source = _Source(spec)
    told, pause_s = "", FIRST_PAUSE_S
    ref: UpdateRef | None = None
    taken = failed = ref
    try:
        while True:
            ref = None
            try:
                async with asyncio.timeout(deadline_s):
                    ref = await source.latest(deadline_s)
                    if ref is not None and ref != taken:
                        if not await _serves(endpoint, ref):
                            ref = await source.lease_newest(ref, deadline_s)
                            stored = await source.read_manifest(ref, deadline_s)
                            await _while_held(source, ref, _take(endpoint, spec, stored, in_flight, deadline_s))
                            note(f"serving version {ref.version} of run {ref.run_id!r}")
                        taken = ref
            except (TimeoutError, InflightError) as error:
                why = str(error) or f"the newest version was not taken within {deadline_s:g} s"
                if why != told:
                    note(f"following run {spec.run_id!r}: {why}; trying again")
                told = why
                pause_s, failed = pause_s if ref == failed else FIRST_PAUSE_S, ref
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            else:
                told, pause_s = "", FIRST_PAUSE_S
                await asyncio.sleep(poll_s)
    finally:
        source.close()


async def _while_held(source: _Source, ref: UpdateRef, taking: Coroutine[Any, Any, None]) -> None:
    """Await ``taking`` and renew the lease meanwhile. Raises `TransferError` as soon as the version was removed."""

    async def hold() -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            await source.lease(ref)

    calls = [asyncio.ensure_future(taking), asyncio.ensure_future(hold())]
    try:
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        for call in done:
            call.result()
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def _serves(endpoint: InferenceEndpoint, ref: UpdateRef) -> bool:
    answer = await endpoint.weight_version()
    return (answer.run_id, answer.version, answer.session_id) == (ref.run_id, ref.version, ref.session_id)


async def _take(
    endpoint: InferenceEndpoint,
    spec: DirectorySpec | PullSpec,
    stored: StoredUpdate,
    in_flight: InFlightPolicy,
    deadline_s: float,
) -> None:
    """Bring an endpoint to a stored version. Raises what a call raised, and the update was ended."""
    can: Capabilities = await endpoint.capabilities()
    update = stored.update.model_copy(
        update={
            "staged": can.staging,
            "in_flight": in_flight,
            "deadline_s": deadline_s,
            "lease_s": deadline_s + _LEASE_SLACK_S,
        }
    )
    await endpoint.init_process_group(spec.model_copy(update={"epoch": update.epoch}))
    report = await bring(endpoint, update, _transfers(stored, deadline_s), asyncio.timeout(deadline_s))
    if report.outcome is not Outcome.APPLIED:
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


class _Source:
    """What is stored of a run, in a directory or at an URL. No call blocks the event loop."""

    def __init__(self, spec: DirectorySpec | PullSpec) -> None:
        self._spec = spec
        self._directory = Path(spec.directory) if isinstance(spec, DirectorySpec) else None
        self._receiver = PullReceiver(spec) if isinstance(spec, PullSpec) else None
        self._lease = f"lease-{secrets.token_hex(8)}"

    async def latest(self, timeout_s: float) -> UpdateRef | None:
        """Return the newest version that is stored whole, None if there is none."""
        receiver, directory, run_id = self._receiver, self._directory, self._spec.run_id
        if receiver is not None:
            return await run_abandonable(lambda: receiver.latest(timeout_s), "inflight-follow")
        assert directory is not None
        return await run_abandonable(_translated(lambda: latest(directory, run_id)), "inflight-follow")

    async def lease(self, ref: UpdateRef) -> None:
        """Have a version stay for a while; one that was leased before may go. Raises `TransferError` if it is gone."""
        receiver, directory, name = self._receiver, self._directory, self._lease
        if receiver is not None:
            return await run_abandonable(lambda: receiver.lease(ref, name, LEASE_S), "inflight-follow")
        assert directory is not None
        await run_abandonable(_translated(lambda: lease(directory, ref, name)), "inflight-follow")

    async def lease_newest(self, ref: UpdateRef, timeout_s: float) -> UpdateRef:
        """Lease ``ref``, or what is the newest by now if that was removed meanwhile; return what is leased."""
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
        """Return what is stored of a version. Raises `TransferError` if it was removed since."""
        receiver, directory = self._receiver, self._directory
        if receiver is not None:
            return await run_abandonable(lambda: receiver.read_manifest(ref, timeout_s), "inflight-follow")
        assert directory is not None
        return await run_abandonable(_translated(lambda: read_manifest(directory, ref)), "inflight-follow")

    def close(self) -> None:
        """Close the connections."""
        if self._receiver is not None:
            self._receiver.abort()


def _translated(call: Callable[[], T]) -> Callable[[], T]:
    def translated() -> T:
        try:
            return call()
        except OSError as error:
            raise TransferError(f"reading what is stored failed: {error}") from error

    return translated

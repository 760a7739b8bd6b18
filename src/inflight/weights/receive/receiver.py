"""The receiving half of an update, shared by all endpoints that receive weights themselves.

This module combines the state machine, the group over which buckets are sent, and the lease. Buckets arrive at a
`BucketSink`. `StagedSink` keeps them in this process until the commit, so that the old weights are still served after a
failure before the commit; with an adapter's own sink, the engine receives them. A `PausableEngine` pauses, loads and
resumes.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from inflight.base.requirements import require
from inflight.base.tasks import TaskOwner
from inflight.base.transport_registry import refusal
from inflight.errors import PoisonedError, TransferError, UnsupportedError, UpdateAbortedError, UpdateRefusedError
from inflight.weights.receive.adapter import BucketSink, PausableEngine
from inflight.weights.receive.states import OpenUpdate, UpdateStateMachine
from inflight.wire import (
    BucketTransfer,
    Capabilities,
    Needs,
    TensorSpec,
    TransportSpec,
    UpdateRef,
    UpdateTimings,
    WeightUpdate,
    WeightVersion,
)

_CLOSE_S = 1.0
"""How long, in seconds, `aclose` waits for an engine that is pausing or applying."""


class _UpdateInProgress:
    """The state of one update, from its request until it ends."""

    def __init__(self, opened: OpenUpdate) -> None:
        self._opened = opened
        self.update = opened.update
        self.pausing: asyncio.Future[None] | None = None
        self.arriving: asyncio.Future[None] | None = None
        self.committing: asyncio.Future[None] | None = None
        self.lease: asyncio.TimerHandle | None = None

    @property
    def is_over(self) -> bool:
        return self._opened.is_over

    @property
    def is_applying(self) -> bool:
        return self._opened.is_applying

    async def outlast(self, call: asyncio.Future[None], what: str) -> None:
        """Wait for a call of this update. Raises the call's error, or `UpdateAbortedError` if the update ends first."""
        await asyncio.wait([call])
        if self.is_over:
            raise UpdateAbortedError(f"the update to version {self.update.version} {what}")
        call.result()

    def stop_lease(self) -> None:
        if self.lease is not None:
            self.lease.cancel()


class UpdateReceiver:
    """Handles all updates of one endpoint. `ReceivingEndpoint` exposes its methods under the contract's names.

    ``expected`` lists the tensors that the engine can load. None means that they are not known in this process, so the
    engine itself must check. ``capabilities`` are those of the endpoint. An instance belongs to one event loop.
    """

    def __init__(
        self,
        engine: PausableEngine,
        sink: BucketSink,
        expected: Sequence[TensorSpec] | None,
        capabilities: Capabilities,
    ) -> None:
        self.engine = engine
        """The engine that pauses, applies and resumes. It may be wrapped while no update is open."""
        self._sink = sink
        self._capabilities = capabilities
        self._session = UpdateStateMachine(expected)
        self._session.note_joined()
        self._joining: TransportSpec | None = None
        self._open: _UpdateInProgress | None = None
        self._applying: asyncio.Future[None] | None = None
        self._calls = TaskOwner()

    @property
    def session(self) -> UpdateStateMachine:
        """The endpoint's state, version and run. Do not modify it."""
        return self._session

    def weight_version(self, *, num_running: int, last_update: UpdateTimings | None) -> WeightVersion:
        """Return the response for `InferenceEndpoint.weight_version`. The arguments come from the engine."""
        session = self._session
        return WeightVersion(
            state=session.state,
            version=session.version,
            run_id=session.run_id,
            session_id=session.session_id,
            owner_run_id=session.owner,
            incarnation=session.incarnation,
            incarnations=session.incarnations,
            kept=self._sink.kept,
            updating_to=None if session.update is None else session.update.version,
            num_running=num_running,
            last_update=last_update,
        )

    async def num_running(self) -> int:
        return await self.engine.num_running()

    async def join(self, spec: TransportSpec) -> None:
        """Join a group, after aborting any open update."""
        if lack := refusal(self._capabilities, spec.transport):
            raise UnsupportedError(f"this endpoint does not support {lack}")
        self._session.fence(spec.run_id, spec.incarnation)
        while True:  # another call may interleave
            await self._wait_until_applied()  # applying still needs the group
            self._lose_group()
            if self._open is None:
                break
            await self._end(self._open)
        self._session.fence(spec.run_id, spec.incarnation)
        self._joining = spec
        await self._sink.join(spec)
        if self._joining is not spec:
            raise TransferError("another group was formed in the meantime")
        self._session.note_group_formed(spec.run_id)

    async def request(self, update: WeightUpdate) -> None:
        if self._open is not None and self._session.is_open(update.ref):
            self._renew_lease(self._open)
            if self._open.pausing is not None:
                await self._open.outlast(self._open.pausing, "ended while this call was being repeated")
            return
        self._refuse_unsupported(update)
        opened = _UpdateInProgress(self._session.request(update))
        try:
            self._sink.begin(update)
        except BaseException:
            self._session.abort()
            raise
        self._open = opened
        self._renew_lease(opened)
        if not update.staged:
            await self._pause(opened)

    async def receive(self, bucket: BucketTransfer) -> None:
        opened = self._open
        if self._session.has_bucket(bucket):
            assert opened is not None  # the session knows the bucket
            return self._renew_lease(opened)
        if self._session.is_receiving(bucket) and opened is not None and opened.arriving is not None:
            self._renew_lease(opened)
            return await opened.outlast(opened.arriving, "ended while this call was being repeated")
        spec, tensors = self._session.begin_bucket(bucket)
        assert opened is not None  # the session knows the bucket
        self._renew_lease(opened)
        opened.arriving = asyncio.get_running_loop().create_future()
        try:
            await self._sink.receive(bucket, spec, tensors)
            if opened.is_over:
                raise TransferError(
                    f"the update to version {bucket.version} ended while bucket {spec.index} was arriving"
                )
            self._session.note_bucket_received()
            self._renew_lease(opened)
        except BaseException:
            await self._end(opened)
            raise
        finally:
            opened.arriving.set_result(None)

    async def commit(self, ref: UpdateRef) -> None:
        """Commit the open update. Cancelling the call does not cancel the commit."""
        if self._session.is_served(ref):
            return
        opened = self._open
        if opened is None or opened.committing is None or not self._session.is_open(ref):
            opened = self._begin_commit(ref)
        assert opened.committing is not None
        await asyncio.shield(opened.committing)

    async def abort(self, ref: UpdateRef) -> None:
        """Abort the open update. If it is already being applied, wait for the commit instead."""
        self._session.forbid(ref)
        opened = self._open
        if opened is None:
            return
        update = opened.update
        if ref != update.ref:
            raise UpdateRefusedError(
                f"the open update is version {update.version} of run {update.run_id!r}, not version {ref.version}"
            )
        await self._wait_until_applied()
        await self._end(opened)

    async def aclose(self) -> None:
        """Leave the group, stop the lease, and wait briefly for a commit in progress. An open update stays open."""
        if self._open is not None:
            self._open.stop_lease()
        self._sink.leave()
        await self._calls.aclose(_CLOSE_S)

    def _refuse_unsupported(self, update: WeightUpdate) -> None:
        """Raise an error if an update needs an unsupported capability, other senders, or a base that was not kept."""
        require(self._capabilities, Needs.of_update(update), "this endpoint")
        if update.manifest.shardings and self._joining is not None:  # without a group, the session refuses it
            num_senders, num_joined = update.manifest.num_senders, 1 + len(self._joining.others)
            if num_senders != num_joined:
                raise UpdateRefusedError(
                    f"update to version {update.version} refused: it comes from {num_senders} senders, but the weight "
                    f"group has {num_joined}"
                )
        if update.base is not None and update.base != self._sink.kept:
            kept = self._sink.kept
            raise UpdateRefusedError(
                f"update to version {update.version} refused: it is a delta to {_describe_update(update.base)}, but "
                f"this endpoint has kept {'nothing' if kept is None else _describe_update(kept)}; send all weights"
            )

    async def _pause(self, opened: _UpdateInProgress) -> None:
        """Pause sampling for an open update within its deadline. A failure ends the update."""
        update = opened.update
        opened.pausing = self._calls.start(self.engine.pause(update))
        try:
            async with asyncio.timeout(update.deadline_s):
                await opened.outlast(opened.pausing, "was ended before sampling was paused")
        except TimeoutError as error:
            try:
                num_running = await self.engine.num_running()
            finally:
                await self._end(opened)
            raise UpdateRefusedError(
                f"update to version {update.version} refused: {num_running} requests were still running after "
                f"{update.deadline_s:g} s of {update.in_flight}"
            ) from error
        except BaseException:
            await self._end(opened)
            raise
        self._renew_lease(opened)  # the publisher learns of the pause only now

    def _begin_commit(self, ref: UpdateRef) -> _UpdateInProgress:
        opened = self._open
        if opened is not None and opened.pausing is not None and not opened.pausing.done():
            raise UpdateRefusedError(f"version {ref.version} cannot be committed: sampling is not yet paused")
        update = self._session.require_complete(ref).update
        assert opened is not None  # it is complete
        if update.staged:
            self._session.pause(ref)
            opened.committing = self._calls.start(self._pause_and_apply(opened))
        else:  # begin at once, so that an abort finds it begun
            opened.committing = self._begin_apply(opened)
        return opened

    async def _pause_and_apply(self, opened: _UpdateInProgress) -> None:
        """Pause sampling for a staged update, and apply the received weights."""
        await self._pause(opened)
        await self._begin_apply(opened)

    def _begin_apply(self, opened: _UpdateInProgress) -> asyncio.Future[None]:
        """Begin to apply an update. From here on, the update ends only when applying ends."""
        self._session.begin_apply(opened.update.ref)
        opened.stop_lease()
        self._applying = self._calls.start(self._apply(opened.update))
        return self._applying

    async def _apply(self, update: WeightUpdate) -> None:
        """Apply the received weights. Raises `PoisonedError` for any failure."""
        try:
            await self.engine.apply(update)
        except Exception as error:  # after any error, the engine may hold a part of the update
            self._session.abort()
            self._open = None
            problem = f"applying version {update.version} failed: {type(error).__name__}: {error}"
            try:
                await self.engine.fail_requests()
            except Exception as lost:  # the weights are torn in any case
                problem += f". Its requests could not be ended either: {lost}"
            raise PoisonedError(problem) from error
        self._session.note_committed()
        self._open = None
        self._sink.note_committed()

    async def _wait_until_applied(self) -> None:
        """Return when no commit is in progress. If none is, return without an await, so that none can begin."""
        while self._applying is not None and not self._applying.done():
            await asyncio.wait([self._applying])

    async def _end(self, opened: _UpdateInProgress) -> None:
        """End an update unless it has ended: discard the received buckets, and resume sampling if none was applied."""
        if opened.is_over:
            return
        opened.stop_lease()
        was_torn = self._sink.has_applied
        if self._session.has_begun:
            self._lose_group()  # a receive may be pending on it
        self._session.abort(torn=was_torn)
        self._open = None
        if (pausing := opened.pausing) is None:
            return
        if not pausing.done():
            pausing.cancel()
            await asyncio.wait([pausing])
        was_paused = not pausing.cancelled() and pausing.exception() is None
        if was_torn or (was_paused and self._session.is_torn):
            await self.engine.fail_requests()
        elif was_paused:
            await self.engine.resume()

    def _lose_group(self) -> None:
        self._joining = None
        self._session.note_group_lost()
        self._sink.leave()

    def _renew_lease(self, opened: _UpdateInProgress) -> None:
        """Restart the lease of an update. An update that is being applied has no lease and gets none."""
        opened.stop_lease()
        if opened.is_applying:
            return
        loop = asyncio.get_running_loop()
        opened.lease = loop.call_later(opened.update.lease_s, lambda: self._calls.start(self._end(opened)))


def _describe_update(ref: UpdateRef) -> str:
    return f"version {ref.version} of session {ref.session_id!r}"


@runtime_checkable
class ReceivingEndpoint(Protocol):
    """The methods of an `InferenceEndpoint` that concern its weights, for endpoints with an `UpdateReceiver`."""

    @abstractmethod
    async def receiver(self) -> UpdateReceiver:
        """Return this endpoint's receiver, which is always the same object. The first call may create it."""

    async def weight_version(self) -> WeightVersion:
        receiver = await self.receiver()
        return receiver.weight_version(num_running=await receiver.num_running(), last_update=None)

    async def init_process_group(self, spec: TransportSpec) -> None:
        await (await self.receiver()).join(spec)

    async def request_weight_update(self, update: WeightUpdate) -> None:
        await (await self.receiver()).request(update)

    async def receive_weights(self, bucket: BucketTransfer) -> None:
        await (await self.receiver()).receive(bucket)

    async def commit_weight_update(self, ref: UpdateRef) -> WeightVersion:
        await (await self.receiver()).commit(ref)
        return await self.weight_version()

    async def abort_weight_update(self, ref: UpdateRef) -> WeightVersion:
        await (await self.receiver()).abort(ref)
        return await self.weight_version()

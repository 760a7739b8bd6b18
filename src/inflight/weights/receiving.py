"""The receiving half of an update: what every endpoint that takes weights by itself has to get right, written once.

It joins the state machine, a transport's receiver, the staging of buckets and the lease. Received buckets are staged;
the engine is touched by the commit only, so that everything that fails before it leaves the old weights serving. What
holding, loading and resuming mean is its owner's business: it knows nothing of engines and requests.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from inflight.contracts import WeightReceiver
from inflight.errors import (
    PoisonedError,
    TransferError,
    UnsupportedError,
    UpdateAbortedError,
    UpdateRefusedError,
)
from inflight.weights.session import UpdateSession
from inflight.weights.threads import run_abandonable
from inflight.wire import (
    BucketTransfer,
    EndpointState,
    ProcessGroupSpec,
    TensorSpec,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
)

if TYPE_CHECKING:
    import torch


class HeldEngine(Protocol):
    """What an `UpdateReceiver` asks of the engine whose weights change."""

    @abstractmethod
    async def hold(self, update: WeightUpdate) -> None:
        """Return when no token is being sampled any more, as ``update.in_flight`` says.

        Cancelled when the update ends meanwhile; sampling goes on then as if it had never been called.
        """

    @abstractmethod
    async def apply(self, update: WeightUpdate, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load all tensors and sample again, from ``update.version``. Whatever it raises, the weights count as torn."""

    @abstractmethod
    async def release(self) -> None:
        """Sample again from the weights of before: the update ended between `hold` and `apply`."""

    @abstractmethod
    async def give_up(self) -> None:
        """End every request: the weights are torn, and nothing is sampled until a complete update."""

    @abstractmethod
    async def weight_version(self) -> WeightVersion:
        """See `InferenceEndpoint.weight_version`."""


class UpdateReceiver:
    """Updates of one endpoint over its life. Its methods are those of `InferenceEndpoint`: the endpoint passes them on.

    ``expected`` is what the engine can load, ``policies`` and ``transports`` what the endpoint declares. ``receiver``
    makes a transport's receiver for a group. An instance belongs to one event loop.
    """

    def __init__(
        self,
        engine: HeldEngine,
        expected: Sequence[TensorSpec],
        receiver: Callable[[ProcessGroupSpec], WeightReceiver],
        *,
        policies: Collection[str],
        transports: Collection[str],
    ) -> None:
        self._engine = engine
        self._policies = tuple(policies)
        self._transports = tuple(transports)
        self._make_receiver = receiver
        self._session = UpdateSession(expected)
        self._session.joined()
        self._receiver: WeightReceiver | None = None
        self._staged: list[tuple[str, torch.Tensor]] = []
        self._holding: asyncio.Future[None] | None = None
        self._applying: asyncio.Future[PoisonedError | None] | None = None
        self._lease: asyncio.TimerHandle | None = None
        self._ending: asyncio.Future[None] | None = None

    @property
    def session(self) -> UpdateSession:
        """State, version and run, for reading."""
        return self._session

    async def init_process_group(self, spec: ProcessGroupSpec) -> None:
        """See `InferenceEndpoint.init_process_group`. An open update is aborted first."""
        if spec.backend not in self._transports:
            known = ", ".join(self._transports) or "none"
            raise UnsupportedError(f"the {spec.backend} transport is not declared here; declared: {known}")
        self._lose_group()
        await self._end_open_update()
        self._lose_group()  # another call may have come in between
        self._receiver = receiver = self._make_receiver(spec)
        try:
            await run_abandonable(receiver.join, "inflight-join")
        except BaseException:
            receiver.abort()
            raise
        if receiver is not self._receiver:
            raise TransferError("another group was formed meanwhile")
        self._session.group_formed(spec.run_id)

    async def request_weight_update(self, update: WeightUpdate) -> None:
        """See `InferenceEndpoint.request_weight_update`."""
        if update.in_flight not in self._policies:
            known = ", ".join(self._policies) or "none"
            raise UnsupportedError(f"the in-flight policy {update.in_flight} is not declared here; declared: {known}")
        self._session.request(update)
        if self._receiver is not None:
            self._receiver.recycle()
        self._renew_lease(update)
        self._holding = asyncio.ensure_future(self._engine.hold(update))
        try:
            async with asyncio.timeout(update.deadline_s):
                await asyncio.shield(self._holding)
        except BaseException as error:
            was_open = self._session.update is update
            num_running = (await self._engine.weight_version()).num_running if isinstance(error, TimeoutError) else 0
            await self._end_update(update)
            if isinstance(error, TimeoutError):
                raise UpdateRefusedError(
                    f"update to version {update.version} refused: {num_running} requests were still running after "
                    f"{update.deadline_s:g} s of {update.in_flight}"
                ) from error
            if isinstance(error, asyncio.CancelledError) and not was_open:
                raise self._ended_early(update) from error
            raise
        if self._session.update is not update:
            raise self._ended_early(update)

    async def receive_weights(self, bucket: BucketTransfer) -> None:
        """See `InferenceEndpoint.receive_weights`."""
        spec, tensors = self._session.begin_bucket(bucket)
        update, receiver = self._session.update, self._receiver
        assert update is not None and receiver is not None  # losing the group ends the update
        self._renew_lease(update)
        try:
            arrived = await run_abandonable(lambda: receiver.receive(tensors, bucket.timeout_s), "inflight-receive")
        except BaseException:
            await self._end_update(update)
            raise
        if self._session.update is not update:
            raise TransferError(f"the update to version {update.version} ended while bucket {spec.index} travelled")
        self._staged += [(tensor_spec.name, tensor) for tensor_spec, tensor in zip(tensors, arrived, strict=True)]
        self._session.bucket_received()
        self._renew_lease(update)

    async def commit_weight_update(self, ref: UpdateRef) -> WeightVersion:
        """See `InferenceEndpoint.commit_weight_update`. Cancelling the call does not stop what it began."""
        if self._holding is not None and not self._holding.done():
            raise UpdateRefusedError(f"version {ref.version} cannot be committed: sampling is not held yet")
        update = self._session.begin_apply(ref)
        self._stop_lease()
        staged, self._staged = self._staged, []
        self._applying = asyncio.ensure_future(self._apply(update, staged))
        failure = await asyncio.shield(self._applying)
        if failure is not None:
            raise failure
        return await self._engine.weight_version()

    async def abort_weight_update(self, ref: UpdateRef) -> WeightVersion:
        """See `InferenceEndpoint.abort_weight_update`. A commit that has begun ends first, whole or poisoned."""
        update = self._session.update
        if update is not None:
            if (ref.run_id, ref.version) != (update.run_id, update.version):
                raise UpdateRefusedError(
                    f"the open update is version {update.version} of run {update.run_id!r}, not version {ref.version}"
                )
            await self._applied()
            await self._end_update(update)
        return await self._engine.weight_version()

    def close(self) -> None:
        """Leave the group and stop the lease; an open update is not ended."""
        self._stop_lease()
        if self._receiver is not None:
            self._receiver.abort()

    async def _apply(self, update: WeightUpdate, staged: list[tuple[str, torch.Tensor]]) -> PoisonedError | None:
        """Have the staged tensors applied; a failure poisons and is returned."""
        try:
            await self._engine.apply(update, staged)
        except Exception as error:  # whatever it is, the engine may hold a part of the update
            self._session.abort()
            await self._engine.give_up()
            return PoisonedError(f"applying version {update.version} failed: {type(error).__name__}: {error}")
        self._session.committed()
        return None

    async def _end_open_update(self) -> None:
        """End the open update, if there is one; a commit that has begun runs to its end first."""
        await self._applied()
        if self._session.update is not None:
            await self._end_update(self._session.update)

    async def _applied(self) -> None:
        """Return when no commit is under way; without waiting, so that none can begin meanwhile, if that is so now."""
        while self._applying is not None and not self._applying.done():
            await asyncio.wait([self._applying])

    async def _end_update(self, update: WeightUpdate) -> None:
        """If ``update`` is open, drop what was staged and sample again: nothing was applied before a commit."""
        if self._session.update is not update:
            return
        self._stop_lease()
        self._staged = []
        if self._session.state is EndpointState.UPDATING:
            self._lose_group()  # a receive may be pending on it in a thread
        self._session.abort()
        holding, self._holding = self._holding, None
        if holding is None:
            return
        if not holding.done():
            holding.cancel()
            await asyncio.wait([holding])
        was_held = not holding.cancelled() and holding.exception() is None
        if was_held and self._session.state is not EndpointState.POISONED:
            await self._engine.release()

    def _lose_group(self) -> None:
        receiver, self._receiver = self._receiver, None
        self._session.group_lost()
        if receiver is not None:
            receiver.abort()

    def _renew_lease(self, update: WeightUpdate) -> None:
        self._stop_lease()

        def end() -> None:
            self._ending = asyncio.ensure_future(self._end_update(update))

        self._lease = asyncio.get_running_loop().call_later(update.lease_s, end)

    def _stop_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None

    def _ended_early(self, update: WeightUpdate) -> UpdateAbortedError:
        return UpdateAbortedError(f"the update to version {update.version} was ended before sampling was held")

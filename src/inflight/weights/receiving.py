"""The receiving half of an update: what every endpoint that takes weights by itself has to get right, written once.

It joins the state machine, the group that buckets come over, and the lease. Where buckets arrive is a `WeightIntake`:
`StagedIntake` keeps them in this process until the commit, so that everything that fails before it leaves the old
weights serving; an adapter's intake lets its engine receive them. What holding, loading and resuming mean is a
`HeldEngine`'s business: this module knows nothing of engines and requests.
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
    BucketSpec,
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
    async def apply(self, update: WeightUpdate) -> None:
        """Switch to the weights that arrived and sample again, from ``update.version``.

        Whatever it raises, the weights count as torn.
        """

    @abstractmethod
    async def release(self) -> None:
        """Sample again from the weights of before: the update ended between `hold` and `apply`."""

    @abstractmethod
    async def give_up(self) -> None:
        """End every request: the weights are torn, and nothing is sampled until a complete update."""

    @abstractmethod
    async def weight_version(self) -> WeightVersion:
        """See `InferenceEndpoint.weight_version`."""


class WeightIntake(Protocol):
    """Where the buckets of an endpoint's updates arrive: in this process, or in the engine's own."""

    @property
    @abstractmethod
    def has_applied(self) -> bool:
        """Return True from the moment a byte of the open update may be in the model. False after `begin`."""

    @abstractmethod
    async def join(self, spec: ProcessGroupSpec) -> None:
        """Join the group, once all ranks have. Raises `TransferError`, and belongs to no group then."""

    @abstractmethod
    def leave(self) -> None:
        """Give the group up, ending what is pending on it, and drop what arrived. Returns at once. Idempotent."""

    @abstractmethod
    def begin(self) -> None:
        """Drop what arrived for an earlier update: the buckets of a new one come now."""

    @abstractmethod
    async def receive(self, bucket: BucketSpec, tensors: Sequence[TensorSpec], timeout_s: float) -> None:
        """Return when the bucket has arrived whole. Raises `TransferError`."""


class StagedIntake:
    """An intake in this process, over a transport's receiver. ``make_receiver`` makes one for a group."""

    def __init__(self, make_receiver: Callable[[ProcessGroupSpec], WeightReceiver]) -> None:
        self._make_receiver = make_receiver
        self._receiver: WeightReceiver | None = None
        self._staged: list[tuple[str, torch.Tensor]] = []

    @property
    def has_applied(self) -> bool:
        """See `WeightIntake.has_applied`. What is staged is not applied."""
        return False

    def take(self) -> list[tuple[str, torch.Tensor]]:
        """Return what arrived, in order; it is no longer staged."""
        staged, self._staged = self._staged, []
        return staged

    async def join(self, spec: ProcessGroupSpec) -> None:
        """See `WeightIntake.join`."""
        self._receiver = receiver = self._make_receiver(spec)
        try:
            await run_abandonable(receiver.join, "inflight-join")
        except BaseException:
            receiver.abort()
            raise

    def leave(self) -> None:
        """See `WeightIntake.leave`."""
        receiver, self._receiver, self._staged = self._receiver, None, []
        if receiver is not None:
            receiver.abort()

    def begin(self) -> None:
        """See `WeightIntake.begin`."""
        self._staged = []
        if self._receiver is not None:
            self._receiver.recycle()

    async def receive(self, bucket: BucketSpec, tensors: Sequence[TensorSpec], timeout_s: float) -> None:
        """See `WeightIntake.receive`."""
        receiver, staged = self._receiver, self._staged
        if receiver is None:
            raise TransferError("no weight group is formed")
        arrived = await run_abandonable(lambda: receiver.receive(tensors, timeout_s), "inflight-receive")
        staged += [(spec.name, tensor) for spec, tensor in zip(tensors, arrived, strict=True)]


class UpdateReceiver:
    """Updates of one endpoint over its life. Its methods are those of `InferenceEndpoint`: the endpoint passes them on.

    ``expected`` is what the engine can load (None: not known here, the engine refuses by itself), ``policies`` and
    ``transports`` what the endpoint declares. An instance belongs to one event loop.
    """

    def __init__(
        self,
        engine: HeldEngine,
        intake: WeightIntake,
        expected: Sequence[TensorSpec] | None,
        *,
        policies: Collection[str],
        transports: Collection[str],
    ) -> None:
        self._engine = engine
        self._intake = intake
        self._policies = tuple(policies)
        self._transports = tuple(transports)
        self._session = UpdateSession(expected)
        self._session.joined()
        self._joining: ProcessGroupSpec | None = None
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
        self._joining = spec
        await self._intake.join(spec)
        if self._joining is not spec:
            raise TransferError("another group was formed meanwhile")
        self._session.group_formed(spec.run_id)

    async def request_weight_update(self, update: WeightUpdate) -> None:
        """See `InferenceEndpoint.request_weight_update`."""
        if update.in_flight not in self._policies:
            known = ", ".join(self._policies) or "none"
            raise UnsupportedError(f"the in-flight policy {update.in_flight} is not declared here; declared: {known}")
        self._session.request(update)
        self._intake.begin()
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
        self._renew_lease(update)  # the publisher hears of the hold only now

    async def receive_weights(self, bucket: BucketTransfer) -> None:
        """See `InferenceEndpoint.receive_weights`."""
        spec, tensors = self._session.begin_bucket(bucket)
        update = self._session.update
        assert update is not None  # the bucket is one of its own
        self._renew_lease(update)
        try:
            await self._intake.receive(spec, tensors, bucket.timeout_s)
        except BaseException:
            await self._end_update(update)
            raise
        if self._session.update is not update:
            raise TransferError(f"the update to version {update.version} ended while bucket {spec.index} travelled")
        self._session.bucket_received()
        self._renew_lease(update)

    async def commit_weight_update(self, ref: UpdateRef) -> WeightVersion:
        """See `InferenceEndpoint.commit_weight_update`. Cancelling the call does not stop what it began."""
        await self.commit(ref)
        return await self._engine.weight_version()

    async def commit(self, ref: UpdateRef) -> None:
        """Apply the open update, as `commit_weight_update` does; for engines that know without asking what they serve.

        Raises what `InferenceEndpoint.commit_weight_update` does.
        """
        if self._holding is not None and not self._holding.done():
            raise UpdateRefusedError(f"version {ref.version} cannot be committed: sampling is not held yet")
        update = self._session.begin_apply(ref)
        self._stop_lease()
        self._applying = asyncio.ensure_future(self._apply(update))
        failure = await asyncio.shield(self._applying)
        if failure is not None:
            raise failure

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
        self._intake.leave()

    async def _apply(self, update: WeightUpdate) -> PoisonedError | None:
        """Have the weights that arrived applied; a failure poisons and is returned."""
        try:
            await self._engine.apply(update)
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
        """If ``update`` is open, drop what arrived and sample again, unless some of it is in the model already."""
        if self._session.update is not update:
            return
        self._stop_lease()
        was_torn = self._intake.has_applied
        if self._session.state is EndpointState.UPDATING:
            self._lose_group()  # a receive may be pending on it
        self._session.abort(torn=was_torn)
        holding, self._holding = self._holding, None
        if holding is None:
            return
        if not holding.done():
            holding.cancel()
            await asyncio.wait([holding])
        was_held = not holding.cancelled() and holding.exception() is None
        if was_torn:
            await self._engine.give_up()
        elif was_held and self._session.state is not EndpointState.POISONED:
            await self._engine.release()

    def _lose_group(self) -> None:
        self._joining = None
        self._session.group_lost()
        self._intake.leave()

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

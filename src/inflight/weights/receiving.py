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
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from inflight.contracts import WeightReceiver
from inflight.errors import (
    PoisonedError,
    TransferError,
    UnsupportedError,
    UpdateAbortedError,
    UpdateRefusedError,
)
from inflight.weights.session import OpenUpdate, UpdateSession
from inflight.weights.threads import run_abandonable
from inflight.wire import (
    BucketSpec,
    BucketTransfer,
    TensorSpec,
    TransportSpec,
    UpdateRef,
    UpdateTimings,
    WeightUpdate,
    WeightVersion,
)

if TYPE_CHECKING:
    import torch

    from inflight.weights.staging import KeptWeights, Staging


class HeldEngine(Protocol):
    """What an `UpdateReceiver` asks of the engine whose weights change.

    After `hold` has returned, exactly one of `apply`, `release` and `give_up` follows; after an `apply` that raised,
    `give_up` does. All are awaited in the receiver's event loop.
    """

    @abstractmethod
    async def hold(self, update: WeightUpdate) -> None:
        """Return when no token is being sampled any more, as ``update.in_flight`` says.

        Cancelled when the update ends meanwhile, and then nothing else is called: before ``CancelledError`` passes on,
        see to it that sampling goes on as if this had never been called. What another thread or process was told may
        still be on its way there: undo it behind it, in the same queue. While the weights are torn, sampling is held
        already, and this returns at once.
        """

    @abstractmethod
    async def apply(self, update: WeightUpdate) -> None:
        """Switch to the weights that arrived and sample again, from ``update.version``.

        They are the whole model but for ``update.manifest.frozen``, or the adapter of ``update.manifest.adapter``.

        The version that tokens are labelled with changes together with the weights, where they change: in the engine's
        thread if it has one, before it samples the first token. `UpdateReceiver.session` says the new version only
        after this has returned, which is too late for that label. Whatever this raises, the weights count as torn.
        """

    @abstractmethod
    async def release(self) -> None:
        """Sample again from the weights of before: the update ended between `hold` and `apply`."""

    @abstractmethod
    async def give_up(self) -> None:
        """End every request, running or waiting: the weights are torn.

        `apply` raised, a part of an update had arrived, or the update that was to mend torn weights has ended early.
        Sampling stays held: nothing is sampled until the `apply` of a complete update, which the receiver lets through
        and whose `hold` comes before it. Those who wait for the requests get `PoisonedError`, as new ones do from
        `UpdateSession.refuse_if_poisoned`.
        """

    @abstractmethod
    async def num_running(self) -> int:
        """Return how many requests run: a drain that does not end in time is refused with this number."""


engine_between: ContextVar[Callable[[HeldEngine], HeldEngine]] = ContextVar("engine_between", default=lambda it: it)
"""What a check has put between an engine and the receiver that is made for it, so that a call of it can fail."""


class WeightIntake(Protocol):
    """Where the buckets of an endpoint's updates arrive: in this process, or in the engine's own."""

    @property
    @abstractmethod
    def has_applied(self) -> bool:
        """Return True from the moment a byte of the open update may be in the model. False after `begin`."""

    @property
    @abstractmethod
    def kept(self) -> UpdateRef | None:
        """Return the update whose weights were kept as the base of a delta; None if there is none."""

    @abstractmethod
    async def join(self, spec: TransportSpec) -> None:
        """Take weights as ``spec`` says, once all ranks of its group have joined. Raises `TransferError`."""

    @abstractmethod
    def leave(self) -> None:
        """Give the group up, ending what is pending on it, and drop what arrived. Returns at once. Idempotent."""

    @abstractmethod
    def begin(self, update: WeightUpdate) -> None:
        """Drop what arrived for an earlier update: the buckets of this one come now."""

    @abstractmethod
    async def receive(self, transfer: BucketTransfer, bucket: BucketSpec, tensors: Sequence[TensorSpec]) -> None:
        """Return when the bucket has arrived whole, and is what ``transfer`` says. Raises `TransferError`."""

    @abstractmethod
    def committed(self) -> None:
        """Note that what arrived is served now; it is kept if its update asked for that."""


class StagedIntake:
    """An intake in this process, over a transport's receiver. ``make_receiver`` makes one for a group."""

    def __init__(self, make_receiver: Callable[[TransportSpec], WeightReceiver]) -> None:
        self._make_receiver = make_receiver
        self._receiver: WeightReceiver | None = None
        self._staging: Staging | None = None
        self._kept: KeptWeights | None = None

    @property
    def has_applied(self) -> bool:
        """See `WeightIntake.has_applied`. What is staged is not applied."""
        return False

    @property
    def kept(self) -> UpdateRef | None:
        """See `WeightIntake.kept`."""
        return None if self._kept is None else self._kept.ref

    def take(self) -> list[tuple[str, torch.Tensor]]:
        """Return what arrived, in order. It is valid until the update is over. Raises `TransferError` after that."""
        if self._staging is None:
            raise TransferError("the update ended meanwhile")
        return self._staging.tensors()

    def flat(self, index: int) -> torch.Tensor:
        """Return the bytes of a bucket that arrived, uint8, as valid as `take`. Raises `TransferError`."""
        if self._staging is None:
            raise TransferError("the update ended meanwhile")
        return self._staging.flat(index)

    async def join(self, spec: TransportSpec) -> None:
        """See `WeightIntake.join`."""
        self._receiver = receiver = self._make_receiver(spec)
        try:
            await run_abandonable(receiver.join, "inflight-join")
        except BaseException:
            receiver.abort()
            raise

    def leave(self) -> None:
        """See `WeightIntake.leave`."""
        receiver, self._receiver = self._receiver, None
        self._drop()
        if receiver is not None:
            receiver.abort()

    def begin(self, update: WeightUpdate) -> None:
        """See `WeightIntake.begin`."""
        from inflight.weights.staging import Staging  # torch is loaded only where weights arrive

        self._drop()
        if self._receiver is not None:
            self._receiver.begin(update.ref)
        self._staging = Staging(update, self._kept)

    async def receive(self, transfer: BucketTransfer, bucket: BucketSpec, tensors: Sequence[TensorSpec]) -> None:
        """See `WeightIntake.receive`."""
        receiver, staging = self._receiver, self._staging
        if receiver is None or staging is None:
            raise TransferError("no weight group is formed")
        await run_abandonable(lambda: staging.receive(receiver, transfer, bucket, tensors), "inflight-receive")

    def committed(self) -> None:
        """See `WeightIntake.committed`."""
        staging, self._staging = self._staging, None
        if staging is not None:
            self._kept = staging.keep()

    def _drop(self) -> None:
        """Forget what arrived for an update that was not committed; its base is again what it was."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.drop()


class _Open:
    """What belongs to one update: its request makes it, and it is dropped when the update is over."""

    def __init__(self, opened: OpenUpdate) -> None:
        self._opened = opened
        self.update = opened.update
        self.holding: asyncio.Future[None] | None = None
        self.arriving: asyncio.Future[None] | None = None
        self.committing: asyncio.Future[None] | None = None
        self.lease: asyncio.TimerHandle | None = None

    @property
    def is_over(self) -> bool:
        """Whether the update has ended."""
        return self._opened.is_over

    async def outlast(self, call: asyncio.Future[None], what: str) -> None:
        """Wait for a call of this update. Raises `UpdateAbortedError` if the update ends first, else what it raises."""
        await asyncio.wait([call])
        if self.is_over:
            raise UpdateAbortedError(f"the update to version {self.update.version} {what}")
        call.result()

    def stop_lease(self) -> None:
        """The update does not end by itself any more."""
        if self.lease is not None:
            self.lease.cancel()


class UpdateReceiver:
    """Updates of one endpoint over its life. `ReceivingEndpoint` offers its methods under the names of the contract.

    ``expected`` is what the engine can load (None: not known here, the engine refuses by itself); the others are what
    the endpoint declares in its `Capabilities`. An instance belongs to one event loop.
    """

    def __init__(
        self,
        engine: HeldEngine,
        intake: WeightIntake,
        expected: Sequence[TensorSpec] | None,
        *,
        policies: Collection[str],
        transports: Collection[str],
        staging: bool = False,
        encodings: Collection[str] = (),
        partial_updates: bool = False,
        adapters: bool = False,
    ) -> None:
        self._engine = engine_between.get()(engine)
        self._intake = intake
        self._policies = tuple(policies)
        self._transports = tuple(transports)
        self._staging = staging
        self._encodings = tuple(encodings)
        self._partial_updates = partial_updates
        self._adapters = adapters
        self._session = UpdateSession(expected)
        self._session.joined()
        self._joining: TransportSpec | None = None
        self._open: _Open | None = None
        self._applying: asyncio.Future[PoisonedError | None] | None = None
        self._ending: asyncio.Future[None] | None = None

    @property
    def session(self) -> UpdateSession:
        """State, version and run, for reading."""
        return self._session

    def weight_version(self, *, num_running: int, last_update: UpdateTimings | None) -> WeightVersion:
        """Return the answer of `InferenceEndpoint.weight_version`, but for what only the engine knows."""
        session = self._session
        return WeightVersion(
            state=session.state,
            version=session.version,
            run_id=session.run_id,
            session_id=session.session_id,
            owner_run_id=session.owner,
            epoch=session.epoch,
            kept=self._intake.kept,
            updating_to=None if session.update is None else session.update.version,
            num_running=num_running,
            last_update=last_update,
        )

    async def num_running(self) -> int:
        """See `HeldEngine.num_running`."""
        return await self._engine.num_running()

    async def join(self, spec: TransportSpec) -> None:
        """See `InferenceEndpoint.init_process_group`. An open update is aborted first."""
        if spec.backend not in self._transports:
            known = ", ".join(self._transports) or "none"
            raise UnsupportedError(f"the {spec.backend} transport is not declared here; declared: {known}")
        self._session.fence(spec.run_id, spec.epoch)
        while True:  # another call may come in between
            await self._applied()  # what is being applied is still needed
            self._lose_group()
            if self._open is None:
                break
            await self._end(self._open)
        self._session.fence(spec.run_id, spec.epoch)
        self._joining = spec
        await self._intake.join(spec)
        if self._joining is not spec:
            raise TransferError("another group was formed meanwhile")
        self._session.group_formed(spec.run_id)

    async def request(self, update: WeightUpdate) -> None:
        """See `InferenceEndpoint.request_weight_update`."""
        if self._open is not None and self._session.is_open(update.ref):
            if self._open.holding is not None:
                await self._open.outlast(self._open.holding, "ended while this call was repeated")
            return
        self._refuse_undeclared(update)
        opened = _Open(self._session.request(update))
        try:
            self._intake.begin(update)
        except BaseException:
            self._session.abort()
            raise
        self._open = opened
        self._renew_lease(opened)
        if not update.staged:
            await self._hold(opened)

    async def receive(self, bucket: BucketTransfer) -> None:
        """See `InferenceEndpoint.receive_weights`."""
        opened = self._open
        if self._session.has_bucket(bucket):
            return
        if self._session.is_receiving(bucket) and opened is not None and opened.arriving is not None:
            return await opened.outlast(opened.arriving, "ended while this call was repeated")
        spec, tensors = self._session.begin_bucket(bucket)
        assert opened is not None  # the bucket is one of its own
        self._renew_lease(opened)
        opened.arriving = asyncio.get_running_loop().create_future()
        try:
            await self._intake.receive(bucket, spec, tensors)
            if opened.is_over:
                raise TransferError(f"the update to version {bucket.version} ended while bucket {spec.index} travelled")
            self._session.bucket_received()
            self._renew_lease(opened)
        except BaseException:
            await self._end(opened)
            raise
        finally:
            opened.arriving.set_result(None)

    async def commit(self, ref: UpdateRef) -> None:
        """See `InferenceEndpoint.commit_weight_update`. Cancelling the call does not stop what it began."""
        if self._session.is_served(ref):
            return
        opened = self._open
        if opened is None or opened.committing is None or not self._session.is_open(ref):
            opened = self._begin_commit(ref)
        assert opened.committing is not None
        await asyncio.shield(opened.committing)

    async def abort(self, ref: UpdateRef) -> None:
        """See `InferenceEndpoint.abort_weight_update`. A commit that has begun to apply ends first."""
        self._session.never(ref)
        opened = self._open
        if opened is None:
            return
        update = opened.update
        if ref != update.ref:
            raise UpdateRefusedError(
                f"the open update is version {update.version} of run {update.run_id!r}, not version {ref.version}"
            )
        await self._applied()
        await self._end(opened)

    def close(self) -> None:
        """Leave the group and stop the lease; an open update is not ended."""
        if self._open is not None:
            self._open.stop_lease()
        self._intake.leave()

    def _refuse_undeclared(self, update: WeightUpdate) -> None:
        """Raise if an update asks for what is not declared, or for a base that was not kept."""
        if update.in_flight not in self._policies:
            known = ", ".join(self._policies) or "none"
            raise UnsupportedError(f"the in-flight policy {update.in_flight} is not declared here; declared: {known}")
        if update.staged and not self._staging:
            raise UnsupportedError("staging is not declared here: sampling has to be held while an update arrives")
        if unknown := [name for name in update.encodings if name not in self._encodings]:
            known = ", ".join(self._encodings) or "none"
            raise UnsupportedError(f"the encoding {unknown[0]} is not declared here; declared besides raw: {known}")
        if update.manifest.frozen and not self._partial_updates:
            raise UnsupportedError("partial updates are not declared here: send all tensors, frozen ones too")
        if update.manifest.adapter is not None and not self._adapters:
            raise UnsupportedError("adapters are not declared here: send merged weights")
        if update.base is not None and update.base != self._intake.kept:
            kept = self._intake.kept
            raise UpdateRefusedError(
                f"update to version {update.version} refused: it is a delta to version {update.base.version}, kept is "
                f"{'nothing' if kept is None else f'version {kept.version}'}; send all of it"
            )

    async def _hold(self, opened: _Open) -> None:
        """Hold sampling for an open update, within its deadline; the update is over if that fails."""
        update = opened.update
        opened.holding = asyncio.ensure_future(self._engine.hold(update))
        try:
            async with asyncio.timeout(update.deadline_s):
                await opened.outlast(opened.holding, "was ended before sampling was held")
        except TimeoutError as error:
            try:
                num_running = await self._engine.num_running()
            finally:
                await self._end(opened)
            raise UpdateRefusedError(
                f"update to version {update.version} refused: {num_running} requests were still running after "
                f"{update.deadline_s:g} s of {update.in_flight}"
            ) from error
        except BaseException:
            await self._end(opened)
            raise
        self._renew_lease(opened)  # the publisher hears of the hold only now

    def _begin_commit(self, ref: UpdateRef) -> _Open:
        opened = self._open
        if opened is not None and opened.holding is not None and not opened.holding.done():
            raise UpdateRefusedError(f"version {ref.version} cannot be committed: sampling is not held yet")
        update = self._session.require_complete(ref).update
        assert opened is not None  # it is complete
        if update.staged:
            self._session.hold(ref)
            opened.committing = asyncio.ensure_future(self._hold_and_apply(opened))
        else:  # at once: an abort that comes now finds it begun
            opened.committing = asyncio.ensure_future(_raising(self._begin_apply(opened)))
        opened.committing.add_done_callback(lambda done: done.cancelled() or done.exception())
        return opened

    async def _hold_and_apply(self, opened: _Open) -> None:
        """Hold sampling, which was left to the commit, and have the weights that arrived applied."""
        await self._hold(opened)
        await _raising(self._begin_apply(opened))

    def _begin_apply(self, opened: _Open) -> asyncio.Future[PoisonedError | None]:
        """Begin to apply; from here on nothing but its own end ends the update."""
        self._session.begin_apply(opened.update.ref)
        opened.stop_lease()
        self._applying = asyncio.ensure_future(self._apply(opened.update))
        return self._applying

    async def _apply(self, update: WeightUpdate) -> PoisonedError | None:
        """Have the weights that arrived applied; a failure poisons and is returned."""
        try:
            await self._engine.apply(update)
        except Exception as error:  # whatever it is, the engine may hold a part of the update
            self._session.abort()
            self._open = None
            problem = f"applying version {update.version} failed: {type(error).__name__}: {error}"
            try:
                await self._engine.give_up()
            except Exception as lost:  # torn it is in any case
                problem += f". Its requests could not be ended either: {lost}"
            failure = PoisonedError(problem)
            failure.__cause__ = error
            return failure
        self._session.committed()
        self._open = None
        self._intake.committed()
        return None

    async def _applied(self) -> None:
        """Return when no commit is under way; without waiting, so that none can begin meanwhile, if that is so now."""
        while self._applying is not None and not self._applying.done():
            await asyncio.wait([self._applying])

    async def _end(self, opened: _Open) -> None:
        """Unless it is over, end an update: drop what arrived, and sample again if none of it is in the model."""
        if opened.is_over:
            return
        opened.stop_lease()
        was_torn = self._intake.has_applied
        if self._session.has_begun:
            self._lose_group()  # a receive may be pending on it
        self._session.abort(torn=was_torn)
        self._open = None
        if (holding := opened.holding) is None:
            return
        if not holding.done():
            holding.cancel()
            await asyncio.wait([holding])
        was_held = not holding.cancelled() and holding.exception() is None
        if was_torn or (was_held and self._session.is_torn):
            await self._engine.give_up()
        elif was_held:
            await self._engine.release()

    def _lose_group(self) -> None:
        self._joining = None
        self._session.group_lost()
        self._intake.leave()

    def _renew_lease(self, opened: _Open) -> None:
        opened.stop_lease()

        def end() -> None:
            self._ending = asyncio.ensure_future(self._end(opened))

        opened.lease = asyncio.get_running_loop().call_later(opened.update.lease_s, end)


class ReceivingEndpoint(Protocol):
    """The methods of an `InferenceEndpoint` that concern its weights, for one that has an `UpdateReceiver`."""

    @abstractmethod
    async def receiver(self) -> UpdateReceiver:
        """Return the receiver of this endpoint, always the same; it may be made when this is called first."""

    async def weight_version(self) -> WeightVersion:
        """See `InferenceEndpoint.weight_version`."""
        receiver = await self.receiver()
        return receiver.weight_version(num_running=await receiver.num_running(), last_update=None)

    async def init_process_group(self, spec: TransportSpec) -> None:
        """See `InferenceEndpoint.init_process_group`."""
        await (await self.receiver()).join(spec)

    async def request_weight_update(self, update: WeightUpdate) -> None:
        """See `InferenceEndpoint.request_weight_update`."""
        await (await self.receiver()).request(update)

    async def receive_weights(self, bucket: BucketTransfer) -> None:
        """See `InferenceEndpoint.receive_weights`."""
        await (await self.receiver()).receive(bucket)

    async def commit_weight_update(self, ref: UpdateRef) -> WeightVersion:
        """See `InferenceEndpoint.commit_weight_update`."""
        await (await self.receiver()).commit(ref)
        return await self.weight_version()

    async def abort_weight_update(self, ref: UpdateRef) -> WeightVersion:
        """See `InferenceEndpoint.abort_weight_update`."""
        await (await self.receiver()).abort(ref)
        return await self.weight_version()


async def _raising(applying: asyncio.Future[PoisonedError | None]) -> None:
    """Return when the weights were applied; raise the failure that poisoned them."""
    failure = await applying
    if failure is not None:
        raise failure

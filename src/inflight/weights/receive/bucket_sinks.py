"""Where an endpoint receives the buckets of its updates: in this process, or in the engine's own. Knows no sessions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from inflight.base.threads import run_abandonable
from inflight.contracts import WeightReceiver
from inflight.errors import TransferError
from inflight.wire import BucketSpec, BucketTransfer, TensorSpec, TransportSpec, UpdateRef, WeightUpdate

if TYPE_CHECKING:
    import torch

    from inflight.weights.receive.base_weights import Named
    from inflight.weights.receive.staging import KeptWeights, Staging


class WeightIntake(Protocol):
    """Receives the buckets of an endpoint's updates, in this process or in the engine's own."""

    @property
    @abstractmethod
    def has_applied(self) -> bool:
        """Return True from the moment a byte of the open update may be in the model. `begin` resets it to False."""

    @property
    @abstractmethod
    def kept(self) -> UpdateRef | None:
        """Return the update whose weights were kept as the base of a delta, None if there is none."""

    @abstractmethod
    async def join(self, spec: TransportSpec) -> None:
        """Join the group that ``spec`` describes; return once all of its ranks have joined. Raises `TransferError`."""

    @abstractmethod
    def leave(self) -> None:
        """Leave the group, end what is pending on it, and drop what arrived. Returns at once. Idempotent."""

    @abstractmethod
    def begin(self, update: WeightUpdate) -> None:
        """Drop what arrived for an earlier update, and expect the buckets of this one."""

    @abstractmethod
    async def receive(self, transfer: BucketTransfer, bucket: BucketSpec, tensors: Sequence[TensorSpec]) -> None:
        """Return when the whole bucket has arrived and matches ``transfer``. Raises `TransferError`."""

    @abstractmethod
    def committed(self) -> None:
        """Note that what arrived is now served. It is kept if its update asked for that."""


class StagedIntake(WeightIntake):
    """An intake in this process, over a transport's receiver. ``make_receiver`` makes a receiver for each group.

    ``prepare`` is called with everything that arrived, in the thread that received the last bucket, so that its work is
    done before sampling is paused. If it raises, so does the receive.
    """

    def __init__(
        self,
        make_receiver: Callable[[TransportSpec], WeightReceiver],
        prepare: Callable[[WeightUpdate, Named], Any] | None = None,
    ) -> None:
        self._make_receiver = make_receiver
        self._prepare = prepare
        self._prepared: tuple[Staging, Any] | None = None
        self._receiver: WeightReceiver | None = None
        self._staging: Staging | None = None
        self._kept: KeptWeights | None = None

    @property
    def has_applied(self) -> bool:
        """Always False: staging applies nothing."""
        return False

    @property
    def kept(self) -> UpdateRef | None:
        return None if self._kept is None else self._kept.ref

    def take(self) -> Named:
        """Return what arrived, in order; nothing writes to it again. Raises `TransferError` once the update is over."""
        return self._arrived().tensors()

    def prepared(self) -> Any:
        """Return what ``prepare`` made of what arrived. Raises `TransferError` once the update is over."""
        staging = self._arrived()
        if self._prepared is None or self._prepared[0] is not staging:  # an update without buckets
            assert self._prepare is not None
            self._prepared = staging, self._prepare(staging.update, staging.tensors())
        return self._prepared[1]

    def flat(self, index: int) -> torch.Tensor:
        """Return the bytes of a bucket that arrived, uint8. Raises `TransferError` as `take`."""
        return self._arrived().flat(index)

    async def join(self, spec: TransportSpec) -> None:
        self._receiver = receiver = self._make_receiver(spec)
        try:
            await run_abandonable(receiver.join, "inflight-join")
        except BaseException:
            receiver.abort()
            raise

    def leave(self) -> None:
        receiver, self._receiver = self._receiver, None
        self._drop()
        if receiver is not None:
            receiver.abort()

    def begin(self, update: WeightUpdate) -> None:
        from inflight.weights.receive.staging import Staging  # loads torch only where weights arrive

        self._drop()
        if self._receiver is not None:
            self._receiver.begin(update.ref)
        self._staging = Staging(update, self._kept)

    async def receive(self, transfer: BucketTransfer, bucket: BucketSpec, tensors: Sequence[TensorSpec]) -> None:
        receiver, staging = self._receiver, self._staging
        if receiver is None or staging is None:
            raise TransferError("no weight group is formed")

        def receive() -> None:
            staging.receive(receiver, transfer, bucket, tensors)
            if self._prepare is not None and bucket.index == len(staging.update.buckets) - 1:
                self._prepared = staging, self._prepare(staging.update, staging.tensors())

        await run_abandonable(receive, "inflight-receive")

    def committed(self) -> None:
        staging, self._staging, self._prepared = self._staging, None, None
        if staging is not None:
            self._kept = staging.keep()

    def _arrived(self) -> Staging:
        if self._staging is None:
            raise TransferError("the update ended meanwhile")
        return self._staging

    def _drop(self) -> None:
        """Forget what arrived for an update that was not committed."""
        staging, self._staging, self._prepared = self._staging, None, None
        if staging is not None:
            staging.drop()

"""The sink for endpoints that receive buckets in this process and keep them until the commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from inflight.base.threads import run_abandonable
from inflight.contracts import WeightReceiver
from inflight.errors import TransferError
from inflight.weights.receive.adapter import BucketSink
from inflight.wire import BucketSpec, BucketTransfer, TensorSpec, TransportSpec, UpdateRef, WeightUpdate

if TYPE_CHECKING:
    import torch

    from inflight.weights.receive.base_weights import Named
    from inflight.weights.receive.staging import KeptWeights, Staging


class StagedSink(BucketSink):
    """A sink that receives buckets in this process. ``make_receiver`` creates a transport's receiver for each group.

    ``prepare`` is called with all received tensors, in the thread that received the last bucket, so that its work is
    done before sampling is paused. If ``prepare`` raises, `receive` raises the same error.
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
        """Return the received tensors in order. Nothing will write to them again.

        Raises `TransferError` if the update has ended.
        """
        return self._arrived().tensors()

    def prepared(self) -> Any:
        """Return the result of ``prepare``. Raises `TransferError` if the update has ended."""
        staging = self._arrived()
        if self._prepared is None or self._prepared[0] is not staging:  # an update without buckets
            assert self._prepare is not None
            self._prepared = staging, self._prepare(staging.update, staging.tensors())
        return self._prepared[1]

    def flat(self, index: int) -> torch.Tensor:
        """Return the bytes of a received bucket, uint8. Raises `TransferError` like `take`."""
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
            raise TransferError("no weight group is formed: call init_process_group first")

        def receive() -> None:
            staging.receive(receiver, transfer, bucket, tensors)
            if self._prepare is not None and bucket.index == len(staging.update.buckets) - 1:
                self._prepared = staging, self._prepare(staging.update, staging.tensors())

        await run_abandonable(receive, "inflight-receive")

    def note_committed(self) -> None:
        staging, self._staging, self._prepared = self._staging, None, None
        if staging is not None:
            self._kept = staging.keep()

    def _arrived(self) -> Staging:
        if self._staging is None:
            raise TransferError("the update has ended")
        return self._staging

    def _drop(self) -> None:
        """Discard the buckets of an update that was not committed."""
        staging, self._staging, self._prepared = self._staging, None, None
        if staging is not None:
            staging.drop()

"""The interfaces that an `UpdateReceiver` needs from an adapter: a pausable engine, and a sink for buckets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from inflight.wire import BucketSpec, BucketTransfer, TensorSpec, TransportSpec, UpdateRef, WeightUpdate


class PausableEngine(Protocol):
    """The engine whose weights an `UpdateReceiver` changes.

    After `pause` has returned, exactly one of `apply`, `resume` and `fail_requests` follows. If `apply` raises,
    `fail_requests` follows it. All methods are awaited in the receiver's event loop.
    """

    @abstractmethod
    async def pause(self, update: WeightUpdate) -> None:
        """Return once no token is being sampled, as ``update.in_flight`` specifies.

        For a staged update, this method may return immediately if the engine's own `apply` pauses, loads and resumes. A
        failed pause is then a failure of `apply`.

        If the update ends in the meantime, this call is cancelled and nothing else is called. Before ``CancelledError``
        propagates, make sampling continue as if this method had never been called. A pause that was sent to another
        thread or process may still be in transit, so send the resume after it, through the same queue. While the
        weights are torn, sampling is already paused, and this method returns immediately.
        """

    @abstractmethod
    async def apply(self, update: WeightUpdate) -> None:
        """Switch to the received weights, and resume sampling from ``update.version``.

        The weights are the whole model except for ``update.manifest.frozen``, or the LoRA of ``update.manifest.lora``.
        Change the version that labels tokens together with the weights, and in the same thread. If the engine has its
        own thread, make both changes there, before it samples the first token. `UpdateReceiver.session` reports the new
        version only after this method has returned, which is too late for the label. If this method raises any
        exception, the weights are considered torn.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Resume sampling from the old weights: the update ended between `pause` and `apply`."""

    @abstractmethod
    async def fail_requests(self) -> None:
        """End every request, running or waiting: the weights are torn.

        Either `apply` raised, or part of an update had arrived in the model, or an update that would have replaced torn
        weights has ended early. Sampling stays paused until the `apply` of a complete update, which the receiver
        permits after a `pause`. Callers of the ended requests receive `PoisonedError`, as new requests do from
        `UpdateStateMachine.refuse_to_sample`.
        """

    @abstractmethod
    async def num_running(self) -> int:
        """Return the number of running requests, for the error if a drain does not end in time."""


class BucketSink(Protocol):
    """Receives the buckets of an endpoint's updates, in this process or in the engine's."""

    @property
    @abstractmethod
    def has_applied(self) -> bool:
        """Return True from the moment at which a byte of the open update may be in the model.

        `begin` resets it to False.
        """

    @property
    @abstractmethod
    def kept(self) -> UpdateRef | None:
        """Return the update whose weights were kept as the base of a delta, or None if there is none."""

    @abstractmethod
    async def join(self, spec: TransportSpec) -> None:
        """Join the group that ``spec`` describes, and return once all of its ranks have joined.

        Raises `TransferError`.
        """

    @abstractmethod
    def leave(self) -> None:
        """Leave the group, end its pending calls, and discard the received buckets. Returns immediately. Idempotent."""

    @abstractmethod
    def begin(self, update: WeightUpdate) -> None:
        """Discard the buckets of any earlier update, and expect those of this one."""

    @abstractmethod
    async def receive(self, transfer: BucketTransfer, bucket: BucketSpec, tensors: Sequence[TensorSpec]) -> None:
        """Return when the whole bucket has arrived and matches ``transfer``. Raises `TransferError`."""

    @abstractmethod
    def note_committed(self) -> None:
        """Record that the received weights are now served. They are kept if their update requested it."""

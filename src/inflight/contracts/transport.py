"""The Protocols of a weight transport: a sender, a receiver, and a named pair of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from inflight.types import WeightBucket
from inflight.wire import (
    TensorSpec,
    TransportSpec,
    UpdateRef,
    WeightUpdate,
)

if TYPE_CHECKING:
    import torch


@runtime_checkable
class WeightSender(Protocol):
    """The trainer's end of a transport. Used by rank 0 only; its blocking calls run outside the event loop."""

    @property
    @abstractmethod
    def is_collective(self) -> bool:
        """Return whether all endpoints receive a bucket at once, while it is sent.

        If not, each endpoint reads a bucket separately after it was sent, so an endpoint that fails does not affect the
        others.
        """

    @abstractmethod
    def specs(self, run_id: str, num_ranks: Sequence[int], timeout_s: float) -> Sequence[TransportSpec]:
        """Open a new group and return a spec for each endpoint; endpoint i has ``num_ranks[i]`` ranks."""

    @abstractmethod
    def join(self) -> None:
        """Join the group that `specs` opened; blocks until every rank has joined.

        Raises `TransferError` after the timeout.
        """

    @abstractmethod
    def begin(self, update: WeightUpdate) -> None:
        """Prepare to send the buckets of ``update``. Raises `TransferError` if that fails."""

    @abstractmethod
    def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        """Send one bucket; blocks until it has been sent. If it raises `TransferError`, the group is unusable.

        Refuse a bucket whose ``ref`` is that of another update, which a call from that update may bring late.
        """

    @abstractmethod
    def end(self, *, is_done: bool) -> None:
        """End the update. ``is_done`` is True if no endpoint will read any of its buckets again."""

    @abstractmethod
    def abort(self) -> None:
        """End a call that is pending in another thread, and leave the group. Idempotent."""


@runtime_checkable
class WeightReceiver(Protocol):
    """One endpoint rank's end of a transport. Its blocking calls run outside the event loop."""

    @abstractmethod
    def join(self) -> None:
        """Join the group; blocks until every rank has joined. Raises `TransferError` after the timeout."""

    @abstractmethod
    def begin(self, ref: UpdateRef) -> None:
        """Prepare to receive the buckets of this update, starting with the first.

        Tensors returned so far stay unchanged: an endpoint may serve from them, or decode a delta against them. Their
        memory may be reused only once nothing refers to it.
        """

    @abstractmethod
    def receive(self, specs: Sequence[TensorSpec], timeout_s: float) -> list[torch.Tensor]:
        """Return the tensors of the next bucket, in order. If it raises `TransferError`, the group is unusable."""

    @abstractmethod
    def abort(self) -> None:
        """End a call that is pending in another thread, and leave the group. Idempotent."""


@runtime_checkable
class ReceivesAhead(Protocol):
    """A `WeightReceiver` that can also receive the next bucket while the previous one is being verified."""

    @abstractmethod
    def receive_ahead(self, specs: Sequence[TensorSpec], timeout_s: float) -> None:
        """Start to receive the next bucket in the background; the next `receive` returns it or raises the failure.

        Returns immediately. At most one bucket is received ahead. ``specs`` are those of the next `receive`, and
        ``timeout_s`` limits how long the sender may take to begin and to finish sending.
        """


@runtime_checkable
class SendsFromDevice(Protocol):
    """A `WeightSender` that may send buckets from the device on which they were gathered, not from host memory."""

    @property
    @abstractmethod
    def sends_from_device(self) -> bool:
        """Return whether the sender sends from that device. If so, both sides compute checksums on their devices."""


@runtime_checkable
class ReservesMemory(Protocol):
    """A `WeightSender` that provides memory for buckets, so that `send` need not copy them."""

    @abstractmethod
    def reserve(self, index: int, size_bytes: int) -> torch.Tensor | None:
        """Return memory, uint8 [size_bytes], for bucket ``index`` of the open update.

        Returns None if the sender cannot provide any; the bucket is then sent from other memory. Called only for
        updates whose buckets are not encoded, in the training thread, in the order of buckets, before `send`. If the
        update has already ended, writing to the memory does not affect later updates.
        """


@runtime_checkable
class Transport(Protocol):
    """A way to transfer weights, which creates the two ends of a transfer. Instances hold no state.

    Registered in the entry point group ``inflight.transports``. Creating an instance does not import torch.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name of the entry point, such as ``gloo``, which is the ``transport`` in the sender's specs."""

    @property
    @abstractmethod
    def spec_type(self) -> type[TransportSpec]:
        """Return the type of the specs. A server parses untrusted input with it, so every field needs bounds."""

    @property
    @abstractmethod
    def needs_gpu(self) -> bool:
        """Return whether both ends must be on a GPU."""

    @abstractmethod
    def sender(self, *, address: str, directory: Path | None) -> WeightSender:
        """Return the trainer's end.

        ``address`` is the address at which the endpoints reach this machine. A transport that stores buckets keeps them
        in ``directory``; if that is None, the sender creates a directory. Raises `ConfigError` if the arguments cannot
        be used.
        """

    @abstractmethod
    def receiver(self, spec: TransportSpec, *, rank: int, device: torch.device | None) -> WeightReceiver:
        """Return the receiving end for one rank of an endpoint. ``spec`` is a `spec_type`.

        ``rank`` counts the endpoint's own ranks from 0, and ``device`` is where the rank has its weights.
        """

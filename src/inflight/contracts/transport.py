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

        False: each endpoint reads a bucket on its own after it was sent, so one that fails does not affect the others.
        """

    @abstractmethod
    def specs(self, run_id: str, num_ranks: Sequence[int], timeout_s: float) -> Sequence[TransportSpec]:
        """Open a new group and return a spec for each endpoint; endpoint i has ``num_ranks[i]`` ranks."""

    @abstractmethod
    def join(self) -> None:
        """Join the group just opened; blocks until every rank has joined. Raises `TransferError` after the timeout."""

    @abstractmethod
    def begin(self, update: WeightUpdate) -> None:
        """Prepare to send the buckets of ``update``. Raises `TransferError`."""

    @abstractmethod
    def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        """Send one bucket; blocks until it has left. Raises `TransferError`; the group is then unusable."""

    @abstractmethod
    def end(self, *, is_done: bool) -> None:
        """End the update. ``is_done`` states that no endpoint will read any of it again."""

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
        """Prepare to receive the buckets of this update, from the first.

        Tensors returned so far stay unchanged: an endpoint may serve from them, or decode a delta against them. Memory
        may be reused only once nothing refers to it.
        """

    @abstractmethod
    def receive(self, specs: Sequence[TensorSpec], timeout_s: float) -> list[torch.Tensor]:
        """Return the tensors of the next bucket, in order. Raises `TransferError`; the group is then unusable."""

    @abstractmethod
    def abort(self) -> None:
        """End a call that is pending in another thread, and leave the group. Idempotent."""


@runtime_checkable
class ReceivesAhead(Protocol):
    """A `WeightReceiver` that can also receive the next bucket while the last one is compared."""

    @abstractmethod
    def receive_ahead(self, specs: Sequence[TensorSpec], timeout_s: float) -> None:
        """Start to receive the next bucket in the background; the next `receive` returns it or raises the failure.

        Returns at once. At most one bucket is received ahead; ``specs`` are those of that `receive`, and ``timeout_s``
        bounds how long the sender may take to begin and to end.
        """


@runtime_checkable
class SendsFromDevice(Protocol):
    """A `WeightSender` that may send buckets from where they were gathered, instead of from host memory."""

    @property
    @abstractmethod
    def sends_from_device(self) -> bool:
        """Return whether it sends from there; checksums are then computed on the device, on both sides."""


@runtime_checkable
class ReservesMemory(Protocol):
    """A `WeightSender` whose memory the caller may write buckets to, which `send` does not copy."""

    @abstractmethod
    def reserve(self, index: int, size_bytes: int) -> torch.Tensor | None:
        """Return memory for bucket ``index`` of the open update, uint8 [size_bytes]; None if other memory must be sent.

        Only for updates whose buckets are not encoded. Called in the training thread, in the order of buckets, before
        `send`. If the update has ended meanwhile, writing to the memory has no effect on later updates.
        """


@runtime_checkable
class Transport(Protocol):
    """One way to transfer weights: creates its two ends. Instances hold no state.

    Registered in the entry point group ``inflight.transports``. Creating an instance does not import torch.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name of the entry point, such as ``gloo``; the specs of its sender carry it as ``transport``."""

    @property
    @abstractmethod
    def spec_type(self) -> type[TransportSpec]:
        """Return the type of its specs. A server parses untrusted input with it, so every field needs bounds."""

    @property
    @abstractmethod
    def needs_gpu(self) -> bool:
        """Return whether both ends are on a GPU."""

    @abstractmethod
    def sender(self, *, address: str, directory: Path | None) -> WeightSender:
        """Return the trainer's end.

        ``address`` is this machine's address as the endpoints see it. A transport that stores buckets keeps them in
        ``directory``, or in one that the sender creates if it is None. Raises `ConfigError`.
        """

    @abstractmethod
    def receiver(self, spec: TransportSpec, *, rank: int, device: torch.device | None) -> WeightReceiver:
        """Return the end of one rank of an endpoint, for a spec of `spec_type`.

        ``rank`` counts the endpoint's own ranks from 0, and ``device`` is where the rank has its weights.
        """

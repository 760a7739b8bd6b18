"""How bytes travel. Each transport has a sender for trainer rank 0 and a receiver for each endpoint rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from inflight.wire import Backend, DirectorySpec, ProcessGroupSpec, TransportSpec

if TYPE_CHECKING:
    import torch

    from inflight.contracts import WeightReceiver, WeightSender


def make_sender(backend: Backend, *, address: str = "127.0.0.1", directory: Path | None = None) -> WeightSender:
    """Return the trainer's end of a transport.

    ``address`` is this machine's address as the endpoints see it (gloo, nccl, http). ``directory`` is where buckets are
    stored (file, which needs one that the endpoints see; http and shm make one of their own by default). Raises
    `ConfigError`.
    """
    if backend in ("gloo", "nccl"):
        from inflight.weights.transports.process_group import ProcessGroupSender

        return ProcessGroupSender(backend, address)
    if backend == "shm":
        from inflight.weights.transports.shared_memory import SharedMemorySender

        return SharedMemorySender(directory)
    if backend == "file":
        from inflight.weights.transports.files import FileSender

        return FileSender(directory)
    from inflight.weights.transports.pull import PullSender

    return PullSender(directory, address=address)


def make_receiver(spec: TransportSpec, device: torch.device | None = None) -> WeightReceiver:
    """Return an endpoint rank's end of the transport that ``spec`` describes; ``device`` is where NCCL writes."""
    if isinstance(spec, ProcessGroupSpec):
        from inflight.weights.transports.process_group import ProcessGroupReceiver

        return ProcessGroupReceiver(spec, device)
    if isinstance(spec, DirectorySpec):
        if spec.backend == "shm":
            from inflight.weights.transports.shared_memory import SharedMemoryReceiver

            return SharedMemoryReceiver(spec)
        from inflight.weights.transports.files import FileReceiver

        return FileReceiver(spec)
    from inflight.weights.transports.pull import PullReceiver

    return PullReceiver(spec)

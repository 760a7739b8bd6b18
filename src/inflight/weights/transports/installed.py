"""The transports that inflight itself installs. Creating a sender or receiver imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from inflight.contracts import Transport
from inflight.wire import DirectorySpec, HttpFileSpec, IpcSpec, ProcessGroupSpec, TransportSpec

if TYPE_CHECKING:
    import torch

    from inflight.contracts import WeightReceiver, WeightSender


class ProcessGroupTransport(Transport):
    """One broadcast per bucket in a torch process group."""

    spec_type = ProcessGroupSpec

    def __init__(self, name: Literal["gloo", "nccl"]) -> None:
        self._name: Literal["gloo", "nccl"] = name

    @property
    def name(self) -> str:
        return self._name

    @property
    def needs_gpu(self) -> bool:
        return self._name == "nccl"

    def sender(self, *, address: str, directory: Path | None) -> WeightSender:
        from inflight.weights.transports.process_group import ProcessGroupSender

        return ProcessGroupSender(self._name, address)

    def receiver(self, spec: TransportSpec, *, rank: int, device: torch.device | None) -> WeightReceiver:
        from inflight.weights.transports.process_group import ProcessGroupReceiver

        assert isinstance(spec, ProcessGroupSpec)
        return ProcessGroupReceiver(spec.model_copy(update={"rank": spec.rank + rank}), device)


class SharedMemoryTransport(Transport):
    """Buckets in host memory that all processes on the host can map."""

    name = "shm"
    spec_type = DirectorySpec
    needs_gpu = False

    def sender(self, *, address: str, directory: Path | None) -> WeightSender:
        from inflight.weights.transports.arenas import ArenaSender
        from inflight.weights.transports.shared_memory import FileMemory

        return ArenaSender(FileMemory(), directory)

    def receiver(self, spec: TransportSpec, *, rank: int, device: torch.device | None) -> WeightReceiver:
        from inflight.weights.transports.arenas import ArenaReceiver
        from inflight.weights.transports.shared_memory import FileMemory

        assert isinstance(spec, DirectorySpec)
        return ArenaReceiver(spec, FileMemory())


class IpcTransport(Transport):
    """Buckets in the memory of the trainer's GPU, mapped by engines on the same GPU."""

    name = "ipc"
    spec_type = IpcSpec
    needs_gpu = True

    def sender(self, *, address: str, directory: Path | None) -> WeightSender:
        from inflight.weights.transports.arenas import ArenaSender
        from inflight.weights.transports.device_memory import CudaMemory
        from inflight.weights.transports.ipc import IpcMemory

        return ArenaSender(IpcMemory(CudaMemory()), directory)

    def receiver(self, spec: TransportSpec, *, rank: int, device: torch.device | None) -> WeightReceiver:
        from inflight.weights.transports.arenas import ArenaReceiver
        from inflight.weights.transports.device_memory import CudaMemory
        from inflight.weights.transports.ipc import IpcMemory

        assert isinstance(spec, IpcSpec)
        return ArenaReceiver(spec, IpcMemory(CudaMemory()))


class FileTransport(Transport):
    """Buckets as files in a directory that every endpoint can read."""

    name = "file"
    spec_type = DirectorySpec
    needs_gpu = False

    def sender(self, *, address: str, directory: Path | None) -> WeightSender:
        from inflight.weights.transports.files import DirectorySender

        return DirectorySender(directory)

    def receiver(self, spec: TransportSpec, *, rank: int, device: torch.device | None) -> WeightReceiver:
        from inflight.weights.transports.files import DirectoryReceiver

        assert isinstance(spec, DirectorySpec)
        return DirectoryReceiver(spec, device)


class HttpTransport(Transport):
    """The files of `FileTransport`, served over HTTP."""

    name = "http"
    spec_type = HttpFileSpec
    needs_gpu = False

    def sender(self, *, address: str, directory: Path | None) -> WeightSender:
        from inflight.weights.transports.http_files import HttpFileSender

        return HttpFileSender(directory, address=address)

    def receiver(self, spec: TransportSpec, *, rank: int, device: torch.device | None) -> WeightReceiver:
        from inflight.weights.transports.http_files import HttpFileReceiver

        assert isinstance(spec, HttpFileSpec)
        return HttpFileReceiver(spec, device)


GLOO = ProcessGroupTransport("gloo")
NCCL = ProcessGroupTransport("nccl")
SHM = SharedMemoryTransport()
IPC = IpcTransport()
FILE = FileTransport()
HTTP = HttpTransport()

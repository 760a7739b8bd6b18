"""Memory that processes on one host share: GPU memory, through CUDA handles, or host memory. Nothing is pickled.

A handle is a small message. A CUDA handle contains the values that torch itself passes between processes
(`torch.multiprocessing.reductions`), with bytes encoded as base64.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
import torch.utils.dlpack
from pydantic import Field

from inflight.errors import ConfigError
from inflight.weights.encode.transit import on_weight_stream
from inflight.wire import Natural, WireModel

_Base64 = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]*={0,2}$", max_length=4096)]
_dlpack: Any = torch.utils.dlpack  # not typed
_Storage: Any = torch.UntypedStorage  # its stubs leave out the sharing of CUDA memory


class MemoryHandle(WireModel):
    """A description with which another process maps ``size_bytes`` of memory.

    ``memory`` identifies the memory; the other fields are internal to CUDA and torch.
    """

    size_bytes: Natural
    memory: _Base64
    offset: Natural = 0
    counter: _Base64 = ""
    counter_offset: Natural = 0
    event: _Base64 = ""
    is_event_needed: bool = False


class DeviceMemory(Protocol):
    """Memory of one device, which the sender shares and receivers map."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Return the device."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Return the name under which other processes find the device."""

    @abstractmethod
    def allocate(self, size_bytes: int, path: Path) -> tuple[torch.Tensor, MemoryHandle]:
        """Return new memory, uint8 [size_bytes], and its handle.

        The memory may be a file at ``path``, which does not exist yet. Raises `OSError` or `RuntimeError`.
        """

    @abstractmethod
    def release(self, handle: MemoryHandle) -> None:
        """Record that no process maps the memory any more and that the tensor is about to be freed."""

    @abstractmethod
    def mapping_problem(self, place: str) -> str | None:
        """Return why memory of the device ``place`` cannot be mapped in this process, or None if it can."""

    @abstractmethod
    def map_memory(self, handle: MemoryHandle, place: str) -> torch.Tensor:
        """Return the memory, uint8 [size_bytes], read-only, in its own storage.

        Raises `OSError` or `RuntimeError`.
        """


_of_this_process: weakref.WeakValueDictionary[tuple[str, int], torch.Tensor] = weakref.WeakValueDictionary()
"""The memory that this process shares: CUDA does not let a process map its own memory, and an embedded engine may run
in the trainer's process.
"""


class CudaMemory(DeviceMemory):
    """Memory of this process's current GPU. Raises `ConfigError` if torch sees none."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("ipc shares a GPU's memory, and torch sees no GPU here; use the shm transport")
        self._device = torch.device("cuda", torch.cuda.current_device())

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def place(self) -> str:
        return _uuid(self._device.index)

    def allocate(self, size_bytes: int, path: Path) -> tuple[torch.Tensor, MemoryHandle]:
        with on_weight_stream(self._device):
            flat = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        shared: Any = flat.untyped_storage()
        _, memory, size, offset, counter, counter_offset, event, is_event_needed = shared._share_cuda_()
        handle = MemoryHandle(
            size_bytes=size,
            memory=_text(memory),
            offset=offset,
            counter=_text(counter),
            counter_offset=counter_offset,
            event=_text(event),
            is_event_needed=is_event_needed,
        )
        _of_this_process[handle.memory, handle.offset] = flat
        return flat, handle

    def release(self, handle: MemoryHandle) -> None:
        _of_this_process.pop((handle.memory, handle.offset), None)
        # Otherwise torch would keep the memory for readers that ended without releasing it.
        _Storage._release_ipc_counter_cuda(b64decode(handle.counter), handle.counter_offset)

    def mapping_problem(self, place: str) -> str | None:
        seen = [_uuid(index) for index in range(torch.cuda.device_count())]
        if place in seen:
            return None
        return f"the trainer's GPU {place} is not visible here; visible are {', '.join(seen) or 'none'}"

    def map_memory(self, handle: MemoryHandle, place: str) -> torch.Tensor:
        if (own := _of_this_process.get((handle.memory, handle.offset))) is not None:
            flat: torch.Tensor = _dlpack.from_dlpack(_dlpack.to_dlpack(own))
            return flat
        index = next(index for index in range(torch.cuda.device_count()) if _uuid(index) == place)
        with torch.cuda.device(index), on_weight_stream(torch.device("cuda", index)):
            storage = _Storage._new_shared_cuda(
                index,
                b64decode(handle.memory),
                handle.size_bytes,
                handle.offset,
                b64decode(handle.counter),
                handle.counter_offset,
                b64decode(handle.event),
                handle.is_event_needed,
            )
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
            return flat.set_(storage, 0, (handle.size_bytes,), (1,))


class HostMemory(DeviceMemory):
    """Memory of this host, in files in the sender's directory. It lets the transport work without a GPU."""

    device = torch.device("cpu")
    place = "host"

    def allocate(self, size_bytes: int, path: Path) -> tuple[torch.Tensor, MemoryHandle]:
        flat = torch.from_file(str(path), shared=True, size=size_bytes, dtype=torch.uint8)
        path.chmod(0o600)
        return flat, MemoryHandle(size_bytes=size_bytes, memory=_text(str(path).encode()))

    def release(self, handle: MemoryHandle) -> None:
        Path(b64decode(handle.memory).decode()).unlink(missing_ok=True)

    def mapping_problem(self, place: str) -> str | None:
        return None if place == self.place else f"memory of {place} cannot be mapped here"

    def map_memory(self, handle: MemoryHandle, place: str) -> torch.Tensor:
        path = b64decode(handle.memory).decode()
        return torch.from_file(path, shared=True, size=handle.size_bytes, dtype=torch.uint8)


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _text(data: bytes) -> str:
    return b64encode(data).decode()

"""Weights through GPU memory: rank 0 writes buckets to the memory of its GPU, and endpoints on the same GPU map it.

An arena's file contains the handle of the arena's memory. CUDA must not free memory that another process maps, so an
arena outlives its sender until the last lock on it is released.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from inflight.errors import TransferError
from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import pack_into
from inflight.weights.encode.transit import finished_on_weight_stream
from inflight.weights.transports.arenas import ArenaMemory, ArenaSpec, SenderMemory
from inflight.weights.transports.device_memory import DeviceMemory, MemoryHandle
from inflight.weights.transports.store import Attempt, parse_message
from inflight.wire import IpcSpec

_MAX_HANDLE_BYTES = 1 << 16


class IpcMemory(ArenaMemory):
    """The memory of a device, shared through handles."""

    sends_from_device = True
    outlives_sender = False

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory

    @property
    def device(self) -> torch.device:
        return self._memory.device

    def spec(self, run_id: str, directory: Path, timeout_s: float) -> ArenaSpec:
        place = self._memory.place
        return IpcSpec(run_id=run_id, transport="ipc", directory=str(directory), place=place, timeout_s=timeout_s)

    def allocate(self, fd: int, path: Path, size_bytes: int) -> SenderMemory:
        flat, handle = self._memory.allocate(size_bytes, path.with_suffix(".bytes"))
        os.write(fd, handle.model_dump_json().encode())
        return _Shared(self._memory, flat, handle)

    def mapping_problem(self, spec: ArenaSpec) -> str | None:
        assert isinstance(spec, IpcSpec)
        return self._memory.mapping_problem(spec.place)

    def map_memory(self, fd: int, size_bytes: int, spec: ArenaSpec) -> torch.Tensor:
        assert isinstance(spec, IpcSpec)
        if size_bytes > _MAX_HANDLE_BYTES:
            raise TransferError(f"a handle has {size_bytes} bytes; at most {_MAX_HANDLE_BYTES} are read")
        handle = parse_message(MemoryHandle, os.pread(fd, size_bytes, 0), where=f"a handle in {spec.directory}")
        return self._memory.map_memory(handle, spec.place)


class _Shared(SenderMemory):
    def __init__(self, memory: DeviceMemory, flat: torch.Tensor, handle: MemoryHandle) -> None:
        self._memory = memory
        self._flat = flat
        self._handle = handle

    @property
    def held_bytes(self) -> int:
        return self._flat.numel()

    def view(self, start: int, end: int) -> None:
        return None

    def write(self, start: int, bucket: WeightBucket, attempt: Attempt) -> None:
        with finished_on_weight_stream(self._memory.device, after=bucket.ready):
            pack_into(self._flat[start:], bucket.tensors)

    def close(self) -> None:
        self._memory.release(self._handle)

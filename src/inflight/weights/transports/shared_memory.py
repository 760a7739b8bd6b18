"""Weights through memory of this host: an arena is a file in memory, which every endpoint maps.

All endpoints of the host share one set of pages. A file never shrinks, so no mapping loses its pages, and one that was
unlinked stays whole where it is mapped.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import pack
from inflight.weights.transports.arenas import ArenaMemory, ArenaSpec, SenderMemory
from inflight.weights.transports.store import PIECE_BYTES, Attempt, bytes_of, write_all
from inflight.wire import DirectorySpec


class FileMemory(ArenaMemory):
    """Memory of this host, in files."""

    device = torch.device("cpu")
    sends_from_device = False
    outlives_sender = True

    def spec(self, run_id: str, directory: Path, timeout_s: float) -> ArenaSpec:
        return DirectorySpec(run_id=run_id, transport="shm", directory=str(directory), timeout_s=timeout_s)

    def allocate(self, fd: int, path: Path, size_bytes: int) -> SenderMemory:
        os.ftruncate(fd, size_bytes)
        return _File(fd, size_bytes)

    def mapping_problem(self, spec: ArenaSpec) -> str | None:
        return None

    def map_memory(self, fd: int, size_bytes: int, spec: ArenaSpec) -> torch.Tensor:
        """Writes that a receiver makes by mistake stay private to it."""
        return torch.frombuffer(mmap.mmap(fd, size_bytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)


class _File(SenderMemory):
    """The first write to a page allocates it. First writes go through the file, which does not clear pages first, and
    does not end the process if memory runs out. Later writes go through a mapping, as a plain copy.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self._size_bytes = size_bytes
        self._written_bytes = 0
        self._mapped: torch.Tensor | None = None

    @property
    def held_bytes(self) -> int:
        return self._written_bytes

    def write(self, start: int, bucket: WeightBucket, attempt: Attempt) -> None:
        flat = pack(bucket.tensors)
        end = start + flat.numel()
        if end <= self._written_bytes:
            target = self._mapping()[start:end]
            for piece in range(0, flat.numel(), PIECE_BYTES):
                attempt.remaining_s()
                target[piece : piece + PIECE_BYTES].copy_(flat[piece : piece + PIECE_BYTES])
        else:
            write_all(self._fd, bytes_of(flat.cpu()), attempt, start)
            self._written_bytes = end

    def close(self) -> None:
        self._mapped = None

    def _mapping(self) -> torch.Tensor:
        if self._mapped is None:
            self._mapped = torch.frombuffer(mmap.mmap(self._fd, self._size_bytes), dtype=torch.uint8)
        return self._mapped

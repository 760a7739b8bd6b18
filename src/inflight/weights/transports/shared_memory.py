"""Weights through host memory: an arena is an in-memory file that every endpoint maps.

All endpoints on the host share one set of pages. A file never shrinks, so no mapping loses pages, and an unlinked file
stays complete for the processes that map it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import torch

from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import pack
from inflight.weights.transports.arenas import NUM_ARENAS, ArenaMemory, ArenaSpec, SenderMemory
from inflight.weights.transports.store import PIECE_BYTES, Attempt, bytes_of, write_all
from inflight.wire import DirectorySpec

_POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE, which the mmap module does not define."""


class FileMemory(ArenaMemory):
    """Memory of this host, in files.

    Until it is aborted, a receiver keeps its mappings of the two most recent arenas, because mapping an arena again
    takes as long as reading it.
    """

    device = torch.device("cpu")
    sends_from_device = False
    outlives_sender = True

    def __init__(self) -> None:
        self._mappings: dict[int, mmap.mmap] = {}
        """Mappings by inode, which stays unique while the mapping exists; the most recently used mapping is last."""

    def spec(self, run_id: str, directory: Path, timeout_s: float) -> ArenaSpec:
        return DirectorySpec(run_id=run_id, transport="shm", directory=str(directory), timeout_s=timeout_s)

    def allocate(self, fd: int, path: Path, size_bytes: int) -> SenderMemory:
        os.ftruncate(fd, size_bytes)
        return _File(fd, size_bytes)

    def mapping_problem(self, spec: ArenaSpec) -> str | None:
        return None

    def map_memory(self, fd: int, size_bytes: int, spec: ArenaSpec) -> torch.Tensor:
        """Map an arena.

        Accidental writes by a receiver stay private to that receiver, and the checksums of later updates detect them.
        """
        inode, kept = os.fstat(fd).st_ino, self._mappings
        mapping = kept.pop(inode, None)
        if mapping is None:
            # A mapping keeps its file open. Opening it again ensures that the mapping does not keep the lock of ``fd``.
            again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                mapping = mmap.mmap(again, size_bytes, access=mmap.ACCESS_COPY)
            finally:
                os.close(again)
        kept[inode] = mapping
        for unused in [*kept][:-NUM_ARENAS]:
            del kept[unused]
        return torch.frombuffer(mapping, dtype=torch.uint8)

    def forget_mappings(self) -> None:
        self._mappings = {}  # not cleared: another thread may be using the dictionary


class _File(SenderMemory):
    """An arena's file, as written by the sender.

    The first write to a page, which allocates the page, is a file operation: it does not clear the page first, and does
    not end the process if memory runs out. Later writes are plain copies to a mapping.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self._size_bytes = size_bytes
        self._written_bytes = 0
        self._mapped: torch.Tensor | None = None

    @property
    def held_bytes(self) -> int:
        return self._written_bytes

    def view(self, start: int, end: int) -> torch.Tensor | None:
        return self._mapping()[start:end] if end <= self._written_bytes else None

    def write(self, start: int, bucket: WeightBucket, attempt: Attempt) -> None:
        flat = pack(bucket.tensors)
        end = start + flat.numel()
        if (target := self.view(start, end)) is not None:
            if target.data_ptr() == flat.data_ptr():
                return
            for piece in range(0, flat.numel(), PIECE_BYTES):
                attempt.remaining_s()
                target[piece : piece + PIECE_BYTES].copy_(flat[piece : piece + PIECE_BYTES])
        else:
            write_all(self._fd, bytes_of(flat.cpu()), attempt, start)
            self._written_bytes = end

    def prepare(self) -> None:
        if self._written_bytes:
            self._mapping()

    def close(self) -> None:
        self._mapped = None

    def _mapping(self) -> torch.Tensor:
        if self._mapped is None:
            mapping = mmap.mmap(self._fd, self._size_bytes)
            # All pages at once: a page fault for each one would take longer than copying it.
            with contextlib.suppress(OSError):  # kernels before 5.14
                mapping.madvise(_POPULATE_WRITE, 0, self._written_bytes)
            self._mapped = torch.frombuffer(mapping, dtype=torch.uint8)
        return self._mapped

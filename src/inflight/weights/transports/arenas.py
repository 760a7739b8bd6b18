"""Memory that a trainer and its endpoints share on one host: arenas, and locks that show whether they are in use.

The sender writes the buckets of an update into one arena. Each arena has a file, in a directory that only this user can
enter. The directory also contains a small record for each bucket of the update, with the bucket's position in the arena
and the update to which it belongs. A receiver copies nothing: its tensors are views of the arena.

The views hold a shared lock on the arena's file for as long as anything refers to them, so an endpoint may serve from
them. The operating system releases the lock when the process ends for any reason. The sender overwrites an arena only
if nobody holds a lock on it, and otherwise uses a different one: endpoints serve from one arena while the next update
arrives in the other.

`ArenaMemory` defines the kind of memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import torch

from inflight.contracts import ReservesMemory, SendsFromDevice, WeightSender
from inflight.errors import TransferError, transfer_error
from inflight.types import WeightBucket
from inflight.weights.encode.buckets import refuse_stray
from inflight.weights.encode.transit import synchronise_device
from inflight.weights.transports.bucket_records import PAGE, BucketRecord, await_record, round_up_to_pages, write_record
from inflight.weights.transports.private_directory import PrivateDirectory, memory_directory
from inflight.weights.transports.store import Attempt, StoredReceiver, abandon, regular_file
from inflight.wire import DirectorySpec, IpcSpec, UpdateRef, WeightUpdate

ArenaSpec = DirectorySpec | IpcSpec

_MOST_UNUSED = 4  # an arena that uses this many times more memory than the last update is not kept
NUM_ARENAS = 2


class SenderMemory(Protocol):
    """The sender's view of the memory of one arena. Its methods raise `OSError` or `RuntimeError`."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Return the size of the arena's memory in bytes."""

    @abstractmethod
    def view(self, start: int, end: int) -> torch.Tensor | None:
        """Return the writable memory from ``start`` to ``end``, uint8; None if only `write` can write there."""

    @abstractmethod
    def write(self, start: int, bucket: WeightBucket, attempt: Attempt) -> None:
        """Write the bytes of a bucket at ``start``, unless they are already there.

        On return, receivers can map these bytes. Also raises `TransferError`.
        """

    def prepare(self) -> None:
        """Prepare the written memory for being overwritten, so that the next update need not wait for this."""
        return

    @abstractmethod
    def close(self) -> None:
        """Release the memory."""


class ArenaMemory(Protocol):
    """A kind of memory that processes on one host can share."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Return the device of the memory."""

    @property
    @abstractmethod
    def sends_from_device(self) -> bool:
        """Return whether buckets are sent from the device on which they were gathered."""

    @property
    @abstractmethod
    def outlives_sender(self) -> bool:
        """Return whether mapped memory stays valid after its sender has closed it."""

    @abstractmethod
    def spec(self, run_id: str, directory: Path, timeout_s: float) -> ArenaSpec:
        """Return the spec with which an endpoint finds the arenas."""

    @abstractmethod
    def allocate(self, fd: int, path: Path, size_bytes: int) -> SenderMemory:
        """Return new memory, described by the new file ``fd`` at ``path``. Raises `OSError` or `RuntimeError`."""

    @abstractmethod
    def mapping_problem(self, spec: ArenaSpec) -> str | None:
        """Return why memory with this spec cannot be mapped in this process; None if it can."""

    @abstractmethod
    def map_memory(self, fd: int, size_bytes: int, spec: ArenaSpec) -> torch.Tensor:
        """Return the memory that a file of ``size_bytes`` describes: uint8, read-only, in its own storage.

        Raises `OSError`, `RuntimeError`, `ValueError` or `TransferError`.
        """

    def forget_mappings(self) -> None:
        """Drop mappings that are kept only to be used again. Tensors in mapped memory stay valid."""
        return


class ArenaSender(WeightSender, SendsFromDevice, ReservesMemory):
    """The sender of trainer rank 0. ``directory`` replaces /dev/shm."""

    def __init__(self, memory: ArenaMemory, directory: Path | None = None) -> None:
        self._memory = memory
        self._parent = directory
        self._lock = threading.Lock()
        self._abandoned: Future[str] = Future()
        self._home: PrivateDirectory | None = None
        self._arenas: list[_Arena] = []
        self._arena: _Arena | None = None
        """The arena of the open update, one of ``_arenas``."""
        self._num_made = 0
        self._update: WeightUpdate | None = None
        self._records: list[Path] = []

    @property
    def is_collective(self) -> bool:
        return False

    @property
    def sends_from_device(self) -> bool:
        return self._memory.sends_from_device

    def specs(self, run_id: str, num_ranks: Sequence[int], timeout_s: float) -> list[ArenaSpec]:
        """Return one spec per endpoint. Raises `TransferError` if the directory cannot be created."""
        self.end(is_done=False)
        parent = self._parent or memory_directory()
        with self._lock:
            abandon(self._abandoned)
            self._abandoned = Future()
            try:
                self._home = self._home or PrivateDirectory(parent)
            except OSError as error:
                raise transfer_error(error, f"making a directory below {parent}") from error
            return [self._memory.spec(run_id, self._home.path, timeout_s)] * len(num_ranks)

    def join(self) -> None:
        """Return without waiting for endpoints."""
        if self._home is None:
            raise TransferError("no weight group is open")

    def begin(self, update: WeightUpdate) -> None:
        """Begin an update. An earlier update that was not ended is treated as unfinished."""
        self.end(is_done=False)
        size_bytes = max(PAGE, sum(round_up_to_pages(bucket.size_bytes) for bucket in update.buckets))
        with self._lock:
            if self._home is None:
                raise TransferError("no weight group is open")
            for arena in [a for a in self._arenas if a.size_bytes < size_bytes or a.is_too_large]:
                self._drop(arena)
            self._arena = next((arena for arena in self._arenas if arena.is_free()), None)
            if self._arena is None:
                for arena in self._arenas[: 1 - NUM_ARENAS]:
                    self._drop(arena)
                self._arena = self._make_arena(self._home.path, size_bytes)
            self._arena.used_bytes = 0
            self._update = update

    def reserve(self, index: int, size_bytes: int) -> torch.Tensor | None:
        with self._lock:
            if self._arena is None or self._update is None or self._update.encodings:
                return None
            start = sum(round_up_to_pages(bucket.size_bytes) for bucket in self._update.buckets[:index])
            return self._arena.memory.view(start, start + size_bytes)

    def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        """Write a bucket. On return, the device has finished writing, and receivers can map the bucket."""
        attempt = Attempt(f"storing bucket {bucket.index} in shared memory", timeout_s, self._abandoned)
        with self._lock:
            attempt.remaining_s()
            home, arena, update = self._home, self._arena, self._update
            if home is None or arena is None or update is None:
                raise attempt.failed("no update has begun")
            refuse_stray(bucket, update.ref)
            start, size_bytes = arena.used_bytes, sum(tensor.nbytes for tensor in bucket.tensors)
            if start + size_bytes > arena.size_bytes:
                raise attempt.failed(f"its {size_bytes} bytes are more than were announced")
            record = BucketRecord(
                ref=update.ref, index=bucket.index, arena=arena.path.name, offset=start, size_bytes=size_bytes
            )
            try:
                arena.memory.write(start, bucket, attempt)
                arena.used_bytes = round_up_to_pages(start + size_bytes)
                self._records.append(write_record(home.path, record))
            except OSError as error:
                advice = "; give it more memory, or use another directory" if error.errno == errno.ENOSPC else ""
                raise attempt.failed(f"{error.strerror} in {home.path}{advice}") from error
            except RuntimeError as error:
                raise attempt.failed(error) from error

    def end(self, *, is_done: bool) -> None:
        """End the update. Its memory is reused if the update is done; otherwise, the memory is left to its readers."""
        with self._lock:
            update, self._update = self._update, None
            records, self._records = self._records, []
            for path in records:
                path.unlink(missing_ok=True)
            arena, self._arena = self._arena, None
            if arena is not None and update is not None and not is_done:
                self._drop(arena)
            elif arena is not None:
                arena.memory.prepare()
        _close_unused()

    def abort(self) -> None:
        """Remove the directory. A new group creates another."""
        abandon(self._abandoned)  # a pending send holds the lock for at most one more piece
        with self._lock:
            home, self._home = self._home, None
            self._update, self._arena, self._records = None, None, []
            for arena in list(self._arenas):
                self._drop(arena)
            if home is not None:
                home.remove()

    def _make_arena(self, home: Path, size_bytes: int) -> _Arena:
        self._num_made += 1
        path = home / f"arena-{self._num_made}"
        try:
            arena = _Arena(path, self._memory, size_bytes)
        except (OSError, RuntimeError) as error:  # also when a device has no memory left
            raise transfer_error(error, f"making {path} of {size_bytes} bytes") from error
        self._arenas.append(arena)
        return arena

    def _drop(self, arena: _Arena) -> None:
        """Remove an arena. Its memory is kept as long as any process holds a lock on it."""
        self._arenas.remove(arena)
        # This comes before the check: a receiver that locks the file from now on sees that it was removed.
        arena.path.unlink(missing_ok=True)
        if self._memory.outlives_sender or arena.is_free():
            arena.close()
        else:
            _lent.append(arena)


class _Arena:
    """A file that receivers lock, and the memory that the file describes."""

    def __init__(self, path: Path, memory: ArenaMemory, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            self.memory = memory.allocate(self._fd, path, size_bytes)
        except BaseException:
            os.close(self._fd)
            path.unlink(missing_ok=True)
            raise

    @property
    def is_too_large(self) -> bool:
        return self.memory.held_bytes > _MOST_UNUSED * max(self.used_bytes, PAGE)

    def is_free(self) -> bool:
        """Return whether no receiver holds a lock on the file."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        except OSError:
            return False
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.memory.close()
        os.close(self._fd)


_lent: list[_Arena] = []
"""Arenas that were removed while a lock on them was held. They outlive their senders; any sender may close them."""


def _close_unused() -> None:
    for arena in list(_lent):
        if arena.is_free():
            with contextlib.suppress(ValueError):  # another sender was faster
                _lent.remove(arena)
                arena.close()


class ArenaReceiver(StoredReceiver):
    """The receiver of one endpoint rank. Tensors are read-only views of the arena."""

    def __init__(self, spec: ArenaSpec, memory: ArenaMemory) -> None:
        super().__init__()
        self._spec = spec
        self._memory = memory
        self._directory = Path(spec.directory)
        self._mapped: tuple[str, weakref.ref[torch.UntypedStorage]] | None = None

    def join(self) -> None:
        if self._abandoned.done():
            raise TransferError(self._abandoned.result())
        if (reason := self._memory.mapping_problem(self._spec)) is None:
            try:
                with regular_file(self._directory, "lock", is_private=True):
                    return
            except FileNotFoundError:
                reason = (
                    f"{self._directory} does not exist; the endpoint and the trainer must run on one host and share "
                    "one /dev/shm"
                )
        raise TransferError(f"joining the weight group failed: {reason}; otherwise, use another transport")

    def begin(self, ref: UpdateRef) -> None:
        super().begin(ref)
        self._mapped = None

    def abort(self) -> None:
        super().abort()
        self._mapped = None
        self._memory.forget_mappings()

    def _receive_bytes(self, ref: UpdateRef, index: int, size_bytes: int, attempt: Attempt) -> torch.Tensor:
        record = await_record(self._directory, ref, index, size_bytes, attempt)
        if size_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self._memory.device)
        try:
            flat = self._arena(record.arena)
        except (OSError, RuntimeError, ValueError) as error:
            raise attempt.failed(error) from error
        if flat.numel() < record.offset + size_bytes:
            raise attempt.failed(f"{self._directory / record.arena} is truncated: it has {flat.numel()} bytes")
        return flat[record.offset : record.offset + size_bytes]

    def _arena(self, name: str) -> torch.Tensor:
        """Return an arena. It stays mapped and locked until the last tensor in it is freed."""
        if self._mapped is not None and self._mapped[0] == name and (storage := self._mapped[1]()) is not None:
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
            return whole.set_(storage, 0, (storage.nbytes(),), (1,))
        with regular_file(self._directory, name, is_private=True) as (fd, size_bytes):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.fstat(fd).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "removed by the sender", name)
            flat = self._memory.map_memory(fd, size_bytes, self._spec)
            keep_open(flat, fd)
        self._mapped = name, weakref.ref(flat.untyped_storage())
        return flat


def keep_open(flat: torch.Tensor, fd: int) -> None:
    """Keep a file descriptor, and thus the file's lock, open until nothing refers to a tensor's memory."""
    last = weakref.finalize(flat.untyped_storage(), _unlock, os.dup(fd), flat.device)
    last.atexit = False  # the system closes it


def _unlock(fd: int, device: torch.device) -> None:
    try:
        synchronise_device(device)  # it may still be reading
    finally:
        os.close(fd)

"""Weights through memory of this host: rank 0 writes buckets into one file in memory, and every endpoint maps it.

The file (arena) lies in a directory of its own below /dev/shm, which only this user can enter. Beside it lies a small
record for each bucket of the update: where in the arena the bucket is, and which update it belongs to. A receiver
copies nothing: its tensors are views of its mapping, and all endpoints of the host share one set of pages.

A mapping holds a shared lock on its arena for as long as it exists, so an endpoint may serve from it. The sender writes
an arena again only if nobody holds a lock, and takes another one otherwise. Unlinking an arena leaves its mappings as
they are. It never shrinks, so no mapping loses its pages.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

from inflight.contracts import WeightSender
from inflight.errors import TransferError
from inflight.types import WeightBucket
from inflight.weights.packing import pack
from inflight.weights.session import refuse_stray, transfer_failed
from inflight.weights.transports.bucket_records import PAGE, BucketRecord, aligned, await_record, write_record
from inflight.weights.transports.private_directory import PrivateDirectory
from inflight.weights.transports.store import (
    PIECE_BYTES,
    Attempt,
    StoredReceiver,
    bytes_of,
    give_up,
    regular_file,
    write_all,
)
from inflight.wire import DirectorySpec, UpdateRef, WeightUpdate

_MOST_UNUSED = 4  # an arena this many times larger than the last update is not kept
_NUM_ARENAS = 2  # endpoints serve from one while the next update arrives in the other


class SharedMemorySender(WeightSender):
    """Trainer rank 0's end. ``directory`` replaces /dev/shm."""

    def __init__(self, directory: Path | None = None) -> None:
        self._parent = directory
        self._lock = threading.Lock()
        self._given_up: Future[str] = Future()
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

    def specs(self, run_id: str, num_ranks: Sequence[int], timeout_s: float) -> list[DirectorySpec]:
        """Raises `TransferError` if the directory cannot be made."""
        self.end(is_done=False)
        parent = self._parent or memory_directory()
        with self._lock:
            give_up(self._given_up)
            self._given_up = Future()
            try:
                self._home = self._home or PrivateDirectory(parent)
            except OSError as error:
                raise transfer_failed(error, f"making a directory below {parent}") from error
            directory = str(self._home.path)
        spec = DirectorySpec(run_id=run_id, transport="shm", directory=directory, timeout_s=timeout_s)
        return [spec] * len(num_ranks)

    def join(self) -> None:
        """Waits for no endpoint."""
        if self._home is None:
            raise TransferError("no weight group is open")

    def begin(self, update: WeightUpdate) -> None:
        """An earlier update that was not ended counts as not done."""
        self.end(is_done=False)
        size_bytes = max(PAGE, sum(aligned(bucket.size_bytes) for bucket in update.buckets))
        with self._lock:
            if self._home is None:
                raise TransferError("no weight group is open")
            for arena in [a for a in self._arenas if a.size_bytes < size_bytes or a.is_too_large]:
                self._drop(arena)
            self._arena = next((arena for arena in self._arenas if arena.is_free()), None)
            if self._arena is None:
                for arena in self._arenas[: 1 - _NUM_ARENAS]:
                    self._drop(arena)
                self._arena = self._made(self._home.path, size_bytes)
            self._arena.used_bytes = 0
            self._update = update

    def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        """On return the bucket can be mapped."""
        attempt = Attempt(f"storing bucket {bucket.index} in shared memory", timeout_s, self._given_up)
        flat = pack(bucket.tensors)
        with self._lock:
            attempt.remaining_s()
            if self._home is None or self._arena is None or self._update is None:
                raise attempt.failed("no update has begun")
            refuse_stray(bucket, self._update.ref)
            try:
                offset = self._arena.write(flat, attempt)
                record = BucketRecord(
                    ref=self._update.ref,
                    index=bucket.index,
                    arena=self._arena.path.name,
                    offset=offset,
                    size_bytes=flat.numel(),
                )
                self._records.append(write_record(self._home.path, record))
            except OSError as error:
                advice = "; give it more memory, or use another directory" if error.errno == errno.ENOSPC else ""
                raise attempt.failed(f"{error.strerror} in {self._home.path}{advice}") from error

    def end(self, *, is_done: bool) -> None:
        """The memory is used again if the update is done, and left to its readers if not."""
        with self._lock:
            update, self._update = self._update, None
            records, self._records = self._records, []
            for path in records:
                path.unlink(missing_ok=True)
            arena, self._arena = self._arena, None
            if arena is not None and update is not None and not is_done:
                self._drop(arena)

    def abort(self) -> None:
        """Removes the directory. A new group makes another."""
        give_up(self._given_up)  # a pending send holds the lock for at most one more piece
        with self._lock:
            home, self._home = self._home, None
            self._update, self._arena, self._records = None, None, []
            for arena in list(self._arenas):
                self._drop(arena)
            if home is not None:
                home.remove()

    def _made(self, home: Path, size_bytes: int) -> _Arena:
        self._num_made += 1
        path = home / f"arena-{self._num_made}"
        try:
            arena = _Arena(path, size_bytes)
        except OSError as error:
            raise transfer_failed(error, f"making {path} of {size_bytes} bytes") from error
        self._arenas.append(arena)
        return arena

    def _drop(self, arena: _Arena) -> None:
        self._arenas.remove(arena)
        arena.close()


class _Arena:
    """A file in memory to which buckets are appended, each from the start of a page.

    The first write to a page allocates it. First writes go through the file, which does not clear pages first, and does
    not end the process if memory runs out. Later writes go through a mapping, as a plain copy.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self._written_bytes = 0
        self._mapped: torch.Tensor | None = None
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(self._fd, size_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def is_too_large(self) -> bool:
        return self._written_bytes > _MOST_UNUSED * max(self.used_bytes, PAGE)

    def is_free(self) -> bool:
        """Return whether no mapping of an endpoint exists."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        except OSError:
            return False
        return True

    def write(self, flat: torch.Tensor, attempt: Attempt) -> int:
        """Append bytes, uint8; return where they begin. Raises `OSError`, `TransferError`."""
        start, end = self.used_bytes, self.used_bytes + flat.numel()
        if end > self.size_bytes:
            raise attempt.failed(f"its {flat.numel()} bytes are more than were announced")
        if end <= self._written_bytes:
            target = self._mapping()[start:end]
            for piece in range(0, flat.numel(), PIECE_BYTES):
                attempt.remaining_s()
                target[piece : piece + PIECE_BYTES].copy_(flat[piece : piece + PIECE_BYTES])
        else:
            write_all(self._fd, bytes_of(flat.cpu()), attempt, start)
            self._written_bytes = end
        self.used_bytes = aligned(end)
        return start

    def close(self) -> None:
        """Unlink it. Existing mappings stay whole."""
        self._mapped = None
        os.close(self._fd)
        self.path.unlink(missing_ok=True)

    def _mapping(self) -> torch.Tensor:
        if self._mapped is None:
            self._mapped = torch.frombuffer(mmap.mmap(self._fd, self.size_bytes), dtype=torch.uint8)
        return self._mapped


class SharedMemoryReceiver(StoredReceiver):
    """One endpoint rank's end. Tensors are views of a mapping. Writing to one changes it for this process alone."""

    def __init__(self, spec: DirectorySpec) -> None:
        super().__init__()
        self._spec = spec
        self._directory = Path(spec.directory)
        self._mapped: tuple[str, weakref.ref[mmap.mmap]] | None = None

    def join(self) -> None:
        if self._given_up.done():
            raise TransferError(self._given_up.result())
        try:
            with regular_file(self._directory, "lock", is_private=True):
                return
        except FileNotFoundError as error:
            raise TransferError(
                f"joining the weight group failed: {self._directory} does not exist; the endpoint and the trainer "
                "must run on one host and share one /dev/shm"
            ) from error

    def begin(self, ref: UpdateRef) -> None:
        super().begin(ref)
        self._mapped = None

    def _received(self, ref: UpdateRef, index: int, size_bytes: int, attempt: Attempt) -> torch.Tensor:
        record = await_record(self._directory, ref, index, size_bytes, attempt)
        try:
            return self._flat(record, attempt)
        except (OSError, ValueError) as error:  # mapping failed
            raise attempt.failed(error) from error

    def abort(self) -> None:
        super().abort()
        self._mapped = None

    def _flat(self, record: BucketRecord, attempt: Attempt) -> torch.Tensor:
        """Return the bytes of a bucket, uint8."""
        size_bytes = record.size_bytes
        if size_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        mapping = self._mapping(record, attempt)
        if len(mapping) < record.offset + size_bytes:
            raise attempt.failed(f"{self._directory / record.arena} is truncated: it has {len(mapping)} bytes")
        return torch.frombuffer(mapping, dtype=torch.uint8)[record.offset : record.offset + size_bytes]

    def _mapping(self, record: BucketRecord, attempt: Attempt) -> mmap.mmap:
        """Return the arena, locked and mapped so that writes here do not reach it. It ends with its last tensor."""
        if self._mapped is not None and self._mapped[0] == record.arena and (mapping := self._mapped[1]()) is not None:
            return mapping
        with regular_file(self._directory, record.arena, is_private=True) as (fd, file_bytes):
            if file_bytes < record.offset + record.size_bytes:
                raise attempt.failed(f"{self._directory / record.arena} is truncated: it has {file_bytes} bytes")
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            mapping = mmap.mmap(fd, file_bytes, access=mmap.ACCESS_COPY)  # it keeps the locked descriptor open
        self._mapped = record.arena, weakref.ref(mapping)
        return mapping


def memory_directory() -> Path:
    """Return the directory whose files are memory of this host, or the next best one."""
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())

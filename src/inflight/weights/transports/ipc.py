"""Weights through a GPU's memory: rank 0 writes buckets into memory of its GPU, and endpoints on that GPU map it.

The bytes are copied on the device only: by the sender into the memory that endpoints map, and by each receiver into
memory of its own. Records of buckets and the handle of the memory lie in a directory that only this user can enter, as
those of `shm`.

The sender writes memory again after an update that every endpoint committed. After any other end the memory is kept
unchanged until every receiver that might still read it has left.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from inflight.contracts import SendsFromDevice, WeightSender
from inflight.errors import TransferError
from inflight.types import WeightBucket
from inflight.weights.packing import pack
from inflight.weights.session import refuse_stray, transfer_failed
from inflight.weights.streams import beside
from inflight.weights.transports.bucket_records import PAGE, BucketRecord, aligned, await_record, write_record
from inflight.weights.transports.device_memory import (
    CudaMemory,
    DeviceMemory,
    MappedMemory,
    MemoryHandle,
    unmappable,
)
from inflight.weights.transports.private_directory import PrivateDirectory
from inflight.weights.transports.readers import Reader, Readers
from inflight.weights.transports.shared_memory import memory_directory
from inflight.weights.transports.store import Attempt, StoredReceiver, give_up, parsed, read_text, regular_file
from inflight.wire import IpcSpec, UpdateRef, WeightUpdate

_MAX_HANDLE_BYTES = 1 << 16
_MOST_UNUSED = 4  # memory this many times larger than the last update is not kept


@dataclass(slots=True)
class _Arena:
    """Memory for the buckets of one update at a time."""

    path: Path
    flat: torch.Tensor
    handle: MemoryHandle
    used_bytes: int = 0
    written_bytes: int = 0
    """What the last update took."""


class IpcSender(WeightSender, SendsFromDevice):
    """Trainer rank 0's end. ``directory`` replaces /dev/shm, ``memory`` that of the current GPU.

    Raises `ConfigError` if torch sees no GPU.
    """

    def __init__(self, directory: Path | None = None, memory: DeviceMemory | None = None) -> None:
        self._parent = directory
        self._memory = memory or CudaMemory()
        self._lock = threading.Lock()
        self._given_up: Future[str] = Future()
        self._home: PrivateDirectory | None = None
        self._arena: _Arena | None = None
        self._num_arenas = 0
        self._retired: list[tuple[_Arena, Readers]] = []
        """Memory that somebody may still read."""
        self._update: WeightUpdate | None = None
        self._records: list[Path] = []

    @property
    def is_collective(self) -> bool:
        return False

    @property
    def sends_from_device(self) -> bool:
        return True

    def specs(self, run_id: str, num_ranks: Sequence[int], timeout_s: float) -> list[IpcSpec]:
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
            spec = IpcSpec(
                run_id=run_id,
                transport="ipc",
                directory=str(self._home.path),
                place=self._memory.place,
                timeout_s=timeout_s,
            )
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
            self._free_retired()
            arena = self._arena
            if arena is not None:
                is_too_large = arena.flat.numel() > _MOST_UNUSED * max(arena.written_bytes, PAGE)
                if arena.flat.numel() < size_bytes or is_too_large:
                    self._free(arena)
                    self._arena = None
            if self._arena is None:
                self._arena = self._new_arena(self._home.path, size_bytes)
            self._arena.used_bytes = 0
            self._update = update

    def _new_arena(self, directory: Path, size_bytes: int) -> _Arena:
        self._num_arenas += 1
        path = directory / f"arena-{self._num_arenas}"
        try:
            flat, handle = self._memory.allocate(size_bytes, path.with_suffix(".bytes"))
            path.write_text(handle.model_dump_json())
        except (OSError, RuntimeError) as error:  # also when the device has no memory left
            raise transfer_failed(error, f"sharing {size_bytes} bytes of {self._memory.device}") from error
        return _Arena(path, flat, handle)

    def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        """On return the bucket can be mapped, and the device has written it."""
        attempt = Attempt(
            f"storing bucket {bucket.index} in memory of {self._memory.device}", timeout_s, self._given_up
        )
        with self._lock:
            attempt.remaining_s()
            arena = self._arena
            if self._home is None or arena is None or self._update is None:
                raise attempt.failed("no update has begun")
            refuse_stray(bucket, self._update.ref)
            size_bytes = sum(tensor.nbytes for tensor in bucket.tensors)
            start, end = arena.used_bytes, arena.used_bytes + size_bytes
            if end > arena.flat.numel():
                raise attempt.failed(f"its {size_bytes} bytes are more than were announced")
            try:
                with beside(self._memory.device, after=bucket.ready):
                    arena.flat[start:end].copy_(pack(bucket.tensors))
                arena.used_bytes = arena.written_bytes = aligned(end)
                record = BucketRecord(
                    ref=self._update.ref, index=bucket.index, arena=arena.path.name, offset=start, size_bytes=size_bytes
                )
                self._records.append(write_record(self._home.path, record))
            except (OSError, RuntimeError) as error:
                raise attempt.failed(error) from error

    def end(self, *, is_done: bool) -> None:
        """The memory is reused if the update is done, and left to its readers if not."""
        with self._lock:
            self._end(is_done)

    def _end(self, is_done: bool) -> None:
        update, self._update = self._update, None
        records, self._records = self._records, []
        for path in records:
            path.unlink(missing_ok=True)
        arena = self._arena
        if update is not None and not is_done and arena is not None and self._home is not None:
            self._arena = None
            self._retired.append((arena, Readers(self._home.path)))
        self._free_retired()

    def abort(self) -> None:
        """Removes the directory. A new group makes another."""
        give_up(self._given_up)
        with self._lock:
            self._end(is_done=False)
            arena, self._arena = self._arena, None
            home, self._home = self._home, None
            if arena is not None:
                self._free(arena)
            if home is not None:
                home.remove()

    def _free_retired(self) -> None:
        kept = []
        for arena, readers in self._retired:
            if readers.are_gone():
                self._free(arena)
            else:
                kept.append((arena, readers))
        self._retired = kept

    def _free(self, arena: _Arena) -> None:
        with contextlib.suppress(OSError):
            arena.path.unlink(missing_ok=True)
            self._memory.release(arena.handle)


class IpcReceiver(StoredReceiver):
    """One endpoint rank's end. Tensors are copies on the GPU, since an endpoint may serve from them."""

    def __init__(self, spec: IpcSpec, memory: MappedMemory | None = None) -> None:
        super().__init__()
        self._spec = spec
        self._memory = memory or CudaMemory()
        self._directory = Path(spec.directory)
        self._lock = threading.Lock()
        self._reader: Reader | None = None
        self._mapped: tuple[str, torch.Tensor] | None = None

    def join(self) -> None:
        """Raises `TransferError` if the sender's GPU is not visible to this process."""
        if (reason := self._memory.why_not(self._spec.place)) is not None:
            raise unmappable(reason)
        try:
            with regular_file(self._directory, "lock", is_private=True):
                pass
            with self._lock:
                if self._given_up.done():
                    raise TransferError(self._given_up.result())
                self._reader = self._reader or Reader(self._directory)
        except FileNotFoundError as error:
            raise unmappable(f"{self._directory} does not exist: endpoint and trainer must share one host") from error
        except OSError as error:
            raise unmappable(f"{self._directory}: {error}") from error

    def begin(self, ref: UpdateRef) -> None:
        """Says to the sender that nothing of earlier updates is read any more."""
        super().begin(ref)
        with self._lock, contextlib.suppress(OSError):  # the sender is gone; there is nothing to receive
            if self._reader is not None:
                self._reader, before = Reader(self._directory), self._reader
                before.leave()

    def _received(self, ref: UpdateRef, index: int, size_bytes: int, attempt: Attempt) -> torch.Tensor:
        record = await_record(self._directory, ref, index, size_bytes, attempt)
        if self._mapped is None or self._mapped[0] != record.arena:
            self._mapped = None
            self._mapped = (record.arena, self._map(record.arena, attempt))
        flat = self._mapped[1]
        if flat.numel() < record.offset + size_bytes:
            raise attempt.failed(f"{record.arena} has {flat.numel()} bytes, too few for offset {record.offset}")
        with beside(flat.device):
            return flat[record.offset : record.offset + size_bytes].clone()

    def _map(self, name: str, attempt: Attempt) -> torch.Tensor:
        try:
            text = read_text(self._directory, name, max_bytes=_MAX_HANDLE_BYTES, is_private=True)
            handle = parsed(MemoryHandle, text, where=self._directory / name)
            return self._memory.mapped(handle, self._spec.place)
        except (OSError, RuntimeError) as error:
            raise attempt.failed(error) from error

    def abort(self) -> None:
        super().abort()
        with self._lock:
            self._mapped = None
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.leave()

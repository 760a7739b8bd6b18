"""Weights through files: rank 0 writes each update into a directory, and endpoints read it immediately or later."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

from inflight.contracts import WeightSender
from inflight.errors import ConfigError, TransferError, transfer_error
from inflight.types import WeightBucket
from inflight.weights.encode.transit import ReusedMemory
from inflight.weights.transports.bucket_files import (
    LATEST,
    LENGTH_BYTES,
    MANIFEST,
    MAX_LATEST_BYTES,
    MAX_MANIFEST_BYTES,
    BucketStore,
    StoredUpdate,
    bucket_name,
    check_header,
    header_length,
    take_lease,
)
from inflight.weights.transports.store import (
    Attempt,
    StoredReceiver,
    abandon,
    bytes_of,
    parse_message,
    read_all,
    read_text,
    regular_file,
    run_name,
    session_name,
)
from inflight.wire import DirectorySpec, HttpFileSpec, UpdateRef, WeightUpdate


class DirectorySender(WeightSender):
    """The sender of trainer rank 0.

    The endpoints can read ``directory``. ``is_durable`` has the same meaning as for `BucketStore`.
    """

    def __init__(self, directory: Path | None, *, is_durable: bool = True) -> None:
        if directory is None:
            raise ConfigError("the file transport needs a directory that the endpoints see; pass one, or use http")
        self.directory = directory.absolute()
        self._store = BucketStore(self.directory, is_durable=is_durable)
        self._abandoned: Future[str] = Future()
        self._is_open = False

    @property
    def is_collective(self) -> bool:
        return False

    def specs(self, run_id: str, num_ranks: Sequence[int], timeout_s: float) -> list[DirectorySpec]:
        """Return one spec per endpoint. Raises `TransferError` if the directory cannot be created."""
        self.abort()
        try:
            (self.directory / run_name(run_id)).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise transfer_error(error, f"making a directory below {self.directory}") from error
        self._abandoned, self._is_open = Future(), True
        spec = DirectorySpec(run_id=run_id, transport="file", directory=str(self.directory), timeout_s=timeout_s)
        return [spec] * len(num_ranks)

    def join(self) -> None:
        """Return without waiting for endpoints."""
        if not self._is_open:
            raise TransferError("no weight group is open")

    def begin(self, update: WeightUpdate) -> None:
        self.join()
        self._store.begin(update)

    def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        """Write a bucket. On return, its file is complete, and survives a power loss if the sender is durable."""
        what = f"storing bucket {bucket.index} in {self.directory}"
        attempt = Attempt(what, timeout_s, self._abandoned)
        attempt.run(lambda: self._store.write(bucket, attempt))

    def end(self, *, is_done: bool) -> None:
        self._store.end(is_done=is_done)

    def abort(self) -> None:
        """End the group. Complete updates stay; an update that is being written is removed."""
        abandon(self._abandoned)
        self._is_open = False
        self._store.drop()


class BucketFileReceiver(StoredReceiver):
    """Base of the receivers of stored files. Followers of a run call `latest`, `lease` and `read_manifest`.

    Tensors arrive in host memory, which is pinned if ``device`` is a GPU.
    """

    def __init__(self, spec: DirectorySpec | HttpFileSpec, device: torch.device | None = None) -> None:
        super().__init__()
        self._run_id = spec.run_id
        self._join_s = spec.timeout_s
        self._memory = ReusedMemory(device)

    def begin(self, ref: UpdateRef) -> None:
        super().begin(ref)
        self._memory.begin()

    def _receive_bytes(self, ref: UpdateRef, index: int, size_bytes: int, attempt: Attempt) -> torch.Tensor:
        flat = self._memory.take(size_bytes)
        attempt.run(lambda: self._fill((*_place(ref), bucket_name(index)), ref, index, flat, attempt))
        return flat

    def latest(self, timeout_s: float, what: str = "asking for the latest version") -> UpdateRef | None:
        """Return the run's newest completely stored update, or None if there is none. Raises `TransferError`."""
        names = (run_name(self._run_id), LATEST)
        attempt = Attempt(what, timeout_s, self._abandoned)
        text = attempt.run(lambda: self._read(names, MAX_LATEST_BYTES, attempt))
        if text is None:
            return None
        ref = parse_message(UpdateRef, text, where=self._describe_file(names))
        if ref.run_id != self._run_id:
            raise attempt.failed(f"{self._describe_file(names)} belongs to run {ref.run_id!r}, not to {self._run_id!r}")
        return ref

    def read_manifest(self, ref: UpdateRef, timeout_s: float) -> StoredUpdate:
        """Return the manifest of a stored update.

        Raises `TransferError` if the update was never complete or was removed.

        A receiver that began with the same ``ref`` can then receive the update's buckets in order.
        """
        names = (*_place(ref), MANIFEST)
        where = self._describe_file(names)
        attempt = Attempt(f"reading the manifest of version {ref.version}", timeout_s, self._abandoned)
        text = attempt.run(lambda: self._read(names, MAX_MANIFEST_BYTES, attempt))
        if text is None:
            raise attempt.failed(f"{where} does not exist: the update is incomplete, or has been removed")
        stored = parse_message(StoredUpdate, text, where=where)
        if stored.update.ref != ref:
            raise attempt.failed(f"{where} belongs to another update: {stored.update.ref}")
        return stored

    def lease(self, ref: UpdateRef, name: str, timeout_s: float) -> None:
        """Keep a stored update for longer (see `take_lease`). Raises `TransferError` if it was removed."""
        place = _place(ref)
        attempt = Attempt(f"taking a lease on version {ref.version}", timeout_s, self._abandoned)
        if not attempt.run(lambda: self._renew_lease(place, name, attempt)):
            raise attempt.failed(f"{self._describe_file(place)} has been removed, or is incomplete")

    @abstractmethod
    def _describe_file(self, names: Sequence[str]) -> str:
        """Return the location of a file, for use in errors."""

    @abstractmethod
    def _read(self, names: Sequence[str], max_bytes: int, attempt: Attempt) -> bytes | None:
        """Return the contents of a file, or None if it does not exist.

        Raises `TransferError` if the file is longer than allowed.
        """

    @abstractmethod
    def _renew_lease(self, place: tuple[str, str], name: str, attempt: Attempt) -> bool:
        """Take a lease on the update that ``place`` (run and session) names, and return whether the update exists."""

    @abstractmethod
    def _fill(self, names: Sequence[str], ref: UpdateRef, index: int, flat: torch.Tensor, attempt: Attempt) -> None:
        """Fill ``flat`` with the bytes of a bucket, once its file exists."""


class DirectoryReceiver(BucketFileReceiver):
    """The receiver of one endpoint rank."""

    def __init__(self, spec: DirectorySpec, device: torch.device | None = None) -> None:
        super().__init__(spec, device)
        self._directory = Path(spec.directory)

    def join(self) -> None:
        run = self._directory / run_name(self._run_id)
        attempt = Attempt("joining the weight group", self._join_s, self._abandoned)
        attempt.reason = f"{run} does not exist"

        def wait() -> None:
            while not run.is_dir():
                attempt.pause()

        attempt.run(wait)

    def _describe_file(self, names: Sequence[str]) -> str:
        return str(self._directory.joinpath(*names))

    def _read(self, names: Sequence[str], max_bytes: int, attempt: Attempt) -> bytes | None:
        try:
            return read_text(self._directory, *names, max_bytes=max_bytes)
        except FileNotFoundError:
            return None

    def _renew_lease(self, place: tuple[str, str], name: str, attempt: Attempt) -> bool:
        try:
            take_lease(self._directory, *place, name)
        except FileNotFoundError:
            return False
        return True

    def _fill(self, names: Sequence[str], ref: UpdateRef, index: int, flat: torch.Tensor, attempt: Attempt) -> None:
        attempt.reason = f"{self._describe_file(names)} does not exist"
        while True:
            try:
                with regular_file(self._directory, *names) as (fd, file_bytes):
                    length = header_length(os.pread(fd, LENGTH_BYTES, 0), file_bytes, flat.numel())
                    check_header(os.pread(fd, length, LENGTH_BYTES), ref, index, flat.numel())
                    read_all(fd, bytes_of(flat), attempt, LENGTH_BYTES + length)
                    return
            except FileNotFoundError:
                attempt.pause()
            except ValueError as error:
                raise attempt.failed(f"{self._describe_file(names)} cannot be used: {error}") from error


def _place(ref: UpdateRef) -> tuple[str, str]:
    return run_name(ref.run_id), session_name(ref)

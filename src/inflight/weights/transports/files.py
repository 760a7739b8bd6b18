"""Weights through files: rank 0 writes each update into a directory, and endpoints read it, now or when they come.

`latest`, `lease` and `read_manifest` are for an endpoint that follows the directory without having been asked to.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

from inflight.contracts import WeightSender
from inflight.errors import ConfigError, TransferError
from inflight.types import WeightBucket
from inflight.weights.session import transfer_failed
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
    LentBuffers,
    StoredReceiver,
    bytes_of,
    give_up,
    parsed,
    read_all,
    read_text,
    regular_file,
    run_name,
    session_name,
)
from inflight.wire import DirectorySpec, UpdateRef, WeightUpdate


class FileSender(WeightSender):
    """Trainer rank 0's end. ``directory`` is on a file system that the endpoints see."""

    def __init__(self, directory: Path | None) -> None:
        if directory is None:
            raise ConfigError("the file transport needs a directory that the endpoints see; give it one, or use http")
        self._directory = directory.absolute()
        self._store = BucketStore(self._directory, is_durable=True)
        self._given_up: Future[str] = Future()
        self._is_open = False

    @property
    def is_collective(self) -> bool:
        return False

    def specs(self, run_id: str, num_ranks: Sequence[int], timeout_s: float) -> list[DirectorySpec]:
        """Raises `TransferError` if the directory cannot be made."""
        self.abort()
        try:
            (self._directory / run_name(run_id)).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise transfer_failed(error, f"making a directory below {self._directory}") from error
        self._given_up, self._is_open = Future(), True
        spec = DirectorySpec(run_id=run_id, backend="file", directory=str(self._directory), timeout_s=timeout_s)
        return [spec] * len(num_ranks)

    def join(self) -> None:
        """Nobody is waited for."""
        if not self._is_open:
            raise TransferError("no weight group is open")

    def begin(self, update: WeightUpdate) -> None:
        self.join()
        self._store.begin(update)

    def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        """A return means that the bucket's file is there, and stays if power is lost."""
        what = f"storing bucket {bucket.index} in {self._directory}"
        attempt = Attempt(what, timeout_s, self._given_up)
        attempt.run(lambda: self._store.write(bucket, attempt))

    def end(self, *, is_done: bool) -> None:
        self._store.end(is_done=is_done)

    def abort(self) -> None:
        """Complete updates stay, one that is being written goes."""
        give_up(self._given_up)
        self._is_open = False
        self._store.drop()


class FileReceiver(StoredReceiver):
    """One endpoint rank's end."""

    def __init__(self, spec: DirectorySpec) -> None:
        super().__init__()
        self._spec = spec
        self._directory = Path(spec.directory)
        self._buffers = LentBuffers()

    def join(self) -> None:
        run = self._directory / run_name(self._spec.run_id)
        attempt = Attempt("joining the weight group", self._spec.timeout_s, self._given_up)
        attempt.reason = f"{run} is not there"

        def wait() -> None:
            while not run.is_dir():
                attempt.pause()

        attempt.run(wait)

    def begin(self, ref: UpdateRef) -> None:
        super().begin(ref)
        self._buffers.take_back()

    def _received(self, ref: UpdateRef, index: int, size_bytes: int, attempt: Attempt) -> torch.Tensor:
        flat = self._buffers.take(size_bytes)
        attempt.run(lambda: _read_bucket(self._directory, ref, index, flat, attempt))
        self._buffers.lend(flat)
        return flat


def latest(directory: Path, run_id: str) -> UpdateRef | None:
    """Return the newest update of a run that is stored whole; None if there is none. Raises `TransferError`."""
    name = run_name(run_id)
    path = directory / name / LATEST
    try:
        text = read_text(directory, name, LATEST, max_bytes=MAX_LATEST_BYTES)
    except FileNotFoundError:
        return None
    ref = parsed(UpdateRef, text, where=path)
    if ref.run_id != run_id:
        raise TransferError(f"{path} is of run {ref.run_id!r}, not of {run_id!r}")
    return ref


def read_manifest(directory: Path, ref: UpdateRef) -> StoredUpdate:
    """Return what is stored of an update. Raises `TransferError`: if it is not there, it was never complete or is old.

    Its buckets are received in order by a receiver that began with the same ``ref``.
    """
    parts = (run_name(ref.run_id), session_name(ref), MANIFEST)
    path = directory.joinpath(*parts)
    try:
        text = read_text(directory, *parts, max_bytes=MAX_MANIFEST_BYTES)
    except FileNotFoundError as error:
        raise TransferError(f"{path} is not there: the update is not complete, or was removed since") from error
    stored = parsed(StoredUpdate, text, where=path)
    if stored.update.ref != ref:
        raise TransferError(f"{path} is of another update: {stored.update.ref}")
    return stored


def lease(directory: Path, ref: UpdateRef, name: str) -> None:
    """Have a stored update stay a little longer, see `take_lease`. Raises `TransferError` if it is not there."""
    run, update = run_name(ref.run_id), session_name(ref)
    try:
        take_lease(directory, run, update, name)
    except FileNotFoundError as error:
        raise TransferError(f"{directory / run / update} was removed, or is not complete") from error


def _read_bucket(directory: Path, ref: UpdateRef, index: int, flat: torch.Tensor, attempt: Attempt) -> None:
    """Fill ``flat`` with the bytes of a bucket, once it is there."""
    parts = (run_name(ref.run_id), session_name(ref), bucket_name(index))
    path = directory.joinpath(*parts)
    attempt.reason = f"{path} is not there"
    while True:
        try:
            with regular_file(directory, *parts) as (fd, file_bytes):
                length = header_length(os.pread(fd, LENGTH_BYTES, 0), file_bytes, flat.numel())
                check_header(os.pread(fd, length, LENGTH_BYTES), ref, index, flat.numel())
                read_all(fd, bytes_of(flat), attempt, LENGTH_BYTES + length)
                return
        except FileNotFoundError:
            attempt.pause()
        except ValueError as error:
            raise attempt.failed(f"{path} cannot be used: {error}") from error

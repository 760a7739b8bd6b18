"""Weights over HTTP: rank 0 stores each update in files and serves them, and endpoints fetch them in ranges.

An endpoint may come later, at its own speed, and after a cut connection it goes on where it was.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

from inflight.contracts import WeightSender
from inflight.errors import TransferError
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
)
from inflight.weights.transports.file_server import FileServer
from inflight.weights.transports.private_directory import PrivateDirectory
from inflight.weights.transports.ranges import NotThereError, RangeClient
from inflight.weights.transports.store import (
    Attempt,
    LentBuffers,
    StoredReceiver,
    bytes_of,
    give_up,
    parsed,
    run_name,
    session_name,
)
from inflight.wire import PullSpec, UpdateRef, WeightUpdate

_OPENING_BYTES = 1 << 16


class PullSender(WeightSender):
    """Trainer rank 0's end. ``address`` is what endpoints connect to.

    Files lie in ``directory`` and stay there, or in a directory of this process, which goes with it.
    """

    def __init__(self, directory: Path | None, address: str = "127.0.0.1") -> None:
        self._directory = directory
        self._address = address
        self._given_up: Future[str] = Future()
        self._home: PrivateDirectory | None = None
        self._store: BucketStore | None = None
        self._server: FileServer | None = None

    @property
    def is_collective(self) -> bool:
        return False

    def specs(self, run_id: str, num_ranks: Sequence[int], timeout_s: float) -> list[PullSpec]:
        """The server goes on from one group to the next, until `abort`."""
        give_up(self._given_up)
        self._given_up = Future()
        if self._store is not None:
            self._store.drop()
        else:
            self._store = self._made_store(run_id)
        if self._server is None:
            try:
                self._server = FileServer(self._store.directory, self._address)
            except TransferError:
                self.abort()
                raise
        spec = PullSpec(
            run_id=run_id, backend="http", url=self._server.url, token=self._server.token, timeout_s=timeout_s
        )
        return [spec] * len(num_ranks)

    def _made_store(self, run_id: str) -> BucketStore:
        parent = self._directory or Path(tempfile.gettempdir())
        try:
            if self._directory is None:
                self._home = PrivateDirectory(parent)
                return BucketStore(self._home.path, is_durable=False, num_kept=1)
            (parent / run_name(run_id)).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise transfer_failed(error, f"making a directory below {parent}") from error
        return BucketStore(parent.absolute(), is_durable=True)

    def join(self) -> None:
        """Nobody is waited for."""
        if self._server is None:
            raise TransferError("no weight group is open")

    def begin(self, update: WeightUpdate) -> None:
        self._opened().begin(update)

    def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        """A return means that the bucket can be fetched."""
        store = self._opened()
        what = f"storing bucket {bucket.index} in {store.directory}"
        attempt = Attempt(what, timeout_s, self._given_up)
        attempt.run(lambda: store.write(bucket, attempt))

    def end(self, *, is_done: bool) -> None:
        if self._store is not None:
            self._store.end(is_done=is_done)

    def abort(self) -> None:
        """The server stops; a new group starts another, with another token."""
        give_up(self._given_up)
        server, self._server = self._server, None
        store, self._store = self._store, None
        home, self._home = self._home, None
        if server is not None:
            server.stop()
        if store is not None:
            store.drop()
        if home is not None:
            home.remove()

    def _opened(self) -> BucketStore:
        if self._store is None:
            raise TransferError("no weight group is open")
        return self._store


class PullReceiver(StoredReceiver):
    """One endpoint rank's end. `latest`, `lease` and `read_manifest` are for followers."""

    def __init__(self, spec: PullSpec) -> None:
        super().__init__()
        self._spec = spec
        self._client = RangeClient(spec.url, spec.token)
        self._buffers = LentBuffers()

    def join(self) -> None:
        """Raises `TransferError` at once if the token is refused."""
        self._latest("joining the weight group", self._spec.timeout_s)

    def begin(self, ref: UpdateRef) -> None:
        super().begin(ref)
        self._buffers.take_back()

    def _received(self, ref: UpdateRef, index: int, size_bytes: int, attempt: Attempt) -> torch.Tensor:
        flat = self._buffers.take(size_bytes)
        attempt.run(lambda: _fetch_bucket(self._client, ref, index, flat, attempt))
        self._buffers.lend(flat)
        return flat

    def latest(self, timeout_s: float) -> UpdateRef | None:
        """Return the newest update of the run that is stored whole; None if there is none. Raises `TransferError`."""
        return self._latest("asking for the latest version", timeout_s)

    def lease(self, ref: UpdateRef, name: str, timeout_s: float) -> None:
        """Have a stored update stay a little longer. Raises `TransferError` if it is not there any more."""
        names = (run_name(ref.run_id), session_name(ref), name)
        attempt = Attempt(f"taking a lease on version {ref.version}", timeout_s, self._given_up)
        if self._read(names, MAX_LATEST_BYTES, attempt) is None:
            raise attempt.failed(f"{self._client.where(names[:2])} was removed, or is not complete")

    def read_manifest(self, ref: UpdateRef, timeout_s: float) -> StoredUpdate:
        """Return what is stored of an update. Raises `TransferError`, also if it is not there any more."""
        names = (run_name(ref.run_id), session_name(ref), MANIFEST)
        where = self._client.where(names)
        attempt = Attempt(f"reading the manifest of version {ref.version}", timeout_s, self._given_up)
        text = self._read(names, MAX_MANIFEST_BYTES, attempt)
        if text is None:
            raise attempt.failed(f"{where} is not there: the update is not complete, or was removed since")
        stored = parsed(StoredUpdate, text, where=where)
        if stored.update.ref != ref:
            raise attempt.failed(f"{where} is of another update: {stored.update.ref}")
        return stored

    def abort(self) -> None:
        super().abort()
        self._client.close()

    def _latest(self, what: str, timeout_s: float) -> UpdateRef | None:
        names = (run_name(self._spec.run_id), LATEST)
        attempt = Attempt(what, timeout_s, self._given_up)
        text = self._read(names, MAX_LATEST_BYTES, attempt)
        if text is None:
            return None
        ref = parsed(UpdateRef, text, where=self._client.where(names))
        if ref.run_id != self._spec.run_id:
            raise attempt.failed(f"{self._client.where(names)} is of run {ref.run_id!r}")
        return ref

    def _read(self, names: Sequence[str], max_bytes: int, attempt: Attempt) -> bytes | None:
        """Return a whole file, None if there is none. Raises `TransferError` if it is longer than allowed."""

        def call() -> bytes | None:
            try:
                opening = self._client.opening(names, max_bytes, attempt)
            except NotThereError:
                return None
            if opening.file_bytes > max_bytes:
                raise attempt.failed(f"{self._client.where(names)} has {opening.file_bytes} bytes, more than allowed")
            return opening.first_bytes

        return attempt.run(call)


def _fetch_bucket(client: RangeClient, ref: UpdateRef, index: int, flat: torch.Tensor, attempt: Attempt) -> None:
    """Fill ``flat`` with the bytes of a bucket, once it is there."""
    names = (run_name(ref.run_id), session_name(ref), bucket_name(index))
    where = client.where(names)
    while True:
        try:
            opening = client.opening(names, _OPENING_BYTES, attempt)
            length = header_length(opening.first_bytes, opening.file_bytes, flat.numel())
            start = LENGTH_BYTES + length
            if start > len(opening.first_bytes):
                opening = client.opening(names, start, attempt)
            check_header(opening.first_bytes[LENGTH_BYTES:start], ref, index, flat.numel())
        except NotThereError:
            attempt.reason = f"{where} is not there"
            attempt.pause(0.02)
        except ValueError as error:
            raise attempt.failed(f"{where} cannot be used: {error}") from error
        else:
            break
    target = bytes_of(flat)
    known = opening.first_bytes[start:]
    target[: len(known)] = known
    client.fill(names, start + len(known), target[len(known) :], opening.tag, attempt)

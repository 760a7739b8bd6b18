"""Weights over HTTP: rank 0 stores each update in files and serves them, and endpoints fetch them in byte ranges.

An endpoint may start later and read at its own speed. After a broken connection, it resumes where it stopped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from inflight.contracts import WeightSender
from inflight.errors import TransferError, transfer_error
from inflight.types import WeightBucket
from inflight.weights.transports.bucket_files import LENGTH_BYTES, MAX_LATEST_BYTES, check_header, header_length
from inflight.weights.transports.file_server import FileServer
from inflight.weights.transports.files import BucketFileReceiver, DirectorySender
from inflight.weights.transports.private_directory import PrivateDirectory
from inflight.weights.transports.ranges import NotThereError, RangeClient
from inflight.weights.transports.store import Attempt, bytes_of
from inflight.wire import HttpFileSpec, UpdateRef, WeightUpdate

_OPENING_BYTES = 1 << 16


class HttpFileSender(WeightSender):
    """The sender of trainer rank 0. Endpoints connect to ``address``.

    Files are written to ``directory`` and stay there. If it is None, they are in a temporary directory, which `abort`
    removes.
    """

    def __init__(self, directory: Path | None, address: str = "127.0.0.1") -> None:
        self._directory = directory
        self._address = address
        self._home: PrivateDirectory | None = None
        self._files: DirectorySender | None = None
        self._server: FileServer | None = None

    @property
    def is_collective(self) -> bool:
        return False

    def specs(self, run_id: str, num_ranks: Sequence[int], timeout_s: float) -> list[HttpFileSpec]:
        """Return one spec per endpoint. The server keeps running from one group to the next, until `abort`."""
        try:
            files = self._files = self._files or self._stored_in()
            files.specs(run_id, num_ranks, timeout_s)
            server = self._server = self._server or FileServer(files.directory, self._address)
        except TransferError:
            self.abort()
            raise
        spec = HttpFileSpec(run_id=run_id, transport="http", url=server.url, token=server.token, timeout_s=timeout_s)
        return [spec] * len(num_ranks)

    def _stored_in(self) -> DirectorySender:
        if self._directory is not None:
            return DirectorySender(self._directory)
        parent = Path(tempfile.gettempdir())
        try:
            self._home = PrivateDirectory(parent)
        except OSError as error:
            raise transfer_error(error, f"making a directory below {parent}") from error
        return DirectorySender(self._home.path, is_durable=False)

    def join(self) -> None:
        """Return without waiting for endpoints."""
        self._opened().join()

    def begin(self, update: WeightUpdate) -> None:
        self._opened().begin(update)

    def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        """Store a bucket. On return, it can be fetched."""
        self._opened().send(bucket, timeout_s)

    def end(self, *, is_done: bool) -> None:
        if self._files is not None:
            self._files.end(is_done=is_done)

    def abort(self) -> None:
        """Stop the server. A new group starts another one with a new token."""
        files, self._files = self._files, None
        server, self._server = self._server, None
        home, self._home = self._home, None
        if files is not None:
            files.abort()
        if server is not None:
            server.stop()
        if home is not None:
            home.remove()

    def _opened(self) -> DirectorySender:
        if self._files is None:
            raise TransferError("no weight group is open")
        return self._files


class HttpFileReceiver(BucketFileReceiver):
    """The receiver of one endpoint rank."""

    def __init__(self, spec: HttpFileSpec, device: torch.device | None = None) -> None:
        super().__init__(spec, device)
        self._client = RangeClient(spec.url, spec.token)

    def join(self) -> None:
        """Raise `TransferError` immediately if the server refuses the token."""
        self.latest(self._join_s, "joining the weight group")

    def abort(self) -> None:
        super().abort()
        self._client.close()

    def _describe_file(self, names: Sequence[str]) -> str:
        return self._client.where(names)

    def _read(self, names: Sequence[str], max_bytes: int, attempt: Attempt) -> bytes | None:
        try:
            opening = self._client.read_opening(names, max_bytes, attempt)
        except NotThereError:
            return None
        if opening.file_bytes > max_bytes:
            raise attempt.failed(
                f"{self._describe_file(names)} has {opening.file_bytes} bytes; at most {max_bytes} are allowed"
            )
        return opening.first_bytes

    def _renew_lease(self, place: tuple[str, str], name: str, attempt: Attempt) -> bool:
        return self._read((*place, name), MAX_LATEST_BYTES, attempt) is not None  # fetching a lease renews it

    def _fill(self, names: Sequence[str], ref: UpdateRef, index: int, flat: torch.Tensor, attempt: Attempt) -> None:
        where = self._describe_file(names)
        while True:
            try:
                opening = self._client.read_opening(names, _OPENING_BYTES, attempt)
                length = header_length(opening.first_bytes, opening.file_bytes, flat.numel())
                start = LENGTH_BYTES + length
                if start > len(opening.first_bytes):
                    opening = self._client.read_opening(names, start, attempt)
                check_header(opening.first_bytes[LENGTH_BYTES:start], ref, index, flat.numel())
            except NotThereError:
                attempt.reason = f"{where} does not exist"
                attempt.pause(0.02)
            except ValueError as error:
                raise attempt.failed(f"{where} cannot be used: {error}") from error
            else:
                break
        target = bytes_of(flat)
        known = opening.first_bytes[start:]
        target[: len(known)] = known
        self._client.fill(names, start + len(known), target[len(known) :], opening.tag, attempt)

"""Code shared by transports that store buckets: file names, safe opening of files, and deadlines."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import torch
from pydantic import ValidationError

from inflight.base.threads import run_unless_abandoned
from inflight.base.validation import describe_problems
from inflight.contracts import WeightReceiver
from inflight.errors import TransferError
from inflight.weights.encode.bucket_bytes import unpack
from inflight.wire import TensorSpec, UpdateRef, WireModel

GRACE_S = 0.5
"""How long, in seconds, to wait beyond the deadline for a call that checks the deadline itself: its own error is more
specific than a timeout.
"""

PIECE_BYTES = 16 << 20
"""Number of bytes moved between two checks of the deadline."""

_NOT_DONE = "not done"
_POLL_S = 0.003
_LONGEST_NAME = 200  # file systems allow 255 bytes, and temporary names are longer
ABANDONED = "the weight group was abandoned"

T = TypeVar("T")
M = TypeVar("M", bound=WireModel)


def run_name(run_id: str) -> str:
    """Return the directory name of a run: its percent-encoded id; if that is too long, a digest replaces the excess."""
    name = quote(run_id, safe="")
    name = f"%2E{name[1:]}" if name.startswith(".") else name
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:100]}~{hashlib.sha256(run_id.encode()).hexdigest()}"


def session_name(ref: UpdateRef) -> str:
    """Return the name of an update within its run: ``VERSION-SESSION``, or ``VERSION`` if the session has no name."""
    return f"{ref.version}-{ref.session_id}" if ref.session_id else f"{ref.version}"


class Attempt:
    """One blocking call, with its description and deadline, and whether its group has been abandoned.

    The error for a call that does not finish in time contains ``reason``.
    """

    def __init__(self, what: str, timeout_s: float, abandoned: Future[str]) -> None:
        self.what = what
        self.reason = _NOT_DONE
        self._timeout_s = timeout_s
        self._abandoned = abandoned
        self._deadline = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Return the seconds left. Raises `TransferError` if none are left or if the group was abandoned."""
        if self._abandoned.done():
            raise TransferError(self._abandoned.result())
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise self.failed(f"{self.reason} after {self._timeout_s:g} s")
        return remaining_s

    def note(self, error: Exception, reason: str) -> None:
        """Use ``reason`` as the error's text, unless the deadline caused ``error`` and an earlier reason is known."""
        is_cut_short = isinstance(error, TimeoutError) and time.monotonic() >= self._deadline
        if self.reason == _NOT_DONE or not is_cut_short:
            self.reason = reason

    def pause(self, pause_s: float = _POLL_S) -> None:
        """Wait for ``pause_s`` seconds, but no longer than the remaining time.

        Raises the same errors as `remaining_s`.
        """
        with contextlib.suppress(TimeoutError):
            self._abandoned.result(min(pause_s, self.remaining_s()))
        self.remaining_s()

    def failed(self, reason: object) -> TransferError:
        return TransferError(f"{self.what} failed: {reason}")

    def run(self, call: Callable[[], T]) -> T:
        """Return what ``call`` returns. Abandon the call if a file system or a server blocks it for too long."""

        def translated() -> T:
            try:
                return call()
            except OSError as error:
                raise self.failed(error) from error

        return run_unless_abandoned(self._abandoned, translated, self.what, self.remaining_s() + GRACE_S)


def abandon(abandoned: Future[str]) -> None:
    """End every call that is waiting for a group. Idempotent."""
    with contextlib.suppress(InvalidStateError):
        abandoned.set_result(ABANDONED)


@contextlib.contextmanager
def regular_file(directory: Path, *parts: str, is_private: bool = False) -> Iterator[tuple[int, int]]:
    """Open a file below ``directory`` for reading. Yield its descriptor and its size in bytes.

    Does not follow symbolic links below ``directory``, and accepts only regular files. A private file must be owned by
    this user (or root) and must not be accessible to others. Raises `FileNotFoundError` or `TransferError`.
    """
    path = directory.joinpath(*parts)
    with contextlib.ExitStack() as stack:

        def enter(name: str | Path, flags: int, above: int | None) -> int:
            try:
                fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=above)
            except FileNotFoundError:
                raise
            except OSError as error:  # also for a symbolic link
                raise TransferError(f"{path} cannot be opened: {error.strerror} ({name})") from error
            stack.callback(os.close, fd)
            return fd

        fd = enter(directory, os.O_DIRECTORY | (os.O_NOFOLLOW if is_private else 0), None)
        if is_private and (_is_foreign(fd) or os.fstat(fd).st_mode & 0o077):
            raise TransferError(f"{directory} is not private to this user")
        for part in parts[:-1]:
            fd = enter(part, os.O_DIRECTORY | os.O_NOFOLLOW, fd)
        fd = enter(parts[-1], os.O_NOFOLLOW | os.O_NONBLOCK, fd)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise TransferError(f"{path} is not a regular file")
        if is_private and _is_foreign(fd):
            raise TransferError(f"{path} belongs to user {status.st_uid}, not to this one")
        yield fd, status.st_size


def _is_foreign(fd: int) -> bool:
    return os.fstat(fd).st_uid not in (os.geteuid(), 0)


def read_text(directory: Path, *parts: str, max_bytes: int, is_private: bool = False) -> bytes:
    """Return the contents of a file. Raises `FileNotFoundError`, or `TransferError` if it is longer than allowed."""
    with regular_file(directory, *parts, is_private=is_private) as (fd, size_bytes):
        if size_bytes > max_bytes:
            raise TransferError(f"{directory.joinpath(*parts)} has {size_bytes} bytes; at most {max_bytes} are read")
        with open(fd, "rb", closefd=False) as file:
            return file.read(max_bytes)


def parse_message(model: type[M], text: bytes, where: object) -> M:
    """Return a stored message. Raises `TransferError`, which states ``where`` it is stored and what is wrong."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise TransferError(f"{where} cannot be used: {describe_problems(error)}") from error


def write_all(fd: int, data: memoryview, attempt: Attempt, offset: int = 0) -> None:
    """Write ``data`` to a file, starting at ``offset``, and check the deadline periodically."""
    written = 0
    while written < len(data):
        attempt.remaining_s()
        written += os.pwrite(fd, data[written : written + PIECE_BYTES], offset + written)


def read_all(fd: int, data: memoryview, attempt: Attempt, offset: int = 0) -> None:
    """Fill ``data`` with the bytes of a file, starting at ``offset``. Raises `TransferError` if the file ends early."""
    done = 0
    while done < len(data):
        attempt.remaining_s()
        num_read = os.preadv(fd, [data[done : done + PIECE_BYTES]], offset + done)
        if num_read == 0:
            raise attempt.failed(f"the file ends at byte {offset + done}, {len(data) - done} bytes too early")
        done += num_read


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a uint8 tensor on the CPU."""
    return flat.numpy().data


class StoredReceiver(WeightReceiver):
    """The base class of receivers of stored buckets, which tracks the next bucket, its deadline, and abandonment."""

    def __init__(self) -> None:
        self._abandoned: Future[str] = Future()
        self._ref: UpdateRef | None = None
        self._num_received = 0

    def begin(self, ref: UpdateRef) -> None:
        self._ref, self._num_received = ref, 0

    def receive(self, specs: Sequence[TensorSpec], timeout_s: float) -> list[torch.Tensor]:
        index, ref = self._num_received, self._ref
        if ref is None:
            raise TransferError("receiving a bucket failed: no update has begun")
        attempt = Attempt(f"receiving bucket {index} of version {ref.version}", timeout_s, self._abandoned)
        data = self._receive_bytes(ref, index, sum(spec.size_bytes for spec in specs), attempt)
        self._num_received = index + 1
        return unpack(data, specs)

    def abort(self) -> None:
        abandon(self._abandoned)

    @abstractmethod
    def _receive_bytes(self, ref: UpdateRef, index: int, size_bytes: int, attempt: Attempt) -> torch.Tensor:
        """Return the bytes of a bucket, uint8 [size_bytes], once it is stored. Raises `TransferError`."""

"""Updates as files: what each file contains, how it is written, and how readers verify it.

    DIRECTORY/RUN/latest.json                  the `UpdateRef` of the newest complete update
    DIRECTORY/RUN/VERSION-SESSION/00000.safetensors ...
    DIRECTORY/RUN/VERSION-SESSION/manifest.json    a `StoredUpdate`, written once all buckets are stored
    DIRECTORY/RUN/VERSION-SESSION/lease-NAME       a reader's lease: keeps the update while younger than `LEASE_S`

A ``raw`` bucket holds the tensors of the manifest under their names; an encoded bucket holds its bytes as one tensor,
``payload``. Every file is written atomically.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from inflight.errors import transfer_error
from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import checksum, pack, to_host
from inflight.weights.encode.buckets import refuse_stray
from inflight.weights.transports.store import Attempt, bytes_of, run_name, session_name, write_all
from inflight.wire import Encoding, TensorSpec, UpdateRef, WeightUpdate, WireModel

MANIFEST = "manifest.json"
LATEST = "latest.json"
MAX_MANIFEST_BYTES = 128 << 20
MAX_LATEST_BYTES = 4096
LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, little-endian."""

LEASE_S = 15.0
"""Seconds for which a lease keeps an update after its reader last renewed it."""
LEASE_NAME = re.compile(r"lease-[0-9a-f]{16}")

_MAX_LEASED = 4
"""Maximum number of updates that leases keep in addition to the newest ones. Those with the most recently renewed
leases are kept.
"""
_MAX_HEADER_BYTES = 64 << 20
_ALIGNMENT = 64
_SUFFIX = ".safetensors"
_CODES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "uint8": "U8"}
SESSION_NAME = re.compile(r"[0-9]{1,20}(-[A-Za-z0-9._-]{1,64})?")
_SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "U8": 1}


class StoredBucket(WireModel):
    """One bucket in a file. ``size_bytes`` and ``checksum`` (XXH3-128) refer to its tensors, without the header."""

    file: str = Field(pattern=r"^[0-9]{5,9}\.safetensors$")
    size_bytes: int = Field(ge=0)
    checksum: str = Field(pattern=r"^[0-9a-f]{32}$")
    encoding: Encoding


class StoredUpdate(WireModel):
    """A completely stored update: its announcement, and the file of each of its buckets, in order."""

    update: WeightUpdate
    buckets: tuple[StoredBucket, ...]

    @model_validator(mode="after")
    def _buckets_are_those_announced(self) -> StoredUpdate:
        if [bucket.file for bucket in self.buckets] != [bucket_name(bucket.index) for bucket in self.update.buckets]:
            raise ValueError(f"the listed files are not those of the {len(self.update.buckets)} announced buckets")
        for stored, announced in zip(self.buckets, self.update.buckets, strict=True):
            is_raw = stored.encoding == "raw"
            if stored.size_bytes > announced.size_bytes or (is_raw and stored.size_bytes != announced.size_bytes):
                raise ValueError(
                    f"bucket {announced.index} has {announced.size_bytes} bytes, but is stored as "
                    f"{stored.size_bytes} bytes of {stored.encoding}"
                )
        return self


def bucket_name(index: int) -> str:
    """Return the file name of a bucket."""
    return f"{index:05d}{_SUFFIX}"


# ---------------------------------------------------------------------------------------------------------------
# The header of a bucket's file


def safetensors_header(specs: Sequence[TensorSpec], ref: UpdateRef, index: int) -> bytes:
    """Return the header that precedes the packed bytes of a bucket, padded so that the bytes are aligned."""
    fields: dict[str, Any] = {"__metadata__": _identity(ref, index)}
    offset = 0
    for spec in specs:
        end = offset + spec.size_bytes
        fields[spec.name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_length(first_bytes: bytes, file_bytes: int, size_bytes: int) -> int:
    """Return the length of a file's header. Raises ``ValueError`` unless ``size_bytes`` of data follow it."""
    length = int.from_bytes(first_bytes[:LENGTH_BYTES], "little")
    if len(first_bytes) < LENGTH_BYTES or length > _MAX_HEADER_BYTES:
        raise ValueError("it is not a safetensors file")
    data_bytes = file_bytes - LENGTH_BYTES - length
    if data_bytes != size_bytes:
        fault = "truncated" if data_bytes < size_bytes else "too long"
        raise ValueError(f"it is {fault}: it holds {data_bytes} bytes of data, but {size_bytes} were announced")
    return length


def check_header(text: bytes, ref: UpdateRef, index: int, size_bytes: int) -> None:
    """Raise ``ValueError`` unless this is the bucket's header and describes ``size_bytes`` of data without gaps."""
    try:
        fields = json.loads(text)
        found = fields.pop("__metadata__", {})
        if found != _identity(ref, index):
            raise ValueError(f"it belongs to another update or bucket: {found}")
        offset = 0
        for name, field in fields.items():
            start, end = field["data_offsets"]
            wanted = _SIZES[field["dtype"]] * math.prod(field["shape"])
            if start != offset or end - start != wanted:
                raise ValueError(
                    f"tensor {name!r} does not follow the one before it, or its size does not match its shape"
                )
            offset = end
        if offset != size_bytes:
            raise ValueError(f"its tensors take {offset} bytes, but {size_bytes} were announced")
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"its header is damaged: {error!r}") from error


def _identity(ref: UpdateRef, index: int) -> dict[str, str]:
    return {
        "format": "pt",  # transformers requires it
        "run_id": ref.run_id,
        "version": str(ref.version),
        "session_id": ref.session_id,
        "bucket": str(index),
    }


# ---------------------------------------------------------------------------------------------------------------
# Leases


def take_lease(directory: Path, run: str, update: str, name: str) -> None:
    """Keep a complete update for `LEASE_S` more seconds. End any lease with the same name on a different update.

    Raises ``FileNotFoundError`` if the update was removed. A reader without write permission gets no lease and no
    error, but still notices when the update is removed.
    """
    path = directory / run / update
    if not (path / MANIFEST).is_file():
        raise FileNotFoundError(path)
    for other in path.parent.glob(f"*/{name}"):
        if other.parent != path:
            with contextlib.suppress(OSError):
                other.unlink()
    try:
        fd = os.open(path / name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except FileNotFoundError:
        raise
    except OSError:
        return
    try:
        os.pwrite(fd, b"\n", 0)
        os.utime(fd)
    finally:
        os.close(fd)


def _lease_time(path: Path) -> float:
    """Return when a lease on an update was last renewed; 0 if that was too long ago."""
    times = [0.0]
    for file in path.glob("lease-*"):
        with contextlib.suppress(OSError):
            times.append(file.stat().st_mtime)
    return max(t if abs(time.time() - t) < LEASE_S else 0.0 for t in times)


# ---------------------------------------------------------------------------------------------------------------
# Writing


class BucketStore:
    """The writing side of a directory of updates. ``is_durable`` specifies whether files must survive a power loss.

    If they need not survive it, later updates overwrite the files of removed updates, which avoids allocating memory. A
    reader of a removed update then finds bytes that do not match the update's checksums.

    An update is complete, and `LATEST` refers to it, as soon as its last bucket is stored. It does not matter to
    followers of the directory whether endpoints applied the update. The store keeps the newest complete update (the
    newest two if files are durable), the open update and a few leased ones.
    """

    def __init__(self, directory: Path, *, is_durable: bool) -> None:
        self.directory = directory
        self._is_durable = is_durable
        self._num_kept = 2 if is_durable else 1
        self._lock = threading.Lock()
        self._open: _OpenUpdate | None = None
        self._spare: list[Path] = []

    def begin(self, update: WeightUpdate) -> None:
        """Prepare for an update. Remove any files that an earlier attempt with the same name left behind.

        Raises `TransferError`.
        """
        run = self.directory / run_name(update.run_id)
        path = run / session_name(update.ref)
        try:
            run.mkdir(parents=True, exist_ok=True)
            _remove(path)
            self._prune(run)
            path.mkdir()
            self._settle(run)
        except OSError as error:
            raise transfer_error(error, f"making the directory {path}") from error
        with self._lock:
            self._open = _OpenUpdate(update, path)

    def write(self, bucket: WeightBucket, attempt: Attempt) -> None:
        """Store the next bucket of the open update. The last one completes the update."""
        opened = self._open
        if opened is None:
            raise attempt.failed("no update has begun")
        refuse_stray(bucket, opened.update.ref)
        if bucket.index != len(opened.stored) or bucket.index >= len(opened.update.buckets):
            raise attempt.failed(f"bucket {len(opened.stored)} of {len(opened.update.buckets)} comes next")
        update, ref = opened.update, opened.update.ref
        if bucket.encoding not in ("raw", *update.encodings):
            raise attempt.failed(f"its encoding {bucket.encoding} was not announced")
        announced = update.buckets[bucket.index].size_bytes
        num_bytes = sum(spec.size_bytes for spec in bucket.specs)
        if num_bytes > announced or (bucket.encoding == "raw" and num_bytes != announced):
            raise attempt.failed(f"it has {num_bytes} bytes as {bucket.encoding}, but {announced} were announced")
        flat = to_host(pack(bucket.tensors))
        if flat.numel() != num_bytes:
            raise attempt.failed(f"its tensors have {flat.numel()} bytes, but its specs have {num_bytes}")
        stored = StoredBucket(
            file=bucket_name(bucket.index),
            size_bytes=flat.numel(),
            checksum=bucket.checksum or checksum(flat),
            encoding=bucket.encoding,
        )
        header = safetensors_header(bucket.specs, ref, bucket.index)
        self._write(opened.path / stored.file, [memoryview(header), bytes_of(flat)], attempt)
        opened.stored.append(stored)
        if len(opened.stored) == len(update.buckets):
            # Not validated: a part of an update may have empty buckets, which an announced update may not.
            manifest = StoredUpdate.model_construct(update=update, buckets=tuple(opened.stored))
            self._write(opened.path / MANIFEST, [_json(manifest)], attempt)
            self._write(opened.path.parent / LATEST, [_json(ref)], attempt)

    def end(self, *, is_done: bool) -> None:
        """Mark the open update as ended.

        If an endpoint may still be reading the update, its files stay until the next update begins.
        """
        with self._lock:
            opened, self._open = self._open, None
        if opened is not None and is_done:
            try:
                self._prune(opened.path.parent)
            except OSError as error:
                raise transfer_error(error, f"removing old updates in {opened.path.parent}") from error

    def drop(self) -> None:
        """Remove the open update unless it is complete."""
        with self._lock:
            opened, self._open = self._open, None
        if opened is not None and not (opened.path / MANIFEST).exists():
            _remove(opened.path)

    def _write(self, path: Path, parts: Sequence[memoryview], attempt: Attempt) -> None:
        """Write a file at ``path`` atomically, replacing any earlier one."""
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        is_new = not (path.suffix == _SUFFIX and self._spare)
        if not is_new:
            self._spare.pop().replace(partial)
        flags = os.O_EXCL | os.O_CREAT if is_new else 0
        fd = os.open(partial, os.O_WRONLY | flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            try:
                if not is_new:
                    os.truncate(fd, sum(len(part) for part in parts))
                offset = 0
                for part in parts:
                    write_all(fd, part, attempt, offset)
                    offset += len(part)
                if self._is_durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
            attempt.remaining_s()  # an abandoned call must change nothing
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        self._settle(path.parent)

    def _settle(self, directory: Path) -> None:
        """Ensure that the entries of a directory survive a power loss."""
        if not self._is_durable:
            return
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _prune(self, run: Path) -> None:
        """Remove incomplete updates, and complete ones that are neither leased nor among the most recently completed.

        Versions do not determine the order, because version numbers may decrease.
        """
        completed: list[tuple[int, Path]] = []
        with os.scandir(run) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.name.startswith(f".{LATEST}."):
                    path.unlink(missing_ok=True)
                elif SESSION_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    manifest = path / MANIFEST
                    if manifest.exists():
                        completed.append((manifest.stat().st_mtime_ns, path))
                    else:
                        _remove(path)
        old = [path for _, path in sorted(completed)[: -self._num_kept]]
        leased = sorted(filter(_lease_time, old), key=_lease_time, reverse=True)[:_MAX_LEASED]
        for path in old:
            if path in leased:
                continue
            if not self._is_durable:
                self._spare_files(path)
            _remove(path)

    def _spare_files(self, path: Path) -> None:
        """Keep the files of the most recently removed update, so that they can be overwritten."""
        (path / MANIFEST).unlink(missing_ok=True)  # from here on the update is not complete
        for unused in self._spare:
            unused.unlink(missing_ok=True)
        self._spare = []
        for number, file in enumerate(sorted(path.glob(f"*{_SUFFIX}"))):
            self._spare.append(file.replace(self.directory / f".spare-{number}"))


@dataclass(slots=True)
class _OpenUpdate:
    """The update that is being written to ``path``, and the buckets stored so far."""

    update: WeightUpdate
    path: Path
    stored: list[StoredBucket] = field(default_factory=list)


def _remove(path: Path) -> None:
    """Remove an update. Its manifest is removed first, so that the update no longer counts as complete."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)  # files open on NFS are removed when the next update begins


def _json(model: WireModel) -> memoryview:
    return memoryview(model.model_dump_json().encode())

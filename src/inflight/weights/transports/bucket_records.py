"""The records that shared-memory transports write: one small file for each bucket of an update.

This module maps no memory.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from pydantic import Field

from inflight.base.whole_files import write_whole
from inflight.weights.transports.store import Attempt, parse_message, read_text, session_name
from inflight.wire import UpdateRef, WireModel

PAGE = mmap.ALLOCATIONGRANULARITY
"""Buckets begin at multiples of this number of bytes."""
_MAX_RECORD_BYTES = 1 << 16


class BucketRecord(WireModel):
    """The position of one bucket in its arena, and the update to which it belongs."""

    ref: UpdateRef
    index: int = Field(ge=0)
    arena: str = Field(pattern=r"^arena-[0-9]{1,20}$")
    offset: int = Field(ge=0, multiple_of=PAGE)
    size_bytes: int = Field(ge=0)


def write_record(directory: Path, record: BucketRecord) -> Path:
    """Write a record atomically and return its path. Raises `OSError`."""
    path = directory / _record_name(record.ref, record.index)
    write_whole(path, record.model_dump_json())
    return path


def await_record(directory: Path, ref: UpdateRef, index: int, size_bytes: int, attempt: Attempt) -> BucketRecord:
    """Return the record of a bucket once it exists.

    Raises `TransferError` at the deadline, or if the record is for a different bucket.
    """
    name = _record_name(ref, index)
    path = directory / name
    attempt.reason = f"{path} does not exist"
    while True:
        attempt.remaining_s()
        try:
            text = read_text(directory, name, max_bytes=_MAX_RECORD_BYTES, is_private=True)
        except FileNotFoundError:
            attempt.pause()
            continue
        except OSError as error:
            raise attempt.failed(error) from error
        record = parse_message(BucketRecord, text, where=path)
        if (record.ref, record.index) != (ref, index):
            raise attempt.failed(f"{path} belongs to bucket {record.index} of another update: {record.ref}")
        if record.size_bytes != size_bytes:
            raise attempt.failed(f"{record.size_bytes} bytes are stored, but {size_bytes} were announced")
        return record


def round_up_to_pages(size_bytes: int) -> int:
    """Return the size, rounded up to whole pages."""
    return -(-size_bytes // PAGE) * PAGE


def _record_name(ref: UpdateRef, index: int) -> str:
    return f"{session_name(ref)}.{index:05d}.json"

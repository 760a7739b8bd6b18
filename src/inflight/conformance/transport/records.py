"""The check that the buckets of a store in shared memory have the documented records."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
from pathlib import Path

from inflight.conformance.calls import SLACK_S, results
from inflight.conformance.checks import check, look_at, require
from inflight.conformance.transport.pair import update_of
from inflight.conformance.transport.stored import SESSION, data_of, example_buckets
from inflight.conformance.transport.subject import FORM_S, TransportSubject
from inflight.types import WeightBucket
from inflight.wire import DirectorySpec, UpdateRef

LEVEL = "bytes"
_NUM_UPDATES = 6


@check("T-44", "shared-memory", deadline_s=30)
@look_at("the directory's mode and lock; the fields of a record; whether the sender tries to lock an arena")
def stored_buckets_have_their_records(t: TransportSubject) -> None:
    """In shared memory, the sender's directory has mode 0700 and contains a file that the sender holds locked; every
    stored bucket of the open update has the documented record, and begins at a page boundary. An arena on which a
    reader holds a lock is not written again. The arena of an update that is not committed is removed when the update
    ends, and the directory is removed with the group."""
    (member,) = t.members([1])
    receiver = t.receiver(member)
    results(t.start_joins([receiver]), FORM_S + SLACK_S)
    assert isinstance(member.spec, DirectorySpec)
    directory = Path(member.spec.directory)
    mode = directory.stat().st_mode & 0o777
    require(mode == 0o700, f"the directory has mode {mode:o}")
    require(_is_locked(directory / "lock"), "the sender does not hold the lock of its directory")
    held: list[tuple[int, int, bytes]] = []
    try:
        for number in range(_NUM_UPDATES):
            buckets = example_buckets(number)
            update = update_of(buckets, 10 + number, SESSION)
            t.sender.begin(update)
            receiver.begin(update.ref)
            for bucket in buckets:
                (receive,) = t.start_receives([receiver], bucket)
                results([receive, t.start_send(bucket)], FORM_S + SLACK_S)
                held += _read_record(directory, update.ref, bucket, is_held=number == 1)
            t.sender.end(is_done=True)
        for fd, offset, data in held:
            words = f"{_NUM_UPDATES - 2} updates later, an arena on which a reader holds a lock has changed"
            require(os.pread(fd, len(data), offset) == data, words)
    finally:
        for fd, _, _ in held:
            os.close(fd)
    buckets = example_buckets(0)
    t.sender.begin(update := update_of(buckets, 10 + _NUM_UPDATES, SESSION))
    t.start_send(buckets[0]).result(FORM_S + SLACK_S)
    arena = directory / json.loads(_record_of(directory, update.ref, 0).read_text())["arena"]
    t.sender.end(is_done=False)
    require(not arena.exists(), "the arena of an update that was not committed still exists")
    receiver.abort()
    t.sender.abort()
    require(not directory.exists(), "the directory still exists after both ends have aborted the group")
    t.note(num_updates=_NUM_UPDATES, num_held=len(held))


def _is_locked(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _record_of(directory: Path, ref: UpdateRef, index: int) -> Path:
    return directory / f"{ref.version}-{ref.session_id}.{index:05}.json"


def _read_record(
    directory: Path, ref: UpdateRef, bucket: WeightBucket, *, is_held: bool
) -> list[tuple[int, int, bytes]]:
    """Require that a bucket is stored where its record says. With ``is_held``, return the arena's descriptor, which
    holds its lock, and the position and bytes of the bucket."""
    path, data = _record_of(directory, ref, bucket.index), data_of(bucket)
    require(path.exists(), f"bucket {bucket.index} has no record {path.name}")
    found = json.loads(path.read_text())
    due = {"ref": ref.model_dump(mode="json"), "index": bucket.index, "size_bytes": len(data)}
    require(due.items() <= found.items(), f"the record {path.name} contains {found}, not {due}")
    offset = found.get("offset", -1)
    require(offset >= 0 and offset % mmap.PAGESIZE == 0, f"bucket {bucket.index} begins at byte {offset} of its arena")
    fd = os.open(directory / str(found.get("arena")), os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    words = f"bucket {bucket.index} is not in {found.get('arena')} at the offset in its record"
    try:
        require(os.pread(fd, len(data), offset) == data, words)
    except BaseException:
        os.close(fd)
        raise
    if is_held:
        return [(fd, offset, data)]
    os.close(fd)
    return []

"""Relaying: keep the newest stored version of a run on another host, for the servers and relays there.

Each version crosses the link to its source once, however many servers read it from the relay: those of the relay's host
through memory, others over HTTP. A relay may follow a relay, so relays make a tree. Its readers follow it as they would
follow the trainer; `inflight.weights.receive.following` says how.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NoReturn

from inflight.base.threads import run_abandonable
from inflight.weights.receive.following import StoredRun, take_each_newest
from inflight.weights.transports.bucket_files import StoredUpdate
from inflight.weights.transports.files import FileSender
from inflight.wire import DirectorySpec, PullSpec, UpdateRef

_READ_S = 10.0
"""How long reading the relay's own directory may take."""


async def relay(
    spec: DirectorySpec | PullSpec,
    directory: Path,
    *,
    poll_s: float = 0.2,
    deadline_s: float = 60.0,
    note: Callable[[str], None],
) -> NoReturn:
    """Keep the newest version that is stored at ``spec`` in ``directory`` too, until cancelled.

    Every bucket is compared with its checksum before it is stored, and a version appears only when it is whole; the one
    before it then goes, unless a reader leases it. Each has ``deadline_s`` seconds. One that fails is noted and tried
    again, and the version before it stays.
    """
    sender = FileSender(directory, is_durable=False)
    sender.specs(spec.run_id, [1], deadline_s)
    here = DirectorySpec(run_id=spec.run_id, transport="file", directory=str(sender.directory), timeout_s=_READ_S)

    async def has(ref: UpdateRef) -> bool:
        with closing(StoredRun(here)) as stored:
            return await stored.latest(_READ_S) == ref

    async def take(source: StoredRun, stored: StoredUpdate) -> None:
        await run_abandonable(lambda: _copy(source, stored, sender, deadline_s), "inflight-relay")
        size = sum(bucket.size_bytes for bucket in stored.buckets)
        note(f"version {stored.update.version} of run {spec.run_id!r} is here, {size / 1e6:,.1f} MB")

    try:
        await take_each_newest(spec, has, take, poll_s=poll_s, deadline_s=deadline_s, note=note)
    finally:
        sender.abort()


def _copy(source: StoredRun, stored: StoredUpdate, sender: FileSender, deadline_s: float) -> None:
    sender.begin(stored.update)
    is_done = False
    try:
        for bucket in source.buckets(stored, deadline_s):
            sender.send(bucket, deadline_s)
        is_done = True
    finally:
        sender.end(is_done=is_done)

"""Storing: each version is gathered from the workers and stored without waiting for servers, which load it later.

`inflight.weights.receive.following` is the reading side.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inflight.contracts import WeightSender, WeightSource
from inflight.errors import ConfigError, DeadlineError
from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import Rounding, encode_bucket
from inflight.weights.encode.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from inflight.weights.send.gathering import gather_rest, require_announced, weight_update_of
from inflight.weights.transports.files import DirectoryReceiver
from inflight.wire import DirectorySpec, TransportSpec, UpdateRef, WeightUpdate

_READ_S = 60.0
"""Time limit, in seconds, for the file system to list the stored versions."""


@dataclass(frozen=True, slots=True)
class StoreReport:
    """A stored version, and how long it took to store. Servers find it at ``spec``."""

    ref: UpdateRef
    spec: TransportSpec
    size_bytes: int
    stored_bytes: int
    gather_s: float
    store_s: float


def store_weights(
    worker: WeightSource,
    sender: WeightSender,
    *,
    run_id: str,
    incarnation: int = 1,
    encoding: Rounding = "raw",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    deadline_s: float = 60.0,
) -> StoreReport:
    """Store the worker's current weights as the newest version of the run, and return a report.

    Rank 0 calls this with a `DirectorySender` or `HttpFileSender`, while every other rank calls `gather_only`. The call
    does not wait for servers, which load the newest version when they are ready (see
    `inflight.weights.receive.following`). ``incarnation`` is the number of times that a run's trainer was started: pass
    one more than `newest_incarnation` returns.

    Raises `TransferError` or `DeadlineError` if the version cannot be stored in time; the previous version then
    remains the newest. Whatever is raised, the collective gather was completed on every rank.
    """
    gathered = worker.gather_weights(plan_buckets(worker.parameter_specs(), bucket_bytes))
    try:
        if worker.rank != 0:
            raise ConfigError(f"store_weights is for rank 0; rank {worker.rank} calls gather_only(worker)")
        if sender.is_collective:
            raise ConfigError(
                "store_weights needs a sender that stores weights: make_sender('file') or make_sender('http')"
            )
        update = weight_update_of(
            worker,
            run_id=run_id,
            incarnation=incarnation,
            bucket_bytes=bucket_bytes,
            deadline_s=deadline_s,
            encoding=encoding,
        )
        return _store(require_announced(gathered, update), sender, update, encoding, deadline_s)
    finally:
        gather_rest(gathered)


def newest_incarnation(directory: Path, run_id: str) -> int:
    """Return the incarnation of a run's newest stored version in a directory; 0 if there is none."""
    spec = DirectorySpec(run_id=run_id, transport="file", directory=str(directory.absolute()), timeout_s=_READ_S)
    receiver = DirectoryReceiver(spec)
    ref = receiver.latest(_READ_S)
    return 0 if ref is None else receiver.read_manifest(ref, _READ_S).update.incarnation


def _store(
    gathered: Iterator[WeightBucket], sender: WeightSender, update: WeightUpdate, encoding: Rounding, deadline_s: float
) -> StoreReport:
    deadline = time.monotonic() + deadline_s
    (spec,) = sender.specs(update.run_id, [1], deadline_s)
    sender.begin(update)
    gather_s = store_s = 0.0
    stored_bytes = 0
    is_done = False
    try:
        started = time.monotonic()
        for bucket in gathered:
            sent = encode_bucket(bucket, update.ref, encoding=encoding)
            gathered_at = time.monotonic()
            gather_s += gathered_at - started
            if gathered_at > deadline:
                raise DeadlineError(f"version {update.version} was not stored within {deadline_s:g} s")
            sender.send(sent, deadline - gathered_at)
            started = time.monotonic()
            store_s += started - gathered_at
            stored_bytes += sum(part.size_bytes for part in sent.specs)
        is_done = True
    finally:
        sender.end(is_done=is_done)
    spec = spec.model_copy(update={"incarnation": update.incarnation})
    return StoreReport(update.ref, spec, update.manifest.size_bytes, stored_bytes, gather_s, store_s)

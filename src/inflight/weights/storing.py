"""Storing: gather from the workers and store each version, without waiting for anybody; servers come for it.

This module knows the Protocols only, no engine and no trainer; `inflight.weights.following` is the other side.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inflight.contracts import WeightSender, WeightSource
from inflight.errors import ConfigError, DeadlineError
from inflight.types import WeightBucket
from inflight.weights.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from inflight.weights.encoding import Rounding
from inflight.weights.outgoing import announcement, as_announced, outgoing_bucket
from inflight.weights.transports.files import latest, read_manifest
from inflight.wire import TransportSpec, UpdateRef, WeightUpdate


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What was stored, and what it cost; ``spec`` is where servers find it."""

    ref: UpdateRef
    spec: TransportSpec
    size_bytes: int
    stored_bytes: int
    gather_s: float
    store_s: float


def store_weights(
    worker: WeightSource,
    sender: WeightSender | None,
    *,
    run_id: str,
    epoch: int = 1,
    encoding: Rounding = "raw",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    deadline_s: float = 60.0,
) -> StoreReport | None:
    """Store the worker's present weights as the newest version of the run; returns what was stored.

    Every rank calls it: rank 0 with a `FileSender` or `PullSender`, the others with None, which gather and return None.
    Nobody is waited for: servers take the newest version when they are ready, see `inflight.weights.following`.
    ``epoch`` tells the incarnations of a run's trainer apart, one more than `newest_epoch`.

    Raises `TransferError` or `DeadlineError` if it cannot be stored in time; the version of before is the newest then.
    Whatever is raised, the collective gather was completed on every rank.
    """
    gathered = worker.gather_weights(plan_buckets(worker.parameter_specs(), bucket_bytes))
    try:
        if worker.rank != 0:
            return None
        if sender is None or sender.is_collective:
            raise ConfigError("store_weights needs a sender that stores on rank 0: make_sender('file' or 'http')")
        update = announcement(
            worker,
            run_id=run_id,
            epoch=epoch,
            bucket_bytes=bucket_bytes,
            deadline_s=deadline_s,
            encodings=() if encoding == "raw" else (encoding,),
        )
        return _store(as_announced(gathered, update), sender, update, encoding, deadline_s)
    finally:
        for _ in gathered:
            pass


def newest_epoch(directory: Path, run_id: str) -> int:
    """Return the epoch of the newest version that is stored of a run in a directory; 0 if none is."""
    ref = latest(directory, run_id)
    return 0 if ref is None else read_manifest(directory, ref).update.epoch


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
            sent = outgoing_bucket(bucket, update.ref, encoding=encoding)
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
    spec = spec.model_copy(update={"epoch": update.epoch})
    return StoreReport(update.ref, spec, update.manifest.size_bytes, stored_bytes, gather_s, store_s)

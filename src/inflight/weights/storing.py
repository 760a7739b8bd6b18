"""Storing: gather from the workers and store each version, without waiting for anybody; servers come for it.

This module knows the Protocols only, no engine and no trainer; `inflight.weights.following` is the other side.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inflight.contracts import PartialWeightSource, WeightSender, WeightSource
from inflight.errors import ConfigError, DeadlineError, TrainerError
from inflight.types import WeightBucket
from inflight.weights.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from inflight.weights.encoding import Rounding, encode
from inflight.weights.packing import pack
from inflight.weights.staging import payload_spec
from inflight.weights.transports.files import latest, read_manifest
from inflight.wire import InFlightPolicy, Manifest, TransportSpec, UpdateRef, WeightUpdate

_LEASE_SLACK_S = 5.0


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
    specs = worker.parameter_specs()
    frozen = tuple(worker.frozen_names()) if isinstance(worker, PartialWeightSource) else ()
    buckets = plan_buckets(specs, bucket_bytes)
    gathered = worker.gather_weights(buckets)
    try:
        if worker.rank != 0:
            return None
        if sender is None or sender.is_collective:
            raise ConfigError("store_weights needs a sender that stores on rank 0: make_sender('file' or 'http')")
        update = WeightUpdate(
            run_id=run_id,
            version=worker.version,
            session_id=uuid.uuid4().hex[:16],
            epoch=epoch,
            manifest=Manifest(tensors=tuple(specs), frozen=frozen),
            buckets=buckets,
            in_flight=InFlightPolicy.KEEP,
            encodings=() if encoding == "raw" else (encoding,),
            deadline_s=deadline_s,
            lease_s=deadline_s + _LEASE_SLACK_S,
        )
        return _store(gathered, sender, update, encoding, deadline_s)
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
    num_stored = stored_bytes = 0
    is_done = False
    try:
        started = time.monotonic()
        for bucket in gathered:
            sent = _as_stored(bucket, encoding)
            gathered_at = time.monotonic()
            gather_s += gathered_at - started
            if gathered_at > deadline:
                raise DeadlineError(f"version {update.version} was not stored within {deadline_s:g} s")
            sender.send(sent, deadline - gathered_at)
            started = time.monotonic()
            store_s += started - gathered_at
            num_stored += 1
            stored_bytes += sum(part.size_bytes for part in sent.specs)
        if num_stored != len(update.buckets):
            raise TrainerError(f"the worker yielded {num_stored} buckets, {len(update.buckets)} were asked for")
        is_done = True
    finally:
        sender.end(is_done=is_done)
    spec = spec.model_copy(update={"epoch": update.epoch})
    return StoreReport(update.ref, spec, update.manifest.size_bytes, stored_bytes, gather_s, store_s)


def _as_stored(bucket: WeightBucket, encoding: Rounding) -> WeightBucket:
    """Return a bucket as it is stored: its tensors one after the other, rounded if that was asked for."""
    if encoding == "raw":
        return WeightBucket(bucket.index, bucket.specs, (pack(bucket.tensors),))
    payload = encode(bucket.tensors, bucket.specs, encoding)
    return WeightBucket(bucket.index, (payload_spec(payload.numel()),), (payload,))

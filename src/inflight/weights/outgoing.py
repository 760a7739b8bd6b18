"""What leaves a trainer: the announcement of its weights, and every bucket as bytes with an encoding and a checksum.

Publishing, storing and the conformance kit share it. It knows neither endpoints nor transports.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

import torch

from inflight.contracts import AdapterSource, PartialWeightSource, WeightSource
from inflight.errors import TrainerError
from inflight.types import WeightBucket
from inflight.weights.buckets import plan_buckets
from inflight.weights.checksums import checksum, on_host
from inflight.weights.encoding import encode
from inflight.weights.packing import unpack
from inflight.weights.staging import payload_spec
from inflight.wire import BucketTransfer, Encoding, InFlightPolicy, Manifest, UpdateRef, WeightUpdate

_LEASE_SLACK_S = 5.0
"""How much longer than the deadline an endpoint keeps an update open when it hears nothing from the publisher."""
_PREPARATION_SHARE = 0.9
"""Share of the deadline in which endpoints prepare: a drain that takes longer leaves no time to send anything."""


def announcement(
    worker: WeightSource,
    *,
    run_id: str,
    epoch: int,
    bucket_bytes: int,
    deadline_s: float,
    in_flight: InFlightPolicy = InFlightPolicy.KEEP,
    encodings: tuple[Encoding, ...] = (),
    keep: bool = False,
) -> WeightUpdate:
    """Return the message that announces the worker's present weights as a new session."""
    specs = tuple(worker.parameter_specs())
    frozen = tuple(worker.frozen_names()) if isinstance(worker, PartialWeightSource) else ()
    adapter = worker.adapter_spec() if isinstance(worker, AdapterSource) else None
    return WeightUpdate(
        run_id=run_id,
        version=worker.version,
        session_id=uuid.uuid4().hex[:16],
        epoch=epoch,
        manifest=Manifest(tensors=specs, frozen=frozen, adapter=adapter),
        buckets=plan_buckets(specs, bucket_bytes),
        in_flight=in_flight,
        encodings=encodings,
        keep=keep,
        deadline_s=deadline_s * _PREPARATION_SHARE,
        lease_s=deadline_s + _LEASE_SLACK_S,
    )


def as_announced(gathered: Iterator[WeightBucket], update: WeightUpdate) -> Iterator[WeightBucket]:
    """Yield what the worker gathers. Raises `TrainerError` if it differs from what ``update`` announces."""
    num_gathered = 0
    for bucket in gathered:
        if bucket.index != num_gathered or bucket.index >= len(update.buckets):
            raise TrainerError(
                f"the worker yielded bucket {bucket.index}, bucket {num_gathered} of {len(update.buckets)} is next"
            )
        announced = update.buckets[bucket.index]
        specs = update.manifest.tensors[announced.start : announced.stop]
        found = [(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in bucket.tensors]
        wanted = [(spec.shape, str(spec.dtype)) for spec in specs]
        if found != wanted:
            raise TrainerError(
                f"bucket {bucket.index} holds tensors {found[:5]}, parameter_specs announced {wanted[:5]}"
            )
        num_gathered += 1
        yield bucket
    if num_gathered != len(update.buckets):
        raise TrainerError(f"the worker yielded {num_gathered} buckets, {len(update.buckets)} were asked for")


def outgoing_bucket(
    bucket: WeightBucket,
    ref: UpdateRef,
    *,
    encoding: Encoding = "raw",
    payload: torch.Tensor | None = None,
    on_device: bool = False,
) -> WeightBucket:
    """Return a bucket as it travels: packed, encoded, and with the checksum of its bytes.

    ``payload`` (uint8 [size]) is for bytes that are encoded already, as those of a delta are. The bytes come to the
    host, unless ``on_device`` leaves them where they lie. Raises `TransferError` for tensors that have no bytes.
    """
    if payload is None:
        assert encoding != "delta"  # only the publisher knows its base
        payload = encode(bucket.tensors, bucket.specs, encoding)
    host = on_host(payload)  # one copy serves the checksum and the transports that send from the host
    flat = payload if on_device else host
    is_raw = encoding == "raw"
    specs = bucket.specs if is_raw else (payload_spec(flat.numel()),)
    tensors: Sequence[torch.Tensor] = unpack(flat, specs) if is_raw else (flat,)
    return WeightBucket(bucket.index, specs, tuple(tensors), encoding, checksum(host), ref)


def transfer_of(bucket: WeightBucket, ref: UpdateRef, timeout_s: float) -> BucketTransfer:
    """Return the message that asks an endpoint for an outgoing bucket."""
    return BucketTransfer(
        run_id=ref.run_id,
        version=ref.version,
        session_id=ref.session_id,
        bucket_index=bucket.index,
        encoding=bucket.encoding,
        size_bytes=sum(spec.size_bytes for spec in bucket.specs),
        checksum=bucket.checksum,
        timeout_s=timeout_s,
    )

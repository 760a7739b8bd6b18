"""What leaves a trainer: the announcement of its weights, and every bucket as bytes with an encoding and a checksum.

Publishing, storing and the conformance kit share it. It knows neither endpoints nor transports.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

import torch

from inflight.contracts import LoraSource, PartialWeightSource, WeightSource
from inflight.errors import TrainerError
from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import Rounding, checksum, encode, on_host, unpack
from inflight.weights.encode.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from inflight.weights.encode.device_checksum import sums64
from inflight.weights.encode.streams import recorded
from inflight.weights.receive.staging import payload_spec
from inflight.wire import BucketTransfer, Encoding, InFlightPolicy, Manifest, UpdateRef, WeightUpdate

_LEASE_SLACK_S = 5.0
"""How far beyond the deadline an endpoint keeps an update open without hearing from the publisher."""
_PREPARATION_SHARE = 0.9
"""Share of the deadline for endpoints to prepare: a longer drain would leave no time to send anything."""


def announcement(
    worker: WeightSource,
    *,
    run_id: str,
    incarnation: int,
    bucket_bytes: int,
    deadline_s: float,
    in_flight: InFlightPolicy = InFlightPolicy.KEEP,
    encoding: Rounding = "raw",
    keep: bool = False,
) -> WeightUpdate:
    """Return the message that announces the worker's present weights as a new session."""
    specs = tuple(worker.parameter_specs())
    frozen = tuple(worker.frozen_names()) if isinstance(worker, PartialWeightSource) else ()
    lora = worker.lora_spec() if isinstance(worker, LoraSource) else None
    return WeightUpdate(
        run_id=run_id,
        version=worker.version,
        session_id=uuid.uuid4().hex[:16],
        incarnation=incarnation,
        manifest=Manifest(tensors=specs, frozen=frozen, lora=lora),
        buckets=plan_buckets(specs, bucket_bytes),
        in_flight=in_flight,
        encodings=() if encoding == "raw" else (encoding,),
        keep=keep,
        deadline_s=deadline_s * _PREPARATION_SHARE,
        lease_s=deadline_s + _LEASE_SLACK_S,
    )


def gather_only(worker: WeightSource, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
    """Take part in the gathering of a version that rank 0 publishes or stores. Every other rank calls it.

    ``bucket_bytes`` has to equal rank 0's. Raises what gathering raises.
    """
    exhaust(worker.gather_weights(plan_buckets(worker.parameter_specs(), bucket_bytes)))


def exhaust(gathered: Iterator[WeightBucket]) -> None:
    """Gather the rest, because the other ranks wait for it."""
    for _ in gathered:
        pass


def as_announced(gathered: Iterator[WeightBucket], update: WeightUpdate) -> Iterator[WeightBucket]:
    """Yield what the worker gathers. Raises `TrainerError` if it differs from what ``update`` announces."""
    num_gathered = 0
    for bucket in gathered:
        if bucket.index != num_gathered or bucket.index >= len(update.buckets):
            raise TrainerError(
                f"the worker yielded bucket {bucket.index}, but bucket {num_gathered} of {len(update.buckets)} is next"
            )
        announced = update.buckets[bucket.index]
        specs = update.manifest.tensors[announced.start : announced.stop]
        found = [(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in bucket.tensors]
        wanted = [(spec.shape, str(spec.dtype)) for spec in specs]
        if found != wanted:
            raise TrainerError(
                f"bucket {bucket.index} holds tensors {found[:5]}, but parameter_specs announced {wanted[:5]}"
            )
        num_gathered += 1
        yield bucket
    if num_gathered != len(update.buckets):
        raise TrainerError(f"the worker yielded {num_gathered} buckets, but {len(update.buckets)} were asked for")


def outgoing_bucket(
    bucket: WeightBucket,
    ref: UpdateRef,
    *,
    encoding: Encoding = "raw",
    payload: torch.Tensor | None = None,
    on_device: bool = False,
) -> WeightBucket:
    """Return a bucket as it travels: packed, encoded, and with the checksum of its bytes.

    ``payload`` (uint8 [size]) holds bytes that are encoded already, such as a delta's. The bytes move to the host,
    unless ``on_device`` leaves them where they are, and their checksum is then computed there. Raises `TransferError`
    for tensors without bytes.
    """
    if payload is None:
        assert encoding != "delta"  # only the publisher knows a delta's base
        payload = encode(bucket.tensors, bucket.specs, encoding)
    flat = payload if on_device else on_host(payload)  # one copy serves the checksum and the transport
    found = sums64(flat) if on_device else checksum(flat)
    is_raw = encoding == "raw"
    specs = bucket.specs if is_raw else (payload_spec(flat.numel()),)
    tensors: Sequence[torch.Tensor] = unpack(flat, specs) if is_raw else (flat,)
    return WeightBucket(bucket.index, specs, tuple(tensors), encoding, found, ref, recorded(flat.device))


def transfer_of(bucket: WeightBucket, ref: UpdateRef, timeout_s: float) -> BucketTransfer:
    """Return the message that asks an endpoint to receive an outgoing bucket."""
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

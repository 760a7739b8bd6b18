"""Buckets: whole tensors in manifest order, grouped up to a size."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.base.shortened import shortened
from inflight.errors import TransferError
from inflight.types import WeightBucket
from inflight.weights.encode.lora_tensors import lora_difference
from inflight.wire import BucketSpec, Manifest, TensorSpec, UpdateRef

DEFAULT_BUCKET_BYTES = 64 * 1024 * 1024


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> tuple[BucketSpec, ...]:
    """Return buckets that cover the tensors in order. A bucket has at most ``bucket_bytes``, or one larger tensor."""
    buckets: list[BucketSpec] = []
    start, size_bytes = 0, 0
    for i, spec in enumerate(specs):
        if i > start and size_bytes + spec.size_bytes > bucket_bytes:
            buckets.append(BucketSpec(index=len(buckets), start=start, stop=i, size_bytes=size_bytes))
            start, size_bytes = i, 0
        size_bytes += spec.size_bytes
    if start < len(specs):
        buckets.append(BucketSpec(index=len(buckets), start=start, stop=len(specs), size_bytes=size_bytes))
    return tuple(buckets)


def manifest_difference(expected: Sequence[TensorSpec], manifest: Manifest) -> str | None:
    """Return why the expected tensors cannot be loaded from a manifest, or None if they can.

    The order may differ; names, shapes and dtypes may not. Frozen tensors are not sent, but must also be expected. A
    LoRA must fit its modules. The text names up to five tensors for each kind of difference.
    """
    if manifest.lora is not None:
        return lora_difference({spec.name: spec.shape for spec in expected}, manifest)
    mine = {spec.name: spec for spec in expected}
    theirs = {spec.name: spec for spec in manifest.tensors}
    named = {*theirs, *manifest.frozen}
    problems = []
    if missing := [name for name in mine if name not in named]:
        problems.append(f"missing tensors: {shortened(missing)}")
    if extra := [name for name in (*theirs, *manifest.frozen) if name not in mine]:
        problems.append(f"tensors unknown to this endpoint: {shortened(extra)}")
    shared = [name for name in mine if name in theirs]
    shapes = [f"{n} is {theirs[n].shape}, expected {mine[n].shape}" for n in shared if mine[n].shape != theirs[n].shape]
    if shapes:
        problems.append(f"{len(shapes)} shapes differ: {'; '.join(shapes[:5])}")
    dtypes = [f"{n} is {theirs[n].dtype}, expected {mine[n].dtype}" for n in shared if mine[n].dtype != theirs[n].dtype]
    if dtypes:
        problems.append(f"{len(dtypes)} dtypes differ (set the source's wire_dtype): {'; '.join(dtypes[:5])}")
    return ". ".join(problems) or None


def refuse_stray(bucket: WeightBucket, ref: UpdateRef | None) -> None:
    """Raise `TransferError` if a bucket does not belong to the update being sent.

    An abandoned call from the previous update may arrive late, when a different group is already in use.
    """
    if bucket.ref is not None and bucket.ref != ref:
        raise TransferError(
            f"bucket {bucket.index} belongs to version {bucket.ref.version}, session {bucket.ref.session_id!r}, "
            "which has ended"
        )

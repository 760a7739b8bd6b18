"""The parts of a bucket, each sent by a different sender: their contents and their places in the bucket.

A sender's part consists of its boxes of the bucket's tensors, in manifest order, each row-major, without gaps.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence

import torch

from inflight.wire import DTYPE_SIZES, Box, BucketSpec, Manifest, TensorSpec, WeightUpdate


def boxes_of(manifest: Manifest, bucket: BucketSpec, sender: int) -> Iterator[tuple[TensorSpec, Box]]:
    """Yield the boxes of a bucket that a sender sends, each with its tensor, in order."""
    for index in range(bucket.start, bucket.stop):
        sharding = manifest.shardings[manifest.sharding_of[index]]
        for box in sharding.senders[sender]:
            yield manifest.tensors[index], box


def part_specs(manifest: Manifest, bucket: BucketSpec, sender: int) -> tuple[TensorSpec, ...]:
    """Return a spec for each box of a bucket that a sender sends, named like ``lm_head.weight[0:8,0:64]``."""
    return tuple(
        TensorSpec(
            name=f"{spec.name}[{','.join(f'{start}:{stop}' for start, stop in box)}]",
            dtype=spec.dtype,
            shape=tuple(stop - start for start, stop in box),
        )
        for spec, box in boxes_of(manifest, bucket, sender)
    )


def part_of_update(update: WeightUpdate, sender: int) -> WeightUpdate:
    """Return an update whose buckets contain only one sender's parts, which may be empty."""
    parts = [part_specs(update.manifest, bucket, sender) for bucket in update.buckets]
    edges = [0, *itertools.accumulate(map(len, parts))]
    buckets = tuple(
        bucket.model_copy(update={"start": start, "stop": stop, "size_bytes": sum(it.size_bytes for it in part)})
        for bucket, part, start, stop in zip(update.buckets, parts, edges, edges[1:], strict=False)
    )
    tensors = tuple(itertools.chain.from_iterable(parts))
    manifest = update.manifest.model_copy(update={"tensors": tensors, "shardings": (), "sharding_of": ()})
    return update.model_copy(update={"manifest": manifest, "buckets": buckets})


def places_of(manifest: Manifest, bucket: BucketSpec, sender: int) -> bytes:
    """Return where a sender's part belongs, as bytes that both sides compute and that the part's checksum includes.

    If the two sides assign different boxes to a part, the part is therefore treated as damaged.
    """
    return json.dumps([(spec.name, box) for spec, box in boxes_of(manifest, bucket, sender)]).encode()


def views_of(flat: torch.Tensor, manifest: Manifest, bucket: BucketSpec, sender: int) -> list[torch.Tensor]:
    """Return uint8 views of a sender's boxes in a bucket; the last dimension counts bytes instead of elements.

    ``flat`` is uint8 [bucket.size_bytes].
    """
    offsets, offset = {}, 0
    for spec in manifest.tensors[bucket.start : bucket.stop]:
        offsets[spec.name] = offset
        offset += spec.size_bytes
    views = []
    for spec, box in boxes_of(manifest, bucket, sender):
        size = DTYPE_SIZES[spec.dtype]
        shape, edges = spec.shape or (1,), box or ((0, 1),)
        of_tensor = flat[offsets[spec.name] : offsets[spec.name] + spec.size_bytes]
        whole = of_tensor.view(*shape[:-1], shape[-1] * size)
        *leading, last = edges
        cut = (*(slice(start, stop) for start, stop in leading), slice(last[0] * size, last[1] * size))
        views.append(whole[cut])
    return views


def write_part(flat: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
    """Write the bytes of a part to their places in a bucket."""
    offset = 0
    for view in views:
        view.copy_(flat[offset : offset + view.numel()].view(view.shape))
        offset += view.numel()


def read_part(views: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a copy of the bytes of a part, uint8 [size], from their places in a bucket."""
    return torch.cat([view.reshape(-1) for view in views]) if views else torch.empty(0, dtype=torch.uint8)

"""The bytes of a bucket: its tensors one after another, row-major, without gaps. Knows nothing of how they travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from inflight.types import WeightBucket
from inflight.wire import TensorSpec


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of the tensors one after another, uint8 [sum of sizes]; no copy if they lie so already."""
    joined = _joined([tensor for tensor in tensors if tensor.nbytes])
    return torch.cat(_flats(tensors)) if joined is None else joined


def unpack(flat: torch.Tensor, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Return the tensors that `pack` joined: views, except where a mix of dtypes left one misaligned."""
    tensors, offset = [], 0
    for spec in specs:
        dtype = getattr(torch, spec.dtype)
        part = flat[offset : offset + spec.size_bytes]
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        tensors.append(part.view(dtype).reshape(spec.shape))
        offset += spec.size_bytes
    return tensors


class Packer:
    """Packs buckets before they are sent, into two buffers in turn: one is filled while the other travels.

    The buffers stay: pages that the system hands out anew cost more time than the copy itself.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor | None] = [None, None]

    def packed(self, bucket: WeightBucket) -> WeightBucket:
        """Return the same bucket with its tensors in one buffer, valid until the second call after this one."""
        size_bytes = sum(tensor.nbytes for tensor in bucket.tensors)
        if _joined(bucket.tensors) is not None or not size_bytes:
            return bucket
        device = bucket.tensors[0].device
        buffer = self._buffers[bucket.index % 2]
        if buffer is None or buffer.numel() < size_bytes or buffer.device != device:
            buffer = self._buffers[bucket.index % 2] = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        flat = buffer[:size_bytes]
        torch.cat(_flats(bucket.tensors), out=flat)
        return replace(bucket, tensors=tuple(unpack(flat, bucket.specs)))


def _flats(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensors' bytes as one view, None if they do not follow one another in one storage."""
    if not tensors:
        return None
    storage = tensors[0].untyped_storage()
    end = start = tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or tensor.untyped_storage().data_ptr() != storage.data_ptr():
            return None
        if not tensor.is_contiguous():
            return None
        end += tensor.nbytes
    flat = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    return flat.set_(storage, start - storage.data_ptr(), (end - start,), (1,))

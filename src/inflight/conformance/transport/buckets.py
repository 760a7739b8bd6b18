"""Buckets of tensors, and the bytes of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from inflight.types import WeightBucket
from inflight.wire import TensorSpec


def bucket_of(*tensors: torch.Tensor, index: int = 0, prefix: str = "tensor") -> WeightBucket:
    """Return a bucket of these tensors, with specs derived from them.

    The numbers after the prefix of their names descend, so that the order of the tensors is not that of their names.
    """
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    specs = [
        TensorSpec.model_validate(
            {"name": f"{prefix} {index}.{len(tensors) - i}", "dtype": dtype, "shape": tuple(tensor.shape)}
        )
        for i, (dtype, tensor) in enumerate(zip(dtypes, tensors, strict=True))
    ]
    return WeightBucket(index, tuple(specs), tensors)


def numbered(num_elements: int, first: int = 0) -> torch.Tensor:
    """Return consecutive float64 numbers [num_elements], so that repeated, lost or swapped bytes are noticed."""
    return torch.arange(first, first + num_elements, dtype=torch.float64)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, row-major, as a new uint8 tensor on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).clone()


def digest_of(tensors: Sequence[torch.Tensor]) -> str:
    """Return a digest of the dtypes, shapes and bytes of tensors."""
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(bytes_of(tensor).numpy().tobytes())
    return digest.hexdigest()

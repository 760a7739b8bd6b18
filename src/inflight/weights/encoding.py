"""Encodings of a bucket: from the bytes of its tensors to fewer bytes that travel, and back. Knows no transport.

``bfloat16`` and ``float8`` round weights of wider dtypes; which ones follows from shape and dtype alone. ``bfloat16``
rounds float32 and float64, ``float8`` all but vectors (norms, biases); the others travel as they are. The endpoint
loads the rounded values in the manifest's dtype. ``delta`` is in `inflight.weights.delta`, since it needs a base.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from inflight.errors import TransferError
from inflight.weights import float8
from inflight.weights.packing import pack, unpack
from inflight.wire import DTYPE_SIZES, Encoding, TensorSpec

Rounding = Literal["raw", "bfloat16", "float8"]
_WIDE = ("float32", "float64")


def encode(tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec], rounding: Rounding) -> torch.Tensor:
    """Return the bytes that travel, uint8 [N]; N is `encoded_size`. Raises `TrainerError` for non-finite weights."""
    if rounding == "raw":
        return pack(tensors)
    parts = [_encoded(tensor, spec, rounding) for tensor, spec in zip(tensors, specs, strict=True)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def decode(encoding: Encoding, payload: torch.Tensor, specs: Sequence[TensorSpec]) -> torch.Tensor:
    """Return the bytes of the tensors one after another, uint8; ``payload`` itself if it is those.

    Raises `TransferError` if the payload is not as long as the specs say.
    """
    wanted = encoded_size(specs, encoding)
    if payload.numel() != wanted:
        raise TransferError(f"a bucket of {payload.numel()} bytes arrived as {encoding}, its tensors take {wanted}")
    if encoding == "raw":
        return payload
    flat = torch.empty(sum(spec.size_bytes for spec in specs), dtype=torch.uint8, device=payload.device)
    source = target = 0
    for spec in specs:
        size_bytes = _encoded_size(spec, encoding)
        part = payload[source : source + size_bytes]
        flat[target : target + spec.size_bytes] = _decoded(part, spec, encoding)
        source, target = source + size_bytes, target + spec.size_bytes
    return flat


def encoded_size(specs: Sequence[TensorSpec], encoding: Encoding) -> int:
    """Return how many bytes these tensors travel as; the same on both sides."""
    return sum(_encoded_size(spec, encoding) for spec in specs)


def _applies(spec: TensorSpec, encoding: Encoding) -> bool:
    """Return whether a tensor is rounded by this encoding."""
    if spec.num_elements == 0:
        return False
    if encoding == "bfloat16":
        return spec.dtype in _WIDE
    return encoding == "float8" and len(spec.shape) > 1 and DTYPE_SIZES[spec.dtype] > 1


def _encoded_size(spec: TensorSpec, encoding: Encoding) -> int:
    if not _applies(spec, encoding):
        return spec.size_bytes
    return 2 * spec.num_elements if encoding == "bfloat16" else float8.payload_size(spec.shape)


def _encoded(tensor: torch.Tensor, spec: TensorSpec, rounding: Rounding) -> torch.Tensor:
    if not _applies(spec, rounding):
        return pack([tensor])
    if rounding == "bfloat16":
        return pack([tensor.to(torch.bfloat16)])
    return float8.encode_float8(tensor, spec.name)


def _decoded(payload: torch.Tensor, spec: TensorSpec, encoding: Encoding) -> torch.Tensor:
    """Return one tensor's bytes in the manifest's dtype."""
    if not _applies(spec, encoding):
        return payload
    dtype = getattr(torch, spec.dtype)
    if encoding == "bfloat16":
        (values,) = unpack(payload, [spec.model_copy(update={"dtype": "bfloat16"})])
    else:
        values = float8.decode_float8(payload, spec.shape, dtype)
    return pack([values.to(dtype)])

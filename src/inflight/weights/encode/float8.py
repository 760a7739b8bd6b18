"""Float8 on the wire: tensors as e4m3 values with one scale for every 128 elements of a row.

A scale is the smallest power of two s with a <= 448 s, where a is the largest magnitude in its block and 448 is the
largest number in float8_e4m3fn. The scale is 1 for a block of zeros, and never below 2**-124. Multiplication by a power
of two is exact, so the only rounding is the conversion to float8 (to nearest, ties to even). A decoded tensor that is
encoded again therefore decodes to itself. With s = a / 448, this would not hold, because neither that quotient nor its
products are exact. For an element x:

    |decoded - x| <= max(|x| / 16, s / 1024),    s < a / 224 unless s = 2**-124

e4m3 has 3 bits after the leading one. Between two successive powers of two, numbers are therefore spaced by 1/8 of the
lower power, and the rounding error is at most half of that, 1/16. Below 2**-6 s, they are spaced by 2**-9 s, and half
of that is s / 1024.

Payload: the values, row-major, one byte each; padding with zeros to a multiple of four bytes; the scales, float32,
row-major over rows and the blocks of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from inflight.errors import NonFiniteError, TransferError

BLOCK = 128
"""Number of consecutive elements of the last dimension that share a scale. The last block of a row may have fewer."""

_MIN_EXPONENT = -124  # of a scale: the smallest value it gives, 2**-9 * 2**-124, is still a bfloat16 number
_MAX_EXPONENT = 120  # scales the largest float32 number to less than 448
_MAGNITUDE_BITS = 0x7F  # of an e4m3 byte: all but the sign
_SCALE_BYTES = 4
_CHUNK_ELEMENTS = 1 << 18  # encoded or decoded at a time: intermediate results stay in the cache


def payload_size(shape: Sequence[int]) -> int:
    """Return the payload size in bytes for a tensor of this shape and any dtype; it is a multiple of four."""
    num_rows, num_columns = _rows_and_columns(shape)
    return _scales_offset(shape) + _SCALE_BYTES * num_rows * -(-num_columns // BLOCK)


@torch.no_grad()
def encode_float8(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return the payload of a float32, bfloat16 or float16 tensor, uint8 [`payload_size`], on the tensor's device.

    Raises `NonFiniteError`, naming the tensor, if an element is NaN or infinite.
    """
    payload = torch.zeros(payload_size(tensor.shape), dtype=torch.uint8, device=tensor.device)
    if not tensor.numel():
        return payload
    values, scales = _values_and_scales(payload, tensor.shape)
    rows = tensor.reshape(values.shape)
    largest = torch.zeros((), device=tensor.device)
    for part in _chunks(*values.shape):
        blocks = _blocks(rows[part].float())
        magnitudes = blocks.abs().amax(-1)
        largest = torch.maximum(largest, magnitudes.amax())  # maximum passes NaN on
        exponents = _exponents(magnitudes)
        encoded = (blocks * _power_of_two(-exponents).unsqueeze(-1)).to(torch.float8_e4m3fn)
        values[part] = encoded.view(torch.uint8).flatten(1)[:, : values.shape[1]]
        scales[part] = _power_of_two(exponents)
    if not torch.isfinite(largest):
        raise NonFiniteError(f"{name} has NaN or infinite elements, which cannot be sent as float8")
    return payload


def decode_float8(payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor that a payload encodes, in ``dtype`` (float32, bfloat16 or float16), on the payload's device.

    float32 and bfloat16 represent the encoded values exactly; float16 rounds magnitudes below 2**-14. Values too large
    for the dtype become its maximum. Raises `TransferError` for a payload of a different size, for a scale that is not
    a positive normal number, and for a NaN.
    """
    if payload.numel() != payload_size(shape):
        raise _refusal(
            f"it has {payload.numel()} bytes, but a payload of shape {tuple(shape)} has {payload_size(shape)}"
        )
    values, scales = _values_and_scales(payload, shape)
    if not torch.all((scales >= torch.finfo(torch.float32).smallest_normal) & torch.isfinite(scales)):
        raise _refusal("a scale is not a positive normal number")
    tensor = torch.empty(values.shape, dtype=dtype, device=payload.device)
    limit = torch.finfo(dtype).max
    largest_code = torch.zeros((), dtype=torch.uint8, device=payload.device)
    for part in _chunks(*values.shape):
        largest_code = torch.maximum(largest_code, (values[part] & _MAGNITUDE_BITS).amax())
        blocks = _blocks(_numbers(values[part]))
        decoded = blocks.mul_(scales[part].unsqueeze(-1)).clamp_(-limit, limit)
        tensor[part] = decoded.flatten(1)[:, : values.shape[1]]
    if largest_code == _MAGNITUDE_BITS:  # NaN has all of these bits set
        raise _refusal("a value is NaN")
    return tensor.reshape(tuple(shape))


def _rows_and_columns(shape: Sequence[int]) -> tuple[int, int]:
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def _scales_offset(shape: Sequence[int]) -> int:
    return -(-math.prod(shape) // _SCALE_BYTES) * _SCALE_BYTES


def _values_and_scales(payload: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a payload: values uint8 [rows, columns] and scales float32 [rows, blocks of a row].

    A payload whose address is not aligned for float32 is copied.
    """
    num_rows, num_columns = _rows_and_columns(shape)
    scales = payload[_scales_offset(shape) :]
    if scales.storage_offset() % _SCALE_BYTES:
        scales = scales.clone()
    return (
        payload[: num_rows * num_columns].view(num_rows, num_columns),
        scales.view(torch.float32).view(num_rows, -(-num_columns // BLOCK)),
    )


def _chunks(num_rows: int, num_columns: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, num_columns))
    return (slice(start, start + step) for start in range(0, num_rows if num_columns else 0, step))


def _blocks(rows: torch.Tensor) -> torch.Tensor:
    """Return [rows, columns] as [rows, blocks, BLOCK], with each row's last block padded with zeros."""
    num_missing = -rows.shape[1] % BLOCK
    whole = F.pad(rows, (0, num_missing)) if num_missing else rows
    return whole.reshape(whole.shape[0], -1, BLOCK)


def _exponents(magnitudes: torch.Tensor) -> torch.Tensor:
    """Return the smallest k with magnitude <= 448 * 2**k (0 for magnitude 0), int32. 448 is 0.875 * 2**9."""
    mantissas, exponents = torch.frexp(magnitudes)
    smallest = exponents - 9 + (mantissas > 0.875).int()
    return torch.where(magnitudes == 0, 0, smallest.clamp(_MIN_EXPONENT, _MAX_EXPONENT))


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2**exponent as float32, built from its bits: exact on every device for exponents of normal numbers."""
    return ((exponents + 127) << 23).view(torch.float32)


def _numbers(values: torch.Tensor) -> torch.Tensor:
    """Return the float32 numbers that e4m3 bytes encode.

    Sign, exponent and mantissa are moved to their places in float16, whose exponent bias is 15 instead of 7. PyTorch's
    own conversion on the CPU gives the same result, but is several times slower.
    """
    wide = values.view(torch.int8).to(torch.int16)
    halves = ((wide << 7) & 0x3F80) | (wide & -0x8000)
    return halves.view(torch.float16).float().mul_(2.0**8)


def _refusal(what: str) -> TransferError:
    return TransferError(f"the float8 payload is invalid: {what}")

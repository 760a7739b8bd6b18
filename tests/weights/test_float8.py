"""Float8: against plain loops in float64, exact where it reports it, and refused when damaged."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.errors import NonFiniteError, TransferError
from inflight.weights.encode.float8 import BLOCK, decode_float8, encode_float8, payload_size

torch.set_num_threads(1)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
    st.tuples(st.integers(1, 3), st.sampled_from([1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 300])),
)


def e4m3_numbers() -> list[float]:
    """The magnitudes of float8_e4m3fn by their code, from the definition of the format (OCP FP8, table 1)."""
    numbers = []
    for code in range(0x7F):  # 0x7F is NaN
        exponent, mantissa = code >> 3, code & 7
        numbers.append(mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return numbers


NUMBERS = e4m3_numbers()


def nearest(magnitude: float) -> float:
    """The number of float8 nearest to a magnitude of at most 448; of two, the one whose code is even."""
    best = min(range(len(NUMBERS)), key=lambda code: (abs(NUMBERS[code] - magnitude), code % 2))
    return NUMBERS[best]


def reference(tensor: torch.Tensor) -> list[float]:
    """What a tensor is after encoding and decoding, float64, element by element."""
    num_columns = tensor.shape[-1] if tensor.dim() else 1
    rows = tensor.double().reshape(-1, num_columns).tolist() if tensor.numel() else []
    decoded = []
    for row in rows:
        for start in range(0, num_columns, BLOCK):
            block = row[start : start + BLOCK]
            largest = max(abs(x) for x in block)
            exponent = -124
            while largest > 448.0 * 2.0**exponent:
                exponent += 1
            scale = 1.0 if largest == 0 else 2.0**exponent
            decoded += [math.copysign(nearest(abs(x) / scale) * scale, x) for x in block]
    return decoded


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int, log2_scale: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
    spread = torch.randint(-14, 15, shape, generator=generator)  # far apart, so that small ones lose bits
    limit = torch.finfo(dtype).max
    return (tensor * 2.0 ** (spread + log2_scale)).clamp(-limit, limit).to(dtype)


@given(
    shape=SHAPES,
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
    log2_scale=st.sampled_from([-149, -130, -124, -20, 0, 10, 126]),
)
@settings(max_examples=60)
def test_every_element_is_the_nearest_number_of_its_block(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, log2_scale: int
) -> None:
    tensor = random_tensor(shape, dtype, seed, log2_scale)
    payload = encode_float8(tensor, "w")
    assert payload.dtype == torch.uint8 and payload.shape == (payload_size(shape),)
    decoded = decode_float8(payload, shape, torch.float32)
    assert decoded.shape == shape
    limit = torch.finfo(torch.float32).max
    expected = torch.tensor(reference(tensor), dtype=torch.float64).clamp(-limit, limit)
    torch.testing.assert_close(decoded.double().reshape(-1), expected, rtol=0, atol=0)  # powers of two round nothing


@given(shape=SHAPES, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**32), log2_scale=st.integers(-130, 110))
@settings(max_examples=60)
def test_the_error_is_within_the_bound_that_the_module_states(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, log2_scale: int
) -> None:
    tensor = random_tensor(shape, dtype, seed, log2_scale)
    decoded = decode_float8(encode_float8(tensor, "w"), shape, torch.float32).double()
    num_columns = shape[-1] if shape else 1
    for row, decoded_row in zip(
        tensor.double().reshape(-1, max(1, num_columns)), decoded.reshape(-1, max(1, num_columns)), strict=True
    ):
        for block, decoded_block in zip(row.split(BLOCK), decoded_row.split(BLOCK), strict=True):
            if block.numel():
                scale = max(block.abs().max().item() / 224, 2.0**-124)
                bound = torch.maximum(block.abs() / 16, torch.tensor(scale / 1024, dtype=torch.float64))
                assert torch.all((decoded_block - block).abs() <= bound)


@given(
    shape=SHAPES,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32),
    log2_scale=st.sampled_from([-149, -126, -20, 0, 126]),
)
@settings(max_examples=60)
def test_a_decoded_tensor_decodes_to_itself(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, log2_scale: int
) -> None:
    payload = encode_float8(random_tensor(shape, torch.float32, seed, log2_scale), "w")
    decoded = decode_float8(payload, shape, dtype)
    assert torch.equal(decode_float8(encode_float8(decoded, "w"), shape, dtype), decoded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [-6, 0, 7])
def test_numbers_of_float8_times_a_power_of_two_come_back_exactly(dtype: torch.dtype, exponent: int) -> None:
    numbers = torch.tensor([*NUMBERS, *(-n for n in NUMBERS)], dtype=torch.float64)
    tensor = (numbers * 2.0**exponent).to(dtype)[:, None].expand(-1, 3).clone()
    tensor[:, 2] = 448 * 2.0**exponent  # sets the scale of the row
    decoded = decode_float8(encode_float8(tensor, "w"), tensor.shape, dtype)
    assert torch.equal(decoded.view(torch.uint8), tensor.view(torch.uint8)), "to the sign of zero"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_of_a_dtype_saturate(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    tensor = torch.tensor([[limit, -limit, 0.0]], dtype=dtype)
    decoded = decode_float8(encode_float8(tensor, "w"), tensor.shape, dtype)
    assert torch.equal(decoded, tensor)


def test_a_block_whose_largest_element_rounds_down_to_a_smaller_scale_still_decodes_to_itself() -> None:
    tensor = torch.tensor([[225.0, 2.0**-9, 3 * 2.0**-9]])  # scale 1; decoded, 224 is the largest, and the scale 1/2
    payload = encode_float8(tensor, "w")
    decoded = decode_float8(payload, tensor.shape, torch.float32)
    assert decoded.tolist() == [[224.0, 2.0**-9, 3 * 2.0**-9]]
    again = encode_float8(decoded, "w")
    assert not torch.equal(again, payload)
    assert torch.equal(decode_float8(again, tensor.shape, torch.float32), decoded)


def test_blocks_do_not_cross_rows() -> None:
    tensor = torch.full((2, 3), 1e-6)
    tensor[0] = 1e6
    decoded = decode_float8(encode_float8(tensor, "w"), tensor.shape, torch.float32)
    torch.testing.assert_close(decoded, tensor, rtol=1 / 16, atol=0)


def test_chunks_of_a_large_tensor_are_put_together_in_order() -> None:
    tensor = torch.randn(3000, 200, generator=torch.Generator().manual_seed(0))
    whole = decode_float8(encode_float8(tensor, "w"), tensor.shape, torch.bfloat16)
    for row in (0, 1309, 1310, 1311, 2999):
        alone = decode_float8(encode_float8(tensor[row], "w"), (200,), torch.bfloat16)
        assert torch.equal(whole[row], alone)


def test_a_view_that_is_not_contiguous_is_encoded_by_its_elements() -> None:
    tensor = torch.randn(130, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(encode_float8(tensor.T, "w"), encode_float8(tensor.T.contiguous(), "w"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 200, 399])
def test_a_tensor_that_is_not_finite_is_refused_by_name(dtype: torch.dtype, bad: float, place: int) -> None:
    tensor = torch.ones(2, 200, dtype=dtype)
    tensor.view(-1)[place] = bad
    with pytest.raises(NonFiniteError, match=r"model\.w"):
        encode_float8(tensor, "model.w")


def test_damaged_payloads_are_refused() -> None:
    shape = (3, 130)
    payload = encode_float8(torch.ones(shape), "w")
    for cut in (payload[:-1], payload[:0], torch.cat([payload, payload[:1]])):
        with pytest.raises(TransferError, match="bytes"):
            decode_float8(cut, shape, torch.bfloat16)
    for code in (0x7F, 0xFF):
        with_nan = payload.clone()
        with_nan[200] = code
        with pytest.raises(TransferError, match="NaN"):
            decode_float8(with_nan, shape, torch.bfloat16)
    for scale in (0.0, -1.0, math.nan, math.inf, 1e-40):
        with_scale = payload.clone()
        with_scale[-4:] = torch.tensor([scale]).view(torch.uint8)
        with pytest.raises(TransferError, match="scale"):
            decode_float8(with_scale, shape, torch.bfloat16)


def test_a_payload_anywhere_in_a_buffer_decodes_and_is_not_written() -> None:
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    payload = encode_float8(tensor, "w")
    for offset in range(5):
        buffer = torch.zeros(payload.numel() + offset, dtype=torch.uint8)
        buffer[offset:] = payload
        before = buffer.clone()
        decoded = decode_float8(buffer[offset:], tensor.shape, torch.float32)
        assert torch.equal(decoded, decode_float8(payload, tensor.shape, torch.float32))
        assert torch.equal(buffer, before)

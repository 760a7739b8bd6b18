"""Checksums: of known bytes, of every byte, and without a copy."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from inflight.weights.checksums import checksum


def test_the_checksum_is_xxh3_128_in_hexadecimal() -> None:
    # Of the empty input: https://github.com/Cyan4973/xxHash/blob/dev/cli/xsum_sanity_check.c, XXH128 with seed 0.
    assert checksum(torch.empty(0, dtype=torch.uint8)) == "99aa06d3014798d86001c324468d497f"
    assert len(checksum(torch.arange(100, dtype=torch.uint8))) == 32


def test_every_bit_counts() -> None:
    flat = torch.arange(257, dtype=torch.int32).to(torch.uint8)
    sums = {checksum(flat)}
    for i in range(flat.numel()):
        flat[i] ^= 1
        sums.add(checksum(flat))
        flat[i] ^= 1
    assert len(sums) == 1 + flat.numel()


def test_a_view_of_a_larger_buffer_has_the_checksum_of_its_own_bytes() -> None:
    buffer = torch.arange(200, dtype=torch.uint8)
    assert checksum(buffer[3:150]) == checksum(buffer[3:150].clone())


def test_the_bytes_are_not_copied() -> None:
    flat = torch.zeros(1 << 22, dtype=torch.uint8)
    tracemalloc.start()
    try:
        checksum(flat)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 16


def test_bytes_with_gaps_are_refused() -> None:
    with pytest.raises((BufferError, ValueError)):
        checksum(torch.zeros(10, dtype=torch.uint8)[::2])

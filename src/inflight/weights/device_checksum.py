"""The checksum of bytes that travel from GPU to GPU, computed where they lie: on any device, with the same result.

The bytes, filled up with zeros, are little-endian 64-bit words w(i). With all arithmetic modulo 2^64, one lane is the
sum of w(i) G1^i and the other of (w(i) + (w(i) >> 32)) G2^i, where >> keeps the sign; the number of bytes times the
lane's G is added to each.

Any change within one word is found: G is odd. So is any exchange of two words among 2^31: since G is 5 modulo 8, 2 to
the power of 2 + k divides G^a - G^b exactly if 2^k divides a - b exactly (lifting the exponent), and one of the lanes
has terms that differ by no more than 31 twos. Other damage is missed with a probability of about 2^-128. It does
not prove who sent the bytes.
"""

from __future__ import annotations

import functools

import torch

from inflight.weights.packing import checksum, require_bytes

_PREFIX = "words64:"
_ODD = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4D)
"""G1 and G2: 5 modulo 8, otherwise without meaning."""
_ROW = 1 << 16
"""Words between two multipliers that are not taken from the table."""
_NUM_ROWS = 128
"""Rows at a time, which bounds the memory for products to that of one bucket of the usual size."""
_MODULUS = 1 << 64


def checksum_as(announced: str, flat: torch.Tensor) -> str:
    """Return the checksum of the bytes, uint8 [size], of the kind that was announced. Raises as `words64` does."""
    return words64(flat) if announced.startswith(_PREFIX) else checksum(flat)


def words64(flat: torch.Tensor) -> str:
    """Return the checksum of the bytes, uint8 [size], computed on their own device: ``words64:`` and 32 hex digits.

    Waits for the device. Raises `TransferError` for a tensor without bytes.
    """
    require_bytes(flat)
    num_words, num_odd_bytes = divmod(flat.numel(), 8)
    whole = flat[: 8 * num_words]
    if whole.storage_offset() % 8 or whole.data_ptr() % 8:
        whole = whole.clone()
    words = whole.view(torch.int64)
    last = torch.zeros(8, dtype=torch.uint8, device=flat.device)
    last[:num_odd_bytes] = flat[8 * num_words :]
    last_word = last.view(torch.int64)
    lanes = [_lane(words, last_word, odd, folds=lane == 1) for lane, odd in enumerate(_ODD)]
    sums: list[int] = torch.stack(lanes).tolist()
    return _PREFIX + "".join(
        f"{(found + flat.numel() * odd) % _MODULUS:016x}" for found, odd in zip(sums, _ODD, strict=True)
    )


def _lane(words: torch.Tensor, last: torch.Tensor, odd: int, *, folds: bool) -> torch.Tensor:
    """Return one lane's sum, int64 []: of each row with the table's multipliers, then of the rows with their own."""
    table = _powers(odd, _ROW, words.device)
    num_rows = words.numel() // _ROW
    body = words[: num_rows * _ROW].view(num_rows, _ROW)
    pieces = (body[start : start + _NUM_ROWS] for start in range(0, num_rows, _NUM_ROWS))
    rows = [(_folded(piece, folds) * table).sum(1) for piece in pieces]
    rest = _folded(torch.cat([words[num_rows * _ROW :], last]), folds)
    rows.append((rest * table[: rest.numel()]).sum().reshape(1))
    multipliers = _powers(pow(odd, _ROW, _MODULUS), _power_of_two(num_rows + 1), words.device)
    return (torch.cat(rows) * multipliers[: num_rows + 1]).sum()


def _folded(words: torch.Tensor, folds: bool) -> torch.Tensor:
    return words + (words >> 32) if folds else words


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


@functools.lru_cache(maxsize=64)
def _powers(odd: int, count: int, device: torch.device) -> torch.Tensor:
    """Return odd^0, odd^1, ... modulo 2^64 as int64 [count]. Made on the CPU: no other stream has to wait for it."""
    powers = torch.ones(1, dtype=torch.int64)
    while powers.numel() < count:
        powers = torch.cat([powers, powers * _signed(pow(odd, powers.numel(), _MODULUS))])
    return powers[:count].to(device)


def _signed(value: int) -> int:
    return value - _MODULUS if value >= _MODULUS // 2 else value

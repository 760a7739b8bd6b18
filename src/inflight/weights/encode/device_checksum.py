"""The checksum of bytes that travel from GPU to GPU, computed where they lie: on any device, with the same result.

The bytes, filled up with zeros, are little-endian 64-bit words w(0), w(1), ... Modulo 2^64, the device adds up each row
of 4096 words, and for each residue modulo 4099 the words whose index has it. The checksum is the XXH3-128 of the number
of bytes, the sums of the rows and those of the residues, which are few enough for the host.

The sums always differ after
- any change of words within 32 KiB, and so after any flipped bit: 4096 words in succession have different residues;
- any exchange of two unequal words: words of one residue are in different rows;
- any exchange of two unequal blocks of up to 4096 words, unless a multiple of 4099 words lies between their
  beginnings: 4099 is a prime, so a difference of blocks that moved by another distance never cancels.

Other damage is missed only if it leaves every one of these sums as it was. No checksum of this kind proves who sent the
bytes.
"""

from __future__ import annotations

import torch
import xxhash

from inflight.weights.encode.bucket_bytes import checksum, on_host, require_bytes

_PREFIX = "sums64:"
_ROW = 4096
_PRIME = 4099
_NUM_ROWS = {"cpu": 64, "cuda": 512}
"""Rows that are added up before the next: few enough for a cache, since each byte is read twice; many enough for a GPU,
where each of the two readings is one kernel. Another number gives the same sums."""


def checksum_as(announced: str, flat: torch.Tensor) -> str:
    """Return the checksum of the bytes, uint8 [size], of the kind that was announced. Raises as `sums64` does."""
    return sums64(flat) if announced.startswith(_PREFIX) else checksum(flat)


def sums64(flat: torch.Tensor) -> str:
    """Return the checksum of the bytes, uint8 [size], computed on their own device: ``sums64:`` and 32 hex digits.

    Waits for the device. Raises `TransferError` for a tensor without bytes.
    """
    require_bytes(flat)
    sums = on_host(_sums(flat)).numpy()
    return _PREFIX + xxhash.xxh3_128_hexdigest(flat.numel().to_bytes(8, "little") + sums.tobytes())


def _sums(flat: torch.Tensor) -> torch.Tensor:
    """Return the sums of the rows, of which the last may be short, and those of the residues, int64."""
    num_words, num_odd_bytes = divmod(flat.numel(), 8)
    last = torch.zeros(8, dtype=torch.uint8, device=flat.device)
    last[:num_odd_bytes] = flat[8 * num_words :]
    whole = flat[: 8 * num_words]
    if whole.storage_offset() % 8 or whole.data_ptr() % 8:
        whole = whole.clone()
    words, last_word = whole.view(torch.int64), last.view(torch.int64)
    residues = torch.zeros(_PRIME, dtype=torch.int64, device=flat.device)
    rows = []
    num_rows = _NUM_ROWS.get(flat.device.type, 1)
    for start in range(0, num_words // _ROW, num_rows):
        rows.append(_whole_rows(words, _ROW, start, num_rows).sum(1))
        residues += _whole_rows(words, _PRIME, start, num_rows).sum(0)
    rows.append(torch.cat([words[num_words - num_words % _ROW :], last_word]).sum().reshape(1))
    rest = torch.cat([words[num_words - num_words % _PRIME :], last_word])
    residues[: rest.numel()] += rest
    return torch.cat([*rows, residues])


def _whole_rows(words: torch.Tensor, width: int, start: int, num_rows: int) -> torch.Tensor:
    part = words[start * width : (start + num_rows) * width]
    return part[: part.numel() - part.numel() % width].view(-1, width)

"""The checksum of a bucket's bytes: it tells damage on the way from what was sent, and is no proof of who sent it."""

from __future__ import annotations

import torch
import xxhash

from inflight.errors import TransferError


def checksum(flat: torch.Tensor) -> str:
    """Return the XXH3-128 of the bytes as 32 hexadecimal digits; uint8 [size], contiguous, on any device.

    Bytes on the host are not copied, and other threads run meanwhile. Raises `TransferError` for a tensor that has no
    bytes.
    """
    return xxhash.xxh3_128_hexdigest(on_host(flat).numpy().data)


def on_host(flat: torch.Tensor) -> torch.Tensor:
    """Return the bytes on the host, no copy if they are there already.

    Raises `TransferError` for a tensor that has no bytes, such as one on the meta device or of a `FakeTensorMode`.
    """
    host = flat if flat.is_meta else flat.cpu()
    if host.is_meta or type(host) is not torch.Tensor:
        what = f"{type(flat).__name__} on {flat.device}"
        raise TransferError(f"a bucket's {flat.numel()} bytes cannot be read: {what} has none; gather real tensors")
    return host

"""Digests of weights on disk that do not depend on how the weights are split into files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError

_CHUNK_BYTES = 1 << 24
_MAX_HEADER_BYTES = 1 << 27


def weights_digest(directory: Path) -> tuple[str, int]:
    """Return the SHA-256 digest of the weights in a model directory, and their size in bytes.

    For each tensor, in the order of names, the digest covers one line of JSON with its name, dtype and shape as in the
    safetensors header, and then the tensor's bytes. Raises `ConfigError` if a file cannot be read.
    """
    places: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        places |= _tensors_in(path)
    digest, num_bytes = hashlib.sha256(), 0
    for name in sorted(places):
        path, start, entry = places[name]
        digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode() + b"\n")
        begin, end = entry["data_offsets"]
        with path.open("rb") as file:
            file.seek(start + begin)
            left = end - begin
            while left:
                chunk = file.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    raise ConfigError(f"{str(path)!r} is truncated: it ends inside tensor {name}")
                digest.update(chunk)
                left -= len(chunk)
        num_bytes += end - begin
    return digest.hexdigest(), num_bytes


def _tensors_in(path: Path) -> dict[str, tuple[Path, int, dict[str, Any]]]:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(min(size, _MAX_HEADER_BYTES)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} is not a safetensors file: {error}") from error
    return {name: (path, 8 + size, entry) for name, entry in header.items() if name != "__metadata__"}

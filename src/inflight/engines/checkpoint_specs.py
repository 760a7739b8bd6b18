"""Which tensors a checkpoint directory holds, read from the headers of its safetensors files. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError
from inflight.wire import TensorSpec

_MAX_HEADER_BYTES = 100_000_000  # the bound that safetensors itself keeps


def tensor_specs_of(directory: Path, dtype: str) -> tuple[TensorSpec, ...]:
    """Return names and shapes of a checkpoint's tensors as they travel in ``dtype``, a wire dtype.

    Raises `ConfigError` if the directory has no safetensors, or if a file's header cannot be read.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model directory {str(directory)!r} has no *.safetensors; other weight formats are not read")
    shapes = {name: entry["shape"] for file in files for name, entry in _header(file).items() if name != "__metadata__"}
    return tuple(
        TensorSpec.model_validate({"name": name, "dtype": dtype, "shape": tuple(shape)})
        for name, shape in shapes.items()
    )


def _header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            size_bytes = int.from_bytes(stream.read(8), "little")
            if size_bytes > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {size_bytes} bytes")
            header: dict[str, Any] = json.loads(stream.read(size_bytes))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} is no safetensors file: {error}") from error
    return header

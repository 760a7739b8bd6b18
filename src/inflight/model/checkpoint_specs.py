"""A model's sizes and tensors, read from a checkpoint's config and file headers. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError
from inflight.model.untrusted import name_of_file_beside
from inflight.wire import DTYPE_SIZES, TensorSpec

_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself


def config_of(directory: Path) -> Mapping[str, Any]:
    """Return the ``config.json`` of a checkpoint directory; empty if it cannot be read."""
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def config_number(config: Mapping[str, Any], key: str) -> int | None:
    """Return a number that a ``config.json`` states for the model or its text part; None if it states none."""
    try:
        return int(config.get(key) or config["text_config"][key])
    except (KeyError, TypeError, ValueError):
        return None


def checkpoint_of(url: str, directory: Path, dtype: str) -> tuple[int, tuple[TensorSpec, ...] | None]:
    """Return the vocabulary size of the model that the server at ``url`` serves in ``dtype``, and the model's tensors.

    The tensors are None if the checkpoint's ``directory`` does not exist here; the engine then refuses wrong tensors
    itself. Raises `ConfigError` if the dtype is not supported, or the vocabulary size or the tensors cannot be read.
    """
    if dtype not in DTYPE_SIZES:
        raise ConfigError(
            f"{url}: the model is served in {dtype}, which is not supported; supported: {', '.join(DTYPE_SIZES)}"
        )
    vocab_size = config_number(config_of(directory), "vocab_size")
    if vocab_size is None:
        raise ConfigError(
            f"{url}: the vocabulary size cannot be read from {str(directory / 'config.json')!r}; pass the path of "
            "the server's checkpoint as this process sees it"
        )
    return vocab_size, tensor_specs_of(directory, dtype) if directory.is_dir() else None


def tensor_specs_of(directory: Path, dtype: str) -> tuple[TensorSpec, ...]:
    """Return the specs of a checkpoint's tensors as they are sent in the wire dtype ``dtype``.

    If there is an index, files that it does not list are ignored. Raises `ConfigError` if the directory has no
    safetensors files, or if a file's header cannot be read.
    """
    files = sorted(directory.glob("*.safetensors"))
    if listed := _listed_in_the_index(directory):
        files = [directory / name for name in sorted(listed)]
    if not files:
        raise ConfigError(
            f"model directory {str(directory)!r} has no *.safetensors files; other weight formats are not supported"
        )
    shapes = {name: entry["shape"] for file in files for name, entry in _header(file).items() if name != "__metadata__"}
    return tuple(
        TensorSpec.model_validate({"name": name, "dtype": dtype, "shape": tuple(shape)})
        for name, shape in shapes.items()
    )


def _listed_in_the_index(directory: Path) -> set[str]:
    """Return the names of the files in a checkpoint's index; empty if it has no index."""
    try:
        return {
            name_of_file_beside(name) for name in json.loads((directory / _INDEX).read_text())["weight_map"].values()
        }
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{str(directory / _INDEX)!r} cannot be read: {error}") from error


def _header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            size_bytes = int.from_bytes(stream.read(8), "little")
            if size_bytes > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {size_bytes} bytes")
            header: dict[str, Any] = json.loads(stream.read(size_bytes))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} is not a safetensors file: {error}") from error
    return header

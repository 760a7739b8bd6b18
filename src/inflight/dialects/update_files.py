"""Checks of an update's directory before any of its files is opened, and of a LoRA before it is sent to an endpoint."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from inflight.base.shortened import shortened
from inflight.errors import ConfigError, InvalidRequestError
from inflight.model.checkpoints import stored_tensors
from inflight.weights.encode.buckets import manifest_difference
from inflight.weights.encode.lora_tensors import changed_names
from inflight.wire import Manifest, TensorSpec

_INDEX, _ADAPTER_CONFIG = "model.safetensors.index.json", "adapter_config.json"
_READ = ("config.json", _INDEX, _ADAPTER_CONFIG)
"""The files that are read in addition to those whose names end with ``.safetensors``."""
Stamp = tuple[str, tuple[tuple[str, str, int, int], ...]]


def directory_below(root: Path, path: str) -> Path:
    """Return a directory below ``root``, which is resolved, after following symbolic links.

    Raises `InvalidRequestError`.
    """
    directory = _resolved(root / path, repr(path))
    if not directory.is_relative_to(root) or not directory.is_dir():
        raise InvalidRequestError(
            f"{path!r} is not a directory below {str(root)!r}, the only directory from which this server reads "
            "updates (--directory); symbolic links are followed"
        )
    return directory


def check_files(directory: Path, root: Path) -> Stamp:
    """Check all files that an update from ``directory`` would read, and return a value that changes when one of them is
    rewritten.

    No file is opened. Raises `InvalidRequestError` for a file that, after following symbolic links, is missing, outside
    ``root`` or not a regular file, and for several safetensors files without an index.
    """
    try:
        names = sorted(name for name in os.listdir(directory) if name in _READ or name.endswith(".safetensors"))
    except OSError as error:
        raise InvalidRequestError(f"{str(directory)!r} cannot be read by this process: {error}") from error
    found = []
    for name in names:
        file = directory / name
        target = _resolved(file, repr(str(file)))
        if not target.is_relative_to(root):
            raise InvalidRequestError(
                f"{str(file)!r} is a symbolic link to a file outside {str(root)!r}, the only directory from which this "
                "server reads updates (--directory); copy the file instead of linking to it"
            )
        try:
            status = target.stat()
        except OSError as error:
            raise InvalidRequestError(f"{str(file)!r} cannot be read by this process: {error}") from error
        if not stat.S_ISREG(status.st_mode):
            raise InvalidRequestError(f"{str(file)!r} is not a regular file; replace it with the checkpoint's file")
        found.append((name, str(target), status.st_size, status.st_mtime_ns))
    shards = [name for name in names if name not in _READ]
    if len(shards) > 1 and _INDEX not in names:
        raise InvalidRequestError(
            f"{str(directory)!r} has {len(shards)} safetensors files but no {_INDEX}, so it may be incomplete: "
            f"{shortened(shards)}; request the update again once the index has been written"
        )
    return str(directory), tuple(found)


def check_adapter(directory: Path, manifest: Manifest, model: Sequence[TensorSpec]) -> None:
    """Raise `ConfigError` unless the LoRA in ``directory``, which ``manifest`` describes, can be applied.

    It must consist of complete pairs of matrices that have its rank, fit the tensors of ``model``, and belong to the
    modules that its configuration names.
    """
    where = f"the LoRA in {str(directory)!r}"
    if problem := manifest_difference(model, manifest):
        raise ConfigError(f"{where} cannot be used: {problem}")
    if odd := [name for name, tensor in stored_tensors(directory).items() if tensor.dtype is None]:
        raise ConfigError(f"{where} has tensors with a dtype that cannot be used: {shortened(odd)}")
    targets = json.loads((directory / _ADAPTER_CONFIG).read_text()).get("target_modules")
    if isinstance(targets, list):  # a string is a regular expression from the client, which is not evaluated
        modules = [name.removesuffix(".weight") for name in changed_names(manifest)]
        if stray := [name for name in modules if not any(f".{name}".endswith(f".{target}") for target in targets)]:
            raise ConfigError(
                f"{where} has modules that target_modules in its {_ADAPTER_CONFIG} does not name: {shortened(stray)}"
            )


def _resolved(path: Path, named: str) -> Path:
    try:
        return path.resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
        raise InvalidRequestError(f"{named} cannot be read by this process: {error}") from error

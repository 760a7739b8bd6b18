"""Checkpoints of a run: the workers' weights and optimizer, and the state that determines what is sampled next."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inflight.errors import CheckpointError, ConfigError

_LATEST = "latest.json"


def checkpoint_path(directory: Path, version: int) -> Path:
    """Return the directory of the workers' checkpoint of a version; the run's own state is in that path + ``.json``."""
    return directory / "checkpoints" / f"version-{version:06d}"


def finish_checkpoint(directory: Path, version: int, state: Mapping[str, Any], keep: int) -> None:
    """Write the run's state next to the saved weights, make both the latest checkpoint, and remove older ones.

    Raises `CheckpointError` if the state cannot be written; the previous checkpoint then remains the latest.
    """
    try:
        checkpoint_path(directory, version).with_suffix(".json").write_text(json.dumps(state))
        pointer = directory / "checkpoints" / _LATEST
        partial = pointer.with_suffix(".partial")
        partial.write_text(json.dumps({"version": version}))
        partial.replace(pointer)
    except OSError as error:
        raise CheckpointError(f"the run's state cannot be written to {directory}: {error.strerror}") from error
    versions = sorted(map(_version, (directory / "checkpoints").glob("version-*/")))
    for old in [v for v in versions if v < version][: -keep + 1 or None]:
        shutil.rmtree(checkpoint_path(directory, old), ignore_errors=True)
        checkpoint_path(directory, old).with_suffix(".json").unlink(missing_ok=True)


def latest_checkpoint(directory: Path) -> tuple[Path, dict[str, Any]] | tuple[None, None]:
    """Return the weights' directory and the run's state; None for both if there is no checkpoint.

    Raises `ConfigError` if the checkpoint cannot be read.
    """
    pointer = directory / "checkpoints" / _LATEST
    if not pointer.exists():
        return None, None
    try:
        version = json.loads(pointer.read_text())["version"]
        state: dict[str, Any] = json.loads(checkpoint_path(directory, version).with_suffix(".json").read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the checkpoint in {str(directory)!r} cannot be read: {error}") from error
    return checkpoint_path(directory, version), state


def remove_unfinished(directory: Path) -> None:
    """Remove incomplete checkpoints that a killed run left after its latest checkpoint."""
    latest, _ = latest_checkpoint(directory)
    for path in (directory / "checkpoints").iterdir():
        is_finished = latest is not None and path.name.startswith("version-") and _version(path) <= _version(latest)
        if path.name != _LATEST and not is_finished:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _version(path: Path) -> int:
    return int(path.stem.removeprefix("version-"))

"""Checkpoints of a run: the workers' weights and optimizer, and everything that decides what is sampled next."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inflight.errors import CheckpointError, ConfigError

_LATEST = "latest.json"


def checkpoint_path(directory: Path, version: int) -> Path:
    """Where the checkpoint of a version lives."""
    return directory / "checkpoints" / f"version-{version:06d}"


def state_path(directory: Path, version: int) -> Path:
    """Where the run's own state of a version lives."""
    return directory / "checkpoints" / f"version-{version:06d}.json"


def finish_checkpoint(directory: Path, version: int, state: Mapping[str, Any], keep: int) -> None:
    """Write the run's state beside the saved weights, make the pair the latest, and remove older ones.

    Raises `CheckpointError` if it cannot be written; the previous checkpoint is then still the latest.
    """
    try:
        state_path(directory, version).write_text(json.dumps(state))
        pointer = directory / "checkpoints" / _LATEST
        partial = pointer.with_suffix(".partial")
        partial.write_text(json.dumps({"version": version}))
        partial.replace(pointer)
    except OSError as error:
        raise CheckpointError(f"the run's state cannot be written to {directory}: {error.strerror}") from error
    versions = sorted(
        int(path.name.removeprefix("version-")) for path in (directory / "checkpoints").glob("version-*/")
    )
    for old in [v for v in versions if v < version][: -keep + 1 or None]:
        shutil.rmtree(checkpoint_path(directory, old), ignore_errors=True)
        state_path(directory, old).unlink(missing_ok=True)


def latest_checkpoint(directory: Path) -> tuple[Path, dict[str, Any]]:
    """Return the weights' directory and the run's state. Raises `ConfigError` if there is no checkpoint."""
    pointer = directory / "checkpoints" / _LATEST
    try:
        version = json.loads(pointer.read_text())["version"]
        state: dict[str, Any] = json.loads(state_path(directory, version).read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{str(directory)!r} has no checkpoint to resume from ({error.filename} is missing)"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the checkpoint in {str(directory)!r} cannot be read: {error}") from error
    return checkpoint_path(directory, version), state

"""Checkpoints of a run: the workers' weights and optimizer, and the state that determines what is sampled next."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from inflight.base.whole_files import write_whole
from inflight.errors import CheckpointError, ConfigError, InflightError
from inflight.model.checkpoints import check_weights
from inflight.model.checksums import check_checkpoint

_LATEST = "latest.json"
_NAME = re.compile(
    r"(\.latest\.json\.\d+\.partial)|\.?version-(?P<version>\d{6,})(\.json|\.json\.\d+\.partial|\.new|\.old)?"
)
"""The files that a run writes for checkpoints, except the pointer."""

_UNREADABLE = (OSError, ValueError, KeyError, TypeError)
"""The exceptions that reading a damaged state may raise."""


def checkpoint_path(directory: Path, version: int) -> Path:
    """Return the directory of the workers' checkpoint of a version.

    The run's own state is in the file next to it with the suffix ``.json``.
    """
    return directory / "checkpoints" / f"version-{version:06d}"


def finish_checkpoint(directory: Path, version: int, state: Mapping[str, Any], keep: int) -> None:
    """Write the run's state next to the saved weights, make both the latest checkpoint, and remove older ones.

    Raises `CheckpointError` if the state cannot be written; the previous checkpoint then remains the latest.
    """
    try:
        write_whole(checkpoint_path(directory, version).with_suffix(".json"), json.dumps(state))
        write_whole(directory / "checkpoints" / _LATEST, json.dumps({"version": version}))
    except OSError as error:
        raise CheckpointError(f"the run's state cannot be written to {directory}: {error.strerror}") from error
    for old in [v for v in _saved_versions(directory) if v < version][: -keep + 1 or None]:
        shutil.rmtree(checkpoint_path(directory, old), ignore_errors=True)
        checkpoint_path(directory, old).with_suffix(".json").unlink(missing_ok=True)


def latest_checkpoint(directory: Path) -> tuple[Path, dict[str, Any]] | tuple[None, None]:
    """Return the directory of the weights and the run's state, or None for both if there is no checkpoint.

    Raises `ConfigError` if the checkpoint cannot be read.
    """
    pointer = directory / "checkpoints" / _LATEST
    if not pointer.exists():
        if _finished_versions(directory):
            raise ConfigError(f"{str(pointer)!r} is missing, but there are checkpoints. {intact_checkpoint(directory)}")
        return None, None
    version = None
    try:
        version = json.loads(pointer.read_text())["version"]
        state = _read_state(directory, version)
    except _UNREADABLE as error:
        raise ConfigError(
            f"the checkpoint in {str(directory)!r} cannot be read: {error}. {intact_checkpoint(directory, version)}"
        ) from error
    return checkpoint_path(directory, version), state


def intact_checkpoint(directory: Path, damaged: int | None = None) -> str:
    """Return advice about a ``damaged`` checkpoint: the newest intact checkpoint, and how to use it."""
    for version in reversed(_finished_versions(directory)):
        if version == damaged:
            continue
        path = checkpoint_path(directory, version)
        try:
            _read_state(directory, version)
            check_weights(path)
            check_checkpoint(path)
        except (InflightError, *_UNREADABLE):
            continue
        return (
            f"The checkpoint of version {version} is intact: to continue from it, write "
            f'{{"version": {version}}} to {str(directory / "checkpoints" / _LATEST)!r}, and resume'
        )
    return "No other checkpoint is intact: restore one from a copy, or choose another directory with --run.directory"


@contextlib.contextmanager
def offer_intact_checkpoint(directory: Path, checkpoint: Path | None) -> Iterator[None]:
    """If the body finds that the run's ``checkpoint`` is damaged, name an intact checkpoint in the error."""
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        if checkpoint is not None:
            error.add_note(intact_checkpoint(directory, _version(checkpoint)))
        raise


def _read_state(directory: Path, version: int) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(checkpoint_path(directory, version).with_suffix(".json").read_text())
    if state["version"] != version:
        raise ValueError(f"version-{version:06d}.json has the state of version {state['version']}")
    return state


def _is_readable(directory: Path, version: int) -> bool:
    with contextlib.suppress(*_UNREADABLE):
        return bool(_read_state(directory, version))
    return False


def _finished_versions(directory: Path) -> list[int]:
    """Return the versions that have both weights and a file with the run's state."""
    saved = _saved_versions(directory)
    return [version for version in saved if checkpoint_path(directory, version).with_suffix(".json").is_file()]


def _saved_versions(directory: Path) -> list[int]:
    """Return the versions that have weights."""
    found = (directory / "checkpoints").glob("version-*/")
    return sorted(_version(path) for path in found if _NAME.fullmatch(path.name))


def remove_unfinished(directory: Path) -> None:
    """Remove incomplete checkpoints that a killed run left behind after its latest checkpoint.

    Later checkpoints that are complete, which exist if the user has gone back to an earlier one, are renamed instead.
    Files with other names are left alone.
    """
    latest, _ = latest_checkpoint(directory)
    finished = {version for version in _finished_versions(directory) if _is_readable(directory, version)}
    unused = f"unused-{time.time_ns()}-"
    for path in (directory / "checkpoints").iterdir():
        named = _NAME.fullmatch(path.name)
        if named is not None and named["version"] is not None:
            version = int(named["version"])
            if latest is not None and version <= _version(latest) and not path.name.startswith("."):
                continue
            if version in finished and not path.name.startswith("."):
                path.rename(path.with_name(unused + path.name))
                continue
        if named is not None:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _version(path: Path) -> int:
    return int(path.stem.removeprefix("version-"))

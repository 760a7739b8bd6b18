"""Output files that a user requests, which are checked before the work begins and written when it ends."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inflight.base.whole_files import write_whole
from inflight.errors import ConfigError


def check_writable(files: Mapping[str, Path | None]) -> None:
    """Raise `ConfigError` unless each of these files, keyed by command-line option, can be written."""
    given = {name: file for name, file in files.items() if file is not None}
    for name, file in given.items():
        where = f"--{name} {str(file)!r} cannot be written"
        if not file.parent.is_dir():
            raise ConfigError(f"{where}: its directory does not exist; create it first")
        if file.is_dir():
            raise ConfigError(f"{where}: it is a directory")
        if not os.access(file.parent, os.W_OK):
            raise ConfigError(f"{where}: you have no permission to write to its directory")
        if others := [other for other in given if other != name and given[other].absolute() == file.absolute()]:
            raise ConfigError(f"{where}: --{others[0]} names the same file")


def write_json(file: Path | None, values: Any) -> None:
    """Write values as JSON to a file atomically; without a file, do nothing. Raises `ConfigError`."""
    if file is None:
        return
    write_output(file, json.dumps(values, indent=2) + "\n")


def write_output(file: Path, text: str) -> None:
    """Write a file atomically. If `ConfigError` is raised, the previous file is still complete."""
    try:
        write_whole(file, text)
    except OSError as error:
        raise ConfigError(f"{str(file)!r} cannot be written: {error.strerror}") from error

"""Finds the settings that have changed since a run was last started, and the changes that prevent continuing it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inflight.base.whole_files import write_whole
from inflight.errors import ConfigError

_CONFIG = "config.json"
_FIXED = ("task.name", "run.seed")
"""Settings that may not change, because the ledger numbers the items of one task under one seed."""
_OF_PROMPTS = ("task.params", "task.prompt_template", "task.system_prompt", "model.path")
"""Settings that change prompts; if one of them has changed, partial completions cannot be continued."""
_MAX_VALUE = 60


def changed_settings(path: Path, config_json: str) -> dict[str, tuple[Any, Any]]:
    """Return the old and the new value of each setting that differs from the ``config.json`` in a run directory.

    Raises `ConfigError` if the run cannot be continued with the new values.
    """
    try:
        before = _flat(json.loads((path / _CONFIG).read_text()))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{str(path / _CONFIG)!r}, the settings with which the run was started, cannot be read: {error}. Restore "
            "it from a copy, or write the settings again"
        ) from error
    now = _flat(json.loads(config_json))
    changes = {key: (before[key], now[key]) for key in now if key in before and before[key] != now[key]}
    if fixed := [describe_change(key, changes[key]) for key in _FIXED if key in changes]:
        raise ConfigError(
            f"the run in {str(path)!r} cannot be continued with different values of these settings: "
            f"{'; '.join(fixed)}. Restore them, or start a new run from its weights with model.path and another "
            "run.directory"
        )
    return changes


def write_config(path: Path, config_json: str) -> None:
    """Write ``config.json``."""
    write_whole(path / _CONFIG, config_json + "\n")


def without_partials(state: Mapping[str, Any], changes: Mapping[str, tuple[Any, Any]]) -> Mapping[str, Any]:
    """Return the state of a run without the completions that cannot be continued after these changes."""
    return {**state, "partials": {}} if "partials" in state and not changes.keys().isdisjoint(_OF_PROMPTS) else state


def describe_change(key: str, values: tuple[Any, Any]) -> str:
    """Return a change as text."""
    old, new = (text if len(text := repr(it)) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}..." for it in values)
    return f"{key} {old} -> {new}"


def _flat(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of all sections as one table, under ``section.field``."""
    return {f"{section}.{key}": value for section, fields in settings.items() for key, value in fields.items()}

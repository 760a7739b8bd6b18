"""Settings: models that refuse unknown keys, read from TOML, with overrides from a command line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from inflight.base.validation import describe_problems
from inflight.errors import ConfigError

MAX_NUMBER = 1e12
"""Maximum magnitude of a setting other than a seed. No count, size or rate needs more, and float64 represents every
integer up to it.
"""
_MAX_BYTES = 16 << 20
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
MAX_DURATION_S = 7 * 24 * 3600
"""Maximum duration in a setting, in seconds. It is also the maximum in messages, and system clocks can represent it."""


class Section(BaseModel):
    """Base of all settings. It is immutable, and refuses unknown keys and numbers that are infinite or too large."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )

    @field_validator("*")
    @classmethod
    def _is_usable(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, Path) and (control := _CONTROL.search(str(value))):
            raise ValueError(f"a path may not contain the control character {control[0]!r}")
        name = info.field_name or ""
        most = 2**63 - 1 if name == "seed" else MAX_DURATION_S if name.endswith("_s") else MAX_NUMBER
        if isinstance(value, int | float) and abs(value) > most:
            unit = " seconds, a week" if most == MAX_DURATION_S else ""
            raise ValueError(f"Input should be at most {most:g}{unit}, in magnitude")
        return value


S = TypeVar("S", bound=BaseModel)


def load_settings(kind: type[S], path: Path, what: str, overrides: Sequence[str] = ()) -> S:
    """Return the settings in a TOML file, with overrides such as ``["--train.learning_rate", "1e-4"]``.

    Raises `ConfigError`, which calls the file ``what``, lists the first few invalid keys with their values, and
    suggests the nearest known key for an unknown one. Relative paths are relative to the current directory.
    """
    return check_settings(kind, with_overrides(read_toml(path, what), overrides), f"{what} {str(path)!r}")


def with_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply overrides as in `load_settings` to ``values``, and return them. Raises `ConfigError` if one is invalid."""
    for key, value in _pairs(overrides):
        _set(values, key, value)
    return values


def check_settings(kind: type[S], values: Mapping[str, Any], what: str) -> S:
    """Return the settings with these values. Raises `ConfigError`, whose text begins with ``what``."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(f"{what}: {describe_problems(error, kind)}") from error


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return the values in a TOML file. Raises `ConfigError`, which calls the file ``what``."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ConfigError(f"{what} {str(path)!r} is longer than {_MAX_BYTES >> 20} MB: it is not TOML")
        return tomllib.loads(content.decode())
    except OSError as error:
        raise ConfigError(f"{what} {str(path)!r} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigError(f"{what} {str(path)!r} is nested too deeply") from error
    except ValueError as error:  # a syntax error, a number of too many digits, bytes that are not UTF-8, or a NUL
        raise ConfigError(f"{what} {str(path)!r} is not valid TOML: {error}") from error


def _pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    words = iter(overrides)
    for flag in words:
        if not flag.startswith("--"):
            raise ConfigError(f"{flag!r} is not an override; write --section.field value")
        key, has_value, value = flag[2:].partition("=")
        found = value if has_value else next(words, None)
        if found is None:
            raise ConfigError(f"override {flag} has no value")
        yield key, found


def _set(values: dict[str, Any], key: str, text: str) -> None:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"override --{key}: {section!r} is a value, not a section")
    values[name] = value

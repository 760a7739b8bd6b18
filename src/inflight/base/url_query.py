"""Options in the query string of an endpoint's URL, for servers that do not report them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from inflight.errors import ConfigError

T = TypeVar("T")


def options_of_query(kind: type[T], query: str) -> T:
    """Parse ``key=value&...`` into a dataclass of options, all of which must have defaults. Raises `ConfigError`."""
    try:
        values = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError as error:
        raise ConfigError(f"?{query} cannot be parsed: {error}") from error
    return options_of(kind, values)


def options_of(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return a dataclass of options with the given values, which may be strings. Raises `ConfigError`."""
    defaults = kind()
    kinds: dict[str, type] = {it.name: type(getattr(defaults, it.name)) for it in fields(defaults)}  # type: ignore[arg-type]
    if unknown := sorted(set(values) - set(kinds)):
        raise ConfigError(f"unknown options {', '.join(unknown)}; known: {', '.join(kinds)}")
    try:
        return kind(**{name: kinds[name](value) for name, value in values.items()})
    except ValueError as error:
        raise ConfigError(f"an option cannot be used: {error}") from error

"""Extensions from other packages: installed under an entry point, or named as ``module:attribute``."""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from inflight.base.unknown_names import unknown_name
from inflight.errors import ConfigError


def check_reference(text: str) -> None:
    """Raise `ConfigError` unless the text has the form ``module:attribute``."""
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ConfigError(f"{text!r} is neither a URL nor module:function, such as mypackage.endpoint:connect")


def import_object(text: str) -> Any:
    """Return the object that ``module:attribute`` names. Raises `ConfigError`."""
    check_reference(text)
    try:
        return pkgutil.resolve_name(text)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{text!r} cannot be imported: {type(error).__name__}: {error}") from error


def resolve(text: str) -> Any:
    """Return the callable that ``module:attribute`` names. Raises `ConfigError`."""
    found = import_object(text)
    if not callable(found):
        raise ConfigError(f"{text!r} is a {type(found).__name__}, not a function")
    return found


def find_entry_points(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points in ``inflight.GROUP``, by name. Raises `ConfigError` if packages conflict over a name."""
    return _find_entry_points(group, tuple(sys.path))


@functools.cache  # the files of every installed package are read
def _find_entry_points(group: str, _path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=f"inflight.{group}"):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise ConfigError(f"two packages install {entry.name!r} in {group}: {other.value} and {entry.value}")
    return found


def load_installed(kind: str, group: str, name: str, also_known: tuple[str, ...] = ()) -> Any:
    """Return the object that an entry point refers to.

    Raises `ConfigError` if the name is unknown (the error lists the known names) or if the object cannot be loaded.
    """
    found = find_entry_points(group)
    if name not in found:
        raise ConfigError(unknown_name(kind, name, [*also_known, *sorted(found)]))
    try:
        return found[name].load()
    except (ImportError, AttributeError) as error:
        package = found[name].dist
        advice = f"; pip install 'inflight[{name}]'" if package is not None and package.name == "inflight" else ""
        raise ConfigError(f"{kind} {name!r} cannot be loaded: {error}{advice}") from error


def find_factory(kind: str, group: str, name: str, built_in: Mapping[str, Callable[..., object]]) -> Any:
    """Return the factory called ``name``: built in, installed or ``module:attribute``. Raises `ConfigError`."""
    if ":" in name:
        return resolve(name)
    return built_in.get(name) or load_installed(kind, group, name, (*built_in, "module:attribute"))


def make(
    protocols: Any,
    kind: str,
    group: str,
    name: str,
    arguments: Mapping[str, Any],
    params: Mapping[str, Any],
    built_in: Mapping[str, Callable[..., object]],
) -> Any:
    """Return the object that the factory called ``name`` creates from the caller's arguments and the user's parameters.

    The name is built in, installed, or ``module:attribute``. Raises `ConfigError` if there is no such factory, if it
    refuses its arguments, or if the result implements none of ``protocols`` (one protocol or a tuple).
    """
    factory = find_factory(kind, group, name, built_in)
    try:
        made = factory(**arguments, **params)
    except TypeError as error:
        raise ConfigError(f"{kind} {name!r} could not be created: {type(error).__name__}: {error}") from error
    if not isinstance(made, protocols):
        wanted = protocols if isinstance(protocols, tuple) else (protocols,)
        needs = ", or ".join(", ".join(sorted(one.__abstractmethods__)) for one in wanted)
        names = " or ".join(one.__name__ for one in wanted)
        raise ConfigError(f"{kind} {name!r} is a {type(made).__name__}, not a {names}: it needs {needs}")
    return made

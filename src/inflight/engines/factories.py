"""What is named as ``module:function``: its import, its keyword arguments, and the endpoints that factories make.

The factory of an endpoint takes a model directory and keyword arguments. It returns an `InferenceEndpoint` in this
process, or an awaitable or an async context manager of one.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from inflight.contracts import InferenceEndpoint
from inflight.errors import ConfigError


def check_reference(text: str) -> None:
    """Raise `ConfigError` unless the text has the form ``module:function``."""
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ConfigError(f"{text!r} is neither a URL nor module:function, as in mypackage.endpoint:connect")


def resolve(text: str) -> Any:
    """Return the function that ``module:function`` names. Raises `ConfigError`."""
    check_reference(text)
    module_name, _, name = text.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{text!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{text!r} is a {type(found).__name__}, not a function")
    return found


def keyword_arguments(pairs: Sequence[str], flag: str) -> dict[str, Any]:
    """Return what ``KEY=VALUE`` pairs say; a VALUE is JSON if it can be, else a string. Raises `ConfigError`."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, has_value, text = pair.partition("=")
        if not has_value or not key.isidentifier():
            raise ConfigError(f"{flag} {pair!r} is not KEY=VALUE, with a KEY that can name an argument")
        if key in options:
            raise ConfigError(f"{flag} {key} is given twice")
        options[key] = _value(text)
    return options


@contextlib.asynccontextmanager
async def made_endpoint(factory: str, model: Path, options: Mapping[str, Any]) -> AsyncIterator[InferenceEndpoint]:
    """Yield the endpoint that ``module:function`` makes; on the way out leave its context manager, if it is one.

    Whoever uses the endpoint calls its ``aclose``, before that. Raises `ConfigError` if the factory cannot be imported,
    does not take the options, or returns something else; whatever the factory raises passes through.
    """
    make = resolve(factory)
    with contextlib.suppress(ValueError):  # of a function that has no signature
        try:
            inspect.signature(make).bind(model, **options)
        except TypeError as error:
            given = ", ".join(options) or "none"
            raise ConfigError(
                f"{factory} cannot be called with a model directory and options ({given}): {error}"
            ) from error
    made = make(model, **options)
    if inspect.isawaitable(made):
        made = await made
    async with contextlib.AsyncExitStack() as stack:
        if hasattr(made, "__aenter__"):
            made = await stack.enter_async_context(made)
        if not isinstance(made, InferenceEndpoint):
            raise ConfigError(f"{factory} returned a {type(made).__name__}, which is no InferenceEndpoint")
        yield made


def _value(text: str) -> Any:
    """Return what JSON makes of the text, and the text itself if it is none."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # what Python reads beyond JSON, as NaN and 1e999, stays text
    except (ValueError, RecursionError):
        return text
    return value

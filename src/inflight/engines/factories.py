"""Endpoints created by a factory named ``module:function``, and the keyword arguments of the factory.

The factory receives a model directory and keyword arguments. It returns an `InferenceEndpoint` in this process, or an
awaitable or async context manager that provides one.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from inflight.base.extensions import resolve
from inflight.contracts import InferenceEndpoint
from inflight.errors import ConfigError


def keyword_arguments(pairs: Sequence[str], flag: str) -> dict[str, Any]:
    """Return ``KEY=VALUE`` pairs as a dict. A VALUE that is not valid JSON is a string. Raises `ConfigError`."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, has_value, text = pair.partition("=")
        if not has_value or not key.isidentifier():
            raise ConfigError(f"{flag} {pair!r} is not KEY=VALUE, where KEY is a valid argument name")
        if key in options:
            raise ConfigError(f"{flag} {key} is specified twice")
        options[key] = _value(text)
    return options


@contextlib.asynccontextmanager
async def open_endpoint(factory: str, model: Path, options: Mapping[str, Any]) -> AsyncIterator[InferenceEndpoint]:
    """Yield the endpoint that ``module:function`` creates. On exit, leave the factory's context manager, if any.

    The caller closes the endpoint with ``aclose`` before the exit. Raises `ConfigError` if the factory cannot be
    imported, does not accept the options, or returns something else. Errors raised by the factory propagate.
    """
    make = resolve(factory)
    with contextlib.suppress(ValueError):  # some functions have no signature
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
            raise ConfigError(f"{factory} returned a {type(made).__name__}, which is not an InferenceEndpoint")
        yield made


def _value(text: str) -> Any:
    """Return the value of a JSON text, or the text itself if it is not JSON."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # Python also reads NaN and 1e999, which are not JSON: they stay text
    except (ValueError, RecursionError):
        return text
    return value

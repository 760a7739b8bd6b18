"""Reading messages from request and response bodies: long ones in a thread, with short error texts.

Knows nothing of routes.
"""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Callable
from typing import Any, TypeVar

import pydantic

T = TypeVar("T")
Message = TypeVar("Message", bound=pydantic.BaseModel)

LONG_BODY_BYTES = 64 * 1024
"""Longer bodies are parsed in a thread; for shorter ones the thread would cost more than the parsing.

A parser holds the interpreter lock, some 15 ms for each MB, so a thread lets others run only between two bodies. The
bound of a body limits how long it stops the event loop.
"""

_MAX_LISTED = 100
"""Most problems of one body that are described; only unknown keys can be more."""
_MAX_SHOWN = 5
_MAX_VALUE = 80
_MAX_MESSAGE = 300

_values = reprlib.Repr()
_values.maxstring = _values.maxother = _values.maxlong = _MAX_VALUE


async def parsed(parse: Callable[[bytes], T], content: bytes) -> T:
    """Return ``parse(content)``, from a thread if the content is long."""
    if len(content) < LONG_BODY_BYTES:
        return parse(content)
    return await asyncio.to_thread(parse, content)


async def message_of(kind: type[Message], content: bytes) -> Message:
    """Return the message in a JSON body. Raises ``ValueError`` with the first few problems."""
    try:
        return await parsed(kind.model_validate_json, content)
    except pydantic.ValidationError as error:
        raise ValueError(problems_of(error)) from error


def problems_of(error: pydantic.ValidationError) -> str:
    """Return key, reason and value of the first few problems, in about 2,500 characters at most."""
    if error.error_count() > _MAX_LISTED:
        return f"{error.error_count()} keys in it are unknown, missing or of the wrong type"
    shown: list[str] = []
    earlier: list[tuple[int | str, ...]] = []
    for problem in error.errors(include_url=False, include_context=False):
        where = problem["loc"]
        # A sequence that ends at a bad element is reported as too short as well.
        if not any(where == it[: len(where)] for it in earlier):
            shown.append(
                f"{_cut('.'.join(map(str, where)), _MAX_VALUE) or 'body'}: {_cut(problem['msg'], _MAX_MESSAGE)} "
                f"(got {_quoted(problem['input'])!r})"
            )
        earlier.append(where)
        if len(shown) == _MAX_SHOWN:
            break
    return "; ".join(shown)


def _quoted(value: Any) -> str:
    return _cut(value if isinstance(value, str) else _values.repr(value), _MAX_VALUE)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."

"""Reading messages from request and response bodies: long ones in a thread, with short error texts.

Knows nothing of routes.
"""

from __future__ import annotations

import asyncio
import re
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

_TYPE = re.compile(r"str|int|float|bool|constrained-\w+|(tuple|list|dict|union|literal|nullable|function-\w+)\[.*\]")
"""How pydantic names the types of a union in the place of a problem."""

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
    shown: dict[str, tuple[list[str], Any]] = {}
    earlier: list[tuple[int | str, ...]] = []
    for problem in error.errors(include_url=False, include_context=False):
        where = problem["loc"]
        # A sequence that ends at a bad element is reported as too short as well.
        if not any(where == it[: len(where)] for it in earlier):
            is_unknown = problem["type"] == "extra_forbidden"
            path = [str(part) for part in where if is_unknown or not _TYPE.fullmatch(str(part))]
            words, _ = shown.setdefault(_cut(".".join(path), _MAX_VALUE) or "body", ([], problem["input"]))
            if (said := _words(problem["msg"], is_first=not words)) not in words:
                words.append(said)
        earlier.append(where)
        if len(shown) == _MAX_SHOWN:
            break
    return "; ".join(f"{at}: {', or '.join(words)} (got {_quoted(got)!r})" for at, (words, got) in shown.items())


def _words(message: str, *, is_first: bool) -> str:
    """Return what is wrong without what pydantic calls things; of a further way to be right, only that way."""
    message = (
        message.removeprefix("Value error, ").replace("Tuple should", "List should").replace(" after validation", "")
    )
    return _cut(message if is_first else message.removeprefix("Input should be "), _MAX_MESSAGE)


def _quoted(value: Any) -> str:
    return _cut(value if isinstance(value, str) else _values.repr(value), _MAX_VALUE)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."

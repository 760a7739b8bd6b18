"""Parsing of request and response bodies: long ones in a thread, with short error texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import pydantic

from inflight.base.validation import describe_problems

T = TypeVar("T")
Message = TypeVar("Message", bound=pydantic.BaseModel)

LONG_BODY_BYTES = 64 * 1024
"""Longer bodies are parsed in a thread; for shorter ones, the thread would cost more than the parsing itself.

A parser holds the interpreter lock for some 15 ms per MB, so other threads run only between two bodies. The size limit
of bodies therefore limits how long one body can block the event loop.
"""


async def parse_body(parse: Callable[[bytes], T], content: bytes) -> T:
    """Return ``parse(content)``, computed in a thread if the content is long."""
    if len(content) < LONG_BODY_BYTES:
        return parse(content)
    return await asyncio.to_thread(parse, content)


async def message_of(kind: type[Message], content: bytes) -> Message:
    """Return the message in a JSON body. Raises ``ValueError``, which describes the first few problems."""
    try:
        return await parse_body(kind.model_validate_json, content)
    except pydantic.ValidationError as error:
        raise ValueError(describe_problems(error, kind)) from error

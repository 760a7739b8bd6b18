"""Reading of requests: bodies of limited length, and whether the client is still connected."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from inflight.base.tasks import cancel_and_wait
from inflight.http.bodies import parse_body
from inflight.http.structure import check_structure

T = TypeVar("T")

_BODY_S = 20.0
"""How long, in seconds, a body may take to arrive, in addition to the time that the route's maximum body size takes at
``_SLOWEST_BYTES_S``.
"""
_SLOWEST_BYTES_S = 1e6


async def content_of(request: Request, max_body_bytes: int, *, is_trusted: bool = False) -> bytes:
    """Return a body of at most ``max_body_bytes``. Raises `HTTPException` 413 if it is longer.

    A body that arrives too slowly is refused with 408. Unless the client is trusted, a body whose content type is not
    JSON is refused with 415, and one that would take up much more memory as parsed JSON than as bytes is refused with
    400.
    """
    refuse_length(request, max_body_bytes)
    parts, size_bytes = [], 0
    limit_s = _BODY_S + max_body_bytes / _SLOWEST_BYTES_S
    try:
        async with asyncio.timeout(limit_s):
            async for part in request.stream():
                size_bytes += len(part)
                if size_bytes > max_body_bytes:
                    raise _too_long(request, f"more than {max_body_bytes}", max_body_bytes)
                parts.append(part)
    except TimeoutError:
        raise HTTPException(408, f"the body of {request.url.path} did not arrive within {limit_s:.0f} s") from None
    content = b"".join(parts)
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content and not is_trusted and kind != "application/json":
        raise HTTPException(
            415, f"the body of {request.url.path} has the content type {kind[:80]!r}: send application/json"
        )
    if not is_trusted:
        try:
            await parse_body(lambda it: check_structure(it, max_body_bytes), content)
        except ValueError as error:
            raise HTTPException(400, f"{request.url.path} cannot accept this body: {error}") from error
    return content


def refuse_length(request: Request, max_body_bytes: int) -> None:
    """Refuse a body whose content-length is too high.

    Without that header, `content_of` counts the bytes while it reads them.
    """
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > max_body_bytes:
        raise _too_long(request, length[:20], max_body_bytes)


def _too_long(request: Request, length: str, max_body_bytes: int) -> HTTPException:
    return HTTPException(
        413, f"the body of {request.url.path} has {length} bytes, but at most {max_body_bytes} are allowed"
    )


async def run_while_connected(request: Request, call: Awaitable[T]) -> T:
    """Return the result of ``call``; if the client disconnects, cancel the call and raise `ClientDisconnect`."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering = asyncio.ensure_future(call)
    watching = asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
        raise ClientDisconnect
    finally:
        await cancel_and_wait(answering, watching)

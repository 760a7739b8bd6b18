"""Calls to one HTTP server, each with a deadline and a size limit; maps what can go wrong to our errors.

Knows nothing of the contract: adapters use it for their engines' own routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

from inflight.errors import DeadlineError, EndpointError, ProtocolError, UnreachableError
from inflight.http.bodies import parsed
from inflight.http.http11 import ClosedError, Http11Client, NotHttpError, Response

MAX_RESPONSE_BYTES = 256 * 1024 * 1024
MAX_ERROR_BYTES = 1024 * 1024
"""Longest body of a response with a status other than 200."""


class HttpConnection:
    """One server at ``url``, whose errors carry that name. Belongs to the event loop in which it is first used.

    ``keeps_alive`` False opens a connection for each call. It is for servers that silently close a connection after an
    error: the next call on that connection would fail, and could be repeated only if it is idempotent.
    """

    def __init__(self, url: str, *, max_response_bytes: int = MAX_RESPONSE_BYTES, keeps_alive: bool = True) -> None:
        self._url = url
        self._max_response_bytes = max_response_bytes
        self._client = Http11Client(url, keeps_alive=keeps_alive)

    async def exchange(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float,
        content: str | None = None,
        headers: Mapping[str, str] | None = None,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> tuple[int, bytes]:
        """Return status and body, whatever the status.

        Raises `UnreachableError`, `DeadlineError`, or `ProtocolError` if the response is not HTTP or is too long.
        Cancelling the call closes its connection.
        """
        async with self._answering(method, path, content, headers, timeout_s) as response:
            return response.status_code, await self._read(response, max_response_bytes)

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Return status and decoded JSON of the response to a JSON body, or its text if it is not JSON.

        Raises as `exchange` does.
        """
        content = None if body is None else json.dumps(body)
        status, answer = await self.exchange(
            method,
            path,
            timeout_s=timeout_s,
            content=content,
            headers={"content-type": "application/json", **(headers or {})},
        )
        try:
            return status, await parsed(json.loads, answer)
        except (ValueError, RecursionError):
            return status, answer.decode(errors="replace")

    async def parts(
        self,
        method: str,
        path: str,
        *,
        content: str,
        headers: Mapping[str, str],
        timeout_s: float,
        on_refusal: Callable[[int, bytes], Exception],
    ) -> AsyncGenerator[bytes, None]:
        """Yield a streamed response piece by piece; a status other than 200 raises what ``on_refusal`` returns."""
        async with self._answering(method, path, content, headers, timeout_s) as response:
            if response.status_code != 200:
                raise on_refusal(response.status_code, await self._read(response, MAX_ERROR_BYTES))
            async for part in self._bounded(response, self._max_response_bytes):
                yield part

    async def aclose(self) -> None:
        await self._client.aclose()

    @contextlib.asynccontextmanager
    async def _answering(
        self, method: str, path: str, content: str | None, headers: Mapping[str, str] | None, timeout_s: float
    ) -> AsyncIterator[Response]:
        """Yield a response whose body is yet to be read, within the deadline; raise what goes wrong as our errors."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.call(method, path, (content or "").encode(), headers) as response,
            ):
                yield response
        except TimeoutError as error:
            raise DeadlineError(f"{method} {path} gave no answer within {timeout_s:g} s", self._url) from error
        except (NotHttpError, ClosedError) as error:
            raise self._failed(method, path, error) from error

    async def _read(self, response: Response, max_bytes: int) -> bytes:
        if response.status_code != 200:
            max_bytes = min(max_bytes, MAX_ERROR_BYTES)
        return b"".join([part async for part in self._bounded(response, min(max_bytes, self._max_response_bytes))])

    async def _bounded(self, response: Response, max_bytes: int) -> AsyncIterator[bytes]:
        """Yield the body piece by piece, up to the limit; nothing if its content-length exceeds the limit."""
        encoding = response.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise ProtocolError(f"the answer is encoded as {encoding[:40]!r}, which was not asked for", self._url)
        length = response.headers.get("content-length", "0")
        size_bytes = int(length[:20]) if length.isdecimal() else 0
        if size_bytes <= max_bytes:
            size_bytes = 0
            async for part in response.body():
                size_bytes += len(part)
                if size_bytes > max_bytes:
                    break
                yield part
        if size_bytes > max_bytes:
            raise ProtocolError(f"the answer is longer than {max_bytes} bytes", self._url)

    def _failed(self, method: str, path: str, error: Exception) -> EndpointError:
        cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, NotHttpError):
            return ProtocolError(f"the answer to {method} {path} is not HTTP ({cause})", self._url)
        return UnreachableError(f"{method} {path} failed ({cause}); is the server running?", self._url)

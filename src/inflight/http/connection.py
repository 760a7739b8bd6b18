"""Calls to one HTTP server, each with a deadline and a size limit; maps httpx's errors to ours.

Knows nothing of the contract: adapters use it for their engines' own routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

import httpx

from inflight.errors import DeadlineError, EndpointError, ProtocolError, UnreachableError
from inflight.http.bodies import parsed

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
        # Deadlines apply to whole calls; idle connections are dropped before a server would drop them.
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=64 if keeps_alive else 0, keepalive_expiry=1.0
        )
        # A compressed body could expand to a thousand times the size limit.
        headers = {"accept-encoding": "identity"}
        self._client = httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False, headers=headers)

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
    ) -> AsyncIterator[httpx.Response]:
        """Yield a response whose body is yet to be read, within the deadline; raise what httpx raises as our errors."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream(method, path, content=content, headers=headers) as response,
            ):
                yield response
        except TimeoutError as error:
            raise DeadlineError(f"{method} {path} gave no answer within {timeout_s:g} s", self._url) from error
        except httpx.HTTPError as error:
            raise self._failed(method, path, error) from error

    async def _read(self, response: httpx.Response, max_bytes: int) -> bytes:
        if response.status_code != 200:
            max_bytes = min(max_bytes, MAX_ERROR_BYTES)
        return b"".join([part async for part in self._bounded(response, min(max_bytes, self._max_response_bytes))])

    async def _bounded(self, response: httpx.Response, max_bytes: int) -> AsyncIterator[bytes]:
        """Yield the body piece by piece, up to the limit; nothing if its content-length exceeds the limit."""
        encoding = response.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise ProtocolError(f"the answer is encoded as {encoding[:40]!r}, which was not asked for", self._url)
        length = response.headers.get("content-length", "0")
        size_bytes = int(length[:20]) if length.isdecimal() else 0
        if size_bytes <= max_bytes:
            size_bytes = 0
            async for part in response.aiter_raw():
                size_bytes += len(part)
                if size_bytes > max_bytes:
                    break
                yield part
        if size_bytes > max_bytes:
            raise ProtocolError(f"the answer is longer than {max_bytes} bytes", self._url)

    def _failed(self, method: str, path: str, error: httpx.HTTPError) -> EndpointError:
        cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        # A connection that closes early is a RemoteProtocolError too; only its text tells the two apart.
        is_closed = "closed" in str(error) or "disconnected" in str(error)
        if isinstance(error, httpx.RemoteProtocolError) and not is_closed:
            return ProtocolError(f"the answer to {method} {path} is not HTTP ({cause})", self._url)
        return UnreachableError(f"{method} {path} failed ({cause}); is the server running?", self._url)

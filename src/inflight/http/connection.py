"""Calls to one HTTP server, each with a deadline and a size limit; maps the errors of connections to ours.

Knows nothing of the contract: adapters use it for their engines' own routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

import h11

from inflight.errors import DeadlineError, ProtocolError, UnreachableError
from inflight.http.bodies import parsed
from inflight.http.line import Address, Line, LineClosedError

MAX_RESPONSE_BYTES = 256 * 1024 * 1024
MAX_ERROR_BYTES = 1024 * 1024
"""Longest body of a response with a status other than 200."""
_IDLE_S = 1.0
"""How long a connection is kept for the next call; servers keep it for longer."""
_MAX_IDLE = 256


class HttpConnection:
    """One server at ``url``, whose errors carry that name. Belongs to the event loop in which it is first used.

    ``keeps_alive`` False opens a connection for each call. It is for servers that silently close a connection after an
    error: the next call on that connection would fail, and could be repeated only if it is idempotent.
    """

    def __init__(self, url: str, *, max_response_bytes: int = MAX_RESPONSE_BYTES, keeps_alive: bool = True) -> None:
        self._url = url
        self._max_response_bytes = max_response_bytes
        self._max_idle = _MAX_IDLE if keeps_alive else 0
        self._address: Address | None = None
        self._idle: deque[tuple[Line, float]] = deque()
        """With the time at which each was last used, the latest at the right."""
        self._busy: set[Line] = set()
        self._expiring: asyncio.TimerHandle | None = None

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
        async with self._answering(method, path, content, headers, timeout_s) as (line, head):
            return head.status_code, await self._read(line, head, max_response_bytes)

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
        async with self._answering(method, path, content, headers, timeout_s) as (line, head):
            if head.status_code != 200:
                raise on_refusal(head.status_code, await self._read(line, head, MAX_ERROR_BYTES))
            async for part in self._bounded(line, head, self._max_response_bytes):
                yield part

    async def aclose(self) -> None:
        if self._expiring is not None:
            self._expiring.cancel()
            self._expiring = None
        for line in [*self._busy, *(line for line, _ in self._idle)]:
            line.close()
        self._idle.clear()

    @contextlib.asynccontextmanager
    async def _answering(
        self, method: str, path: str, content: str | None, headers: Mapping[str, str] | None, timeout_s: float
    ) -> AsyncIterator[tuple[Line, h11.Response]]:
        """Yield a response whose body is yet to be read, within the deadline; raise what goes wrong as our errors."""
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._line()
                self._busy.add(line)
                try:
                    # A compressed body could expand to a thousand times the size limit.
                    every = {"accept": "*/*", "accept-encoding": "identity", **(headers or {})}
                    line.ask(method, path, [*every.items()], None if content is None else content.encode())
                    yield line, await line.head()
                finally:
                    self._busy.discard(line)
                    self._release(line)
        except TimeoutError as error:
            raise DeadlineError(f"{method} {path} gave no answer within {timeout_s:g} s", self._url) from error
        except h11.RemoteProtocolError as error:
            raise ProtocolError(f"the answer to {method} {path} is not HTTP ({error})", self._url) from error
        except (OSError, LineClosedError, h11.LocalProtocolError) as error:
            cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise UnreachableError(f"{method} {path} failed ({cause}); is the server running?", self._url) from error

    async def _line(self) -> Line:
        """Return a connection that nobody uses, the latest used one, or a new one."""
        while self._idle:
            line, _ = self._idle.pop()
            if line.is_free:
                return line
            line.close()
        if self._address is None:
            self._address = Address.of(self._url)
        return await Line.opened(self._address)

    def _release(self, line: Line) -> None:
        """Keep a connection for the next call for a while, if its answer was read to the end."""
        if not line.is_free or len(self._idle) >= self._max_idle:
            line.close()
            return
        loop = asyncio.get_running_loop()
        self._idle.append((line, loop.time()))
        if self._expiring is None:
            self._expiring = loop.call_later(_IDLE_S, self._expire)

    def _expire(self) -> None:
        """Close the connections that were not used for long."""
        loop = asyncio.get_running_loop()
        self._expiring = None
        while self._idle and self._idle[0][1] <= loop.time() - _IDLE_S:
            self._idle.popleft()[0].close()
        if self._idle:
            self._expiring = loop.call_at(self._idle[0][1] + _IDLE_S, self._expire)

    async def _read(self, line: Line, head: h11.Response, max_bytes: int) -> bytes:
        if head.status_code != 200:
            max_bytes = min(max_bytes, MAX_ERROR_BYTES)
        return b"".join([part async for part in self._bounded(line, head, min(max_bytes, self._max_response_bytes))])

    async def _bounded(self, line: Line, head: h11.Response, max_bytes: int) -> AsyncIterator[bytes]:
        """Yield the body piece by piece, up to the limit; nothing if its content-length exceeds the limit."""
        headers = {name: value.decode(errors="replace") for name, value in head.headers}
        encoding = headers.get(b"content-encoding", "identity")
        if encoding != "identity":
            raise ProtocolError(f"the answer is encoded as {encoding[:40]!r}, which was not asked for", self._url)
        length = headers.get(b"content-length", "0")
        size_bytes = int(length[:20]) if length.isdecimal() else 0
        if size_bytes <= max_bytes:
            size_bytes = 0
            async for part in line.body():
                size_bytes += len(part)
                if size_bytes > max_bytes:
                    break
                yield part
        if size_bytes > max_bytes:
            raise ProtocolError(f"the answer is longer than {max_bytes} bytes", self._url)

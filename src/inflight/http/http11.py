"""Calls over HTTP/1.1: connections that are kept for later calls, each with one call at a time.

A run has thousands of calls open at once, and a pool that looks at all its connections for each of them costs more than
the calls. Here a call takes the connection that was used last, or opens one. h11 reads and writes the protocol. Knows
no deadlines: callers bound each call, and cancelling one closes its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import h11

_IDLE_S = 1.0
"""Idle connections are closed before a server would close them."""
_MAX_IDLE = 64
"""More idle connections are closed at once."""
_MAX_HEAD_BYTES = 100 * 1024
_READ_BYTES = 256 * 1024


class ClosedError(Exception):
    """The connection could not be opened, or ended before the response did, or the request cannot be sent on one."""


class NotHttpError(Exception):
    """The server answered with something else than HTTP."""


class Response:
    """The head of a response, and its body, once."""

    def __init__(self, connection: _Connection, head: h11.Response) -> None:
        self._connection = connection
        self.status_code: int = head.status_code
        self.headers: Mapping[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers
        }
        """By names in lower case."""

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the body piece by piece."""
        while isinstance(event := await self._connection.next_event(), h11.Data):
            yield bytes(event.data)


class Http11Client:
    """Connections to the server at ``url``; a path in it precedes the path of each call. ``keeps_alive`` as it says."""

    def __init__(self, url: str, *, keeps_alive: bool) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self._secure = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/")
        self._keeps_alive = keeps_alive
        self._idle: list[_Connection] = []
        """The one that was used last comes last."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._headers = {
            "host": host if parts.port is None else f"{host}:{parts.port}",
            "accept": "*/*",
            # A compressed body could expand to a thousand times the size limit.
            "accept-encoding": "identity",
            "connection": "keep-alive" if keeps_alive else "close",
            "user-agent": "inflight",
        }

    @contextlib.asynccontextmanager
    async def call(
        self, method: str, path: str, content: bytes, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Response, None]:
        """Yield the response whose body is yet to be read. Raises `ClosedError` or `NotHttpError`.

        The connection is kept if the body was read to its end, and closed otherwise.
        """
        connection = await self._connected()
        is_reusable = False
        try:
            sent = self._headers | dict(headers or {})
            if content or method not in ("GET", "HEAD"):
                sent["content-length"] = str(len(content))
            yield Response(connection, await connection.send(method, self._path + path, sent, content))
            is_reusable = connection.begin_next()
        finally:
            if is_reusable and self._keeps_alive and len(self._idle) < _MAX_IDLE:
                connection.idle_since = asyncio.get_running_loop().time()
                self._idle.append(connection)
            else:
                connection.close()

    async def aclose(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _connected(self) -> _Connection:
        now = asyncio.get_running_loop().time()
        while self._idle and (self._idle[0].is_closed or now - self._idle[0].idle_since > _IDLE_S):
            self._idle.pop(0).close()
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed:
                return connection
            connection.close()
        try:
            opened = await asyncio.open_connection(self._host, self._port, ssl=self._secure, limit=_READ_BYTES)
        except OSError as error:
            raise ClosedError(str(error)) from error
        return _Connection(*opened)


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._protocol = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self.idle_since = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether the server has closed it while no call was open; asks the socket, as the loop may not know yet."""
        if self._reader.at_eof() or self._reader.exception() is not None or self._writer.is_closing():
            return True
        poll = select.poll()
        poll.register(self._writer.get_extra_info("socket").fileno(), select.POLLIN)
        return len(poll.poll(0)) > 0

    def close(self) -> None:
        self._writer.transport.abort()

    async def send(self, method: str, target: str, headers: Mapping[str, str], content: bytes) -> h11.Response:
        """Send a request and return the head of its response. Raises as `next_event`."""
        try:
            request = h11.Request(method=method, target=target, headers=list(headers.items()))
        except (h11.LocalProtocolError, UnicodeEncodeError) as error:
            raise ClosedError(f"HTTP cannot carry the request: {error}") from error
        events = (request, h11.Data(data=content), h11.EndOfMessage())
        self._writer.write(b"".join([self._protocol.send(event) or b"" for event in events]))
        with contextlib.suppress(ConnectionError):  # a server may answer before it has read everything
            await self._writer.drain()
        while not isinstance(event := await self.next_event(), h11.Response):
            pass
        return event

    async def next_event(self) -> Any:
        """Return the next event of the response. Raises `ClosedError` if there will be none, and `NotHttpError`."""
        while True:
            try:
                event = self._protocol.next_event()
                if event is h11.NEED_DATA:
                    self._protocol.receive_data(await self._reader.read(_READ_BYTES))
                    continue
            except OSError as error:
                raise ClosedError(str(error)) from error
            except h11.RemoteProtocolError as error:
                if self._reader.at_eof():
                    raise ClosedError(f"the server closed the connection: {error}") from error
                raise NotHttpError(str(error)) from error
            if isinstance(event, h11.ConnectionClosed):
                raise ClosedError("the server closed the connection without an answer")
            return event

    def begin_next(self) -> bool:
        """Make ready for the next call; returns False if there can be none."""
        if self._protocol.our_state is not h11.DONE or self._protocol.their_state is not h11.DONE:
            return False
        self._protocol.start_next_cycle()
        return not self.is_closed

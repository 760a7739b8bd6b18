"""One HTTP/1.1 connection of a client: a request at a time, its answer piece by piece. What it says is h11's affair.

Knows nothing of deadlines, size limits and errors of ours.
"""

from __future__ import annotations

import asyncio
import select
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11

_HIGH_BYTES = 256 * 1024
"""The peer is not read further while so much waits to be taken."""
_MAX_HEAD_BYTES = 100 * 1024


class LineClosedError(Exception):
    """The peer closed the connection before its answer was whole."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, and what its URL puts before each path."""

    host: str
    port: int
    prefix: str
    authority: str
    """As the header ``host`` has it."""
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, url: str) -> Address:
        """Return the address in a URL. Raises ``OSError`` unless it is one of HTTP, with a host and no user."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise OSError(f"it is not a URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise OSError("its URL is not of the form http://HOST:PORT")
        is_secure = parts.scheme == "https"
        return cls(
            parts.hostname,
            port or (443 if is_secure else 80),
            parts.path.rstrip("/"),
            parts.netloc,
            ssl.create_default_context() if is_secure else None,
        )


class Line(asyncio.Protocol):
    """An open connection. After an error, and unless an answer was read to its end, it can only be closed."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._received = bytearray()
        self._has_closed = False
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[None] | None = None

    @classmethod
    async def opened(cls, address: Address) -> Line:
        """Return a new connection. Raises ``OSError``."""
        loop = asyncio.get_running_loop()
        _, line = await loop.create_connection(lambda: cls(address), address.host, address.port, ssl=address.tls)
        return line

    @property
    def is_free(self) -> bool:
        """Whether it can take a request. A peer that has just closed it is seen before the event loop tells."""
        if self._has_closed or self._received or self._http.our_state is not h11.IDLE or self._transport is None:
            return False
        polling = select.poll()
        polling.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not polling.poll(0)

    def close(self) -> None:
        """Close it at once."""
        if self._transport is not None:
            self._transport.abort()

    def ask(self, method: str, path: str, headers: Sequence[tuple[str, str]], content: bytes | None) -> None:
        """Send a request. Raises `h11.LocalProtocolError` if it cannot be written."""
        assert self._transport is not None
        request = h11.Request(
            method=method,
            target=self._address.prefix + path,
            headers=[
                ("host", self._address.authority),
                *headers,
                *([] if content is None else [("content-length", str(len(content)))]),
            ],
        )
        said = self._http.send(request) or b""
        if content:
            said += self._http.send(h11.Data(data=content)) or b""
        self._transport.write(said + (self._http.send(h11.EndOfMessage()) or b""))

    async def head(self) -> h11.Response:
        """Return the beginning of the answer. Raises `LineClosedError`, or `h11.RemoteProtocolError`."""
        while True:
            event = await self._event()
            if isinstance(event, h11.Response):
                return event
            if event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                raise LineClosedError("the server disconnected without an answer")

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the rest of the answer. Raises as `head`."""
        while True:
            event = await self._event()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
                    self._http.start_next_cycle()
                return

    async def _event(self) -> h11.Event | type[h11.PAUSED]:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event  # type: ignore[return-value]
            if not self._received and not self._has_closed:
                self._waiting = asyncio.get_running_loop().create_future()
                await self._waiting
            try:
                self._http.receive_data(bytes(self._received))  # nothing: the peer has closed
                if not self._received:
                    return self._http.next_event()  # type: ignore[return-value]
            except h11.RemoteProtocolError as error:
                if self._received:
                    raise
                raise LineClosedError(f"the server disconnected: {error}") from error
            self._received.clear()
            if self._transport is not None and not self._has_closed:
                self._transport.resume_reading()

    # ----------------------------------------------------------------------------------------- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) > _HIGH_BYTES and self._transport is not None:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._has_closed = True
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

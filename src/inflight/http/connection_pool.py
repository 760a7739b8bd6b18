"""A connection pool for plain HTTP/1.1 that finds an idle connection in constant time, as an httpx transport.

httpx's own pool checks every connection for each call. TLS and proxies still use httpx's transport.
"""

from __future__ import annotations

import asyncio
import select
from collections import defaultdict, deque
from collections.abc import AsyncIterator

import h11
import httpx

from inflight.http.tls import client_tls

_IDLE_S = 1.0
"""How long, in seconds, an idle connection is kept for the next call. Servers keep it for longer."""
_MAX_IDLE = 256
_HIGH_BYTES = 256 * 1024
"""Reading from the peer pauses while more than this many bytes wait to be consumed."""
_MAX_HEAD_BYTES = 100 * 1024

Origin = tuple[str, int]


def make_connection_pool(url: httpx.URL, *, keeps_alive: bool) -> httpx.AsyncBaseTransport:
    """Return a transport for the server at ``url``, which keeps no idle connection if ``keeps_alive`` is False."""
    max_idle = _MAX_IDLE if keeps_alive else 0
    if url.scheme != "https":
        return ConnectionPool(max_idle)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=max_idle, keepalive_expiry=_IDLE_S)
    return httpx.AsyncHTTPTransport(verify=client_tls(), limits=limits, trust_env=False)


class ConnectionPool(httpx.AsyncBaseTransport):
    """Sends each ``http://`` request over a free connection, preferably the one that was used most recently.

    The body of a request is read completely before a connection is opened. A connection whose response was not read to
    the end is closed. An instance belongs to the event loop in which it is first used.
    """

    def __init__(self, max_idle: int = _MAX_IDLE) -> None:
        self._max_idle = max_idle
        self._idle: defaultdict[Origin, deque[tuple[_Connection, float]]] = defaultdict(deque)
        """The idle connections, each with the time of its last use; the most recently used is the rightmost."""
        self._num_idle = 0
        self._busy: set[_Connection] = set()
        self._expiring: asyncio.TimerHandle | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the response once its head has arrived. Raises httpx errors."""
        content = request.read() if isinstance(request.stream, httpx.ByteStream) else await request.aread()
        connection = await self._checkout(request.url)
        self._busy.add(connection)
        try:
            connection.send(request, content)
            del request, content  # thousands of requests that wait would keep the garbage collector busy
            head = await connection.read_head()
        except BaseException:
            self.release(connection)
            raise
        return httpx.Response(
            head.status_code,
            headers=head.headers.raw_items(),
            stream=_Body(connection, self),
            extensions={"http_version": b"HTTP/" + head.http_version, "reason_phrase": head.reason},
        )

    async def aclose(self) -> None:
        """Close every connection, including those whose response has not arrived yet."""
        if self._expiring is not None:
            self._expiring.cancel()
            self._expiring = None
        for connection in self._busy:
            connection.close()
        for idle in self._idle.values():
            for connection, _ in idle:
                connection.close()
        self._idle.clear()
        self._num_idle = 0

    def release(self, connection: _Connection) -> None:
        """Keep a connection for a later request if its response was read to the end; otherwise, close it."""
        self._busy.discard(connection)
        if self._num_idle >= self._max_idle or not connection.is_answered:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        self._idle[connection.origin].append((connection, loop.time()))
        self._num_idle += 1
        if self._expiring is None:
            self._expiring = loop.call_later(_IDLE_S, self._close_expired)

    async def _checkout(self, url: httpx.URL) -> _Connection:
        """Return the idle connection that was used most recently, or a new one."""
        if url.scheme != "http" or not url.host:
            raise httpx.UnsupportedProtocol(f"the URL {str(url)!r} is not of the form http://HOST:PORT")
        origin = (url.host, url.port or 80)
        idle = self._idle[origin]
        while idle:
            connection, _ = idle.pop()
            self._num_idle -= 1
            if not connection.has_input:
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(lambda: _Connection(origin), *origin)
        except (OSError, OverflowError) as error:
            raise httpx.ConnectError(str(error)) from error
        return connection

    def _close_expired(self) -> None:
        loop = asyncio.get_running_loop()
        self._expiring = None
        for origin, idle in list(self._idle.items()):
            while idle and idle[0][1] <= loop.time() - _IDLE_S:
                idle.popleft()[0].close()
                self._num_idle -= 1
            if not idle:
                del self._idle[origin]
        if self._idle:
            oldest_s = min(idle[0][1] for idle in self._idle.values())
            self._expiring = loop.call_at(oldest_s + _IDLE_S, self._close_expired)


class _Body(httpx.AsyncByteStream):
    """The body of a response. Closing it releases its connection."""

    def __init__(self, connection: _Connection, pool: ConnectionPool) -> None:
        self._connection = connection
        self._pool = pool
        self._is_read = self._is_closed = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self  # an asynchronous generator would be slower, since the event loop tracks each one

    async def __anext__(self) -> bytes:
        data = b"" if self._is_read else await self._connection.read_data()
        if not data:
            self._is_read = True
            raise StopAsyncIteration
        return data

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._pool.release(self._connection)


class _Connection(asyncio.Protocol):
    """An open connection. After an error, or if a response was not read to the end, it can only be closed."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._received = bytearray()
        self._is_paused = False
        self._is_closed = False
        self._transport: asyncio.Transport | None = None
        self._polling = select.poll()
        self._waiting: asyncio.Future[None] | None = None

    @property
    def is_answered(self) -> bool:
        """Whether every request on the connection has been answered, so that the connection can send another one."""
        return self._http.our_state is h11.IDLE and not self._received and not self._is_closed

    @property
    def has_input(self) -> bool:
        """Whether an idle connection has received data or the end of the stream, and can therefore only be closed.

        This polls the socket itself, since the event loop may not have noticed yet.
        """
        return self._is_closed or bool(self._received) or bool(self._polling.poll(0))

    def close(self) -> None:
        """Close the connection immediately."""
        if self._transport is not None:
            self._transport.abort()

    def send(self, request: httpx.Request, content: bytes) -> None:
        """Write a request with its body."""
        assert self._transport is not None
        try:
            head = h11.Request(method=request.method.encode(), target=request.url.raw_path, headers=request.headers.raw)
            written = self._http.send(head) or b""
            if content:
                written += self._http.send(h11.Data(data=content)) or b""
            self._transport.write(written + (self._http.send(h11.EndOfMessage()) or b""))
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError(str(error)) from error

    async def read_head(self) -> h11.Response:
        """Return the status and headers of the response."""
        while True:
            event = self._next_event()
            if event is h11.NEED_DATA:
                await self._input()
            elif isinstance(event, h11.Response):
                return event
            elif event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                raise httpx.ReadError("the server disconnected without an answer")

    async def read_data(self) -> bytes:
        """Return the next bytes of the response's body, or empty bytes at its end."""
        while True:
            event = self._next_event()
            if event is h11.NEED_DATA:
                await self._input()
            elif isinstance(event, h11.Data) and event.data:
                return bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                is_done = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
                # With trailing data, a later request would read that as its answer.
                if is_done and not self._http.trailing_data[0]:
                    self._http.start_next_cycle()
                return b""

    def _next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event of the response that has arrived, or ``NEED_DATA``."""
        if self._received:
            self._http.receive_data(bytes(self._received))
            self._received.clear()
            if self._is_paused and self._transport is not None:
                self._is_paused = False
                self._transport.resume_reading()
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise httpx.RemoteProtocolError(str(error)) from error
        if event is not h11.NEED_DATA or not self._is_closed:
            return event
        try:
            self._http.receive_data(b"")  # the peer has closed
            return self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise httpx.ReadError("the server disconnected before the end of its answer") from error

    def _input(self) -> asyncio.Future[None]:
        """Return a future that is done once the peer has sent more, or closed the connection."""
        self._waiting = asyncio.get_running_loop().create_future()
        return self._waiting

    # ----------------------------------------------------------------------------------------- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._polling.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) > _HIGH_BYTES and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

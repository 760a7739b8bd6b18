"""A server's connections: how many it holds, how long a request may take to arrive, and which clients it answers.

A client that sends nothing, or half a request, keeps a connection only until its deadline or until another client needs
the connection's slot. Web pages in a browser must not control a server on this machine, so requests from other origins
are refused. Requests to an unknown host name are also refused, because anyone can register a name that resolves to this
machine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from inflight.base.addresses import host_and_port, is_address, is_loopback
from inflight.errors import InvalidRequestError
from inflight.http.server import error_response
from inflight.http.tls import Handshake

BACKLOG = 128
HOSTS_VARIABLE = "INFLIGHT_ALLOWED_HOSTS"
"""Environment variable with additional host names, separated by commas, under which clients reach a server that listens
on loopback.
"""
_HEAD_S = 10.0
"""How long, in seconds, a request's head may take to arrive after the connection is made or its first byte arrives."""
_LOG_EVERY_S = 60.0
_MOST_CONNECTIONS = 16_384


def max_connections() -> int:
    """Return how many connections a server may hold: three quarters of this process's limit on open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(_MOST_CONNECTIONS, max(8, soft * 3 // 4))


class BoundedProtocol(H11Protocol):
    """A connection that is closed if its request is late, or if there are too many and it has been idle longest."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._late: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()
        if len(self.connections) > max_connections():
            idle = [it for it in self.connections if isinstance(it, BoundedProtocol) and not it.is_busy]
            oldest = min(idle, key=lambda it: it._idle_since)
            oldest.transport.abort()
            self.connections.discard(oldest)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.is_busy:
            self._stop_waiting()
        elif self._late is None and not self.transport.is_closing():
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def _expect_head(self) -> None:
        self._idle_since = self.loop.time()
        self._late = self.loop.call_later(_HEAD_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class _OncePerMinute(logging.Filter):
    """Lets each kind of message through once a minute, so that clients cannot fill the disk."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now, kind = time.monotonic(), str(record.msg)[:200]
        if now - self._last.get(kind, -_LOG_EVERY_S) < _LOG_EVERY_S:
            return False
        if len(self._last) > 1000:
            self._last.clear()
        self._last[kind] = now
        return True


def configure(app: ASGIApp, listener: socket.socket, tls: ssl.SSLContext | None, **options: Any) -> uvicorn.Config:
    """Return the configuration of a server whose connections and clients are checked as this module describes."""
    for name in ("uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        if not any(isinstance(it, _OncePerMinute) for it in logger.filters):
            logger.addFilter(_OncePerMinute())
    host = str(listener.getsockname()[0])
    return uvicorn.Config(
        _KnownClients(app, is_local=is_loopback(host)),
        http=BoundedProtocol if tls is None else _over_tls(tls),  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        ws="none",
        backlog=BACKLOG,
        **options,
    )


def url_of(listener: socket.socket, tls: ssl.SSLContext | None) -> str:
    """Return the URL of the address on which a socket listens."""
    host, port = listener.getsockname()[:2]
    return f"{'http' if tls is None else 'https'}://{host_and_port(host, port)}"


def _over_tls(context: ssl.SSLContext) -> Callable[..., Handshake]:
    underway: dict[Any, None] = {}
    return lambda **named: Handshake(BoundedProtocol(**named), context, underway, max(4, max_connections() // 4))


class _KnownClients:
    """An ASGI application that refuses ambiguous requests, unknown hosts, and web pages from other origins."""

    def __init__(self, app: ASGIApp, *, is_local: bool) -> None:
        self._app = app
        self._is_local = is_local
        given = os.environ.get(HOSTS_VARIABLE, "").lower().split(",")
        self._names = {"localhost", socket.gethostname().lower(), *(name.strip() for name in given if name.strip())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (why := self._refusal(scope["headers"])):
            response = error_response(InvalidRequestError(why))
            response.status_code = 403
            response.headers["connection"] = "close"
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, headers: list[tuple[bytes, bytes]]) -> str:
        """Return why a request is refused, or an empty string if it is not."""
        found = dict(headers)
        host, origin = (found.get(name, b"").decode("latin-1").lower() for name in (b"host", b"origin"))
        if b"transfer-encoding" in found and b"content-length" in found:
            return "a request must not have both a content-length and a transfer-encoding"
        is_known = self._knows(host)
        if host and self._is_local and not is_known:
            return f"the host {host[:100]!r} is not a known name of this machine: list it in ${HOSTS_VARIABLE}"
        if origin and not (is_known and origin.partition("://")[2] == host):
            return f"requests from pages of {origin[:100]!r} are refused"
        return ""

    def _knows(self, host: str) -> bool:
        """Return whether a host is an IP address or a known name of this machine.

        Any other name may have been registered by someone else to resolve to this machine.
        """
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self._names or is_address(name)

"""A listening socket, and an application served on it by a task of the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from inflight.base.addresses import host_and_port, listen_on
from inflight.errors import ConfigError, InflightError
from inflight.http.connections import BACKLOG, configure, url_of

_PARTING_S = 2
"""How long, in seconds, responses in progress may take once the server is stopping."""


def bind(
    host: str, port: int, remedy: str = "choose another --port, or 0 for any", *, listens: bool = True
) -> socket.socket:
    """Return a listening socket. Port 0 means any free port.

    With ``listens=False``, the socket is only bound, and nobody can connect to it.

    Raises `ConfigError`, with the remedy, if the address cannot be used.
    """
    try:
        return listen_on(host, port, backlog=BACKLOG if listens else None)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no such port"
        raise ConfigError(f"cannot listen on {host_and_port(host, port)}: {reason}; {remedy}") from error


class InLoopServer:
    """A uvicorn server that runs in the current event loop and does not handle signals."""

    def __init__(self, app: ASGIApp, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        config = configure(
            app, listener, tls, lifespan="off", timeout_keep_alive=60, timeout_graceful_shutdown=_PARTING_S
        )
        self.url = url_of(listener, tls)
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        self._has_begun = asyncio.Event()
        """Set once the server accepts requests or has ended."""
        self._server = _Uvicorn(config, self._has_begun)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        self._serving.add_done_callback(lambda _: self._has_begun.set())

    async def started(self) -> str:
        """Return the URL once the server accepts requests. Raises `InflightError` if the server has ended."""
        await self._has_begun.wait()
        if self._serving.done():
            raise InflightError(f"the server at {self.url} has ended")
        return self.url

    async def aclose(self) -> None:
        """Return once the server has sent its last responses and ended. Raises the error that ended it, if any."""
        gc.unfreeze()
        self._server.should_exit = True
        await self._serving


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, started: asyncio.Event) -> None:
        super().__init__(config)
        self._is_started = started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        gc.freeze()  # otherwise, each client's many small objects would make the collector traverse them repeatedly
        self._is_started.set()

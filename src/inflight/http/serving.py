"""Serving an endpoint over HTTP in this process, until told to stop. Knows nothing of engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvicorn

from inflight.contracts import InferenceEndpoint
from inflight.errors import ConfigError, InflightError
from inflight.http.server import create_app
from inflight.types import EngineStats

_POLL_S = 0.1


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises `ConfigError` if the address cannot be had; port 0 takes any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio switches Nagle off on every connection; without, each answer takes 40 ms longer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else "no such port"
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another --port, or 0 for any") from error
    return listener


def serve(
    endpoint: InferenceEndpoint,
    listener: socket.socket,
    *,
    token: str,
    stats: Callable[[], EngineStats] | None = None,
    ready_file: Path | None = None,
    exit_with_stdin: bool = False,
    on_ready: Callable[[str], None] | None = None,
    until_ready: Callable[[], Awaitable[None]] | None = None,
    while_serving: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM or, if asked for, the end of standard input; then abort what runs and return.

    When the server answers, ``ready_file`` gets ``{"url", "pid"}`` as JSON, whole or not at all. ``until_ready`` is
    awaited before that, ``while_serving`` runs beside it: an `InflightError` of either ends the server and is raised.
    """
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    app = create_app(endpoint, token=token, stats=stats)
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_keep_alive=30, timeout_graceful_shutdown=5)
    server = _Server(
        config,
        on_started=lambda: _announce(url, ready_file, on_ready),
        end_requests=endpoint.aclose,
        until_ready=until_ready,
        while_serving=while_serving,
    )
    if exit_with_stdin:
        threading.Thread(target=_watch_stdin, args=(server,), daemon=True).start()
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    server.run(sockets=[listener])
    if server.failure is not None:
        raise server.failure


class _Server(uvicorn.Server):
    """A uvicorn server that waits for what it serves, says when it answers, and ends what runs before it stops."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        on_started: Callable[[], None],
        end_requests: Callable[[], Awaitable[None]],
        until_ready: Callable[[], Awaitable[None]] | None,
        while_serving: Callable[[], Awaitable[None]] | None,
    ) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._end_requests = end_requests
        self._until_ready = until_ready
        self._while_serving = while_serving
        self._beside: asyncio.Future[None] | None = None
        self.failure: InflightError | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait until ready, start, then say so; does nothing if told to stop meanwhile."""
        if self._until_ready is not None:
            await self._unless_stopped(self._until_ready())
            if self.should_exit:
                await self._end_requests()
                return
        await super().startup(sockets)
        if self._while_serving is not None:
            self._beside = asyncio.ensure_future(self._noting_failure(self._while_serving()))
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what runs, then stop."""
        if self._beside is not None:
            self._beside.cancel()
            await asyncio.gather(self._beside, return_exceptions=True)
        await self._end_requests()
        await super().shutdown(sockets)

    async def _unless_stopped(self, call: Awaitable[None]) -> None:
        """Await a call; cancel it once this server is told to stop."""
        calling = asyncio.ensure_future(self._noting_failure(call))
        while not calling.done() and not self.should_exit:
            await asyncio.wait({calling}, timeout=_POLL_S)
        calling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await calling

    async def _noting_failure(self, call: Awaitable[None]) -> None:
        try:
            await call
        except InflightError as error:
            self.failure = error
            self.should_exit = True


def _announce(url: str, ready_file: Path | None, on_ready: Callable[[str], None] | None) -> None:
    if ready_file is not None:
        partial = ready_file.with_suffix(".partial")
        partial.write_text(json.dumps({"url": url, "pid": os.getpid()}))
        partial.replace(ready_file)
    if on_ready is not None:
        on_ready(url)


def _watch_stdin(server: uvicorn.Server) -> None:
    # Not through sys.stdin's buffer: its lock, held by this thread, would abort the interpreter when it exits.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    server.should_exit = True

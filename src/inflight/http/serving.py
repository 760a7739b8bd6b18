"""Serving an endpoint over HTTP in this process, until told to stop. Knows nothing of engines."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import uvicorn

from inflight.contracts import InferenceEndpoint
from inflight.errors import ConfigError
from inflight.http.server import create_app
from inflight.types import EngineStats


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
    until: Sequence[Callable[[], None]] = (),
    ready_file: Path | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM, or the return of one of the blocking calls ``until``; then abort what runs.

    ``stats`` feeds ``/metrics``. When the server answers, ``ready_file`` gets ``{"url", "pid"}`` as JSON, whole or not
    at all.
    """
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    app = create_app(endpoint, token=token, stats=stats)
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_keep_alive=30, timeout_graceful_shutdown=5)
    server = _Server(config, lambda: _announce(url, ready_file, on_ready), endpoint.aclose)
    for call in until:
        threading.Thread(target=_stop_after, args=(server, call), daemon=True).start()
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    server.run(sockets=[listener])


class _Server(uvicorn.Server):
    """A uvicorn server that says when it answers, and ends what runs before it waits for connections to close."""

    def __init__(
        self, config: uvicorn.Config, on_started: Callable[[], None], end_requests: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._end_requests = end_requests

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so."""
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what runs, then stop."""
        await self._end_requests()
        await super().shutdown(sockets)


def _announce(url: str, ready_file: Path | None, on_ready: Callable[[str], None] | None) -> None:
    if ready_file is not None:
        partial = ready_file.with_suffix(".partial")
        partial.write_text(json.dumps({"url": url, "pid": os.getpid()}))
        partial.replace(ready_file)
    if on_ready is not None:
        on_ready(url)


def _stop_after(server: uvicorn.Server, call: Callable[[], None]) -> None:
    call()
    server.should_exit = True


def end_of_stdin() -> None:
    """Return at the end of standard input."""
    # Not through sys.stdin's buffer: its lock, held by this thread, would abort the interpreter when it exits.
    while os.read(sys.stdin.fileno(), 4096):
        pass

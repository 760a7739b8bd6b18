"""Serving an endpoint over HTTP in this process, until told to stop. Knows nothing of engines."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inflight.contracts import InferenceEndpoint
from inflight.errors import InflightError, error_from_code
from inflight.http.joining import JoinSettings, Membership
from inflight.http.server import create_app, error_response
from inflight.types import EngineStats

_POLL_S = 0.1
_PARTING_S = 0.5
"""How long running requests may take to end once the server has failed."""


async def serve(
    endpoint: InferenceEndpoint,
    listener: socket.socket,
    *,
    token: str,
    stats: Callable[[], EngineStats] | None = None,
    ready_file: Path | None = None,
    exit_with_stdin: bool = False,
    lease_s: float = 0.0,
    on_ready: Callable[[str], None] | None = None,
    until_ready: Callable[[], Awaitable[None]] | None = None,
    while_serving: Callable[[], Awaitable[None]] | None = None,
    joins: JoinSettings | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM or, with ``exit_with_stdin``, the end of standard input; then abort all requests.

    With ``joins`` the server is a member of a run from then on, and before it stops it leaves the run in order.
    After the end of standard input it goes on for ``lease_s`` from the last call that carried the token.

    Await it in the main thread, which receives the signals; a handled signal is raised again at the end. Once the
    server answers, ``ready_file`` is written atomically with ``{"url", "pid"}`` as JSON. ``until_ready`` is awaited
    before that, and ``while_serving`` runs beside the server: an `InflightError` from either ends the server and is
    raised, and running and later requests are answered at once with its first line.
    """
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    # `_Server` closes the endpoint, once.
    app = _UntilFailure(create_app(endpoint, token=token, stats=stats, owns_endpoint=False), token)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, timeout_keep_alive=30, timeout_graceful_shutdown=5, ws="none"
    )
    membership = None if joins is None else Membership(joins, token, url)
    if membership is not None:
        while_serving = _both(while_serving, membership.renew)
    server = _Server(
        config,
        app,
        leave=None if membership is None else lambda: membership.leave(endpoint),
        on_started=lambda: _announce(url, ready_file, on_ready),
        end_requests=endpoint.aclose,
        until_ready=until_ready,
        while_serving=while_serving,
    )
    if exit_with_stdin:
        threading.Thread(target=_watch_stdin, args=(server, app, lease_s), daemon=True).start()
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    await server.serve(sockets=[listener])
    if server.failure is not None:
        raise server.failure


class _Server(uvicorn.Server):
    """A uvicorn server that waits for its endpoint, reports when it answers, and ends all requests before it stops."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: _UntilFailure,
        *,
        leave: Callable[[], Awaitable[None]] | None,
        on_started: Callable[[], None],
        end_requests: Callable[[], Awaitable[None]],
        until_ready: Callable[[], Awaitable[None]] | None,
        while_serving: Callable[[], Awaitable[None]] | None,
    ) -> None:
        super().__init__(config)
        self._app = app
        self._leave = leave
        self._on_started = on_started
        self._end_requests = end_requests
        self._until_ready = until_ready
        self._while_serving = while_serving
        self._beside: asyncio.Future[None] | None = None
        self.failure: InflightError | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait until ready, start, and report it; does nothing if told to stop meanwhile."""
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
        """End all requests, then stop; after a failure, do not wait for requests that can no longer be answered."""
        if self._beside is not None:
            self._beside.cancel()
            await asyncio.gather(self._beside, return_exceptions=True)
        if self._leave is not None and self.failure is None:
            await self._leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if self.failure is None else _PARTING_S):
                await self._end_requests()
        if self.failure is not None:
            self.config.timeout_graceful_shutdown = 1
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
            self._app.fail(error)
            self.should_exit = True


class _UntilFailure:
    """An ASGI application that answers every request with an error once it has failed."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._bearer = f"Bearer {token}".encode()
        self.last_authorized = time.monotonic()
        """When the last call with the token came."""
        self._has_failed = asyncio.Event()
        self._error = InflightError()
        self._left: set[asyncio.Future[None]] = set()

    def fail(self, error: InflightError) -> None:
        """Answer all running and later requests with the first line of ``error``."""
        self._error = error_from_code(error.code, str(error).partition("\n")[0])
        self._has_failed.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._bearer):
            self.last_authorized = time.monotonic()
        has_begun = False

        async def begin(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        answering = asyncio.ensure_future(self._app(scope, receive, begin))
        failing = asyncio.ensure_future(self._has_failed.wait())
        try:
            await asyncio.wait({answering, failing}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
        finally:
            answering.cancel()
            failing.cancel()
        self._left.add(answering)  # it may end late, since what it waits for is gone
        answering.add_done_callback(lambda done: done.cancelled() or done.exception())
        if not has_begun:
            await error_response(self._error)(scope, receive, send)


def _both(
    one: Callable[[], Awaitable[None]] | None, other: Callable[[], Awaitable[None]]
) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        await asyncio.gather(*(call() for call in (one, other) if call is not None))

    return run


def _announce(url: str, ready_file: Path | None, on_ready: Callable[[str], None] | None) -> None:
    if ready_file is not None:
        partial = ready_file.with_suffix(".partial")
        partial.write_text(json.dumps({"url": url, "pid": os.getpid()}))
        partial.replace(ready_file)
    if on_ready is not None:
        on_ready(url)


def _watch_stdin(server: uvicorn.Server, app: _UntilFailure, lease_s: float) -> None:
    # Reading through sys.stdin would hold its buffer's lock, which aborts the interpreter at exit.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    ended = time.monotonic()
    while (left_s := max(ended, app.last_authorized) + lease_s - time.monotonic()) > 0:
        time.sleep(left_s)
    server.should_exit = True

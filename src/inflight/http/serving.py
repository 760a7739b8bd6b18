"""Serves an endpoint over HTTP in this process until the process is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inflight.base.tasks import cancel_and_wait, combine_failures
from inflight.base.whole_files import write_whole
from inflight.contracts import InferenceEndpoint
from inflight.errors import BusyError, InflightError, error_from_code
from inflight.http.connections import configure, max_connections, url_of
from inflight.http.joining import JoinSettings, Membership
from inflight.http.routes import GENERATION_PATHS
from inflight.http.server import create_app, error_response
from inflight.http.server_spec import ListenOptions
from inflight.http.tls import server_tls
from inflight.http.tokens import carries_token
from inflight.types import EngineStats

_DEFAULTS = ListenOptions()
_POLL_S = 0.1
_PARTING_S = 0.5
"""How long, in seconds, running requests may take to end once the server has failed."""


async def serve(
    endpoint: InferenceEndpoint,
    listener: socket.socket,
    *,
    token: str,
    generation_token: str | None = None,
    stats: Callable[[], EngineStats] | None = None,
    listen: ListenOptions = _DEFAULTS,
    on_ready: Callable[[str], None] | None = None,
    until_ready: Callable[[], Awaitable[None]] | None = None,
    while_serving: Callable[[], Awaitable[None]] | None = None,
    joins: JoinSettings | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM or, with ``exit_with_stdin``, the end of standard input; then abort all requests.

    With ``joins``, the server joins a run once it is ready, and leaves it cleanly before it stops. From ``listen``,
    only ``exit_with_stdin``, ``ready_file``, ``lease_s`` and the TLS files are used; ``listener`` determines the
    address. After standard input ends, the server keeps running for ``lease_s`` seconds after the last call with the
    token.

    Await this in the main thread, which receives the signals; a handled signal is raised again at the end. Once the
    server accepts requests, ``ready_file`` is written atomically with ``{"url", "pid"}`` as JSON. ``until_ready`` is
    awaited before that, and ``while_serving`` runs alongside the server: an `InflightError` from either ends the server
    and is raised. Running and later requests then fail immediately with the first line of the error.
    """
    tls = server_tls(listen.tls_certificate, listen.tls_key, listen.tls_client_ca)
    url = url_of(listener, tls)
    # `_Server` closes the endpoint, once.
    served = create_app(endpoint, token=token, generation_token=generation_token, stats=stats, owns_endpoint=False)
    app = _UntilFailure(served, token)
    config = configure(app, listener, tls, timeout_keep_alive=30, timeout_graceful_shutdown=5)
    membership = None if joins is None else Membership(joins, token, url)
    server = _Server(
        config,
        app,
        leave=None if membership is None else lambda: membership.leave(endpoint),
        on_started=lambda: _announce(url, listen.ready_file, on_ready),
        end_requests=endpoint.aclose,
        until_ready=until_ready,
        while_serving=[
            call for call in (while_serving, None if membership is None else membership.renew) if call is not None
        ],
    )
    if listen.exit_with_stdin:
        threading.Thread(target=_watch_stdin, args=(server, app, listen.lease_s), daemon=True).start()
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    try:
        await server.serve(sockets=[listener])
    finally:
        if membership is not None:
            await membership.aclose()
    if server.failure is not None:
        raise server.failure


class _Server(uvicorn.Server):
    """A uvicorn server that waits for its endpoint, reports when it is ready, and ends all requests before it stops."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: _UntilFailure,
        *,
        leave: Callable[[], Awaitable[None]] | None,
        on_started: Callable[[], None],
        end_requests: Callable[[], Awaitable[None]],
        until_ready: Callable[[], Awaitable[None]] | None,
        while_serving: Sequence[Callable[[], Awaitable[None]]],
    ) -> None:
        super().__init__(config)
        self._app = app
        self._leave = leave
        self._on_started = on_started
        self._end_requests = end_requests
        self._until_ready = until_ready
        self._while_serving = while_serving
        self._watching: list[asyncio.Task[None]] = []
        self.failure: Exception | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait until ready, then start, and report the start. If asked to stop in the meantime, do not start."""
        if self._until_ready is not None:
            await self._run_until_stopped(self._until_ready())
            if self.should_exit:
                await self._end_requests()
                return
        await super().startup(sockets)
        self._watching = [asyncio.create_task(self._note_failure_of(call())) for call in self._while_serving]
        gc.freeze()  # otherwise, the collector would traverse the model's objects repeatedly
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all requests, then stop; after a failure, do not wait for requests that can no longer be answered."""
        gc.unfreeze()
        await cancel_and_wait(*self._watching)
        if self._leave is not None and self.failure is None:
            await self._leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if self.failure is None else _PARTING_S):
                await self._end_requests()
        if self.failure is not None:
            self.config.timeout_graceful_shutdown = 1
        await super().shutdown(sockets)
        await self._app.wait_for_abandoned_calls(_PARTING_S)

    async def _run_until_stopped(self, call: Awaitable[None]) -> None:
        """Await a call, and cancel it if this server is asked to stop."""
        calling = asyncio.create_task(self._note_failure_of(call))
        try:
            while not calling.done() and not self.should_exit:
                await asyncio.wait({calling}, timeout=_POLL_S)
        finally:
            await cancel_and_wait(calling)

    async def _note_failure_of(self, call: Awaitable[None]) -> None:
        try:
            await call
        except Exception as error:
            self.failure = error if self.failure is None else combine_failures([self.failure, error])
            self._app.fail(self.failure)
            self.should_exit = True


class _UntilFailure:
    """An ASGI application that answers every request with an error once `fail` has been called."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token
        self.last_authorized = time.monotonic()
        """When the last call with the token arrived."""
        self._num_open = 0
        """Number of open requests, except control requests that carry the token."""
        self._most_open = max_connections() * 7 // 8
        """Limit of ``_num_open``; the remaining connections are reserved for control."""
        self._has_failed = asyncio.Event()
        self._error = InflightError()
        self._abandoned: set[asyncio.Future[None]] = set()

    def fail(self, error: Exception) -> None:
        """Make all running and later requests fail with the first line of ``error``."""
        line = str(error).partition("\n")[0]
        if isinstance(error, InflightError):
            self._error = error_from_code(error.code, line)
        else:
            self._error = InflightError(f"{type(error).__name__}: {line}")
        self._has_failed.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if carries_token(Headers(scope=scope).get("authorization", ""), self._token):
            self.last_authorized = time.monotonic()
            if scope["path"] not in GENERATION_PATHS:
                return await self._answer(scope, receive, send)
        if self._num_open >= self._most_open:
            busy = BusyError(
                f"{self._num_open} requests are being answered, and no more are accepted: send the request again later"
            )
            return await error_response(busy)(scope, receive, send)
        self._num_open += 1
        try:
            await self._answer(scope, receive, send)
        finally:
            self._num_open -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def begin(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        answering = asyncio.ensure_future(self._app(scope, receive, begin))
        failing = asyncio.create_task(self._has_failed.wait())
        try:
            await asyncio.wait({answering, failing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(failing)
            if not answering.done():  # it may end late, since the process that it waits for may have died
                answering.cancel()
                self._abandoned.add(answering)
                answering.add_done_callback(self._forget)
        if answering.done():
            return answering.result()
        if not has_begun:
            await error_response(self._error)(scope, receive, send)

    async def wait_for_abandoned_calls(self, timeout_s: float) -> None:
        """Wait for cancelled calls: their requests were answered with the failure, or their clients disconnected."""
        if self._abandoned:
            await asyncio.wait(self._abandoned, timeout=timeout_s)

    def _forget(self, answering: asyncio.Future[None]) -> None:
        self._abandoned.discard(answering)
        if not answering.cancelled():
            answering.exception()  # its request got another answer


def _announce(url: str, ready_file: Path | None, on_ready: Callable[[str], None] | None) -> None:
    if ready_file is not None:
        write_whole(ready_file, json.dumps({"url": url, "pid": os.getpid()}))
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

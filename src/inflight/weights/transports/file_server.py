"""Serves a directory of updates over HTTP, in byte ranges, to clients that have the token."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
import time
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from inflight.base.addresses import host_and_port, listen_on
from inflight.errors import TransferError, transfer_error
from inflight.http.tokens import carries_token
from inflight.weights.transports.bucket_files import LATEST, LEASE_NAME, MANIFEST, SESSION_NAME, take_lease
from inflight.weights.transports.store import regular_file

_RUN = re.compile(r"[A-Za-z0-9_~%-][A-Za-z0-9_.~%-]{0,254}")
_BACKLOG = 1024
"""How many connections may wait to be accepted, because many servers connect at the same time."""
_FILE = re.compile(rf"[0-9]{{5,9}}\.safetensors|{re.escape(MANIFEST)}|{LEASE_NAME.pattern}")
_START_S = 10.0
_STOP_S = 5.0


class FileServer:
    """Serves ``directory`` at ``url`` from a thread of this process, only on ``address``, to clients with ``token``.

    ``port`` 0 means any free port. Without a token, a new one is generated. Raises `TransferError` if the address
    cannot be bound.
    """

    def __init__(self, directory: Path, address: str, port: int = 0, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(32)
        try:
            self._listener = listen_on(address, port, backlog=_BACKLOG)
        except OSError as error:
            raise transfer_error(error, f"serving the weights' files on {address}, port {port}") from error
        port = self._listener.getsockname()[1]
        self.url = f"http://{host_and_port(address, port)}"
        config = uvicorn.Config(
            _app(directory, self.token),
            log_config=None,
            access_log=False,
            ws="none",
            lifespan="off",
            timeout_keep_alive=60,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._listener],), name="inflight-file-server", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self.stop()
                raise TransferError(f"serving the weights' files at {self.url} failed: the server did not start")
            time.sleep(0.002)

    def stop(self) -> None:
        """Close every connection and stop the server. Idempotent."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(_STOP_S)
        self._listener.close()


class _LargeSteps(FileResponse):
    chunk_size = 4 << 20  # starlette's 64 KiB take five times as long


class _StoredFile(Response):
    """Sends the contents that a stored file had when it was opened, even if the file has been replaced since."""

    def __init__(self, directory: Path, names: tuple[str, ...]) -> None:
        super().__init__()
        self._directory = directory
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.ExitStack() as opened:
            answer: Response
            try:
                fd, _ = opened.enter_context(regular_file(self._directory, *self._names))
            except (FileNotFoundError, TransferError):
                answer = PlainTextResponse("no such file", 404)
            else:
                answer = _LargeSteps(f"/dev/fd/{fd}", media_type="application/octet-stream", stat_result=os.fstat(fd))
            await answer(scope, receive, send)


def _app(directory: Path, token: str) -> Starlette:
    """Return the application, which answers GET and HEAD for the stored files and handles leases on them."""

    def is_allowed(request: Request) -> bool:
        return carries_token(request.headers.get("authorization", ""), token)

    def answer(request: Request, *names: str) -> Response:
        if not is_allowed(request):
            return PlainTextResponse("the token is missing or wrong", 401, {"WWW-Authenticate": "Bearer"})
        return _StoredFile(directory, names)

    def latest(request: Request) -> Response:
        run = request.path_params["run"]
        return answer(request, run if _RUN.fullmatch(run) else "-", LATEST)

    def file(request: Request) -> Response:
        names = [request.path_params[part] for part in ("run", "session", "file")]
        is_known = all(kind.fullmatch(name) for kind, name in zip((_RUN, SESSION_NAME, _FILE), names, strict=True))
        if is_known and LEASE_NAME.fullmatch(names[-1]) and request.method == "GET" and is_allowed(request):
            with contextlib.suppress(OSError):  # fetching a lease renews it
                take_lease(directory, names[0], names[1], names[2])
        return answer(request, *(names if is_known else ("-",)))

    return Starlette(
        routes=[
            Route(f"/{{run}}/{LATEST}", latest, methods=["GET"]),
            Route("/{run}/{session}/{file}", file, methods=["GET"]),
        ]
    )

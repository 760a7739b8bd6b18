"""A vLLM server that answers while the engine behind it has died."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from inflight.base.tasks import TaskOwner
from inflight.engines.requests import RequestGate
from inflight.engines.routes import EngineRoutes
from inflight.engines.timings import LastUpdate
from inflight.errors import DeadlineError, EndpointError, UnreachableError
from inflight_vllm.updates import VllmUpdates
from tests.gates import NEVER_S, SOON_S


class Server(ThreadingHTTPServer):
    """Answers ``/health`` with ``status``, and nothing else before it is closed."""

    daemon_threads = True

    def __init__(self, status: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = status
        self.is_closed = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path != "/health":
            self.server.is_closed.wait(60.0)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(request.param) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.is_closed.set()
        found.shutdown()


def asked(server: Server, timeout_s: float) -> float:
    """Ask for what the server never answers; returns how long that took."""

    async def main() -> float:
        routes = EngineRoutes(server.url, api_key=None, control_timeout_s=timeout_s, liveness_path="/health")
        began = time.monotonic()
        try:
            await routes.get("/weight_info")
        finally:
            await routes.aclose()
        return time.monotonic() - began

    return asyncio.run(main())


@pytest.mark.parametrize("server", [503], indirect=True)
def test_a_question_that_a_dead_engine_never_answers_ends_long_before_its_deadline(server: Server) -> None:
    began = time.monotonic()
    with pytest.raises(
        EndpointError, match="GET /weight_info received no answer, and GET /health reports that the engine has"
    ):
        asked(server, NEVER_S)
    assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize("server", [200], indirect=True)
def test_a_slow_engine_that_lives_is_waited_for_until_the_deadline(server: Server) -> None:
    with pytest.raises(DeadlineError, match="received no answer within 3 s"):
        asked(server, 3.0)


@pytest.mark.parametrize("ending", ["resume", "fail_requests"])
def test_no_request_waits_for_ever_when_the_server_is_gone_in_the_middle_of_a_pause(ending: str) -> None:
    async def unused() -> Any:
        raise AssertionError("nothing was applied")

    async def main() -> None:
        routes, gate = EngineRoutes("http://127.0.0.1:9", api_key=None, control_timeout_s=5.0), RequestGate()
        background = TaskOwner()
        updates = VllmUpdates(routes, gate, background, LastUpdate(), unused)
        gate.is_open.clear()  # as a pause does
        with pytest.raises(UnreachableError):
            await getattr(updates, ending)()
        assert gate.is_open.is_set()
        await background.aclose(30.0)

    asyncio.run(main())

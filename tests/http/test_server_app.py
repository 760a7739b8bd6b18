"""The application in this process: what it needs, and what a server whose engine died answers."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect

from inflight.errors import InflightError, UnauthorizedError
from inflight.http.client import HttpEndpoint
from inflight.http.listening import InLoopServer, bind
from inflight.http.server import create_app
from inflight.http.serving import serve
from inflight.wire import AbortRequests, ErrorBody
from tests.engine.reference import make_request, serving
from tests.gates import until


def test_an_application_without_a_token_is_not_made(model_dir: Path) -> None:
    async def run() -> None:
        async with serving(model_dir) as endpoint:
            with pytest.raises(ValueError, match="token"):
                create_app(endpoint, token="")

    asyncio.run(run())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_whose_engine_died_is_not_healthy(model_dir: Path) -> None:
    async def run() -> httpx.Response:
        async with serving(model_dir) as endpoint:

            def break_down() -> None:
                endpoint._engine.scheduler.waiting.append(None)  # type: ignore[arg-type]  # any error

            endpoint._engine.call(break_down).result(10)
            await until(lambda: not endpoint._engine._thread.is_alive())
            transport = httpx.ASGITransport(create_app(endpoint, token="secret"))
            async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
                return await client.get("/health")

    response = asyncio.run(run())
    assert response.status_code == 500
    assert "the engine failed" in ErrorBody.model_validate_json(response.content).error.message


def test_a_route_whose_capability_is_not_declared_is_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> httpx.Response:
        async with serving(model_dir) as endpoint:
            declared = (await endpoint.capabilities()).model_copy(update={"partial_rollouts": False})
            monkeypatch.setattr(endpoint, "_capabilities", declared)
            transport = httpx.ASGITransport(create_app(endpoint, token="secret"))
            headers = {"authorization": "Bearer secret"}
            async with httpx.AsyncClient(transport=transport, base_url="http://app", headers=headers) as client:
                return await client.post("/abort_requests", content=b'{"request_ids": ["a"]}')

    response = asyncio.run(run())
    assert response.status_code == 400
    error = ErrorBody.model_validate_json(response.content).error
    assert (error.code, error.message[-33:]) == ("unsupported", "does not support partial_rollouts")


def test_an_endpoint_calls_an_application_in_this_process_through_a_client_that_is_passed_in(model_dir: Path) -> None:
    request = make_request("r", [72, 105], n=2, max_tokens=5, seed=6)
    aborted = AbortRequests(request_ids=("r",))

    async def run() -> None:
        async with serving(model_dir) as served:
            transport = httpx.ASGITransport(create_app(served, token="secret"))
            async with httpx.AsyncClient(transport=transport) as client:
                endpoint = HttpEndpoint("http://app", client=client, token="secret")
                assert await endpoint.capabilities() == await served.capabilities()
                response = await endpoint.generate(request)
                chunks = [chunk async for chunk in endpoint.generate_stream(request)]
                for completion in response.completions:
                    tokens = [t for chunk in chunks if chunk.index == completion.index for t in chunk.token_ids]
                    assert tuple(tokens) == completion.token_ids
                await endpoint.abort_requests(aborted)
                await endpoint.aclose()
                with pytest.raises(UnauthorizedError):
                    await HttpEndpoint("http://app", client=client, token="wrong").abort_requests(aborted)

    asyncio.run(run())


def test_a_bug_in_what_runs_while_a_server_serves_ends_the_server_and_is_raised(model_dir: Path) -> None:
    async def fail() -> None:
        raise TypeError("a bug")

    async def run() -> None:
        async with serving(model_dir) as endpoint, asyncio.timeout(30):
            await serve(endpoint, bind("127.0.0.1", 0), token="secret", while_serving=fail)

    with pytest.raises(TypeError, match="a bug"):
        asyncio.run(run())


def test_a_server_in_the_loop_answers_once_it_has_started_and_reports_that_it_has_ended(model_dir: Path) -> None:
    async def run() -> None:
        async with serving(model_dir) as endpoint, asyncio.timeout(30):
            server = InLoopServer(create_app(endpoint, token="secret"), bind("127.0.0.1", 0))
            client = HttpEndpoint(await server.started())
            assert (await client.health()).ok
            await client.aclose()
            await server.aclose()
            with pytest.raises(InflightError, match="has ended"):
                await server.started()

    asyncio.run(run())


def test_a_streamed_request_has_ended_when_the_answer_to_a_client_that_left_is_over(model_dir: Path) -> None:
    """The connection is lost while the second event is sent, so that the stream is suspended at that time."""

    async def run() -> None:
        async with serving(model_dir) as endpoint:
            app, sent = create_app(endpoint, token="secret"), 0
            body = make_request("r", [72, 105], max_tokens=900, ignore_eos=True).model_copy(update={"stream": True})
            received = iter([{"type": "http.request", "body": body.model_dump_json().encode(), "more_body": False}])

            async def receive() -> dict[str, Any]:
                return next(received, None) or await asyncio.get_running_loop().create_future()

            async def send(message: MutableMapping[str, Any]) -> None:
                nonlocal sent
                sent += message["type"] == "http.response.body"
                if sent == 2:
                    raise OSError("the connection is lost")

            scope = {
                "type": "http",
                "method": "POST",
                "path": "/v1/generate",
                "headers": [(b"host", b"app")],
                "query_string": b"",
            }
            with pytest.raises((OSError, ExceptionGroup, ClientDisconnect)) as failed:
                await app(scope, receive, send)
            running = endpoint._engine.call(lambda: len(endpoint._engine.scheduler.running)).result(10)
            assert running == 0, failed

    asyncio.run(run())

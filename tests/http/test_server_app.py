"""The application in this process: bounds, and what a server of other endpoints answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from inflight.http.server import create_app
from inflight.wire import ErrorBody
from tests.engine.reference import serving, wait_until


def with_client(
    path: Path, call: Callable[[httpx.AsyncClient], Awaitable[httpx.Response]], **options: int
) -> httpx.Response:
    async def run() -> httpx.Response:
        async with serving(path) as endpoint:
            app = create_app(endpoint, token="secret", **options)
            transport = httpx.ASGITransport(app)
            async with asyncio.timeout(30), httpx.AsyncClient(transport=transport, base_url="http://app") as client:
                return await call(client)

    return asyncio.run(run())


def body_of(size_bytes: int) -> bytes:
    """A valid body, padded with white space to a size."""
    return b'{"request_id": "r", "prompt_token_ids": [1], "sampling": {"max_tokens": 1}}'.ljust(size_bytes)


@pytest.mark.parametrize(("size_bytes", "status"), [(1000, 200), (1001, 413), (50_000, 413)])
def test_a_body_over_the_bound_is_refused(model_dir: Path, size_bytes: int, status: int) -> None:
    response = with_client(
        model_dir, lambda client: client.post("/v1/generate", content=body_of(size_bytes)), max_body_bytes=1000
    )
    assert response.status_code == status
    if status == 413:
        error = ErrorBody.model_validate_json(response.content).error
        assert error.code == "invalid_request"
        assert "/v1/generate" in error.message
        assert "1000 bytes" in error.message


def test_a_body_over_the_bound_is_not_read_to_its_end(model_dir: Path) -> None:
    num_sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_sent
        while True:
            num_sent += 1
            yield b" " * 400

    response = with_client(
        model_dir, lambda client: client.post("/v1/generate", content=endless()), max_body_bytes=1000
    )
    assert response.status_code == 413
    assert num_sent < 10


def test_control_bodies_are_bounded_too(model_dir: Path) -> None:
    response = with_client(
        model_dir,
        lambda client: client.post(
            "/request_weight_update", content=b" " * 2000, headers={"authorization": "Bearer secret"}
        ),
        max_body_bytes=1000,
    )
    assert response.status_code == 413


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
                endpoint._engine._waiting.append(None)  # type: ignore[arg-type]  # whatever may go wrong in a step

            endpoint._engine.call(break_down).result(10)
            await wait_until(lambda: not endpoint._engine._thread.is_alive())
            transport = httpx.ASGITransport(create_app(endpoint, token="secret"))
            async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
                return await client.get("/health")

    response = asyncio.run(run())
    assert response.status_code == 500
    assert "the engine failed" in ErrorBody.model_validate_json(response.content).error.message

"""The application in this process: what it needs, and what a server whose engine died answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from inflight.http.server import create_app
from inflight.wire import ErrorBody
from tests.engine.reference import serving, wait_until


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
            await wait_until(lambda: not endpoint._engine._thread.is_alive())
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

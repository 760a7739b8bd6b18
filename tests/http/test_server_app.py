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
                endpoint._engine._waiting.append(None)  # type: ignore[arg-type]  # whatever may go wrong in a step

            endpoint._engine.call(break_down).result(10)
            await wait_until(lambda: not endpoint._engine._thread.is_alive())
            transport = httpx.ASGITransport(create_app(endpoint, token="secret"))
            async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
                return await client.get("/health")

    response = asyncio.run(run())
    assert response.status_code == 500
    assert "the engine failed" in ErrorBody.model_validate_json(response.content).error.message

"""Starts the plain server and connects to it, for the kit."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from tests.conformance.plain.endpoint import PlainEndpoint
from tests.gates import reserved_port


@contextlib.asynccontextmanager
async def start(model: Path) -> AsyncIterator[PlainEndpoint]:
    port = reserved_port()
    server = subprocess.Popen(  # noqa: ASYNC220 - a fork, once
        [sys.executable, Path(__file__).with_name("server.py"), model, str(port)]
    )
    try:
        url = f"http://127.0.0.1:{port}"
        async with asyncio.timeout(60), httpx.AsyncClient() as client:
            while True:
                with contextlib.suppress(httpx.ConnectError):
                    await client.get(f"{url}/info")
                    break
                await asyncio.sleep(0.1)
        yield PlainEndpoint(url)
    finally:
        server.kill()
        server.wait()

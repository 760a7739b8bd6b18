"""Starts the plain server and connects to it, for the kit."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from tests.conformance.plain.endpoint import PlainEndpoint


@contextlib.asynccontextmanager
async def start(model: Path) -> AsyncIterator[PlainEndpoint]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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
                if server.poll() is not None:
                    raise RuntimeError(f"the server ended with status {server.returncode}")
                await asyncio.sleep(0.1)
        yield PlainEndpoint(url)
    finally:
        server.kill()
        server.wait()

"""Starts a real SGLang server for a model directory and attaches to it, for the kit and for tests.

    inflight check endpoint tests.engines.sglang_server:start --expected-failures tests/engines/sglang-expected.toml

A start takes about twenty seconds, so that the first server is kept for as long as this process lives, and given to
whoever asks for the same directory again; the kit publishes the checkpoint's weights before it continues.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from inflight.contracts import EngineOptions
from inflight_sglang import KIND, SglangEndpoint

ENVIRONMENT = Path(__file__).parents[2] / ".engines" / "sglang-0.5.23"
_START_S = 150.0
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Server:
    """A server that runs. ``log`` has what it wrote."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    was_ready: bool = False


_servers: dict[Path, Server] = {}


@contextlib.asynccontextmanager
async def start(
    model: Path, *, dtype: str = "float32", max_concurrent: int = 16, arguments: str = ""
) -> AsyncIterator[SglangEndpoint]:
    """Yield an endpoint of a server that serves ``model``."""
    options = EngineOptions(
        model=model,
        name="tiny",
        dtype=dtype,
        device="cpu",
        max_concurrent=max_concurrent,
        threads=1,
        arguments=arguments.split(),
    )
    is_first = not _servers
    server = _servers.get(model)
    if server is None or server.process.poll() is not None:
        server = _servers[model] = _started(options)
    try:
        await _ready(server)
        endpoint = SglangEndpoint(server.url, control_timeout_s=10.0, generate_timeout_s=60.0)
        try:
            yield endpoint
        finally:
            await endpoint.aclose()
    finally:
        if not is_first and len(_servers) > 1:
            stop(_servers.pop(model))


def _started(options: EngineOptions) -> Server:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(ENVIRONMENT / "bin" / "python"), *KIND.command(options, "127.0.0.1", port)]
    log = Path(tempfile.gettempdir()) / f"inflight-sglang-{os.getpid()}-{port}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **KIND.environment(options)},
            process_group=0,
            preexec_fn=_die_with_the_parent,
        )
    return Server(process, f"http://127.0.0.1:{port}", log)


def _die_with_the_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def _ready(server: Server) -> None:
    deadline = time.monotonic() + _START_S
    async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                # An engine that was left paused is not ready, and is there all the same.
                path = KIND.health_path if not server.was_ready else "/model_info"
                if (await client.get(server.url + path)).status_code == 200:
                    server.was_ready = True
                    return
            if server.process.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(server.log.read_text(errors="replace").splitlines()[-20:])
                raise RuntimeError(f"the SGLang server did not come up ({server.process.poll()}):\n{tail}")
            await asyncio.sleep(0.2)


def stop(server: Server) -> None:
    """End a server with everything that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


@atexit.register
def _stop_all() -> None:
    for server in _servers.values():
        stop(server)

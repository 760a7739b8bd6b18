"""The contract in front of an engine: a server that this process starts and ends, or an endpoint in this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from inflight.contracts import EngineKind, EngineOptions, InferenceEndpoint
from inflight.engines.factories import made_endpoint
from inflight.engines.launch import start_engine
from inflight.errors import ConfigError
from inflight.http.joining import JoinSettings
from inflight.http.listening import bind
from inflight.http.serving import serve

_CONTROL_TIMEOUT_S = 30.0
_GENERATE_TIMEOUT_S = 3600.0


def serve_engine(
    kind: EngineKind,
    options: EngineOptions,
    *,
    host: str,
    port: int,
    token: str,
    python: str | None = None,
    engine_port: int = 0,
    start_timeout_s: float = 300.0,
    log: Path | None = None,
    ready_file: Path | None = None,
    exit_with_stdin: bool = False,
    lease_s: float = 0.0,
    joins: JoinSettings | None = None,
    on_start: Callable[[str, Path], None],
    on_wait: Callable[[float], None],
    on_ready: Callable[[str, str], None],
) -> None:
    """Start the engine, serve the contract at ``host:port`` until told to stop, then stop the engine.

    Calls ``on_start`` with the engine's own URL, on loopback, and its log, and ``on_ready`` with the contract's URL and
    the engine's. Raises `ConfigError` if the engine cannot be started or attached to, and `EndpointError` with its last
    lines if it ends by itself or is not healthy in time. Call it from the main thread: SIGTERM exits.
    """
    signal.signal(signal.SIGTERM, _exit)
    with bind(host, port) as listener, start_engine(kind, options, python=python, port=engine_port, log=log) as engine:
        on_start(engine.url, engine.log)
        endpoint = kind.connect(
            engine.url, token=None, control_timeout_s=_CONTROL_TIMEOUT_S, generate_timeout_s=_GENERATE_TIMEOUT_S
        )

        async def until_ready() -> None:
            await engine.wait_until_healthy(start_timeout_s, on_wait)
            await endpoint.capabilities()  # refuses an engine with unsuitable settings

        asyncio.run(
            serve(
                endpoint,
                listener,
                token=token,
                ready_file=ready_file,
                exit_with_stdin=exit_with_stdin,
                lease_s=lease_s,
                joins=joins,
                on_ready=lambda url: on_ready(url, engine.url),
                until_ready=until_ready,
                while_serving=engine.watch,
            )
        )


def serve_factory(
    factory: str,
    model: Path,
    options: Mapping[str, Any],
    *,
    host: str,
    port: int,
    token: str,
    start_timeout_s: float = 300.0,
    ready_file: Path | None = None,
    exit_with_stdin: bool = False,
    lease_s: float = 0.0,
    joins: JoinSettings | None = None,
    on_ready: Callable[[str, str], None],
    while_serving: Callable[[InferenceEndpoint], Awaitable[None]] | None = None,
) -> None:
    """Serve the endpoint that ``module:function`` makes in this process, at ``host:port``, until told to stop.

    Modules of the working directory can be imported. Calls ``on_ready`` with the endpoint's name and the URL. Raises
    `ConfigError` as `made_endpoint` does, and if an awaitable factory takes longer than ``start_timeout_s``. Call it
    from the main thread: SIGTERM closes the endpoint, leaves its context manager, and exits.
    """

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(start_timeout_s):
                    endpoint = await stack.enter_async_context(made_endpoint(factory, model, options))
            except TimeoutError as error:
                raise ConfigError(
                    f"{factory} made no endpoint within {start_timeout_s:g} s (--start-timeout)"
                ) from error

            async def until_ready() -> None:
                await endpoint.capabilities()

            await serve(
                endpoint,
                listener,
                token=token,
                ready_file=ready_file,
                exit_with_stdin=exit_with_stdin,
                lease_s=lease_s,
                joins=joins,
                on_ready=lambda url: on_ready(endpoint.name, url),
                until_ready=until_ready,
                while_serving=None if while_serving is None else lambda: while_serving(endpoint),
            )

    for number in (signal.SIGTERM, signal.SIGINT):  # exit at once: asyncio would cancel the clean-up
        signal.signal(number, _exit)
    sys.path.insert(0, os.getcwd())
    with bind(host, port) as listener:
        asyncio.run(run())


def _exit(number: int, _: object) -> None:
    sys.exit(128 + number)  # unwinding stops the engine

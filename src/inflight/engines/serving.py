"""The contract in front of an engine's own server: one process that starts it, owns its state, and ends with it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

from inflight.engines.kinds import EngineKind, EngineOptions
from inflight.engines.launch import start_engine
from inflight.http.serving import bind, serve

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
    on_start: Callable[[str, Path], None],
    on_wait: Callable[[float], None],
    on_ready: Callable[[str, str], None],
) -> None:
    """Start the engine, serve the contract at ``host:port`` until told to stop, then stop the engine.

    ``on_start`` is told the engine's own URL, on loopback, and its log; ``on_ready`` the contract's URL and the
    engine's. Raises `ConfigError` if the engine cannot be started or attached to, and `EndpointError` with its last
    lines if it ends by itself or is not healthy in time. To be called from the main thread: SIGTERM exits.
    """
    signal.signal(signal.SIGTERM, _exit)
    with bind(host, port) as listener, start_engine(kind, options, python=python, port=engine_port, log=log) as engine:
        on_start(engine.url, engine.log)
        endpoint = kind.connect(
            engine.url, token=None, control_timeout_s=_CONTROL_TIMEOUT_S, generate_timeout_s=_GENERATE_TIMEOUT_S
        )

        async def until_ready() -> None:
            await engine.wait_until_healthy(start_timeout_s, on_wait)
            await endpoint.capabilities()  # refuses an engine that was started in another way than is needed

        serve(
            endpoint,
            listener,
            token=token,
            ready_file=ready_file,
            exit_with_stdin=exit_with_stdin,
            on_ready=lambda url: on_ready(url, engine.url),
            until_ready=until_ready,
            while_serving=engine.watch,
        )


def _exit(number: int, _: object) -> None:
    sys.exit(128 + number)  # unwinds, and so stops the engine

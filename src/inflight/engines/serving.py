"""The contract in front of an engine's own server: one process that starts it, owns its state, and ends with it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from inflight.contracts import InferenceEndpoint
from inflight.engines.kinds import EngineKind, EngineOptions
from inflight.engines.launch import died, started
from inflight.http.serving import bind, end_of_stdin, serve

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
    on_wait: Callable[[float], None] | None = None,
    on_ready: Callable[[str, str], None] | None = None,
) -> None:
    """Start the engine, serve the contract at ``host:port`` until told to stop, then stop the engine.

    ``on_ready`` is told both URLs; the engine's own is on loopback. Raises `ConfigError` with the engine's own words if
    it does not start, or was started in a way that inflight cannot attach to, and `EndpointError` if it dies later. To
    be called from the main thread.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    with (
        bind(host, port) as listener,
        started(
            kind, options, python=python, port=engine_port, timeout_s=start_timeout_s, log=log, on_wait=on_wait
        ) as engine,
    ):
        asyncio.run(_attach(_connected(kind, engine.url)))
        serve(
            _connected(kind, engine.url),
            listener,
            token=token,
            until=[engine.wait, *([end_of_stdin] if exit_with_stdin else [])],
            ready_file=ready_file,
            on_ready=None if on_ready is None else lambda url: on_ready(url, engine.url),
        )
        if engine.process.poll() is not None:
            raise died(engine)


def _connected(kind: EngineKind, url: str) -> InferenceEndpoint:
    return kind.connect(url, token=None, control_timeout_s=_CONTROL_TIMEOUT_S, generate_timeout_s=_GENERATE_TIMEOUT_S)


async def _attach(endpoint: InferenceEndpoint) -> None:
    """Have a server that cannot be attached to refused before anything is served."""
    try:
        await endpoint.capabilities()
    finally:
        await endpoint.aclose()


def _interrupt(_: int, __: object) -> None:
    raise KeyboardInterrupt  # unwinds, and so stops the engine

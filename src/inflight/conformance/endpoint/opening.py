"""Opens the endpoint of a target: connects to a URL, calls a factory, or starts a server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from inflight.conformance.targets import SERVER_GROUP, EndpointTarget
from inflight.contracts import InferenceEndpoint
from inflight.engines.factories import open_endpoint
from inflight.errors import ConfigError, DeadlineError, EndpointError, InflightError
from inflight.http.client import HttpEndpoint
from inflight.http.kinds import connect_endpoint

_TIMEOUTS = {"control_timeout_s": 10.0, "generate_timeout_s": 60.0}


@dataclass(frozen=True, slots=True)
class OpenedEndpoint:
    """An endpoint that responds.

    It has ``url`` and ``token`` if it speaks HTTP, and ``process`` if the kit started it. ``connect`` creates another
    client of the same server that shares no state with ``endpoint``; it is None if that is impossible.
    """

    endpoint: InferenceEndpoint
    url: str | None = None
    token: str | None = None
    process: subprocess.Popen[bytes] | None = None
    is_ours: bool = True
    """Whether the kit created the endpoint and can create another one."""
    connect: Callable[[], InferenceEndpoint] | None = None


@contextlib.asynccontextmanager
async def open_target(
    target: EndpointTarget, model: Path | None, directory: Path, deadline_s: float
) -> AsyncIterator[OpenedEndpoint]:
    """Yield the target's endpoint, which serves ``model``. On exit, close it and stop the server if one was started.

    Raises `ConfigError`, or an `EndpointError` if a server does not answer according to the contract.
    """
    if target.url is not None:
        connect = partial(connect_endpoint, target.url, token=target.token, **_TIMEOUTS)
        async with contextlib.aclosing(connect()) as attached:
            try:
                await attached.capabilities()
            except DeadlineError as error:
                message = f"{error.message}; the server accepts connections; check that it implements this contract"
                raise DeadlineError(message, error.endpoint) from error
            url, token = (target.url, target.token) if isinstance(attached, HttpEndpoint) else (None, None)
            yield OpenedEndpoint(attached, url, token, is_ours=False, connect=connect)
    elif target.factory is not None:
        assert model is not None
        making = open_endpoint(target.factory, model, target.options)
        async with making as made, contextlib.aclosing(made):
            yield OpenedEndpoint(made, connect=getattr(made, "another_client", None))
    else:
        assert target.command is not None and model is not None
        async with _started(target.command, model, directory, deadline_s) as started:
            yield started


@contextlib.asynccontextmanager
async def _started(command: str, model: Path, directory: Path, deadline_s: float) -> AsyncIterator[OpenedEndpoint]:
    token, number = secrets.token_urlsafe(16), secrets.token_hex(4)
    token_file, output = directory / f"token-{number}", directory / f"server-{number}.txt"
    token_file.touch(mode=0o600)
    token_file.write_text(token)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    filled = [word.format(model=model, port=port, token_file=token_file) for word in shlex.split(command)]
    with output.open("wb") as out:
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 - a fork, once
                filled,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "INFLIGHT_TOKEN": token},
                process_group=0,
            )
        except OSError as error:
            raise ConfigError(f"{filled[0]!r} cannot be started: {error.strerror}") from error
    noted = directory / f"{SERVER_GROUP}{process.pid}"
    noted.touch()
    url = f"http://127.0.0.1:{port}"
    connect = partial(connect_endpoint, url, token=token, **_TIMEOUTS)
    endpoint = connect()
    try:
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                await endpoint.capabilities()
                break
            except EndpointError as error:
                if process.poll() is not None:
                    how = f"{command!r} ended with status {process.returncode}"
                    raise ConfigError(f"{how}; {_output_of(output)}") from error
                if time.monotonic() > deadline:
                    how = f"{command!r} did not serve at {url} within {deadline_s:g} s: {error}"
                    raise ConfigError(f"{how}; {_output_of(output)}") from error
            await asyncio.sleep(0.1)
        yield OpenedEndpoint(endpoint, url, token, process, connect=connect)
    finally:
        with contextlib.suppress(InflightError):
            await endpoint.aclose()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        noted.unlink(missing_ok=True)


def _output_of(file: Path) -> str:
    last = file.read_text(errors="replace").splitlines()[-15:]
    return "\n".join(["its output:", *last]) if last else "it printed nothing"

"""From a target to an endpoint that answers: connecting to a URL, calling a factory, starting a server by a command."""

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
from pathlib import Path
from typing import Protocol, runtime_checkable

from inflight.conformance.targets import SERVER_GROUP, EndpointTarget
from inflight.contracts import InferenceEndpoint
from inflight.engines.factories import made_endpoint
from inflight.engines.kinds import connect_endpoint
from inflight.errors import ConfigError, DeadlineError, EndpointError, InflightError
from inflight.http.client import HttpEndpoint

CONTROL_TIMEOUT_S = 10.0
GENERATE_TIMEOUT_S = 60.0


@runtime_checkable
class OneOfManyClients(Protocol):
    """What an endpoint from a factory may have beside the contract, if it is a client of a server."""

    def another_client(self) -> InferenceEndpoint:
        """Return a further client of the same server, which shares no state with this one."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An endpoint that answers. ``url`` and ``token`` if it speaks HTTP, ``process`` if the kit started it.

    ``connect`` makes a further client of the same server; None if ``endpoint`` is the only way to it.
    """

    endpoint: InferenceEndpoint
    url: str | None = None
    token: str | None = None
    process: subprocess.Popen[bytes] | None = None
    connect: Callable[[], InferenceEndpoint] | None = None

    def another_client(self, token: str | None = None) -> HttpEndpoint:
        """Return a further connection to the same server, with another token if given."""
        assert self.url is not None
        return _client(self.url, token or self.token)


@contextlib.asynccontextmanager
async def opened(
    target: EndpointTarget, model: Path | None, directory: Path, deadline_s: float
) -> AsyncIterator[Opened]:
    """Yield the target's endpoint, serving ``model``; close it, and stop what was started, on the way out.

    Raises `ConfigError`, or the `EndpointError` of a server that gives no sensible answer.
    """
    if (url := target.url) is not None:

        def connect() -> InferenceEndpoint:
            return connect_endpoint(
                url, token=target.token, control_timeout_s=CONTROL_TIMEOUT_S, generate_timeout_s=GENERATE_TIMEOUT_S
            )

        attached = connect()
        known = (url, target.token) if isinstance(attached, HttpEndpoint) else (None, None)
        try:
            await _answers(attached)
            yield Opened(attached, url=known[0], token=known[1], connect=connect)
        finally:
            await attached.aclose()
    elif target.factory is not None:
        assert model is not None
        async with _made(target, model) as made:
            yield Opened(made, connect=made.another_client if isinstance(made, OneOfManyClients) else None)
    else:
        assert target.command is not None and model is not None
        async with _started(target.command, model, directory, deadline_s) as started:
            yield started


def _client(url: str, token: str | None) -> HttpEndpoint:
    return HttpEndpoint(url, token=token, control_timeout_s=CONTROL_TIMEOUT_S, generate_timeout_s=GENERATE_TIMEOUT_S)


async def _answers(endpoint: InferenceEndpoint) -> None:
    try:
        await endpoint.capabilities()
    except DeadlineError as error:
        message = f"{error.message}; the server accepts connections, but is it one that speaks this contract?"
        raise DeadlineError(message, error.endpoint) from error


@contextlib.asynccontextmanager
async def _made(target: EndpointTarget, model: Path) -> AsyncIterator[InferenceEndpoint]:
    assert target.factory is not None
    async with made_endpoint(target.factory, model, target.options) as made, contextlib.aclosing(made):
        yield made


@contextlib.asynccontextmanager
async def _started(command: str, model: Path, directory: Path, deadline_s: float) -> AsyncIterator[Opened]:
    token, number = secrets.token_urlsafe(16), secrets.token_hex(4)
    token_file, output = directory / f"token-{number}", directory / f"server-{number}.txt"
    token_file.touch(mode=0o600)
    token_file.write_text(token)
    port = _free_port()
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
    endpoint = _client(url, token)
    try:
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                await endpoint.capabilities()
                break
            except EndpointError as error:
                words = f"{command!r} gave no server at {url}: {error}; its output:\n{_tail(output)}"
                if process.poll() is not None:
                    raise ConfigError(f"{command!r} ended with status {process.returncode}; {_tail(output)}") from error
                if time.monotonic() > deadline:
                    raise ConfigError(words) from error
            await asyncio.sleep(0.1)
        yield Opened(endpoint, url, token, process, connect=lambda: _client(url, token))
    finally:
        with contextlib.suppress(InflightError):
            await endpoint.aclose()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        noted.unlink(missing_ok=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(output: Path) -> str:
    return "\n".join(output.read_text(errors="replace").splitlines()[-15:])

"""From a target to an endpoint that answers: connecting to a URL, calling a factory, starting a server by a command."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import secrets
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from inflight.conformance.targets import SERVER_GROUP, EndpointTarget, resolve
from inflight.contracts import InferenceEndpoint
from inflight.engines.kinds import connect_endpoint
from inflight.errors import ConfigError, DeadlineError, EndpointError, InflightError
from inflight.http.client import HttpEndpoint

CONTROL_TIMEOUT_S = 10.0
GENERATE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Opened:
    """An endpoint that answers. ``url`` and ``token`` if it speaks HTTP, ``process`` if the kit started it."""

    endpoint: InferenceEndpoint
    url: str | None = None
    token: str | None = None
    process: subprocess.Popen[bytes] | None = None

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
    if target.url is not None:
        attached = connect_endpoint(
            target.url, token=target.token, control_timeout_s=CONTROL_TIMEOUT_S, generate_timeout_s=GENERATE_TIMEOUT_S
        )
        speaks_http = isinstance(attached, HttpEndpoint)
        try:
            await _answers(attached)
            yield Opened(attached, *((target.url, target.token) if speaks_http else ()))
        finally:
            await attached.aclose()
    elif target.factory is not None:
        assert model is not None
        async with _made(target, model) as made:
            yield Opened(made)
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
    made = resolve(target.factory)(model, **target.options)
    if inspect.isawaitable(made):
        made = await made
    async with contextlib.AsyncExitStack() as stack:
        if hasattr(made, "__aenter__"):
            made = await stack.enter_async_context(made)
        if not isinstance(made, InferenceEndpoint):
            raise ConfigError(f"{target.factory} returned a {type(made).__name__}, which is no InferenceEndpoint")
        stack.push_async_callback(made.aclose)
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
        yield Opened(endpoint, url, token, process)
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

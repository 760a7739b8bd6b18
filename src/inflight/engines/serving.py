"""``inflight serve``: serves the contract for an engine in this process, or in a process that it starts and ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from inflight.base.addresses import is_loopback
from inflight.base.progress import report_log_records
from inflight.contracts import CountingEndpoint, EngineKind, EngineOptions, InferenceEndpoint
from inflight.engines.factories import keyword_arguments, open_endpoint
from inflight.engines.launch import EngineProcess, start_engine
from inflight.errors import ConfigError, DeadlineError, UnreachableError
from inflight.http.joining import JoinSettings
from inflight.http.kinds import load_engine_kind
from inflight.http.listening import bind
from inflight.http.server_spec import ServerSpec, flag_of
from inflight.http.serving import serve
from inflight.http.tls import server_tls
from inflight.http.tokens import GENERATION_TOKEN_VARIABLE, TOKEN_VARIABLE, read_token

_CONTROL_TIMEOUT_S = 30.0
_GENERATE_TIMEOUT_S = 3600.0
_NOT_OF_FUNCTIONS = ("kv_cache_bytes", "compile", "drafts")

Note = Callable[[str], None]
"""Shows a line to the user."""


def run_server(spec: ServerSpec, host: str, token: str, *, note: Note, on_ready: Note) -> None:
    """Serve ``spec`` on ``host`` until SIGINT, SIGTERM or another reason to stop, then end the engine as well.

    ``on_ready`` receives the line with the server's address, and ``note`` all other lines. Raises `ConfigError` if the
    server cannot be started, and `EndpointError` with the last lines of the engine's output if the engine ends by
    itself or is not healthy in time. Call it from the main thread.
    """
    kind = None if ":" in spec.engine else load_engine_kind(spec.engine)
    _check(spec, kind)
    listen = spec.listen
    generation_token = _generation_token(spec, host, token)
    joins = _join_settings(spec, note)
    serving = partial(serve, token=token, generation_token=generation_token, listen=listen, joins=joins)
    follow = _follower(spec, note)
    if kind is None:
        sys.path.insert(0, os.getcwd())
        # Immediately, because asyncio would cancel the clean-up.
        with _exiting_on(signal.SIGTERM, signal.SIGINT), bind(host, listen.port) as listener:
            asyncio.run(_serve_function(spec, listener, serving, follow, on_ready))
    elif kind.runs_in_process:
        report_log_records(note)
        with bind(host, listen.port) as listener:
            endpoint = kind.load(spec.options.with_defaults())
            asyncio.run(
                serving(
                    endpoint,
                    listener,
                    stats=endpoint.stats if isinstance(endpoint, CountingEndpoint) else None,
                    on_ready=lambda url: on_ready(f"serving {endpoint.name} at {url}"),
                    while_serving=None if follow is None else partial(follow, endpoint),
                )
            )
    else:
        with _exiting_on(signal.SIGTERM), bind(host, listen.port) as listener:
            _serve_process(spec, kind, listener, serving, note, on_ready)


async def _serve_function(
    spec: ServerSpec,
    listener: socket.socket,
    serving: Callable[..., Awaitable[None]],
    follow: Callable[[InferenceEndpoint], Awaitable[None]] | None,
    on_ready: Note,
) -> None:
    """Serve the endpoint that ``module:function`` creates in this process.

    Raises the errors of `open_endpoint`, and `ConfigError` if an awaitable factory takes too long.
    """
    timeout_s, arguments = spec.process.start_timeout_s, keyword_arguments(spec.options.arguments, "--engine-arg")
    chosen = {
        name: value for name, value in _non_default_options(spec.options).items() if name not in ("model", "arguments")
    }
    async with contextlib.AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(timeout_s):
                endpoint = await stack.enter_async_context(
                    open_endpoint(spec.engine, spec.options.model, chosen | arguments)
                )
        except TimeoutError as error:
            raise ConfigError(f"{spec.engine} returned no endpoint within {timeout_s:g} s (--start-timeout)") from error

        async def until_ready() -> None:
            await endpoint.capabilities()

        await serving(
            endpoint,
            listener,
            on_ready=lambda url: on_ready(f"serving {endpoint.name} at {url} ({spec.engine})"),
            until_ready=until_ready,
            while_serving=None if follow is None else partial(follow, endpoint),
        )


def _serve_process(
    spec: ServerSpec,
    kind: EngineKind,
    listener: socket.socket,
    serving: Callable[..., Any],
    note: Note,
    on_ready: Note,
) -> None:
    """Start an engine in a separate process, and serve it from this one."""
    options, process = spec.options.with_defaults(), spec.process
    with start_engine(kind, options, python=process.python, port=process.engine_port, log=process.log) as engine:
        note(f"starting {kind.name} at {engine.url}; its output is in {engine.log}")
        endpoint = kind.connect(
            engine.url, token=None, control_timeout_s=_CONTROL_TIMEOUT_S, generate_timeout_s=_GENERATE_TIMEOUT_S
        )

        async def until_ready() -> None:
            await until_described(
                engine,
                endpoint,
                process.start_timeout_s,
                lambda seconds: note(f"waiting for {kind.name} ... {seconds:.0f} s"),
            )

        asyncio.run(
            serving(
                endpoint,
                listener,
                on_ready=lambda url: on_ready(f"serving {options.name} at {url} ({kind.name} at {engine.url})"),
                until_ready=until_ready,
                while_serving=engine.watch,
            )
        )


async def until_described(
    engine: EngineProcess, endpoint: InferenceEndpoint, timeout_s: float, on_wait: Callable[[float], None]
) -> None:
    """Return once the engine is healthy and has reported its capabilities.

    On a busy machine, an engine may become healthy long before it answers, so calls without an answer are repeated
    until ``timeout_s`` has passed. Raises the errors of `EngineProcess.wait_until_healthy`, and those of
    ``capabilities()``, for example for an engine with unsuitable settings.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        await engine.wait_until_healthy(deadline - time.monotonic(), on_wait)
        try:
            await endpoint.capabilities()
        except (DeadlineError, UnreachableError):
            if time.monotonic() >= deadline:
                raise
        else:
            return


def _check(spec: ServerSpec, kind: EngineKind | None) -> None:
    """Raise `ConfigError` for options that do not apply; ``kind`` is None for an engine named ``module:function``."""
    options, process, ready_file = spec.options, spec.process, spec.listen.ready_file
    if ready_file is not None and not ready_file.parent.is_dir():
        raise ConfigError(f"ready file {str(ready_file)!r} cannot be written: its directory does not exist")
    server_tls(spec.listen.tls_certificate, spec.listen.tls_key, spec.listen.tls_client_ca)
    if options.threads is not None and options.threads < 1:
        raise ConfigError(f"--threads must be at least 1, not {options.threads}")
    if not process.start_timeout_s > 0:
        raise ConfigError(f"--start-timeout must be above 0, not {process.start_timeout_s:g}")
    wrong = _non_default_options(options).keys() & {*(_NOT_OF_FUNCTIONS if kind is None else kind.unsupported_options)}
    if wrong:
        raise ConfigError(f"{flag_of(min(wrong))} does not apply to engine {spec.engine!r}: omit it")
    if kind is not None and not kind.runs_in_process:
        if spec.following.follow is not None:
            raise ConfigError("--follow works only with an engine in this process; publish to this --engine instead")
        if not (options.model / "config.json").is_file():
            raise ConfigError(f"model directory {str(options.model)!r} does not exist, or has no config.json")
    elif process.python is not None or process.engine_port or process.log is not None:
        raise ConfigError(
            f"--python, --engine-port and --log apply only to engines in a process of their own, but {spec.engine} "
            "runs in this one: omit them"
        )


def _non_default_options(options: EngineOptions) -> dict[str, Any]:
    """Return the options that differ from their defaults."""
    values = {it.name: (getattr(options, it.name), it.default) for it in dataclasses.fields(options)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _generation_token(spec: ServerSpec, host: str, token: str) -> str | None:
    """Return the token that generation accepts in addition to the control token, or None if generation is open."""
    listen = spec.listen
    own = read_token(listen.generation_token_file, GENERATION_TOKEN_VARIABLE)
    if listen.open_generation and own is not None:
        raise ConfigError(f"--open-generation contradicts --generation-token-file and ${GENERATION_TOKEN_VARIABLE}")
    return own or (None if listen.open_generation or is_loopback(host) else token)


def _join_settings(spec: ServerSpec, note: Note) -> JoinSettings | None:
    joining = spec.joining
    if joining.join is None:
        if joining.join_as is not None:
            raise ConfigError("--join-as requires --join, the URL of the run")
        return None
    if read_token(spec.listen.token_file) is None:
        raise ConfigError(f"--join requires the token of the run: set {TOKEN_VARIABLE}, or pass --token-file")
    return JoinSettings(joining.join, joining.grace_s, joining.join_as, note)


def _follower(spec: ServerSpec, note: Note) -> Callable[[InferenceEndpoint], Awaitable[None]] | None:
    """Return a function that loads new versions from a store into an endpoint; None if the spec has no store."""
    following = spec.following
    if following.follow is None:
        if following.follow_run is not None or following.follow_token_file is not None:
            raise ConfigError("--follow-run and --follow-token-file require --follow DIR_OR_URL")
        return None
    if not following.follow_run:
        raise ConfigError("--follow requires --follow-run, the run_id under which the trainer stores versions")
    from inflight.weights.receive.following import follow, store_spec

    token = None if following.follow_token_file is None else read_token(following.follow_token_file)
    store = store_spec(following.follow, following.follow_run, token)
    return lambda endpoint: follow(endpoint, store, note=note)


@contextlib.contextmanager
def _exiting_on(*numbers: int) -> Iterator[None]:
    """Exit on these signals, so that unwinding stops the engine; afterwards, the previous handlers are restored."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""The command ``inflight serve``."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from inflight.commands.shared import parse_size_bytes, print_line
from inflight.contracts import InferenceEndpoint
from inflight.errors import ConfigError
from inflight.http.tokens import TOKEN_VARIABLE, read_token
from inflight.launchers.launcher import ADDRESS_VARIABLE

_Follow = Callable[[InferenceEndpoint], Awaitable[None]]
"""Loads new versions from a store into an endpoint."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="Hugging Face checkpoint with safetensors")
    parser.add_argument(
        "--host",
        default=os.environ.get(ADDRESS_VARIABLE, "127.0.0.1"),
        help="address to listen on (default: what a launcher says, else loopback only)",
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for any free one (default: 8000)")
    parser.add_argument("--name", help="name of the served model (default: the directory's)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), help="default: as stored")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")
    parser.add_argument("--max-model-len", type=int, help="longest sequence in tokens (default: what the model allows)")
    parser.add_argument("--max-concurrent", type=int, help="sequences decoded at a time (default: 64)")
    parser.add_argument(
        "--kv-cache",
        metavar="SIZE",
        help="memory limit for keys and values, such as 2GB; requests wait for room (default: enough for "
        "--max-concurrent sequences of --max-model-len, at most half of the memory; embedded engine only)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the decode step before serving, and capture CUDA graphs on a GPU (embedded engine only)",
    )
    parser.add_argument(
        "--drafts",
        choices=("off", "history", "siblings", "both"),
        default="off",
        help="draft completions from recorded completions of the same prompt, from others of this server, or from both "
        "(default: off; vLLM only drafts from history, SGLang not at all)",
    )
    parser.add_argument("--threads", type=int, help="CPU threads of the engine (default: the engine's choice)")
    parser.add_argument(
        "--token-file", type=Path, help=f"file with the control token (default: ${TOKEN_VARIABLE}, or a new one)"
    )
    parser.add_argument(
        "--ready-file", type=Path, help="file to write url and pid to, as JSON, once the server answers"
    )
    parser.add_argument("--exit-with-stdin", action="store_true", help="stop when standard input ends")
    parser.add_argument(
        "--lease",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="with --exit-with-stdin, go on as long as calls with the token come within this time of each other",
    )
    joining = parser.add_argument_group("joining a run that has servers.join")
    joining.add_argument(
        "--join", metavar="URL", help=f"join the run that listens there; ${TOKEN_VARIABLE} is the run's"
    )
    joining.add_argument(
        "--join-as", metavar="URL", help="where the run reaches this server (default: where it listens)"
    )
    joining.add_argument(
        "--grace",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="when told to stop, how long the run may take to take back what runs here (default: %(default)g)",
    )
    following = parser.add_argument_group("loading new weights that a trainer stores")
    following.add_argument("--follow", metavar="DIR_OR_URL", help="load the newest version stored there")
    following.add_argument("--follow-run", metavar="RUN_ID", help="run_id of the versions to load")
    following.add_argument("--follow-token-file", type=Path, help="file with the token for the URL of --follow")
    engine = parser.add_argument_group(
        "another engine",
        "An installed engine is started on loopback behind this server. module:function is called in this process with "
        "MODEL_DIR; the options above that you set are passed as keyword arguments.",
    )
    engine.add_argument(
        "--engine",
        default="local",
        help="local (embedded, the default), vllm, sglang, another installed engine, or module:function",
    )
    engine.add_argument("--python", help="interpreter of the engine's environment (default: this one)")
    engine.add_argument("--engine-port", type=int, default=0, help="port of the engine itself (default: any free one)")
    engine.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        metavar="=ARG",
        help="an argument for the engine; KEY=VALUE for a function",
    )
    engine.add_argument("--start-timeout", type=float, default=300.0, metavar="SECONDS", help="default: %(default)g")
    engine.add_argument("--log", type=Path, help="file for the engine's output (default: a temporary one)")


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit status."""
    given_token = read_token(arguments.token_file)
    token = given_token or secrets.token_urlsafe(24)
    if arguments.ready_file is not None and not arguments.ready_file.parent.is_dir():
        raise ConfigError(f"ready file {str(arguments.ready_file)!r} cannot be written: its directory does not exist")
    if arguments.threads is not None and arguments.threads < 1:
        raise ConfigError(f"--threads must be at least 1, not {arguments.threads}")

    def say_ready(line: str) -> None:
        print_line(line)
        if given_token is None:
            print_line(f"control token {token} (set {TOKEN_VARIABLE} to choose it)")

    follow = _follower(arguments)
    is_factory = ":" in arguments.engine
    if arguments.max_concurrent is None and not is_factory:
        arguments.max_concurrent = 64
    if arguments.engine == "local":
        _serve_local(arguments, token, say_ready, follow)
        return 0
    if arguments.kv_cache is not None:
        raise ConfigError("--kv-cache applies only to the embedded engine; configure another engine with --engine-arg")
    if arguments.compile:
        raise ConfigError("--compile applies only to the embedded engine; configure another engine with --engine-arg")
    if is_factory and arguments.drafts != "off":
        raise ConfigError(f"--drafts does not apply to {arguments.engine}; pass it what it takes with --engine-arg")
    if not arguments.start_timeout > 0:
        raise ConfigError(f"--start-timeout must be above 0, not {arguments.start_timeout:g}")
    serving = {
        "host": arguments.host,
        "port": arguments.port,
        "token": token,
        "start_timeout_s": arguments.start_timeout,
        "ready_file": arguments.ready_file,
        "exit_with_stdin": arguments.exit_with_stdin,
        "lease_s": arguments.lease,
        "joins": _joins(arguments),
    }
    if is_factory:
        _serve_factory(arguments, serving, say_ready, follow)
    elif follow is not None:
        raise ConfigError("--follow works only with an engine in this process; publish to this --engine instead")
    else:
        _serve_engine(arguments, serving, say_ready)
    return 0


def _joins(arguments: argparse.Namespace) -> Any:
    """Return the `JoinSettings` of a server that joins a run."""
    if arguments.join is None:
        if arguments.join_as is not None:
            raise ConfigError("--join-as needs --join, the URL of the run")
        return None
    from inflight.http.joining import JoinSettings

    if read_token(arguments.token_file) is None:
        raise ConfigError(f"--join needs the token of the run: set {TOKEN_VARIABLE}, or give --token-file")
    return JoinSettings(arguments.join, arguments.grace, arguments.join_as, print_line)


def _follower(arguments: argparse.Namespace) -> _Follow | None:
    if arguments.follow is None:
        if arguments.follow_run is not None or arguments.follow_token_file is not None:
            raise ConfigError("--follow-run and --follow-token-file need --follow DIR_OR_URL")
        return None
    if not arguments.follow_run:
        raise ConfigError("--follow needs --follow-run, the run_id that the trainer stores under")
    from inflight.weights.receive.following import follow, store_spec

    token = None if arguments.follow_token_file is None else read_token(arguments.follow_token_file)
    spec = store_spec(arguments.follow, arguments.follow_run, token)
    return lambda endpoint: follow(endpoint, spec, note=print_line)


def _serve_local(
    arguments: argparse.Namespace, token: str, say_ready: Callable[[str], None], follow: _Follow | None
) -> None:
    """Serve with the embedded engine, in this process."""
    import torch

    from inflight.base.progress import say_what_is_logged
    from inflight.engines.embedded.loading import load_endpoint
    from inflight.http.listening import bind
    from inflight.http.serving import serve

    if arguments.python is not None or arguments.engine_arg or arguments.engine_port or arguments.log is not None:
        raise ConfigError(
            "--python, --engine-arg, --engine-port and --log do not apply to the embedded engine; set --engine"
        )
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    say_what_is_logged(print_line)
    with bind(arguments.host, arguments.port) as listener:
        endpoint = load_endpoint(
            arguments.model,
            name=arguments.name,
            dtype=arguments.dtype,
            device=arguments.device,
            max_model_len=arguments.max_model_len,
            max_concurrent=arguments.max_concurrent,
            kv_cache_bytes=None if arguments.kv_cache is None else parse_size_bytes(arguments.kv_cache),
            compile=arguments.compile,
            drafts=None if arguments.drafts == "off" else arguments.drafts,
        )
        asyncio.run(
            serve(
                endpoint,
                listener,
                token=token,
                stats=endpoint.stats,
                ready_file=arguments.ready_file,
                exit_with_stdin=arguments.exit_with_stdin,
                lease_s=arguments.lease,
                joins=_joins(arguments),
                on_ready=lambda url: say_ready(f"serving {endpoint.name} at {url}"),
                while_serving=None if follow is None else lambda: follow(endpoint),
            )
        )


def _serve_factory(
    arguments: argparse.Namespace, serving: dict[str, Any], say_ready: Callable[[str], None], follow: _Follow | None
) -> None:
    """Serve an endpoint that a function makes in this process."""
    from inflight.engines.factories import keyword_arguments
    from inflight.engines.serving import serve_factory

    if arguments.python is not None or arguments.engine_port or arguments.log is not None:
        raise ConfigError(
            f"--python, --engine-port and --log apply only to engines in a process of their own, but "
            f"{arguments.engine} is called in this one; leave them out"
        )
    names = ("name", "dtype", "device", "max_model_len", "max_concurrent", "threads")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    serve_factory(
        arguments.engine,
        arguments.model,
        given | keyword_arguments(arguments.engine_arg, "--engine-arg"),
        **serving,
        on_ready=lambda name, url: say_ready(f"serving {name} at {url} ({arguments.engine})"),
        while_serving=follow,
    )


def _serve_engine(arguments: argparse.Namespace, serving: dict[str, Any], say_ready: Callable[[str], None]) -> None:
    """Serve with another engine, behind this process."""
    from inflight.engines.serving import serve_engine
    from inflight.http.kinds import EngineOptions, load_engine_kind

    kind = load_engine_kind(arguments.engine)
    if not (arguments.model / "config.json").is_file():
        raise ConfigError(f"model directory {str(arguments.model)!r} does not exist, or has no config.json")
    options = EngineOptions(
        model=arguments.model,
        name=arguments.name or arguments.model.resolve().name,
        dtype=arguments.dtype,
        device=arguments.device,
        max_model_len=arguments.max_model_len,
        max_concurrent=arguments.max_concurrent,
        threads=arguments.threads,
        drafts=None if arguments.drafts == "off" else arguments.drafts,
        arguments=tuple(arguments.engine_arg),
    )
    serve_engine(
        kind,
        options,
        **serving,
        python=arguments.python,
        engine_port=arguments.engine_port,
        log=arguments.log,
        on_start=lambda url, log: print_line(f"starting {kind.name} at {url}; its output is in {log}"),
        on_wait=lambda seconds: print_line(f"waiting for {kind.name} ... {seconds:.0f} s"),
        on_ready=lambda url, behind: say_ready(f"serving {options.name} at {url} ({kind.name} at {behind})"),
    )

"""The command ``inflight tinker``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight.commands.shared import (
    add_listen_arguments,
    event_of_signals,
    packages_of_extra,
    print_line,
    print_progress,
    require_at_least,
    tls_of,
)
from inflight.errors import ConfigError
from inflight.http.tokens import TOKEN_VARIABLE, read_token

if TYPE_CHECKING:
    from inflight.run.config import RunConfig
    from inflight.run.record.run_directory import RunDirectory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = (
        "Further options are settings of a run: --train.threads 2, --servers.max_concurrent 32, "
        "--servers.python ENGINE/bin/python, --updates.transport shm, ..."
    )
    parser.set_defaults(overrides=())
    parser.add_argument("model", type=Path, metavar="DIR", help="the base model, a Hugging Face checkpoint directory")
    parser.add_argument(
        "--name", help="name by which clients request the base model (default: the absolute path of DIR)"
    )
    parser.add_argument("--engine", default="embedded", help="inference engine (default: %(default)s)")
    parser.add_argument(
        "--samplers",
        type=int,
        default=1,
        metavar="N",
        help="number of inference servers, each of which serves one set of weights at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--models",
        type=int,
        default=1,
        metavar="N",
        help="number of models that have ranks at a time; further models take turns (default: %(default)s)",
    )
    parser.add_argument("--trainer", default="fsdp", help="trainer to use for the models (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="number of trainer ranks (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the computation")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("tinker"),
        help="directory for checkpoints and logs; a server that is started again finds its checkpoints there "
        "(default: ./tinker)",
    )
    add_listen_arguments(parser, 8080)
    parser.add_argument(
        "--token-file",
        type=Path,
        help=f"file with the token; clients use the key tml-TOKEN (default: ${TOKEN_VARIABLE}, or a new token)",
    )
    parser.add_argument(
        "--ready-file",
        type=Path,
        help="write the URL and the process id to this file, as JSON, once the server is ready",
    )
    parser.add_argument("--exit-with-stdin", action="store_true", help="stop when standard input is closed")


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal is received."""
    with packages_of_extra("tinker"):
        import inflight.dialects.tinker.app
        import inflight.run.hosting.backend  # noqa: F401 - before anything is started
    from inflight.http.listening import bind

    require_at_least(arguments, samplers=1, models=1, ranks=1)
    token = read_token(arguments.token_file)
    config = config_of(arguments)
    with bind(arguments.host, arguments.port) as listener, contextlib.ExitStack() as stack:
        directory = open_directory(arguments.directory, stack)
        asyncio.run(_serve(arguments, config, directory, token, listener))
    return 0


def config_of(arguments: argparse.Namespace) -> RunConfig:
    """Return the settings of servers and ranks: the overrides, and defaults that depend on the model's size."""
    from inflight.base.toml import check_settings, with_overrides
    from inflight.base.worker_kinds import load_worker_kind
    from inflight.model.shapes import model_shape
    from inflight.run.config import RunConfig
    from inflight.run.machines.devices import num_cores_here
    from inflight.run.model_defaults import with_model_defaults

    settings: dict[str, Any] = {
        "run": {"directory": str(arguments.directory), "num_steps": 1},
        "model": {"path": str(arguments.model.absolute()), "dtype": arguments.dtype},
        "task": {"name": "tinker"},
        "servers": {"engine": arguments.engine, "count": arguments.samplers},
        "train": {"trainer": arguments.trainer, "num_ranks": arguments.ranks},
    }
    config = check_settings(RunConfig, with_overrides(settings, arguments.overrides), "options")
    num_cores = max(1, num_cores_here() // config.train.num_ranks)
    load_worker_kind(config.train.trainer)  # a typing error is reported now, not when a client creates a model
    config, defaults = with_model_defaults(config, model_shape(config.model.path).num_elements, num_cores)
    for text in defaults:
        print_progress(text)
    return config


def open_directory(path: Path, stack: contextlib.ExitStack) -> RunDirectory:
    """Return the directory, which stays locked until the stack is closed.

    Raises `ConfigError` if another server uses it.
    """
    import fcntl

    from inflight.run.record.run_directory import RunDirectory

    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
        file = stack.enter_context((path / "lock").open("a"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"another server uses the directory {str(path)!r}: choose another --directory") from error
    except OSError as error:
        raise ConfigError(f"the directory {str(path)!r} cannot be used: {error.strerror}") from error
    run_id = f"tinker-{secrets.token_hex(6)}"
    return RunDirectory(path=path, run_id=run_id, lock=file.fileno(), checkpoint=None, state=None)


async def _serve(
    arguments: argparse.Namespace,
    config: RunConfig,
    directory: RunDirectory,
    token: str | None,
    listener: socket.socket,
) -> None:
    """Serve until SIGINT or SIGTERM."""
    from inflight.base.json_files import write_json
    from inflight.base.tasks import run_in_background
    from inflight.dialects.tinker.app import KEY_PREFIX, create_app
    from inflight.dialects.tinker.service import TinkerService
    from inflight.http.client import HttpEndpoint
    from inflight.http.listening import InLoopServer
    from inflight.launchers import load_launcher
    from inflight.run.hosting.backend import HostedBackend
    from inflight.run.preflight import read_model

    key, is_new = token or secrets.token_urlsafe(24), token is None
    launcher = load_launcher(config.run.launcher, config.run.launcher_options)
    stopping = event_of_signals(or_end_of_input=arguments.exit_with_stdin)
    try:
        backend = HostedBackend(
            config,
            directory,
            launcher,
            key,
            name=arguments.name or str(config.model.path),
            max_models=arguments.models,
            vocab_size=read_model(config.model.path).vocab_size,
            connect=lambda url: HttpEndpoint(url, token=key),
            note=print_line,
        )
        print_progress("starting servers")
        async with backend.running():
            service = TinkerService(backend, directory.path)
            server = InLoopServer(create_app(service, token=key), listener, tls_of(arguments))
            try:
                async with run_in_background(service.end_idle_sessions()):
                    url = await server.started()
                    print_line(f"serving Tinker's API for {backend.model_name} at {url}")
                    if is_new:
                        print_line(f"clients need TINKER_BASE_URL={url} TINKER_API_KEY={KEY_PREFIX}{key}")
                    write_json(arguments.ready_file, {"url": url, "pid": os.getpid()})
                    await stopping.wait()
            finally:
                await service.aclose()
                await server.aclose()
    finally:
        launcher.close()

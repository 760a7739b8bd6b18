"""The command ``inflight watch``."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

from inflight.commands.shared import add_listen_arguments, collect_garbage_rarely, event_of_signals, print_line, tls_of
from inflight.errors import ConfigError
from inflight.http.tokens import TOKEN_VARIABLE, read_token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN_DIR", help="run directory; several runs are compared with each other"
    )
    add_listen_arguments(parser, 8200)
    parser.add_argument(
        "--token-file",
        type=Path,
        help=f"file with the access token of the page (default: ${TOKEN_VARIABLE}, or a new one)",
    )
    parser.add_argument("--exit-with-stdin", action="store_true", help="stop when standard input is closed")


def run(arguments: argparse.Namespace) -> int:
    """Serve the page until a signal is received."""
    from inflight.http.listening import bind
    from inflight.observe.watch.serving import create_app, follow_runs

    for run in arguments.runs:
        if not run.is_dir():
            raise ConfigError(f"there is no run directory {str(run)!r}: pass the run.directory of a run")
    collect_garbage_rarely()
    tls, token = tls_of(arguments), read_token(arguments.token_file) or secrets.token_urlsafe(24)
    with bind(arguments.host, arguments.port) as listener, follow_runs(arguments.runs) as runs:
        closing = threading.Event()
        app = create_app(runs, token, closing)
        asyncio.run(_serve(app, listener, tls, token, closing, exit_with_stdin=arguments.exit_with_stdin))
    return 0


async def _serve(
    app: Any,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    token: str,
    closing: threading.Event,
    *,
    exit_with_stdin: bool,
) -> None:
    """Serve until SIGINT or SIGTERM or, with --exit-with-stdin, the end of standard input."""
    from inflight.http.listening import InLoopServer

    stopping = event_of_signals(or_end_of_input=exit_with_stdin)
    server = InLoopServer(app, listener, tls)
    try:
        url = await server.started()
        print_line(f"watch at {url}/#token={token}")
        await stopping.wait()
    finally:
        closing.set()
        await server.aclose()

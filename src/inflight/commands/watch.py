"""The commands ``inflight watch`` and ``inflight report``."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError
from inflight.http.tokens import TOKEN_VARIABLE, read_token


def add_parser(commands: Any) -> None:
    """Add ``watch`` and ``report`` to the commands of ``inflight``."""
    watch = commands.add_parser("watch", help="show runs on a page in the browser, while they run or afterwards")
    watch.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="several are compared with each other")
    watch.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback only)")
    watch.add_argument("--port", type=int, default=8200, help="port to listen on, 0 for any free one (default: 8200)")
    watch.add_argument(
        "--token-file", type=Path, help=f"file with the token of the page (default: ${TOKEN_VARIABLE}, or a new one)"
    )
    watch.add_argument("--exit-with-stdin", action="store_true", help="stop when standard input ends")
    watch.set_defaults(call=_watch)
    report = commands.add_parser("report", help="write the page of runs to one HTML file that needs no network")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="several are compared with each other")
    report.add_argument("--output", type=Path, metavar="FILE", help="default: report.html in the first RUN_DIR")
    report.set_defaults(call=_report)


def _watch(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from inflight.http.listening import bind
    from inflight.observe.watch.serving import create_app, following

    for run in arguments.runs:
        if not run.is_dir():
            raise ConfigError(f"there is no run directory {str(run)!r}: give the run.directory of a run")
    collect_rarely()
    token = read_token(arguments.token_file) or secrets.token_urlsafe(24)
    with bind(arguments.host, arguments.port) as listener, following(arguments.runs) as runs:
        closing = threading.Event()
        app = create_app(runs, token, closing)
        asyncio.run(_serve(app, listener, token, closing, exit_with_stdin=arguments.exit_with_stdin))
    return 0


def _report(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from inflight.observe.watch.report import write_report

    collect_rarely()
    output = arguments.output or arguments.runs[0] / "report.html"
    write_report(arguments.runs, output)
    print(f"inflight: wrote {output} ({output.stat().st_size / 1e6:.1f} MB)")
    return 0


def collect_rarely() -> None:
    """Look for garbage more rarely: what is kept of events are many small objects, which hold no cycles."""
    gc.set_threshold(200_000, 20, 20)


async def _serve(
    app: Any, listener: socket.socket, token: str, closing: threading.Event, *, exit_with_stdin: bool
) -> None:
    """Serve until SIGINT or SIGTERM or, if told so, the end of standard input."""
    from inflight.http.listening import InLoopServer

    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    if exit_with_stdin:
        threading.Thread(target=_wait_for_end, args=(loop, stopping), daemon=True).start()
    server = InLoopServer(app, listener)
    try:
        url = await server.started()
        print(f"inflight: watch at {url}/#token={token}", flush=True)
        await stopping.wait()
    finally:
        closing.set()
        await server.aclose()


def _wait_for_end(loop: asyncio.AbstractEventLoop, stopping: asyncio.Event) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    loop.call_soon_threadsafe(stopping.set)

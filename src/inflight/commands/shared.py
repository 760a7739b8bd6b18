"""Helpers shared by commands: output, validation of numbers, and signals that stop a server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import math
import os
import signal
import ssl
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from inflight.base.printable import printable
from inflight.errors import ConfigError


def print_line(line: str) -> None:
    """Print, on standard output, a line about what the command is doing."""
    print(f"inflight: {printable(line)}", flush=True)


def print_progress(line: str) -> None:
    """Print a progress line on standard error, because standard output is for the result."""
    print(f"inflight: {printable(line)}", file=sys.stderr, flush=True)


def add_json_argument(parser: argparse.ArgumentParser, what: str = "the figures") -> None:
    """Add ``--json FILE``, which also writes the printed values to a file."""
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"also write {what} to this file, as JSON")


def add_deadline_scale(parser: argparse.ArgumentParser) -> None:
    """Add ``--deadline-scale``."""
    parser.add_argument(
        "--deadline-scale", type=float, default=1.0, metavar="FLOAT", help="multiply every deadline, for slow machines"
    )


def add_listen_arguments(parser: argparse.ArgumentParser, port: int) -> None:
    """Add ``--host``, ``--port`` and the options that `tls_of` reads."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback only)")
    parser.add_argument(
        "--port", type=int, default=port, help="port to listen on, 0 for any free one (default: %(default)s)"
    )
    parser.add_argument("--tls-certificate", type=Path, metavar="FILE", help="PEM certificate: serve HTTPS")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM file with the key of the certificate")
    parser.add_argument(
        "--tls-client-ca",
        type=Path,
        metavar="FILE",
        help="PEM file of CA certificates: answer only clients whose certificate one of these CAs has signed",
    )


def tls_of(arguments: argparse.Namespace) -> ssl.SSLContext | None:
    """Return the server's TLS context, or None if the arguments name no certificate. Raises `ConfigError`."""
    from inflight.http.tls import server_tls

    return server_tls(arguments.tls_certificate, arguments.tls_key, arguments.tls_client_ca)


def require_at_least(arguments: argparse.Namespace, **least: int) -> None:
    """Raise `ConfigError` if one of these options is below its minimum; None means that the option was omitted."""
    for name, minimum in least.items():
        value = getattr(arguments, name)
        if value is not None and value < minimum:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {minimum}, not {value}")


def require_positive(arguments: argparse.Namespace, *names: str) -> None:
    """Raise `ConfigError` unless each of these options is a finite number above 0; None means omitted."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{name.replace('_', '-')} must be a number above 0, not {value:g}")


@contextlib.contextmanager
def packages_of_extra(extra: str) -> Iterator[None]:
    """Convert a failed import of another project's package into a `ConfigError` that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "inflight":
            raise
        raise ConfigError(f"{error.name} is not installed; pip install 'inflight[{extra}]'") from error


def event_of_signals(*, or_end_of_input: bool = False) -> asyncio.Event:
    """Return an event that is set by SIGINT, by SIGTERM and, if requested, by the end of standard input."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    if or_end_of_input:
        threading.Thread(target=_wait_for_end, args=(loop, stopping), daemon=True).start()
    return stopping


def _wait_for_end(loop: asyncio.AbstractEventLoop, stopping: asyncio.Event) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    loop.call_soon_threadsafe(stopping.set)


def collect_garbage_rarely() -> None:
    """Make garbage collection less frequent, because stored events are many small objects without cycles."""
    gc.set_threshold(200_000, 20, 20)

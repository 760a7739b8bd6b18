"""The command ``inflight relay``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

from inflight.base.tasks import run_in_background
from inflight.commands.shared import event_of_signals, print_line, require_positive
from inflight.errors import ConfigError, transfer_error
from inflight.http.tokens import TOKEN_VARIABLE, read_token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = (
        "Servers load versions from a relay in the same way as from a trainer: start them with 'inflight serve "
        "--follow DIR' on this host, or '--follow URL' on other hosts."
    )
    parser.add_argument("source", metavar="DIR_OR_URL", help="where the trainer or another relay stores versions")
    parser.add_argument(
        "--run", required=True, metavar="RUN_ID", help="run_id under which the trainer stores its versions"
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        help=f"file with the token for a source URL, which clients of this relay need too (default: ${TOKEN_VARIABLE})",
    )
    parser.add_argument("--directory", type=Path, help="where to keep versions (default: in memory)")
    parser.add_argument("--host", metavar="ADDRESS", help="also serve the versions over HTTP at this address")
    parser.add_argument("--port", type=int, default=0, help="with --host: port to listen on (default: any free one)")
    parser.add_argument(
        "--deadline",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="time limit for copying one version (default: %(default)g)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Mirror versions until a signal is received."""
    from inflight.weights.receive.following import relay, store_spec
    from inflight.weights.transports.file_server import FileServer

    if arguments.port and arguments.host is None:
        raise ConfigError("--port needs --host, the address to serve at")
    require_positive(arguments, "deadline")
    token = read_token(arguments.token_file)
    if arguments.host is not None and token is None:
        raise ConfigError(f"--host needs a token, which clients must present: set {TOKEN_VARIABLE} or --token-file")
    spec = store_spec(arguments.source, arguments.run, token)
    if arguments.directory is not None and Path(arguments.source).absolute() == arguments.directory.absolute():
        raise ConfigError(f"--directory {str(arguments.directory)!r} is the source itself; choose another directory")

    async def main() -> None:
        stopped = event_of_signals()
        with _directory(arguments.directory) as directory, contextlib.ExitStack() as serving:
            print_line(f"mirroring run {arguments.run!r} from {arguments.source} in {directory}")
            if arguments.host is not None:
                server = FileServer(directory, arguments.host, arguments.port, token)
                serving.callback(server.stop)
                print_line(f"serving it at {server.url}")
            async with run_in_background(relay(spec, directory, deadline_s=arguments.deadline, note=print_line)):
                await stopped.wait()

    asyncio.run(main())
    return 0


@contextlib.contextmanager
def _directory(given: Path | None) -> Iterator[Path]:
    """Yield the given directory, or a new one in this host's memory that is removed at the end."""
    from inflight.weights.transports.private_directory import PrivateDirectory, memory_directory

    if given is not None:
        yield given.absolute()
        return
    try:
        home = PrivateDirectory(memory_directory())
    except OSError as error:
        raise transfer_error(error, f"creating a directory in {memory_directory()}") from error
    try:
        yield home.path
    finally:
        home.remove()

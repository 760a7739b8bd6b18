"""The command ``inflight relay``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError
from inflight.http.tokens import TOKEN_VARIABLE, read_token


def add_parser(commands: Any) -> None:
    """Add ``relay`` to the commands of ``inflight``."""
    relay = commands.add_parser(
        "relay",
        help="keep the newest stored weights of a run on this host too, for the servers here",
        epilog="Servers follow a relay as they follow a trainer: --follow DIR on this host, --follow URL elsewhere.",
    )
    relay.add_argument("source", metavar="DIR_OR_URL", help="where the trainer, or another relay, stores versions")
    relay.add_argument("--run", required=True, metavar="RUN_ID", help="run_id that the trainer stores under")
    relay.add_argument(
        "--token-file",
        type=Path,
        help=f"file with the token for a URL, which readers of this relay need too (default: ${TOKEN_VARIABLE})",
    )
    relay.add_argument("--directory", type=Path, help="where versions are kept (default: in memory of this host)")
    relay.add_argument("--host", metavar="ADDRESS", help="serve them over HTTP at this address too")
    relay.add_argument("--port", type=int, default=0, help="with --host: port to listen on (default: any free one)")
    relay.add_argument(
        "--deadline",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long one version may take to come (default: %(default)g)",
    )
    relay.set_defaults(call=_relay)


def _relay(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from inflight.weights.receive.following import store_spec
    from inflight.weights.receive.relaying import relay
    from inflight.weights.transports.file_server import FileServer

    if arguments.port and arguments.host is None:
        raise ConfigError("--port needs --host, the address to serve at")
    if not arguments.deadline > 0:
        raise ConfigError(f"--deadline must be above 0, not {arguments.deadline:g}")
    token = read_token(arguments.token_file)
    if arguments.host is not None and token is None:
        raise ConfigError(f"--host needs a token that readers show: set {TOKEN_VARIABLE}, or give --token-file")
    spec = store_spec(arguments.source, arguments.run, token)
    if arguments.directory is not None and Path(arguments.source).absolute() == arguments.directory.absolute():
        raise ConfigError(f"--directory {str(arguments.directory)!r} is the source itself")

    async def main() -> int:
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        with _directory(arguments.directory) as directory, contextlib.ExitStack() as serving:
            _say(f"keeping run {arguments.run!r} of {arguments.source} in {directory}")
            if arguments.host is not None:
                server = FileServer(directory, arguments.host, arguments.port, token)
                serving.callback(server.stop)
                _say(f"serving it at {server.url}")
            relaying = asyncio.ensure_future(relay(spec, directory, deadline_s=arguments.deadline, note=_say))
            waiting = asyncio.ensure_future(stopped.wait())
            await asyncio.wait({relaying, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if relaying.done():
                relaying.result()
            relaying.cancel()
            await asyncio.gather(relaying, return_exceptions=True)
        return 0

    return asyncio.run(main())


@contextlib.contextmanager
def _directory(given: Path | None) -> Iterator[Path]:
    """Yield the directory that is given, or one in this host's memory, which goes with this process."""
    from inflight.errors import transfer_failed
    from inflight.weights.transports.private_directory import PrivateDirectory, memory_directory

    if given is not None:
        yield given.absolute()
        return
    try:
        home = PrivateDirectory(memory_directory())
    except OSError as error:
        raise transfer_failed(error, f"making a directory in {memory_directory()}") from error
    try:
        yield home.path
    finally:
        home.remove()


def _say(line: str) -> None:
    print(f"inflight: {line}", flush=True)

"""The commands ``inflight dialect vllm`` and ``inflight dialect sglang``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import socket
from pathlib import Path
from typing import Any

from inflight.base.addresses import is_loopback
from inflight.commands.dialect_arguments import add_server_arguments
from inflight.commands.shared import add_listen_arguments, event_of_signals, print_line, require_positive, tls_of
from inflight.errors import ConfigError
from inflight.http.tokens import read_token

_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of either command."""
    add_server_arguments(parser, "expose")
    parser.epilog = (
        "Clients that pause or update the servers send the servers' token as a bearer token. If the servers have none, "
        "a new one is printed."
    )
    add_listen_arguments(parser, 8080)
    parser.add_argument(
        "--open",
        action="store_true",
        help="let any process on this host pause and update the servers without a token, for clients that cannot send "
        "one, such as TRL's; only on a loopback address",
    )
    group = parser.add_argument_group(
        "weight updates", "Routes for updates and pauses are served only with --directory."
    )
    group.add_argument(
        "--directory", type=Path, help="where trainers write checkpoints and adapters; no other directory is read"
    )
    group.add_argument("--model", type=Path, metavar="MODEL_DIR", help="checkpoint that the servers were started with")
    group.add_argument("--run-id", default="dialect", help="name of the run (default: %(default)s)")
    group.add_argument(
        "--transport", default="gloo", help="transport from this process to the servers (default: %(default)s)"
    )
    group.add_argument(
        "--pause-lease",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="a pause that is not followed by a call ends after this time (default: %(default)g)",
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="time limit for pausing and for updating the servers (default: %(default)g)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve the protocol until a signal is received."""
    from inflight.http.listening import bind

    require_positive(arguments, "pause_lease", "timeout")
    if (arguments.directory is None) != (arguments.model is None):
        raise ConfigError("--directory and --model require each other: updates are compared with the model's tensors")
    for name in ("directory", "model"):
        if (given := getattr(arguments, name)) is not None and not given.is_dir():
            raise ConfigError(f"--{name} {str(given)!r} is not a directory")
    if arguments.open and not is_loopback(arguments.host):
        raise ConfigError(f"--open is only allowed on a loopback address, not on {arguments.host}")
    token = read_token(arguments.token_file)
    with bind(arguments.host, arguments.port) as listener, contextlib.ExitStack() as stack:
        publisher = None
        if arguments.directory is not None:
            from inflight.weights.send.publisher import WeightPublisher

            publisher = WeightPublisher.connect(
                arguments.urls, run_id=arguments.run_id, token=token, transport=arguments.transport
            )
            stack.callback(publisher.close)
        asyncio.run(_serve(arguments, token, listener, publisher))
    return 0


async def _serve(arguments: argparse.Namespace, token: str | None, listener: socket.socket, publisher: Any) -> None:
    """Serve until SIGINT or SIGTERM."""
    from inflight.dialects.directory_updates import DirectoryUpdates
    from inflight.dialects.sglang.app import sglang_app
    from inflight.dialects.vllm.app import vllm_app
    from inflight.http.kinds import connect_endpoint
    from inflight.http.listening import InLoopServer

    stopping = event_of_signals()
    key = None if arguments.open else token or secrets.token_urlsafe(24)
    async with contextlib.AsyncExitStack() as stack:
        endpoints = [connect_endpoint(url, token=token) for url in arguments.urls]
        for endpoint in endpoints:
            stack.push_async_callback(endpoint.aclose)
            await endpoint.capabilities()
        updates = None
        if publisher is not None:
            updates = DirectoryUpdates(
                publisher,
                arguments.model,
                arguments.directory,
                lease_s=arguments.pause_lease,
                timeout_s=arguments.timeout,
                note=print_line,
            )
            stack.push_async_callback(updates.aclose)
        make_app = {"vllm": vllm_app, "sglang": sglang_app}[arguments.protocol]
        app = make_app(endpoints, token=key, updates=updates, **_texts_of(arguments.model))
        server = InLoopServer(app, listener, tls_of(arguments))
        stack.push_async_callback(server.aclose)
        url = await server.started()
        print_line(f"serving {_NAMES[arguments.protocol]}'s routes at {url}, for {', '.join(arguments.urls)}")
        if updates is not None and key is not None and token is None:
            print_line(f"clients that pause or update the servers need the bearer token {key}")
        await stopping.wait()


def _texts_of(model_dir: Path | None) -> dict[str, Any]:
    """Return functions that convert token ids to text and text to token ids; the dictionary is empty without a
    tokenizer.
    """
    from inflight.model.checkpoints import load_tokenizer

    tokenizer = None if model_dir is None else load_tokenizer(model_dir)
    if tokenizer is None:
        return {}
    return {
        "decode": lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True),
        "encode": lambda text, specials: tokenizer.encode(text, add_special_tokens=specials),
    }

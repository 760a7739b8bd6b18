"""The command ``inflight proxy``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inflight.base.tasks import run_in_background
from inflight.commands.shared import add_listen_arguments, event_of_signals, print_line, require_positive, tls_of
from inflight.contracts import InferenceEndpoint
from inflight.errors import ConfigError
from inflight.http.tokens import GENERATION_TOKEN_VARIABLE, TOKEN_VARIABLE, read_token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = (
        "POST /episodes opens an episode and returns its URL; POST /episodes/KEY/finish returns its rollouts."
    )
    parser.add_argument(
        "urls", nargs="+", metavar="URL", help="inference servers to sample from, such as http://127.0.0.1:8000"
    )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="MODEL_DIR", help="model directory, for its tokenizer"
    )
    add_listen_arguments(parser, 8100)
    parser.add_argument(
        "--token-file", type=Path, help=f"file with the token for /episodes (default: ${TOKEN_VARIABLE}, or a new one)"
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="sampling temperature of every turn (default: %(default)g)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=None, help="token limit of every turn (default: the rest of the context)"
    )
    parser.add_argument(
        "--max-episodes", type=int, default=1024, help="maximum number of open episodes (default: %(default)s)"
    )
    parser.add_argument(
        "--idle-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="close an episode after this long without a request (default: %(default)g)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve episodes until a signal is received."""
    from inflight.environments.proxy.episode_service import EpisodeService
    from inflight.environments.transcripts import ChatTemplate
    from inflight.http.kinds import connect_endpoint
    from inflight.http.listening import bind
    from inflight.model.checkpoints import load_tokenizer
    from inflight.model.images import load_image_processor
    from inflight.wire import SamplingParams

    require_positive(arguments, "temperature", "max_episodes", "idle_timeout", "max_tokens")
    given_token = read_token(arguments.token_file)
    token = given_token or secrets.token_urlsafe(24)
    tokenizer = load_tokenizer(arguments.model)
    if tokenizer is None:
        raise ConfigError(f"model directory {str(arguments.model)!r} has no tokenizer")
    service = EpisodeService(
        ChatTemplate(tokenizer, load_image_processor(arguments.model)),
        SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens),
        token=token,
        model=arguments.model.resolve().name,
        max_episodes=arguments.max_episodes,
        idle_timeout_s=arguments.idle_timeout,
    )
    their_token = read_token(None, GENERATION_TOKEN_VARIABLE)
    endpoints = [connect_endpoint(url, token=their_token) for url in arguments.urls]
    with bind(arguments.host, arguments.port) as listener:
        if given_token is None:
            print_line(f"token {token} (set {TOKEN_VARIABLE} to choose it)")
        asyncio.run(_serve(service, endpoints, listener, tls_of(arguments)))
    return 0


async def _serve(
    service: Any, endpoints: Sequence[InferenceEndpoint], listener: socket.socket, tls: ssl.SSLContext | None
) -> None:
    """Serve until SIGINT or SIGTERM."""
    from inflight.http.listening import InLoopServer

    stopping = event_of_signals()
    async with contextlib.AsyncExitStack() as stack:
        for endpoint in endpoints:
            stack.push_async_callback(endpoint.aclose)
        await service.attach(endpoints)
        await stack.enter_async_context(run_in_background(service.expire()))
        server = InLoopServer(service.app(print_line), listener, tls)
        stack.push_async_callback(server.aclose)
        url = await server.started()
        print_line(f"serving episodes at {url}, on {', '.join(endpoint.name for endpoint in endpoints)}")
        await stopping.wait()

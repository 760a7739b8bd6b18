"""The command ``inflight dialect pipelinerl``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
from typing import Any

from inflight.commands.dialect_arguments import add_server_arguments, add_update_arguments
from inflight.commands.shared import add_listen_arguments, print_line, require_at_least, tls_of
from inflight.errors import ConfigError, InflightError
from inflight.http.tokens import read_token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = "The options of the weight update group have the same names as in PipelineRL."
    add_server_arguments(parser, "expose")
    add_listen_arguments(parser, 8080)
    group = parser.add_argument_group(
        "weight updates", "The weight update route is served only if --weight-update-group-init-method is set."
    )
    group.add_argument(
        "--weight-update-group-init-method",
        metavar="tcp://HOST:PORT",
        help="rendezvous address of the weight update group",
    )
    group.add_argument("--weight-update-group-world-size", type=int, metavar="N", help="number of ranks in the group")
    group.add_argument(
        "--actor-llm-idx", type=int, default=0, metavar="I", help="join the group as rank 1 + I (default: 0)"
    )
    add_update_arguments(group, "pipelinerl")


def run(arguments: argparse.Namespace) -> int:
    """Serve the protocol until a signal is received."""
    from inflight.http.listening import bind

    has_updates = arguments.weight_update_group_init_method is not None
    if has_updates != (arguments.weight_update_group_world_size is not None):
        raise ConfigError("--weight-update-group-init-method and --weight-update-group-world-size require each other")
    require_at_least(arguments, actor_llm_idx=0)
    token = read_token(arguments.token_file)
    with bind(arguments.host, arguments.port) as listener, contextlib.ExitStack() as stack:
        updates = _updates(arguments, token, stack) if has_updates else None
        asyncio.run(_serve(arguments, token, listener, updates))
    return 0


def _updates(arguments: argparse.Namespace, token: str | None, stack: contextlib.ExitStack) -> Any:
    """Return the `ArrivingUpdates` of a group that this process has not joined yet."""
    from inflight.dialects.broadcast_group import BroadcastGroup
    from inflight.dialects.pipelinerl.group import place_of
    from inflight.dialects.pipelinerl.receiving import ArrivingUpdates
    from inflight.weights.send.publisher import WeightPublisher
    from inflight.wire import InFlightPolicy

    place = place_of(
        arguments.weight_update_group_init_method,
        rank=1 + arguments.actor_llm_idx,
        world_size=arguments.weight_update_group_world_size,
        timeout_s=arguments.timeout,
    )
    publisher = WeightPublisher.connect(
        arguments.urls, run_id=arguments.run_id, token=token, transport=arguments.transport
    )
    stack.callback(publisher.close)
    group = BroadcastGroup(place)
    stack.callback(group.abort)
    return ArrivingUpdates(group, publisher, InFlightPolicy(arguments.in_flight), arguments.timeout)


async def _serve(arguments: argparse.Namespace, token: str | None, listener: socket.socket, updates: Any) -> None:
    """Serve until SIGINT or SIGTERM. Raises `TransferError` if the group cannot be formed."""
    import uvicorn

    from inflight.base.threads import run_abandonable
    from inflight.dialects.pipelinerl.app import dialect_app
    from inflight.http.connections import configure, url_of
    from inflight.http.kinds import connect_endpoint

    async def receive(message: Any) -> None:
        try:
            report = await run_abandonable(lambda: updates.receive(message), "inflight-dialect")
        except InflightError as error:
            print_line(f"version {message.version} failed: {error}")
            raise
        print_line(f"version {message.version} is served: {report.summary()}")

    async with contextlib.AsyncExitStack() as stack:
        endpoints = [connect_endpoint(url, token=token) for url in arguments.urls]
        for endpoint in endpoints:
            stack.push_async_callback(endpoint.aclose)
            await endpoint.capabilities()
        app = dialect_app(
            endpoints,
            receive=None if updates is None else receive,
            on_unreadable=lambda: None if updates is None else updates.out_of_step(),
            is_ready=lambda: updates is None or updates.is_in_step,
        )
        tls = tls_of(arguments)
        config = configure(app, listener, tls, timeout_graceful_shutdown=2)
        server = uvicorn.Server(config)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: setattr(server, "should_exit", True))
        if updates is not None:
            print_line("waiting for the trainer's group")
            await run_abandonable(updates.join, "inflight-join")
        print_line(f"speaking PipelineRL's protocol at {url_of(listener, tls)}, for {', '.join(arguments.urls)}")
        await server.serve(sockets=[listener])

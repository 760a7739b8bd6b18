"""The command ``inflight dialect fast_llm``."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from pathlib import Path

from inflight.commands.dialect_arguments import add_server_arguments, add_update_arguments
from inflight.commands.shared import print_line, require_at_least, require_positive
from inflight.dialects.fast_llm.redis_streams import DEFAULT_URL, RedisStreams
from inflight.errors import ConfigError
from inflight.http.tokens import read_token

REDIS_VARIABLE = "INFLIGHT_REDIS"
"""Environment variable with the URL of the Redis server, for URLs with a password."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the protocol."""
    parser.epilog = (
        "Samples from the servers reach the trainer through inflight.dialects.fast_llm.samples. The command ends with "
        "status 0 when the trainer announces the end of training."
    )
    add_server_arguments(parser, "update")
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="MODEL_DIR",
        help="checkpoint directory of the served model; updates with other tensors are dropped",
    )
    parser.add_argument(
        "--redis",
        metavar="URL",
        help="Redis server of the event stream, redis://[:PASSWORD@]HOST:PORT[/DB] "
        f"(default: ${REDIS_VARIABLE}, or {DEFAULT_URL})",
    )
    parser.add_argument(
        "--group",
        required=True,
        metavar="tcp://HOST:PORT",
        help="rendezvous address of the trainer: callbacks.streaming.broadcast.host and .port",
    )
    parser.add_argument(
        "--world-size",
        type=int,
        default=2,
        metavar="N",
        help="number of ranks in the group: callbacks.streaming.broadcast.external_world_size + 1 (default: 2)",
    )
    parser.add_argument(
        "--rank", type=int, default=1, metavar="R", help=("rank under which to join the group (default: 1)")
    )
    parser.add_argument(
        "--host-store",
        action="store_true",
        help="host the group's store in this process, which is required if torchrun makes Fast-LLM a client of the "
        "store (default: the trainer or a launcher hosts it)",
    )
    add_update_arguments(parser, "fast-llm")
    parser.add_argument(
        "--step-timeout",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help=(
            "time limit from one event of the trainer to the next, because it does not announce failures (default: "
            "%(default)g)"
        ),
    )


def run(arguments: argparse.Namespace) -> int:
    """Update the servers until training has finished or a signal is received."""
    require_positive(arguments, "timeout", "step_timeout")
    require_at_least(arguments, rank=1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        try:
            _follow(arguments, stack)
        except KeyboardInterrupt:
            print_line("stopped before training had finished; the trainer's next broadcast fails")
    return 0


def _follow(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> None:
    print_line("connecting to Redis and to the servers")

    from inflight.dialects.broadcast_group import BroadcastGroup
    from inflight.dialects.fast_llm.events import EVENTS, EventReader
    from inflight.dialects.fast_llm.framing import fast_llm_rank_of
    from inflight.dialects.fast_llm.receiving import FollowedTrainer
    from inflight.model.checkpoint_specs import tensor_specs_of
    from inflight.weights.send.publisher import WeightPublisher
    from inflight.wire import InFlightPolicy

    place = fast_llm_rank_of(
        arguments.group,
        rank=arguments.rank,
        world_size=arguments.world_size,
        timeout_s=arguments.timeout,
        hosts_store=arguments.host_store,
    )
    redis = RedisStreams(arguments.redis or os.environ.get(REDIS_VARIABLE) or DEFAULT_URL)
    stack.callback(redis.close)
    redis.state(EVENTS)  # a server that does not answer is reported first
    publisher = WeightPublisher.connect(
        arguments.urls, run_id=arguments.run_id, token=read_token(arguments.token_file), transport=arguments.transport
    )
    stack.callback(publisher.close)
    dtypes = sorted({can.dtype for can in publisher.endpoints.values()})
    if len(dtypes) != 1:
        raise ConfigError(
            f"the servers compute in different dtypes: {', '.join(dtypes)}; serve the model in a single dtype"
        )
    expected = tensor_specs_of(arguments.model, dtypes[0])
    group = BroadcastGroup(place)
    stack.callback(group.abort)
    events = EventReader(redis)  # created first, because the trainer's first event follows the formation
    print_line("waiting for the trainer's group")
    group.join()
    print_line(f"following Fast-LLM's trainer at {arguments.group}, for {', '.join(arguments.urls)}")
    trainer = FollowedTrainer(
        group,
        events,
        publisher,
        expected,
        InFlightPolicy(arguments.in_flight),
        timeout_s=arguments.timeout,
        step_timeout_s=arguments.step_timeout,
    )
    for version, report in trainer.updates():
        if isinstance(report, str):
            print_line(f"version {version} failed: {report}")
        else:
            print_line(f"version {version} is served: {report.summary()}")
    print_line("training has finished")

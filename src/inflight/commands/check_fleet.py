"""The command ``inflight check fleet``: a fault campaign over servers that it starts with a given command."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time

from inflight.base.json_files import check_writable, write_json
from inflight.base.requirements import require
from inflight.commands.shared import add_deadline_scale, add_json_argument, print_progress, require_at_least
from inflight.conformance.fleet.plan import TRANSPORTS
from inflight.errors import ConfigError
from inflight.wire import Needs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Start servers, inject seeded schedules of faults while trainers publish to them, and check the guarantees of "
        "the contract. Exit status: 0 if every schedule passed, 1 otherwise."
    )
    parser.add_argument(
        "--serve",
        metavar="COMMAND",
        help="command that starts a server, with the placeholders {model}, {port} and {token_file}",
    )
    parser.add_argument(
        "--servers", type=int, default=2, metavar="N", help="number of servers to start (default: %(default)s)"
    )
    parser.add_argument(
        "--schedules", type=int, default=20, metavar="N", help="number of schedules to run (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the first schedule (default: %(default)s)")
    parser.add_argument(
        "--transport",
        choices=TRANSPORTS,
        help="weight transport (default: each schedule chooses one that the servers support)",
    )
    parser.add_argument(
        "--senders",
        type=int,
        choices=(1, 2),
        default=1,
        help="number of trainer ranks that send weights; faults are injected into the second (default: %(default)s)",
    )
    add_json_argument(parser)
    add_deadline_scale(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the schedules and print the results; return 1 if one failed."""
    command, scale, file = arguments.serve, arguments.deadline_scale, arguments.json
    if not command:
        raise ConfigError("specify the command that starts a server: inflight check fleet --serve COMMAND")
    if "{port}" not in command or "{model}" not in command:
        raise ConfigError("--serve COMMAND must contain {model} and {port}, the checkpoint to serve and the port")
    require_at_least(arguments, servers=1, schedules=1, seed=0)
    check_writable({"json": file})

    import torch

    from inflight.conformance.fleet.campaign import summary, text_of
    from inflight.conformance.fleet.schedule import judged
    from inflight.conformance.fleet.served import ServedTestbed

    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers end with this process
    started, results = time.monotonic(), []
    with ServedTestbed(command, arguments.servers, scale, print_progress) as testbed:
        can = testbed.capabilities
        print_progress(f"{can.engine} {can.engine_version} over {', '.join(can.transports)}")
        require(can, Needs(transport=arguments.transport, sharded=arguments.senders > 1), "a server")
        try:
            for seed in range(arguments.seed, arguments.seed + arguments.schedules):
                result = judged(seed, testbed, arguments.transport, arguments.senders)
                results.append(result)
                verdict = f"FAILED: {result.problems[0]}" if result.problems else "passed"
                print_progress(
                    f"{len(results)} of {arguments.schedules}, {result.plan}: {result.wall_s:.1f} s, {verdict}"
                )
        finally:  # an interrupted campaign, or one whose servers do not restart, also prints its figures
            figures = summary(results, testbed.kinds, time.monotonic() - started, arguments.senders)
            figures |= {"serve": command, "engine": can.engine, "engine_version": can.engine_version}
            write_json(file, figures)
            again = ["inflight", "check", "fleet", "--serve", command, "--servers", str(arguments.servers)]
            again += ["--deadline-scale", f"{scale:g}", "--senders", str(arguments.senders)]
            again += [] if arguments.transport is None else ["--transport", arguments.transport]
            print(text_of(figures, shlex.join(again)), flush=True)
    return 1 if figures["failed"] else 0

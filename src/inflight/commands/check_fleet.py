"""``inflight check fleet``: its arguments, and a campaign over servers that a command starts."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

from inflight.conformance.fleet.plan import TRANSPORTS
from inflight.errors import ConfigError, UnsupportedError


def add_parser(kinds: Any) -> None:
    """Add ``fleet`` to the kinds of targets; ``kinds`` comes from ``add_subparsers``."""
    fleet = kinds.add_parser(
        "fleet",
        help="servers under faults, while trainers publish to them",
        description="Run seeded schedules of faults over servers of one command. Exit status: 0 all held, 1 not.",
    )
    fleet.add_argument(
        "--serve", metavar="COMMAND", help='command that starts a server, with "{model} {port} {token_file}" in it'
    )
    fleet.add_argument("--servers", type=int, default=2, metavar="N", help="default: %(default)s")
    fleet.add_argument("--schedules", type=int, default=20, metavar="N", help="default: %(default)s")
    fleet.add_argument("--seed", type=int, default=0, help="of the first schedule (default: %(default)s)")
    fleet.add_argument("--transport", choices=TRANSPORTS, help="default: each schedule takes one that is declared")
    fleet.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    fleet.add_argument(
        "--deadline-scale", type=float, default=1.0, metavar="FLOAT", help="factor on every deadline, for slow machines"
    )


def run_fleet(arguments: argparse.Namespace) -> int:
    """Run ``inflight check fleet`` and return the exit status."""
    command, scale, file = arguments.serve, arguments.deadline_scale, arguments.json
    if not command:
        raise ConfigError("say how a server is started: inflight check fleet --serve COMMAND")
    if "{port}" not in command or "{model}" not in command:
        raise ConfigError("--serve COMMAND must hold {model} and {port}: what to serve, and where it is looked for")
    for name in ("servers", "schedules"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, not {getattr(arguments, name)}")
    if arguments.seed < 0:
        raise ConfigError(f"--seed must not be negative, not {arguments.seed}")
    if not (math.isfinite(scale) and scale > 0):
        raise ConfigError(f"--deadline-scale must be a number above 0, not {scale}")
    if file is not None and not file.parent.is_dir():
        raise ConfigError(f"{str(file)!r} cannot be written: its directory does not exist")

    import torch

    from inflight.conformance.fleet.campaign import summary, text_of
    from inflight.conformance.fleet.schedule import judged
    from inflight.conformance.fleet.served import ServedPlace

    def tell(text: str) -> None:
        print(f"fleet: {text}", file=sys.stderr, flush=True)

    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers end with this process
    started, results = time.monotonic(), []
    with ServedPlace(command, arguments.servers, scale, tell) as place:
        declared = place.capabilities
        tell(f"{declared.engine} {declared.engine_version} over {', '.join(declared.transports)}")
        if arguments.transport is not None and arguments.transport not in declared.transports:
            raise UnsupportedError(f"the servers do not declare {declared.lacks(transport=arguments.transport)}")
        try:
            for seed in range(arguments.seed, arguments.seed + arguments.schedules):
                result = judged(seed, place, arguments.transport)
                results.append(result)
                said = f"FAILED: {result.problems[0]}" if result.problems else "held"
                tell(f"{len(results)} of {arguments.schedules}, {result.plan}: {result.wall_s:.1f} s, {said}")
        finally:  # also the figures of a campaign that is interrupted, or whose servers do not start again
            figures = summary(results, place.kinds, time.monotonic() - started)
            figures |= {"serve": command, "engine": declared.engine, "engine_version": declared.engine_version}
            if file is not None:
                file.write_text(json.dumps(figures, indent=2) + "\n")
            again = ["inflight", "check", "fleet", "--serve", command, "--servers", str(arguments.servers)]
            again += ["--deadline-scale", f"{scale:g}"]
            again += [] if arguments.transport is None else ["--transport", arguments.transport]
            print(text_of(figures, shlex.join(again)), flush=True)
    return 1 if figures["failed"] else 0

"""The command ``inflight check parity``: compares the logprobs of an endpoint and a worker."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from typing import Any

from inflight.base.json_files import check_writable, write_json
from inflight.commands.shared import add_deadline_scale, add_json_argument, print_progress, require_at_least
from inflight.conformance.arguments import add_endpoint_arguments, add_pair_options, endpoint_of
from inflight.conformance.targets import EndpointTarget
from inflight.engines.factories import keyword_arguments
from inflight.errors import ConfigError

_START_S = 120.0
_MEASURE_S = 600.0
"""Time limit, in seconds, for one pair in one dtype."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Load the same weights into an endpoint and a worker, and compare their logprobs. If they differ, find the "
        "cause by publishing weights with parts of the model switched off. Exit status: 0 if they agree, 1 "
        "otherwise."
    )
    add_endpoint_arguments(parser)
    add_pair_options(parser)
    parser.add_argument(
        "--dtype",
        action="append",
        default=[],
        metavar="DTYPE",
        help="dtype to compare in; may be repeated; sets the worker's option dtype, and {dtype} in --serve COMMAND",
    )
    parser.add_argument(
        "--updates",
        type=int,
        default=50,
        metavar="N",
        help="number of updates to publish with unchanged weights (default: %(default)s)",
    )
    parser.add_argument("--prompts", type=int, default=8, metavar="N", help="number of prompts (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=96, metavar="N", help="tokens to sample for each prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--bisect",
        action=argparse.BooleanOptionalAction,
        help="whether to switch off parts of the model to find the cause (default: only if the logprobs differ)",
    )
    add_json_argument(parser)
    add_deadline_scale(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure each pair and print the result; return 1 if a pair differs."""
    targets = _targets(arguments)
    require_at_least(arguments, updates=0, prompts=1, tokens=4)
    check_writable({"json": arguments.json})

    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers end with this process
    rows = []
    for dtype, target in targets:
        rows.append(asyncio.run(_row(dtype, target, arguments)))
        write_json(arguments.json, {"rows": rows})
    return 0 if all(row["agrees"] for row in rows) else 1


def _targets(arguments: argparse.Namespace) -> Sequence[tuple[str | None, EndpointTarget]]:
    """Return the dtypes to compare in, each with its endpoint; None stands for the server's dtype."""
    options = keyword_arguments(arguments.option, "--option")
    target = endpoint_of(arguments, options)
    if target.url is not None and target.model is None:
        raise ConfigError("specify the checkpoint that the URL serves with --model DIR; the worker loads it too")
    command = target.command
    if not arguments.dtype:
        if command is not None and "{dtype}" in command:
            raise ConfigError("--serve COMMAND contains {dtype}: specify it with --dtype, such as --dtype float32")
        return [(None, target)]
    if command is None or "{dtype}" not in command:
        raise ConfigError("--dtype requires a server that is started in that dtype: include {dtype} in --serve COMMAND")
    return [
        (dtype, target.model_copy(update={"command": command.replace("{dtype}", dtype)})) for dtype in arguments.dtype
    ]


async def _row(dtype: str | None, target: EndpointTarget, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one pair in one dtype, print the result, and return it as JSON values."""
    from inflight.conformance.parity.measuring import measure
    from inflight.conformance.parity.opening import open_pair
    from inflight.conformance.parity.report import row_of, text_of
    from inflight.conformance.parity.served import check_served

    def report(what: str) -> None:
        print_progress(what if dtype is None else f"{dtype}: {what}")

    worker_options = keyword_arguments(arguments.worker_option, "--worker-option")
    worker_options |= {} if dtype is None else {"dtype": dtype}
    scale, trainer = arguments.deadline_scale, target.worker or "transformers in float32"
    opening = open_pair(
        target,
        worker_options,
        prompts=arguments.prompts,
        tokens=arguments.tokens,
        start_s=_START_S * scale,
        report=report,
    )
    async with opening as pair, asyncio.timeout(_MEASURE_S * scale):
        await check_served(pair)
        measured = await measure(pair, arguments.updates, bisect=arguments.bisect, report=report)
    can = pair.subject.capabilities
    names = (can.engine, can.engine_version, trainer)
    print(text_of(*names, measured), flush=True)
    return row_of(*names, measured)

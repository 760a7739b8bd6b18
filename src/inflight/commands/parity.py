"""``inflight check parity``: its arguments, and the pairs that it measures."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from inflight.conformance.arguments import add_endpoint_arguments, endpoint_of
from inflight.conformance.targets import EndpointTarget
from inflight.engines.factories import keyword_arguments
from inflight.errors import ConfigError

_START_S = 120.0
_MEASURE_S = 600.0
"""For one pair in one dtype."""


def add_parser(kinds: Any) -> None:
    """Add ``parity`` to the kinds of targets; ``kinds`` comes from ``add_subparsers``."""
    parity = kinds.add_parser(
        "parity",
        help="how far an engine's logprobs are from a trainer's, and why",
        description="Give an endpoint and a worker the same weights and compare their logprobs. Where they differ, "
        "publish weights with parts of the model switched off to find the cause. Exit status: 0 they agree, 1 not.",
    )
    add_endpoint_arguments(parity)
    parity.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="for the endpoint's factory, repeatable"
    )
    parity.add_argument(
        "--worker-option", action="append", default=[], metavar="KEY=VALUE", help="for the worker, repeatable"
    )
    parity.add_argument(
        "--dtype",
        action="append",
        default=[],
        metavar="DTYPE",
        help='compare in this dtype, repeatable: the worker\'s option "dtype", and {dtype} in --serve COMMAND',
    )
    parity.add_argument("--updates", type=int, default=50, metavar="N", help="with the same weights (%(default)s)")
    parity.add_argument("--prompts", type=int, default=8, metavar="N", help="default: %(default)s")
    parity.add_argument("--tokens", type=int, default=96, metavar="N", help="sampled for each prompt (%(default)s)")
    parity.add_argument(
        "--bisect",
        action=argparse.BooleanOptionalAction,
        help="whether to switch parts of the model off (default: if the two sides differ)",
    )
    parity.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parity.add_argument(
        "--deadline-scale", type=float, default=1.0, metavar="FLOAT", help="factor on every deadline, for slow machines"
    )


def run_parity(arguments: argparse.Namespace) -> int:
    """Run ``inflight check parity`` and return the exit status."""
    targets = _targets(arguments)
    for name, least in (("updates", 0), ("prompts", 1), ("tokens", 4)):
        if getattr(arguments, name) < least:
            raise ConfigError(f"--{name} must be at least {least}, not {getattr(arguments, name)}")
    scale, file = arguments.deadline_scale, arguments.json
    if not (math.isfinite(scale) and scale > 0):
        raise ConfigError(f"--deadline-scale must be a number above 0, not {scale}")
    if file is not None and not file.parent.is_dir():
        raise ConfigError(f"{str(file)!r} cannot be written: its directory does not exist")

    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers end with this process
    rows = []
    for dtype, target in targets:
        rows.append(asyncio.run(_row(dtype, target, arguments)))
        if file is not None:
            file.write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    return 0 if all(row["agrees"] for row in rows) else 1


def _targets(arguments: argparse.Namespace) -> Sequence[tuple[str | None, EndpointTarget]]:
    """Return the dtypes to compare in, each with its endpoint; None is the dtype that is served."""
    options = keyword_arguments(arguments.option, "--option")
    target = endpoint_of(arguments, options)
    if target.url is not None and target.model is None:
        raise ConfigError("say which checkpoint the URL serves: --model DIR; it is given to the worker too")
    command = target.command
    if not arguments.dtype:
        if command is not None and "{dtype}" in command:
            raise ConfigError("--serve COMMAND holds {dtype}: say which with --dtype, as in --dtype float32")
        return [(None, target)]
    if command is None or "{dtype}" not in command:
        raise ConfigError("--dtype needs a server that is started in it: --serve COMMAND with {dtype} in it")
    return [
        (dtype, target.model_copy(update={"command": command.replace("{dtype}", dtype)})) for dtype in arguments.dtype
    ]


async def _row(dtype: str | None, target: EndpointTarget, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one pair in one dtype, print it, and return it as JSON values."""
    from inflight.conformance.endpoint.opening import opened
    from inflight.conformance.endpoint.publishing import SteppedPublisher
    from inflight.conformance.endpoint.subject import EndpointSubject
    from inflight.conformance.parity.measuring import measure
    from inflight.conformance.parity.pair import Pair
    from inflight.conformance.parity.report import row_of, text_of

    def tell(what: str) -> None:
        print(f"parity{'' if dtype is None else f', {dtype}'}: {what}", file=sys.stderr, flush=True)

    worker_options = keyword_arguments(arguments.worker_option, "--worker-option")
    worker_options |= {} if dtype is None else {"dtype": dtype}
    scale, trainer = arguments.deadline_scale, target.worker or "transformers in float32"
    with tempfile.TemporaryDirectory(prefix="inflight-parity-") as directory:
        subject = EndpointSubject(target, Path(directory), _START_S * scale)
        model = subject.reference.path
        tell(f"waiting for {target.label}")
        async with opened(target, model, subject.directory, _START_S * scale) as subject.opened:
            declared = subject.capabilities = await subject.endpoint.capabilities()
            version = (await subject.endpoint.weight_version()).version
            subject.publisher = SteppedPublisher(subject.endpoint, declared, version)
            subject.reference.cast(declared.dtype)
            pair = Pair(subject, target.worker, worker_options, arguments.prompts, arguments.tokens)
            with closing(pair):
                try:
                    async with asyncio.timeout(_MEASURE_S * scale):
                        measured = await measure(pair, arguments.updates, bisect=arguments.bisect, tell=tell)
                        if target.url is not None:
                            await pair.bring(subject.reference.weights)
                finally:
                    subject.publisher.lose_group()
    names = (declared.engine, declared.engine_version, trainer)
    print(text_of(*names, measured), flush=True)
    return row_of(*names, measured)

"""The command ``inflight bench``."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError
from inflight.http.tokens import TOKEN_VARIABLE, read_token


def add_parser(commands: Any) -> None:
    """Add ``bench`` to the commands of ``inflight``."""
    bench = commands.add_parser("bench", help="measure this machine and compare it with its own limits")
    subjects = bench.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    weights = subjects.add_parser(
        "weights",
        help="publish a model over each transport and print where the time goes",
        epilog="Spans are medians in milliseconds. 'share' is the time of the bare operation named under 'limit', on "
        "the same bytes and in the same run, over the time of the publish.",
    )
    weights.add_argument(
        "--sizes", default="64MB,1GB", metavar="SIZES", help="model sizes, such as 64MB,1GB (default: %(default)s)"
    )
    weights.add_argument(
        "--transports", default=None, metavar="TRANSPORTS", help="transports and encodings, such as gloo,shm,http+delta"
    )
    weights.add_argument("--rounds", type=int, default=5, help="publishes of each kind (default: %(default)s)")
    weights.add_argument("--requests", type=int, default=2, help="requests in the busy rounds (default: %(default)s)")
    weights.add_argument("--changed", type=float, default=0.02, help="share of elements that change (default: 0.02)")
    weights.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    weights.add_argument("--threads", type=int, default=1, help="threads of the server (default: %(default)s)")
    weights.add_argument(
        "--directory", type=Path, help="where to put the model and files (default: the temporary directory)"
    )
    weights.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    weights.set_defaults(call=_weights)
    engine = subjects.add_parser(
        "engine",
        help="measure token times of a running server, by how many completions run, for inflight plan",
        epilog=f"${TOKEN_VARIABLE} is the server's token. Nothing else should use the server meanwhile.",
    )
    engine.add_argument("url", metavar="URL", help="http://HOST:PORT, or an engine's own ENGINE+http://HOST:PORT")
    engine.add_argument("--batches", default="1,8,32,64", metavar="N,N,...", help="default: %(default)s")
    engine.add_argument("--tokens", type=int, default=128, help="of a long completion (default: %(default)s)")
    engine.add_argument("--prompt-tokens", type=int, default=32, help="default: %(default)s")
    engine.add_argument("--rounds", type=int, default=3, help="of long and short ones (default: %(default)s)")
    engine.set_defaults(call=_engine)


def _engine(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from inflight.bench.engine import as_plan, measure
    from inflight.http.kinds import connect_endpoint

    try:
        batches = sorted({int(number) for number in arguments.batches.split(",")})
    except ValueError as error:
        raise ConfigError(f"--batches must be numbers such as 1,8,64, not {arguments.batches!r}") from error
    if min(batches) < 1 or arguments.rounds < 1 or arguments.prompt_tokens < 1:
        raise ConfigError("--batches, --rounds and --prompt-tokens must be at least 1")
    endpoint = connect_endpoint(arguments.url, token=read_token(None))

    async def measured() -> str:
        try:
            found = await measure(
                endpoint,
                batches,
                num_tokens=arguments.tokens,
                num_prompt_tokens=arguments.prompt_tokens,
                num_rounds=arguments.rounds,
                tell=lambda text: print(f"bench: {text}", file=sys.stderr, flush=True),
            )
        finally:
            await endpoint.aclose()
        besides = max(it.request_s for it in found)
        return f"{as_plan(found)}\nrequest_s = {besides:.3g}  # with a prompt of {arguments.prompt_tokens} tokens"

    print(asyncio.run(measured()))
    return 0


def _weights(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    from inflight.bench.weights import DEFAULT_TRANSPORTS, measure, table

    names = arguments.transports
    transports = DEFAULT_TRANSPORTS if names is None else tuple(names.split(","))
    if arguments.rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, not {arguments.rounds}")
    results = []
    for size_bytes in [bytes_of(text) for text in arguments.sizes.split(",")]:
        measured = measure(
            size_bytes,
            transports,
            num_rounds=arguments.rounds,
            num_requests=arguments.requests,
            changed_share=arguments.changed,
            dtype=arguments.dtype,
            num_threads=arguments.threads,
            directory=arguments.directory,
            tell=lambda text: print(f"bench: {text}", file=sys.stderr, flush=True),
        )
        print(table(measured), flush=True)
        results += measured
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([result.as_json() for result in results], indent=2) + "\n")
    return 0


def bytes_of(text: str) -> int:
    """Return the bytes in a size such as 64MB or 1GB, in powers of ten. Raises `ConfigError` for any other text."""
    units = {"kb": 10**3, "mb": 10**6, "gb": 10**9}
    number, unit = text.strip()[:-2], text.strip()[-2:].lower()
    try:
        return int(float(number) * units[unit])
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{text!r} is not a size; write a size such as 64MB or 1GB") from error

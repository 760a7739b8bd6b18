"""The command ``inflight bench``."""

from __future__ import annotations

import argparse
import asyncio
import statistics
from pathlib import Path

from inflight.base.json_files import check_writable, write_json
from inflight.base.sizes import parse_size_bytes
from inflight.commands.shared import add_json_argument, print_progress, require_at_least
from inflight.errors import ConfigError
from inflight.http.tokens import TOKEN_VARIABLE, read_token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    weights = subjects.add_parser(
        "weights",
        help="publish a model over each transport and print the duration of each part",
        epilog="Times are medians in milliseconds. 'limit' names the raw operation on the same bytes in the same run, "
        "and 'share' is its time divided by the time of the publish. 'memory' is the peak growth of the publishing "
        "process's memory, including memory that it shares with the server.",
    )
    subject = weights.add_mutually_exclusive_group()
    subject.add_argument(
        "--sizes",
        default="64MB,1GB",
        metavar="SIZES",
        help="comma-separated sizes of random models (default: %(default)s)",
    )
    subject.add_argument("--model", type=Path, metavar="DIR", help="checkpoint to publish instead of random models")
    weights.add_argument(
        "--transports", default=None, metavar="TRANSPORTS", help="transports and encodings, such as gloo,shm,http+delta"
    )
    weights.add_argument("--rounds", type=int, default=5, help="idle and busy publishes to time (default: %(default)s)")
    weights.add_argument(
        "--requests", type=int, default=2, help="requests that run during busy publishes (default: %(default)s)"
    )
    weights.add_argument(
        "--changed", type=float, default=0.02, help="share of elements that change between publishes (default: 0.02)"
    )
    weights.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of the weights (default: %(default)s)",
    )
    weights.add_argument("--threads", type=int, default=1, help="CPU threads of the server (default: %(default)s)")
    weights.add_argument(
        "--directory", type=Path, help="directory for the model and the files (default: the temporary directory)"
    )
    add_json_argument(weights)
    engine = subjects.add_parser(
        "engine",
        help="measure token times of a running server at several concurrencies, for inflight plan",
        epilog=f"${TOKEN_VARIABLE} is the server's token. No other client should use the server while it is measured.",
    )
    engine.add_argument("url", metavar="URL", help="http://HOST:PORT, or an engine's own ENGINE+http://HOST:PORT")
    engine.add_argument("--batches", default="1,8,32,64", metavar="N,N,...", help="default: %(default)s")
    engine.add_argument("--tokens", type=int, default=128, help="length of a long completion (default: %(default)s)")
    engine.add_argument("--prompt-tokens", type=int, default=32, help="default: %(default)s")
    engine.add_argument(
        "--rounds", type=int, default=3, help="rounds of long and short completions (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure the subject and print the figures."""
    return _measure_weights(arguments) if arguments.subject == "weights" else _measure_engine(arguments)


def _measure_engine(arguments: argparse.Namespace) -> int:
    from inflight.bench.engine import as_plan, measure
    from inflight.http.kinds import connect_endpoint

    try:
        batches = sorted({int(number) for number in arguments.batches.split(",")})
    except ValueError as error:
        raise ConfigError(f"--batches must be numbers such as 1,8,64, not {arguments.batches!r}") from error
    if min(batches) < 1:
        raise ConfigError(f"--batches must be numbers of at least 1, not {arguments.batches!r}")
    require_at_least(arguments, rounds=1, prompt_tokens=1)
    endpoint = connect_endpoint(arguments.url, token=read_token(None))

    async def measured() -> str:
        try:
            found = await measure(
                endpoint,
                batches,
                num_tokens=arguments.tokens,
                num_prompt_tokens=arguments.prompt_tokens,
                num_rounds=arguments.rounds,
                report_progress=print_progress,
            )
        finally:
            await endpoint.aclose()
        request_s = statistics.median(it.request_s for it in found)
        return f"{as_plan(found)}\nrequest_s = {request_s:.3g}  # with a prompt of {arguments.prompt_tokens} tokens"

    print(asyncio.run(measured()))
    return 0


def _measure_weights(arguments: argparse.Namespace) -> int:
    from inflight.bench.weights import DEFAULT_TRANSPORTS, measure, table

    names = arguments.transports
    transports = DEFAULT_TRANSPORTS if names is None else tuple(names.split(","))
    require_at_least(arguments, rounds=1)
    check_writable({"json": arguments.json})
    sizes = [parse_size_bytes(text) for text in arguments.sizes.split(",")]
    results = []
    for subject in sizes if arguments.model is None else [arguments.model]:
        measured = measure(
            subject,
            transports,
            num_rounds=arguments.rounds,
            num_requests=arguments.requests,
            changed_share=arguments.changed,
            dtype=arguments.dtype,
            num_threads=arguments.threads,
            directory=arguments.directory,
            report_progress=print_progress,
        )
        print(table(measured), flush=True)
        results += measured
    write_json(arguments.json, [result.as_json() for result in results])
    return 0

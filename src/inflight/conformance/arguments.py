"""Command-line arguments that specify the endpoint or the worker, shared by several commands."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from inflight.base.extensions import check_reference, find_entry_points
from inflight.conformance.targets import EndpointTarget, endpoint_target
from inflight.errors import ConfigError
from inflight.http.tokens import TOKEN_VARIABLE, read_token


def add_endpoint_arguments(
    endpoint: argparse.ArgumentParser, target: str = "URL of a server, or module:function"
) -> None:
    """Add the arguments that `endpoint_of` reads, except ``--option``. ``target`` is the help text of the target."""
    endpoint.add_argument("target", nargs="?", metavar="TARGET", help=target)
    endpoint.add_argument(
        "--serve",
        metavar="COMMAND",
        help="command that starts a server, with the placeholders {model}, {port} and {token_file}",
    )
    endpoint.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="checkpoint that the server loads (default: one that the kit creates, or none for a URL)",
    )
    endpoint.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"file with the control token of the server at a URL (default: ${TOKEN_VARIABLE})",
    )
    endpoint.add_argument(
        "--worker",
        metavar="module:attribute",
        help="trainer worker to compare logprobs with (default: transformers in float32)",
    )
    endpoint.add_argument(
        "--tolerance", type=float, metavar="FLOAT", help="largest difference between logprobs that count as equal"
    )


def add_pair_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--option`` and ``--worker-option``, for commands that compare an endpoint with a worker."""
    for name, what in (("--option", "endpoint's factory"), ("--worker-option", "worker")):
        parser.add_argument(
            name,
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help=f"option for the {what}; may be repeated",
        )


def endpoint_of(arguments: argparse.Namespace, options: dict[str, Any]) -> EndpointTarget:
    """Return the endpoint that these arguments specify. Raises `ConfigError` if they are invalid."""
    if (arguments.target is None) == (arguments.serve is None):
        raise ConfigError("specify which endpoint to check: exactly one of a URL, module:function and --serve COMMAND")
    if arguments.model is not None and not arguments.model.is_dir():
        raise ConfigError(
            f"--model {str(arguments.model)!r} is not a directory; pass one that contains a Hugging Face checkpoint"
        )
    tolerance = arguments.tolerance
    if tolerance is not None and not (math.isfinite(tolerance) and tolerance > 0):
        raise ConfigError(f"--tolerance must be a number above 0, not {tolerance}")
    given = {
        "options": options,
        "model": arguments.model,
        "worker": worker_factory(arguments.worker) if arguments.worker else None,
        "tolerance": tolerance,
    }
    if arguments.target is not None and "://" in arguments.target:
        if options:
            raise ConfigError("--option is for a factory; a URL accepts none")
        return endpoint_target(arguments.target, token=read_token(arguments.token_file), **given)
    if arguments.token_file is not None:
        raise ConfigError("--token-file is for a URL; with --serve the kit generates a token, and a factory needs none")
    if arguments.target is not None:
        return endpoint_target(arguments.target, **given)
    if options:
        raise ConfigError("--option is for a factory; write options of the server into --serve COMMAND")
    if "{port}" not in arguments.serve:
        raise ConfigError("--serve COMMAND must contain {port}, the port at which the kit connects to the server")
    return EndpointTarget(command=arguments.serve, **given)


def worker_factory(text: str) -> str:
    """Return the ``module:attribute`` of a worker kind. A text without a colon is the name of an installed kind."""
    if ":" in text:
        check_reference(text)
        return text
    found = {name: entry.value for name, entry in find_entry_points("workers").items()}
    if text not in found:
        names = ", ".join(sorted(found)) or "none"
        raise ConfigError(f"worker {text!r} is not installed; installed workers: {names}; or pass module:attribute")
    return found[text]

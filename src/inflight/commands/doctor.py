"""The command ``inflight doctor``."""

from __future__ import annotations

import argparse
from pathlib import Path

from inflight.commands import doctor_pair, doctor_records
from inflight.commands.shared import add_deadline_scale, add_json_argument, require_at_least
from inflight.conformance.arguments import add_endpoint_arguments
from inflight.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Find out why the logprobs of an inference engine differ from those of a trainer. For the directory of a run, "
        "print the shape of the differences in its records and the first suspects. For an endpoint, publish known "
        "weights to it, and name the cause, the tensor or the setting, and what mends it. Exit status: 0 if there is "
        "no drift, 1 otherwise."
    )
    add_endpoint_arguments(parser)
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option for the endpoint's factory; may be repeated",
    )
    parser.add_argument(
        "--worker-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option for the worker; may be repeated",
    )
    parser.add_argument("--prompts", type=int, default=8, metavar="N", help="number of prompts (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=96, metavar="N", help="tokens to sample for each prompt (default: %(default)s)"
    )
    add_json_argument(parser, "the findings and the results of the experiments")
    add_deadline_scale(parser)


def run(arguments: argparse.Namespace) -> int:
    """Read the records of a run, or examine a live pair."""
    require_at_least(arguments, prompts=1, tokens=4)
    target = arguments.target
    if target is not None and Path(target).is_dir():
        return doctor_records.run(arguments)
    if target is not None and ":" not in target:
        raise ConfigError(
            f"{target!r} is not a directory: specify the directory of a run, the URL of a server, or module:function"
        )
    return doctor_pair.run(arguments)

"""The command ``inflight doctor``."""

from __future__ import annotations

import argparse

from inflight.commands import doctor_pair
from inflight.commands.shared import add_deadline_scale, add_json_argument
from inflight.conformance.arguments import add_endpoint_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Find out why the logprobs of an inference engine differ from those of a trainer. Publishes known weights to "
        "the endpoint, and names the cause, the tensor or the setting, and what mends it. Exit status: 0 if no cause "
        "was found, 1 otherwise."
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
    add_json_argument(parser, "the findings and the results of the experiments")
    add_deadline_scale(parser)


def run(arguments: argparse.Namespace) -> int:
    """Examine a live pair."""
    return doctor_pair.run(arguments)

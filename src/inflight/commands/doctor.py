"""The command ``inflight doctor``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from inflight.base.tasks import text_of
from inflight.commands import doctor_pair, doctor_records
from inflight.commands.shared import add_deadline_scale, add_json_argument, require_at_least
from inflight.conformance.arguments import add_endpoint_arguments, add_pair_options
from inflight.errors import ConfigError, InflightError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Find out why the logprobs of an inference engine differ from those of a trainer. For the directory of a "
        "run, print the shape of the differences in its records and the first suspects. For an endpoint, publish "
        "known weights to it, and report the cause (with the tensor, part or setting responsible, if that was "
        "identified) and the remedy. Exit status: 0 if no drift was found, 1 if drift was found or a warning was "
        "given, 2 if nothing can be concluded."
    )
    add_endpoint_arguments(parser, "directory of a run, URL of a server, or module:function; a URL needs --model")
    parser.set_defaults(parser=parser)
    add_pair_options(parser)
    parser.add_argument("--prompts", type=int, default=8, metavar="N", help="number of prompts (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=96, metavar="N", help="tokens to sample for each prompt (default: %(default)s)"
    )
    add_json_argument(parser, "the findings and the results of the experiments")
    add_deadline_scale(parser)


def run(arguments: argparse.Namespace) -> int:
    """Read the records of a run, or examine a live pair; return 2 if neither is possible."""
    try:
        return _run(arguments)
    except InflightError as error:
        print(f"inflight: {text_of(error)}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    require_at_least(arguments, prompts=1, tokens=4)
    target, parser = arguments.target, arguments.parser
    if target is None and arguments.serve is None:
        raise ConfigError(
            "specify what to examine: the directory of a run, the URL of a server, module:function, or --serve COMMAND"
        )
    if target is not None and Path(target).is_dir():
        given = [name for name, value in vars(arguments).items() if value != parser.get_default(name)]
        if others := [name for name in given if name not in ("command", "target", "json")]:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in others)
            raise ConfigError(f"{target!r} is the directory of a run, so only its records are read: omit {named}")
        return doctor_records.run(arguments)
    if target is not None and ":" not in target:
        raise ConfigError(
            f"{target!r} is not a directory: specify the directory of a run, the URL of a server, or module:function"
        )
    return doctor_pair.run(arguments)

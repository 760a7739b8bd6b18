"""The command ``inflight``: one line per command; the module of a command is imported only when the command is used."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from inflight import __version__
from inflight.base.tasks import text_of
from inflight.errors import InflightError


class Command(NamedTuple):
    """One command: its module in `inflight.commands`, and what ``inflight --help`` says of it.

    The module has two functions: ``add_arguments(parser)``, and ``run(arguments)``, which returns the exit status.
    """

    module: str
    help: str


COMMANDS = {
    "serve": Command("serve", "serve a model directory with the embedded engine, vLLM, SGLang or your own"),
    "tiny-model": Command("tiny_model", "create a byte-level model and warm-start it on a task"),
    "train": Command("train", "run reinforcement learning from a TOML file"),
    "launch": Command("launch", "print a run as a job of Slurm or Kubernetes"),
    "policies": Command("policies", "list the schedulers, staleness policies and composers of a run"),
    "losses": Command("losses", "list the loss presets, or describe one"),
    "trace": Command("trace", "write a run's events for a program that shows traces"),
    "proxy": Command("proxy", "record episodes of agents that only know an OpenAI URL"),
    "relay": Command("relay", "keep the newest stored weights of a run on this host too, for the servers here"),
    "dialect": Command("dialect", "speak the protocol of another codebase's inference server in front of servers"),
    "plan": Command("plan", "simulate configurations of a run, and print those that no other beats"),
    "bench": Command("bench", "measure this machine and compare it with its own limits"),
    "check": Command("check", "check an endpoint, a worker, a transport or a fleet against the contract"),
    "replay": Command("replay", "train or sample again what a run recorded"),
    "import": Command("import_rollouts", "make a record of the rollouts that another framework stored"),
    "watch": Command("watch", "show runs on a page in the browser, while they run or afterwards"),
    "report": Command("report", "write the page of runs to one HTML file that needs no network"),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 failed with a message, 2 wrong usage, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="inflight", description="In-flight weight updates for reinforcement learning."
    )
    parser.add_argument("--version", action="version", version=f"inflight {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {name: subparsers.add_parser(name, help=command.help) for name, command in COMMANDS.items()}
    name = next((word for word in words if not word.startswith("-")), None)
    if name not in COMMANDS:
        parser.parse_args(words)  # prints the help or the version, or reports wrong usage; it does not return
    assert name is not None
    module = importlib.import_module(f"inflight.commands.{COMMANDS[name].module}")
    module.add_arguments(parsers[name])
    arguments, overrides = parser.parse_known_args(words)
    if "overrides" in arguments:
        arguments.overrides = overrides
    elif overrides:
        parsers[name].error(f"unrecognized arguments: {' '.join(overrides)}")
    _quiet_transformers()
    try:
        return int(module.run(arguments))
    except InflightError as error:
        print(f"inflight: {text_of(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _quiet_transformers() -> None:
    """Turn off the progress bars and the advice of transformers."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")


if __name__ == "__main__":
    sys.exit(main())

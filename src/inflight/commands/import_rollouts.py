"""The command ``inflight import``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from inflight.commands.shared import require_positive
from inflight.rollouts import AdvantageEstimator


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    sources = parser.add_subparsers(dest="source", required=True, metavar="FRAMEWORK")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("files", type=Path, nargs="+", metavar="FILE", help="file of stored rollouts, one per step")
    shared.add_argument("--to", type=Path, required=True, metavar="DIR", help="directory to write the record to")
    shared.add_argument(
        "--advantages", choices=get_args(AdvantageEstimator), default="std", help="default: %(default)s"
    )
    shared.add_argument(
        "--temperature", type=float, default=1.0, help="sampling temperature of the run (default: %(default)s)"
    )
    slime = sources.add_parser("slime", parents=[shared], help="files of slime's --save-debug-rollout-data")
    slime.add_argument("--reward-key", metavar="KEY", help="key of the reward to use, if samples have several")
    verl = sources.add_parser("verl", parents=[shared], help="files of verl's trainer.rollout_data_dir")
    verl.add_argument(
        "--tokenizer", type=Path, required=True, metavar="DIR", help="model directory of the run, for its tokenizer"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the record."""
    from inflight.replay.importing import write_imported

    require_positive(arguments, "temperature")
    if arguments.source == "slime":
        from inflight.replay.slime import read_slime

        found = read_slime(arguments.files, temperature=arguments.temperature, reward_key=arguments.reward_key)
    else:
        from inflight.replay.verl import read_verl

        found = read_verl(arguments.files, tokenizer=arguments.tokenizer, temperature=arguments.temperature)
    manifest = write_imported(
        found, arguments.to, source=arguments.source, advantages=arguments.advantages, files=arguments.files
    )
    number = len(arguments.files)
    print(f"wrote {number} step{'s' * (number != 1)} to {arguments.to}")
    for note in (*(f"the record lacks {what}" for what in manifest.lacks), *manifest.notes):
        print(f"  {note}")
    return 0

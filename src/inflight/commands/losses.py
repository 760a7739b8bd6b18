"""The command ``inflight losses``."""

from __future__ import annotations

import argparse

from inflight.base.text_tables import align_columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "name", nargs="?", metavar="PRESET", help="loss preset to describe (default: print a table of all presets)"
    )


def run(arguments: argparse.Namespace) -> int:
    """List the presets or describe one."""
    from inflight.losses import PRESETS, preset

    if arguments.name is not None:
        print(preset(arguments.name).describe())
        return 0
    rows = [("preset", "loss of a token", "advantages", "denominator", "needs")]
    rows += [(it.name, it.formula, it.advantages, it.loss.aggregation.kind, it.needs) for it in PRESETS.values()]
    print(align_columns(rows))
    return 0

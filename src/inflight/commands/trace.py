"""The command ``inflight trace``."""

from __future__ import annotations

import argparse
from pathlib import Path

from inflight.commands.shared import print_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("directory", type=Path, metavar="RUN_DIR", help="run directory to export")
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument(
        "--perfetto", type=Path, metavar="OUT.json", help="write a trace file for ui.perfetto.dev and chrome://tracing"
    )
    form.add_argument(
        "--otlp",
        metavar="OUT.jsonl|URL",
        help="write OpenTelemetry spans to a file as OTLP JSON lines, or send them to a collector, such as "
        "http://127.0.0.1:4318",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the events in the chosen format."""
    if arguments.perfetto is not None:
        from inflight.observe.exports.perfetto import write_perfetto

        num_rows = write_perfetto(arguments.directory, arguments.perfetto)
        print_line(f"wrote {num_rows:,} events to {arguments.perfetto}: open it at https://ui.perfetto.dev")
        return 0
    from inflight.observe.exports.otlp import write_otlp

    print_line(f"wrote {write_otlp(arguments.directory, arguments.otlp):,} spans to {arguments.otlp}")
    return 0

"""The command ``inflight report``."""

from __future__ import annotations

import argparse
from pathlib import Path

from inflight.commands.shared import collect_garbage_rarely, print_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN_DIR", help="run directory; several runs are compared with each other"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="file to write (default: report.html in the first RUN_DIR)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the page."""
    from inflight.observe.watch.report import write_report

    collect_garbage_rarely()
    output = arguments.output or arguments.runs[0] / "report.html"
    write_report(arguments.runs, output)
    print_line(f"wrote {output} ({output.stat().st_size / 1e6:.1f} MB)")
    return 0

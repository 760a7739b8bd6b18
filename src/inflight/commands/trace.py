"""The command ``inflight trace``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the command to those of ``inflight``."""
    trace = commands.add_parser("trace", help="write a run's events for a program that shows traces")
    trace.add_argument("directory", type=Path, metavar="RUN_DIR")
    form = trace.add_mutually_exclusive_group(required=True)
    form.add_argument("--perfetto", type=Path, metavar="OUT.json", help="for ui.perfetto.dev and chrome://tracing")
    form.add_argument(
        "--otlp",
        metavar="OUT.jsonl|URL",
        help="OpenTelemetry spans, as lines of OTLP's JSON or sent to a collector such as http://127.0.0.1:4318",
    )
    trace.set_defaults(call=_trace)


def _trace(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    if arguments.perfetto is not None:
        from inflight.observe.exports.perfetto import write_perfetto

        num_rows = write_perfetto(arguments.directory, arguments.perfetto)
        print(f"inflight: wrote {num_rows:,} events to {arguments.perfetto}: open it at https://ui.perfetto.dev")
        return 0
    from inflight.observe.exports.otlp import write_otlp

    print(f"inflight: wrote {write_otlp(arguments.directory, arguments.otlp):,} spans to {arguments.otlp}")
    return 0

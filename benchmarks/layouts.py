"""Logprobs, gradients and weights of every layout of ranks against one rank, in float32 on the CPU.

Layouts and tiny models are those of tests/worker/layouts.py: two steps of AdamW, clipped, over packed segments.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from benchmarks.results import write_results
from tests.worker.layouts import LAYOUTS, differences, run_layouts

DEADLINE_S = 1800.0


def main() -> None:
    """Run all layouts and keep the differences."""
    with tempfile.TemporaryDirectory(prefix="inflight-layouts-") as made:
        directory = Path(made)
        run_layouts(directory, list(LAYOUTS), DEADLINE_S)
        rows = [
            {
                "layout": name,
                "ranks": layout.ranks,
                "worker": layout.worker,
                "model": layout.model,
                "options": dict(layout.options),
                "differences": {what: dataclasses.asdict(it) for what, it in differences(directory, name).items()},
            }
            for name, layout in LAYOUTS.items()
        ]
    write_results("layouts", rows)


if __name__ == "__main__":
    main()

"""Logprobs, gradients and weights of every layout of ranks against one rank, in float32 on the CPU.

Layouts and tiny models are those of tests/worker/layouts.py: two steps of AdamW, clipped, over packed segments.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

from benchmarks.results import DIRECTORY, read_results, write_results
from tests.worker.layouts import LAYOUTS, differences, run_layouts

DEADLINE_S = 1800.0


def main() -> None:
    """Run the layouts, or those of some numbers of ranks, and keep the differences with those of the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=sorted({layout.ranks for layout in LAYOUTS.values()}))
    ranks = parser.parse_args().ranks
    names = [name for name, layout in LAYOUTS.items() if layout.ranks in ranks]
    with tempfile.TemporaryDirectory(prefix="inflight-layouts-") as made:
        directory = Path(made)
        run_layouts(directory, names, DEADLINE_S)
        found = {
            name: {
                "layout": name,
                "ranks": layout.ranks,
                "worker": layout.worker,
                "model": layout.model,
                "options": dict(layout.options),
                "differences": {what: dataclasses.asdict(it) for what, it in differences(directory, name).items()},
            }
            for name, layout in LAYOUTS.items()
            if name in names
        }
    kept = (
        {row["layout"]: row for row in read_results("layouts")["rows"]} if (DIRECTORY / "layouts.json").exists() else {}
    )
    write_results("layouts", [(kept | found)[name] for name in LAYOUTS if name in kept | found])


if __name__ == "__main__":
    main()

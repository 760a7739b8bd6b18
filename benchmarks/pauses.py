"""How long an update pauses the embedded engine, in two commits, in turns on one machine: ``inflight bench weights``.

    python benchmarks/pauses.py REVISION

compares HEAD with another commit. Each is checked out in a directory of its own and runs its own code.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from beside import checkouts, spread
from results import read_results, write_results

TRANSPORTS = "gloo,shm,file,http,gloo+delta,shm+delta"
SPANS = ("paused", "load", "wire", "total")


def rows_of(tree: Path, json_file: Path, transports: str, num_publishes: int) -> list[dict[str, Any]]:
    """Run the benchmark of a checkout, and return a row for each transport and size."""
    command = [sys.executable, "-m", "inflight", "bench", "weights", "--sizes", "64MB,1GB", "--json", str(json_file)]
    command += ["--transports", transports, "--rounds", str(num_publishes)]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=1800)
    rows: list[dict[str, Any]] = json.loads(json_file.read_text())
    return rows


def medians(rows: Sequence[dict[str, Any]], when: str, name: str) -> dict[str, float]:
    return spread([row[when][name]["median"] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--publishes", type=int, default=7, help="idle and busy publishes of each round")
    parser.add_argument("--transports", default=TRANSPORTS, help="the rows of others are kept")
    arguments = parser.parse_args()
    measured: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        trees, commits = checkouts(Path(directory), {"before": arguments.revision, "after": "HEAD"})
        for number in range(arguments.rounds):
            for label in ("before", "after") if number % 2 == 0 else ("after", "before"):
                json_file = Path(directory) / "rows.json"
                for row in rows_of(trees[label], json_file, arguments.transports, arguments.publishes):
                    place = measured.setdefault((row["transport"], row["size_bytes"]), {})
                    place.setdefault(label, []).append(row)
                print(f"round {number + 1} of {arguments.rounds}: {label}", flush=True)
    rows = [
        {
            "transport": transport,
            "size_bytes": size_bytes,
            **{
                label: {
                    "idle": {name: medians(rows, "spans", name) for name in SPANS},
                    "busy": {name: medians(rows, "busy", name) for name in SPANS},
                }
                for label, rows in sides.items()
            },
            "copy_s": spread([row["copy_s"]["median"] for rows in sides.values() for row in rows]),
        }
        for (transport, size_bytes), sides in measured.items()
    ]
    if arguments.transports != TRANSPORTS:
        before = read_results("pauses")["rows"]["rows"]
        rows = [row for row in before if (row["transport"], row["size_bytes"]) not in measured] + rows
    write_results("pauses", {"commits": commits, "rows": sorted(rows, key=lambda row: row["size_bytes"])})


if __name__ == "__main__":
    main()

"""Every pair of an engine and a trainer, in every dtype: ``inflight check parity`` on the quickstart's model.

    python benchmarks/parity.py [--engine NAME] [--trainer NAME]

`make engines` first. Rows that were not measured again are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.real_engines.servers import ENGINES, python_of
from tests.worker.ranks import apart

from quickstart import quickstart_model
from results import read_results, write_results

TRAINERS = ("fsdp", "torchtitan", "deepspeed")
DTYPES = ("float32", "bfloat16")


def rows_of(engine: str, trainer: str, model: Path, file: Path) -> list[dict[str, Any]]:
    """Return what the command writes of one pair."""
    serve = (
        f"{sys.executable} -m inflight serve {{model}} --port {{port}} --token-file {{token_file}} --dtype {{dtype}}"
    )
    serve += "" if engine == "embedded" else f" --engine {engine} --python {python_of(engine)}"
    command = [sys.executable, "-m", "inflight", "check", "parity", "--serve", serve, "--model", str(model)]
    command += ["--worker", trainer, *(word for dtype in DTYPES for word in ("--dtype", dtype))]
    variables = {**os.environ, **(apart(trainer) if trainer == "deepspeed" else {})}
    subprocess.run([*command, "--deadline-scale", "3", "--json", str(file)], check=False, timeout=3600, env=variables)
    return [{**row, "trainer": trainer} for row in json.loads(file.read_text())["rows"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("embedded", *ENGINES), action="append")
    parser.add_argument("--trainer", choices=TRAINERS, action="append")
    arguments = parser.parse_args()
    kept: dict[str, list[dict[str, Any]]] = {}
    with contextlib.suppress(FileNotFoundError):
        kept = read_results("parity")["rows"]
    with tempfile.TemporaryDirectory() as directory:
        for engine in arguments.engine or ("embedded", *ENGINES):
            for trainer in arguments.trainer or TRAINERS:
                kept[f"{engine} {trainer}"] = rows_of(
                    engine, trainer, quickstart_model(), Path(directory) / "parity.json"
                )
                write_results("parity", kept)


if __name__ == "__main__":
    main()

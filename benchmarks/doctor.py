"""What ``inflight doctor`` says of each planted cause of drift, and of healthy pairs: python benchmarks/doctor.py

Writes benchmarks/results/doctor.json, of which docs/evidence-doctor.md has the table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from results import write_results

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.doctor.examined import CASES, MODELS, examined

from inflight.conformance.models import make_tiny_model
from inflight.doctor.causes import diagnose

ROOT = Path(__file__).parents[1]
_OWN = ["tests.doctor.planted:start", "--option", "cause=none"]
_SERVE = (
    f"{sys.executable} -m inflight serve {{model}} --engine ENGINE --python .engines/ENGINE-RELEASE/bin/python "
    "--dtype float32 --port {port} --token-file {token_file}"
)
PAIRS = {
    "embedded engine, FSDP2": [*_OWN, "--worker", "fsdp"],
    "embedded engine, TorchTitan": [*_OWN, "--worker", "torchtitan"],
    "embedded engine, DeepSpeed": [*_OWN, "--worker", "deepspeed"],
} | {
    f"{engine} {release}, FSDP2": [
        *("--serve", _SERVE.replace("ENGINE", engine).replace("RELEASE", release)),
        *("--worker", "fsdp", "--deadline-scale", "3"),
    ]
    for engine, release in (("vllm", "0.32.0"), ("sglang", "0.5.23"))
}
"""Healthy pairs; the engines are those of `make engines`."""


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        models = {
            "dense": make_tiny_model(Path(directory) / "dense"),
            "tied": make_tiny_model(Path(directory) / "tied", tied=True),
            "moe": make_tiny_model(Path(directory) / "moe", family="qwen3_moe"),
        }
        rows = [row_of(models[MODELS.get(cause, "dense")], cause, number) for cause, number, _ in CASES]
        rows += [row_of(model, "none", None) for model in models.values()]
        rows += [pair_row(models["dense"], name, words) for name, words in PAIRS.items()]
    write_results("doctor", rows)


def row_of(model: Path, planted: str, number: int | None) -> dict[str, Any]:
    started = time.monotonic()
    found = diagnose(examined(model, planted))
    row = {"planted": planted, "cause": number, "model": model.name, "seconds": round(time.monotonic() - started, 1)}
    row |= {"said": [[it.cause.number, it.cause.name, it.where] for it in found]}
    print(row, flush=True)
    return row


def pair_row(model: Path, name: str, words: list[str]) -> dict[str, Any]:
    """Examine a healthy pair of a real engine or trainer by the command."""
    file = model / "found.json"
    started = time.monotonic()
    command = [sys.executable, "-m", "inflight", "doctor", "--model", str(model), "--json", str(file), *words]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / '.venv' / 'deepspeed'}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(file.read_text())["findings"]
    row = {"planted": "none", "cause": None, "model": name, "seconds": round(time.monotonic() - started, 1)}
    row |= {"said": [[it["cause"]["number"], it["cause"]["name"], it["where"]] for it in found]}
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()

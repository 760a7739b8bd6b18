"""The quickstart with all weights trained, and with a LoRA: rewards, and what a publish sends and takes.

``python -m benchmarks.lora`` writes ``benchmarks/results/lora.json``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from benchmarks.quickstart import run_quickstart
from benchmarks.results import write_results

_ALPHA_PER_RANK = 2
CASES: Mapping[str, int | None] = {"all weights": None, "LoRA, rank 8": 8, "LoRA, rank 1": 1}
"""Ranks of the LoRA, on all linear layers."""
_RATES = {"all weights": 1e-4}
_LORA_RATE = 1e-3
"""A LoRA learns at about ten times the rate of all weights (Thinking Machines, "LoRA Without Regret", 2025)."""


def main() -> None:
    """Run every case, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    rows = {}
    for name, rank in CASES.items():
        rate = _RATES.get(name, _LORA_RATE)
        words = ["--train.learning_rate", str(rate)]
        if rank is not None:
            lora = {"rank": rank, "alpha": _ALPHA_PER_RANK * rank, "targets": "all-linear"}
            words += [word for key, value in lora.items() for word in (f"--train.lora.{key}", str(value))]
        rows[name] = {"learning_rate": rate, "rank": rank, **run_quickstart(*words, num_steps=steps)}
        print(name, {key: value for key, value in rows[name].items() if key != "curve"}, flush=True)
    write_results("lora", rows)


if __name__ == "__main__":
    main()

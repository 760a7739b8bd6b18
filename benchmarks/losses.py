"""Losses: time and memory of the log-probability head and of others, and the quickstart with five presets.

    python benchmarks/losses.py head      # forward and backward of logprobs from hidden states, on the CPU in float32
    python benchmarks/losses.py learning  # the quickstart with five presets

Every head computes log-probabilities of the same targets and their gradients from the same upstream gradient, in turns.
``naive``: matrix product, log-softmax, gather. ``two passes``: `chunked_logprobs`. ``one pass``: `one_pass`. The others
are the installed releases, with the tiles that they have by default. Memory is what operations hold at a time beyond
inputs and their gradients, counted operation by operation (tests/losses/ledger.py). ``at its tile``: inflight with the
other's own tile of rows by vocabulary.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inflight.losses import chunked_logprobs, one_pass
from quickstart import run_quickstart
from results import read_results, write_results

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

from tests.losses.anchors import liger_anchor, torch_anchor, trl_anchor, verl_anchor  # noqa: E402
from tests.losses.ledger import LiveBytes  # noqa: E402

PRESETS = ("pipelinerl_paper", "grpo", "dapo", "cispo", "prime_default")
SHAPES = ((2_048, 512, 32_768, 5), (4_096, 512, 32_768, 4), (8_192, 512, 32_768, 2), (2_048, 1_024, 151_936, 2))
"""Targets, hidden size, vocabulary, and rounds of timing."""
VERL_CHUNK = 512
LIGER_TILE = (2_048, 4_096)
TRL_TILE = (4_096, 32_768)


@dataclass(frozen=True)
class Case:
    """One shape: inputs, and the gradient that arrives at each logprob."""

    hidden_NH: torch.Tensor
    weight_VH: torch.Tensor
    targets_N: torch.Tensor
    upstream_N: torch.Tensor

    @classmethod
    def of(cls, num_targets: int, hidden_size: int, vocab_size: int) -> Case:
        """Return random inputs of a shape."""
        generator = torch.Generator().manual_seed(0)
        return cls(
            torch.randn(num_targets, hidden_size, generator=generator).requires_grad_(),
            (torch.randn(vocab_size, hidden_size, generator=generator) / hidden_size**0.5).requires_grad_(),
            torch.randint(vocab_size, (num_targets,), generator=generator),
            torch.randn(num_targets, generator=generator),
        )

    def backward(self, logprobs_N: torch.Tensor) -> None:
        """Differentiate what a head gave."""
        (logprobs_N * self.upstream_N).sum().backward()

    def clear(self) -> None:
        """Forget the gradients."""
        self.hidden_NH.grad = self.weight_VH.grad = None


def naive(case: Case) -> None:
    logprobs_NV = torch.log_softmax(case.hidden_NH @ case.weight_VH.t(), 1)
    case.backward(logprobs_NV.gather(1, case.targets_N[:, None]).squeeze(1))


def two_passes(case: Case, **tile: int) -> None:
    ones_N = torch.ones(len(case.targets_N))
    case.backward(chunked_logprobs(case.hidden_NH, case.weight_VH, case.targets_N, ones_N, **tile))


def single_pass(case: Case) -> None:
    def loss_of(logprobs_C: torch.Tensor, rows: slice) -> torch.Tensor:
        return (logprobs_C * case.upstream_N[rows]).sum()

    one_pass(case.hidden_NH, case.weight_VH, case.targets_N, torch.ones(len(case.targets_N)), loss_of).backward()


def half(case: Case, run: Callable[[Case], None]) -> None:
    """Run on the even rows only, as if the others were prompts."""
    leaf_NH = case.hidden_NH
    part = Case(leaf_NH[::2], case.weight_VH, case.targets_N[::2], case.upstream_N[::2])
    run(part)


def other(head: Callable[..., Any], **settings: Any) -> Callable[[Case], None]:
    def run(case: Case) -> None:
        logprobs = head(case.hidden_NH, case.weight_VH, case.targets_N, **settings)
        case.backward(logprobs[0] if isinstance(logprobs, tuple) else logprobs)

    return run


def heads(vocab_size: int) -> dict[str, Callable[[Case], None]]:
    return {
        "naive": naive,
        "inflight, two passes": two_passes,
        "inflight, one pass": single_pass,
        "inflight, two passes, half the rows": lambda case: half(case, two_passes),
        "inflight, one pass, half the rows": lambda case: half(case, single_pass),
        "torch linear_cross_entropy": other(torch_anchor.torch_logprobs),
        "TRL": other(trl_anchor.trl_chunked_logprobs, chunk_size=TRL_TILE[1]),
        "verl": other(verl_anchor.verl_logprobs, chunk_size=VERL_CHUNK),
        "Liger": other(liger_anchor.liger_logprobs, vocab_chunk_size=LIGER_TILE[1]),
    }


def tile_of(name: str, vocab_size: int) -> dict[str, int] | None:
    """Return the tile that another head has by default, for inflight."""
    tiles = {"TRL": TRL_TILE, "verl": (VERL_CHUNK, vocab_size), "Liger": LIGER_TILE}
    if name not in tiles:
        return None
    return {"chunk_size": tiles[name][0], "vocab_chunk_size": tiles[name][1]}


def transient_bytes(case: Case, run: Callable[[Case], None]) -> int:
    case.clear()
    with LiveBytes() as ledger:
        run(case)
    return ledger.peak - case.hidden_NH.nbytes - case.weight_VH.nbytes


def measure_shape(num_targets: int, hidden_size: int, vocab_size: int, num_rounds: int) -> dict[str, Any]:
    case = Case.of(num_targets, hidden_size, vocab_size)
    contenders = heads(vocab_size)
    rows: dict[str, dict[str, Any]] = {}
    for name, run in contenders.items():
        rows[name] = {"transient_bytes": transient_bytes(case, run), "seconds": []}
        tile = tile_of(name, vocab_size)
        if tile is not None:
            rows[name]["inflight_at_its_tile_bytes"] = transient_bytes(case, lambda c, t=tile: two_passes(c, **t))
        print(f"  {name}: {rows[name]['transient_bytes'] / 2**20:,.0f} MiB", flush=True)
    for index in range(num_rounds):
        names = list(contenders)
        for name in names if index % 2 == 0 else reversed(names):
            case.clear()
            started = time.perf_counter()
            contenders[name](case)
            rows[name]["seconds"].append(time.perf_counter() - started)
    for name, row in rows.items():
        ratios = [own / base for own, base in zip(row["seconds"], rows["naive"]["seconds"], strict=True)]
        row["time_ratio"] = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
        row["memory_ratio"] = row["transient_bytes"] / rows["naive"]["transient_bytes"]
        print(f"  {name}: {row['time_ratio']['median']:.2f} of naive's time", flush=True)
    shape = {"num_targets": num_targets, "hidden_size": hidden_size, "vocab_size": vocab_size}
    return shape | {"rounds": num_rounds, "heads": rows}


def measure_heads() -> list[dict[str, Any]]:
    torch.set_num_threads(2)
    measured = []
    for shape in SHAPES:
        print(f"{shape[0]:,} targets, hidden {shape[1]:,}, vocabulary {shape[2]:,}", flush=True)
        measured.append(measure_shape(*shape))
    return measured


def measure_learning() -> list[dict[str, Any]]:
    rows = []
    for name in PRESETS:
        rows.append({"preset": name, **run_quickstart("--loss.preset", name)})
        print({key: value for key, value in rows[-1].items() if key != "curve"}, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", choices=("head", "learning"), default=[])
    what = parser.parse_args().what or ["head", "learning"]
    try:
        rows = read_results("losses")["rows"]
    except FileNotFoundError:
        rows = {}
    measures = {"head": measure_heads, "learning": measure_learning}
    for name in what:
        rows[name] = measures[name]()
        write_results("losses", rows)


if __name__ == "__main__":
    main()

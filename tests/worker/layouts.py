"""Ways for ranks to share a model and its data, each run against one rank; for tests and benchmarks/layouts.py."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.models import make_model
from tests.worker.ranks import run_ranks

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3"},
    "tied qwen3": {"family": "qwen3", "tied": True},
    "llama": {"family": "llama"},
    "qwen2": {"family": "qwen2"},
    "qwen3-moe": {"family": "qwen3_moe"},
}


@dataclass(frozen=True)
class Layout:
    """So many ranks of a worker, and the options that say what they share."""

    ranks: int
    options: Mapping[str, int] = field(default_factory=dict)
    model: str = "qwen3"
    worker: str = "torchtitan"


LAYOUTS = {
    "shards 2": Layout(2),
    "TP 2": Layout(2, {"tensor_parallel": 2}),
    "TP 2, tied": Layout(2, {"tensor_parallel": 2}, "tied qwen3"),
    "TP 2, Llama": Layout(2, {"tensor_parallel": 2}, "llama"),
    "TP 2, experts": Layout(2, {"tensor_parallel": 2}, "qwen3-moe"),
    "CP 2": Layout(2, {"context_parallel": 2}),
    "CP 2, worker fsdp": Layout(2, {"context_parallel": 2}, worker="fsdp"),
    "PP 2": Layout(2, {"pipeline_parallel": 2}),
    "PP 2, tied": Layout(2, {"pipeline_parallel": 2}, "tied qwen3"),
    "PP 2, experts": Layout(2, {"pipeline_parallel": 2, "pipeline_chunks": 3}, "qwen3-moe"),
    "EP 2": Layout(2, {"expert_parallel": 2}, "qwen3-moe"),
    "DP 2, Megatron": Layout(2, worker="megatron"),
    "TP 2, Megatron": Layout(2, {"tensor_parallel": 2}, worker="megatron"),
    "TP 2, tied, Megatron": Layout(2, {"tensor_parallel": 2}, "tied qwen3", "megatron"),
    "TP 2, Qwen2, Megatron": Layout(2, {"tensor_parallel": 2}, "qwen2", "megatron"),
    "PP 2, Megatron": Layout(2, {"pipeline_parallel": 2, "pipeline_chunks": 3}, worker="megatron"),
    "PP 2, tied, Megatron": Layout(2, {"pipeline_parallel": 2}, "tied qwen3", "megatron"),
    "TP 2 x shards 2": Layout(4, {"tensor_parallel": 2}),
    "TP 2 x shards 2, tied": Layout(4, {"tensor_parallel": 2}, "tied qwen3"),
    "2 copies x shards 2": Layout(4, {"shard_size": 2}),
    "TP 2 x CP 2, Llama": Layout(4, {"tensor_parallel": 2, "context_parallel": 2}, "llama"),
    "CP 2 x shards 2": Layout(4, {"context_parallel": 2}),
    "CP 4, worker fsdp": Layout(4, {"context_parallel": 4}, worker="fsdp"),
    "PP 2 x shards 2": Layout(4, {"pipeline_parallel": 2}),
    "PP 2 x shards 2, tied": Layout(4, {"pipeline_parallel": 2}, "tied qwen3"),
    "PP 2 x TP 2": Layout(4, {"pipeline_parallel": 2, "tensor_parallel": 2}),
    "PP 2 x CP 2": Layout(4, {"pipeline_parallel": 2, "context_parallel": 2}),
    "EP 2 x shards 2": Layout(4, {"expert_parallel": 2}, "qwen3-moe"),
    "EP 2 x CP 2": Layout(4, {"expert_parallel": 2, "context_parallel": 2}, "qwen3-moe"),
    "TP 2 x DP 2, Megatron": Layout(4, {"tensor_parallel": 2}, worker="megatron"),
    "PP 2 x TP 2, Megatron": Layout(4, {"pipeline_parallel": 2, "tensor_parallel": 2}, worker="megatron"),
    "PP 2 x DP 2, tied, Megatron": Layout(4, {"pipeline_parallel": 2}, "tied qwen3", "megatron"),
    "TP 2 x 2 copies x shards 2": Layout(8, {"tensor_parallel": 2, "shard_size": 2}),
    "PP 2 x TP 2 x CP 2, Llama": Layout(
        8, {"pipeline_parallel": 2, "tensor_parallel": 2, "context_parallel": 2}, "llama"
    ),
    "PP 2 x TP 2 x DP 2, tied, Megatron": Layout(
        8, {"pipeline_parallel": 2, "tensor_parallel": 2}, "tied qwen3", "megatron"
    ),
}


@dataclass(frozen=True)
class Difference:
    """Largest absolute difference to one rank, and relative to the largest element of one rank's."""

    absolute: float
    relative: float

    @staticmethod
    def between(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> Difference:
        """Compare tensors that must have the same names and shapes."""
        assert found.keys() == expected.keys()
        absolute = max(float((found[name].double() - value.double()).abs().max()) for name, value in expected.items())
        return Difference(absolute, absolute / max(float(value.abs().max()) for value in expected.values()))


def run_layouts(directory: Path, names: Sequence[str], deadline_s: float) -> None:
    """Run layouts, and one rank of each of their models, in ``directory``."""
    layouts = {name: LAYOUTS[name] for name in names}
    models = {layout.model for layout in layouts.values()}
    for model in models:
        # An odd vocabulary: its rows cannot be shared out evenly.
        make_model(directory / "models" / model, **MODELS[model], vocab_size=259, tokenizer=False)
    one_rank = "torchtitan" if any(layout.worker == "torchtitan" for layout in layouts.values()) else "fsdp"
    # TorchTitan has no Qwen2.
    runs = {f"one rank, {model}": Layout(1, {}, model, "fsdp" if model == "qwen2" else one_rank) for model in models}
    runs |= layouts
    (directory / "layouts.json").write_text(json.dumps({name: vars(layout) for name, layout in runs.items()}))
    for num_ranks in sorted({layout.ranks for layout in runs.values()}):
        run_ranks(directory, "layout_program", num_ranks, deadline_s)


def differences(directory: Path, name: str) -> dict[str, Difference]:
    """Return how far a layout is from one rank, by what was compared; whatever must be equal is asserted."""
    layout = LAYOUTS[name]
    ours, one = directory / name, directory / f"one rank, {layout.model}"
    seen = [json.loads((ours / f"rank{rank}.json").read_text()) for rank in range(layout.ranks)]
    (alone,) = [json.loads((one / "rank0.json").read_text())]
    assert all(rank["norms"] == seen[0]["norms"] for rank in seen)
    for first, second in (rank["num_threads"] for rank in seen):
        assert second <= first, f"the second worker left {second - first} threads"
    gathered, saved = load_file(ours / "gathered.safetensors"), load_file(ours / "stepped" / "model.safetensors")
    assert gathered.keys() == saved.keys()
    assert all(torch.equal(gathered[key], value) for key, value in saved.items())
    norms = [torch.tensor([it["gradient_norm"], *it["norms"]]) for it in (seen[0], alone)]
    return {
        "logprobs": max(
            (Difference.between(*({"all": torch.tensor(it["whole"])} for it in (rank, alone))) for rank in seen),
            key=lambda difference: difference.absolute,
        ),
        "gradients": _of_files(ours, one, "gradients/trainer/optimizer.safetensors", ".exp_avg"),
        "gradient norms": Difference.between({"all": norms[0]}, {"all": norms[1]}),
        "weights": _of_files(ours, one, "stepped/model.safetensors"),
        "moments": _of_files(ours, one, "stepped/trainer/optimizer.safetensors"),
        "weights resumed": _of_files(ours, one, "resumed/model.safetensors"),
    }


def _of_files(ours: Path, one: Path, file: str, suffix: str = "") -> Difference:
    found, expected = (
        {name: tensor for name, tensor in load_file(place / file).items() if name.endswith(suffix)}
        for place in (ours, one)
    )
    return Difference.between(found, expected)

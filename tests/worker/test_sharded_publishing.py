"""Every rank publishes what it holds: the servers serve what gathering would have given them, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models import make_model
from tests.worker.ranks import apart, run_ranks

Cases = dict[str, dict[str, Any]]
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "tied": {"tied": True},
    "llama": {"family": "llama"},
    "experts": {"family": "qwen3_moe"},
}
HTTP: dict[str, Any] = {"worker": "fsdp", "model": "qwen3", "settings": {}, "transport": "http"}
FEW: Cases = {
    "fsdp by http": {**HTTP, "overlaps": True},
    "fsdp by gloo": {**HTTP, "transport": "gloo"},
    "changes of fsdp": {**HTTP, "delta": True, "settings": {"learning_rate": 1e-9}},
    "experts of torchtitan": {
        **HTTP,
        "worker": "torchtitan",
        "model": "experts",
        "settings": {"expert_parallel": 2, "betas": (0.5, 0.9)},
    },
}
MORE: Cases = {
    "fsdp by shm": {**HTTP, "transport": "shm"},
    "fsdp by file": {**HTTP, "transport": "file"},
    "changes of fsdp by gloo": {**HTTP, "transport": "gloo", "delta": True},
    "changes of a pipeline, of whose buckets a rank may send nothing": {
        **HTTP,
        "worker": "torchtitan",
        "settings": {"pipeline_parallel": 2, "betas": (0.5, 0.9), "learning_rate": 1e-9},
        "delta": True,
    },
    "fsdp rounded": {**HTTP, "encoding": "bfloat16"},
    "experts of fsdp": {**HTTP, "model": "experts"},
    "tied head of fsdp": {**HTTP, "model": "tied"},
    "lora": {**HTTP, "settings": {"lora": {"rank": 4, "alpha": 8.0, "targets": "all-linear"}}},
    **{
        f"torchtitan, {model}, {options}": {
            **HTTP,
            "worker": "torchtitan",
            "model": model,
            "settings": {**options, "betas": (0.5, 0.9)},
        }
        for model, options in (
            ("qwen3", {}),
            ("qwen3", {"tensor_parallel": 2}),
            ("qwen3", {"pipeline_parallel": 2}),
            ("tied", {"tensor_parallel": 2}),
            ("tied", {"pipeline_parallel": 2}),
            ("experts", {"tensor_parallel": 2}),
        )
    },
    **{
        f"megatron, {model}, {options}": {**HTTP, "worker": "megatron", "model": model, "settings": options}
        for model, options in (
            ("qwen3", {"tensor_parallel": 2}),
            ("llama", {"tensor_parallel": 2}),
            ("tied", {"pipeline_parallel": 2}),
        )
    },
}
"""On two ranks."""
HYBRID: Cases = {
    "copies of fsdp": {**HTTP, "settings": {"shard_size": 2}},
    "context parallelism": {**HTTP, "settings": {"context_parallel": 2}},
    "torchtitan's copies": {
        **HTTP,
        "worker": "torchtitan",
        "settings": {"tensor_parallel": 2, "shard_size": 2, "betas": (0.5, 0.9)},
    },
    "torchtitan's experts and copies": {
        **HTTP,
        "worker": "torchtitan",
        "model": "experts",
        "settings": {"expert_parallel": 2, "betas": (0.5, 0.9)},
    },
}
"""On four ranks."""
DEEPSPEED: Cases = {
    f"stage {stage}": {**HTTP, "worker": "deepspeed", "model": model, "settings": {"zero_stage": stage}}
    for stage, model in ((1, "qwen3"), (2, "tied"), (3, "qwen3"), (3, "experts"))
}


ALONE: Cases = {
    "fsdp": HTTP,
    "fsdp in bfloat16": {**HTTP, "settings": {"dtype": "bfloat16", "wire_dtype": "bfloat16"}},
    "lora": MORE["lora"],
    "llama of torchtitan": {**HTTP, "worker": "torchtitan", "model": "llama", "settings": {"betas": (0.5, 0.9)}},
    "experts of torchtitan": {**HTTP, "worker": "torchtitan", "model": "experts", "settings": {"betas": (0.5, 0.9)}},
    "megatron": {**HTTP, "worker": "megatron"},
}
"""On one rank, which gathers."""


def seen_by_ranks(path: Path, cases: Cases, num_ranks: int = 2, **others: Any) -> dict[str, Any]:
    for name in {case["model"] for case in cases.values()}:
        make_model(path / name, **MODELS[name])
    (path / "cases.json").write_text(
        json.dumps({name: {**case, "model": str(path / case["model"])} for name, case in cases.items()})
    )
    run_ranks(path, "sharded_program", num_ranks, **others)
    seen: dict[str, Any] = json.loads((path / "seen0.json").read_text())
    return seen


ALIKE = {"forward": True, "backward": True}


def assert_equal(seen: dict[str, Any]) -> None:
    assert {name: (it["is_sharded"], it["equal"], it["passes"]) for name, it in seen.items()} == {
        name: (True, [True, True, True], ALIKE) for name in seen
    }


@pytest.mark.parametrize("cases", [FEW, pytest.param(MORE, marks=pytest.mark.exhaustive)], ids=["few", "more"])
def test_servers_serve_what_gathering_gives(tmp_path: Path, cases: Cases) -> None:
    seen = seen_by_ranks(tmp_path, cases)
    assert_equal(seen)
    if cases is FEW:
        overlap = {"is_waiting": True, "version": 3, "is_as_before": True}
        assert seen["fsdp by http"]["overlap"] == overlap, "a step waits until the publish has read the weights"
        assert seen["changes of fsdp"]["sent"][0] == 1.0
        assert max(seen["changes of fsdp"]["sent"][1:]) < 0.9


@pytest.mark.exhaustive
def test_one_of_several_copies_is_sent(tmp_path: Path) -> None:
    seen = seen_by_ranks(tmp_path, HYBRID, 4)
    assert_equal(seen)
    assert [it["sent"] for it in seen.values()] == [[1.0, 1.0, 1.0]] * len(seen)


@pytest.mark.exhaustive
def test_deepspeed_sends_ranges(tmp_path: Path) -> None:
    assert_equal(seen_by_ranks(tmp_path, DEEPSPEED, environment=apart("deepspeed")))


@pytest.mark.parametrize(
    ("cases", "environment"),
    [(ALONE, {}), pytest.param(DEEPSPEED, "deepspeed", marks=pytest.mark.exhaustive)],
    ids=["few", "deepspeed"],
)
def test_the_weights_of_one_rank_stay_the_same_during_passes(tmp_path: Path, cases: Cases, environment: Any) -> None:
    seen = seen_by_ranks(tmp_path, cases, 1, environment=environment and apart(environment))
    assert {name: it["passes"] for name, it in seen.items()} == dict.fromkeys(cases, ALIKE)


@pytest.mark.exhaustive
def test_what_is_permuted_is_gathered(tmp_path: Path) -> None:
    """TorchTitan's Llama has the rows of queries and keys in another order than checkpoints."""
    case = {**HTTP, "worker": "torchtitan", "model": "llama", "settings": {"betas": (0.5, 0.9)}}
    seen = seen_by_ranks(tmp_path, {"llama": case})
    assert seen["llama"]["equal"] == [True, True, True]
    assert not seen["llama"]["is_sharded"]

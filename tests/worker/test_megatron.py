"""The Megatron worker against the FSDP worker, on one rank and on ranks that share tensors, layers and data.

`tests.worker.test_layouts` runs the other layouts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from inflight.contracts import TrainerWorker
from inflight.errors import ConfigError, UnsupportedError
from inflight.types import StepResult
from inflight_fsdp import FSDP, MEGATRON
from inflight_fsdp.config import parse_config
from inflight_fsdp.megatron_config import MegatronConfig
from tests.models import make_model
from tests.worker.layouts import run_layouts
from tests.worker.test_layouts import assert_like_one_rank
from tests.worker.test_torchtitan import LENGTHS, options, weights_of, with_llama3_rope
from tests.worker.worker_cases import accumulate, assert_close, make_batch

MakePair = Callable[..., tuple[TrainerWorker, TrainerWorker]]


def train(worker: TrainerWorker, seed: int) -> StepResult:
    accumulate(worker, [make_batch(LENGTHS, seed=seed), make_batch((5, 20), seed=seed + 100)])
    return worker.step()


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    """Make a Megatron worker and an FSDP worker alike; both are closed at the end."""
    made: list[TrainerWorker] = []

    def make(path: Path, **others: object) -> tuple[TrainerWorker, TrainerWorker]:
        pair = MEGATRON.create(options(path, **others)), FSDP.create(options(path, **others))
        made.extend(pair)
        return pair

    yield make
    for worker in reversed(made):
        worker.close()
    assert not dist.is_initialized()


@pytest.mark.parametrize("kind", ["qwen3", "llama tied with scaled positions", "qwen2"])
def test_logprobs_steps_and_weights_equal_those_of_the_fsdp_worker(
    tmp_path: Path, make_pair: MakePair, kind: str
) -> None:
    path = make_model(tmp_path / "model", kind.split()[0], tied="tied" in kind, vocab_size=259, tokenizer=False)
    if "scaled" in kind:
        with_llama3_rope(path)
    ours, fsdp = make_pair(path, max_gradient_norm=0.5, weight_decay=0.1, warmup_steps=2)
    batch = make_batch((150, 30, 9), seed=1)
    # float32, logits near 10; the padding is a target and an input too.
    batch.token_ids_T[5:8] = 256
    torch.testing.assert_close(ours.forward(batch), fsdp.forward(batch), rtol=0, atol=2e-4)
    start = weights_of(ours)
    stored = load_file(path / "model.safetensors")
    assert start.keys() == stored.keys()
    assert all(torch.equal(tensor, start[name]) for name, tensor in stored.items())
    for seed in range(3):
        found, expected = train(ours, seed), train(fsdp, seed)
        assert (found.version, found.learning_rate) == (expected.version, expected.learning_rate)
        assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-4)
    # Adam divides by small second moments: rounding grows to a part of a step of 0.01.
    assert_close(weights_of(ours), weights_of(fsdp), 1e-3)


def test_each_resumes_what_the_other_saved(tmp_path: Path, make_pair: MakePair) -> None:
    ours, fsdp = make_pair(make_model(tmp_path / "model", "qwen2", tokenizer=False))  # biases are fused too
    for name, saver, loader in (("ours", ours, fsdp), ("fsdp", fsdp, ours)):
        train(saver, 5)
        saver.save(tmp_path / name)
        train(loader, 6)
        loader.load(tmp_path / name)
        assert loader.version == saver.version
        loader.save(tmp_path / f"{name}-again")
        for file in ("model.safetensors", "trainer/optimizer.safetensors"):
            saved, again = (load_file(tmp_path / f"{name}{end}" / file) for end in ("", "-again"))
            assert saved.keys() == again.keys()
            assert all(torch.equal(tensor, again[key]) for key, tensor in saved.items())
        for worker in (saver, loader):
            train(worker, 7)
        assert_close(weights_of(loader), weights_of(saver), 1e-3)


def test_bfloat16_is_computed_under_float32_weights(tmp_path: Path, make_pair: MakePair) -> None:
    path = make_model(tmp_path / "model", tokenizer=False)
    ours, _ = make_pair(path)
    mixed = MEGATRON.create(options(path, dtype="bfloat16", wire_dtype=None))
    batch = make_batch(LENGTHS, seed=3)
    logprobs, exact = mixed.forward(batch).detach(), ours.forward(batch).detach()
    assert logprobs.dtype == torch.float32
    assert 0.0 < float((logprobs - exact).abs().max()) < 1.0  # 8 bits of logits that reach 10
    assert train(mixed, 1).gradient_norm == pytest.approx(train(ours, 1).gradient_norm, rel=0.1)
    mixed.save(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    published = weights_of(mixed)
    assert all(torch.equal(published[name], tensor.bfloat16()) for name, tensor in saved.items())
    # Layers compute with what was published, after a step and after a load.
    stepped = mixed.forward(batch).detach()
    assert not torch.equal(stepped, logprobs)
    train(mixed, 2)
    mixed.load(tmp_path / "saved")
    assert torch.equal(mixed.forward(batch).detach(), stepped)


def test_layers_that_are_computed_again_have_the_same_gradients(tmp_path: Path, make_pair: MakePair) -> None:
    path = make_model(tmp_path / "model", tokenizer=False)
    ours, _ = make_pair(path)
    other = MEGATRON.create(options(path, activation_checkpointing=True))
    computed: list[int] = []
    layer = other._policy.gpt.decoder.layers[0]  # type: ignore[attr-defined]
    layer.mlp.register_forward_pre_hook(lambda *_: computed.append(1))
    assert train(other, 1).gradient_norm == train(ours, 1).gradient_norm
    assert len(computed) == 4, "two micro-batches, each computed again"


def test_ranks_that_share_tensors_compute_what_one_does_and_resume_its_checkpoint(tmp_path: Path) -> None:
    run_layouts(tmp_path, ["TP 2, Megatron"], 170.0)
    assert_like_one_rank(tmp_path, "TP 2, Megatron")


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float64"}, "dtype 'float64': the Megatron worker trains in float32 or bfloat16"),
        ({"context_parallel": 2}, "context_parallel is not supported by the Megatron worker"),
        ({"frozen": ["*.k_proj.*"]}, "frozen is not supported by the Megatron worker; omit it"),
        ({"lora": {"rank": 2, "alpha": 2, "targets": ["q_proj"]}}, "lora is not supported"),
        ({"float8": True}, "float8 is not supported"),
        ({"compile": True}, "compile is not supported"),
        ({"cpu_offload": True}, "cpu_offload is not supported"),
        ({"shard_size": 2}, "shard_size is not supported"),
        ({"reduce_dtype": "bfloat16"}, "reduce_dtype is not supported"),
        ({"optimizer": "adamw8bit"}, "optimizer 'adamw8bit' is supported only by the worker 'fsdp'"),
        ({"sequence_parallel": True}, "Megatron worker: unknown key 'sequence_parallel'"),
    ],
)
def test_settings_that_megatron_does_not_have_are_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config({"model_path": "model", **change}, MegatronConfig)


@pytest.mark.parametrize(
    ("change", "layout", "words"),
    [
        ({"attention_bias": True}, {}, "with attention_bias or mlp_bias, which is not supported"),
        ({"hidden_act": "gelu"}, {}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, {}, "rope_type 'yarn'"),
        ({}, {"tensor_parallel": 3}, "tensor_parallel 3 does not divide the model's 2 key-value heads"),
        ({"intermediate_size": 63}, {"tensor_parallel": 2}, "tensor_parallel 2 does not divide the model's 63 rows"),
        ({}, {"pipeline_parallel": 3}, "pipeline_parallel 3 does not divide the model's 2 layers"),
    ],
)
def test_models_that_ranks_cannot_compute_are_refused_with_the_reason(
    tmp_path: Path, change: dict[str, Any], layout: dict[str, int], words: str
) -> None:
    path = make_model(tmp_path / "model", tokenizer=False)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | change))
    MEGATRON.create(options(make_model(tmp_path / "fits", tokenizer=False))).close()  # imports Megatron-Core quietly
    from inflight_fsdp.megatron_model import supported_config

    with pytest.raises((ConfigError, UnsupportedError), match=words):
        supported_config(parse_config({"model_path": path, **layout}, MegatronConfig))


def test_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"type 'gemma' are not supported; supported: llama, qwen2, qwen3"):
        MEGATRON.create(options(make_model(tmp_path / "model", "gemma", tokenizer=False)))
    assert not dist.is_initialized()

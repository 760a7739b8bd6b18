"""The worker that trains a LoRA: against a plain float64 loop, on one rank and on two, and as PEFT reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from inflight.errors import CheckpointError, ConfigError, UnsupportedError
from inflight.model.checkpoints import load_causal_lm
from inflight.model.lora_settings import LoraSettings
from inflight.weights.encode.lora_tensors import PREFIX, lora_names
from inflight_fsdp import FsdpLoraWorker, create_worker
from inflight_fsdp.config import parse_config
from inflight_fsdp.torchtitan_config import TorchTitanConfig
from tests.losses.anchors.packages import importable_anchors
from tests.models import make_model
from tests.weights.lora import adapted, merged_with
from tests.worker.lora_program import LORA, batches_of, merged_weights, train
from tests.worker.ranks import run_ranks
from tests.worker.test_fsdp_worker import plain_logprobs, weights_of
from tests.worker.worker_cases import accumulate, assert_close, policy_loss, saved_gradients, settings

SPEC = LoraSettings.model_validate(LORA).spec
CHANGED = [
    f"model.layers.{layer}.{name}"
    for layer in (0, 1)
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
]


def made(directory: Path, **others: Any) -> FsdpLoraWorker:
    worker = create_worker(settings(directory / "model", **{"lora": LORA, **others}))
    assert isinstance(worker, FsdpLoraWorker)
    return worker


def adapter(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "adapter" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one rank has trained two steps, and saved before each of them and afterwards."""
    path = tmp_path_factory.mktemp("lora")
    make_model(path / "model", tied=True, vocab_size=259, dtype=torch.float64, tokenizer=False)
    worker = made(path)
    worker.save(path / "alone" / "fresh")
    train(worker, 1)
    worker.save(path / "alone" / "one")
    train(worker, 2)
    worker.save(path / "alone" / "two")
    worker.close()
    return path


@pytest.fixture
def worker(directory: Path) -> Iterator[FsdpLoraWorker]:
    made_here = made(directory)
    yield made_here
    made_here.close()
    assert not dist.is_initialized()


def plain_model(directory: Path, checkpoint: Path) -> nn.Module:
    """The base as transformers loads it, with PEFT's layers that hold the LoRA of a checkpoint."""
    model = adapted(load_causal_lm(directory / "model", attention="sdpa", dtype="float64"), LORA["targets"], SPEC, 0)  # type: ignore[arg-type]
    stored = adapter(checkpoint)
    with torch.no_grad():
        for module in CHANGED:
            layer: Any = model.get_submodule(module)
            for part, name in zip((layer.lora_A, layer.lora_B), lora_names(module), strict=True):
                part["default"].weight = nn.Parameter(stored[name].clone())
    return model


def test_the_gradient_is_that_of_a_plain_loop(directory: Path) -> None:
    """At a B that is not zero, where both halves have one."""
    model = plain_model(directory, directory / "alone" / "one")
    for batch in batches_of(2):
        policy_loss(plain_logprobs(model, batch), batch).backward()  # type: ignore[no-untyped-call]
    expected = {
        f"{PREFIX}{name.replace('.default', '')}": parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }
    assert len(expected) == 2 * len(CHANGED)
    assert_close(saved_gradients(directory / "alone" / "two"), expected, 1e-10)


def test_a_fresh_lora_changes_nothing_and_has_the_first_values_of_peft(directory: Path) -> None:
    fresh = adapter(directory / "alone" / "fresh")
    assert fresh.keys() == {name for module in CHANGED for name in lora_names(module)}
    for name, tensor in fresh.items():
        bound = 1 / math.sqrt(tensor.shape[1])  # kaiming_uniform_ with a = sqrt(5)
        assert not tensor.any() if "lora_B" in name else bound * 0.8 < tensor.abs().max() <= bound
    base, merged = (load_file(directory / d / "model.safetensors") for d in ("model", "alone/fresh"))
    assert base.keys() == merged.keys()
    assert all(torch.equal(base[name], merged[name]) for name in base)


def test_training_changes_the_lora_alone_and_saves_it_merged_too(directory: Path) -> None:
    base, saved = (load_file(directory / d / "model.safetensors") for d in ("model", "alone/two"))
    expected = merged_with(base, adapter(directory / "alone" / "two"), SPEC)
    changed = {name for name in base if not torch.equal(saved[name], base[name])}
    assert changed == {f"{module}.weight" for module in CHANGED}
    assert_close(saved, expected, 1e-14)


def test_it_publishes_its_lora_or_the_weights_under_it(directory: Path, worker: FsdpLoraWorker) -> None:
    worker.load(directory / "alone" / "two")
    assert worker.version == 2
    assert worker.lora_spec() == SPEC
    stored = adapter(directory / "alone" / "two")
    published = weights_of(worker)
    assert published.keys() == stored.keys() and all(torch.equal(published[n], stored[n]) for n in stored)
    found = merged_weights(worker)
    whole = load_file(directory / "alone" / "two" / "model.safetensors")
    assert_close(found, {f"{module}.weight": whole[f"{module}.weight"] for module in CHANGED}, 1e-14)
    assert {*found, *worker.merged(1000).frozen_names()} == set(whole)
    assert worker.frozen_names() == ()


def test_a_resumed_worker_goes_on_exactly(directory: Path, worker: FsdpLoraWorker, tmp_path: Path) -> None:
    worker.load(directory / "alone" / "one")
    train(worker, 2)
    worker.save(tmp_path / "two")
    for file in ("adapter/adapter_model.safetensors", "model.safetensors", "trainer/optimizer.safetensors"):
        assert (tmp_path / "two" / file).read_bytes() == (directory / "alone" / "two" / file).read_bytes()


def test_dropout_is_drawn_anew_with_gradients_only_and_resumes_exactly(directory: Path, tmp_path: Path) -> None:
    dropping = {"lora": {**LORA, "dropout": 0.5}}
    worker, (batch, *_) = made(directory, **dropping), batches_of(3)
    worker.load(directory / "alone" / "two")
    with torch.no_grad():
        plain = plain_logprobs(plain_model(directory, directory / "alone" / "two"), batch)
        assert float((worker.forward(batch) - plain).abs().max()) < 1e-10
    one, other = (worker.forward(batch).detach() for _ in range(2))
    assert not torch.equal(one, other)
    worker.load(directory / "alone" / "one")
    worker.save(tmp_path / "begin")
    train(worker, 4, 5)
    again = made(directory, **dropping)
    again.load(tmp_path / "begin")
    train(again, 4, 5)
    first, second = weights_of(worker), weights_of(again)
    assert all(torch.equal(first[name], second[name]) for name in first)
    again.close()
    worker.close()


@pytest.mark.exhaustive
@pytest.mark.timeout(600)  # the compiler
@pytest.mark.parametrize("option", ["activation_checkpointing", "cpu_offload", "compile"])
def test_other_settings_give_the_same_gradient(directory: Path, tmp_path: Path, option: str) -> None:
    worker = made(directory, **{option: True})
    worker.load(directory / "alone" / "one")
    train(worker, 2)
    worker.save(tmp_path / "two")
    worker.close()
    assert_close(saved_gradients(tmp_path / "two"), saved_gradients(directory / "alone" / "two"), 1e-10)


def test_two_ranks_do_what_one_does_and_resume_it(directory: Path) -> None:
    run_ranks(directory, "lora_program")
    ranks, alone = directory / "ranks", directory / "alone"
    for name in ("fresh", "one", "two"):
        # Sums are taken in another order, and AdamW with beta 0 divides a gradient by its size.
        assert_close(adapter(ranks / name), adapter(alone / name), 1e-6)
        assert_close(*(load_file(d / name / "model.safetensors") for d in (ranks, alone)), 1e-6)  # type: ignore[call-arg, arg-type]
    assert_close(saved_gradients(ranks / "one"), saved_gradients(alone / "one"), 1e-10)
    assert_close(adapter(ranks / "two, resumed"), adapter(alone / "two"), 1e-6)
    whole = load_file(ranks / "two" / "model.safetensors")
    merged = load_file(ranks / "merged.safetensors")
    assert_close(merged, {name: whole[name] for name in merged}, 1e-14)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks transformers for an attribute with an older name
def test_peft_loads_what_was_saved(directory: Path) -> None:
    with importable_anchors():
        from peft import PeftModel

    base = load_causal_lm(directory / "model", attention="sdpa", dtype="float64")
    found = PeftModel.from_pretrained(base, directory / "alone" / "two" / "adapter", autocast_adapter_dtype=False)
    merged = load_causal_lm(directory / "alone" / "two", attention="sdpa", dtype="float64")
    tokens = torch.arange(40)[None]
    assert torch.allclose(found(tokens).logits, merged(tokens).logits, atol=1e-12)


def test_the_config_says_what_peft_asks_for(directory: Path) -> None:
    config = json.loads((directory / "alone" / "two" / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 6)
    assert config["target_modules"] == sorted(LORA["targets"])  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rank": 0}, "lora.rank: .*greater than or equal to 1"),
        ({"alpha": 0}, "lora.alpha"),
        ({"dropout": 1.0}, "lora.dropout"),
        ({"targets": []}, "targets is empty"),
        ({"targets": ["q_proj", "q_proj"]}, "names q_proj twice"),
        ({"targets": ["q_proj", "w_q"]}, "is named 'w_q'; their names end with down_proj, gate_proj, k_proj"),
        ({"targets": ["lm_head"]}, "is named 'lm_head'"),
    ],
)
def test_settings_that_cannot_be_trained_are_refused(directory: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        made(directory, lora={**LORA, **change})
    assert not dist.is_initialized()


def test_what_does_not_go_with_a_lora_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match="omit frozen"):
        made(directory, frozen=("*norm*",))
    with pytest.raises(ConfigError, match="lora is supported only by the worker 'fsdp'"):
        parse_config({"model_path": "here", "lora": LORA}, TorchTitanConfig)


def test_checkpoints_of_other_loras_are_refused(directory: Path) -> None:
    for change, says in (
        ({"alpha": 7}, "lora_alpha is 6, but this worker's is 7"),
        ({"rank": 4}, "r is 3, but this worker's is 4"),
        ({"targets": ["q_proj"]}, "target_modules is"),
    ):
        worker = made(directory, lora={**LORA, **change})
        with pytest.raises(CheckpointError, match=says):
            worker.load(directory / "alone" / "one")
        assert worker.version == 0
        worker.close()
    full = create_worker(settings(directory / "model"))
    with pytest.raises(CheckpointError, match="missing tensors"):
        full.load(directory / "alone" / "one")
    accumulate(full, batches_of(1))
    full.step()
    full.save(directory / "full")
    full.close()
    worker = made(directory)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        worker.load(directory / "full")
    worker.close()


def test_a_model_that_takes_images_is_refused(tmp_path: Path) -> None:
    from inflight.conformance.models import make_seeing_model

    with pytest.raises(UnsupportedError, match="take images"):
        create_worker({"model_path": str(make_seeing_model(tmp_path / "seeing")), "device": "cpu", "lora": LORA})


def test_all_linear_layers_of_the_decoder_may_be_targets(directory: Path) -> None:
    worker = made(directory, lora={**LORA, "targets": "all-linear"})
    assert len(worker.parameter_specs()) == 2 * 7 * 2
    worker.close()

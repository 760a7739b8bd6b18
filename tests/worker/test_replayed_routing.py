"""Replayed experts in the worker, against plain loops over tokens and experts in float64."""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from inflight.errors import InvalidRequestError, TrainerError, UnsupportedError
from inflight.losses import collate
from inflight.types import FREE_EXPERT, MicroBatch, Rollout, Sample
from inflight.wire import RoutedExperts, VersionSpan
from inflight_fsdp import create_worker
from tests.models import make_model
from tests.worker.test_fsdp_worker import gradients_of, plain_logprobs, plain_model
from tests.worker.worker_cases import assert_close, make_batch, part_of, policy_loss, settings

LENGTHS = (9, 4, 17, 1, 6)
LAYERS, EXPERTS, CHOSEN = 2, 4, 2


def write_model(path: Path, *, normalised: bool = False) -> Path:
    make_model(path, "qwen3_moe", dtype=torch.float64, tokenizer=False)
    weights = load_file(path / "model.safetensors")
    for name in weights:
        if "experts" in name:  # their part of the result must not be small
            weights[name] *= 8
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"norm_topk_prob": normalised}))
    return path


def random_experts(num_tokens: int, seed: int) -> torch.Tensor:
    """Two different experts for each token and layer, one token in four free."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, LAYERS, EXPERTS, generator=random)
    experts_TLK = scores.topk(CHOSEN, dim=-1).indices.to(torch.int16)
    experts_TLK[torch.rand(num_tokens, generator=random) < 0.25] = FREE_EXPERT
    return experts_TLK


def looping(mlp: Any, experts_RK: torch.Tensor, normalised: bool) -> Any:
    """The forward of a layer's experts, one token and one expert after another."""

    def forward(hidden_1RH: torch.Tensor) -> torch.Tensor:
        outputs = []
        for hidden_H, recorded in zip(hidden_1RH[0], experts_RK.tolist(), strict=True):
            # The model's own softmax is in float32, whatever its dtype.
            shares_E = torch.softmax(mlp.gate.weight @ hidden_H, dim=0, dtype=torch.float32)
            chosen = shares_E.topk(CHOSEN).indices.tolist() if FREE_EXPERT in recorded else recorded
            total = sum(shares_E[e] for e in chosen) if normalised else 1.0
            output_H = torch.zeros_like(hidden_H)
            for e in chosen:
                gate, up = (mlp.experts.gate_up_proj[e] @ hidden_H).chunk(2)
                output_H = output_H + (shares_E[e] / total).double() * (mlp.experts.down_proj[e] @ (F.silu(gate) * up))
            outputs.append(output_H)
        return torch.stack(outputs)[None]

    return forward


def reference(path: Path, batch: MicroBatch, normalised: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logprobs of a batch, and the gradients of `policy_loss`, by the names of the checkpoint."""
    model = plain_model(path)
    logprobs, start = [], 0
    assert batch.routed_experts_TLK is not None
    for index, length in enumerate(batch.segment_lengths):
        for layer, experts_RK in zip(
            model.model.layers, batch.routed_experts_TLK[start : start + length].unbind(1), strict=True
        ):
            layer.mlp.forward = looping(layer.mlp, experts_RK, normalised)
        logprobs.append(plain_logprobs(model, part_of(batch, range(index, index + 1))))
        start += length
    logprobs_T = torch.cat(logprobs)
    policy_loss(logprobs_T, batch).backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        prefix = name.removesuffix(".gate_up_proj").removesuffix(".down_proj")
        for e in range(EXPERTS if "experts" in name else 0):
            if name.endswith("gate_up_proj"):
                halves = parameter.grad[e].chunk(2)
                gradients |= {f"{prefix}.{e}.{n}_proj.weight": g for n, g in zip(("gate", "up"), halves, strict=True)}
            else:
                gradients[f"{prefix}.{e}.down_proj.weight"] = parameter.grad[e]
        if "experts" not in name:
            gradients[name] = parameter.grad
    return logprobs_T.detach(), gradients


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("normalised", [False, True], ids=["shares", "normalised"])
def test_replayed_experts_give_the_logprobs_and_gradients_of_a_plain_loop(
    tmp_path: Path, normalised: bool, checkpointing: bool
) -> None:
    path = write_model(tmp_path / "model", normalised=normalised)
    batch = make_batch(LENGTHS, seed=1)
    batch = replace(batch, routed_experts_TLK=random_experts(batch.num_tokens, 2))
    free = make_batch(LENGTHS, seed=3)
    worker = create_worker(settings(path, activation_checkpointing=checkpointing))
    try:
        assert worker.replays_routing
        expected_T, expected = reference(path, batch, normalised)
        plain = plain_model(path)
        close(worker.forward(batch), expected_T)
        close(worker.forward(free), plain_logprobs(plain, free))  # nothing is left of the batch before
        close(worker.forward(batch), expected_T)
        assert (worker.forward(replace(batch, routed_experts_TLK=None)) - expected_T).abs().max() > 1e-3
        found = gradients_of(worker, [batch], tmp_path / "saved")
        assert_close(found, expected, 1e-7)
        assert any(name.endswith("mlp.gate.weight") and gradient.abs().max() > 1e-3 for name, gradient in found.items())
    finally:
        worker.close()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    # The router's softmax is in float32: its rounding is 6e-8.
    torch.testing.assert_close(found.detach(), expected.detach(), atol=1e-6, rtol=0)


def test_experts_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    batch = make_batch(LENGTHS, seed=1)
    experts_TLK = random_experts(batch.num_tokens, 2)
    worker = create_worker(settings(write_model(tmp_path / "moe")))
    try:
        with pytest.raises(TrainerError, match="names expert 9, but the model has only 4"):
            worker.forward(replace(batch, routed_experts_TLK=torch.full_like(experts_TLK, 9)))
        with pytest.raises(TrainerError, match="the model 2 layers with 2 experts"):
            worker.forward(replace(batch, routed_experts_TLK=experts_TLK[:, :1]))
    finally:
        worker.close()
    dense = create_worker(settings(make_model(tmp_path / "dense", dtype=torch.float64, tokenizer=False)))
    try:
        assert not dense.replays_routing
        with pytest.raises(UnsupportedError, match="cannot replay routing"):
            dense.forward(replace(batch, routed_experts_TLK=experts_TLK))
    finally:
        dense.close()


# ---------------------------------------------------------------------------------------------------------------
# From the wire to micro-batches


def record_of(experts: np.ndarray) -> RoutedExperts:
    num_tokens, num_layers, num_chosen = experts.shape
    return RoutedExperts(
        num_tokens=num_tokens,
        num_layers=num_layers,
        num_chosen=num_chosen,
        dtype=experts.dtype.name,
        data=b64encode(experts.astype(experts.dtype.newbyteorder("<")).tobytes()).decode(),
    )


def sample_of(record: RoutedExperts | None, prompt: int = 2, completion: int = 3) -> Sample:
    spans = [VersionSpan(version=0, start=0, end=completion)]
    rollout = Rollout(
        [1] * prompt, [2] * completion, [-1.0] * completion, spans, "length", 0.0, 1.0, routed_experts=record
    )
    return Sample(rollout, [1.0] * completion, [True] * completion)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_records_become_rows_of_the_micro_batch_and_the_rest_is_free(dtype: type) -> None:
    experts = np.arange(4 * 2 * 2).reshape(4, 2, 2).astype(dtype)
    experts[1, 0] = np.iinfo(dtype).max
    batch = collate([sample_of(None), sample_of(record_of(experts))])
    assert batch.routed_experts_TLK is not None
    expected = np.full((10, 2, 2), FREE_EXPERT)
    expected[5:9] = experts
    expected[6, 0] = FREE_EXPERT
    assert batch.routed_experts_TLK.dtype == torch.int16
    assert batch.routed_experts_TLK.tolist() == expected.tolist()
    assert collate([sample_of(None)]).routed_experts_TLK is None


def test_records_that_do_not_fit_are_refused() -> None:
    experts = np.zeros((4, 2, 2), np.uint8)
    with pytest.raises(InvalidRequestError, match="5 tokens but routed_experts has 6 rows"):
        collate([sample_of(record_of(np.zeros((6, 2, 2), np.uint8)))])
    with pytest.raises(InvalidRequestError, match="must have the same numbers of layers"):
        collate([sample_of(record_of(experts)), sample_of(record_of(experts[:, :1]))])
    with pytest.raises(ValueError, match="16 bytes, but 5 rows of 4 bytes"):
        RoutedExperts.model_validate(record_of(experts).model_dump() | {"num_tokens": 5})
    with pytest.raises(ValueError, match="cannot follow"):
        record_of(experts).followed_by(record_of(experts[:, :1]))

"""Segments that share prefixes, of which each is computed once, against the same segments computed separately."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from inflight.contracts import PrefixSharingWorker
from inflight.losses import collate
from inflight.model import attention
from inflight.model.attention import SegmentPlan, SharedTokens
from inflight_fsdp import create_worker
from inflight_fsdp.rows import rows_of
from tests.models import make_model
from tests.pictures import images_of, make_image_model
from tests.worker import image_cases
from tests.worker.lora_program import LORA
from tests.worker.test_replayed_routing import random_experts, write_model
from tests.worker.worker_cases import make_tree, settings, shared_and_separate

TOLERANCE = 1e-13
"""float64: the sums of a shared token's gradients are in another order."""
ROUNDED = 1e-6
"""The same, where transformers computes a gradient in float32 whatever the dtype of the model: in norms and routers."""


def exact_norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


@pytest.mark.parametrize(
    ("family", "norm_class", "options"),
    [
        ("qwen3", Qwen3RMSNorm, {}),
        ("llama", LlamaRMSNorm, {"activation_checkpointing": True}),
        ("qwen2", Qwen2RMSNorm, {"lora": LORA}),
    ],
)
def test_logprobs_and_gradients_are_those_of_separate_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, norm_class: type, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(norm_class, "forward", exact_norm)
    model = make_model(tmp_path / "model", family, dtype=torch.float64, tokenizer=False)
    worker = create_worker(settings(model, **options))
    assert isinstance(worker, PrefixSharingWorker) and worker.shares_prefixes
    for seed in (0, 1):
        difference, norm, separate = shared_and_separate(worker, make_tree(seed))
        assert difference < TOLERANCE
        assert norm < TOLERANCE * separate
    worker.close()


def test_tokens_of_shared_prefixes_are_routed_as_those_of_separate_segments(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3_moe", dtype=torch.float64, tokenizer=False)
    worker = create_worker(settings(model))
    difference, norm, separate = shared_and_separate(worker, make_tree(0))
    assert difference < TOLERANCE
    assert norm < ROUNDED * separate
    worker.close()


def test_each_shared_token_is_computed_once() -> None:
    tree = make_tree(0)
    assert tree.prefix_ids_T is not None
    (row,) = rows_of(tree, 1, None, 8, torch.device("cpu"))
    assert len(row.token_ids_R) == len(set(tree.prefix_ids_T.tolist())) < tree.num_tokens / 2
    assert row.plan.num_tokens == len(row.token_ids_R)
    assert len(row.targets.rows_N) == int(tree.loss_mask_T.sum())


@pytest.mark.parametrize("num_rows", [2, 3, 20])
def test_rows_share_what_they_have_in_common_and_hold_every_target_once(num_rows: int) -> None:
    tree = make_tree(1)
    rows = rows_of(tree, num_rows, None, 8, torch.device("cpu"))
    assert sorted(torch.cat([row.places_N for row in rows]).tolist()) == tree.loss_mask_T.nonzero().squeeze(1).tolist()
    assert sum(len(row.token_ids_R) for row in rows) < tree.num_tokens + num_rows
    for row in rows:
        assert torch.equal(row.token_ids_R[row.targets.rows_N], tree.token_ids_T[row.places_N - 1])
        assert torch.equal(row.targets.token_ids_N, tree.token_ids_T[row.places_N])


def test_recorded_experts_are_replayed_in_shared_prefixes(tmp_path: Path) -> None:
    worker: Any = create_worker(settings(write_model(tmp_path / "model")))
    tree = make_tree(2)
    assert tree.prefix_ids_T is not None
    experts_TLK = random_experts(tree.num_tokens, 3)[tree.prefix_ids_T]  # the same for the same prefix
    difference, norm, separate = shared_and_separate(worker, replace(tree, routed_experts_TLK=experts_TLK))
    assert difference < TOLERANCE
    assert norm < ROUNDED * separate
    worker.close()


def test_a_shared_image_is_computed_once_and_another_one_is_not_shared(tmp_path: Path) -> None:
    make_image_model(tmp_path / "model")
    worker: Any = create_worker(settings(tmp_path / "model"))
    made = image_cases.samples(tmp_path / "model")
    branched = [
        replace(it, rollout=replace(it.rollout, completion_token_ids=it.rollout.completion_token_ids[::-1]))
        for it in made[3:5]
    ]
    samples = [made[0], made[3], branched[0], made[4], made[2], branched[1]]
    tensors = images_of(tmp_path / "model").tensors
    shared = collate(samples, image_tensors=tensors, share_prefixes=True)
    separate = collate(samples, image_tensors=tensors)
    assert shared.image_rows_M is not None and separate.image_rows_M is not None
    assert len(separate.image_tensors["pixel_values"]) == 7
    assert len(shared.image_tensors["pixel_values"]) == 4
    shared_T, separate_T = worker.forward(shared), worker.forward(separate)
    assert float((shared_T - separate_T).detach().abs().max()) < TOLERANCE
    worker.backward(image_cases.loss_of(shared_T, shared))
    worker.backward(-image_cases.loss_of(separate_T, separate))
    norm = worker.step().gradient_norm
    worker.backward(image_cases.loss_of(worker.forward(separate), separate))
    assert norm < ROUNDED * worker.step().gradient_norm
    worker.close()


def test_gradients_of_shared_tokens_are_summed_over_their_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 in bfloat16 has no room for a further 1. On a CPU, torch adds so without the conversion to float32 too."""
    shared = SharedTokens.of(torch.tensor([0, 1] * 300))
    plan = SegmentPlan.build((2,) * 300, shared=shared)
    x_TAD = torch.ones(2, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    (padded_NALD,) = attention._to_padded(x_TAD, plan)
    padded_NALD.sum().backward()
    assert x_TAD.grad is not None
    assert x_TAD.grad.flatten().tolist() == [300.0] * 32

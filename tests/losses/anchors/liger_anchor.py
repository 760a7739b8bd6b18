"""Liger's fused linear GRPO loss and its two logprob heads, as functions of tensors on CPU.

Written against liger-kernel 0.8.5. Nothing is compiled, so that no call depends on a C++ compiler.

    liger_loss             liger_kernel/chunked_loss/grpo_loss.py:418          LigerFusedLinearGRPOLoss
    liger_logprobs         liger_kernel/chunked_loss/fused_linear_ppo.py:136   _ChunkedSelectiveLogProbFunction
    liger_scaled_logprobs  liger_kernel/ops/fused_linear_scaled_cross_entropy.py:376, the torch fallback of CPU

B sequences, T padded completion tokens, N rows, V vocabulary, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.losses.anchors.packages import importable_anchors

with importable_anchors():
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    from liger_kernel.chunked_loss.fused_linear_ppo import _ChunkedSelectiveLogProbFunction
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction


def liger_loss(
    hidden_BTH: Tensor,
    weight_VH: Tensor,
    tokens_BT: Tensor,
    mask_BT: Tensor,
    advantages_B: Tensor,
    old_logps_BT: Tensor | None = None,
    ref_logps_BT: Tensor | None = None,
    *,
    sampling_ratio: Tensor | None = None,
    beta: float = 0.0,
    chunk_size: int = 1,
    **settings: Any,
) -> Tensor:
    """The loss of one micro-batch; a backward gives the gradients of ``hidden_BTH`` and ``weight_VH``.

    ``settings`` are arguments of LigerFusedLinearGRPOLoss (``loss_type``, ``importance_sampling_level``,
    ``epsilon_low``, ``epsilon_high``, ``delta``, ``temperature``, ``max_completion_length``,
    ``use_bias_correction_kl``, ``sapo_*``, ``vespo_*``); what is left out has Liger's default, but for ``beta``
    (Liger: 0.04). ``chunk_size`` counts sequences.
    """
    loss = LigerFusedLinearGRPOLoss(
        beta=beta, compiled=False, use_ref_model=beta != 0, chunk_size=chunk_size, **settings
    )
    value, _ = loss(
        hidden_BTH,
        weight_VH,
        tokens_BT,
        mask_BT.long(),
        advantages_B,
        ref_per_token_logps=ref_logps_BT,
        old_per_token_logps=old_logps_BT,
        vllm_is_ratio=sampling_ratio,
    )
    return value


def liger_logprobs(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperature: float = 1.0, vocab_chunk_size: int = 4096
) -> Tensor:
    """Logprobs [N] in float32."""
    return _ChunkedSelectiveLogProbFunction.apply(hidden_NH, weight_VH, targets_N, None, temperature, vocab_chunk_size)


def liger_scaled_logprobs(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperature: float = 1.0) -> Tensor:
    """Logprobs [N] in float32."""
    losses_N, _ = LigerFusedLinearScaledCrossEntropyFunction.apply(
        hidden_NH, weight_VH, targets_N, temperature, return_entropy=True
    )
    return torch.neg(losses_N)

"""The losses, aggregations, penalties, advantages and rollout corrections of verl, as functions of tensors on CPU.

Written against verl 0.9.1. verl imports ray for the name of one type (verl/protocol.py:29), so a module with that name
stands in for it during the import where ray is not installed.

    verl_policy_loss      verl/trainer/ppo/core_algos.py:1285-2549       get_policy_loss_fn(name)
    verl_agg_loss         verl/trainer/ppo/core_algos.py:1140            agg_loss
    verl_kl_penalty       verl/trainer/ppo/core_algos.py:2188            kl_penalty
    verl_advantages       verl/trainer/ppo/core_algos.py:267-870         get_adv_estimator_fn(name)
    verl_rollout_weights  verl/trainer/ppo/rollout_corr_helper.py:522    compute_rollout_correction_weights
    verl_rejection_mask   verl/trainer/ppo/rollout_corr_helper.py:197    compute_rollout_rejection_mask
    verl_logprobs         verl/utils/experimental/torch_functional.py:220   FusedLinearForPPO

B sequences, T padded response tokens, N rows, V vocabulary, H hidden.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.losses.anchors.packages import importable_anchors


@contextmanager
def _stand_in_for_ray() -> Iterator[None]:
    if importlib.util.find_spec("ray") is not None:
        yield
        return
    ray = ModuleType("ray")
    ray.ObjectRef = type("ObjectRef", (), {})
    sys.modules["ray"] = ray
    try:
        yield
    finally:
        del sys.modules["ray"]


with importable_anchors(), _stand_in_for_ray():
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.utils.experimental.torch_functional import FusedLinearForPPO
    from verl.workers.config import ActorConfig, PolicyLossConfig


def verl_policy_loss(
    name: str,
    old_logps_BT: Tensor,
    logps_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    agg_mode: str = "token-mean",
    *,
    rollout_weights_BT: Tensor | None = None,
    global_counts: dict[str, int] | None = None,
    policy_loss: dict[str, Any] | None = None,
    **config: Any,
) -> Tensor:
    """The loss that is registered as ``name``.

    ``global_counts`` are dp_size, batch_num_tokens, global_batch_size, loss_scale_factor; ``policy_loss`` are fields
    of PolicyLossConfig and ``config`` those of ActorConfig (``clip_ratio_low``, ``clip_ratio_c``, ``tau_pos``).
    """
    function = core_algos.get_policy_loss_fn(name)
    loss, _ = function(
        old_log_prob=old_logps_BT,
        log_prob=logps_BT,
        advantages=advantages_BT,
        response_mask=mask_BT.to(logps_BT.dtype),
        loss_agg_mode=agg_mode,
        config=_actor_config(global_counts, policy_loss, config),
        rollout_is_weights=rollout_weights_BT,
    )
    return loss


def verl_agg_loss(losses_BT: Tensor, mask_BT: Tensor, agg_mode: str, **counts: int) -> Tensor:
    """The aggregate; ``counts`` are dp_size, batch_num_tokens, global_batch_size, loss_scale_factor."""
    return core_algos.agg_loss(losses_BT, mask_BT.to(losses_BT.dtype), agg_mode, **counts)


def verl_kl_penalty(logps: Tensor, ref_logps: Tensor, kind: str) -> Tensor:
    """The penalty of each token; ``kind`` is k1 (kl), abs, k2 (mse), k3 (low_var_kl), or one of these with a ``+``."""
    return core_algos.kl_penalty(logps, ref_logps, kind)


def verl_advantages(name: str, rewards_B: Tensor, mask_BT: Tensor, groups_B: Tensor, **settings: Any) -> Tensor:
    """The advantages [B, T] of an estimator of outcomes: grpo, grpo_vectorized, rloo, opo.

    ``settings`` are the estimator's own: ``norm_adv_by_std_in_grpo`` and ``epsilon`` of grpo.
    """
    estimator = core_algos.get_adv_estimator_fn(name)
    rewards_BT = torch.zeros_like(mask_BT, dtype=rewards_B.dtype)
    rewards_BT[:, 0] = rewards_B
    advantages_BT, _ = estimator(
        token_level_rewards=rewards_BT,
        response_mask=mask_BT.to(rewards_B.dtype),
        index=groups_B.numpy(),
        **settings,
    )
    return advantages_BT


def verl_rollout_weights(
    log_ratio_BT: Tensor,
    mask_BT: Tensor,
    level: str = "token",
    threshold: str | float = 2.0,
) -> Tensor:
    """The importance weights [B, T], 0 where masked; a ``"low_high"`` threshold drops what a number truncates."""
    weights_BT, _ = rollout_corr_helper.compute_rollout_correction_weights(
        log_ratio_BT, mask_BT.to(log_ratio_BT.dtype), level, threshold
    )
    return weights_BT


def verl_rejection_mask(log_ratio_BT: Tensor, mask_BT: Tensor, options: str, threshold: str | float) -> Tensor:
    """The mask [B, T] that is left; ``options`` as token_k1 or seq_mean_k3, several separated by commas."""
    kept_BT, _ = rollout_corr_helper.compute_rollout_rejection_mask(
        log_ratio_BT, mask_BT.to(log_ratio_BT.dtype), options, threshold
    )
    return kept_BT.bool()


def verl_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature: float = 1.0,
    chunk_size: int = 16,
) -> Tensor:
    """Logprobs [N] in float32."""
    logprobs_N, _ = FusedLinearForPPO(chunk_size)(hidden_NH, weight_VH, targets_N, temperature)
    return logprobs_N


def _actor_config(
    global_counts: dict[str, int] | None, policy_loss: dict[str, Any] | None, config: dict[str, Any]
) -> ActorConfig:
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        policy_loss=PolicyLossConfig(**(policy_loss or {})),
        global_batch_info=dict(global_counts or {}),
        **config,
    )

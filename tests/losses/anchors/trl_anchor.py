"""The losses, advantages, sampling corrections and logprobs of TRL, as functions of tensors.

Written against trl 1.16.0. Every number is TRL's own: a trainer's method is called unbound, with a namespace that holds
the attributes it reads, and every setting that a caller leaves out has the default of the installed config class.

    trl_loss                  trl/trainer/grpo_trainer.py:3020                        GRPOTrainer._compute_loss
    trl_gmpo_loss             trl/experimental/gmpo/gmpo_trainer.py:43                GMPOTrainer._compute_loss
    trl_rloo_loss             trl/trainer/rloo_trainer.py:1794                        RLOOTrainer._compute_loss
    trl_async_loss            trl/experimental/async_grpo/async_grpo_trainer.py:1497  AsyncGRPOTrainer.compute_loss
    trl_scored_batch          trl/trainer/grpo_trainer.py:2324                        _generate_and_score_completions
    trl_rloo_advantages       trl/trainer/rloo_trainer.py:1458                        _generate_and_score_completions
    trl_chunked_logprobs      trl/kernels/chunked_logprob.py:299                      ChunkedLogProbFunction
    trl_selective_logprobs    trl/trainer/utils.py:538                                selective_log_softmax

B sequences, T completion tokens (padded on the right), N rows, V vocabulary, H hidden; B1 is a column [B, 1].
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import MISSING, fields
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.trainer import utils


def _defaults(config: type) -> dict[str, Any]:
    """The defaults of a config class: one entry per field that has a default, before ``__post_init__``."""
    plain = {f.name: f.default for f in fields(config) if f.default is not MISSING}
    return plain | {f.name: f.default_factory() for f in fields(config) if f.default_factory is not MISSING}


def trl_loss(
    logps_BT: Tensor,
    old_logps_BT: Tensor | None,
    advantages: Tensor,
    mask_BT: Tensor,
    *,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    beta: float = 0.0,
    ref_logps_BT: Tensor | None = None,
    use_bias_correction_kl: bool = True,
    sampling_logps_BT: Tensor | None = None,
    sampling_ratio: Tensor | None = None,
    off_policy_mask_threshold: float | None = None,
    num_items_in_batch: float | None = None,
    max_completion_length: int = 512,
    gradient_accumulation_steps: int = 1,
) -> Tensor:
    """The loss of one micro-batch.

    ``advantages`` are [B] or [B, T]. ``sampling_ratio`` ([B, 1] or [B, T]) is the correction that multiplies the loss,
    as `trl_scored_batch` returns it; ``sampling_logps_BT`` is read by the off-policy mask only. Without
    ``num_items_in_batch`` the batch is the whole step.
    """
    args = _args(GRPOConfig, delta=delta, use_bias_correction_kl=use_bias_correction_kl)
    trainer = _trainer(
        GRPOTrainer,
        args,
        logps_BT,
        loss_type=loss_type,
        importance_sampling_level=importance_sampling_level,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        beta=beta,
        off_policy_mask_threshold=off_policy_mask_threshold,
        top_entropy_quantile=1.0,
        max_completion_length=max_completion_length,
        use_vllm=sampling_ratio is not None,
        vllm_importance_sampling_correction=sampling_ratio is not None,
    )
    args.steps_per_generation = trainer.current_gradient_accumulation_steps = gradient_accumulation_steps
    count = torch.as_tensor(mask_BT.sum() if num_items_in_batch is None else num_items_in_batch, dtype=logps_BT.dtype)
    inputs = _inputs(
        mask_BT,
        advantages,
        old_per_token_logps=old_logps_BT,
        ref_per_token_logps=ref_logps_BT,
        importance_sampling_ratio=sampling_ratio,
        sampling_per_token_logps=sampling_logps_BT,
        num_items_in_batch=count,
    )
    return GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


def trl_gmpo_loss(
    logps_BT: Tensor,
    old_logps_BT: Tensor | None,
    advantages_B: Tensor,
    mask_BT: Tensor,
    *,
    epsilon_low: float = 0.4,
    epsilon_high: float = 0.4,
) -> Tensor:
    """GMPO's mean over sequences; both epsilons bound the log of the ratio."""
    trainer = _trainer(
        GMPOTrainer,
        _args(GMPOConfig),
        logps_BT,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        beta=0.0,
        top_entropy_quantile=1.0,
    )
    inputs = _inputs(mask_BT, advantages_B, old_per_token_logps=old_logps_BT)
    return GMPOTrainer._compute_loss(trainer, trainer.model, inputs)


def trl_rloo_loss(
    logps_BT: Tensor,
    old_logps_BT: Tensor,
    advantages_B: Tensor,
    mask_BT: Tensor,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
) -> Tensor:
    """RLOO's mean over sequences of the clipped product of the ratios of a sequence."""
    trainer = _trainer(RLOOTrainer, _args(RLOOConfig), logps_BT, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    inputs = _inputs(mask_BT, advantages_B, old_logps=(old_logps_BT * mask_BT).sum(1))
    return RLOOTrainer._compute_loss(trainer, trainer.model, inputs)


def trl_async_loss(
    logps_BT: Tensor,
    behaviour_logps_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    num_items_in_batch: float | None = None,
    gradient_accumulation_steps: int = 1,
) -> Tensor:
    """AsyncGRPO's loss of one packed row that holds the masked tokens of the batch."""
    selected = mask_BT.bool()
    logps_1N = logps_BT[selected][None]
    row = torch.arange(logps_1N.shape[1])[None]
    trainer = _trainer(
        AsyncGRPOTrainer,
        _args(AsyncGRPOConfig),
        logps_BT,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        current_gradient_accumulation_steps=gradient_accumulation_steps,
        **dict.fromkeys(("_step_forward_tokens", "_step_trained_tokens", "_step_seq_len_weighted"), 0.0),
        **dict.fromkeys(("_step_samples", "_step_forward_s"), 0.0),
    )
    num_items = torch.tensor([float(row.numel() if num_items_in_batch is None else num_items_in_batch)])
    inputs = {
        **dict.fromkeys(("input_ids", "position_ids", "shift_labels", "token_index"), row),
        "attention_mask": torch.ones_like(row),
        "old_log_probs": behaviour_logps_BT[selected][None],
        "advantages": advantages_BT[selected][None],
        "segment_id": torch.arange(len(mask_BT))[:, None].expand_as(mask_BT)[selected][None],
        **dict.fromkeys(("global_n_tokens", "global_n_forward_tokens", "mean_seq_len"), num_items),
        **dict.fromkeys(("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k"), torch.full_like(row, -1)),
        "tree_max_seqlens": torch.zeros(1, 2, dtype=torch.int64),
    }

    def model(**_: Any) -> SimpleNamespace:
        return SimpleNamespace(log_probs=logps_1N, entropy=torch.zeros_like(logps_1N))

    return AsyncGRPOTrainer.compute_loss(trainer, model, inputs)


def trl_scored_batch(
    rewards_B: Tensor,
    old_logps_BT: Tensor,
    mask_BT: Tensor,
    *,
    num_generations: int,
    sampling_logps_BT: Tensor | None = None,
    mode: str = "sequence_mask",
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
    scale_rewards: str = "group",
) -> dict[str, Tensor]:
    """What GRPOTrainer makes of completions: their advantages and the correction for the engine that sampled them.

    The groups of ``num_generations`` completions follow one another. Returns ``advantages`` [B],
    ``num_items_in_batch``, and, where ``sampling_logps_BT`` is given, ``importance_sampling_ratio`` ([B, 1] in the
    modes of sequences, [B, T] in those of tokens). TRL pauses sampling logprobs in torch's default dtype.
    """
    trainer = _scoring_trainer(GRPOTrainer, _args(GRPOConfig), rewards_B, old_logps_BT, num_generations)
    rows_BT = [list(range(mask_BT.shape[1])) for _ in mask_BT]
    sampled = None if sampling_logps_BT is None else sampling_logps_BT.tolist()
    texts = ["" for _ in mask_BT]
    trainer._generate = lambda prompts: (
        [[0] for _ in prompts], rows_BT, mask_BT.long().tolist(), texts, sampled, {}, None, [],
    )  # fmt: skip
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = sampled is not None
    trainer.vllm_importance_sampling_mode = mode
    trainer.vllm_importance_sampling_clip_max, trainer.vllm_importance_sampling_clip_min = clip_max, clip_min
    trainer.scale_rewards, trainer.multi_objective_aggregation = scale_rewards, "sum_then_normalize"
    return GRPOTrainer._generate_and_score_completions(trainer, [{"prompt": text} for text in texts])


def trl_rloo_advantages(rewards_B: Tensor, old_logps_BT: Tensor, mask_BT: Tensor, *, num_generations: int) -> Tensor:
    """RLOOTrainer's advantages [B]."""
    trainer = _scoring_trainer(RLOOTrainer, _args(RLOOConfig), rewards_B, old_logps_BT, num_generations)
    trainer.normalize_advantages, trainer.reward_clip_range = False, None
    rows_BT = [list(range(mask_BT.shape[1])) for _ in mask_BT]
    trainer._generate = lambda prompts: ([[0] for _ in prompts], rows_BT, ["" for _ in prompts])
    return RLOOTrainer._generate_and_score_completions(trainer, [{"prompt": ""} for _ in rows_BT])["advantages"]


def trl_chunked_logprobs(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperature: float = 1.0, chunk_size: int = 64
) -> Tensor:
    """Logprobs [N] in float32."""
    logps_N, *_ = utils._ChunkedLogProbFunction.apply(
        hidden_NH, weight_VH, None, targets_N, temperature, chunk_size, None, 1.0, ("entropy",)
    )
    return logps_N


def trl_selective_logprobs(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperature: float = 1.0) -> Tensor:
    """Logprobs [N] out of whole logits, in the dtype of the inputs."""
    return utils.selective_log_softmax(hidden_NH @ weight_VH.T / temperature, targets_N)


def _args(config: type, **settings: Any) -> SimpleNamespace:
    defaults = _defaults(config)
    if unknown := settings.keys() - defaults.keys():
        raise TypeError(f"{config.__name__} has no {sorted(unknown)}")
    return SimpleNamespace(**(defaults | settings))


def _trainer(trainer: type, args: SimpleNamespace, logps_BT: Tensor, **attributes: Any) -> SimpleNamespace:
    """What a loss reads of a trainer of one process that trains."""
    entropies_BT = torch.zeros_like(logps_BT).detach()
    statics = {
        name: getattr(trainer, name) for name in ("get_off_policy_mask", "get_gamma_weights") if hasattr(trainer, name)
    }
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        process_index=0,
        sync_gradients=True,
        gather=lambda tensor: tensor,
        pad_across_processes=lambda tensor, **_: tensor,
        reduce=lambda tensor, reduction: tensor,
    )
    defaults = {
        "args": args,
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "accelerator": accelerator,
        "aux_loss_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logps_BT, entropies_BT, None),
    }
    return SimpleNamespace(**(defaults | statics | attributes))


def _inputs(mask_BT: Tensor, advantages: Tensor, **others: Tensor | None) -> dict[str, Tensor]:
    ids_BT = mask_BT.long()
    return {
        "prompt_ids": ids_BT[:, :1],
        "prompt_mask": torch.ones_like(ids_BT[:, :1]),
        "completion_ids": ids_BT,
        "completion_mask": ids_BT,
        "advantages": advantages,
        **{name: tensor for name, tensor in others.items() if tensor is not None},
    }


def _scoring_trainer(
    trainer: type, args: SimpleNamespace, rewards_B: Tensor, old_logps_BT: Tensor, num_generations: int
) -> SimpleNamespace:
    """What scoring reads of a trainer that has no tools, images, environments or logs of its own."""
    PartialState()
    self = _trainer(
        trainer,
        args,
        old_logps_BT,
        beta=0.0,
        num_generations=num_generations,
        reward_funcs=[None],
        reward_func_names=["reward"],
        reward_weights=torch.ones(1),
        num_iterations=1,
        environment_factories=None,
        environments=None,
        tools=[],
        mask_truncated_completions=False,
        pad_to_multiple_of=None,
        log_multimodal=False,
        _is_vlm=False,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        _calculate_rewards=lambda *_: rewards_B[:, None],
        _logs={name: [] for name in ("prompt", "completion", "advantages", "images")},
        _pending_extra_logs={},
        _pending_metrics={},
    )
    self._logs |= {"rewards": defaultdict(list), "extra": defaultdict(list)}
    args.steps_per_generation = args.gradient_accumulation_steps = 1
    return self

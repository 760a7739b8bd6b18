"""The KL penalty towards a frozen reference, as a term of the loss.

Shape suffixes: T packed tokens, N targets (tokens with a true loss mask).
"""

from __future__ import annotations

import torch

from inflight.losses.metrics import LossOutput, mean_metrics
from inflight.losses.micro_batch import finite_targets


def reference_kl(
    trainer_logprobs_T: torch.Tensor,
    reference_logprobs_T: torch.Tensor,
    behaviour_logprobs_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    token_weights_T: torch.Tensor,
    *,
    coefficient: float,
) -> LossOutput:
    """Return ``coefficient`` times the weighted sum of r k3, whose gradient is right off-policy too.

    With d = trainer - reference and r = exp(trainer - behaviour), the term of a token is

        r k3 = r (exp(-d) + d - 1),    gradient  r d grad(trainer logprob),

    the ratio not detached (DeepSeek-V3.2, arXiv 2512.02556, eq. 7). Tokens come from the behaviour policy, so the
    expected value is KL(trainer || reference) of the next token and the expected gradient is the gradient of that, for
    the prefixes that were sampled. Without r, k3 gives the gradient of the forward KL(reference || trainer), and k1
    gives none at all (arXiv 2506.09477). The ratio is not truncated.

    Metrics, in nats per token: ``reference_kl_k1`` and ``reference_kl_k3``, the means of d and of exp(-d) + d - 1 over
    the tokens as sampled, without r. Raises `NonFiniteError` if a reference or behaviour logprob of a target is not
    finite.
    """
    trainer_N = trainer_logprobs_T[loss_mask_T]
    reference_N = finite_targets(reference_logprobs_T, loss_mask_T, "reference_logprobs").to(trainer_N.dtype)
    behaviour_N = finite_targets(behaviour_logprobs_T, loss_mask_T, "behaviour_logprobs").to(trainer_N.dtype)
    weights_N = token_weights_T[loss_mask_T].to(trainer_N.dtype)
    log_ratio_N = trainer_N - reference_N
    # r exp(-d) is exp(reference - behaviour): a constant.
    ratio_k3_N = (reference_N - behaviour_N).exp() + (trainer_N - behaviour_N).exp() * (log_ratio_N - 1)
    detached_N = log_ratio_N.detach().double()
    metrics = mean_metrics(
        {"reference_kl_k1": detached_N, "reference_kl_k3": (-detached_N).clamp(max=300).expm1() + detached_N}
    )
    return LossOutput(coefficient * (weights_N * ratio_k3_N).sum(), metrics)

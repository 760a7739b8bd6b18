"""Repairs for the way in which vLLM 0.32 verifies drafts. Each is applied only in workers where a test finds the fault.

On a CPU, `expand_batch_to_tokens` writes to a copy of its result, so drafted tokens are judged with a temperature,
top-k and top-p from uninitialized memory (vLLM's issue 55005). Also on a CPU, the token -1, with which vLLM pads the
drafts of a new request, is accepted with the probability that is stored in memory before its row. And in a step without
drafts, top-k takes the largest element of an empty tensor, which crashes the engine. All three faults affect every
method of speculative decoding.

Shape suffixes: B requests, T drafted tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from vllm.triton_utils.dispatcher import register_kernels
from vllm.v1.sample import rejection_sampler

_MODULE = "vllm.v1.sample.rejection_sampler"


def repair_verification(device: torch.device) -> None:
    """Make vLLM verify drafts correctly on ``device``. Raises `RuntimeError` if it still does not."""
    for is_right, repair in (
        (_expands, _repair_expansion),
        (_rejects_padding, _repair_padding),
        (_filters_nothing, _repair_filters),
    ):
        if not is_right(device):
            repair()
            if not is_right(device):
                raise RuntimeError(
                    f"inflight cannot repair how this release of vLLM verifies drafts ({is_right.__name__}); start "
                    "the server without drafts"
                )


# --------------------------------------------------------------------------------------------------------- expansion


def _expands(device: torch.device) -> bool:
    """Return whether each request's value becomes the value of each of its drafted tokens."""
    ends_B = torch.tensor([2, 2, 3], dtype=torch.int32, device=device)
    for dtype in (torch.float32, torch.int32):
        values_B = torch.tensor([7, 3, 0], dtype=dtype, device=device)
        expanded_T = rejection_sampler.expand_batch_to_tokens(values_B, ends_B, 3, replace_from=0, replace_to=11)
        if expanded_T.tolist() != [7, 7, 11]:
            return False
    return True


def _repair_expansion() -> None:
    register_kernels({f"{_MODULE}.expand_kernel": _expand})


def _expand(
    expanded_T: torch.Tensor,
    values_B: torch.Tensor,
    ends_B: torch.Tensor,
    replace_from: int,
    replace_to: int,
    max_num_tokens: int | None = None,
) -> None:
    """Write each request's value, replaced if equal to ``replace_from``, to each of its tokens."""
    values_B = values_B.masked_fill(values_B == replace_from, replace_to)
    expanded_T.copy_(values_B.repeat_interleave(_num_drafted(ends_B)))


def _num_drafted(ends_B: torch.Tensor) -> torch.Tensor:
    return torch.diff(ends_B, prepend=ends_B.new_zeros(1))


# ----------------------------------------------------------------------------------------------------------- padding


def _rejects_padding(device: torch.device) -> bool:
    """Return whether the token -1 is rejected even if the last probability of the preceding row is 1."""
    vocab_size, recovered = 4, 2
    answers_BT = torch.full((2, 2), -1, dtype=torch.int32, device=device)
    rejection_sampler._rejection_random_sample(
        answers_BT,
        torch.tensor([1, 2], dtype=torch.int32, device=device),
        torch.tensor([vocab_size - 1, -1], dtype=torch.int32, device=device),
        None,
        torch.eye(vocab_size, device=device)[[-1, recovered]].contiguous(),
        torch.ones(2, 1, dtype=torch.int64, device=device),
        torch.full((2,), recovered, dtype=torch.int32, device=device),
        torch.full((2,), 0.5, dtype=torch.float64, device=device),
        torch.zeros(2, dtype=torch.bool, device=device),
        1,
        None,
    )
    return bool(answers_BT[1].tolist() == [recovered, -1])


def _repair_padding() -> None:
    accept: Callable[..., None] = rejection_sampler.rejection_random_sample_kernel
    recover: Callable[..., None] = rejection_sampler.sample_recovered_tokens_kernel

    def accepting(*arguments: Any) -> None:
        answers_BT, ends_B, drafted_T, draft_TV, target_TV, bonus_B1, recovered_T, uniform_T, *others = arguments
        uniform_T = uniform_T.masked_fill(drafted_T < 0, math.inf)  # never accepted
        drafted_T = drafted_T.clamp(min=0)
        accept(answers_BT, ends_B, drafted_T, draft_TV, target_TV, bonus_B1, recovered_T, uniform_T, *others)

    def recovering(*arguments: Any) -> None:
        recovered_T, ends_B, drafted_T, draft_TV, target_TV, noise_BV, *others = arguments
        recover(recovered_T, ends_B, drafted_T.clamp(min=0), draft_TV, target_TV, noise_BV, *others)
        if bool((padded_T := drafted_T < 0).any()):  # the distribution after a rejected -1 is the whole target
            noise_TV = noise_BV.repeat_interleave(_num_drafted(ends_B), dim=0)
            recovered_T[padded_T] = (target_TV * noise_TV)[padded_T].argmax(dim=-1).to(recovered_T.dtype)

    register_kernels(
        {
            f"{_MODULE}.rejection_random_sample_kernel": accepting,
            f"{_MODULE}.sample_recovered_tokens_kernel": recovering,
        }
    )


# ----------------------------------------------------------------------------------------------------------- filters


def _filters_nothing(device: torch.device) -> bool:
    """Return whether top-k accepts a step without drafts."""
    top_k_T = torch.empty(0, dtype=torch.int32, device=device)
    try:
        rejection_sampler.apply_top_k_top_p(torch.empty(0, 4, device=device), top_k_T, None)
    except (RuntimeError, IndexError):
        return False
    return True


def _repair_filters() -> None:
    apply = rejection_sampler.apply_top_k_top_p

    def apply_top_k_top_p(logits_TV: torch.Tensor, *filters: Any, **options: Any) -> torch.Tensor:
        return apply(logits_TV, *filters, **options) if len(logits_TV) else logits_TV

    rejection_sampler.apply_top_k_top_p = apply_top_k_top_p

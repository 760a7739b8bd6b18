"""Two repairs of how vLLM 0.32 verifies drafts. Each is made where vLLM is seen to be wrong, and nowhere else.

On a CPU, `expand_batch_to_tokens` writes into a copy of its result, so that drafted tokens are judged at a temperature,
top-k and top-p of uninitialised memory (vLLM's issue 55005). And in a step without any draft, top-k asks for the
largest element of an empty tensor, which ends the engine. Both concern every method of speculation.

Shape suffixes: B requests, T drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.sample import rejection_sampler

_KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def repair_verification(device: torch.device) -> None:
    """Make vLLM verify drafts on ``device`` as it should. Raises `RuntimeError` if it still does not."""
    if not _expands(device):
        from vllm.triton_utils.dispatcher import register_kernels

        register_kernels({_KERNEL: _expand})
    if not _filters_nothing(device):
        rejection_sampler.apply_top_k_top_p = _filtering(rejection_sampler.apply_top_k_top_p)
    if not (_expands(device) and _filters_nothing(device)):
        raise RuntimeError("this release of vLLM verifies drafts wrongly, and inflight cannot repair it")


def _expands(device: torch.device) -> bool:
    """Return whether a value for each request becomes the value of each of its drafted tokens."""
    ends_B = torch.tensor([2, 2, 3], dtype=torch.int32, device=device)
    for dtype in (torch.float32, torch.int32):
        values_B = torch.tensor([7, 3, 0], dtype=dtype, device=device)
        expanded_T = rejection_sampler.expand_batch_to_tokens(values_B, ends_B, 3, replace_from=0, replace_to=11)
        if expanded_T.tolist() != [7, 7, 11]:
            return False
    return True


def _expand(
    expanded_T: torch.Tensor,
    values_B: torch.Tensor,
    ends_B: torch.Tensor,
    replace_from: int,
    replace_to: int,
    max_num_tokens: int | None = None,
) -> None:
    """Write ``values_B``, replaced where equal to ``replace_from``, for each token up to the ends of the requests."""
    num_B = torch.diff(ends_B, prepend=ends_B.new_zeros(1))
    expanded_T.copy_(values_B.masked_fill(values_B == replace_from, replace_to).repeat_interleave(num_B))


def _filters_nothing(device: torch.device) -> bool:
    """Return whether top-k accepts a step without drafts."""
    top_k_T = torch.empty(0, dtype=torch.int32, device=device)
    try:
        rejection_sampler.apply_top_k_top_p(torch.empty(0, 4, device=device), top_k_T, None)
    except (RuntimeError, IndexError):
        return False
    return True


def _filtering(apply: Callable[..., Any]) -> Callable[..., Any]:
    def apply_top_k_top_p(logits_TV: torch.Tensor, *filters: Any, **options: Any) -> Any:
        return apply(logits_TV, *filters, **options) if len(logits_TV) else logits_TV

    return apply_top_k_top_p

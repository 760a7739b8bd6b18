"""PyTorch's fused head as a logprob head; written against torch 2.13.0.

    torch_logprobs   torch/nn/functional.py   linear_cross_entropy

N rows, V vocabulary, H hidden.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def torch_logprobs(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperature: float = 1.0) -> Tensor:
    """Logprobs [N] in the dtype of the inputs; the temperature divides the hidden states."""
    return -F.linear_cross_entropy(hidden_NH / temperature, weight_VH, targets_N, reduction="none")

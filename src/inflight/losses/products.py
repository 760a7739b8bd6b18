"""Matrix products for the log-probability head: which inputs stay in 16 bits, and how products are accumulated.

A product of two bfloat16 numbers has 16 significant bits, so float32 represents it exactly, and the result differs from
that of inputs cast to float32 only in the order of summation. Tensor cores multiply 16-bit inputs many times as fast as
float32 units.
"""

from __future__ import annotations

import torch


def is_narrow(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> bool:
    """Return whether hidden states and weight are multiplied in bfloat16 on a GPU, without a cast to float32.

    float16 is never used, because gradients of logits are often smaller than the smallest float16 number. On a CPU,
    casting once per tile is faster. torch.mm accepts ``out_dtype`` only on NVIDIA GPUs.
    """
    is_bfloat16 = hidden_NH.dtype == weight_VH.dtype == torch.bfloat16
    return is_bfloat16 and hidden_NH.device.type == "cuda" and torch.version.hip is None


def product(a_MK: torch.Tensor, b_KN: torch.Tensor, out_MN: torch.Tensor) -> None:
    """Write the product of bfloat16 matrices into a float32 matrix, summing in float32."""
    if a_MK.device.type == "cuda":
        torch.mm(a_MK, b_KN, torch.float32, out=out_MN)
    else:
        torch.mm(a_MK.float(), b_KN.float(), out=out_MN)


def add_product(sum_MN: torch.Tensor, a_MK: torch.Tensor, b_KN: torch.Tensor) -> None:
    """Add a product to ``sum_MN``, in its dtype. If ``a_MK`` is bfloat16, the factors are multiplied without a cast."""
    if a_MK.dtype == torch.bfloat16 and a_MK.device.type == "cuda":
        torch.addmm(sum_MN, a_MK, b_KN, torch.float32, out=sum_MN)
    else:
        sum_MN.addmm_(a_MK.to(sum_MN.dtype), b_KN.to(sum_MN.dtype))


def halves(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two bfloat16 tensors whose sum is within a relative 2**-17 of a float32 tensor, which is overwritten.

    Gradients of logits are float32. If they were rounded to bfloat16 once, the error of their products would be 2**-8
    of the sum of magnitudes. Positive and negative terms do not cancel in that sum, so this error exceeds the rounding
    error of the result. A second product with the remainder of the rounding reduces the error to 2**-17, in the time
    that TF32, with an error of 2**-11, takes for one product.
    """
    high = wide.to(torch.bfloat16)
    return high, wide.sub_(high).to(torch.bfloat16)

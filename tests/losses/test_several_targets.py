"""Logprobs of several tokens in the place of each target, against autograd on whole logits."""

from __future__ import annotations

import pytest
import torch

from inflight.errors import InvalidRequestError
from inflight.losses.head import chunked_logprobs

N, H, V, K = 7, 5, 11, 4


def inputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    targets_NK = torch.randint(V, (N, K), generator=random)
    targets_NK[:, 3] = targets_NK[:, 0]  # the same token twice
    return {
        "hidden_NH": torch.randn(N, H, generator=random, dtype=torch.float64).to(dtype).requires_grad_(),
        "weight_VH": torch.randn(V, H, generator=random, dtype=torch.float64).to(dtype).requires_grad_(),
        "bias_V": torch.randn(V, generator=random, dtype=torch.float64).to(dtype).requires_grad_(),
        "targets_N": targets_NK,
        "temperature_N": 0.5 + torch.rand(N, generator=random),
    }


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 4), (100, 100)])
def test_several_targets_have_the_logprobs_and_gradients_of_whole_logits(
    dtype: torch.dtype, tolerance: float, sizes: tuple[int, int]
) -> None:
    ours, plain = inputs(dtype), inputs(dtype)
    weights_NK = torch.randn(N, K, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
    weights_NK[2] = 0.0  # a target without a gradient
    logits_NV = plain["hidden_NH"] @ plain["weight_VH"].t() + plain["bias_V"]
    expected_NK = torch.log_softmax(logits_NV / plain["temperature_N"][:, None].to(dtype), -1).gather(
        1, plain["targets_N"]
    )
    found_NK = chunked_logprobs(**ours, chunk_size=sizes[0], vocab_chunk_size=sizes[1])
    torch.testing.assert_close(found_NK, expected_NK, rtol=0, atol=tolerance)
    (found_NK * weights_NK).sum().backward()
    (expected_NK * weights_NK).sum().backward()
    for name in ("hidden_NH", "weight_VH", "bias_V"):
        torch.testing.assert_close(ours[name].grad, plain[name].grad, rtol=0, atol=10 * tolerance)


def test_a_single_column_equals_one_target_bit_for_bit() -> None:
    given = inputs(torch.float32)
    first = {**given, "targets_N": given["targets_N"][:, 0]}
    column = {**given, "targets_N": given["targets_N"][:, :1]}
    assert torch.equal(chunked_logprobs(**first), chunked_logprobs(**column)[:, 0])


def test_a_target_outside_the_vocabulary_is_named() -> None:
    given = inputs(torch.float32)
    given["targets_N"][4, 2] = V
    with pytest.raises(InvalidRequestError, match=f"target 4 is token {V}, but the vocabulary has {V}"):
        chunked_logprobs(**given)

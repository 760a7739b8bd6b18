"""The chunked head against a plain log-softmax over the whole vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inflight.losses import chunked_logprobs

N, H, V = 13, 6, 17


def inputs(dtype=torch.float64, num_targets=N, bias=True):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "hidden_NH": normal(num_targets, H).requires_grad_(),
        "weight_VH": normal(V, H).requires_grad_(),
        "targets_N": torch.randint(V, (num_targets,), generator=generator),
        "temperature_N": (0.5 + torch.rand(num_targets, generator=generator, dtype=torch.float64)).to(torch.float32),
        "bias_V": normal(V).requires_grad_() if bias else None,
    }


def naive_logprobs(hidden_NH, weight_VH, targets_N, temperature_N, bias_V):
    """One row at a time, in float64."""
    rows = []
    for n in range(len(targets_N)):
        logits_V = weight_VH.double() @ hidden_NH[n].double()
        if bias_V is not None:
            logits_V = logits_V + bias_V.double()
        logits_V = logits_V / temperature_N[n].double()
        rows.append(logits_V[targets_N[n]] - logits_V.exp().sum().log())
    return torch.stack(rows)


def gradients(logprobs_N, given, grad_N):
    leaves = [given[name] for name in ("hidden_NH", "weight_VH", "bias_V") if given[name] is not None]
    return torch.autograd.grad(logprobs_N, leaves, grad_N.to(logprobs_N.dtype))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 4, 13, 1024])
def test_logprobs_and_gradients_equal_the_naive_ones_for_any_chunk_size(chunk_size, bias):
    given = inputs(bias=bias)
    grad_N = torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected_N = naive_logprobs(**given)
    logprobs_N = chunked_logprobs(**given, chunk_size=chunk_size)
    # float64: logits of order 5, sums over 17 tokens and 13 rows.
    torch.testing.assert_close(logprobs_N, expected_N, rtol=0, atol=1e-13)
    for ours, naive in zip(gradients(logprobs_N, given, grad_N), gradients(expected_N, given, grad_N), strict=True):
        torch.testing.assert_close(ours, naive, rtol=0, atol=1e-12)


def test_gradients_pass_gradcheck():
    given = inputs(num_targets=5)
    temperature_N = given["temperature_N"].double()
    assert torch.autograd.gradcheck(
        lambda hidden, weight, bias: chunked_logprobs(
            hidden, weight, given["targets_N"], temperature_N, bias_V=bias, chunk_size=2
        ),
        (given["hidden_NH"], given["weight_VH"], given["bias_V"]),
    )


def test_each_row_has_its_own_temperature():
    given = inputs(num_targets=2)
    same_row = {**given, "hidden_NH": given["hidden_NH"][:1].expand(2, H), "targets_N": torch.tensor([3, 3])}
    same_row["temperature_N"] = torch.tensor([0.5, 2.0])
    logprobs_N = chunked_logprobs(**same_row)
    torch.testing.assert_close(logprobs_N, naive_logprobs(**same_row), rtol=0, atol=1e-13)  # float64
    assert abs(logprobs_N[0].item() - logprobs_N[1].item()) > 0.1


def test_rows_without_gradient_do_not_contribute():
    given = inputs()
    grad_N = torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grad_N[::2] = 0
    ours = gradients(chunked_logprobs(**given, chunk_size=3), given, grad_N)
    naive = gradients(naive_logprobs(**given), given, grad_N)
    for left, right in zip(ours, naive, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)  # float64
    assert ours[0][::2].abs().max() == 0


def test_no_gradient_at_all_leaves_zeros():
    given = inputs()
    for gradient in gradients(chunked_logprobs(**given), given, torch.zeros(N)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_no_target_gives_no_logprobs_and_zero_gradients():
    given = inputs(num_targets=0)
    logprobs_N = chunked_logprobs(**given)
    assert logprobs_N.shape == (0,)
    for gradient in gradients(logprobs_N, given, torch.zeros(0)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_bfloat16_inputs_are_computed_in_float32():
    given = inputs(torch.bfloat16)
    logprobs_N = chunked_logprobs(**given)
    assert logprobs_N.dtype == torch.float32
    # The inputs are the same numbers, so only the float32 computation differs: logits of order 5 at 2^-24.
    torch.testing.assert_close(logprobs_N.double(), naive_logprobs(**given), rtol=0, atol=5e-6)


def test_gradients_of_bfloat16_are_accumulated_in_float32():
    num_targets = 512
    given = inputs(torch.bfloat16, num_targets=num_targets)
    wide = {name: x.detach().double().requires_grad_() if x.requires_grad else x for name, x in given.items()}
    grad_N = torch.ones(num_targets, dtype=torch.float64)
    ours = gradients(chunked_logprobs(**given, chunk_size=1), given, grad_N)
    expected = gradients(naive_logprobs(**wide), wide, grad_N)
    for left, right in zip(ours, expected, strict=True):
        assert left.dtype == torch.bfloat16
        # One rounding to bfloat16 is 2^-9 relative; adding 512 chunks in bfloat16 would be off by more than 1.
        torch.testing.assert_close(left.double(), right, rtol=2**-8, atol=1e-4)


def test_autocast_lowers_the_precision_neither_forward_nor_backward():
    given = inputs(torch.float32)
    wide = {name: x.detach().double().requires_grad_() if x.requires_grad else x for name, x in given.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs_N = chunked_logprobs(**given)
        ours = gradients(logprobs_N, given, torch.ones(N))
    expected_N = naive_logprobs(**wide)
    # float32: values of order 5 at 2^-24, sums of 17; in bfloat16 they would be off by 1e-2.
    torch.testing.assert_close(logprobs_N.double(), expected_N, rtol=0, atol=5e-6)
    for left, right in zip(ours, gradients(expected_N, wide, torch.ones(N)), strict=True):
        torch.testing.assert_close(left.double(), right, rtol=0, atol=2e-5)


def test_logprobs_are_never_above_zero():
    hidden_NH = 100 * torch.eye(4)
    logprobs_N = chunked_logprobs(hidden_NH, torch.eye(4), torch.arange(4), torch.ones(4))
    assert logprobs_N.tolist() == [0.0] * 4


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation has returned in one tensor."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.num_elements = max(self.num_elements, result.numel())
        return result


def test_no_tensor_holds_the_logits_of_all_targets():
    num_targets, hidden_size, vocab_size, chunk_size = 64, 4, 256, 8
    hidden_NH = torch.randn(num_targets, hidden_size, requires_grad=True)
    weight_VH = torch.randn(vocab_size, hidden_size, requires_grad=True)
    targets_N = torch.zeros(num_targets, dtype=torch.int64)
    with LargestTensor() as largest:
        chunked_logprobs(
            hidden_NH, weight_VH, targets_N, torch.ones(num_targets), chunk_size=chunk_size
        ).sum().backward()
    assert largest.num_elements == chunk_size * vocab_size

"""Gradients of gradients: each autograd function of the library gives those of plain torch, or refuses."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from inflight.errors import UnsupportedError
from inflight.losses import KeptTokens, chunked_logprobs, chunked_logprobs_and_entropy, one_pass
from inflight.model.attention import SegmentPlan, _to_packed, _to_padded
from inflight.model.head_exchange import _exchange_parts
from inflight_fsdp.pipeline import _FromLast, _Receive, _Send
from inflight_fsdp.rows import sum_over_group

BETWEEN_STAGES = (_Send, _Receive, _FromLast)
SOURCES = Path(__file__).parents[2] / "src"
TARGETS_N = torch.tensor([0, 1, 2, 3])
ONES_N = torch.ones(4, dtype=torch.float64)
KEPT = KeptTokens(torch.arange(5).repeat(4), torch.arange(0, 21, 5))
LENGTHS = (1, 40, 3, 90)
"""Of segments that fall into more than one class of padding."""


def of_segments(x_TAD: torch.Tensor) -> torch.Tensor:
    plan = SegmentPlan.build(LENGTHS)
    assert plan.index is not None
    assert len(plan.classes) > 1
    return _to_packed([padded.sin() for padded in _to_padded(x_TAD, plan)], plan)


def naive(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    return (hidden_NH @ weight_VH.t()).log_softmax(1)


def naive_logprobs(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    return naive(hidden_NH, weight_VH).gather(1, TARGETS_N[:, None]).squeeze(1)


def naive_entropy(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    logprobs_NV = naive(hidden_NH, weight_VH)
    return -(logprobs_NV.exp() * logprobs_NV).sum(1)


Function = Callable[..., torch.Tensor]

HEADS: dict[str, tuple[Function, Function]] = {
    "logprobs": (lambda h, w: chunked_logprobs(h, w, TARGETS_N, ONES_N), naive_logprobs),
    "logprobs of kept tokens": (lambda h, w: chunked_logprobs(h, w, TARGETS_N, ONES_N, kept=KEPT), naive_logprobs),
    "logprobs with a bias": (
        lambda h, w: chunked_logprobs(h.detach(), w.detach(), TARGETS_N, ONES_N, bias_V=w[:, 0] + 0 * h.sum()),
        lambda h, w: (
            (h.detach() @ w.detach().t() + w[:, 0] + 0 * h.sum())
            .log_softmax(1)
            .gather(1, TARGETS_N[:, None])
            .squeeze(1)
        ),
    ),
    "entropy": (lambda h, w: chunked_logprobs_and_entropy(h, w, TARGETS_N, ONES_N)[1], naive_entropy),
    "one pass": (
        lambda h, w: one_pass(h, w, TARGETS_N, ONES_N, lambda logprobs_C, _: logprobs_C.sum(), chunk_size=2),
        naive_logprobs,
    ),
}
"""Function of hidden states and weight, and the same in plain torch."""

REDUCTIONS: dict[str, Function] = {"sum": torch.Tensor.sum, "square": lambda x: x.sum().square()}
"""After a sum the upstream gradient is a constant, after a square it depends on the inputs."""


def penalty(function: Function, reduce: Function, leaves: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The squares of the first gradients: what a gradient penalty differentiates once more."""
    first = torch.autograd.grad(reduce(function(*leaves)), leaves, create_graph=True)
    return torch.stack([gradient.square().sum() for gradient in first]).sum()


def of_leaves() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in ((4, 3), (5, 3))
    )


@pytest.mark.parametrize("way", ["grad", "backward"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", HEADS)
def test_a_second_derivative_of_the_head_is_refused_and_never_wrong(name: str, reduction: str, way: str) -> None:
    ours, plain = HEADS[name]
    leaves = of_leaves()
    # There is something to be had: in plain torch it is not 0.
    plain_penalty = penalty(plain, REDUCTIONS[reduction], leaves)
    assert torch.autograd.grad(plain_penalty, leaves)[1].abs().max() > 1e-3
    of_first = penalty(ours, REDUCTIONS[reduction], leaves)
    torch.testing.assert_close(of_first, plain_penalty, rtol=1e-12, atol=0)  # float64
    with pytest.raises(UnsupportedError, match=r"no second derivative"):
        of_first.backward() if way == "backward" else torch.autograd.grad(of_first, leaves)


@pytest.mark.parametrize("name", HEADS)
def test_a_graph_of_the_head_s_gradients_that_nobody_differentiates_changes_nothing(name: str) -> None:
    leaves = of_leaves()
    value = HEADS[name][0](*leaves).sum()
    first = torch.autograd.grad(value, leaves, create_graph=True)
    again = torch.autograd.grad(HEADS[name][0](*leaves).sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_second_backward_of_one_pass_gives_the_same_gradients_or_an_error() -> None:
    leaves = of_leaves()
    loss = HEADS["one pass"][0](*leaves)
    first = [gradient.clone() for gradient in torch.autograd.grad(loss, leaves, retain_graph=True)]
    again = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    # The finished gradients are scaled in place.
    torch.autograd.grad(0.5 * loss, leaves, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(0.5 * loss, leaves)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_second_derivatives_through_padded_segments_are_those_of_plain_torch(reduction: str) -> None:
    x_TAD = torch.linspace(-1, 2, sum(LENGTHS) * 6, dtype=torch.float64).view(-1, 2, 3).requires_grad_()
    results = [
        torch.autograd.grad(penalty(function, REDUCTIONS[reduction], (x_TAD,)), x_TAD)[0]
        for function in (of_segments, torch.sin)
    ]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)  # float64
    assert results[0].abs().max() > 0.1


@pytest.fixture
def one_rank() -> Iterator[torch.distributed.ProcessGroup]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    group = torch.distributed.group.WORLD
    assert group is not None
    yield group
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("function", [sum_over_group, _exchange_parts], ids=["sum_over_group", "exchanged"])
def test_second_derivatives_through_what_ranks_share_are_those_of_plain_torch(
    function: Callable[[torch.Tensor, torch.distributed.ProcessGroup], torch.Tensor],
    reduction: str,
    one_rank: torch.distributed.ProcessGroup,
) -> None:
    x_1N = torch.linspace(-1, 2, 5, dtype=torch.float64)[None].requires_grad_()
    results = [
        torch.autograd.grad(penalty(it, REDUCTIONS[reduction], (x_1N,)), x_1N)[0]
        for it in (lambda x: function(x.sin(), one_rank), torch.sin)
    ]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)  # float64
    assert results[0].abs().max() > 0.1


@pytest.mark.parametrize("function", BETWEEN_STAGES, ids=lambda it: it.__name__)
def test_gradients_that_pass_between_stages_refuse_a_graph(function: type[torch.autograd.Function]) -> None:
    with torch.enable_grad(), pytest.raises(UnsupportedError, match="no second derivative"):
        function.backward(None, torch.zeros(()))


def test_every_autograd_function_of_the_library_is_among_these() -> None:
    found = {
        node.name
        for path in SOURCES.rglob("*.py")
        if "autograd.Function" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and any("autograd.Function" in ast.unparse(base) for base in node.bases)
    }
    between_stages = {function.__name__ for function in BETWEEN_STAGES}
    own = {"_Head", "_OnePass", "_Refused", "_ToPadded", "_ToPacked", "_SummedForAll", "_Exchange"}
    assert found == own | between_stages

"""The device on paper itself: it finds what it is for, and computes what the host does."""

from __future__ import annotations

import pytest
import torch

from inflight.errors import InvalidRequestError
from inflight.losses import chunked_logprobs
from inflight.model.attention import SegmentPlan, segment_attention
from tests.devices.gpu_on_paper import CUDA, assert_values, on_cuda, paper_gpu

MIXED = "device"


def test_an_operation_on_tensors_of_both_devices_is_refused():
    with paper_gpu(), pytest.raises(RuntimeError, match=MIXED):
        on_cuda(torch.ones(2, 3)) @ torch.ones(3, 2)


def test_a_factory_that_forgets_the_device_is_found():
    with paper_gpu(), pytest.raises(RuntimeError, match=MIXED):
        torch.cat([on_cuda(torch.ones(3)), torch.zeros(3)])


def test_a_plan_of_segments_on_the_wrong_device_is_found():
    query = torch.randn(1, 2, 12, 8)
    with paper_gpu(), pytest.raises(RuntimeError, match=MIXED):
        segment_attention(*(on_cuda(query),) * 3, SegmentPlan.build((9, 3), "cpu"))


def test_a_mix_that_our_own_checks_see_is_refused_by_them():
    with paper_gpu():
        hidden_NH, weight_VH, ones_N = (on_cuda(torch.ones(shape)) for shape in ((2, 3), (5, 3), (2,)))
        with pytest.raises(InvalidRequestError, match=r"targets is on cpu, hidden on cuda:0"):
            chunked_logprobs(hidden_NH, weight_VH, torch.tensor([1, 2]), ones_N)


def test_values_decide_branches_and_shapes_and_each_wait_for_the_device_is_counted():
    given = torch.tensor([3.0, -1.0, 2.0, -5.0])
    with paper_gpu() as gpu:
        tensor = on_cuda(given)
        assert tensor.device == CUDA
        assert gpu.uploads == 1
        chosen = tensor[tensor > 0]
        assert len(chosen) == 2
        if chosen.sum() > 4:
            chosen = chosen * 2
        assert chosen.tolist() == [6.0, 4.0]
        assert chosen.cpu().device.type == "cpu"
        assert gpu.waits["index.Tensor"] == 1
        assert gpu.waits["_to_copy"] == 1
        assert gpu.waits["_local_scalar_dense"] >= 2
        assert_values(tensor, given)


def test_gradients_flow_back_through_views_and_writes_in_place():
    given = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def computed(leaf: torch.Tensor) -> torch.Tensor:
        scaled = leaf * 2
        scaled[1:3].mul_(3)
        return scaled.t().softmax(0).square().sum()

    (expected,) = torch.autograd.grad(computed(given), given)
    with paper_gpu():
        leaf = on_cuda(given)
        (gradient,) = torch.autograd.grad(computed(leaf), leaf)
        assert_values(gradient, expected)

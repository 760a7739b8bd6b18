"""Attention over packed segments with everything on a GPU on paper."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from inflight.model.attention import (
    SegmentPlan,
    describe_kernel,
    describe_segment_kernel,
    heads_of,
    repeats_heads,
    segment_attention,
)
from tests.devices.gpu_on_paper import CUDA, assert_values, on_cuda, paper_gpu
from tests.worker.test_attention import random_qkv


@pytest.mark.parametrize("lengths", [(7, 7, 7), (40, 3, 17, 1, 64, 33)], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_attention_and_its_gradients_are_those_of_the_cpu(lengths, heads, kv_heads, dtype):
    qkv = random_qkv(sum(lengths), heads, kv_heads, dtype)
    expected = segment_attention(*qkv, SegmentPlan.build(lengths), 0.3)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, qkv, upstream)
    # Sums of up to 64 terms, in another order.
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-1}[dtype]
    with paper_gpu() as gpu:
        there, upstream_there = [on_cuda(x) for x in qkv], on_cuda(upstream)
        plan = SegmentPlan.build(lengths, CUDA)
        gpu.waits.clear()
        output = segment_attention(*there, plan, 0.3)
        found = torch.autograd.grad(output, there, upstream_there)
        assert gpu.waits == {}
        for left, right in zip((output, *found), (expected, *wanted), strict=True):
            assert_values(left, right, atol=tolerance)


@pytest.mark.parametrize(
    ("device", "dtype", "grouped", "repeats"),
    [
        ("cuda", torch.float32, True, True),
        ("cuda", torch.float64, True, True),
        ("cuda", torch.bfloat16, True, False),
        ("cuda", torch.float16, True, False),
        ("cuda", torch.float32, False, False),
        ("cpu", torch.float32, True, False),
        ("cpu", torch.bfloat16, True, False),
    ],
)
def test_heads_are_repeated_only_where_no_kernel_for_the_dtype_takes_groups(device, dtype, grouped, repeats):
    assert repeats_heads(device, dtype, grouped=grouped) is repeats


class NotesAttention(TorchFunctionMode):
    """Notes the key-value heads that torch's attention is given, and whether as groups."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.seen.append((args[1].shape[1], args[2].shape[1], kwargs["enable_gqa"]))
        return func(*args, **(kwargs or {}))


def test_torch_is_given_repeated_heads_in_float32_and_groups_in_bfloat16():
    with paper_gpu(), NotesAttention() as notes:
        for dtype in (torch.float32, torch.bfloat16):
            qkv = [on_cuda(x) for x in random_qkv(12, 4, 2, dtype)]
            segment_attention(*qkv, SegmentPlan.build((12,), CUDA))
    assert notes.seen == [(4, 4, False), (2, 2, True)]


def test_the_kernel_is_said_in_words_as_torch_chooses_it():
    query, key = torch.empty(1, 4, 64, 16), torch.empty(1, 2, 64, 16)
    for mask in (None, torch.ones(64, 64, dtype=torch.bool)):
        with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):
            assert "math kernel" in describe_kernel(query, key, key, mask, is_causal=False)
    assert describe_kernel(query, query, query, is_causal=True) == "torch's flash kernel"


class Config:
    num_attention_heads, num_key_value_heads, head_dim = 28, 4, 16


class Nested:
    text_config = Config()


class Plain:
    num_attention_heads, hidden_size = 8, 256


def test_heads_are_read_from_every_form_of_configuration():
    assert heads_of(Config()) == heads_of(Nested()) == (28, 4, 16)
    assert heads_of(Plain()) == (8, 8, 32)


def test_the_trainer_s_words_say_whether_heads_are_repeated():
    assert "repeated" not in describe_segment_kernel(Config(), torch.float32, torch.device("cpu"))

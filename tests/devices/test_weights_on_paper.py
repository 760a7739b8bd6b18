"""Packing and encoding weights that lie on a GPU on paper."""

from __future__ import annotations

import pytest
import torch

from inflight.errors import NonFiniteError
from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import Packer, decode, encode, encoded_size, unpack
from inflight.weights.encode.buckets import plan_buckets
from inflight.weights.send.module import ModuleWeights
from inflight.wire import TensorSpec
from tests.devices.gpu_on_paper import CUDA, assert_values, move_parameters, on_cuda, paper_gpu

SPECS = [
    TensorSpec(name="matrix", dtype="float32", shape=(3, 130)),
    TensorSpec(name="half", dtype="bfloat16", shape=(5, 7)),
    TensorSpec(name="vector", dtype="float32", shape=(9,)),
    TensorSpec(name="nothing", dtype="float32", shape=(0, 4)),
]


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype)) for spec in SPECS]


@pytest.mark.parametrize("rounding", ["raw", "bfloat16", "float8"])
def test_a_bucket_is_encoded_and_decoded_on_the_device_to_the_bytes_of_the_cpu(rounding):
    expected = encode(tensors(), SPECS, rounding)
    wanted = decode(rounding, expected, SPECS)
    with paper_gpu():
        payload = encode([on_cuda(tensor) for tensor in tensors()], SPECS, rounding)
        assert payload.numel() == encoded_size(SPECS, rounding)
        assert_values(payload, expected)
        flat = decode(rounding, payload, SPECS)
        assert_values(flat, wanted)
        for found, spec in zip(unpack(flat, SPECS), SPECS, strict=True):
            assert found.device == CUDA
            assert found.shape == spec.shape


def test_a_bucket_of_no_bytes_stays_on_the_device():
    with paper_gpu():
        assert encode([on_cuda(torch.empty(0, 4))], SPECS[3:], "float8").device == CUDA


def test_float8_refuses_what_is_not_finite_by_its_value_on_the_device():
    broken = tensors()
    broken[0][1, 2] = torch.nan
    with paper_gpu():
        there = [on_cuda(tensor) for tensor in broken]
        with pytest.raises(NonFiniteError, match="matrix"):
            encode(there, SPECS, "float8")


def test_float8_waits_for_the_device_once_for_each_matrix():
    with paper_gpu() as gpu:
        there = [on_cuda(tensor) for tensor in tensors()]
        gpu.waits.clear()
        encode(there, SPECS, "float8")
        assert sum(gpu.waits.values()) == 2, gpu.waits


def test_buckets_are_packed_in_memory_of_the_device():
    with paper_gpu():
        packer = Packer()
        for _ in range(3):
            packed = packer.pack_bucket(WeightBucket(0, tuple(SPECS), tuple(on_cuda(tensor) for tensor in tensors())))
            for found, given in zip(packed.tensors, tensors(), strict=True):
                assert_values(found, given)


def test_weights_of_a_module_are_cast_on_the_device():
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2, bias=False))
    with torch.no_grad():
        wanted = [parameter.detach().clone().to(torch.bfloat16) for parameter in module.parameters()]
    with paper_gpu():
        source = ModuleWeights(move_parameters(module), wire_dtype="bfloat16")
        buckets = plan_buckets(source.parameter_specs(), 30)
        found = [tensor for bucket in source.gather_weights(buckets) for tensor in map(torch.clone, bucket.tensors)]
        assert [tensor.device for tensor in found] == [CUDA] * len(wanted)
        for left, right in zip(found, wanted, strict=True):
            assert_values(left, right)

"""Weights of plain modules: checkpoint names, tied once, cast, in buffers that stay valid as long as they must."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from inflight import ModuleWeights, TrainerWorker, WeightSource, gather_only
from inflight.contracts import PartialWeightSource
from inflight.errors import ConfigError, UnsupportedError
from inflight.weights.encode.bucket_bytes import Packer
from inflight.weights.encode.buckets import plan_buckets
from tests.models import FAMILIES, make_model


def load(path: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(path)
    return model


def gathered(weights: ModuleWeights, bucket_bytes: int = 20_000) -> dict[str, torch.Tensor]:
    buckets = plan_buckets(weights.parameter_specs(), bucket_bytes)
    assert len(buckets) > 2
    return {
        spec.name: tensor.clone()
        for bucket in weights.gather_weights(buckets)
        for spec, tensor in zip(bucket.specs, bucket.tensors, strict=True)
    }


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gathered_weights_are_those_that_save_pretrained_writes(family: str, tied: bool, tmp_path: Path) -> None:
    model = load(make_model(tmp_path / "model", family, tied=tied))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.125)
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert ("lm_head.weight" in saved) is not tied
    assert_equal(gathered(ModuleWeights(model)), saved)


def test_weights_are_cast_on_the_way_and_stay_as_they_are_in_the_module(model_dir: Path) -> None:
    model = load(model_dir)
    weights = ModuleWeights(model, wire_dtype="bfloat16")
    assert {spec.dtype for spec in weights.parameter_specs()} == {"bfloat16"}
    assert_equal(gathered(weights), {name: p.detach().bfloat16() for name, p in model.named_parameters()})
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_specs_follow_the_module_where_dtypes_are_mixed() -> None:
    module = nn.Sequential(nn.Linear(3, 1, bias=False, dtype=torch.bfloat16), nn.Linear(1, 5, dtype=torch.float32))
    weights = ModuleWeights(module)
    specs = weights.parameter_specs()
    assert [(spec.name, spec.dtype, spec.shape) for spec in specs] == [
        ("0.weight", "bfloat16", (1, 3)),
        ("1.weight", "float32", (5, 1)),
        ("1.bias", "float32", (5,)),
    ]
    (bucket,) = weights.gather_weights(plan_buckets(specs))
    assert all(torch.equal(a, b) for a, b in zip(bucket.tensors, module.parameters(), strict=True))


def test_tied_weights_of_a_plain_module_travel_once_and_persistent_buffers_with_them() -> None:
    module = nn.ModuleDict({"first": nn.Linear(2, 2, bias=False), "second": nn.Linear(2, 2, bias=False)})
    module["second"].weight = module["first"].weight
    module.register_buffer("kept", torch.ones(3))
    module.register_buffer("derived", torch.ones(3), persistent=False)
    names = [spec.name for spec in ModuleWeights(module).parameter_specs()]
    assert sorted(names) == ["first.weight", "kept"]


def test_a_tensor_that_was_cast_stays_valid_until_the_bucket_after_the_next_one_is_asked_for() -> None:
    module = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(5)))
    weights = ModuleWeights(module, wire_dtype="float64")
    iterator = weights.gather_weights(plan_buckets(weights.parameter_specs(), 128))
    before = [layer.weight.detach().double() for layer in module]
    held = next(iterator)
    for index in range(1, 5):
        bucket = next(iterator)
        assert torch.equal(held.tensors[0], before[index - 1])
        held = bucket
    assert next(iterator, None) is None


def test_gathering_needs_two_buckets_of_memory_where_weights_are_cast_and_none_where_not() -> None:
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    for wire_dtype, wanted in (("float64", {2 * 64 * 64 * 8}), (None, {64 * 64 * 4})):
        weights = ModuleWeights(module, wire_dtype=wire_dtype)
        tensors = [
            tensor
            for bucket in weights.gather_weights(plan_buckets(weights.parameter_specs(), max(wanted)))
            for tensor in bucket.tensors
        ]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        own = {parameter.data_ptr() for parameter in module.parameters()}
        assert set(storages.values()) == wanted
        assert set(storages) == own if wire_dtype is None else (len(storages) == 2 and not own & set(storages))
        assert not any(tensor.requires_grad for tensor in tensors)


def test_a_bucket_is_not_copied_again_before_it_is_sent() -> None:
    weights = ModuleWeights(nn.Linear(4, 4), wire_dtype="bfloat16")
    (bucket,) = weights.gather_weights(plan_buckets(weights.parameter_specs()))
    assert Packer().pack_bucket(bucket) is bucket


def test_weights_that_change_between_publishes_are_the_present_ones() -> None:
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    weights = ModuleWeights(module, version=3)
    gathered(weights)
    module.to(torch.float64)
    weights.version += 1
    assert weights.version == 4
    assert_equal(gathered(weights), {name: p.detach() for name, p in module.named_parameters()})


class Wrapped(nn.Module):
    """What torch.compile returns, without compiling."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile imports what torch has deprecated
def test_wrappers_leave_no_trace_in_the_names(model_dir: Path) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = load(model_dir)
        expected = ModuleWeights(model).parameter_specs()
        parallel = nn.parallel.DistributedDataParallel(model)
        for wrapper in (parallel, Wrapped(parallel), nn.parallel.DistributedDataParallel(Wrapped(model))):
            assert ModuleWeights(wrapper).parameter_specs() == expected
        assert ModuleWeights(torch.compile(model)).parameter_specs() == expected
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_that_accelerate_prepared_has_its_own_names(model_dir: Path) -> None:
    from accelerate import Accelerator

    model = load(model_dir)
    expected = ModuleWeights(model).parameter_specs()
    assert ModuleWeights(Accelerator(cpu=True).prepare(model)).parameter_specs() == expected


def test_ranks_other_than_zero_hold_no_tensors() -> None:
    weights = ModuleWeights(nn.Linear(2, 2), rank=1, world_size=2)
    specs = weights.parameter_specs()
    (bucket,) = weights.gather_weights(plan_buckets(specs))
    assert (bucket.specs, bucket.tensors) == (tuple(specs), ())
    gather_only(weights)


def test_it_is_a_source_of_weights_and_no_trainer() -> None:
    weights = ModuleWeights(nn.Linear(2, 2))
    assert isinstance(weights, WeightSource)
    assert not isinstance(weights, TrainerWorker)


def test_weights_that_it_cannot_send_are_refused_by_name() -> None:
    quantized = nn.Module()
    quantized.register_buffer("packed", torch.zeros(2, dtype=torch.uint8))
    with pytest.raises(UnsupportedError, match="packed has dtype uint8"):
        ModuleWeights(quantized).parameter_specs()
    adapted = nn.Sequential(nn.Linear(2, 2))
    adapted[0].lora_A = nn.Linear(2, 1, bias=False)
    with pytest.raises(UnsupportedError, match=r"has a LoRA \(0\.lora_A\.weight\).*publish it with LoraWeights"):
        ModuleWeights(adapted).parameter_specs()
    with pytest.raises(ConfigError, match=r"needs a torch\.nn\.Module, not dict"):
        ModuleWeights({})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"wire_dtype must be one of .* not 'int8'"):
        ModuleWeights(nn.Linear(2, 2), wire_dtype="int8")


def test_sharded_weights_are_refused_by_name() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        module = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(UnsupportedError, match="weight is sharded"):
            ModuleWeights(module).parameter_specs()
    finally:
        torch.distributed.destroy_process_group()


def test_skipped_are_what_takes_no_gradients_and_never_what_was_sent_before(model_dir: Path) -> None:
    model = load(model_dir)
    everything = ModuleWeights(model)
    names = [spec.name for spec in everything.parameter_specs()]
    assert list(everything.frozen_names()) == []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    model.register_buffer("steps", torch.ones(3))
    weights = ModuleWeights(model, skip_frozen=True)
    assert isinstance(weights, PartialWeightSource)
    trained = [name for name in names if "layers.1" in name]
    assert [spec.name for spec in weights.parameter_specs()] == trained
    assert sorted(weights.frozen_names()) == sorted([*(name for name in names if "layers.1" not in name), "steps"])
    assert_equal(gathered(weights), {n: p.detach() for n, p in model.named_parameters() if n in trained})
    model.requires_grad_(False)
    assert [spec.name for spec in weights.parameter_specs()] == trained
    with pytest.raises(ConfigError, match="every parameter is frozen"):
        ModuleWeights(model, skip_frozen=True).parameter_specs()

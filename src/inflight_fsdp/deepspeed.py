"""`DeepSpeedWorker`: one rank of a trainer whose transformers models are sharded by DeepSpeed's ZeRO.

DeepSpeed shards weights and gradients, and calls the worker's optimizer once the gradients of a step are complete.
Norms, clipping, AdamW and checkpoints are those of the other workers, applied to ranges of flattened parameters.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from torch import nn

from inflight.errors import ConfigError
from inflight.model.checkpoints import stored_tensors
from inflight.types import AdamSettings, StepResult
from inflight_fsdp.agreement import on_every_rank
from inflight_fsdp.config import WorkerConfig, parse_config
from inflight_fsdp.layout import ShardedTensor
from inflight_fsdp.model import empty_policy, layouts_of, place_buffers
from inflight_fsdp.optimizer import make_adamw
from inflight_fsdp.sharded import ShardedWorker, make_worker
from inflight_fsdp.sharding import read_shards, shardings_of


class DeepSpeedConfig(WorkerConfig):
    """Settings of a DeepSpeed worker; they are the same on every rank."""

    LABEL: ClassVar[str] = "DeepSpeed"

    zero_stage: Literal[1, 2, 3] = 3
    """What is sharded across ranks: every stage shards the float32 weights and the moments, stages 2 and 3 also shard
    the gradients, and stage 3 also shards the weights that layers compute with."""
    zero_options: dict[str, Any] = Field(default_factory=dict)
    """Additional keys for DeepSpeed's ``zero_optimization``, such as ``stage3_param_persistence_threshold``."""

    @model_validator(mode="after")
    def _is_supported(self) -> DeepSpeedConfig:
        if self.dtype == "float64" or self.master_dtype == "bfloat16":
            raise ValueError("the DeepSpeed worker computes in float32 or bfloat16, and keeps its weights in float32")
        for name in ("float8", "compile", "frozen", "shard_size", "lora"):
            if getattr(self, name):
                raise ValueError(f"{name} is not a setting of the DeepSpeed worker; omit it")
        return self

    def engine_settings(self, num_parameters: int, device: str) -> dict[str, Any]:
        """Return the configuration of DeepSpeed's engine.

        It leaves the accumulation of gradients, clipping and AdamW to the worker.
        """
        zero = {"reduce_bucket_size": min(num_parameters, 500_000_000), **self.zero_options, "stage": self.zero_stage}
        zero |= {"sub_group_size": num_parameters, "memory_efficient_linear": False}
        if self.cpu_offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device != "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "managed_gradient_accumulation": False,
            "gradient_allreduce_op": "mean" if self.zero_stage == 3 else "sum",  # stage 3 supports only averages
            "gradient_clipping": 0.0,
            "communication_data_type": "bf16" if self.reduce_dtype == "bfloat16" else "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
            "bf16": {"enabled": self.dtype == "bfloat16"},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero,
        }


def create_worker(config: DeepSpeedConfig | Mapping[str, object]) -> DeepSpeedWorker:
    """Return the worker of this process's rank, like `inflight_fsdp.create_worker`."""
    return make_worker(DeepSpeedWorker, parse_config(config, DeepSpeedConfig))


class DeepSpeedWorker(ShardedWorker):
    """One trainer rank, made by `create_worker`; `inflight.contracts.TrainerWorker` states what each method does."""

    def __init__(self, config: DeepSpeedConfig, device: torch.device, *, owns_group: bool) -> None:
        deepspeed = on_every_rank(lambda: _import_deepspeed(device), device)
        policy = on_every_rank(lambda: empty_policy(config, device), device)
        stored = stored_tensors(config.model_path)
        layouts = layouts_of(policy.causal_lm, stored)
        parameters = dict(policy.causal_lm.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        settings = config.engine_settings(sum(map(torch.Tensor.numel, parameters.values())), device.type)
        place_buffers(policy, dict(policy.named_buffers()), device)
        for parameter in parameters.values():
            made = torch.zeros_like(parameter, dtype=getattr(torch, config.dtype), device=device)
            torch.utils.swap_tensors(parameter, nn.Parameter(made))  # type: ignore[no-untyped-call]
            if config.zero_stage == 3:  # no rank ever holds the whole model
                deepspeed.zero.Init(nn.ParameterList([parameter]), config_dict_or_path=settings)
        self._boundary = _Boundary(parameters.values(), dist.get_world_size() if config.zero_stage == 3 else 1)
        self._engine: Any = deepspeed.initialize(model=policy, optimizer=self._boundary, config=settings)[0]
        found = {name: _range_of(parameter, self._engine.optimizer) for name, parameter in parameters.items()}
        ranges = {name: it for name, it in found.items() if it is not None}
        parts = {name: part for name, (_, part) in ranges.items()}
        shardings = shardings_of({name: (box,) for name, (box, _) in ranges.items()}, shapes, device, is_flat=True)
        laid_out = [ShardedTensor(part.local, shardings[name], layouts[name]) for name, part in parts.items()]
        on_every_rank(lambda: read_shards(stored, laid_out), device)
        super().__init__(
            config,
            device,
            owns_group=owns_group,
            policy=self._engine,
            parts=parts,
            shardings=shardings,
            layouts=layouts,
            optimizer=on_every_rank(lambda: make_adamw(parts, config), device),
            hf_config=policy.causal_lm.config,
        )
        self._compute_with_masters()

    def backward(self, loss: torch.Tensor) -> None:
        self._has_gradients = True
        # A forward pass does this too. In stage 3, a second backward pass would otherwise replace earlier gradients.
        self._engine.optimizer.clear_backward_seen_flag()
        self._engine.backward(loss)

    def _update(self, settings: AdamSettings | None) -> StepResult:
        """Take one step through DeepSpeed, which calls the optimizer only if all gradients are finite."""
        self._has_gradients = False
        self._boundary.update = partial(super()._update, settings)
        self._engine.step()
        outcome = self._boundary.take_result()
        if isinstance(outcome, StepResult):
            return outcome
        if outcome is None:
            self._compute_with_masters()  # DeepSpeed has omitted its last collectives
        raise outcome or self._non_finite_error(float("inf"))

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        super().load(path, optimizer=optimizer)
        self._compute_with_masters()

    def _clear_gradients(self) -> None:
        """Make DeepSpeed discard its gradients in a step that changes nothing."""
        if self._has_gradients:
            self._engine.step()
        self._has_gradients = False

    @torch.no_grad()
    def _compute_with_masters(self) -> None:
        """Copy the float32 weights to the weights that layers compute with, as at the end of a step; collective."""
        zero = self._engine.optimizer
        if not hasattr(zero, "fp32_partitioned_groups_flat"):
            zero.update_lp_params()
            return
        zero._partition_all_parameters()
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


class _Boundary(torch.optim.Optimizer):
    """The optimizer that DeepSpeed calls: `step` runs once each rank has its reduced float32 gradients.

    DeepSpeed must finish its own step, so an error is kept until `take_result`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], averaged_over: int) -> None:
        super().__init__(parameters, {"lr": 0.0, "betas": (0.0, 0.0)})
        self._averaged_over = averaged_over
        self.update: Callable[[], StepResult] | None = None
        self._outcome: StepResult | Exception | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.update is None:
            return
        for flat in (flat for group in self.param_groups for flat in group["params"]):
            flat.grad.mul_(self._averaged_over)
        try:
            self._outcome = self.update()
        except Exception as error:
            self._outcome = error

    def take_result(self) -> StepResult | Exception | None:
        """Return and clear the outcome of the update, which is None if DeepSpeed did not call `step`."""
        outcome, self._outcome, self.update = self._outcome, None, None
        return outcome


@dataclass(frozen=True, slots=True)
class _ZeroPart:
    """A range of a flat tensor of DeepSpeed's float32 weights; its gradients exist only during `_Boundary.step`."""

    flat: torch.Tensor
    within: slice
    is_trained: bool = True

    @property
    def local(self) -> torch.Tensor:
        return self.flat.detach()[self.within]

    @property
    def gradient(self) -> torch.Tensor:
        assert self.flat.grad is not None
        return self.flat.grad[self.within]

    def clear_gradient(self) -> None:
        """Do nothing, because DeepSpeed clears the gradient."""


def _range_of(parameter: Any, zero: Any) -> tuple[slice, _ZeroPart] | None:
    """Return the range of a flattened parameter whose float32 weights are on this rank, or None if there is none."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):  # stage 3
        group, start, each = zero.grad_position[zero.get_param_id(parameter)]
        first = min(dist.get_rank() * each, parameter.ds_numel)
        size = min(each, parameter.ds_numel - first)
        flat = zero.fp32_partitioned_groups_flat[group]
    elif (mapping := parameter._hp_mapping) is not None:
        first, size = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
        start = mapping.hp_fragment_address.start
        (flat,) = zero.optimizer.param_groups[0]["params"]
    else:
        return None
    return (slice(first, first + size), _ZeroPart(flat, slice(start, start + size))) if size else None


def _import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed and prepare it for the ranks of torch's default group. Raises `ConfigError` if it is missing."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        import deepspeed
        from deepspeed.accelerator import get_accelerator
        from deepspeed.utils import groups
    except ImportError as error:
        raise ConfigError(f"the DeepSpeed worker needs deepspeed ({error}): see docs/trainers.md") from error
    os.environ.setdefault("LOCAL_RANK", "0")  # in a group of one
    if (kind := get_accelerator().device_name()) != device.type:
        raise ConfigError(f"DeepSpeed was imported for {kind}: set DS_ACCELERATOR={device.type} for this device")
    # On a CPU it starts by compiling an all-reduce for inference, which training does not use. A killed build leaves
    # its lock in place, and every later start waits for it forever.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    warnings.filterwarnings("ignore", message=".torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor). is")
    if groups._WORLD_GROUP not in dist.distributed_c10d._world.pg_map:  # of a default group that has ended
        groups._release_process_group_references()
    return deepspeed

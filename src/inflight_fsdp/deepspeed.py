"""`DeepSpeedWorker`: one rank of a trainer on transformers' models that DeepSpeed's ZeRO shards.

DeepSpeed cuts weights and gradients, and calls an optimizer of ours where the gradients of a step are complete. The
rest, such as norms, clipping, AdamW and checkpoints, is that of the other workers, on ranges of flattened parameters.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from inflight.checkpoints import stored_tensors
from inflight.errors import ConfigError
from inflight.types import StepResult
from inflight_fsdp.agreement import on_every_rank
from inflight_fsdp.config import parse_config
from inflight_fsdp.deepspeed_config import DeepSpeedConfig
from inflight_fsdp.layout import ShardedTensor
from inflight_fsdp.model import PolicyModel, empty_policy, layouts_of, place_buffers
from inflight_fsdp.optimizer import make_adamw
from inflight_fsdp.sharded import ShardedWorker, make_worker
from inflight_fsdp.sharding import read_shards, shardings_of


def create_worker(config: DeepSpeedConfig | Mapping[str, object]) -> DeepSpeedWorker:
    """Return this process's rank of a worker; collective over torch's default process group.

    Without a default group a group of one is made, and `DeepSpeedWorker.close` ends it. Raises `ConfigError` or
    `UnsupportedError` on every rank if the settings or the model cannot be used.
    """
    return make_worker(DeepSpeedWorker, parse_config(config, DeepSpeedConfig))


class DeepSpeedWorker(ShardedWorker):
    """One trainer rank. Made by `create_worker`; `inflight.contracts.TrainerWorker` says what each method does."""

    def __init__(self, config: DeepSpeedConfig, device: torch.device, *, owns_group: bool) -> None:
        deepspeed = on_every_rank(lambda: _imported(device), device)
        policy = on_every_rank(lambda: empty_policy(config, device), device)
        layouts = layouts_of(policy.causal_lm, stored_tensors(config.model_path))
        shapes = {name: tuple(parameter.shape) for name, parameter in policy.causal_lm.named_parameters()}
        settings = config.engine_settings(
            sum(parameter.numel() for parameter in policy.parameters()), pin_memory=device.type != "cpu"
        )
        _allocate(policy, deepspeed, settings, config, device)
        averaged_over = dist.get_world_size() if config.zero_stage == 3 else 1
        self._boundary = _Boundary(policy.parameters(), averaged_over)
        self._engine: Any = deepspeed.initialize(model=policy, optimizer=self._boundary, config=settings)[0]
        ranges = {
            name: found
            for name, parameter in policy.causal_lm.named_parameters()
            if (found := _range_of(parameter, self._engine.optimizer)) is not None
        }
        parts = {name: part for name, (_, part) in ranges.items()}
        shardings = shardings_of({name: (box,) for name, (box, _) in ranges.items()}, shapes, device, is_flat=True)
        laid_out = [ShardedTensor(part.local, shardings[name], layouts[name]) for name, part in parts.items()]
        on_every_rank(lambda: read_shards(stored_tensors(config.model_path), laid_out), device)
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
        self._engine.backward(loss)

    def _update(self) -> StepResult:
        """Let DeepSpeed step: it does not call back if it finds a gradient that is not finite."""
        result = self._boundary.during(super()._update, self._engine.step)
        self._has_gradients = False
        if result is None:
            raise self._refused(float("inf"))
        return result

    def load(self, path: Path) -> None:
        super().load(path)
        self._compute_with_masters()

    def close(self) -> None:
        """End the engine too."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
        super().close()

    def _clear_gradients(self) -> None:
        """Let DeepSpeed drop its gradients, in a step that changes nothing."""
        if self._has_gradients and not self._boundary.is_reached:
            self._boundary.during(lambda: None, self._engine.step)
        self._has_gradients = False

    @torch.no_grad()
    def _compute_with_masters(self) -> None:
        """Copy the float32 weights to those that layers compute with; collective."""
        zero = self._engine.optimizer
        if not hasattr(zero, "fp32_partitioned_groups_flat"):
            zero.update_lp_params()
            return
        # As at the end of its step.
        zero._partition_all_parameters()
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


@dataclass(frozen=True, slots=True)
class _ZeroPart:
    """A range of one of the flat tensors that DeepSpeed keeps its float32 weights in."""

    flat: torch.Tensor
    within: slice

    is_trained = True

    @property
    def local(self) -> torch.Tensor:
        return self.flat.detach()[self.within]

    @property
    def gradient(self) -> torch.Tensor:
        """Of `_Boundary.step` only."""
        assert self.flat.grad is not None
        return self.flat.grad[self.within]

    def clear_gradient(self) -> None:
        """DeepSpeed does it."""


class _Boundary(torch.optim.Optimizer):
    """What DeepSpeed takes for the optimizer: calls back where gradients are summed, in float32 and on their ranks."""

    def __init__(self, parameters: Iterable[nn.Parameter], averaged_over: int) -> None:
        super().__init__(parameters, {"lr": 0.0, "betas": (0.0, 0.0)})
        self._averaged_over = averaged_over
        self._call: Callable[[], StepResult | None] = lambda: None
        self._result: StepResult | None = None
        self._error: Exception | None = None
        self.is_reached = False

    def during(self, call: Callable[[], StepResult | None], step: Callable[[], None]) -> StepResult | None:
        """Return what ``call`` returns at the boundary, which ``step`` leads to, or raise what it raises there.

        None if ``step`` does not come to the boundary.
        """
        self._call, self._result, self._error = call, None, None
        step()
        self._call = lambda: None
        if self._error is not None:
            raise self._error
        return self._result

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for flat in group["params"]:
                flat.grad.mul_(self._averaged_over)
        self.is_reached = True
        try:
            self._result = self._call()
        except Exception as error:  # DeepSpeed must finish its step
            self._error = error
        self.is_reached = False


def _range_of(parameter: Any, zero: Any) -> tuple[slice, _ZeroPart] | None:
    """Return the range of a flattened parameter whose float32 weights are on this rank, None if it has none."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):  # stage 3
        group, start, _ = zero.grad_position[zero.get_param_id(parameter)]
        each = parameter.partition_numel()
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


def _allocate(
    policy: PolicyModel, deepspeed: Any, settings: dict[str, Any], config: DeepSpeedConfig, device: torch.device
) -> None:
    """Give parameters memory, in stage 3 one after another, so that no rank holds the whole model."""
    place_buffers(policy, dict(policy.named_buffers()), device)
    dtype = getattr(torch, config.dtype)
    for parameter in policy.parameters():
        made = nn.Parameter(torch.zeros_like(parameter, dtype=dtype, device=device))
        torch.utils.swap_tensors(parameter, made)  # type: ignore[no-untyped-call]
        if config.zero_stage == 3:
            deepspeed.zero.Init(nn.ParameterList([parameter]), config_dict_or_path=settings)


def _imported(device: torch.device) -> ModuleType:
    """Return DeepSpeed, made ready for the ranks of torch's default group. Raises `ConfigError` if it is missing."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", "0")  # in a group of one
    try:
        import deepspeed
        from deepspeed.accelerator import get_accelerator
        from deepspeed.utils import groups
    except ImportError as error:
        raise ConfigError(f"the DeepSpeed worker needs deepspeed ({error}): see docs/trainers.md") from error
    if (kind := get_accelerator().device_name()) != device.type:
        raise ConfigError(
            f"DeepSpeed was imported for {kind}, but device is {device.type!r}: set DS_ACCELERATOR={device.type}"
        )
    # DeepSpeed compiles an all-reduce for inference when it starts on a CPU. Training has no use for it; and if such a
    # build is killed, its lock stays, and every later start waits for it forever.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # As of torch 2.13; it is DeepSpeed's to follow.
    warnings.filterwarnings("ignore", message=".torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor). is")
    # It keeps using the groups of a default group that has ended.
    if groups._WORLD_GROUP not in dist.distributed_c10d._world.pg_map:
        groups._release_process_group_references()
    module: ModuleType = deepspeed
    return module

"""AdamW over one rank's local shards, in full precision or in 8 bits; learning-rate schedules; the gradient norm.

AdamW works element by element, so it can use plain local tensors. This avoids the cost of dispatching every operation
through DTensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from inflight.errors import ConfigError
from inflight.types import AdamSettings
from inflight_fsdp.config import WorkerConfig
from inflight_fsdp.parts import ParameterPart

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SETTINGS = ("betas", "eps", "weight_decay")


class ShardedAdamW:
    """torch's AdamW over the sharded parameters, under the worker's names for them.

    All parameters have taken the same number of steps. Moments are allocated when they are first needed: a worker that
    never takes a step, such as a frozen reference model, has none.
    """

    def __init__(self, adamw: torch.optim.Optimizer, names: Iterable[str]) -> None:
        """``adamw`` updates the parameters with these names, or this rank's parts of them, in the same order."""
        self._adamw = adamw
        (self._group,) = adamw.param_groups
        self._own_settings = {name: self._group[name] for name in _SETTINGS}
        self._updated: dict[str, torch.Tensor] = dict(zip(names, self._group["params"], strict=True))

    @property
    def states(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """The moments ``exp_avg`` and ``exp_avg_sq`` of this rank's shards, each as a mapping by parameter name."""
        self._allocate()
        return {kind: {name: self._moment(kind, name) for name in self._updated} for kind in _MOMENTS}

    @property
    def num_steps(self) -> int:
        """Number of steps taken."""
        first = next(iter(self._updated.values()))
        return int(self._adamw.state[first]["step"].item()) if self._adamw.state else 0

    def set_num_steps(self, value: int) -> None:
        """Set the number of steps taken, and allocate the moments, which the caller then fills in."""
        self._allocate()
        for tensor in self._updated.values():
            self._adamw.state[tensor]["step"].fill_(value)

    def resume(self, states: Mapping[str, Mapping[str, torch.Tensor]], num_steps: int) -> None:
        """Continue after ``num_steps`` steps. Call this once the saved moments are in the tensors of `states`."""
        self.set_num_steps(num_steps)

    def reset(self) -> None:
        """Continue as if no step had been taken."""
        self._adamw.state.clear()

    def step(
        self, gradients: Sequence[torch.Tensor], learning_rate: float, settings: AdamSettings | None = None
    ) -> None:
        """Update the parameters in place; ``gradients`` are local shards, in the order of the parameters.

        ``settings`` replace the optimizer's own for this step, except for the learning rate and the maximum norm.
        """
        own = self._own_settings
        self._group.update(own if settings is None else {name: getattr(settings, name) for name in own})
        self._allocate()
        self._step(gradients, learning_rate)

    def _step(self, gradients: Sequence[torch.Tensor], learning_rate: float) -> None:
        self._group["lr"] = learning_rate
        for tensor, gradient in zip(self._updated.values(), gradients, strict=True):
            tensor.grad = as_sharded(gradient, tensor) if isinstance(tensor, DTensor) else gradient
        self._adamw.step()
        self._adamw.zero_grad()

    def _allocate(self) -> None:
        if self._adamw.state:
            return
        for tensor in self._updated.values():
            step = torch.zeros((), dtype=torch.float32, device=tensor.device if self._group["fused"] else "cpu")
            self._adamw.state[tensor] = {"step": step, **{kind: torch.zeros_like(tensor) for kind in _MOMENTS}}

    def _moment(self, kind: str, name: str) -> torch.Tensor:
        moment: torch.Tensor = self._adamw.state[self._updated[name]][kind]
        return moment.to_local() if isinstance(moment, DTensor) else moment


class ShardedAdamW8bit(ShardedAdamW):
    """torchao's AdamW with moments in 8 bits; `states` returns copies in the dtype of their parameters.

    The moments of shards with fewer than 4,096 elements, or with a size that is not a multiple of 256, stay in full
    precision.
    """

    def resume(self, states: Mapping[str, Mapping[str, torch.Tensor]], num_steps: int) -> None:
        """Continue after ``num_steps`` steps with these moments, rounded to 8 bits."""
        self.set_num_steps(num_steps)
        for kind, tensors in states.items():
            for name, tensor in tensors.items():
                self._adamw.state[self._updated[name]][kind].copy_(tensor)

    def _step(self, gradients: Sequence[torch.Tensor], learning_rate: float) -> None:
        # torchao takes seconds to compile its step for each shape of a shard, which does not pay off on a CPU.
        on_cpu = self._group["params"][0].device.type == "cpu"
        with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
            super()._step(gradients, self._group["lr"].fill_(learning_rate))

    def _allocate(self) -> None:
        if not self._adamw.state:
            self._step([torch.zeros_like(shard) for shard in self._updated.values()], 0.0)
            self.set_num_steps(0)

    def _moment(self, kind: str, name: str) -> torch.Tensor:
        shard = self._updated[name]
        moment = self._adamw.state[shard][kind]
        full: torch.Tensor = moment.clone() if type(moment) is torch.Tensor else moment.dequantize(shard.dtype)
        return full


def make_adamw(parts: Mapping[str, ParameterPart], config: WorkerConfig) -> ShardedAdamW:
    """Return the configured optimizer for the trained parts. Raises `ConfigError` if its package is missing."""
    with torch.no_grad():
        shards = {name: part.local for name, part in parts.items() if part.is_trained}
    if config.optimizer == "adamw":
        return ShardedAdamW(torch.optim.AdamW(shards.values(), fused=True, **config.adamw_settings), shards)
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(f"optimizer 'adamw8bit' needs torchao ({error}): pip install torchao") from error
    return ShardedAdamW8bit(AdamW8bit(list(shards.values()), **config.adamw_settings), shards)


def learning_rate_at(version: int, config: WorkerConfig) -> float:
    """Return the learning rate of the step that leads from ``version`` to the next version.

    The linear warm-up reaches the full rate at step ``warmup_steps``; the decay reaches zero at ``total_steps``.
    """
    if version < config.warmup_steps:
        return config.learning_rate * (version + 1) / config.warmup_steps
    if config.schedule == "constant" or config.total_steps is None:
        return config.learning_rate
    progress = min(1.0, (version - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    factor = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * factor


def global_norm(gradients: Sequence[torch.Tensor], device: torch.device) -> float:
    """Return the 2-norm of all shards of all ranks, the same on every rank; squares are summed in float64.

    Only one rank may pass each shard. The default group must be able to communicate from ``device``; the gradients may
    be on a different device.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        total += torch.linalg.vector_norm(gradient, dtype=dtype).double().square().to(device)
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return math.sqrt(total.item())


def clip(gradients: Sequence[torch.Tensor], norm: float, max_norm: float | None) -> None:
    """Scale the gradients in place so that their norm, currently ``norm``, is at most ``max_norm``."""
    if max_norm is not None and norm > max_norm:
        torch._foreach_mul_(list(gradients), max_norm / norm)


def as_sharded(local: torch.Tensor, like: DTensor) -> DTensor:
    """Return a local shard as part of a tensor that is sharded like ``like``; never communicates or copies.

    The result is built as ``fully_shard`` builds its own: ``DTensor.from_local`` would move a shard in host memory to
    the mesh's device.
    """
    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]

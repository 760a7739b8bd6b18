"""AdamW over the local shards of one rank, in full or in 8 bits, its learning rate, and the norm over all ranks.

AdamW works element by element, so it needs no knowledge of sharding: plain local tensors avoid the cost of dispatching
every operation through DTensor. The module knows nothing of models.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from inflight.errors import ConfigError
from inflight_fsdp.config import WorkerConfig


class ShardedOptimizer(Protocol):
    """An optimizer over the sharded parameters, by the names of the worker."""

    @property
    @abstractmethod
    def states(self) -> Mapping[str, Mapping[str, DTensor]]:
        """Sharded tensors by kind, such as ``exp_avg``, and parameter; made once something asks for them."""

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Steps taken."""

    @abstractmethod
    def resume(self, states: Mapping[str, Mapping[str, DTensor]], num_steps: int) -> None:
        """Go on from what was read into the ``states``, which `states` gave, as after ``num_steps`` steps."""

    @abstractmethod
    def step(self, gradients: Sequence[torch.Tensor], learning_rate: float) -> None:
        """Update the parameters in place; ``gradients`` are local shards, in the order of the parameters."""


class ShardedAdamW(ShardedOptimizer):
    """AdamW and its state for the shards of one rank. Every parameter has taken the same number of steps."""

    def __init__(self, parameters: Mapping[str, DTensor], config: WorkerConfig) -> None:
        self._parameters = parameters
        with torch.no_grad():
            self._shards = [parameter.to_local() for parameter in parameters.values()]
        self._adamw = torch.optim.AdamW(
            self._shards, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
        )
        self._states: dict[str, dict[str, DTensor]] = {}

    @property
    def states(self) -> Mapping[str, Mapping[str, DTensor]]:
        """First and second moments, ``exp_avg`` and ``exp_avg_sq``, by parameter and sharded alike."""
        self._allocate()
        return self._states

    @property
    def num_steps(self) -> int:
        return int(self._adamw.state[self._shards[0]]["step"].item()) if self._states else 0

    def set_num_steps(self, value: int) -> None:
        """Go on as after ``value`` steps; the moments are the caller's to fill."""
        self._allocate()
        for shard in self._shards:
            self._adamw.state[shard]["step"].fill_(value)

    def resume(self, states: Mapping[str, Mapping[str, DTensor]], num_steps: int) -> None:
        assert states is self._states
        self.set_num_steps(num_steps)

    def step(self, gradients: Sequence[torch.Tensor], learning_rate: float) -> None:
        self._allocate()
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        for shard, gradient in zip(self._shards, gradients, strict=True):
            shard.grad = gradient
        self._adamw.step()
        self._adamw.zero_grad()

    def _allocate(self) -> None:
        """Make the moments, once. A worker that never steps, a frozen reference say, pays no memory for them."""
        if self._states:
            return
        for (name, parameter), shard in zip(self._parameters.items(), self._shards, strict=True):
            moments = {key: torch.zeros_like(shard) for key in ("exp_avg", "exp_avg_sq")}
            num_steps = torch.zeros((), dtype=torch.float32, device=shard.device)
            self._adamw.state[shard] = {"step": num_steps, **moments}
            for key, moment in moments.items():
                self._states.setdefault(key, {})[name] = as_sharded(moment, parameter)


class ShardedAdamW8bit(ShardedOptimizer):
    """torchao's AdamW with moments in 8 bits, for the shards of one rank. See `ShardedAdamW`.

    Shards of fewer than 4,096 elements, or that blocks of 256 do not divide, keep theirs in full.
    """

    def __init__(self, parameters: Mapping[str, DTensor], config: WorkerConfig) -> None:
        try:
            from torchao.optim import AdamW8bit
        except ImportError as error:
            raise ConfigError(f"optimizer 'adamw8bit' needs torchao ({error}): pip install torchao") from error
        self._parameters = parameters
        with torch.no_grad():
            self._shards = [parameter.to_local() for parameter in parameters.values()]
        self._adamw = AdamW8bit(
            self._shards,
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        self._has_states = False

    @property
    def states(self) -> Mapping[str, Mapping[str, DTensor]]:
        """The moments as copies in the dtype of their parameters, by parameter and sharded alike."""
        self._allocate()
        found: dict[str, dict[str, DTensor]] = {}
        for (name, parameter), shard in zip(self._parameters.items(), self._shards, strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                moment = self._adamw.state[shard][key]
                full = moment if type(moment) is torch.Tensor else moment.dequantize(shard.dtype)
                found.setdefault(key, {})[name] = as_sharded(full.clone(), parameter)
        return found

    @property
    def num_steps(self) -> int:
        return int(self._adamw.state[self._shards[0]]["step"].item()) if self._has_states else 0

    def set_num_steps(self, value: int) -> None:
        """Go on as after ``value`` steps."""
        self._allocate()
        for shard in self._shards:
            self._adamw.state[shard]["step"].fill_(value)

    def resume(self, states: Mapping[str, Mapping[str, DTensor]], num_steps: int) -> None:
        """Go on with these moments, rounded to 8 bits, as after ``num_steps`` steps."""
        self.set_num_steps(num_steps)
        for name, shard in zip(self._parameters, self._shards, strict=True):
            for key, tensors in states.items():
                self._adamw.state[shard][key].copy_(tensors[name].to_local())

    def step(self, gradients: Sequence[torch.Tensor], learning_rate: float) -> None:
        self._allocate()
        for group in self._adamw.param_groups:
            group["lr"].fill_(learning_rate)
        for shard, gradient in zip(self._shards, gradients, strict=True):
            shard.grad = gradient
        self._step()
        self._adamw.zero_grad()

    def _step(self) -> None:
        # torchao compiles its step for each shape of shard: seconds of compiling each, which a CPU does not win back.
        on_cpu = self._shards[0].device.type == "cpu"
        with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
            self._adamw.step()

    def _allocate(self) -> None:
        """Make the moments, once, by a step of zeros."""
        if self._has_states:
            return
        self._has_states = True
        for group in self._adamw.param_groups:
            group["lr"].fill_(0.0)
        for shard in self._shards:
            shard.grad = torch.zeros_like(shard)
        self._step()
        self._adamw.zero_grad()
        self.set_num_steps(0)


def learning_rate_at(version: int, config: WorkerConfig) -> float:
    """Return the learning rate of the step that leads from ``version`` to the next.

    Linear warm-up reaches the full rate with step ``warmup_steps``; the decay reaches zero at ``total_steps``.
    """
    if version < config.warmup_steps:
        return config.learning_rate * (version + 1) / config.warmup_steps
    if config.schedule == "constant" or config.total_steps is None:
        return config.learning_rate
    progress = min(1.0, (version - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    factor = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * factor


def global_norm(gradients: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the 2-norm over all shards of all ranks, the same on every rank; squares are summed in float64.

    ``device`` is one that the group can communicate from; gradients may be elsewhere.
    """
    dtype = torch.float64 if gradients[0].dtype == torch.float64 else torch.float32
    norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=dtype) for gradient in gradients])
    total = norms.double().square().sum().to(device)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return math.sqrt(total.item())


def clip(gradients: Sequence[torch.Tensor], norm: float, max_norm: float | None) -> None:
    """Scale the gradients in place so that their norm, now ``norm``, is at most ``max_norm``."""
    if max_norm is not None and norm > max_norm:
        torch._foreach_mul_(list(gradients), max_norm / norm)


def as_sharded(local: torch.Tensor, like: DTensor) -> DTensor:
    """Return a local shard as part of a tensor that is sharded as ``like``; never communicates or copies.

    As ``fully_shard`` makes its own: ``DTensor.from_local`` would move what is in host memory to the mesh's device.
    """
    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]

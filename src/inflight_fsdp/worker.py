"""`FsdpWorker`: one rank of a trainer on torch's ``fully_shard``. Satisfies `inflight.contracts.TrainerWorker`.

Shape suffixes: T packed tokens, N targets.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from inflight.attention import SegmentPlan
from inflight.checkpoints import load_config
from inflight.errors import ConfigError, NonFiniteError, TrainerError
from inflight.types import MicroBatch, StepResult, WeightBucket
from inflight.wire import DTYPE_SIZES, BucketSpec, TensorSpec
from inflight_fsdp.agreement import on_every_rank
from inflight_fsdp.checkpoint import TrainerState, load_checkpoint, save_checkpoint
from inflight_fsdp.config import WorkerConfig, parse_config
from inflight_fsdp.model import PolicyModel, empty_policy, fsdp_modules, load_weights, recompute_layers, shard_policy
from inflight_fsdp.optimizer import ShardedAdamW, clip, global_norm, learning_rate_at
from inflight_fsdp.sharding import rows_of_ranks


def create_worker(config: WorkerConfig | Mapping[str, object]) -> FsdpWorker:
    """Return this process's rank of a worker; collective over torch's default process group.

    Without a default group a group of one is made, and `FsdpWorker.close` ends it. Raises `ConfigError` or
    `UnsupportedError` on every rank if the settings or the model cannot be used.
    """
    settings = parse_config(config)
    device = _device(settings)
    owns_group = _ensure_default_group(device)
    try:
        return FsdpWorker(settings, device, owns_group=owns_group)
    except BaseException:
        if owns_group:
            dist.destroy_process_group()
        raise


class FsdpWorker:
    """One trainer rank. Made by `create_worker`; `inflight.contracts.TrainerWorker` says what each method does."""

    def __init__(self, config: WorkerConfig, device: torch.device, *, owns_group: bool) -> None:
        self._config = config
        self._device = device
        self._owns_group = owns_group
        self._mesh = _mesh(config, device)
        self._policy, self._wire_dtype = on_every_rank(lambda: _empty_policy(config), device)
        if config.activation_checkpointing:
            recompute_layers(self._policy)
        compute_dtype = None if config.compute_dtype in (None, config.dtype) else getattr(torch, config.compute_dtype)
        shard_policy(self._policy, self._mesh, compute_dtype)
        on_every_rank(lambda: load_weights(self._policy, config.model_path, device), device)
        # The sharded parameters live as long as the model; its attributes change while layers are whole.
        self._parameters: dict[str, DTensor] = dict(self._policy.causal_lm.named_parameters())
        self._optimizer = ShardedAdamW(self._parameters, config)
        self._version = 0

    @property
    def rank(self) -> int:
        """See `TrainerWorker.rank`."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """See `TrainerWorker.world_size`."""
        return self._mesh.size()

    @property
    def version(self) -> int:
        """See `TrainerWorker.version`."""
        return self._version

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """See `TrainerWorker.forward`. The logprobs are on the device of the batch, which may be another than ours."""
        lengths, token_ids_T = batch.segment_lengths, batch.token_ids_T
        position_ids_T, temperature_T = batch.position_ids_T, batch.temperature_T
        if not lengths:  # Other ranks may have something: take part in their collectives with a token of no segment.
            lengths = (1,)
            token_ids_T, position_ids_T, temperature_T = torch.tensor([0]), torch.tensor([0]), torch.tensor([1.0])
        logprobs_T: torch.Tensor = self._policy(
            token_ids_T.to(self._device),
            position_ids_T.to(self._device),
            SegmentPlan.build(lengths, self._device),
            temperature_T.to(self._device),
            batch.loss_mask_T.nonzero().squeeze(1).to(self._device),
        )
        return logprobs_T[: batch.num_tokens].to(batch.token_ids_T.device)

    def backward(self, loss: torch.Tensor) -> None:
        """See `TrainerWorker.backward`."""
        loss.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self) -> StepResult:
        """See `TrainerWorker.step`. Raises `TrainerError` if `backward` was not called since; nothing changed then."""
        if all(parameter.grad is None for parameter in self._parameters.values()):
            raise TrainerError(f"step at version {self._version} without a gradient: call backward first")
        gradients = [_local_gradient(parameter) for parameter in self._parameters.values()]
        norm = global_norm(gradients, self._mesh.get_group(self._mesh.ndim - 1))
        self._clear_gradients()
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"the gradient norm of the step from version {self._version} is {norm}; weights and optimizer are "
                "unchanged and the gradients are gone"
            )
        clip(gradients, norm, self._config.max_gradient_norm)
        learning_rate = learning_rate_at(self._version, self._config)
        self._forget_whole_parameters()
        self._optimizer.step(gradients, learning_rate)
        self._version += 1
        return StepResult(self._version, norm, learning_rate)

    def parameter_specs(self) -> Sequence[TensorSpec]:
        """See `TrainerWorker.parameter_specs`."""
        return [
            TensorSpec(name=name, dtype=self._wire_dtype, shape=tuple(parameter.shape))  # type: ignore[arg-type]
            for name, parameter in self._parameters.items()
        ]

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        """See `TrainerWorker.gather_weights`. Yielded tensors share no memory with the parameters."""
        specs = self.parameter_specs()
        for bucket in buckets:
            part = specs[bucket.start : bucket.stop]
            tensors = [self._gather(spec.name) for spec in part]
            yield WeightBucket(bucket.index, tuple(part), tuple(t for t in tensors if t is not None))

    def save(self, path: Path) -> None:
        """See `TrainerWorker.save`. Rank 0 writes. A directory that is no checkpoint of ours is not replaced."""
        save_checkpoint(
            path,
            TrainerState(self._parameters, self._optimizer.states, self._version, self._optimizer.num_steps),
            model_config=self._policy.causal_lm.config.to_json_string(use_diff=True),
            model_path=self._config.model_path,
        )

    def load(self, path: Path) -> None:
        """See `TrainerWorker.load`. Every rank reads its shards from ``path``; gradients are cleared."""
        version, num_steps = load_checkpoint(path, self._parameters, self._optimizer.states)
        self._optimizer.set_num_steps(num_steps)
        self._version = version
        self._clear_gradients()
        self._forget_whole_parameters()

    def close(self) -> None:
        """End the process group if this worker made it. Idempotent."""
        if self._owns_group:
            self._owns_group = False
            dist.destroy_process_group()

    @torch.no_grad()
    def _gather(self, name: str) -> torch.Tensor | None:
        """Return one full parameter in wire dtype, in memory of its own, on rank 0, None elsewhere; collective.

        Ranks send their rows to rank 0, so that no other rank holds more than its own, and nobody gets what it drops.
        """
        parameter, dtype = self._parameters[name], getattr(torch, self._wire_dtype)
        sent_dtype = min(dtype, parameter.dtype, key=lambda d: d.itemsize)  # cast where it makes less to send
        mine = parameter.to_local().to(sent_dtype)
        group, rows = self._mesh.get_group(self._mesh.ndim - 1), rows_of_ranks(parameter)
        if self.rank == 0:
            full = torch.empty(parameter.shape, dtype=sent_dtype, device=mine.device)
            full[rows[0]] = mine
            parts = [(rank, full[part]) for rank, part in enumerate(rows) if rank and part.start < part.stop]
            for call in [dist.irecv(part, group=group, group_src=rank) for rank, part in parts]:
                assert call is not None
                call.wait()
            return full.to(dtype)
        if self.rank < len(rows) and mine.numel():  # of the first copy of the parameters
            dist.send(mine, group=group, group_dst=0)
        return None

    def _clear_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def _forget_whole_parameters(self) -> None:
        """Reshard what a forward without a backward left whole, so that nothing computes with old values."""
        for module in fsdp_modules(self._policy):
            module.reshard()


def _empty_policy(config: WorkerConfig) -> tuple[PolicyModel, str]:
    """Return the model, its parameters on meta, and the wire dtype."""
    policy = empty_policy(config.model_path, config.dtype, config.logprob_chunk_size)
    declared = str(load_config(config.model_path).dtype).removeprefix("torch.")
    return policy, config.wire_dtype or (declared if declared in DTYPE_SIZES else config.dtype)


def _mesh(config: WorkerConfig, device: torch.device) -> DeviceMesh:
    """Return all ranks, or copies by ranks of one copy. Raises `ConfigError` if the ranks cannot be divided so."""
    num_ranks, size = dist.get_world_size(), config.shard_size
    if size is None or size == num_ranks:
        return init_device_mesh(device.type, (num_ranks,))
    if num_ranks % size:
        raise ConfigError(f"shard_size {size} does not divide the {num_ranks} ranks")
    return init_device_mesh(device.type, (num_ranks // size, size), mesh_dim_names=("copy", "shard"))


def _local_gradient(parameter: DTensor) -> torch.Tensor:
    """Return the gradient of this rank's shard; zeros if nothing used the parameter."""
    gradient = parameter.grad
    return torch.zeros_like(parameter.to_local()) if gradient is None else gradient.to_local()  # type: ignore[attr-defined]


def _device(config: WorkerConfig) -> torch.device:
    kind = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device is 'cuda' but torch sees no GPU; set device = 'cpu' or install torch with CUDA")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _ensure_default_group(device: torch.device) -> bool:
    """Make a group of one unless there is a default group; return True if it was made. No network is used."""
    if dist.is_initialized():
        return False
    if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ConfigError(
            f"WORLD_SIZE is {ranks} but torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() on every rank before the worker is made"
        )
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return True

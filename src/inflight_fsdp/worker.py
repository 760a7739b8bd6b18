"""`FsdpWorker`: one rank of a trainer of transformers' models on torch's ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from inflight.checkpoints import max_model_len_of
from inflight.errors import ConfigError
from inflight_fsdp.agreement import on_every_rank
from inflight_fsdp.compiled import check_compiler
from inflight_fsdp.config import WorkerConfig, parse_config
from inflight_fsdp.model import (
    PolicyModel,
    empty_policy,
    freeze,
    layouts_of,
    load_weights,
    recompute_layers,
    shard_policy,
)
from inflight_fsdp.optimizer import ShardedAdamW, ShardedAdamW8bit, ShardedOptimizer
from inflight_fsdp.sharded import (
    ShardedPolicy,
    ShardedWorker,
    device_of,
    in_a_group,
    storage_device_of,
)

_OPTIMIZERS: dict[str, Callable[[Mapping[str, DTensor], WorkerConfig], ShardedOptimizer]] = {
    "adamw": ShardedAdamW,
    "adamw8bit": ShardedAdamW8bit,
}


def create_worker(config: WorkerConfig | Mapping[str, object]) -> FsdpWorker:
    """Return this process's rank of a worker; collective over torch's default process group.

    Without a default group a group of one is made, and `FsdpWorker.close` ends it. Raises `ConfigError` or
    `UnsupportedError` on every rank if the settings or the model cannot be used.
    """
    settings = parse_config(config, WorkerConfig)
    device = device_of(settings)
    return in_a_group(device, lambda owns_group: FsdpWorker(settings, device, owns_group=owns_group))


class FsdpWorker(ShardedWorker):
    """One trainer rank. Made by `create_worker`; `inflight.contracts.TrainerWorker` says what each method does."""

    _policy: PolicyModel

    def __init__(self, config: WorkerConfig, device: torch.device, *, owns_group: bool) -> None:
        mesh = _mesh(config, device)
        if config.compile:
            on_every_rank(lambda: check_compiler(device), device)
        policy = on_every_rank(
            lambda: empty_policy(
                config.model_path, config.stored_dtype, config.logprob_chunk_size, compiled=config.compile
            ),
            device,
        )
        on_every_rank(lambda: freeze(policy.causal_lm, config.frozen), device)
        if config.activation_checkpointing:
            recompute_layers(policy)
        compute_dtype = None if config.dtype == config.stored_dtype else getattr(torch, config.dtype)
        shard_policy(policy, mesh, compute_dtype, cpu_offload=config.cpu_offload)
        storage_device = storage_device_of(config, device)
        on_every_rank(lambda: load_weights(policy, config.model_path, device, storage_device), device)
        parameters: dict[str, DTensor] = dict(policy.causal_lm.named_parameters())
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        sharded = ShardedPolicy(
            module=policy,
            mesh=mesh,
            parameters=parameters,
            layouts=layouts_of(policy.causal_lm),
            optimizer=on_every_rank(lambda: _OPTIMIZERS[config.optimizer](trained, config), device),
            model_config=policy.causal_lm.config.to_json_string(use_diff=True),
            context_length=max_model_len_of(policy.causal_lm.config),
        )
        super().__init__(config, device, sharded, owns_group=owns_group)


def _mesh(config: WorkerConfig, device: torch.device) -> DeviceMesh:
    """Return all ranks, or copies by ranks of one copy. Raises `ConfigError` if the ranks cannot be divided so."""
    num_ranks, size = dist.get_world_size(), config.shard_size
    if size is None or size == num_ranks:
        return init_device_mesh(device.type, (num_ranks,))
    if num_ranks % size:
        raise ConfigError(f"shard_size {size} does not divide the {num_ranks} ranks")
    return init_device_mesh(device.type, (num_ranks // size, size), mesh_dim_names=("copy", "shard"))

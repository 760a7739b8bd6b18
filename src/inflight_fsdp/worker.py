"""`FsdpWorker`: one rank of a trainer for transformers models, which are sharded by torch's ``fully_shard``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from inflight.model.checkpoints import stored_tensors
from inflight_fsdp.agreement import on_every_rank
from inflight_fsdp.config import WorkerConfig
from inflight_fsdp.groups import mesh_of
from inflight_fsdp.model import PolicyModel, empty_policy, layouts_of, load_weights, shard_policy
from inflight_fsdp.optimizer import make_adamw
from inflight_fsdp.parts import DTensorPart
from inflight_fsdp.sharded import ShardedWorker
from inflight_fsdp.sharding import box_of, shardings_of


class FsdpWorker(ShardedWorker):
    """One trainer rank, made by `create_worker`; `inflight.contracts.TrainerWorker` states what each method does."""

    _policy: PolicyModel

    def __init__(self, config: WorkerConfig, device: torch.device, *, owns_group: bool) -> None:
        num_ranks = dist.get_world_size()
        size = config.shard_size or num_ranks
        if size == num_ranks:
            mesh = mesh_of(device, (num_ranks,))
        else:
            mesh = mesh_of(device, (num_ranks // size, size), ("copy", "shard"))
        policy = on_every_rank(lambda: empty_policy(config, device), device)
        causal_lm = policy.causal_lm
        shard_policy(policy, mesh, config)
        parameters: dict[str, DTensor] = dict(causal_lm.named_parameters())
        layouts = layouts_of(causal_lm, stored_tensors(config.model_path))
        boxes = {name: box_of(parameter) for name, parameter in parameters.items()}
        shardings = shardings_of(boxes, {name: tuple(p.shape) for name, p in parameters.items()}, device)
        on_every_rank(lambda: load_weights(policy, layouts, shardings, config, device), device)
        parts = {name: DTensorPart(parameter) for name, parameter in causal_lm.named_parameters()}
        super().__init__(
            config,
            device,
            owns_group=owns_group,
            policy=policy,
            parts=parts,
            shardings=shardings,
            layouts=layouts,
            optimizer=on_every_rank(lambda: make_adamw(parts, config), device),
            hf_config=causal_lm.config,
        )

"""The process group over which PipelineRL sends weights.

Rank 0 hosts the store, at which PipelineRL's own code waits for all ranks (``torch_utils._create_stateless_pg``). On a
CPU, the group is a gloo group under the keys of torch's own groups, as ``torch_utils.init_extra_process_group`` forms
it.

On GPUs, PipelineRL broadcasts over vLLM's NCCL communicator, whose id rank 0 puts into the store as a pickle. Because
inflight never unpickles, it does not join that group.
"""

from __future__ import annotations

from inflight.dialects.broadcast_group import GroupRank, group_rank_of

_PREFIXES = ("actor", "actor/", "cpu/")
"""Prefixes of the keys of a group that ``init_extra_process_group`` forms under the name ``actor``."""


def place_of(init_method: str, *, rank: int, world_size: int, timeout_s: float = 300.0) -> GroupRank:
    """Return a rank of PipelineRL's group at ``tcp://HOST:PORT``. Raises `ConfigError`."""
    return group_rank_of(init_method, "PipelineRL", _PREFIXES, rank=rank, world_size=world_size, timeout_s=timeout_s)

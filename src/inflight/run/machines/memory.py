"""How much memory the processes of a run need, by arithmetic from ``config.json``, tensor shapes and settings.

A trainer: what its kind of workers says, see `inflight.contracts.WorkerKind.memory`.

A server:

- weights: c times all elements, over the GPUs that share a copy
- KV cache: of the embedded engine, its limit: ``max_concurrent`` sequences of the whole context at 2 c K D bytes per
  token and layer, at most half of the memory that the weights leave
- engine: of another engine, its share of each GPU, which holds weights, KV cache and activations
- staged update: c times all elements, where an update waits in GPU memory for its commit

With ``servers.release_memory`` trainers and servers take turns: while trainers train, servers hold nothing.

Each process also has `CONTEXT_BYTES`, all the time. Nothing here was compared with a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from inflight.base.worker_kinds import load_worker_kind
from inflight.contracts import GpuUse, MemoryTerm
from inflight.contracts.trainer import Phase
from inflight.errors import ConfigError
from inflight.model.shapes import ModelShape
from inflight.run.config import RunConfig
from inflight.run.fleet_config import FleetMember
from inflight.run.ranks.workers import training_load, worker_settings
from inflight.wire import DTYPE_SIZES

CONTEXT_BYTES = 1 << 30
"""Assumed for each process on a GPU: CUDA's context, workspaces of its libraries, buffers of NCCL."""
ON_THE_GPU = ("nccl", "ipc")
"""Transports whose buckets arrive in GPU memory."""
PHASES: tuple[Phase, ...] = get_args(Phase)


# ---------------------------------------------------------------------------------------------------------------
# Trainers


def trainer_terms(config: RunConfig) -> tuple[MemoryTerm, ...]:
    """Return what the largest rank needs on its GPU; nothing if its kind does not know. Raises `ConfigError`."""
    terms = load_worker_kind(config.train.trainer).memory(worker_settings(config), training_load(config))
    if terms is None:
        return ()
    if not config.servers.release_memory:
        terms = [replace(term, phase=None) for term in terms if term.phase != "sampling"]
    return (*terms, MemoryTerm("context", CONTEXT_BYTES))


# ---------------------------------------------------------------------------------------------------------------
# Servers


def server_terms(
    config: RunConfig, member: FleetMember, use: GpuUse, model: ModelShape, memory_bytes: int
) -> tuple[MemoryTerm, ...]:
    """Return what one server needs on each of its GPUs, which have ``memory_bytes`` (0: unknown).

    Raises `ConfigError` if the engine's own share of that does not hold the model and one sequence.
    """
    dtype = config.model.dtype
    size_bytes = DTYPE_SIZES[dtype] * model.num_elements
    weights = -(-size_bytes * use.num_copies // use.num_gpus)
    context = use.context or model.context
    sequence = context * model.kv_bytes_per_token(dtype)
    others = []
    sampling: Phase | None = "sampling" if config.servers.release_memory else None
    if use.stages_on_gpu and config.updates.transport in ON_THE_GPU:
        remedy = "choose a transport through host memory, such as 'shm'"
        others.append(MemoryTerm("staged update", size_bytes, remedy, sampling))
    if use.memory_share is None:
        half = max(sequence, (memory_bytes - weights) // 2)  # trainers load their model later
        cache = min(member.max_concurrent * sequence, half)
        return (
            MemoryTerm(
                "weights", weights, "set model.dtype to 'bfloat16', or use an engine with tensor parallelism", sampling
            ),
            MemoryTerm("KV cache", cache, "lower servers.max_concurrent", sampling),
            *others,
            MemoryTerm("context", CONTEXT_BYTES),
        )
    share = int(use.memory_share * memory_bytes)
    needed = weights + -(-sequence * use.num_copies // use.num_gpus)
    if memory_bytes and needed > share:
        raise ConfigError(
            f"the {member.engine} servers fill {use.memory_share:g} of each GPU, {gib(share)}, but weights "
            f"({gib(weights)}) and one sequence of {context} tokens need {gib(needed)}, {gib(needed - share)} "
            "more: raise the engine's tensor-parallel size or its share of the memory"
        )
    return (
        MemoryTerm(
            f"engine ({use.memory_share:g} of the GPU)",
            share or needed,
            "lower the engine's share of the memory",
            sampling,
        ),
        *others,
        MemoryTerm("context", CONTEXT_BYTES),
    )


def gib(size_bytes: int) -> str:
    """Return a size as people read it, such as ``12.3 GiB``."""
    return f"{size_bytes / (1 << 30):.1f} GiB"

"""How much memory the processes of a run need, and whether it fits into their GPUs.

The estimates are computed from ``config.json``, tensor shapes and settings. The worker kind reports what a trainer
needs: see `inflight.contracts.WorkerKind.memory`.

Each server needs the following amounts, where c is the size in bytes of an element of ``model.dtype``, and the cache
stores K key-value heads of dimension D:

- weights: c times the number of elements, divided among the GPUs that share a copy
- KV cache (embedded engine): its limit, which is ``max_concurrent`` sequences of full context at 2 c K D bytes per
  token and layer, but at most half of the memory that the weights leave free
- engine (any other engine): its share of each GPU, which holds weights, KV cache and activations
- staged update: c times the number of elements, if an update waits in GPU memory for its commit

With ``servers.release_memory``, trainers and servers take turns: while trainers train, servers hold no GPU memory.

Each process on a GPU also needs `CONTEXT_BYTES` at all times. These estimates have not been compared with
measurements.

Processes without a GPU need the same amounts of host memory, with `PROCESS_BYTES` instead of `CONTEXT_BYTES`. A server
of the embedded engine also keeps packed weights and a staged update there, but stores keys and values only for the
sequences that it samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from inflight.base.worker_kinds import load_worker_kind
from inflight.contracts import GpuUse, MemoryTerm
from inflight.contracts.trainer import Phase
from inflight.errors import ConfigError
from inflight.model.shapes import ModelShape
from inflight.run.config import RunConfig
from inflight.run.fleet_config import ServerGroupSection
from inflight.run.machines.devices import Device
from inflight.run.machines.placement import Placement, gpu_use
from inflight.run.machines.server_specs import server_spec
from inflight.run.ranks.workers import training_load, worker_settings
from inflight.wire import DTYPE_SIZES

CONTEXT_BYTES = 1 << 30
"""Assumed for each process on a GPU: the CUDA context, library workspaces, and NCCL buffers."""
PROCESS_BYTES = 600 << 20
"""Assumed for each process: the interpreter, torch and transformers."""
ON_THE_GPU = ("nccl", "ipc")
"""The transports whose buckets arrive in GPU memory."""
PHASES: tuple[Phase, ...] = get_args(Phase)
Memory = Mapping[str, tuple[MemoryTerm, ...]]
"""The memory that each process needs on each of its GPUs, or on its host if it has none, by process name."""


# ---------------------------------------------------------------------------------------------------------------
# Trainers


def trainer_terms(config: RunConfig, base: MemoryTerm) -> tuple[MemoryTerm, ...]:
    """Return the memory that the largest rank needs on its GPU or host, plus ``base``.

    The result is empty if the worker kind does not report it. Raises `ConfigError`.
    """
    terms = load_worker_kind(config.train.trainer).memory(worker_settings(config), training_load(config))
    if terms is None:
        return ()
    if not config.servers.release_memory:
        terms = [replace(term, phase=None) for term in terms if term.phase != "sampling"]
    return (*terms, base)


# ---------------------------------------------------------------------------------------------------------------
# Servers


def server_terms(
    config: RunConfig, member: ServerGroupSection, use: GpuUse, model: ModelShape, memory_bytes: int
) -> tuple[MemoryTerm, ...]:
    """Return the memory that one server needs on each of its GPUs, which have ``memory_bytes`` each (0 if unknown).

    Raises `ConfigError` if the engine's share of that memory cannot hold the model and one sequence.
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
        cache = min(server_spec(config, member).options.num_slots * sequence, half)
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
    """Return a size in a readable form, such as ``12.3 GiB``."""
    return f"{size_bytes / (1 << 30):.1f} GiB"


# ---------------------------------------------------------------------------------------------------------------
# What every process needs, and whether it fits


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """The memory that all processes on one GPU need together."""

    index: int
    memory_bytes: int
    needed_bytes: int
    """The total, or the total of the larger phase if trainers and servers take turns."""
    processes: tuple[str, ...]
    phase: Phase | None = None
    """The larger phase; None if the memory does not depend on the phase."""


def memory_of(config: RunConfig, model: ModelShape, placement: Placement) -> Memory:
    """Return the memory of every process with GPUs. Raises `ConfigError` if an engine's own share is too small."""
    context = MemoryTerm("context", CONTEXT_BYTES)
    of_trainers = trainer_terms(config, context) if any(it.devices for it in placement.trainers) else ()
    memory = {it.name: of_trainers for it in placement.trainers if it.devices}
    for it, member in zip(placement.servers, config.servers.started, strict=True):
        if it.devices:
            memory_bytes = min(device.memory_bytes for device in it.devices)
            memory[it.name] = server_terms(config, member, gpu_use(member), model, memory_bytes)
    return memory


def host_memory_of(config: RunConfig, model: ModelShape, placement: Placement) -> Memory:
    """Return the host memory of every process without a GPU, and of the controller; () means unknown."""
    process = MemoryTerm("process", PROCESS_BYTES)
    memory: dict[str, tuple[MemoryTerm, ...]] = {"controller": (process,)}
    for it in placement.trainers:
        if not it.devices:
            memory[it.name] = trainer_terms(config, process)
    for it, member in zip(placement.servers, config.servers.started, strict=True):
        if not it.devices:
            memory[it.name] = (*_host_terms(config, member, model), process) if member.kind.runs_in_process else ()
    return memory if len(memory) > 1 else {}


def _host_terms(config: RunConfig, member: ServerGroupSection, model: ModelShape) -> tuple[MemoryTerm, ...]:
    """Return the host memory that the embedded engine uses while an update arrives."""
    dtype = config.model.dtype
    is_packed = dtype == "bfloat16"
    weights = (1 + is_packed) * DTYPE_SIZES[dtype] * model.num_elements
    num_slots, num_tokens = server_spec(config, member).options.num_slots, config.sampling.max_tokens
    return (
        MemoryTerm("weights and packed weights" if is_packed else "weights", weights),
        MemoryTerm("staged update", weights),
        MemoryTerm(f"KV cache of {num_tokens} tokens each", num_slots * num_tokens * model.kv_bytes_per_token(dtype)),
    )


def device_uses(devices: Sequence[Device], placement: Placement, memory: Memory) -> tuple[DeviceUse, ...]:
    """Return the memory that all processes together need on each device."""
    uses = []
    for device in devices:
        names = tuple(it.name for it in placement.placed if device in it.devices)
        terms = [term for name in names for term in memory[name]]
        phase = max(PHASES, key=lambda phase: total(terms, phase)) if any(term.phase for term in terms) else None
        uses.append(DeviceUse(device.index, device.memory_bytes, total(terms, phase), names, phase))
    return tuple(uses)


def check_fits(uses: Sequence[DeviceUse], memory: Memory) -> None:
    """Raise a `ConfigError` that states how much memory is missing and what would help, if a device has too little."""
    for use in uses:
        if use.memory_bytes and use.needed_bytes > use.memory_bytes:
            raise ConfigError(_shortage(use, memory))


def _shortage(use: DeviceUse, memory: Memory) -> str:
    needed = {name: [term for term in memory[name] if term.phase in (None, use.phase)] for name in use.processes}
    parts = [f"{name}: {terms_as_text(terms)}" for name, terms in needed.items()]
    terms = [term for it in needed.values() for term in it if term.remedy]
    largest = sorted(terms, key=lambda term: -term.size_bytes)[:3]
    remedies = list(dict.fromkeys(term.remedy for term in largest))
    if len(use.processes) > 1:
        remedies.append("give each process its own GPUs")
        if use.phase is None:
            remedies.append("set run.mode = 'conventional' and servers.release_memory = true, so that they take turns")
    when = "" if use.phase is None else f" while {use.phase}"
    return (
        f"GPU {use.index} is estimated to need {gib(use.needed_bytes)}{when} but has {gib(use.memory_bytes)}, "
        f"{gib(use.needed_bytes - use.memory_bytes)} too little ({'; '.join(parts)}): {'; or '.join(remedies)}"
    )


def total(terms: Iterable[MemoryTerm], phase: Phase | None) -> int:
    """Return the total bytes of a phase, including terms that apply to all phases."""
    return sum(term.size_bytes for term in terms if term.phase in (None, phase))


def total_as_text(terms: Sequence[MemoryTerm]) -> str:
    """Return the total of the terms as text, for each phase if it depends on the phase."""
    if not any(term.phase for term in terms):
        return f"{gib(total(terms, None))} on each GPU"
    each = [f"{gib(total(terms, phase))} while {phase}" for phase in PHASES]
    return f"on each GPU {', '.join(each)}"


def terms_as_text(terms: Sequence[MemoryTerm]) -> str:
    """Return the names and sizes of terms as text."""
    return ", ".join(f"{term.name} {gib(term.size_bytes)}" for term in terms)

"""The output of ``inflight train --dry-run``: the processes of a run, their memory, and its updates."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from inflight.base.tasks import run_together
from inflight.contracts import InferenceEndpoint, MemoryTerm
from inflight.errors import InflightError
from inflight.http.kinds import connect_endpoint
from inflight.http.tokens import TOKEN_VARIABLE
from inflight.launchers import load_launcher
from inflight.launchers.loading import check_launcher
from inflight.run.config import RunConfig
from inflight.run.machines.devices import Device
from inflight.run.machines.memory import ON_THE_GPU, DeviceUse, Memory, gib, terms_as_text, total, total_as_text
from inflight.run.machines.placement import GpuPlacement
from inflight.run.preflight import Hosts, Prepared, hosts_of
from inflight.run.sampling.teachers import check_teacher
from inflight.run.servers.checks import check_endpoint
from inflight.weights.encode.bucket_bytes import encoded_size
from inflight.weights.encode.buckets import plan_buckets
from inflight.weights.encode.lora_tensors import lora_shapes
from inflight.wire import TensorSpec

_ASK_S = 3.0
_TRAVELS = {
    "nccl": "broadcast from trainer-0's GPU to the servers' GPUs",
    "gloo": "broadcast over sockets from host memory",
    "ipc": "read by the servers from trainer-0's GPU memory",
    "shm": "stored once in this host's shared memory, where each server reads it",
    "file": "stored once in updates.directory, where each server reads it",
    "http": "downloaded by each server from trainer-0",
}


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """A process that the run would start, or a server that is already running."""

    name: str
    what: str
    devices: tuple[int, ...]
    address: str
    memory: tuple[MemoryTerm, ...] = ()
    """The memory that the process needs on each of its GPUs; empty if it has none."""


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    """The size of one published version."""

    size_bytes: int
    sent_bytes: int
    """Bytes that each server receives, after encoding."""
    deadline_s: float
    num_buckets: int
    transport: str
    travels: str


@dataclass(frozen=True, slots=True)
class DryRun:
    """Everything that a run would do."""

    processes: tuple[PlannedProcess, ...]
    update: PlannedUpdate
    devices: tuple[DeviceUse, ...]
    host_memory: Memory
    """How much of this host's memory each process without a GPU needs; an empty tuple means an unknown amount."""
    notes: tuple[str, ...]


async def dry_run(prepared: Prepared) -> DryRun:
    """Return what a run would do, after asking running servers whether they can take part."""
    config, notes = prepared.config, list(prepared.defaults)
    if any(it.devices and not prepared.memory[it.name] for it in prepared.placement.trainers):
        notes.append(f"the memory of {config.train.trainer!r} workers is unknown and not included")
    if not prepared.placement.placed:
        notes.append("no GPU: every process computes on the CPU")
    return DryRun(
        (*_planned_processes(prepared), *await run_together(*_asking(prepared))),
        planned_update(prepared),
        prepared.uses,
        prepared.host_memory,
        tuple(notes),
    )


def hosts_of_dry_run(config: RunConfig, devices: Sequence[Device]) -> Hosts:
    """Return the hosts that a dry run assumes.

    Only launchers that do nothing before they start a process are asked. All other launchers are assumed to have the
    GPUs ``devices``, because asking them may start a cluster.
    """
    if config.run.launcher in ("local", "outside"):
        return hosts_of(load_launcher(config.run.launcher, config.run.launcher_options))
    check_launcher(config.run.launcher)
    return Hosts(address="", port=0, num_gpus=len(devices), can_outlive=False)


# ---------------------------------------------------------------------------------------------------------------
# Processes


def _planned_processes(prepared: Prepared) -> list[PlannedProcess]:
    config, memory = prepared.config, prepared.memory
    train, num = config.train, config.train.num_ranks
    meets = "connects to the other ranks through a free port of rank 0's host" if num > 1 else "the only rank"
    teachers = [f"teacher {str(it.path)!r}" for it in config.distillation.teachers if it.path is not None]
    teaches = f", which also loads {' and '.join(teachers)}" if teachers else ""
    found = [PlannedProcess("controller", "samples, scores and composes", (), "connects to the other ranks")]
    for rank, it in enumerate(prepared.placement.trainers):
        what = f"{train.trainer} worker, rank {rank} of {num}{teaches}"
        found.append(PlannedProcess(it.name, what, _indices(it), meets, memory.get(it.name, ())))
    for it, member in zip(prepared.placement.servers, config.servers.started, strict=True):
        where = "a free port of 127.0.0.1" if member.kind.runs_in_process else "two free ports of 127.0.0.1"
        what = f"{member.engine} engine" if member.kind.runs_in_process else f"{member.engine} behind inflight serve"
        found.append(PlannedProcess(it.name, what, _indices(it), where, memory.get(it.name, ())))
    return found


def _indices(it: GpuPlacement) -> tuple[int, ...]:
    return tuple(device.index for device in it.devices)


def _asking(prepared: Prepared) -> list[Coroutine[Any, Any, PlannedProcess]]:
    """Return a coroutine for each running server, the teachers' included, that asks whether it can take part."""
    config = prepared.config

    async def server(endpoint: InferenceEndpoint) -> str:
        can = await check_endpoint(config, prepared.model.vocab_size, endpoint)
        limit = min(can.max_concurrent_sequences, config.servers.slots_of_attached)
        return f"runs up to {limit} sequences"

    async def teacher(endpoint: InferenceEndpoint) -> str:
        await check_teacher(endpoint, config.distillation, prepared.model.vocab_size, prepared.longest_sequence)
        return f"scores up to {config.distillation.max_concurrent_scores} completions at a time"

    return [
        *(_ask(url, "already running", server) for url in prepared.attached),
        *(_ask(it.url, "teacher", teacher) for it in config.distillation.teachers if it.url is not None),
    ]


async def _ask(url: str, what: str, check: Callable[[InferenceEndpoint], Awaitable[str]]) -> PlannedProcess:
    """Return a running server, with the capabilities that ``check`` reports, or the reason why it cannot take part."""
    endpoint = connect_endpoint(url, token=os.environ.get(TOKEN_VARIABLE), control_timeout_s=_ASK_S)
    try:
        async with asyncio.timeout(_ASK_S):
            address = f"{url} is ready and {await check(endpoint)}"
    except (TimeoutError, InflightError) as error:
        address = f"{url} cannot take part now: {str(error) or f'no answer within {_ASK_S:g} s'}"
    finally:
        await endpoint.aclose()
    return PlannedProcess(endpoint.name, what, (), address)


def planned_update(prepared: Prepared) -> PlannedUpdate:
    """Return how each published version is sent."""
    config, updates = prepared.config, prepared.config.updates
    shapes = {spec.name: spec.shape for spec in prepared.model.specs}
    if config.train.lora is not None:
        shapes = dict(lora_shapes(config.train.lora, config.model.path))
    dtype = str(config.train.trainer_options.get("wire_dtype") or config.model.dtype)
    specs = [TensorSpec.model_validate({"name": n, "dtype": dtype, "shape": s}) for n, s in shapes.items()]
    travels = _TRAVELS.get(updates.transport, "by an installed transport")
    if updates.transport not in ON_THE_GPU:
        travels += "; copied from and to GPUs there"
    return PlannedUpdate(
        size_bytes=sum(spec.size_bytes for spec in specs),
        sent_bytes=encoded_size(specs, "raw" if updates.delta else updates.encoding),
        deadline_s=prepared.limits.publish_s,
        num_buckets=len(plan_buckets(specs)),
        transport=updates.transport,
        travels=f"only changed elements, {travels}" if updates.delta else travels,
    )


# ---------------------------------------------------------------------------------------------------------------
# Text


def render_text(plan: DryRun) -> str:
    """Return a dry run as lines of text."""
    lines = ["processes:"]
    for it in plan.processes:
        where = f"GPU {', '.join(map(str, it.devices))}" if it.devices else "no GPU"
        lines.append(f"  {it.name}: {it.what}; {where}; {it.address}")
    update = plan.update
    lines.append(
        f"one update: {update.size_bytes / 1e9:.3f} GB in {update.num_buckets} buckets, {update.sent_bytes / 1e9:.3f} "
        f"GB on the wire, at most {update.deadline_s:.0f} s; {update.transport}: {update.travels}"
    )
    if plan.devices:
        lines.append("memory, estimated and not measured:")
    alike = itertools.groupby((it for it in plan.processes if it.devices), lambda it: it.memory)
    for terms, group in alike:
        names = [it.name for it in group]
        who = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        lines.append(f"  {who}: {total_as_text(terms)} ({terms_as_text(terms) or 'unknown'})")
    for use in plan.devices:
        has = gib(use.memory_bytes) if use.memory_bytes else "an unknown amount"
        who = ", ".join(use.processes) or "no process"
        when = "" if use.phase is None else f" while {use.phase}"
        lines.append(f"  GPU {use.index}: {gib(use.needed_bytes)} of {has}{when} ({who})")
    if plan.host_memory:
        lines += _host_lines(plan.host_memory)
    return "\n".join([*lines, *plan.notes])


def _host_lines(memory: Memory) -> list[str]:
    """Return how much of this host's memory each process needs, and how much all of them need together."""
    lines = ["host memory, estimated and not measured:"]
    for name, terms in memory.items():
        size = gib(total(terms, None)) if terms else "unknown"
        lines.append(f"  {name}: {size} ({terms_as_text(terms)})" if len(terms) > 1 else f"  {name}: {size}")
    needed = sum(total(terms, None) for terms in memory.values())
    has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rest = "" if all(memory.values()) else ", plus the unknown amounts"
    much = "" if needed <= has else "; that is too little: the system would kill a process"
    lines.append(f"  this host: {gib(needed)}{rest} of {gib(has)}{much}")
    return lines

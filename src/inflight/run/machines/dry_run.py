"""What ``inflight train --dry-run`` says: the processes of a run, their GPUs and memory, and how an update travels.

Starts nothing and writes nothing; it only asks servers that run already whether they can take part. The memory is
arithmetic: `inflight.run.machines.memory`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from inflight.contracts import MemoryTerm
from inflight.errors import ConfigError, InflightError
from inflight.http.kinds import connect_endpoint
from inflight.model.checkpoint_specs import config_number, config_of, tensor_specs_of
from inflight.model.shapes import model_shape
from inflight.rollouts import HistoryStore, load_composer, load_scheduler, load_staleness, load_task
from inflight.run.config import RunConfig
from inflight.run.machines.devices import Device
from inflight.run.machines.memory import ON_THE_GPU, gib
from inflight.run.machines.memory_check import (
    DeviceUse,
    check_fits,
    device_uses,
    listed,
    memory_of,
    totals,
)
from inflight.run.machines.placement import Place, place
from inflight.run.machines.time_limits import time_limits
from inflight.run.ranks.workers import check_lora
from inflight.run.servers.checks import check_endpoint, check_servers, read_server_list
from inflight.weights.encode.bucket_bytes import encoded_size
from inflight.weights.encode.buckets import plan_buckets
from inflight.weights.encode.lora_tensors import lora_shapes
from inflight.wire import TensorSpec

_ASK_S = 3.0
_CONNECTS_BACK = ("gloo", "nccl", "http")
"""Transports for which servers connect to ``servers.address``."""
_WITHIN_ONE_MACHINE = ("shm", "ipc")
_TRAVELS = {
    "nccl": "broadcast from trainer-0's GPU to the servers' GPUs",
    "gloo": "broadcast over sockets from host memory",
    "ipc": "read by the servers from trainer-0's GPU memory",
    "shm": "stored once in this host's shared memory, where each server reads it",
    "file": "stored once in servers.directory, where each server reads it",
    "http": "downloaded by each server from trainer-0",
}


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """One process, or a server that runs already."""

    name: str
    what: str
    devices: tuple[int, ...]
    address: str
    memory: tuple[MemoryTerm, ...] = ()
    """On each of its GPUs; empty if it has none."""


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    """One published version."""

    size_bytes: int
    sent_bytes: int
    """To each server, after encoding."""
    deadline_s: float
    num_buckets: int
    transport: str
    travels: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would do."""

    processes: tuple[PlannedProcess, ...]
    update: PlannedUpdate
    devices: tuple[DeviceUse, ...]
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Return values for a JSON document."""
        return asdict(self)


def plan_run(config: RunConfig, devices: Sequence[Device]) -> Plan:
    """Return what a run with this configuration would do on a machine with these GPUs.

    Raises `ConfigError` if the configuration cannot work, or if a GPU's memory cannot hold what it needs.
    """
    check_servers(config.servers)
    check_lora(config)
    config.loss.policy_loss()
    load_task(config.task.name, config.task.params, config.run.seed)
    policies = config.rollouts
    load_staleness(policies.staleness, policies.staleness_params, policies.max_lag)
    load_composer(policies.composer, policies.composer_params, config.tokens_per_step)
    load_scheduler(
        policies.scheduler,
        policies.scheduler_params,
        group_size=config.sampling.group_size,
        history=HistoryStore(),
        seed=config.run.seed,
    )
    placement = place(config, devices)
    model = model_shape(config.model.path)
    memory = memory_of(config, model, placement)
    uses = device_uses(devices, placement, memory)
    check_fits(uses, memory)
    notes = []
    if any(it.devices and not memory[it.name] for it in placement.trainers):
        notes.append(f"memory of {config.train.trainer!r} workers is not known, and left out")
    processes = [*_started(config, placement.trainers, placement.servers, memory)]
    urls = _urls(config)
    _check_address(config, urls)
    processes += asyncio.run(_attached(config, urls))
    if not devices:
        notes.append("no GPU: every process computes on the CPU, in host memory that is not counted here")
    return Plan(tuple(processes), _update(config), uses, tuple(notes))


# ---------------------------------------------------------------------------------------------------------------
# Processes


def _started(
    config: RunConfig, trainers: Sequence[Place], servers: Sequence[Place], memory: Mapping[str, tuple[MemoryTerm, ...]]
) -> list[PlannedProcess]:
    train, num = config.train, config.train.num_ranks
    meets = "meets the others at a free port of rank 0's host" if num > 1 else "meets nobody"
    found = [PlannedProcess("controller", "samples, scores and composes", (), "asks the others")]
    for rank, it in enumerate(trainers):
        what = f"{train.trainer} worker, rank {rank} of {num}"
        found.append(PlannedProcess(it.name, what, _indices(it), meets, memory.get(it.name, ())))
    members = [member for member in config.servers.members for _ in range(member.count)]
    for it, member in zip(servers, members, strict=True):
        where = "a free port of 127.0.0.1" if member.engine == "local" else "two free ports of 127.0.0.1"
        what = "embedded engine" if member.engine == "local" else f"{member.engine} behind inflight serve"
        found.append(PlannedProcess(it.name, what, _indices(it), where, memory.get(it.name, ())))
    return found


def _indices(it: Place) -> tuple[int, ...]:
    return tuple(device.index for device in it.devices)


def _urls(config: RunConfig) -> tuple[str, ...]:
    listed = None if config.servers.urls_file is None else read_server_list(config.servers.urls_file)[0]
    return (*config.servers.urls, *(listed or {}).values())


def _check_address(config: RunConfig, urls: Sequence[str]) -> None:
    """Raise `ConfigError` if weights cannot reach servers on other machines."""
    servers = config.servers
    if servers.transport in _WITHIN_ONE_MACHINE:
        remedy = "choose 'gloo', 'nccl', 'http' or 'file'"
    elif servers.transport in _CONNECTS_BACK and servers.address.startswith("127."):
        remedy = "set servers.address to the address of this machine as the servers see it"
    else:
        return
    for url in urls:
        if not _is_here(urlsplit(url).hostname or ""):
            raise ConfigError(
                f"{url} is on another machine, which servers.transport {servers.transport!r} at {servers.address} does "
                f"not reach: {remedy}"
            )


def _is_here(host: str) -> bool:
    """Return whether a host is this machine: whether its address can be bound. A name that is not known is not."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


async def _attached(config: RunConfig, urls: Sequence[str]) -> list[PlannedProcess]:
    """Return the servers that run already, and whether each can take part."""
    vocab_size = config_number(config_of(config.model.path), "vocab_size") or 0

    async def ask(url: str) -> PlannedProcess:
        endpoint = connect_endpoint(url, token=os.environ.get("INFLIGHT_TOKEN"), control_timeout_s=_ASK_S)
        try:
            async with asyncio.timeout(_ASK_S):
                can = await check_endpoint(config, vocab_size, endpoint)
                limit = min(can.max_concurrent_sequences, config.servers.max_concurrent)
            address = f"{url} answers, and runs up to {limit} sequences"
        except (TimeoutError, InflightError) as error:
            address = f"{url} cannot take part now: {str(error) or f'no answer within {_ASK_S:g} s'}"
        finally:
            await endpoint.aclose()
        return PlannedProcess(endpoint.name, "runs already", (), address)

    return list(await asyncio.gather(*map(ask, urls)))


def _update(config: RunConfig) -> PlannedUpdate:
    servers = config.servers
    dtype = str(config.train.trainer_options.get("wire_dtype") or config.model.dtype)
    specs = tensor_specs_of(config.model.path, dtype)
    if (lora := config.train.lora) is not None:
        shapes = lora_shapes(lora, config.model.path)
        specs = tuple(TensorSpec.model_validate({"name": n, "dtype": dtype, "shape": s}) for n, s in shapes.items())
    travels = _TRAVELS.get(servers.transport, "by an installed transport")
    if servers.transport not in ON_THE_GPU:
        travels += "; copied from and to GPUs there"
    return PlannedUpdate(
        size_bytes=sum(spec.size_bytes for spec in specs),
        sent_bytes=encoded_size(specs, "raw" if servers.delta else servers.encoding),
        deadline_s=time_limits(config).publish_s,
        num_buckets=len(plan_buckets(specs)),
        transport=servers.transport,
        travels=f"only what changed, {travels}" if servers.delta else travels,
    )


# ---------------------------------------------------------------------------------------------------------------
# Text


def described(plan: Plan) -> str:
    """Return a plan as lines of text."""
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
        lines.append("memory by arithmetic, not measured:")
    alike = itertools.groupby((it for it in plan.processes if it.devices), lambda it: it.memory)
    for terms, group in alike:
        names = [it.name for it in group]
        who = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        lines.append(f"  {who}: {totals(terms)} ({listed(terms) or 'not known'})")
    for use in plan.devices:
        has = gib(use.memory_bytes) if use.memory_bytes else "an unknown amount"
        who = ", ".join(use.processes) or "nobody"
        when = "" if use.phase is None else f" while {use.phase}"
        lines.append(f"  GPU {use.index}: {gib(use.needed_bytes)} of {has}{when} ({who})")
    return "\n".join([*lines, *plan.notes])

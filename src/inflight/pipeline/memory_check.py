"""Whether the processes of a run fit into the memory of their GPUs, by the arithmetic of `inflight.pipeline.memory`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inflight.errors import ConfigError
from inflight.pipeline.config import RunConfig
from inflight.pipeline.devices import Device
from inflight.pipeline.memory import ModelShape, Term, gib, server_terms, trainer_terms
from inflight.pipeline.placement import Placement, gpu_use

KNOWN_WORKERS = ("fsdp", "torchtitan")
"""Workers whose memory is known; that of others is left out."""
Memory = Mapping[str, tuple[Term, ...]]
"""What each process with GPUs needs on each of them, by its name."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What all processes on one GPU need together."""

    index: int
    memory_bytes: int
    needed_bytes: int
    processes: tuple[str, ...]


def memory_of(config: RunConfig, model: ModelShape, placement: Placement) -> Memory:
    """Return what every process with GPUs needs. Raises `ConfigError` if an engine's own settings are too small."""
    of_trainers = trainer_terms(config, model) if config.train.trainer in KNOWN_WORKERS else ()
    memory = {it.name: of_trainers for it in placement.trainers if it.devices}
    members = [member for member in config.servers.members for _ in range(member.count)]
    for it, member in zip(placement.servers, members, strict=True):
        if it.devices:
            memory_bytes = min(device.memory_bytes for device in it.devices)
            memory[it.name] = server_terms(config, member, gpu_use(member), model, memory_bytes)
    return memory


def device_uses(devices: Sequence[Device], placement: Placement, memory: Memory) -> tuple[DeviceUse, ...]:
    """Return what all processes need on each device."""
    uses = []
    for device in devices:
        names = tuple(it.name for it in placement.placed if device in it.devices)
        needed = sum(total(memory[name]) for name in names)
        uses.append(DeviceUse(device.index, device.memory_bytes, needed, names))
    return tuple(uses)


def check_fits(uses: Sequence[DeviceUse], memory: Memory) -> None:
    """Raise `ConfigError` if a device has too little memory; it says how much, and what would help."""
    for use in uses:
        if use.memory_bytes and use.needed_bytes > use.memory_bytes:
            raise ConfigError(_too_little(use, memory))


def _too_little(use: DeviceUse, memory: Memory) -> str:
    parts = [f"{name}: {listed(memory[name])}" for name in use.processes]
    terms = [term for name in use.processes for term in memory[name] if term.remedy]
    largest = sorted(terms, key=lambda term: -term.size_bytes)[:3]
    remedies = list(dict.fromkeys(term.remedy for term in largest))
    if len(use.processes) > 1:
        remedies.append(
            "give the processes GPUs of their own (the memory of an engine is not released while the trainer works)"
        )
    return (
        f"by arithmetic, GPU {use.index} needs {gib(use.needed_bytes)} but has {gib(use.memory_bytes)}, "
        f"{gib(use.needed_bytes - use.memory_bytes)} too little ({'; '.join(parts)}): {'; or '.join(remedies)}"
    )


def total(terms: Sequence[Term]) -> int:
    """Return the bytes of all terms."""
    return sum(term.size_bytes for term in terms)


def listed(terms: Sequence[Term]) -> str:
    """Return terms as people read them."""
    return ", ".join(f"{term.name} {gib(term.size_bytes)}" for term in terms)

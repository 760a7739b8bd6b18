"""Whether the processes of a run fit into the memory of their GPUs, by arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from inflight.contracts import MemoryTerm
from inflight.contracts.trainer import Phase
from inflight.errors import ConfigError
from inflight.model.shapes import ModelShape
from inflight.run.config import RunConfig
from inflight.run.machines.devices import Device
from inflight.run.machines.memory import PHASES, gib, server_terms, trainer_terms
from inflight.run.machines.placement import Placement, gpu_use

Memory = Mapping[str, tuple[MemoryTerm, ...]]
"""What each process with GPUs needs on each of them, by its name."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What all processes on one GPU need together."""

    index: int
    memory_bytes: int
    needed_bytes: int
    """In the phase that needs more, where trainers and servers take turns."""
    processes: tuple[str, ...]
    phase: Phase | None = None
    """That phase; None if all of it is needed all the time."""


def memory_of(config: RunConfig, model: ModelShape, placement: Placement) -> Memory:
    """Return what every process with GPUs needs. Raises `ConfigError` if an engine's own settings are too small."""
    of_trainers = trainer_terms(config) if any(it.devices for it in placement.trainers) else ()
    memory = {it.name: of_trainers for it in placement.trainers if it.devices}
    for it, member in zip(placement.servers, config.servers.started, strict=True):
        if it.devices:
            memory_bytes = min(device.memory_bytes for device in it.devices)
            memory[it.name] = server_terms(config, member, gpu_use(member), model, memory_bytes)
    return memory


def device_uses(devices: Sequence[Device], placement: Placement, memory: Memory) -> tuple[DeviceUse, ...]:
    """Return what all processes need on each device."""
    uses = []
    for device in devices:
        names = tuple(it.name for it in placement.placed if device in it.devices)
        terms = [term for name in names for term in memory[name]]
        phase = max(PHASES, key=lambda phase: total(terms, phase)) if any(term.phase for term in terms) else None
        uses.append(DeviceUse(device.index, device.memory_bytes, total(terms, phase), names, phase))
    return tuple(uses)


def check_fits(uses: Sequence[DeviceUse], memory: Memory) -> None:
    """Raise `ConfigError` if a device has too little memory; it says how much, and what would help."""
    for use in uses:
        if use.memory_bytes and use.needed_bytes > use.memory_bytes:
            raise ConfigError(_too_little(use, memory))


def _too_little(use: DeviceUse, memory: Memory) -> str:
    needed = {name: [term for term in memory[name] if term.phase in (None, use.phase)] for name in use.processes}
    parts = [f"{name}: {listed(terms)}" for name, terms in needed.items()]
    terms = [term for it in needed.values() for term in it if term.remedy]
    largest = sorted(terms, key=lambda term: -term.size_bytes)[:3]
    remedies = list(dict.fromkeys(term.remedy for term in largest))
    if len(use.processes) > 1:
        remedies.append("give the processes GPUs of their own")
        if use.phase is None:
            remedies.append("set run.mode = 'conventional' and servers.release_memory = true, so that they take turns")
    when = "" if use.phase is None else f" while {use.phase}"
    return (
        f"by arithmetic, GPU {use.index} needs {gib(use.needed_bytes)}{when} but has {gib(use.memory_bytes)}, "
        f"{gib(use.needed_bytes - use.memory_bytes)} too little ({'; '.join(parts)}): {'; or '.join(remedies)}"
    )


def total(terms: Iterable[MemoryTerm], phase: Phase | None) -> int:
    """Return the bytes of the terms of a phase, with those that are needed all the time."""
    return sum(term.size_bytes for term in terms if term.phase in (None, phase))


def totals(terms: Sequence[MemoryTerm]) -> str:
    """Return what terms need together as people read it, by phases if it depends on them."""
    if not any(term.phase for term in terms):
        return f"{gib(total(terms, None))} on each GPU"
    each = [f"{gib(total(terms, phase))} while {phase}" for phase in PHASES]
    return f"on each GPU {', '.join(each)}"


def listed(terms: Sequence[MemoryTerm]) -> str:
    """Return terms as people read them."""
    return ", ".join(f"{term.name} {gib(term.size_bytes)}" for term in terms)

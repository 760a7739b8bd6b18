"""Assigns GPUs to the trainer ranks and servers of a run.

Trainer ranks get one GPU each. Then each server, in order, receives as many GPUs as its engine uses. The configuration
may name GPUs instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from inflight.contracts import GpuUse
from inflight.errors import ConfigError
from inflight.run.config import RunConfig
from inflight.run.fleet_config import ServerGroupSection
from inflight.run.machines.devices import Device


@dataclass(frozen=True, slots=True)
class GpuPlacement:
    """One process of a run and its GPUs; it has none if it computes on the CPU."""

    name: str
    role: Literal["trainer", "server"]
    devices: tuple[Device, ...] = ()
    num_gpus: int = 0
    """Number of GPUs that the launcher assigns, on a host of its choice."""

    @property
    def has_gpu(self) -> bool:
        return bool(self.devices or self.num_gpus)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that restrict the process to its devices, numbered from 0."""
        if not self.devices:
            return {}
        # Without the order, CUDA counts the fastest GPU first and nvidia-smi does not.
        names = ",".join(device.cuda_name for device in self.devices)
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": names}

    def __str__(self) -> str:
        if self.num_gpus:
            return f"{self.name} on {self.num_gpus} GPU{'s' * (self.num_gpus > 1)} chosen by the launcher"
        return f"{self.name} on GPU {', '.join(str(device.index) for device in self.devices)}"


@dataclass(frozen=True, slots=True)
class Placement:
    """Every process that a run starts."""

    trainers: tuple[GpuPlacement, ...]
    servers: tuple[GpuPlacement, ...]

    def __iter__(self) -> Iterator[GpuPlacement]:
        yield from self.trainers
        yield from self.servers

    @property
    def placed(self) -> tuple[GpuPlacement, ...]:
        """Processes with GPUs."""
        return tuple(place for place in self if place.has_gpu)


def place(config: RunConfig, devices: Sequence[Device]) -> Placement:
    """Return the GPUs of each process of a run, on a machine with these devices.

    Raises `ConfigError` if there are too few, or if processes would share a device that cannot be shared.
    """
    servers = config.servers
    wanted = [
        _Wanted(f"trainer-{rank}", "trainer", 1, explicit) for rank, explicit in enumerate(_trainer_devices(config))
    ]
    if not wants_gpu(config.train.device):
        wanted = [_Wanted(it.name, it.role, 0) for it in wanted]
    if devices and servers.scaling is not None and wants_gpu(servers.device):
        raise ConfigError(
            "servers.scaling starts servers on GPUs that a launcher chooses, and run.launcher 'local' chooses none: "
            "use launcher 'ray', or set servers.device to 'cpu'"
        )
    if servers.device is not None and ":" in servers.device:
        raise ConfigError(
            f"servers.device {servers.device!r} names one GPU for all servers: write 'cuda', and list the GPUs of "
            "each server in servers.devices"
        )
    for member in servers.members:
        if member.devices is not None and not wants_gpu(servers.device):
            raise ConfigError(
                f"servers.devices names GPUs, but the servers compute on {servers.device!r}: omit the devices, or "
                "change servers.device"
            )
        num_devices = gpu_use(member).num_gpus if devices and wants_gpu(servers.device) else 0
        for explicit in _server_devices(member, num_devices):
            index = len(wanted) - config.train.num_ranks
            wanted.append(_Wanted(server_name(index, member), "server", num_devices, explicit))
    if not devices:
        if configured := [it.name for it in wanted if it.explicit]:
            raise ConfigError(
                f"the configuration names GPUs for {configured[0]}, but this run sees none: nvidia-smi lists none, or "
                "CUDA_VISIBLE_DEVICES hides them. Leave out train.devices and servers.devices"
            )
        wanted = [_Wanted(it.name, it.role, 0) for it in wanted]
    places = _assign_devices(wanted, devices, shares=servers.colocated)
    _check_sharing(places, config)
    if servers.release_memory:
        _check_releases(places[config.train.num_ranks :], config)
    num_ranks = config.train.num_ranks
    return Placement(tuple(places[:num_ranks]), tuple(places[num_ranks:]))


def place_extra(name: str, config: RunConfig, member: ServerGroupSection, num_gpus: int | None) -> GpuPlacement:
    """Return the placement of a server that is started during the run.

    ``num_gpus`` has the same meaning as in `Launcher`.
    """
    on_gpu = bool(num_gpus) and wants_gpu(config.servers.device)
    return GpuPlacement(name, "server", (), gpu_use(member).num_gpus if on_gpu else 0)


def place_elsewhere(config: RunConfig, num_gpus: int) -> Placement:
    """Return the placement of the processes of a run whose launcher chooses hosts and GPUs.

    ``num_gpus`` counts the GPUs of all hosts. Raises `ConfigError` if there are too few, or if the configuration names
    GPUs by index, which is only possible on one host.
    """
    servers = config.servers
    if config.train.devices is not None or any(member.devices is not None for member in servers.members):
        raise ConfigError(
            "train.devices and servers.devices are indices of GPUs on one machine, but run.launcher "
            f"{config.run.launcher!r} chooses among hosts: omit both settings"
        )
    if servers.colocated:
        raise ConfigError(
            f"servers.colocated shares the GPUs of one machine, but run.launcher {config.run.launcher!r} gives each "
            "process its own: omit this setting"
        )
    on_gpu = bool(num_gpus) and wants_gpu(config.train.device)
    trainers = [GpuPlacement(f"trainer-{rank}", "trainer", (), int(on_gpu)) for rank in range(config.train.num_ranks)]
    serves_on_gpu = bool(num_gpus) and wants_gpu(servers.device)
    placed = [
        GpuPlacement(server_name(index, member), "server", (), gpu_use(member).num_gpus if serves_on_gpu else 0)
        for index, member in enumerate(servers.started)
    ]
    if (needed := sum(place.num_gpus for place in (*trainers, *placed))) > num_gpus:
        raise ConfigError(
            f"the run needs {needed} GPUs, but the hosts of run.launcher {config.run.launcher!r} have {num_gpus}: add "
            "hosts, lower train.num_ranks or servers.count, or set train.device or servers.device to 'cpu'"
        )
    return Placement(tuple(trainers), tuple(placed))


def server_name(index: int, member: ServerGroupSection) -> str:
    """Return the name of a server that a run starts; it includes the engine if that is a separate process."""
    return f"server-{index}" if member.kind.runs_in_process else f"server-{index}-{member.engine}"


def gpu_use(member: ServerGroupSection) -> GpuUse:
    """Return the GPUs that one server of a fleet member uses. Raises `ConfigError` for an unknown engine."""
    return member.kind.gpu_use(member.engine_arguments)


def wants_gpu(device: str | None) -> bool:
    """Return whether a process with this configured device computes on a GPU if there is one."""
    return device is None or device.startswith("cuda")


def uses_gpus(config: RunConfig) -> bool:
    """Return whether any process that the run starts computes on a GPU if there is one."""
    return wants_gpu(config.train.device) or (bool(config.servers.members) and wants_gpu(config.servers.device))


# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wanted:
    name: str
    role: Literal["trainer", "server"]
    num_devices: int
    explicit: tuple[int, ...] = ()
    """The indices that the configuration names; empty if any free GPUs will do."""


def _trainer_devices(config: RunConfig) -> list[tuple[int, ...]]:
    """Return the configured devices of each rank."""
    train = config.train
    if train.devices is None:
        return [()] * train.num_ranks
    if not wants_gpu(config.train.device):
        raise ConfigError(
            f"train.devices names GPUs, but the trainers compute on {config.train.device!r}: omit the devices, or "
            "change train.device"
        )
    if len(train.devices) != train.num_ranks:
        raise ConfigError(
            f"train.devices names {len(train.devices)} GPUs for {train.num_ranks} trainer ranks (train.num_ranks): "
            "name one for each rank"
        )
    return [(index,) for index in train.devices]


def _server_devices(member: ServerGroupSection, num_devices: int) -> list[tuple[int, ...]]:
    """Return the configured devices of each server of a member."""
    given = member.devices
    if given is None or not num_devices:
        return [given or ()] * member.count
    if len(given) != member.count * num_devices:
        raise ConfigError(
            f"devices {list(given)} of the {member.engine} servers names {len(given)} GPUs, but count {member.count} "
            f"with {num_devices} per server needs {member.count * num_devices}"
        )
    return [given[i * num_devices : (i + 1) * num_devices] for i in range(member.count)]


def _assign_devices(wanted: Sequence[_Wanted], devices: Sequence[Device], *, shares: bool) -> list[GpuPlacement]:
    """Return the devices of each process: the devices that the configuration names, or else free ones in order.

    With ``shares``, a server takes devices that no other server has, even if a trainer has them.
    """
    for it in wanted:
        if unknown := [index for index in it.explicit if index >= len(devices)]:
            raise ConfigError(
                f"{it.name} is assigned GPU {unknown[0]}, but the run sees {len(devices)}, numbered from 0: correct "
                "train.devices or the servers' devices"
            )
    taken = {"trainer": {i for it in wanted if it.role == "trainer" for i in it.explicit}}
    taken["server"] = {i for it in wanted if it.role == "server" for i in it.explicit}
    places = []
    for it in wanted:
        others = taken[it.role] if shares else taken["trainer"] | taken["server"]
        free = [device.index for device in devices if device.index not in others]
        chosen = it.explicit if it.explicit and it.num_devices else tuple(free[: it.num_devices])
        if len(chosen) < it.num_devices:
            raise ConfigError(_shortage(wanted, len(devices), shares=shares))
        taken[it.role] |= set(chosen)
        places.append(GpuPlacement(it.name, it.role, tuple(devices[index] for index in chosen)))
    return places


def _shortage(wanted: Sequence[_Wanted], num_devices: int, *, shares: bool) -> str:
    ranks = sum(it.num_devices for it in wanted if it.role == "trainer")
    on_servers = [it for it in wanted if it.role == "server" and it.num_devices]
    servers = sum(it.num_devices for it in on_servers)
    needed = max(ranks, servers) if shares else ranks + servers
    parts = [f"{ranks} for trainer ranks"] if ranks else []
    parts += [f"{it.num_devices} for {it.name}" for it in on_servers]
    remedies = ["lower train.num_ranks, servers.count or the engines' tensor-parallel sizes"]
    remedies += [] if shares else ["set servers.colocated = true to let servers share the trainers' GPUs"]
    remedies += ["set train.device or servers.device to 'cpu'"]
    return f"the run needs {needed} GPUs ({', '.join(parts)}) but sees {num_devices}: {', or '.join(remedies)}"


def _check_releases(servers: Sequence[GpuPlacement], config: RunConfig) -> None:
    """Raise `ConfigError` if a server that must release its memory computes on the CPU."""
    for it, member in zip(servers, config.servers.started, strict=True):
        if member.kind.releases_memory == "on_gpu" and not it.devices:
            raise ConfigError(
                f"{it.name} computes on the CPU, but {member.engine} can release only GPU memory: leave out "
                "servers.release_memory"
            )


def _check_sharing(places: Sequence[GpuPlacement], config: RunConfig) -> None:
    """Raise `ConfigError` if two processes share a device without permission."""
    on: dict[int, list[GpuPlacement]] = {}
    for it in places:
        for device in it.devices:
            on.setdefault(device.index, []).append(it)
    for index, sharing in on.items():
        if len(sharing) < 2:
            continue
        names = " and ".join(it.name for it in sharing)
        if len(set(sharing)) < len(sharing):
            raise ConfigError(f"GPU {index} is listed twice for {sharing[0].name}: list different GPUs")
        if sum(it.role == "trainer" for it in sharing) > 1:
            raise ConfigError(f"{names} share GPU {index}, which NCCL refuses: give each rank its own in train.devices")
        if not config.servers.colocated:
            raise ConfigError(
                f"{names} share GPU {index}: name different GPUs, or set servers.colocated = true if both fit into "
                "its memory at the same time"
            )
        in_weight_group = [it for it in sharing if it.role == "server" or it.name == "trainer-0"]
        if config.updates.transport == "nccl" and len(in_weight_group) > 1:
            raise ConfigError(
                f"{names} share GPU {index}, but updates.transport 'nccl' cannot send from a GPU to itself: choose "
                "another transport, such as 'shm'"
            )

"""The plan of a run for schedulers of jobs: which processes there are, with which commands and how many GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from inflight.errors import ConfigError
from inflight.launchers.plan import JOIN_PORT, MEET_PORT, Gang, Plan
from inflight.run.config import FleetMember, RunConfig
from inflight.run.machines.placement import gpu_use, wants_gpu


def plan_of(config: RunConfig, path: Path, overrides: Sequence[str] = ()) -> Plan:
    """Return the processes of the run that a file and overrides describe, so that each finds the others by itself.

    Processes are given GPUs unless the configuration says ``cpu``. Raises `ConfigError` for what only one machine has.
    """
    servers, train = config.servers, config.train
    if servers.urls or servers.others_may_come:
        raise ConfigError(
            "the emitted servers join the run by themselves: leave out servers.urls, servers.urls_file and servers.join"
        )
    if servers.colocated or servers.transport in ("shm", "ipc"):
        raise ConfigError(
            "servers.colocated and the transports 'shm' and 'ipc' need servers and trainers on one machine: leave them "
            "out, and set servers.transport to 'gloo' or 'nccl'"
        )
    options = f"{{ port = {MEET_PORT} }}"
    controller = ["inflight", "train", str(path), "--launcher", "outside", "--run.launcher_options", options]
    controller += ["--servers.join", f"0.0.0.0:{JOIN_PORT}", "--resume-if-begun", *overrides]
    on_gpu = wants_gpu(train.device)
    ranks = Gang(
        "trainers",
        train.num_ranks,
        ["python", "-m", "inflight.run.ranks.rank"],
        train.threads,
        int(on_gpu),
        are_ranks=True,
    )
    serving = [_servers(config, index, member) for index, member in enumerate(servers.members)]
    name = config.run.directory.name or "inflight"
    return Plan(name, Gang("controller", 1, controller, 1, 0), (ranks, *serving))


def _servers(config: RunConfig, index: int, member: FleetMember) -> Gang:
    servers = config.servers
    command = ["inflight", "serve", str(config.model.path), "--port", "0", "--name", config.model.path.name]
    command += ["--dtype", config.model.dtype, "--max-concurrent", str(member.max_concurrent)]
    command += ["--threads", str(servers.threads), "--join", f"http://{{head}}:{JOIN_PORT}"]
    if servers.device is not None:
        command += ["--device", servers.device]
    if member.engine != "local":
        command += ["--engine", member.engine, *(f"--engine-arg={argument}" for argument in member.engine_arguments)]
        command += [] if member.python is None else ["--python", str(member.python)]
    num_gpus = gpu_use(member).num_gpus if wants_gpu(servers.device) else 0
    return Gang(f"servers-{index}", member.count, command, servers.threads, num_gpus)

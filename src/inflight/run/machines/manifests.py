"""The manifest of a run for job schedulers: its processes, their commands, and their GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from inflight.errors import ConfigError
from inflight.http.server_spec import JoinOptions, ListenOptions
from inflight.launchers.plan import JOIN_PORT, MEET_PORT, Gang, JobPlan
from inflight.run.config import RunConfig
from inflight.run.fleet_config import ServerGroupSection
from inflight.run.machines.placement import gpu_use, wants_gpu
from inflight.run.machines.server_specs import server_spec


def plan_of(config: RunConfig, path: Path, overrides: Sequence[str] = ()) -> JobPlan:
    """Return the processes of the run that a file and overrides describe, and what each needs to find the others.

    Processes use GPUs unless the configuration specifies ``cpu``. Raises `ConfigError` for settings that apply to a
    single machine only.
    """
    servers, train = config.servers, config.train
    if servers.attach.urls or servers.attach.others_may_come:
        raise ConfigError(
            "the emitted servers join the run by themselves: leave out servers.attach.urls, urls_file and join"
        )
    if servers.colocated or config.updates.transport in ("shm", "ipc"):
        raise ConfigError(
            "servers.colocated and the transports 'shm' and 'ipc' need servers and trainers on one machine: leave them "
            "out, and set updates.transport to 'gloo' or 'nccl'"
        )
    options = f"{{ port = {MEET_PORT} }}"
    controller = ["inflight", "train", str(path), "--launcher", "outside", "--run.launcher_options", options]
    controller += ["--servers.attach.join", f"0.0.0.0:{JOIN_PORT}", "--resume-if-begun", *overrides]
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
    return JobPlan(name, Gang("controller", 1, controller, 1, 0), (ranks, *serving))


def _servers(config: RunConfig, index: int, member: ServerGroupSection) -> Gang:
    servers = config.servers
    joining = JoinOptions(f"http://{{head}}:{JOIN_PORT}")
    spec = replace(server_spec(config, member), listen=ListenOptions(port=0), joining=joining)
    num_gpus = gpu_use(member).num_gpus if wants_gpu(servers.device) else 0
    return Gang(f"servers-{index}", member.count, ["inflight", "serve", *spec.to_argv()], servers.threads, num_gpus)

"""Checks everything about a run that can be checked before a process starts, for ``train`` and ``--dry-run``."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from inflight.contracts import Environment, Task
from inflight.errors import ConfigError
from inflight.http.kinds import connect_endpoint
from inflight.http.listening import bind
from inflight.launchers import Launcher
from inflight.model.checkpoint_specs import tensor_specs_of
from inflight.model.checkpoints import check_weights, load_config, load_tokenizer, max_model_len_of
from inflight.model.images import ImageProcessor, load_image_processor
from inflight.model.shapes import model_shape
from inflight.observe.trackers import Tracker, load_trackers
from inflight.rollouts import EssGuard, HistoryStore, load_composer, load_scheduler, load_staleness
from inflight.rollouts.mixture import task_names
from inflight.run.config import RunConfig
from inflight.run.machines.devices import Device, devices_here, num_cores_here
from inflight.run.machines.memory import DeviceUse, Memory, check_fits, device_uses, host_memory_of, memory_of
from inflight.run.machines.placement import Placement, place, place_elsewhere, uses_gpus
from inflight.run.machines.time_limits import TimeLimits, time_limits
from inflight.run.model_defaults import with_model_defaults
from inflight.run.ranks.workers import check_lora
from inflight.run.record.checkpoints import offer_intact_checkpoint
from inflight.run.record.run_directory import RunDirectory, StartingPoint, starting_point
from inflight.run.sampling.groups import check_system_prompt, check_task
from inflight.run.sampling.policies import Policies
from inflight.run.sampling.teachers import short_context
from inflight.run.servers.checks import check_servers, read_server_list
from inflight.run.servers.joining import host_and_port
from inflight.wire import TensorSpec

_CONNECTS_BACK = ("gloo", "nccl", "http")
"""Transports for which servers connect to the address of trainer rank 0."""
_WITHIN_ONE_MACHINE = ("shm", "ipc")


@dataclass(frozen=True, slots=True)
class Hosts:
    """What a launcher reports about the hosts on which it starts processes."""

    address: str
    port: int
    num_gpus: int | None
    """The number of GPUs of all hosts; None if processes run on this machine, where the run itself assigns the GPUs."""
    can_outlive: bool


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The contents of a model directory, without the weights."""

    vocab_size: int
    tokenizer: Any
    images: ImageProcessor | None
    """The model's image processor; None if it accepts no images."""
    specs: tuple[TensorSpec, ...]
    """Names and shapes of the stored tensors."""
    context: int
    """The maximum number of tokens in a sequence."""


def hosts_of(launcher: Launcher) -> Hosts:
    """Return the hosts that a launcher reports."""
    return Hosts(launcher.address, launcher.port, launcher.num_gpus, launcher.can_outlive)


def read_model(path: Path) -> ModelFiles:
    """Return the contents of a model directory, after checking the headers of its weights. Raises `ConfigError`."""
    check_weights(path)
    tokenizer = load_tokenizer(path)
    if tokenizer is None:
        raise ConfigError(f"model directory {str(path)!r} has no tokenizer")
    return ModelFiles(
        vocab_size=int(load_config(path).get_text_config().vocab_size),
        tokenizer=tokenizer,
        images=load_image_processor(path),
        specs=tensor_specs_of(path, "float32"),
        context=max_model_len_of(load_config(path)),
    )


def check_port(host: str, port: int, remedy: str) -> None:
    """Raise `ConfigError`, with a remedy, if this process cannot listen at an address."""
    bind(host, port, remedy, listens=False).close()  # clients that wait for the run must not connect yet


def is_this_machine(host: str) -> bool:
    """Return whether a host name refers to this machine; False if the name is unknown."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Machine:
    """The environment of `preflight`: the hosts of the launcher, and functions that query files and this machine."""

    hosts: Hosts
    devices: Callable[[], Sequence[Device]] = devices_here
    num_cores: Callable[[], int] = num_cores_here
    read_model: Callable[[Path], ModelFiles] = read_model
    check_weights: Callable[[Path], None] = check_weights
    check_port: Callable[[str, int, str], None] = check_port
    is_this_machine: Callable[[str], bool] = is_this_machine
    starting_point: Callable[[Path, bool], StartingPoint] = lambda path, resume: starting_point(path, resume=resume)

    def held_by(self, directory: RunDirectory) -> Machine:
        """Return this machine as seen by a run that already owns its directory and ports, and restarts its ranks."""
        start = StartingPoint(directory.checkpoint, directory.state)
        return replace(self, check_port=lambda *_: None, starting_point=lambda *_: start)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The checked parts from which a run is constructed."""

    config: RunConfig
    model: ModelFiles
    task: Task | Environment
    policies: Policies
    trackers: Mapping[str, Tracker]
    placement: Placement
    devices: tuple[Device, ...]
    """The GPUs of this machine; empty if no process uses one, or if a launcher chooses among hosts."""
    memory: Memory
    """The memory that each process needs on each of its GPUs, by process name."""
    host_memory: Memory
    """The memory that each process needs on this host; empty if processes run on other hosts."""
    uses: tuple[DeviceUse, ...]
    limits: TimeLimits
    attached: tuple[str, ...]
    """URLs of the servers that are already running."""
    defaults: tuple[str, ...]
    """One line for each setting whose value was chosen according to the size of the model."""

    @property
    def longest_sequence(self) -> int:
        """The maximum number of tokens in a prompt and its completion together."""
        return _longest_sequence(self.config, self.model)


def preflight(config: RunConfig, machine: Machine, *, resume: bool = False) -> Prepared:
    """Return the checked parts of a run.

    This starts no process, writes no file and leaves no port bound. Raises `ConfigError` for any problem that can be
    found before processes start.
    """
    check_servers(config.servers)
    check_lora(config)
    _check_launcher(config, machine.hosts)
    is_local = machine.hosts.num_gpus is None
    devices = tuple(machine.devices()) if is_local and uses_gpus(config) else ()
    placement = place(config, devices) if is_local else place_elsewhere(config, machine.hosts.num_gpus or 0)
    memory: Memory = {}
    if devices:
        memory = memory_of(config, model_shape(config.model.path), placement)
    uses = device_uses(devices, placement, memory)
    check_fits(uses, memory)
    config.loss.policy_loss()
    task = config.task.load(config.run.seed)
    check_task(config, task)
    policies = _policies_of(config)
    trackers = load_trackers(config.run.trackers, config.run.tracker_options)
    model = machine.read_model(config.model.path)
    _check_teachers(config, task, model, machine)
    shape = model_shape(config.model.path)
    computes_here = is_local and not any(rank.has_gpu for rank in placement.trainers)
    num_cores = max(1, machine.num_cores() // config.train.num_ranks) if computes_here else 1
    config, defaults = with_model_defaults(config, shape.num_elements, num_cores)
    host_memory = host_memory_of(config, shape, placement) if is_local else {}
    check_system_prompt(config, model.tokenizer)
    attached = _attached(config)
    _check_reach(config, machine, attached)
    for host, port, remedy in _addresses(config, machine.hosts):
        machine.check_port(host, port, remedy)
    start = machine.starting_point(config.run.directory, resume)
    if start.checkpoint is not None:
        with offer_intact_checkpoint(config.run.directory, start.checkpoint):
            machine.check_weights(start.checkpoint)
    return Prepared(
        config,
        model,
        task,
        policies,
        trackers,
        placement,
        devices,
        memory,
        host_memory,
        uses,
        time_limits(config),
        attached,
        defaults,
    )


def _longest_sequence(config: RunConfig, model: ModelFiles) -> int:
    return min(model.context, config.train.max_tokens_per_micro_batch)


def _check_teachers(config: RunConfig, task: Task | Environment, model: ModelFiles, machine: Machine) -> None:
    """Raise `ConfigError` unless the loss uses the teachers and each task has a teacher with the model's vocabulary."""
    distillation, tasks = config.distillation, task_names(task)
    taught = config.loss.policy_loss().needs & {"teacher_logprobs", "teacher_top"}
    if not distillation.teachers:
        if taught:
            raise ConfigError("the loss needs a teacher, but none is configured: set distillation.teachers")
        return
    if not taught:
        raise ConfigError(
            "distillation.teachers is set, but the loss does not use teachers: choose a loss.preset such as 'opd'"
        )
    if "teacher_top" in taught and any(teacher.url is None for teacher in distillation.teachers):
        raise ConfigError(
            "the loss needs the most likely tokens of the teachers, which only a server returns: give each teacher a "
            "url instead of a path"
        )
    if "teacher_top" in taught and not distillation.top_k:
        raise ConfigError("the loss needs the most likely tokens of the teachers: set distillation.top_k")
    if config.sampling.temperature != 1.0 and any(teacher.url is not None for teacher in distillation.teachers):
        raise ConfigError(
            f"servers score at temperature 1, but sampling.temperature is {config.sampling.temperature}: set it to 1, "
            "or give the teachers a path instead of a url"
        )
    if unknown := distillation.unknown_tasks(tasks):
        raise ConfigError(
            f"distillation.teachers names task {unknown[0]!r}, but the tasks of the run are "
            f"{', '.join(map(repr, tasks))}: use one of them, or omit tasks"
        )
    scoring = {distillation.teacher_of(task) for task in tasks}
    if idle := [index for index in range(len(distillation.teachers)) if index not in scoring]:
        raise ConfigError(f"distillation.teachers[{idle[0]}] scores no task: other teachers name all of them")
    if without := distillation.tasks_without_teacher(tasks):
        raise ConfigError(f"no teacher scores task {without[0]!r}: add it to the tasks of a teacher")
    for teacher in distillation.teachers:
        if teacher.url is not None:
            connect_endpoint(teacher.url)  # checks the URL without contacting the server
        if teacher.path is None:
            continue
        theirs = machine.read_model(teacher.path)
        if theirs.vocab_size != model.vocab_size or theirs.tokenizer.get_vocab() != model.tokenizer.get_vocab():
            raise ConfigError(
                f"teacher {str(teacher.path)!r} has a different vocabulary ({theirs.vocab_size} tokens) from "
                f"{str(config.model.path)!r} ({model.vocab_size}): its token ids would stand for other tokens"
            )
        if theirs.context < _longest_sequence(config, model):
            raise ConfigError(short_context(repr(str(teacher.path)), theirs.context, _longest_sequence(config, model)))


def _policies_of(config: RunConfig) -> Policies:
    rollouts, history = config.rollouts, HistoryStore()
    staleness = load_staleness(rollouts.staleness, rollouts.staleness_params, rollouts.max_lag)
    if rollouts.min_ess is not None:
        staleness = EssGuard(staleness, rollouts.min_ess, stops=rollouts.on_low_ess == "stop")
    composer = load_composer(rollouts.composer, rollouts.composer_params, config.tokens_per_step)
    scheduler = load_scheduler(
        rollouts.scheduler,
        rollouts.scheduler_params,
        group_size=config.sampling.group_size + config.task.extra_episodes,
        history=history,
        seed=config.run.seed,
    )
    return Policies(scheduler, staleness, composer, history)


def _check_launcher(config: RunConfig, hosts: Hosts) -> None:
    """Raise `ConfigError` if the configuration needs something that the launcher does not support."""
    if hosts.port and not config.servers.attach.others_may_come:
        raise ConfigError(
            f"launcher {config.run.launcher!r} starts no servers: set servers.attach.join, where servers can join"
        )
    if config.servers.lease_s and not hosts.can_outlive:
        raise ConfigError(
            f"servers.lease_s lets servers outlive the run, but the servers of launcher {config.run.launcher!r} "
            "cannot: omit the lease, or use launcher 'local'"
        )


def _addresses(config: RunConfig, hosts: Hosts) -> list[tuple[str, int, str]]:
    """Return the host and port of each address at which the run listens, with a remedy in case the address is taken."""
    found = []
    if (port := config.run.metrics_port) is not None:
        found.append(("127.0.0.1", port, "choose another run.metrics_port, or 0 for any"))
    if (at := config.servers.attach.join) is not None:
        found.append((*host_and_port(at), "choose another address for servers.attach.join"))
    if hosts.port:
        found.append((hosts.address, hosts.port, "choose another port in run.launcher_options"))
    return found


def _attached(config: RunConfig) -> tuple[str, ...]:
    """Return the URLs of running servers, from the configuration and from the file of servers."""
    attach = config.servers.attach
    listed = None if attach.urls_file is None else read_server_list(attach.urls_file)[0]
    return (*attach.urls, *(listed or {}).values())


def _check_reach(config: RunConfig, machine: Machine, urls: Sequence[str]) -> None:
    """Raise `ConfigError` if weights cannot be sent from the trainers on this host to servers elsewhere."""
    updates = config.updates
    if machine.hosts.num_gpus is not None:
        return
    if updates.transport in _WITHIN_ONE_MACHINE:
        remedy = "choose 'gloo', 'nccl', 'http' or 'file'"
    elif updates.transport in _CONNECTS_BACK and updates.address.startswith("127."):
        remedy = "set updates.address to the address at which the servers reach this machine"
    else:
        return
    for url in urls:
        if not machine.is_this_machine(urlsplit(url).hostname or ""):
            raise ConfigError(
                f"{url} is on another machine, which updates.transport {updates.transport!r} at {updates.address} does "
                f"not reach: {remedy}"
            )

"""Runs processes on the hosts of a Ray cluster. This is the only module that depends on Ray.

Each process has a bundle of a placement group, in which an actor runs. The actor only starts the process, with the
interpreter that the process's command names, and watches it. Only commands, exit statuses and the last lines of logs
pass through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from inflight.base.tasks import cancel_and_wait, run_together, start
from inflight.errors import ConfigError
from inflight.launchers import watcher
from inflight.launchers.launcher import ADDRESS_VARIABLE, Launched, Launcher, ProcessEnd, Program

_FORWARDED = (
    "PYTHONPATH", "INFLIGHT_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH_", "NCCL_", "GLOO_", "VLLM_", "SGLANG_",
)  # fmt: skip
"""Prefixes of the environment variables that are passed to processes on other hosts."""
_ANSWER_S = 60.0
"""How long, in seconds, an actor may take to answer a call that does not block."""
_OWN_CPUS = 0.01
"""CPUs that a process reserves on a local cluster that was started for this run. Processes may therefore outnumber the
cores, as they may without Ray.
"""
_LOOK_S = 0.5
"""How long a thread waits for free resources before it checks whether the wait was cancelled."""
_MAX_CAUSE = 300


class RayLauncher(Launcher):
    """Starts processes on a Ray cluster.

    ``address`` is the address of the cluster. If it is None, the cluster is the one in RAY_ADDRESS, one that is running
    on this machine, or a new one on this machine that ends with this process. A ``place`` is the address of a host, or
    a custom resource of one or more hosts. Raises `ConfigError` if the cluster does not answer.
    """

    def __init__(self, address: str | None = None) -> None:
        import ray

        self._ray = ray
        self._is_own_cluster = False
        self._places: dict[str, str] = {}
        """The resource of each place that was requested."""
        wanted = address or os.environ.get("RAY_ADDRESS")
        try:
            self._connect(wanted or "auto")
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            if wanted is not None:
                raise ConfigError(
                    f"no Ray cluster answers at {wanted!r} ({_in_short(error)}): correct run.launcher_options.address "
                    "or RAY_ADDRESS, or leave both out to start one here"
                ) from error
            self._is_own_cluster = True
            self._connect("local")
        ray.cloudpickle.register_pickle_by_value(watcher)  # the Python environment of Ray may lack inflight
        self._address = str(ray.util.get_node_ip_address())

    @property
    def address(self) -> str:
        return self._address

    @property
    def num_gpus(self) -> int | None:
        return int(self._ray.cluster_resources().get("GPU", 0))

    @property
    def can_outlive(self) -> bool:
        return False  # actors and their processes end with the job that created them

    async def start(self, programs: Sequence[Program], timeout_s: float) -> Sequence[Launched]:
        """Reserve resources for all programs at once, on as few hosts as possible, and then start them."""
        bundles = [self._bundle(program) for program in programs]
        group = self._ray.util.placement_group(bundles, strategy="PACK")
        room = _PlacementGroup(self._ray, group, len(programs))
        launched: list[_Actor] = []
        deadline = time.monotonic() + timeout_s
        try:
            await self._wait_for(group, programs, bundles, timeout_s)
            for index, program in enumerate(programs):
                launched.append(_Actor(room, index, bundles[index], program.name))
            await run_together(*(it.start(program, deadline) for it, program in zip(launched, programs, strict=True)))
        except BaseException:
            for it in launched:
                await it.forget()
            room.release()
            raise
        return launched

    def close(self) -> None:
        self._ray.shutdown()

    def _connect(self, address: str) -> None:
        # Otherwise Ray gives its processes, and therefore ours, a lower priority.
        own = {"include_dashboard": False, "_system_config": {"worker_niceness": 0}}
        more = own if address == "local" else {}
        self._ray.init(address=address, log_to_driver=False, logging_level="ERROR", **more)

    def _bundle(self, program: Program) -> dict[str, float]:
        bundle = {"CPU": _OWN_CPUS if self._is_own_cluster else program.num_cpus}
        if program.num_gpus:
            bundle["GPU"] = program.num_gpus
        if program.place is not None:
            bundle[self._resource_of(program)] = 0.001
        return bundle

    def _resource_of(self, program: Program) -> str:
        """Return the resource that only hosts with the program's place have."""
        place = str(program.place)
        if place in self._places:  # its host may be temporarily absent
            return self._places[place]
        known = self._ray.cluster_resources()
        for name in (place, f"node:{place}"):
            if name in known:
                self._places[place] = name
                return name
        places = {name.removeprefix("node:") for name in known if "__internal" not in name}
        places -= {"CPU", "GPU", "memory", "object_store_memory"}
        raise ConfigError(
            f"{program.name} must run on {program.place!r}, but no host of the Ray cluster has that address or "
            f"resource; known are {', '.join(sorted(places))}"
        )

    async def _wait_for(
        self, group: Any, programs: Sequence[Program], bundles: Sequence[Mapping[str, float]], timeout_s: float
    ) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not await asyncio.to_thread(
                    group.wait, _LOOK_S
                ):  # `ready` would start a Python process only to answer
                    pass
        except TimeoutError as error:
            needs = "; ".join(f"{it.name} needs {_amounts(b)}" for it, b in zip(programs, bundles, strict=True))
            raise ConfigError(
                f"the Ray cluster had too few free resources within {timeout_s:g} s: {needs}. It has "
                f"{_amounts(self._ray.cluster_resources())}, of which these are free: "
                f"{_amounts(self._ray.available_resources()) or 'none'}. Add hosts, lower train.num_ranks or "
                "servers.count, or raise run.start_timeout_s to wait longer"
            ) from error


class _PlacementGroup:
    """The placement group of several processes; it is removed once none of them is left."""

    def __init__(self, ray: Any, group: Any, num_left: int) -> None:
        self.ray = ray
        self.group = group
        self._num_left = num_left

    def address_of(self, index: int) -> str:
        """Return the address of a bundle's host."""
        node_id = self.ray.util.placement_group_table(self.group)["bundles_to_node_id"][index]
        return next(str(node["NodeManagerAddress"]) for node in self.ray.nodes() if node["NodeID"] == node_id)

    def leave(self) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            self.release()

    def release(self) -> None:
        with contextlib.suppress(self.ray.exceptions.RayError, ConnectionError):
            self.ray.util.remove_placement_group(self.group)


class _Actor(Launched):
    """One process, observed through the actor that watches it."""

    def __init__(self, room: _PlacementGroup, index: int, bundle: Mapping[str, float], name: str) -> None:
        self._room = room
        self._ray = ray = room.ray
        self._name = name
        self._index = index
        self._address = ""
        self._ended: ProcessEnd | None = None
        self._waiting: asyncio.Task[ProcessEnd] | None = None
        self._is_there = True
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            room.group, placement_group_bundle_index=index
        )
        options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "max_restarts": 0}
        self._actor = ray.remote(watcher.Watcher).options(**options, scheduling_strategy=strategy).remote()

    async def start(self, program: Program, deadline: float) -> None:
        """Start the process once the actor's Python has started. Raises `ConfigError` if that fails by the deadline."""
        self._address = self._room.address_of(self._index)
        forwarded = {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED)}
        environment = {**forwarded, ADDRESS_VARIABLE: self._address, **program.environment}
        ready_file = "" if program.ready_file is None else str(program.ready_file.absolute())
        try:
            await self._ask(
                deadline - time.monotonic(),
                "start",
                list(program.command),
                environment,
                str(program.log.absolute()),
                ready_file,
                directory=os.getcwd(),
                appends=program.appends,
                hides="RAY_",
            )
        except (TimeoutError, OSError, self._ray.exceptions.RayError) as error:
            raise ConfigError(f"{self._name} cannot be started on {self._address}: {_in_short(error)}") from error
        self._waiting = start(self._wait())

    @property
    def address(self) -> str:
        return self._address

    @property
    def ended(self) -> ProcessEnd | None:
        return self._ended

    async def wait(self) -> ProcessEnd:
        assert self._waiting is not None
        return await asyncio.shield(self._waiting)

    async def ready(self) -> str | None:
        if self._ended is not None:
            return None
        with contextlib.suppress(TimeoutError, self._ray.exceptions.RayError):  # `wait` reports its end
            text: str | None = await self._ask(_ANSWER_S, "ready")
            return text
        return None

    def send_signal(self, number: signal.Signals) -> None:
        if self._ended is None:
            self._actor.send_signal.remote(int(number))

    async def stop(self, patience_s: float) -> None:
        if not self._is_there:
            return
        if self._ended is None:
            with contextlib.suppress(TimeoutError, self._ray.exceptions.RayError):
                await self._ask(patience_s + _ANSWER_S, "stop", patience_s)
                await self.wait()
        await self.forget()

    async def forget(self) -> None:
        """End the actor, which closes the standard input of a process that is still running."""
        if not self._is_there:
            return
        self._is_there = False
        if self._waiting is not None and self._ended is None:
            await cancel_and_wait(self._waiting)
            self._ended = ProcessEnd(None, cause=f"the process did not stop on {self._address}")
        with contextlib.suppress(self._ray.exceptions.RayError, ConnectionError):
            self._ray.kill(self._actor)
        self._room.leave()

    async def _wait(self) -> ProcessEnd:
        try:
            status, lines = await self._ask(None, "wait")
            self._ended = ProcessEnd(status, tuple(lines))
        except self._ray.exceptions.RayError as error:
            self._ended = ProcessEnd(
                None, cause=f"its host {self._address} or the actor there failed: {_in_short(error)}"
            )
        return self._ended

    async def _ask(self, timeout_s: float | None, method: str, *arguments: object, **more: object) -> Any:
        async with asyncio.timeout(timeout_s):
            answer = getattr(self._actor, method).remote(*arguments, **more)
            return await asyncio.wrap_future(answer.future())


def _amounts(resources: Mapping[str, float]) -> str:
    """Return the amounts of CPUs, GPUs and places as text."""
    left_out = ("memory", "object_store_memory", "node:")
    return ", ".join(
        f"{amount:g} {name}" for name, amount in sorted(resources.items()) if not name.startswith(left_out)
    )


def _in_short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:_MAX_CAUSE] or type(error).__name__

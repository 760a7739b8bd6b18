"""The backend of `inflight tinker`: ranks for each model in training, and a pool of servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from inflight.base.backoff import Backoff
from inflight.base.tasks import TaskOwner, finish_all, run_in_background
from inflight.contracts import InferenceEndpoint
from inflight.dialects.tinker.backend import Backend, Training, Weights
from inflight.errors import ConfigError, EndpointError
from inflight.launchers import Launcher
from inflight.model.lora_settings import LoraSettings
from inflight.run.config import RunConfig
from inflight.run.hosting.sampler_pool import SamplerPool
from inflight.run.hosting.training import HostedTraining
from inflight.run.machines.placement import place
from inflight.run.machines.processes import ServerProcess, start_servers
from inflight.run.ranks.group import TrainerGroup
from inflight.run.ranks.workers import check_lora
from inflight.run.record.run_directory import RunDirectory

_RESTART_PAUSE_S, _MAX_PAUSE_S = 1.0, 30.0
_MAX_FAILURES = 3


class HostedBackend(Backend):
    """Starts servers when `running` is entered, and ranks when a model is created."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        launcher: Launcher,
        token: str,
        *,
        name: str,
        max_models: int,
        vocab_size: int,
        connect: Callable[[str], InferenceEndpoint],
        note: Callable[[str], None],
    ) -> None:
        self._config = config
        self._directory = directory
        self._launcher = launcher
        self._token = token
        self._name = name
        self._max_models = max_models
        self._vocab_size = vocab_size
        self._connect = connect
        self._note = note
        self._max_model_len = 0
        self._trainings: dict[str, HostedTraining] = {}
        self._num_created = 0
        self._creating = asyncio.Lock()
        self._watches = TaskOwner()
        self._pool = SamplerPool(
            config.model.path, token, config.updates, lambda model_id: self._trainings.get(model_id)
        )

    @property
    def model_name(self) -> str:
        return self._name

    @property
    def model_dir(self) -> Path:
        return self._config.model.path

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def max_models(self) -> int:
        return self._max_models

    @asynccontextmanager
    async def running(self) -> AsyncIterator[HostedBackend]:
        """Start the servers, and stop everything at the end."""
        places = place(self._config, ()).servers
        servers = await start_servers(self._config, self._directory, self._token, places, self._launcher)
        try:
            endpoints = [(server.url, self._connect(server.url)) for server in servers]
            await self._pool.add(endpoints)
            self._max_model_len = min([(await it.capabilities()).max_model_len for _, it in endpoints])
            async with run_in_background(*map(self._keep_running, servers)):
                yield self
        finally:
            await self._watches.aclose()
            await finish_all(*(training.aclose() for training in self._trainings.values()))
            await self._pool.aclose()
            await finish_all(*(server.stop() for server in servers))

    async def _keep_running(self, server: ServerProcess) -> None:
        """Restart a server whenever its process ends. Raises `EndpointError` if it fails to start several times."""
        backoff, num_failures = Backoff(_RESTART_PAUSE_S, _MAX_PAUSE_S), 0
        while True:
            await server.process.wait()
            url, how = server.url, server.how_it_ended()
            self._note(how)
            self._pool.lose(url)
            while True:
                await asyncio.sleep(backoff.next(time.monotonic()))
                try:
                    await server.restart(self._config.run.start_timeout_s, same_port=False)
                    break
                except ConfigError as error:
                    num_failures += 1
                    if num_failures >= _MAX_FAILURES:
                        raise EndpointError(f"{server.name} failed to start {num_failures} times: {error}") from error
            num_failures = 0
            await self._pool.replace(url, server.url, self._connect(server.url))
            self._note(f"{server.name} was restarted at {server.url}")

    async def create(self, model_id: str, rank: int, seed: int | None) -> Training:
        async with self._creating:
            config = self._config_of(rank, seed)
            check_lora(config)
            self._num_created += 1
            logs = self._directory.logs / f"model-{self._num_created}"
            logs.mkdir(parents=True, exist_ok=True)
            trainers = TrainerGroup(config, logs, self._token, self._note, self._directory.lock, (), self._launcher)
            training = HostedTraining(
                trainers,
                publish=lambda it: self._pool.publish(model_id, it),
                on_end=lambda it: self._end(model_id, it),
                is_lora=rank > 0,
            )
            try:
                await trainers.spawn()
                ready = await trainers.load_and_connect(None, f"{self._directory.run_id}-{self._num_created}", None)
                if not (ready.takes_step_settings and ready.scores_target_ids):
                    raise ConfigError(
                        f"trainer {config.train.trainer!r} cannot be used by inflight tinker: it does not accept "
                        "optimizer settings with each step, or does not score target ids; use fsdp, torchtitan, "
                        "deepspeed or megatron"
                    )
            except BaseException:
                await trainers.stop()
                raise
            self._trainings[model_id] = training
            self._watches.start(training.watch())
            return training

    def _config_of(self, rank: int, seed: int | None) -> RunConfig:
        if rank == 0:
            return self._config
        lora = LoraSettings(rank=rank, alpha=32.0, targets="all-linear", **({} if seed is None else {"seed": seed}))
        train = self._config.train.model_copy(update={"lora": lora})
        return self._config.model_copy(update={"train": train})

    def _end(self, model_id: str, training: HostedTraining) -> None:
        if self._trainings.get(model_id) is training:  # otherwise the model has new ranks
            del self._trainings[model_id]
            self._pool.forget(model_id)

    def sampling_from(self, weights: Weights) -> AbstractAsyncContextManager[InferenceEndpoint]:
        return self._pool.serving(weights)

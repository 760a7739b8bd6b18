"""The run: one controller that samples, composes, trains, publishes, records and saves, step after step.

    task -> actor -> finished groups -> advantages -> staleness -> packing -> workers -> step -> publish -> servers

Actor and trainer run concurrently: this process samples and scores while the ranks, in their own processes, train and
publish. ``mode = "conventional"`` runs the same parts in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any

from inflight.environments.proxy.run_server import ProxyServer
from inflight.errors import CheckpointError, ConfigError, FencedError, InflightError, WorkerDiedError
from inflight.http.tokens import TOKEN_VARIABLE
from inflight.launchers import Launcher, load_launcher
from inflight.model.checkpoints import check_weights, load_config, load_tokenizer
from inflight.model.images import load_image_processor
from inflight.model.shapes import model_shape
from inflight.observe.exports.prometheus import MetricsServer, RunMetrics
from inflight.observe.trace.records import RECORD, remove_steps
from inflight.observe.trackers import Reporting, TrackedRun, load_trackers
from inflight.rollouts import EssGuard, HistoryStore, Ledger, load_composer, load_scheduler, load_staleness, load_task
from inflight.run.config import RunConfig
from inflight.run.delivery import Delivery, PullDelivery, PushDelivery
from inflight.run.interrupt import Interrupt, Interrupted
from inflight.run.machines.devices import devices_here
from inflight.run.machines.memory_check import check_fits, device_uses, memory_of
from inflight.run.machines.placement import place, place_elsewhere, uses_gpus
from inflight.run.machines.ports import check_ports
from inflight.run.ranks.group import TrainerGroup
from inflight.run.ranks.messages import Members, Trained
from inflight.run.ranks.workers import check_lora
from inflight.run.record.console import Progress
from inflight.run.record.journal import Journal
from inflight.run.record.page import serve_page
from inflight.run.record.recording import Recording
from inflight.run.record.run_directory import claim
from inflight.run.record.saving import Saving
from inflight.run.record.step_rows import Notes
from inflight.run.sampling.batches import StepBatch, frames_of
from inflight.run.sampling.groups import work_of
from inflight.run.sampling.sampling import Sampling
from inflight.run.servers.checks import check_servers
from inflight.run.servers.leases import kept_token
from inflight.run.servers.memory_turns import MemoryTurns
from inflight.run.servers.servers import Servers, nobody_left


def train(config: RunConfig, *, resume: bool = False) -> int:
    """Run to the end or until Ctrl-C; return the exit status (0 done, 130 interrupted with everything saved).

    Raises the `InflightError` that stopped the run; the last checkpoint is whole then.
    """
    return asyncio.run(_until_over(config, resume=resume))


async def _until_over(config: RunConfig, *, resume: bool) -> int:
    """Run; as long as ``run.restarts`` allows, begin again from the last checkpoint when a rank is lost."""
    run = _Run(config, resume=resume)
    try:
        num_left = config.run.restarts
        while (status := await run.run(may_restart=num_left > 0)) is None:
            again = _Run(config, resume=True, before=run)
            num_left = num_left - 1 if again.directory.checkpoint == run.directory.checkpoint else config.run.restarts
            run = again
        return status
    finally:
        run.launcher.close()
        run.directory.release()


# ---------------------------------------------------------------------------------------------------------------
# The loop


async def _pipeline(run: _Run) -> None:
    """Keep sampling, and train on each batch as soon as it is composed."""
    run.sampling.compose(run.journal.version)
    while not run.is_over():
        batch = await run.interrupt.unless(run.sampling.batch())
        run.sampling.compose(batch.version + 1)  # from groups that finish while the ranks train
        trained = await _train(run, batch, publish=run.servers.members())
        _note(run, batch, trained)
        await _keep(run, batch, trained)


async def _conventional(run: _Run) -> None:
    """Sample the groups of G steps, wait for all of them, train G steps, and publish the last version."""
    while not run.is_over():
        steps = await run.interrupt.unless(run.sampling.phase(run.journal.version))
        if run.memory is not None:
            await run.memory.to_trainers()
        for i, groups in enumerate(steps, 1):
            batch = run.sampling.batch_of(groups, run.journal.version)
            trained = await _train_last(run, batch) if i == len(steps) else await _train(run, batch, publish=None)
            _note(run, batch, trained)
            await _keep(run, batch, trained)
            if run.is_over():
                break


async def _train_last(run: _Run, batch: StepBatch) -> list[Trained]:
    """Take the last step of a phase and publish it, once servers that released their memory have it back."""
    if run.memory is None:
        return await _train(run, batch, publish=run.servers.members())
    first, *others = await _train(run, batch, publish=None)
    await run.memory.to_servers()
    again = await run.trainers.publish(run.servers.members())
    return [first.model_copy(update={"published": again.published}), *others]


async def _train(run: _Run, batch: StepBatch, *, publish: Members | None) -> list[Trained]:
    """Take one optimizer step on every rank, and publish the new version unless ``publish`` is None."""
    train = run.config.train
    shares, max_tokens = run.trainers.num_shares, train.max_tokens_per_micro_batch
    # In a thread: numpy and safetensors release the lock, and requests go out meanwhile.
    frames = await asyncio.to_thread(
        frames_of,
        batch,
        max_tokens,
        shares,
        publish=publish,
        images=run.images,
        returns_logprobs=run.recording is not None,
    )
    return await run.trainers.train(frames)


async def _keep(run: _Run, batch: StepBatch, trained: Sequence[Trained]) -> None:
    """Record a step if that is asked for, and save a checkpoint if it is time."""
    if run.recording is not None:
        await run.recording.step(batch, run.trainers.by_share(trained))
    await run.saving.save_if_due(run.journal.version)


def _note(run: _Run, batch: StepBatch, trained: Sequence[Trained]) -> None:
    """Settle the groups of a step, give work to the servers that have its version, and record the step."""
    run.sampling.settle(batch)
    items = [group.item_index for group in batch.groups]
    run.journal.trained(trained[0].version, [rank.span for rank in trained], items)
    run.saving.note(trained)
    run.delivery.record(trained[0].published)
    row = run.notes.step(batch, trained, run.delivery.serving)
    run.sampling.stepped(run.journal.version, row.get("effective_sample_size"))


# ---------------------------------------------------------------------------------------------------------------
# Its parts


class _Run:
    """Makes the parts of one run, starts them, watches them during the loop, and stops them.

    One that comes after another (``before``), whose ranks were lost, takes over its servers and its directory.
    """

    def __init__(self, config: RunConfig, *, resume: bool, before: _Run | None = None) -> None:
        self.config = config
        check_servers(config.servers)
        check_lora(config)
        self.launcher: Launcher = (
            before.launcher if before else load_launcher(config.run.launcher, config.run.launcher_options)
        )
        if self.launcher.port and not config.servers.others_may_come:
            raise ConfigError(
                f"launcher {config.run.launcher!r} starts no servers: set servers.join, where they come by themselves"
            )
        if config.servers.lease_s and not self.launcher.can_outlive:
            raise ConfigError(
                f"servers.lease_s lets servers outlive the run, but those of launcher {config.run.launcher!r} cannot: "
                "leave it out, or use launcher 'local'"
            )
        devices = devices_here() if uses_gpus(config) and self.launcher.num_gpus is None else ()
        num_gpus = self.launcher.num_gpus
        placement = place(config, devices) if num_gpus is None else place_elsewhere(config, num_gpus)
        if config.servers.colocated:
            memory = memory_of(config, model_shape(config.model.path), placement)
            check_fits(device_uses(devices, placement, memory), memory)
        config.loss.policy_loss()  # raises before anything is written
        task = load_task(config.task.name, config.task.params, config.run.seed)
        policies = config.rollouts
        staleness = load_staleness(policies.staleness, policies.staleness_params, policies.max_lag)
        if policies.min_ess is not None:
            staleness = EssGuard(staleness, policies.min_ess, stops=policies.on_low_ess == "stop")
        composer = load_composer(policies.composer, policies.composer_params, config.tokens_per_step)
        history = HistoryStore()
        scheduler = load_scheduler(
            policies.scheduler,
            policies.scheduler_params,
            group_size=config.sampling.group_size + config.task.extra_episodes,
            history=history,
            seed=config.run.seed,
        )
        trackers = load_trackers(config.run.trackers, config.run.tracker_options)
        check_weights(config.model.path)
        vocab_size = int(load_config(config.model.path).get_text_config().vocab_size)
        tokenizer = load_tokenizer(config.model.path)
        if tokenizer is None:
            raise ConfigError(f"model directory {str(config.model.path)!r} has no tokenizer")
        self.images = load_image_processor(config.model.path)
        self.progress = Progress(config.run.num_steps)
        note, config_json = self.progress.note, config.model_dump_json(indent=2)
        self.proxy = ProxyServer(config.model.path.resolve().name, note)
        work = work_of(config, task, tokenizer, self.images, self.proxy.serve)
        if before is None:
            check_ports(config, self.launcher)
            self.directory = claim(config.run.directory, config_json, resume=resume, note=note)
        else:
            self.directory = before.directory.at_latest_checkpoint()
        if self.directory.checkpoint is not None:
            check_weights(self.directory.checkpoint)
        path, state = self.directory.path, self.directory.state
        version = 0 if state is None else state["version"]
        remove_steps(path / RECORD, version)
        ledger = Ledger() if state is None else Ledger.from_json(state["ledger"])
        settings = config.model_dump(mode="json")
        self.metrics = None if config.run.metrics_port is None else RunMetrics()
        self.reporting = Reporting(trackers, TrackedRun(self.directory.run_id, path, settings, version), note)
        journal = Journal(
            path,
            None if state is None else state["journal"],
            version,
            config=settings,
            compresses=config.run.compress_events,
            listeners=[self.reporting.report] if self.metrics is None else [self.reporting.report, self.metrics.count],
        )
        self.token: str = before.token if before else os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
        if config.servers.lease_s:
            self.token = kept_token(path, self.token)
        token = self.token

        self.journal = journal
        if placement.placed:
            note("; ".join(map(str, placement.placed)))
        self.interrupt = Interrupt(note, self._kill)
        self.sampling = Sampling(config, work, staleness, composer, scheduler, ledger, history, journal, note)
        if state is not None:
            self.sampling.restore(state)
        self.notes = Notes(config, path, self.sampling, journal, self.progress)
        logs, lock = self.directory.logs, self.directory.lock
        self.trainers = TrainerGroup(config, logs, token, note, lock, placement.trainers, self.launcher)
        self.servers = Servers(
            config,
            token,
            vocab_size,
            self.sampling.actor,
            journal,
            note,
            placement.servers,
            self.launcher,
            lambda: self.sampling.is_training,
        )
        if before is not None:
            self.servers.own, self.servers.extra = before.servers.own, before.servers.extra
        self.memory: MemoryTurns | None = None
        if config.servers.release_memory:
            self.memory = MemoryTurns(self.servers, self.trainers.limits.publish_s)
        is_pulled = config.servers.updates == "pull"
        self.delivery: Delivery = PullDelivery(self.servers) if is_pulled else PushDelivery(self.servers, self.trainers)
        self.recording = Recording(config, path, note) if config.run.record else None
        self.saving = Saving(self.trainers, path, config.run, self._state, version, self.journal.saved, self.recording)

    def _is_done(self) -> bool:
        """Return whether all steps are made, or the run has reached ``stop_at_reward``."""
        target, reward = self.config.run.stop_at_reward, self.journal.recent_reward()
        is_reached = target is not None and reward is not None and reward >= target
        return is_reached or self.journal.version >= self.config.run.num_steps

    def is_over(self) -> bool:
        return self._is_done() or self.interrupt.is_set()

    def _state(self) -> dict[str, Any]:
        """Return the run's own state, which decides what is sampled next, for a checkpoint."""
        return {"version": self.journal.version, "journal": self.journal.state(), **self.sampling.state()}

    # ------------------------------------------------------------------------------------------------- start and stop

    async def run(self, *, may_restart: bool) -> int | None:
        """Start everything, train, stop everything and write the summary, even after a failure.

        Returns None if a rank was lost and ``may_restart`` is set: then only the servers run.
        """
        self.interrupt.listen()
        with self._serving_metrics():
            return await self._run_and_report(may_restart=may_restart)

    @contextlib.contextmanager
    def _serving_metrics(self) -> Iterator[None]:
        """Serve the metrics during the body, if the configuration names a port."""
        port = self.config.run.metrics_port
        if self.metrics is None or port is None:
            yield
            return
        with MetricsServer(self.metrics, port) as server:
            self.progress.note(f"metrics for Prometheus at {server.url}")
            yield

    async def _run_and_report(self, *, may_restart: bool) -> int | None:
        beside = [self.notes.tell_what_is_waited_for()]
        if self.config.run.page:
            beside.append(serve_page(self.directory.path, self.directory.logs, self.progress.note))
        async with self.proxy, _beside(*beside):
            try:
                status = await self._run(may_restart=may_restart)
            except InflightError as error:
                await asyncio.to_thread(self.reporting.end, str(error))
                raise
            await asyncio.to_thread(self.reporting.end, None)
            return status

    async def _run(self, *, may_restart: bool) -> int | None:
        try:
            with contextlib.suppress(Interrupted):  # before the first step
                await self.interrupt.unless(self._start())
                await self._train_beside_watchers()
        except FencedError:  # the servers now belong to another run
            await self._stop()
            raise
        except InflightError as error:
            if may_restart and isinstance(error, WorkerDiedError) and not self.interrupt.is_set():
                self.progress.note(f"{error}\nall trainer ranks start again from the last checkpoint")
                self.progress.close()
                await asyncio.gather(self.trainers.stop(), self.servers.disconnect())
                self.journal.close()
                if self.recording is not None:
                    await self.recording.written()
                return None
            await self.servers.tell_dead()
            await self._stop()
            with contextlib.suppress(CheckpointError):  # report the first failure
                self.notes.finish(str(error), interrupted=self.interrupt.is_set())
            raise
        await self._stop()
        self.notes.finish(None, interrupted=self.interrupt.is_set())
        return 130 if self.interrupt.is_set() else 0

    async def _start(self) -> None:
        self.notes.doing = "starting servers and trainers"
        self.progress.note(self.notes.doing)
        await self.trainers.spawn()
        beginning = [] if self.recording is None else [self.recording.begin(self.journal.version)]
        await asyncio.gather(self.servers.start(self.directory), *beginning)
        if self.memory is not None:
            await self.memory.to_servers()  # an earlier run may have been killed when it was the trainers' turn
        started = await self.trainers.load_and_connect(
            self.servers.members(), self.directory.run_id, self.directory.checkpoint
        )
        self.journal.version = started.version
        await self.delivery.start(started.published)
        if self.sampling.actor.unserved.is_set():
            raise nobody_left(self.sampling.actor)
        self.notes.doing = ""

    async def _train_beside_watchers(self) -> None:
        if self._is_done():
            self.progress.note(f"the run is already done: it has made {self.journal.version} steps")
            return
        async with _beside(
            self.sampling.actor.run(),
            self.notes.note_what_runs(),
            self.trainers.watch(),
            self.delivery.watch(),
            self.sampling.history.send(self.servers.taking_part.keys()),
            *self.servers.watching(),
        ):
            with contextlib.suppress(Interrupted):  # earlier steps are kept
                await (_pipeline if self.config.run.mode == "pipeline" else _conventional)(self)
            await self.saving.finish(self.journal.version)
            if self.recording is not None:
                await self.recording.finish()

    async def _stop(self) -> None:
        self.notes.doing = "stopping servers and trainers"
        self.progress.close()
        if self.memory is not None:
            await self.trainers.stop()
            await self.memory.end()
        await asyncio.gather(self.trainers.stop(), self.servers.stop())
        if self.recording is not None:
            with contextlib.suppress(CheckpointError):  # report the first failure
                await self.recording.written()

    def _kill(self) -> None:
        for child in (*self.trainers.ranks, *self.servers.own, *self.servers.extra):
            child.process.send_signal(signal.SIGKILL)


@contextlib.asynccontextmanager
async def _beside(*calls: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run calls while the body runs. The first exception ends all of them and is raised once they have ended."""
    failure: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
            yield
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failures:
        failure = failures.exceptions[0]
    if failure is not None:
        raise failure

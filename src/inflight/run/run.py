"""The run: one controller that samples, composes, trains, publishes, records and saves, step by step.

    task -> dispatcher -> actor -> servers -> finished groups -> composer -> advantages -> token masks -> packing
         -> ranks: optimizer step -> publish -> servers

The actor and the trainer run concurrently: this process samples and scores while the ranks train and publish in their
own processes. ``mode = "conventional"`` runs the same parts one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Sequence
from typing import Any

from inflight.base.tasks import add_failures_to, finish_all, run_in_background, run_together, text_of
from inflight.environments.proxy.run_server import ProxyServer
from inflight.errors import CheckpointError, FencedError, InflightError, WorkerDiedError
from inflight.launchers import Launcher, load_launcher
from inflight.rollouts import Ledger
from inflight.rollouts.curriculum import Curriculum
from inflight.run.config import RunConfig
from inflight.run.delivery import delivery_of
from inflight.run.interrupt import Interrupt, Interrupted
from inflight.run.preflight import Machine, Prepared, hosts_of, preflight
from inflight.run.ranks.group import TrainerGroup
from inflight.run.ranks.messages import Members, Trained
from inflight.run.record.checkpoints import offer_intact_checkpoint
from inflight.run.record.console import Progress
from inflight.run.record.journal import open_journal
from inflight.run.record.observers import Observers
from inflight.run.record.recording import RunRecording
from inflight.run.record.run_directory import RunDirectory, claim
from inflight.run.record.saving import Saving
from inflight.run.record.step_rows import Notes
from inflight.run.sampling.batches import StepBatch, frames_of
from inflight.run.sampling.evaluation import Evaluation
from inflight.run.sampling.groups import work_of
from inflight.run.sampling.sampling import Sampling
from inflight.run.sampling.teachers import Teachers
from inflight.run.servers.leases import token_of
from inflight.run.servers.memory_turns import MemoryTurns
from inflight.run.servers.servers import Servers, no_server_left


def train(config: RunConfig, *, resume: bool = False) -> int:
    """Run to the end or until Ctrl-C; return the exit status: 0 when the run is complete, 130 when it was interrupted.

    After a second Ctrl-C, steps after the last checkpoint are lost; otherwise everything is saved. Raises the
    `InflightError` that stopped the run; the last checkpoint is then complete.
    """
    with contextlib.ExitStack() as stack:
        launcher = load_launcher(config.run.launcher, config.run.launcher_options)
        stack.callback(launcher.close)
        machine = Machine(hosts_of(launcher))
        prepared = preflight(config, machine, resume=resume)
        config_json, note = prepared.config.model_dump_json(indent=2), Progress(config.run.num_steps).note
        for text in prepared.defaults:
            note(text)
        directory = claim(config.run.directory, config_json, resume=resume, note=note)
        stack.callback(directory.release)
        return asyncio.run(_run_until_over(prepared, machine, directory, launcher))


async def _run_until_over(prepared: Prepared, machine: Machine, directory: RunDirectory, launcher: Launcher) -> int:
    """Run to the end; when a rank is lost, restart from the last checkpoint if ``run.restarts`` allows it."""
    config, token = prepared.config, token_of(prepared.config, directory.path)
    run = _Run(prepared, directory, launcher, token)
    num_left, is_first = config.run.restarts, True
    while (status := await run.run(may_restart=num_left > 0, is_first=is_first)) is None:
        is_first = False
        latest = directory.at_latest_checkpoint()
        num_left = num_left - 1 if latest.checkpoint == directory.checkpoint else config.run.restarts
        directory = latest
        following = _Run(preflight(config, machine.held_by(directory)), directory, launcher, token)
        following.servers.take_over(run.servers)
        run = following
    return status


# ---------------------------------------------------------------------------------------------------------------
# The loop


async def _pipeline(run: _Run) -> None:
    """Keep sampling, and train on a batch whenever one can be composed."""
    while not run.is_over():
        batch = await run.interrupt.unless(run.sampling.batch(run.journal.version))
        trained = await _train(run, batch, publish=run.servers.members())
        _settle_step(run, batch, trained)
        await _save_step(run, batch, trained)


async def _conventional(run: _Run) -> None:
    """Sample the groups of G steps, wait for all of them, train G steps, and publish the last version."""
    while not run.is_over():
        steps = await run.interrupt.unless(run.sampling.phase(run.journal.version))
        if run.memory is not None:
            await run.memory.to_trainers()
        for i, groups in enumerate(steps, 1):
            batch = run.sampling.batch_of(groups, run.journal.version)
            trained = await _train_last(run, batch) if i == len(steps) else await _train(run, batch, publish=None)
            _settle_step(run, batch, trained)
            await _save_step(run, batch, trained)
            if run.is_over():
                break


async def _train_last(run: _Run, batch: StepBatch) -> list[Trained]:
    """Take the last step of a phase, and publish its version once servers that released their memory have it back."""
    if run.memory is None:
        return await _train(run, batch, publish=run.servers.members())
    first, *others = await _train(run, batch, publish=None)
    await run.memory.to_servers()
    done = await run.trainers.publish(run.servers.members())
    return [first.model_copy(update={"published": done.published}), *others]


async def _train(run: _Run, batch: StepBatch, *, publish: Members | None) -> list[Trained]:
    """Take one optimizer step on every rank, and publish the new version unless ``publish`` is None."""
    # In a thread: numpy and safetensors release the lock, and requests go out meanwhile.
    frames = await asyncio.to_thread(
        frames_of,
        batch,
        run.trainers.packing,
        publish=publish,
        images=run.prepared.model.images,
        returns_logprobs=run.recording is not None,
    )
    return await run.trainers.train(frames)


async def _save_step(run: _Run, batch: StepBatch, trained: Sequence[Trained]) -> None:
    """Record a step if the run keeps a record, and save a checkpoint if one is due."""
    if run.recording is not None:
        await run.recording.step(batch, run.trainers.packing, run.trainers.by_share(trained))
    await run.saving.save_if_due(run.journal.version)


def _settle_step(run: _Run, batch: StepBatch, trained: Sequence[Trained]) -> None:
    """Settle the groups of a step, give work to the servers that have its version, and record the step."""
    run.directory.check_present()
    run.sampling.settle(batch)
    items = [group.item_index for group in batch.groups]
    run.journal.trained(trained[0].version, [rank.span for rank in trained], items)
    run.saving.note(trained)
    run.delivery.record(trained[0].published)
    row = run.notes.step(batch, trained, run.delivery.serving)
    run.sampling.report_step(run.journal.version, row.get("effective_sample_size"))


# ---------------------------------------------------------------------------------------------------------------
# Its parts


class _Run:
    """The parts of one incarnation of a run, constructed from the result of `preflight`.

    An incarnation ends with its trainer ranks. The next one takes over its servers and its directory.
    """

    def __init__(self, prepared: Prepared, directory: RunDirectory, launcher: Launcher, token: str) -> None:
        config, policies, path, state = prepared.config, prepared.policies, directory.path, directory.state
        version = 0 if state is None else state["version"]
        self.prepared = prepared
        self.first_version = version
        self.directory = directory
        self.progress = Progress(config.run.num_steps)
        note = self.progress.note
        self.observers = Observers(config, prepared.trackers, directory, version, note)
        self.journal = open_journal(config, directory, version, self.observers.listeners)
        self.interrupt = Interrupt(note, self._kill)
        self.proxy = ProxyServer(config.model.path.resolve().name, note)
        work = work_of(config, prepared.task, prepared.model.tokenizer, prepared.model.images, self.proxy.serve)
        self.teachers = Teachers(config.distillation, token, note) if config.distillation.teachers else None
        self.sampling = Sampling(
            config,
            work,
            policies,
            ledger=Ledger() if state is None else Ledger.from_json(state["ledger"]),
            curriculum=prepared.task if isinstance(prepared.task, Curriculum) else None,
            journal=self.journal,
            note=note,
            run_id=directory.run_id,
            teachers=self.teachers,
        )
        if state is not None:
            self.sampling.restore(state)
        self.evaluation = Evaluation(config.evaluation, work, path, note)
        self.notes = Notes(config, path, self.sampling, self.journal, self.progress, self.evaluation)
        self.trainers = TrainerGroup(
            config, directory.logs, token, note, directory.lock, prepared.placement.trainers, launcher
        )
        self.servers = Servers(
            config=config,
            token=token,
            vocab_size=prepared.model.vocab_size,
            actor=self.sampling.actor,
            journal=self.journal,
            note=note,
            placements=prepared.placement.servers,
            launcher=launcher,
            is_training=lambda: self.sampling.is_training,
        )
        self.memory = MemoryTurns(self.servers, prepared.limits.publish_s) if config.servers.release_memory else None
        self.delivery = delivery_of(config, self.servers, self.trainers)
        self.recording = RunRecording(config, path, note) if config.run.record else None
        self.saving = Saving(self.trainers, path, config.run, self._state, version, self.journal.saved, self.recording)

    def _is_done(self) -> bool:
        """Return whether all steps are complete, or the run has reached ``stop_at_reward``."""
        settings, reward = self.prepared.config.run, self.journal.recent_reward()
        target = settings.stop_at_reward
        is_reached = target is not None and reward is not None and reward >= target
        return is_reached or self.journal.version >= settings.num_steps

    def is_over(self) -> bool:
        return self._is_done() or self.interrupt.is_set()

    def _state(self) -> dict[str, Any]:
        """Return the run's own state for a checkpoint; it determines what is sampled next."""
        return {"version": self.journal.version, "journal": self.journal.state(), **self.sampling.state()}

    # ------------------------------------------------------------------------------------------------- start and stop

    async def run(self, *, may_restart: bool, is_first: bool) -> int | None:
        """Start everything, train, stop everything and write the summary, even after a failure.

        Returns None if a rank was lost and ``may_restart`` is set; in that case only the servers keep running. The
        first incarnation does not restart before it has trained a step.
        """
        self.interrupt.listen()
        if self.first_version:
            self.progress.note(f"continuing from the checkpoint of step {self.first_version}")
        waiting = self.notes.show_what_is_waited_for()
        async with self.proxy, run_in_background(waiting, *self.observers.calls()), self.observers:
            if self.prepared.placement.placed:
                self.progress.note("; ".join(map(str, self.prepared.placement.placed)))
            return await self._run(may_restart=may_restart, is_first=is_first)

    async def _run(self, *, may_restart: bool, is_first: bool) -> int | None:
        try:
            with contextlib.suppress(Interrupted):  # before the first step, or after the last one
                await self.interrupt.unless(self._start())
                if self.journal.version == 0:
                    await self.interrupt.unless(self._evaluate())
                await self._train_and_watch()
                if not self.interrupt.is_set():
                    await self.interrupt.unless(self._evaluate())
        except FencedError as error:  # the servers now belong to another run
            with add_failures_to(error):
                await self._stop()
            raise
        except InflightError as error:
            if self.interrupt.is_immediate:  # it failed because the user killed the processes
                with add_failures_to(error):
                    await self._stop()
                self.notes.finish(None, interrupted=True)
                return 130
            may_restart = may_restart and not (is_first and self.journal.version == self.first_version)
            if may_restart and isinstance(error, WorkerDiedError) and not self.interrupt.is_set():
                self.progress.note(f"{text_of(error)}\nall trainer ranks restart from the last checkpoint")
                await finish_all(self.trainers.stop(), self.servers.disconnect(), *self._closing())
                self.journal.close()
                if self.recording is not None:
                    await self.recording.written()
                return None
            with add_failures_to(error):
                await self.servers.report_ended_servers()
                await self._stop()
            with add_failures_to(error):
                self.notes.finish(text_of(error), interrupted=self.interrupt.is_set())
            raise
        try:
            await self._stop()
        except InflightError:
            if not self.interrupt.is_immediate:
                raise
        self.directory.check_present()
        self.notes.finish(None, interrupted=self.interrupt.is_set())
        return 130 if self.interrupt.is_set() else 0

    async def _start(self) -> None:
        self.notes.doing = "starting servers and trainers"
        self.progress.note(self.notes.doing)
        await self.trainers.spawn()
        beginning = [self.sampling.actor.work.open()]
        if self.recording is not None:
            beginning.append(self.recording.begin(self.journal.version))
        if self.teachers is not None:
            beginning.append(self.teachers.connect(self.prepared.model.vocab_size, self.prepared.longest_sequence))
        await run_together(self.servers.start(self.directory), *beginning)
        if self.memory is not None:
            await self.memory.to_servers()  # an earlier run may have been killed when it was the trainers' turn
        with offer_intact_checkpoint(self.directory.path, self.directory.checkpoint):
            started = await self.trainers.load_and_connect(
                self.servers.members(), self.directory.run_id, self.directory.checkpoint
            )
        self.journal.version = started.version
        await self.delivery.start(started.published)
        if self.sampling.actor.unserved.is_set():
            raise no_server_left(self.sampling.actor)
        self.notes.doing = ""

    async def _evaluate(self) -> None:
        if not self.prepared.config.evaluation.num_items:
            return
        self.notes.doing = "evaluating"
        if self.memory is not None:
            await self.memory.to_servers()
        await self.evaluation.sample(self.servers.membership.taking_part, self.journal.version)
        self.notes.doing = ""

    async def _train_and_watch(self) -> None:
        if self._is_done():
            self.progress.note(f"the run is already complete: it has taken {self.journal.version} steps")
            return
        async with run_in_background(
            self.sampling.actor.run(),
            self.notes.note_what_runs(),
            self.trainers.watch(),
            self.delivery.watch(),
            self.sampling.draft_source.send(self.servers.membership.taking_part.keys()),
            *self.servers.watching(),
        ):
            with contextlib.suppress(Interrupted):  # earlier steps are kept
                await (_pipeline if self.prepared.config.run.mode == "pipeline" else _conventional)(self)
            if self.prepared.config.updates.overlap and self.journal.version > self.first_version:
                self.delivery.record((await self.trainers.publish(self.servers.members())).published)
            self.notes.doing = f"saving the checkpoint of step {self.journal.version}"
            await self.saving.finish(self.journal.version)
            if self.recording is not None:
                await self.recording.finish()

    async def _stop(self) -> None:
        self.notes.doing = "stopping servers and trainers"
        if self.memory is not None:
            await self.trainers.stop()
            await self.memory.end()
        await finish_all(self.trainers.stop(), self.servers.stop(), *self._closing())
        if self.recording is not None:
            with contextlib.suppress(CheckpointError):  # report the first failure
                await self.recording.written()

    def _closing(self) -> list[Coroutine[Any, Any, None]]:
        teachers = [] if self.teachers is None else [self.teachers.aclose()]
        return [self.sampling.actor.work.aclose(), *teachers]

    def _kill(self) -> None:
        for rank in self.trainers.ranks:
            rank.process.send_signal(signal.SIGKILL)
        self.servers.kill()

"""The run: one controller that starts servers and trainer ranks, feeds them, and writes down what happened.

    task -> actor -> finished groups -> advantages -> staleness -> packing -> workers -> step -> publish -> servers

Actor and trainer are concurrent: this process samples and scores while the ranks, processes of their own, train and
publish. ``mode = "conventional"`` runs the same parts in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import json
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from inflight import __version__
from inflight.checkpoints import check_weights, load_config, load_tokenizer
from inflight.contracts import InferenceEndpoint
from inflight.engines.kinds import connect_endpoint
from inflight.errors import CheckpointError, ConfigError, EndpointError, FencedError, InflightError, TrainerError
from inflight.losses import Metrics, add_metrics, decode_metrics, metric_values
from inflight.pipeline.actor import Actor, DroppedItem
from inflight.pipeline.admission import PhasedAdmission, TokensPerGroup, pipeline_admission
from inflight.pipeline.batches import StepBatch, frames_of, make_batch, split_evenly
from inflight.pipeline.channel import Message
from inflight.pipeline.checkpoints import checkpoint_path, finish_checkpoint
from inflight.pipeline.config import RunConfig
from inflight.pipeline.fleet import check_servers, connect_fleet, sequence_limits
from inflight.pipeline.journal import Journal
from inflight.pipeline.plots import plot_run
from inflight.pipeline.processes import Server, keep_running, start_servers
from inflight.pipeline.progress import Progress
from inflight.pipeline.run_directory import claim
from inflight.pipeline.server_list import Arrival, ServerList
from inflight.pipeline.trainer_group import TrainerGroup
from inflight.rollouts import BatchComposer, Ledger, StalenessPolicy, has_signal, load_task
from inflight.types import Group
from inflight.weights.fleet import MemberState
from inflight.wire import EndpointState, SamplingParams, WeightVersion

T = TypeVar("T")

_SAMPLE_S = 0.05
"""How often the timeline notes what is running."""
_ASK_AGAIN_S = 0.5
"""Pause between two questions whether a server is back, while there is none."""
_VERSION_S = 2.0
"""How long a server that takes versions by itself may take to say which one it serves."""
_SAMPLES = (EndpointState.READY, EndpointState.STAGING, EndpointState.HELD, EndpointState.UPDATING)
_NO_CHANGE: dict[str, Any] = {"restored": [], "joined": [], "removed": [], "changes": []}
_REAP_S = 0.5
"""How long a server's process may take to end after its connections broke."""
_NUM_DROPPED = 24
"""After so many dropped groups in a row a person is told, and after each doubling."""


def train(config: RunConfig, *, resume: bool = False, tensorboard: bool = False) -> int:
    """Run to the end, or until Ctrl-C; returns the exit status (0 done, 130 interrupted with everything saved).

    Raises an `InflightError` that says what stopped the run; the last checkpoint is whole then.
    """
    return asyncio.run(_Run(config, resume=resume, tensorboard=tensorboard).run())


@dataclass(slots=True)
class _BegunSave:
    """A checkpoint that the ranks are writing while they train, and the run's own state at that version."""

    version: int
    state: dict[str, Any]
    ended_on: set[int] = field(default_factory=set)
    """Ranks that have said that it stands."""


class _Run:
    """State of one run that outlives a step."""

    def __init__(self, config: RunConfig, *, resume: bool, tensorboard: bool) -> None:
        self._config = config
        self._estimator = config.loss.estimator()
        self._trains_on_equal_rewards = (
            config.train.train_on_equal_rewards or config.loss.policy_loss().has_terms_without_advantage
        )
        check_servers(config.servers)
        self._task = load_task(config.task.name, config.task.params, config.run.seed)
        check_weights(config.model.path)
        self._vocab_size = int(load_config(config.model.path).get_text_config().vocab_size)
        self._tokenizer = load_tokenizer(config.model.path)
        if self._tokenizer is None:
            raise ConfigError(f"model directory {str(config.model.path)!r} has no tokenizer")
        self._progress = Progress(config.run.num_steps)
        config_json = config.model_dump_json(indent=2)
        self._directory = claim(config.run.directory, config_json, resume=resume, note=self._progress.note)
        if self._directory.checkpoint is not None:
            check_weights(self._directory.checkpoint)
        state = self._directory.state
        self._version = 0 if state is None else state["version"]
        self._ledger = Ledger() if state is None else Ledger.from_json(state["ledger"])
        self._journal = Journal(
            self._directory.path, None if state is None else state["journal"], self._version, tensorboard=tensorboard
        )
        self._staleness = StalenessPolicy(config.loss.max_lag)
        self._composer = BatchComposer(config.train.tokens_per_worker, config.train.num_ranks, self._staleness)
        guess = config.sampling.group_size * (64 + config.sampling.max_tokens / 2)
        self._tokens_per_group = TokensPerGroup(guess)
        self._phase = PhasedAdmission(config.tokens_per_step * config.run.conventional_steps, self._tokens_per_group)
        self._doing = "starting servers and trainers"
        """What a person is told while nothing else happens; empty while steps are made."""
        self._num_dropped_since = 0
        """Groups that were dropped since the last one that can be trained on."""
        self._training = False
        self._begun_save: _BegunSave | None = None
        self._interrupted = asyncio.Event()
        self._arrived = asyncio.Event()
        self._servers: list[Server] = []
        self._told: set[str] = set()
        """Texts that a person was told, which are not repeated."""
        self._has_served: set[str] = set()
        """Own servers that have held a version since they were started."""
        self._restarted = False
        """Whether an own server was started again since the last publish."""
        self._trainers = TrainerGroup(config, [])
        self._endpoints: list[InferenceEndpoint] = []
        self._departed: list[InferenceEndpoint] = []
        """Those that are listed no more; their connections are closed at the end."""
        self._serving: dict[str, int | None] = {}
        """Version that each server said it serves, if it takes versions by itself; None if it gave no answer."""
        self._server_list: ServerList | None = None
        self._to_join: list[str] = []
        """URLs that the next publish brings in."""
        self._to_leave: list[str] = []
        """Names that the next publish leaves out for good."""
        self._actor: Actor

    async def run(self) -> int:
        """Start everything, train, stop everything, and write the summary, whatever happens."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        telling = asyncio.create_task(self._tell_what_is_waited_for())
        try:
            with contextlib.suppress(asyncio.CancelledError):  # Ctrl-C before the first step, or between two
                await self._start_and_train()
        except FencedError:  # the servers belong to the run that has taken over
            await self._stop()
            raise
        except InflightError as error:
            await self._tell_dead_servers()
            await self._stop()
            with contextlib.suppress(CheckpointError):  # the first failure is the one to tell
                self._finish(failure=str(error))
            raise
        else:
            await self._stop()
            return self._finish(failure=None)
        finally:
            telling.cancel()
            self._directory.release()

    async def _start_and_train(self) -> None:
        background: list[asyncio.Task[Any]] = []
        try:
            await self._unless_interrupted(self._start())
            pulls = self._config.servers.updates == "pull"
            calls = [self._actor.run(), self._note_what_runs(), self._trainers.watch()]
            calls += [self._watch_versions() if pulls else self._bring_servers_back()]
            calls += [self._keep_servers_running()] if self._servers else []
            calls += [self._follow_server_list(self._server_list)] if self._server_list is not None else []
            background = [asyncio.create_task(call) for call in calls]
            training = asyncio.create_task(self._train())
            await asyncio.wait({training, *background}, return_when=asyncio.FIRST_COMPLETED)
            if not training.done():
                training.cancel()
                await asyncio.gather(training, return_exceptions=True)
                await asyncio.gather(*(task for task in background if task.done()))
            await training
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)

    def _interrupt(self) -> None:
        if self._interrupted.is_set():
            for child in (*self._trainers.ranks, *self._servers):
                with contextlib.suppress(ProcessLookupError):
                    child.process.kill()
        self._interrupted.set()
        self._progress.note("stopping after this step; Ctrl-C again stops at once")

    async def _unless_interrupted(self, call: Awaitable[T]) -> T:
        """Await a call, or be cancelled by Ctrl-C."""
        calling, interrupted = asyncio.ensure_future(call), asyncio.ensure_future(self._interrupted.wait())
        try:
            await asyncio.wait({calling, interrupted}, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise asyncio.CancelledError
            return calling.result()
        finally:
            interrupted.cancel()
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------ start and stop

    async def _start(self) -> None:
        config = self._config
        token = os.environ.get("INFLIGHT_TOKEN") or secrets.token_urlsafe(24)
        self._progress.note("starting servers and trainers")
        self._trainers = await TrainerGroup.spawn(
            config, self._directory.logs, token, self._progress.note, self._directory.lock
        )
        if not config.servers.urls:
            self._servers = await start_servers(config, self._directory, token)
        urls = config.servers.urls or tuple(server.url for server in self._servers)
        limits = [server.max_concurrent for server in self._servers] or [config.servers.max_concurrent] * len(urls)
        self._endpoints = connect_fleet(config, urls, token)
        wanted = dict(zip(self._endpoints, limits, strict=True))
        accepted = await sequence_limits(config, self._vocab_size, wanted)
        if config.servers.urls_file is not None:
            names = [endpoint.name for endpoint in self._endpoints]
            self._server_list = ServerList(
                config.servers.urls_file, config, self._vocab_size, token, names, self._progress.note
            )
            for arrival in await self._first_arrivals(self._server_list):
                self._endpoints.append(arrival.endpoint)
                accepted[arrival.endpoint] = arrival.max_concurrent
                urls = (*urls, arrival.url)
        self._actor = Actor(
            accepted,
            self._task,
            self._tokenizer,
            SamplingParams(
                n=config.sampling.group_size,
                temperature=config.sampling.temperature,
                max_tokens=config.sampling.max_tokens,
            ),
            self._ledger,
            seed=config.run.seed,
            reward_timeout_s=config.task.reward_timeout_s,
            max_sequence_tokens=config.train.max_tokens_per_micro_batch,
            may_issue=self._admission(),
            on_end=self._group_ended,
        )
        answer = await self._trainers.load_and_connect(urls, self._directory.run_id, self._directory.checkpoint)
        self._version = answer["version"]
        self._note_publish(answer)
        if config.servers.updates == "pull":
            await self._look_at_versions()
        if self._actor.unserved.is_set():
            raise self._nobody_left()
        self._doing = ""

    async def _first_arrivals(self, servers: ServerList) -> list[Arrival]:
        """Return who of the list takes part from the start; waits for the first one if there is nobody else."""
        deadline = time.monotonic() + self._config.run.start_timeout_s
        while True:
            arrivals, _ = await servers.look()
            if arrivals or self._endpoints:
                return arrivals
            if time.monotonic() > deadline:
                path = str(self._config.servers.urls_file)
                raise ConfigError(
                    f"no server of servers.urls_file {path!r} could take part within "
                    f"{self._config.run.start_timeout_s:g} s; run.start_timeout_s is the limit"
                )
            await asyncio.sleep(_ASK_AGAIN_S)

    def _admission(self) -> Callable[[], bool]:
        if self._config.run.mode == "conventional":
            return lambda: self._phase.may_issue(self._actor.num_running, self._composer.num_tokens)
        return pipeline_admission(
            self._staleness,
            self._config.tokens_per_step,
            self._tokens_per_group,
            lambda: self._ledger.outstanding,
            lambda: self._composer.num_tokens,
            lambda: not self._training and self._actor.num_running == 0,
        )

    async def _stop(self) -> None:
        self._doing = "stopping servers and trainers"
        self._progress.close()
        endpoints = (*self._endpoints, *self._departed)
        await asyncio.gather(*(endpoint.aclose() for endpoint in endpoints), return_exceptions=True)
        await asyncio.gather(self._trainers.stop(), *(server.stop() for server in self._servers))

    async def _keep_servers_running(self) -> None:
        """Start our own servers again when they end. Raises `EndpointError` once all are given up and none may come."""
        await asyncio.gather(*(self._keep_running(server) for server in self._servers))
        if self._server_list is None:
            raise self._nobody_left()
        await asyncio.Event().wait()  # others are listed, or may be

    async def _keep_running(self, server: Server) -> None:
        def ended(text: str) -> None:
            self._progress.note(text)
            self._told.add(server.url)
            self._has_served.discard(server.url)
            self._actor.lose(server.url, text)

        def restarted() -> None:
            self._progress.note(f"{server.name} was started again, and takes part after the next update")
            self._told.discard(server.url)
            self._restarted = True

        await keep_running(
            server,
            self._config.run.start_timeout_s,
            on_end=ended,
            on_restart=restarted,
            has_served=lambda: server.url in self._has_served,
        )
        self._progress.note(f"{server.name} is given up: it ended again and again before it held a version")

    async def _follow_server_list(self, servers: ServerList) -> None:
        """Let servers join and leave as the list says, with the publish that comes next."""
        while True:
            arrivals, left = await servers.look()
            for arrival in arrivals:
                self._endpoints.append(arrival.endpoint)
                self._actor.add(arrival.endpoint, arrival.max_concurrent)
                self._to_join.append(arrival.url)
                self._progress.note(f"{arrival.endpoint.name} joins with the next update")
            for name in left:
                self._progress.note(f"{name} is listed no more: it finishes what it runs and leaves")
                self._actor.retire(name, functools.partial(self._left, servers, name))
            await asyncio.sleep(_ASK_AGAIN_S)

    def _left(self, servers: ServerList, name: str) -> None:
        """A server that is listed no more has finished what it ran."""
        self._to_join = [url for url in self._to_join if connect_endpoint(url).name != name]
        self._to_leave.append(name)
        self._departed += [endpoint for endpoint in self._endpoints if endpoint.name == name]
        self._endpoints = [endpoint for endpoint in self._endpoints if endpoint.name != name]
        servers.forget(name)
        now = time.time()
        self._journal.event("fleet", now, now, version=self._version, left=[name], **_NO_CHANGE)

    def _members(self) -> dict[str, Any]:
        """Return who joins, leaves and may be back with the publish that is asked for now."""
        members = {"join": self._to_join, "leave": self._to_leave, "restarted": self._restarted}
        self._to_join, self._to_leave, self._restarted = [], [], False
        return members

    async def _bring_servers_back(self) -> None:
        """Whenever none is left, publish to the first that answers again. Raises `EndpointError` if none does in time.

        While some are left, each publish asks those that are not.
        """
        timeout_s = self._config.run.start_timeout_s
        while True:
            await self._actor.unserved.wait()
            if self._servers:
                await asyncio.sleep(_REAP_S)  # the ends of all of them end the run, and are seen a little later
            self._progress.note(f"no inference server is left; waiting up to {timeout_s:g} s for one to come back")
            deadline = time.monotonic() + timeout_s
            while self._actor.unserved.is_set():
                is_late = time.monotonic() > deadline
                self._note_publish(await self._trainers.publish(self._members()))
                if self._actor.unserved.is_set():
                    if is_late:
                        raise self._nobody_left()
                    await asyncio.sleep(_ASK_AGAIN_S)

    async def _watch_versions(self) -> None:
        """While servers take versions by themselves: give work to those that answer, and note what each serves.

        Raises `EndpointError` if none answers in time.
        """
        timeout_s = self._config.run.start_timeout_s
        last_seen = time.monotonic()
        while True:
            await asyncio.sleep(_ASK_AGAIN_S)
            await self._look_at_versions()
            if not self._actor.unserved.is_set():
                last_seen = time.monotonic()
            elif time.monotonic() - last_seen > timeout_s:
                raise self._nobody_left()

    async def _look_at_versions(self) -> None:
        """Ask every server what it serves. Tokens tell their versions, so that any version may be sampled from."""

        async def one(endpoint: InferenceEndpoint) -> WeightVersion | None:
            try:
                async with asyncio.timeout(_VERSION_S):
                    return await endpoint.weight_version()
            except (TimeoutError, InflightError):
                return None  # it gets no work until it answers

        answers = await asyncio.gather(*(one(endpoint) for endpoint in self._endpoints))
        serving: dict[str, int | None] = {
            endpoint.name: answer.version if answer is not None and answer.state in _SAMPLES else None
            for endpoint, answer in zip(self._endpoints, answers, strict=True)
        }
        before, self._serving = self._serving, serving
        for name, version in serving.items():
            if version is not None and before.get(name, version) is None:
                self._progress.note(f"{name} is back, at version {version}")
            elif version is None and before.get(name) is not None:
                self._progress.note(f"{name} does not answer, or has no whole weights: it gets no work")
        if serving != before:
            now = time.time()
            self._journal.event("versions", now, now, trainer=self._version, servers=serving)
        self._actor.serve([name for name, version in serving.items() if version is not None], 0)

    def _nobody_left(self) -> EndpointError:
        causes = "; ".join(f"{lost}: {why}" for lost, why in self._actor.lost.items())
        return EndpointError(f"no inference server is left ({causes})")

    async def _tell_dead_servers(self) -> None:
        """Say how those of our servers ended that did: a broken connection is seen before the end of its process."""
        waiting = [asyncio.ensure_future(server.process.wait()) for server in self._servers]
        if waiting:
            _, pending = await asyncio.wait(waiting, timeout=_REAP_S)
            for task in pending:
                task.cancel()
        for server in self._servers:
            if server.process.returncode is not None and server.url not in self._told:
                self._progress.note(server.how_it_ended())

    async def _note_what_runs(self) -> None:
        """Note for the timeline how many groups are running."""
        while True:
            self._journal.running(self._actor.num_running)
            await asyncio.sleep(_SAMPLE_S)

    async def _tell_what_is_waited_for(self) -> None:
        """Say now and then what goes on while no step does."""
        while True:
            await asyncio.sleep(1.0)
            self._progress.waiting(self._doing or self._what_is_waited_for())

    def _what_is_waited_for(self) -> str:
        text = f"step {self._version + 1}/{self._config.run.num_steps}: "
        if self._training:
            return f"{text}training and publishing"
        text += f"{self._composer.num_tokens:,} of {self._config.tokens_per_step:,} tokens have come together, "
        return f"{text}{self._actor.num_running} groups are running{self._told_drops()}"

    def _told_drops(self) -> str:
        """Return how many groups were dropped, by reason, as the end of a sentence."""
        counts = Counter(self._ledger.num_dropped).most_common()
        return "; dropped: " + ", ".join(f"{count:,} {reason}" for reason, count in counts) if counts else ""

    def _finish(self, failure: str | None) -> int:
        """Write the summary and the plots; returns the exit status."""
        interrupted = self._interrupted.is_set()
        summary = self._journal.summarize(
            {
                "version": self._version,
                "mode": self._config.run.mode,
                "task": self._task.name,
                "interrupted": interrupted,
                "failure": failure,
                "ledger": self._ledger_counts(),
                "inflight": __version__,
                "config": json.loads(self._config.model_dump_json()),
            }
        )
        self._journal.close()
        plot_run(self._directory.path)
        self._progress.summary(summary, self._directory.path)
        if failure is None and not interrupted:
            return 0
        self._progress.note("continue with the same command and --resume")
        return 130

    # ------------------------------------------------------------------------------------------------------- steps

    def _group_ended(self, group: Group | DroppedItem | None) -> None:
        if isinstance(group, Group):
            self._group_finished(group)
        elif group is not None:
            self._item_dropped(group)
        self._arrived.set()

    def _group_finished(self, group: Group) -> None:
        now = time.time()
        versions = [span.version for rollout in group.rollouts for span in rollout.version_spans]
        facts = {"oldest": min(versions, default=None), "newest": max(versions, default=None)}
        self._journal.event("group", now, now, endpoint=group.endpoint, item=group.item_index, **facts)
        self._journal.group_finished(group)
        if not self._trains_on_equal_rewards and not has_signal([rollout.reward for rollout in group.rollouts]):
            self._tokens_per_group.add(0)
            self._drop(group, "equal rewards")
        elif self._composer.add(group):
            self._tokens_per_group.add(group.num_tokens)
            self._num_dropped_since = 0
        else:
            self._drop(group, "stale")

    def _drop(self, group: Group, reason: str) -> None:
        """Settle a finished group that no step will use; a person is told when that happens again and again."""
        self._ledger.drop(group.item_index, reason)
        self._num_dropped_since += 1
        num_doublings, rest = divmod(self._num_dropped_since, _NUM_DROPPED)
        if rest == 0 and num_doublings.bit_count() == 1:
            rewards = sorted({round(rollout.reward, 3) for rollout in group.rollouts})
            self._progress.note(
                f"the last {self._num_dropped_since} groups were dropped{self._told_drops()}. All completions of the "
                f"last one have the reward {rewards[0]:g}, which teaches nothing: is the task too hard or too easy for "
                "the model, or its reward wrong?"
                if reason == "equal rewards"
                else f"the last {self._num_dropped_since} groups were dropped{self._told_drops()}. Their tokens are "
                "older than loss.max_lag allows: are the servers behind the trainer?"
            )

    def _item_dropped(self, item: DroppedItem) -> None:
        """Note an item that was given up; the first for each reason is told whole."""
        text = f"item {item.index} was dropped ({item.reason}): {item.what_happened}"
        if item.reason not in self._told:
            self._told.add(item.reason)
            self._progress.note(f"{text}. More of this kind are counted in the summary")
        now = time.time()
        self._journal.event("drop", now, now, reason=item.reason, item=item.index, what=item.what_happened)

    async def _train(self) -> None:
        stepping = self._pipeline_steps if self._config.run.mode == "pipeline" else self._conventional_steps
        last_saved = self._version
        if self._is_done():
            self._progress.note(f"the run is done: it has made {self._version} steps")
            return
        try:
            async for _ in stepping():
                done = self._is_done() or self._interrupted.is_set()
                if done or self._version - last_saved >= self._config.run.checkpoint_every_steps:
                    await self._save()
                    last_saved = self._version
                if done:
                    await self._finish_save()
                    return
        except asyncio.CancelledError:  # Ctrl-C while waiting for data: the steps since the last checkpoint are kept
            if self._interrupted.is_set():
                if self._version > last_saved:
                    await self._save()
                await self._finish_save()
            raise

    def _is_done(self) -> bool:
        """Return whether all steps are made, or the reward that ends the run is reached."""
        target, reward = self._config.run.stop_at_reward, self._journal.recent_reward()
        is_reached = target is not None and reward is not None and reward >= target
        return is_reached or self._version >= self._config.run.num_steps

    async def _pipeline_steps(self) -> Any:
        """Train on the next batch as soon as it is there; the one after it is prepared meanwhile."""
        batch = await self._next_batch(self._version)
        while True:
            preparing = asyncio.create_task(self._next_batch(self._version + 1))
            try:
                await self._step(batch, publish=True)
                yield
                batch = await preparing
            finally:
                preparing.cancel()

    async def _conventional_steps(self) -> Any:
        """Generate for G steps, wait for all of it, train G steps, publish."""
        num_steps = self._config.run.conventional_steps
        while True:
            self._phase.begin()
            self._actor.wake()
            await self._until(lambda: self._composer.num_tokens >= self._config.tokens_per_step * num_steps)
            self._phase.end()
            await self._until(lambda: self._actor.num_running == 0)
            for group in self._composer.advance(self._version):
                self._drop(group, "stale")
            parts = split_evenly(self._composer.take_all(), num_steps)
            for i, groups in enumerate(parts):
                batch = make_batch(groups, self._version, self._estimator, self._staleness)
                await self._step(batch, publish=i == len(parts) - 1)
                yield

    async def _next_batch(self, version: int) -> StepBatch:
        """Wait for the tokens of one step that starts from ``version``; groups that are too old for it are dropped."""
        for group in self._composer.advance(version):
            self._drop(group, "stale")
        self._actor.wake()
        await self._until(self._composer.ready)
        return make_batch(self._composer.take(), version, self._estimator, self._staleness)

    async def _until(self, condition: Callable[[], bool]) -> None:
        timeout_s = self._config.run.step_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._arrived.clear()
                    await self._unless_interrupted(self._arrived.wait())
        except TimeoutError as error:
            raise TrainerError(
                f"no batch of {self._config.tokens_per_step} tokens came together within {timeout_s:g} s: "
                f"{self._composer.num_tokens} tokens are finished, {self._actor.num_running} groups are running"
                f"{self._told_drops()}. Are all rewards equal?"
            ) from error

    async def _step(self, batch: StepBatch, *, publish: bool) -> None:
        train = self._config.train
        members = self._members() if publish else {}
        frames = frames_of(batch, train.max_tokens_per_micro_batch, train.num_ranks, publish=publish, members=members)
        self._training = True
        answers = await self._trainers.train(frames)
        self._training = False
        for group in batch.groups:
            self._ledger.train(group.item_index)
        self._version = answers[0]["version"]
        self._journal.event("train", *answers[0]["train_span"])
        metrics: Metrics = {}
        for answer in answers:
            metrics = add_metrics(metrics, decode_metrics(answer["metrics"]))
        self._note_saved(answers)
        self._note_publish(answers[0])
        row = self._journal.step(
            self._version,
            batch.token_lags,
            batch.num_tokens,
            {
                **metric_values(metrics),
                "gradient_norm": answers[0]["gradient_norm"],
                "learning_rate": answers[0]["learning_rate"],
                "num_step_tokens": batch.num_tokens,
                "num_step_sequences": len(batch.samples),
                "num_stale_tokens": batch.num_stale_tokens,
                "groups_running": self._actor.num_running,
                "groups_waiting": self._composer.num_groups,
                "publish": answers[0].get("publish"),
                **({"serving": self._serving} if self._serving else {}),
                "ledger": self._ledger_counts(),
            },
        )
        self._progress.step(row)
        self._actor.wake()
        self._arrived.set()

    def _note_publish(self, answer: Message) -> None:
        """Note what a publish did, if there was one, and give work to the servers that it reached, and to no other."""
        if "endpoints" not in answer:
            if "publish" in answer:
                self._journal.event("publish", *answer["publish_span"], **_parts(answer["publish"]))
            return
        applied, restored, version = answer["endpoints"], answer["restored"], self._version
        if "publish" in answer:
            version = answer["publish"]["version"]
            self._journal.event("publish", *answer["publish_span"], **_parts(answer["publish"]))
            self._journal.held(answer["publish"]["held_s"])
        news = [text for text in answer["lost"] if text not in self._told]
        self._told.update(news)
        for text in news:
            self._progress.note(f"a server was left out: {text}")
        for name in restored:
            self._progress.note(f"{name} is back, at version {version}")
        for name in answer["joined"]:
            self._progress.note(f"{name} has joined, at version {version}")
        changed = [change for change in answer["changes"] if change[1] != MemberState.JOINING]
        if changed or restored or news:
            told = {name: answer[name] for name in ("restored", "joined", "removed", "changes", "states")}
            self._journal.event("fleet", *answer["publish_span"], version=version, serving=applied, left=[], **told)
        self._actor.serve(applied, version)
        self._has_served.update(applied)

    async def _save(self) -> None:
        """Write a checkpoint; in-flight and unused work is recorded in the ledger, to be issued again."""
        path = checkpoint_path(self._directory.path, self._version)
        if self._config.run.background_saves:
            self._note_saved(await self._trainers.begin_save(path))
        else:
            await self._trainers.save(path)
        state = {"version": self._version, "ledger": self._ledger.to_json(), "journal": self._journal.state()}
        if self._config.run.background_saves:
            self._begun_save = _BegunSave(self._version, copy.deepcopy(state))
        else:
            finish_checkpoint(self._directory.path, self._version, state, self._config.run.keep_checkpoints)

    async def _finish_save(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        if self._begun_save is not None:
            self._note_saved(await self._trainers.finish_save())

    def _note_saved(self, answers: Sequence[Message]) -> None:
        """Make the checkpoint that is being written the latest once every rank has said that it stands."""
        begun = self._begun_save
        if begun is None:
            return
        begun.ended_on |= {rank for rank, answer in enumerate(answers) if answer.get("saved") == begun.version}
        if len(begun.ended_on) == len(answers):
            finish_checkpoint(self._directory.path, begun.version, begun.state, self._config.run.keep_checkpoints)
            self._begun_save = None

    def _ledger_counts(self) -> dict[str, Any]:
        return {
            "trained": self._ledger.num_trained,
            "dropped": dict(self._ledger.num_dropped),
            "requeued": self._ledger.num_requeued,
            "outstanding": self._ledger.outstanding,
        }


def _parts(publish: Message) -> dict[str, Any]:
    """What the timeline shows of an update."""
    names = ("version", "gather_s", "wire_s", "hold_s", "load_s", "sent_bytes")
    return {name: publish[name] for name in names if name in publish}

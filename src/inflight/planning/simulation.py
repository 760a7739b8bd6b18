"""Simulates a run: the dispatcher of live runs drives simulated endpoints and a simulated trainer.

Costs default to zero: by default, prompts, publishes, rewards and environments take no time.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.errors import InvalidRequestError
from inflight.planning.groups import SimulatedCompletion, Spans, continue_spans, scored_group
from inflight.planning.outcome import SimulationResult
from inflight.planning.servers import SimulatedServer
from inflight.planning.setup import Setup
from inflight.planning.training import Batch, SimulatedTrainer, batch_of
from inflight.rollouts.dispatcher import Dispatcher
from inflight.rollouts.driver_commands import (
    ComposedPhase,
    ComposedStep,
    DroppedGroup,
    DroppedItem,
    FinishedGroup,
    ScoreGroup,
    SendRequest,
    StopRequests,
)
from inflight.types import Group


def simulate(setup: Setup) -> SimulationResult:
    """Simulate a run. Raises `InvalidRequestError` if the scheduler breaks its contract or the run stalls."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 20)  # a simulation keeps many small objects and almost no cycles
    try:
        return SimulatedRun(setup, setup.dispatcher()).run()
    finally:
        gc.set_threshold(*before)


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request on a simulated endpoint."""

    command: SendRequest
    server: SimulatedServer
    began: float
    num_left: int
    """Number of completions that are running or waiting for their environment."""
    ended: dict[int, Spans] = field(default_factory=dict)
    """Spans of the completions that have ended, by number."""


@dataclass(slots=True, eq=False)
class Timeline:
    """Scheduled calls, ordered by time and then by the order in which they were added."""

    now: float = 0.0
    _calls: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _serial: itertools.count[int] = field(default_factory=itertools.count)

    def at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (time, next(self._serial), call))

    def after(self, duration: float, call: Callable[[], None]) -> None:
        """Schedule a call after ``duration``, or make it immediately if that is zero."""
        if duration > 0.0:
            self.at(self.now + duration, call)
        else:
            call()

    def next_time(self) -> float:
        """Return the time of the next call; infinity if there is none."""
        return self._calls[0][0] if self._calls else math.inf

    def make_next_call(self) -> None:
        time, _, call = heapq.heappop(self._calls)
        self.now = max(self.now, time)
        call()


@dataclass(slots=True, eq=False)
class SimulatedRun:
    """Drives a dispatcher, whose requests take simulated time on servers and whose steps take simulated time on a
    trainer."""

    setup: Setup
    dispatcher: Dispatcher
    timeline: Timeline = field(default_factory=Timeline)
    version: int = 0
    servers: dict[str, SimulatedServer] = field(init=False)
    trainer: SimulatedTrainer = field(init=False)
    requests: dict[str, SimulatedRequest] = field(default_factory=dict)
    returned: list[tuple[SimulatedRequest, list[SimulatedCompletion]]] = field(default_factory=list)
    """Aborted requests and their partial completions, which the run receives after its next decision."""
    phase: deque[Sequence[Group]] = field(default_factory=deque)
    """The steps of a conventional phase that have not been trained yet."""
    outcome: SimulationResult = field(default_factory=SimulationResult)
    _changed: dict[str, SimulatedServer] = field(default_factory=dict)
    """Servers for which `SimulatedServer.next_end` must be recomputed."""
    _load: tuple[int, bool] = (0, False)
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        setup = self.setup
        self.servers = {endpoint.name: SimulatedServer(endpoint) for endpoint in setup.endpoints}
        self.trainer = SimulatedTrainer(setup.trainer)
        self.outcome.law = self.dispatcher.steps.law
        self.outcome.num_slots = sum(endpoint.capacity for endpoint in setup.endpoints)
        self._random = random.Random(setup.seed)

    # ------------------------------------------------------------------------------------------------------- the loop

    def run(self) -> SimulationResult:
        for name, server in self.servers.items():
            endpoint = server.endpoint
            self.dispatcher.endpoints.add(name, endpoint.capacity, keeps_partials=endpoint.keeps_partials, now=0.0)
        self._join(*self.servers.values())
        self.dispatcher.want_step(0, 0.0)
        self._carry_out_commands()
        while not self._is_over():
            if self.dispatcher.has_news:
                self._decide()
            while self.returned:
                self._end_returned()
                self._decide()
            self._share()
            self._look_ahead()
            if (time := self.timeline.next_time()) == math.inf:
                raise InvalidRequestError(
                    f"the simulation stalled at version {self.version}: {len(self.dispatcher.open)} groups are open "
                    f"and {self.dispatcher.steps.waiting.num_groups} are waiting; "
                    f"{self.dispatcher.oldest} is the oldest"
                )
            while self.timeline.next_time() <= time and not self._is_over():
                self.timeline.make_next_call()
                self._carry_out_commands()
        return self._closed()

    def _is_over(self) -> bool:
        return self.version >= self.setup.num_steps

    def _closed(self) -> SimulationResult:
        for name, server in self.servers.items():
            server.advance(self.timeline.now)
            self.outcome.busy[name], self.outcome.slot_time[name] = server.busy_time, server.slot_time
        self.outcome.time, self.outcome.train_time = self.timeline.now, self.trainer.busy_time
        self.outcome.scheduler = dict(self.setup.scheduler.metrics())
        return self.outcome

    def _advance_server(self, server: SimulatedServer) -> SimulatedServer:
        """Advance a server to the current time, because it is about to change, and return it."""
        server.advance(self.timeline.now)
        self._changed[server.endpoint.name] = server
        return server

    def _share(self) -> None:
        """Update the slowdown of processes that share cores."""
        if not self.setup.contention.is_any:
            return
        load = sum(server.num_running > 0 for server in self.servers.values()), self.trainer.is_working
        if load == self._load:
            return
        self._load = load
        factor = self.setup.contention.of(sum(load))
        for server in self.servers.values():
            self._advance_server(server).slowdown = factor
        if self.trainer.is_busy:
            self.trainer.slow_down(self.timeline.now, factor)
            self._look_at_trainer()

    def _look_ahead(self) -> None:
        for server in self._changed.values():
            server.stamp += 1
            if (end := server.next_end()) < math.inf:
                self.timeline.at(end, lambda server=server, stamp=server.stamp: self._server_event(server, stamp))  # type: ignore[misc]
        self._changed.clear()

    def _look_at_trainer(self) -> None:
        stamp = self.trainer.stamp
        self.timeline.at(self.trainer.end, lambda: self._trained() if stamp == self.trainer.stamp else None)

    # ------------------------------------------------------------------------------------------------------- commands

    def _decide(self) -> None:
        dispatcher, now = self.dispatcher, self.timeline.now
        while True:
            while (item := dispatcher.next_item()) is not None:
                prompted = self.setup.prompted(item, self.version)
                size = len(prompted.lengths)
                dispatcher.offer(item, prompted.prompt, prompted.num_prompt_tokens, size, prompted, now)
            has_decided = dispatcher.decide(now)
            self._carry_out_commands()
            if not has_decided:
                return

    def _carry_out_commands(self) -> None:
        while commands := self.dispatcher.take_commands():
            for command in commands:
                match command:
                    case SendRequest():
                        self._send(command)
                    case StopRequests(_, request_ids, keeps_partials):
                        for request_id in request_ids:
                            self._stop(self.requests[request_id], keeps_partials=keeps_partials)
                    case ScoreGroup():
                        self.timeline.after(self.setup.score_time, lambda command=command: self._score(command))  # type: ignore[misc]
                    case FinishedGroup(group):
                        self._record_group(group)
                    case DroppedGroup(_, reason) | DroppedItem(_, reason):
                        self.outcome.dropped[reason] += 1
                    case ComposedStep(version, groups):
                        self._train(groups, version)
                    case ComposedPhase(steps):
                        self.phase.extend(steps)
                        self._next_of_phase()
                    case _:
                        pass

    def _send(self, command: SendRequest) -> None:
        server = self._advance_server(self.servers[command.endpoint])
        numbers, prompted = command.numbers, command.content
        request = SimulatedRequest(command, server, self.timeline.now, len(numbers))
        self.requests[command.request_id] = request
        endpoint, num_before = server.endpoint, 0 if command.partial is None else command.partial.num_tokens
        time = endpoint.admission_time + endpoint.admission_time_each * len(numbers)
        time += endpoint.prompt_token_time * (prompted.num_prompt_tokens + num_before)
        if time > 0.0:
            server.delay(time * server.slowdown)
        server.num_held += len(numbers)
        for i in numbers:
            length = prompted.lengths[i] - num_before
            server.begin((command.request_id, i), length, prompted.num_prompt_tokens + num_before)

    def _server_event(self, server: SimulatedServer, stamp: int) -> None:
        """Handle the completions of a server that end now."""
        if stamp != server.stamp:
            return
        ended = []
        for job in self._advance_server(server).take_ended(at_least_one=True):
            request_id, i = job.key
            request = self.requests[request_id]
            prompted, partial = request.command.content, request.command.partial
            num_before = 0 if partial is None else partial.num_tokens
            request.ended[i] = continue_spans(partial, server, job, prompted.lengths[i] - num_before)
            ended.append((request, prompted.waits[i] if prompted.waits else 0.0))
        for request, wait in ended:  # after all are recorded, because the end of one may cause others to be stopped
            if wait > 0.0:
                self.timeline.after(wait, lambda request=request: self._one_ended(request))  # type: ignore[misc]
            else:
                self._one_ended(request)

    def _one_ended(self, request: SimulatedRequest) -> None:
        request.num_left -= 1
        if request.num_left == 0:
            self.timeline.after(request.server.endpoint.request_time, lambda: self._end(request))

    def _end(self, request: SimulatedRequest) -> None:
        """Report a request whose completions have all ended, unless it was stopped."""
        command = request.command
        if command.request_id not in self.requests:
            return
        self._leave_server(request)
        self.outcome.num_completions += len(command.numbers)
        if self.setup.record is not None:
            self._record_request(request)
        sampled = [SimulatedCompletion(request.ended[i], is_whole=True) for i in command.numbers]
        self.dispatcher.request_ended(command, sampled, self.timeline.now)

    def _stop(self, request: SimulatedRequest, *, keeps_partials: bool) -> None:
        """Remove a request from its server, and report its partial completions if the server keeps them."""
        server, command = self._leave_server(request), request.command
        sampled = []
        for i in command.numbers:
            if (spans := request.ended.get(i)) is not None:
                sampled.append(SimulatedCompletion(spans, is_whole=True))
                continue
            job = server.jobs[command.request_id, i]
            num_tokens = server.remove(job.key)
            sampled.append(
                SimulatedCompletion(continue_spans(command.partial, server, job, num_tokens), is_whole=False)
            )
        if keeps_partials:
            self.outcome.num_completions += len(request.ended)
            self.returned.append((request, sampled))
        else:
            num_before = 0 if command.partial is None else command.partial.num_tokens
            self.outcome.num_lost_tokens += sum(one.num_tokens - num_before for one in sampled)
            self.dispatcher.request_ended(command, (), self.timeline.now)

    def _leave_server(self, request: SimulatedRequest) -> SimulatedServer:
        del self.requests[request.command.request_id]
        server = self._advance_server(request.server)
        server.num_held -= len(request.command.numbers)
        return server

    def _end_returned(self) -> None:
        """Report the end of the aborted requests one by one."""
        returned, self.returned = self.returned, []
        for request, sampled in returned:
            self.dispatcher.request_ended(request.command, sampled, self.timeline.now)
            self._carry_out_commands()

    def _score(self, command: ScoreGroup) -> None:
        scored = scored_group(command.content, command.sampled)
        self.dispatcher.group_scored(command.item, scored, self.timeline.now)

    # ------------------------------------------------------------------------------------------------------- training

    def _next_of_phase(self) -> None:
        if not self.phase:
            self.dispatcher.want_step(self.version, self.timeline.now)
            return
        self._train(self.phase.popleft(), self.version)

    def _train(self, groups: Sequence[Group], version: int) -> None:
        batch = batch_of(groups, version, self.setup.staleness, self.setup.composer)
        self.trainer.groups = batch.groups

        def begin() -> None:
            self.trainer.begin(self.timeline.now, batch, self.setup.contention.of(self._load[0] + 1))
            self._look_at_trainer()

        self.timeline.at(self.timeline.now + self.setup.publish.turnaround, begin)

    def _trained(self) -> None:
        batch = self.trainer.finish(self.timeline.now)
        items = [group.item_index for group in batch.groups]
        self._record("train", self.trainer.began, version=self.version + 1, items=items)
        is_published = not self.setup.conventional_steps or not self.phase
        if not is_published:
            self._settle(batch, None)
            return
        self.trainer.publishes = True
        cost, since = self.setup.publish, self.timeline.now
        end = since + cost.total * self.setup.contention.of_publish(self._load[0])
        if cost.pause > 0.0:
            self.timeline.at(max(since, end - cost.pause), lambda: self._pause(end))
        self.timeline.at(end, lambda: self._settle(batch, since))

    def _pause(self, until: float) -> None:
        for server in self.servers.values():
            self._advance_server(server).block(until)

    def _settle(self, batch: Batch, published_since: float | None) -> None:
        """Settle the groups of a step that is trained and, if due, published; the next step may then begin."""
        outcome, now = self.outcome, self.timeline.now
        self.dispatcher.settle(batch.groups, now)
        for group in batch.groups:
            outcome.trained.append(group.item_index)
            versions = [rollout.version_spans[0].version for rollout in group.rollouts]
            outcome.group_lags.append(batch.version - min(versions))
        self.version += 1
        self.trainer.groups, self.trainer.publishes = (), False
        for server in self.servers.values():
            server.advance(now)
            if published_since is not None:
                server.serve(self.version)
        busy = sum(server.busy_time for server in self.servers.values())
        slots = sum(server.slot_time for server in self.servers.values())
        outcome.steps.append(batch.row(now, busy, slots, self.trainer.busy_time))
        if published_since is not None:
            pause = self.setup.publish.pause
            pauses = dict.fromkeys(self.servers, pause)
            self._record("publish", published_since, version=self.version, pause_s=pause, paused_s=pauses)
            self._serve()
        self._record("step", now, version=self.version, time_s=now, **batch.fields())
        outcome.num_tokens += batch.num_tokens
        outcome.ages.update(batch.ages)
        outcome.lags.update(batch.lags)
        self.setup.staleness.after_step(self.version, None)
        self._next_of_phase()

    # ------------------------------------------------------------------------------------------------------- failures

    def _serve(self) -> None:
        """Let open servers receive work.

        Within a phase of several steps, they serve a version older than the latest one.
        """
        served = {name: server.version for name, server in self.servers.items() if server.is_open}
        self.dispatcher.endpoints.serve(list(served), max(served.values(), default=self.version), self.timeline.now)

    def _join(self, *servers: SimulatedServer) -> None:
        for server in servers:
            server.is_open = True
            server.advance(self.timeline.now)
            if (mean := server.endpoint.mean_time_to_failure) < math.inf:
                time = self._random.expovariate(1.0 / mean)
                self.timeline.at(self.timeline.now + time, lambda server=server: self._fail(server))  # type: ignore[misc]
        self._serve()

    def _fail(self, server: SimulatedServer) -> None:
        """Fail an endpoint and its requests. The endpoint returns later, with the version served at that time."""
        self._advance_server(server).is_open = False
        self.dispatcher.endpoints.lose(server.endpoint.name, "it failed", self.timeline.now)
        self.timeline.at(self.timeline.now + server.endpoint.restart_time, lambda: self._join(server))

    # ------------------------------------------------------------------------------------------------------- records

    def _record(self, kind: str, start: float, **fields: Any) -> None:
        if self.setup.record is not None:
            self.setup.record(kind, {"start_s": start, "end_s": self.timeline.now, **fields})

    def _record_request(self, request: SimulatedRequest) -> None:
        command = request.command
        parts = [
            {"number": i, "num_tokens": spans[-1][1], "spans": spans, "finish_reason": "stop"}
            for i, spans in request.ended.items()
        ]
        self._record("request", request.began, endpoint=command.endpoint, item=command.item, parts=parts, error=None)

    def _record_group(self, group: Group) -> None:
        if self.setup.record is None:
            return
        versions = [span.version for rollout in group.rollouts for span in rollout.version_spans]
        rewards = [rollout.reward for rollout in group.rollouts]
        lengths = [len(rollout.completion_token_ids) for rollout in group.rollouts]
        self._record(
            "group", self.timeline.now, item=group.item_index, oldest=min(versions), newest=max(versions),
            rewards=rewards, lengths=lengths,
        )  # fmt: skip

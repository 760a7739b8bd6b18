"""A run in simulated time: the same scheduler, staleness policy and composer as in a live run, over modelled costs.

What the live run's sampling, actor and trainer do in between is repeated here without tokens. Costs that are not given
are none: prompts, publishes, rewards and environments then take no time.
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

from inflight.contracts import StalenessPolicy
from inflight.contracts.scheduling import (
    Abort,
    Event,
    Finished,
    Issue,
    Joined,
    Left,
    Offered,
    Published,
    Returned,
    Scored,
    Settled,
    StepReady,
    StepWanted,
    Withdrawn,
)
from inflight.errors import InvalidRequestError
from inflight.planning.groups import OpenGroup, Request, continued, num_kept_tokens, whole_groups
from inflight.planning.outcome import Outcome
from inflight.planning.servers import Server
from inflight.planning.setup import Setup
from inflight.planning.training import Batch, Trainer, batch_of
from inflight.rollouts import TokenBudget, WaitingGroups, teaches
from inflight.rollouts.admission import Admission
from inflight.rollouts.batching import split_evenly
from inflight.types import Group


def simulate(setup: Setup) -> Outcome:
    """Simulate a run. Raises `InvalidRequestError` if the scheduler issues what it may not, or if nothing can go on."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 20)  # a simulation keeps many small objects, and hardly any in cycles
    try:
        return _Run(setup).run()
    finally:
        gc.set_threshold(*before)


@dataclass(slots=True, eq=False)
class _Run:
    setup: Setup
    now: float = 0.0
    version: int = 0
    servers: dict[str, Server] = field(init=False)
    waiting: WaitingGroups = field(init=False)
    admission: Admission = field(init=False)
    trainer: Trainer = field(init=False)
    groups: dict[int, OpenGroup] = field(default_factory=dict)
    """Open ones by item, in the order of offers."""
    num_issued: int = 0
    """Open groups of which something was issued."""
    num_under_way: int = 0
    """Requests that run, and groups that are being scored."""
    num_offered: int = 0
    wanted: int | None = None
    composed: Batch | None = None
    ready_at: float = 0.0
    """When the trainer may begin a step."""
    is_in_phase: bool = False
    phase: deque[Sequence[Group]] = field(default_factory=deque)
    """Steps of a conventional phase that are not trained yet."""
    outcome: Outcome = field(default_factory=Outcome)
    _first_version: dict[int, int] = field(default_factory=dict)
    """Of scored groups that have not been settled, by item."""
    _times: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _serial: itertools.count[int] = field(default_factory=itertools.count)
    _changed: dict[str, Server] = field(default_factory=dict)
    """Servers whose next end must be looked at again."""
    _load: tuple[int, bool] = (0, False)
    _is_news: bool = True
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        setup = self.setup
        self.servers = {endpoint.name: Server(endpoint) for endpoint in setup.endpoints}
        composer = setup.composer or TokenBudget(setup.step_size)
        count = num_kept_tokens if setup.unit == "tokens" else whole_groups
        self.waiting = WaitingGroups(setup.staleness, composer, count)
        self.admission = Admission(setup.step_size, self._expected())
        self.trainer = Trainer(setup.trainer)
        self.outcome.num_slots = sum(endpoint.capacity for endpoint in setup.endpoints)
        self._random = random.Random(setup.seed)

    def _expected(self) -> float:
        if self.setup.unit == "groups":
            return 1.0
        first = self.setup.prompted(0, 0)
        return self.setup.expected_tokens or sum(first.lengths) + len(first.lengths) * first.num_prompt_tokens

    # ------------------------------------------------------------------------------------------------------- the loop

    def run(self) -> Outcome:
        for server in self.servers.values():
            self._join(server)
        self._begin_phase() if self.setup.conventional_steps else self._compose(0)
        while self.version < self.setup.num_steps:
            if self._is_news:  # without, a scheduler has nothing to decide
                self._decide()
                self._is_news = False
            if self.setup.conventional_steps:
                self._end_phase_if_ready()
            self._share()
            self._look_ahead()
            if not self._times:
                raise InvalidRequestError(
                    f"nothing runs at version {self.version}: {len(self.groups)} groups are open and "
                    f"{self.waiting.num_groups} wait; {self.num_offered} were offered"
                )
            self.now = max(self.now, self._times[0][0])
            while self._times and self._times[0][0] <= self.now and self.version < self.setup.num_steps:
                heapq.heappop(self._times)[2]()
        return self._closed()

    def _closed(self) -> Outcome:
        for name, server in self.servers.items():
            server.advance(self.now)
            self.outcome.busy[name], self.outcome.slot_time[name] = server.busy_time, server.slot_time
        self.outcome.time, self.outcome.train_time = self.now, self.trainer.busy_time
        self.outcome.scheduler = dict(self.setup.scheduler.metrics())
        return self.outcome

    def _at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._times, (time, next(self._serial), call))

    def _tell(self, event: Event) -> None:
        self._is_news = True
        self.setup.scheduler.tell(event)

    def _touched(self, server: Server) -> Server:
        """Return a server that is about to change, as it is now."""
        server.advance(self.now)
        self._changed[server.endpoint.name] = server
        return server

    def _share(self) -> None:
        """Let what works slow the rest down, where processes share cores."""
        if not self.setup.contention.is_any:
            return
        load = sum(server.num_running > 0 for server in self.servers.values()), self.trainer.is_working
        if load == self._load:
            return
        self._load = load
        factor = self.setup.contention.of(sum(load))
        for server in self.servers.values():
            self._touched(server).slowdown = factor
        if self.trainer.is_busy:
            self.trainer.slow_down(self.now, factor)
            self._look_at_trainer()

    def _look_ahead(self) -> None:
        for server in self._changed.values():
            server.stamp += 1
            if (end := server.next_end()) < math.inf:
                self._at(end, lambda server=server, stamp=server.stamp: self._server_event(server, stamp))  # type: ignore[misc]
        self._changed.clear()

    def _look_at_trainer(self) -> None:
        stamp = self.trainer.stamp
        self._at(self.trainer.end, lambda: self._trained() if stamp == self.trainer.stamp else None)

    # ------------------------------------------------------------------------------------------------------- sampling

    def _decide(self) -> None:
        scheduler = self.setup.scheduler
        while True:
            while scheduler.num_wanted() > 0 and self._may_offer():
                item, self.num_offered = self.num_offered, self.num_offered + 1
                group = OpenGroup.of(item, self.num_offered, self.setup.prompted(item, self.version))
                self.groups[item] = group
                self._tell_offered(group)
            decisions = scheduler.decide(self.now)
            if not decisions:
                return
            for decision in decisions:
                match decision:
                    case Issue(endpoint, item, completions):
                        self._issue(self.servers[endpoint], self.groups[item], completions)
                    case Abort(item, completions):
                        group = self.groups[item]
                        for request in {id(r): r for i in completions if (r := group.requests.get(i))}.values():
                            self._end(request, keeps=request.server.endpoint.keeps_partials)

    def _tell_offered(self, group: OpenGroup) -> None:
        num_tokens = tuple(group.num_tokens(i) for i in range(len(group.spans)))
        self._tell(Offered(self.now, group.item, group.prompted.prompt, group.prompted.num_prompt_tokens, num_tokens))

    def _may_offer(self) -> bool:
        setup = self.setup
        if setup.conventional_steps:
            steps, surplus = setup.conventional_steps, setup.scheduler.surplus
            return self.is_in_phase and self.admission.in_phase(
                self.waiting.num_tokens, len(self.groups), steps, surplus
            )
        in_training = len(self.trainer.groups) + (len(self.composed.groups) if self.composed is not None else 0)
        return self.admission.in_pipeline(
            setup.staleness,
            len(self.groups) + self.waiting.num_groups + in_training,
            is_step_ready=self._is_ready(),
            is_idle=not self.trainer.groups and self.composed is None and not self.groups,
        )

    def _issue(self, server: Server, group: OpenGroup, completions: Sequence[int]) -> None:
        if not server.is_open or server.num_held + len(completions) > server.endpoint.capacity:
            raise InvalidRequestError(
                f"{server.endpoint.name} was given more than its {server.endpoint.capacity}, or is gone"
            )
        for i in completions:
            if i in group.requests or group.is_finished[i]:
                raise InvalidRequestError(
                    f"completion {i} of item {group.item} was issued while it ran or had finished"
                )
        if group.first_version is None:
            group.first_version = server.version
            self.num_issued += 1
        fresh = tuple(i for i in completions if not group.spans[i])
        together = [fresh] if self.setup.whole_requests and fresh else [(i,) for i in fresh]
        for numbers in [*together, *((i,) for i in completions if group.spans[i])]:
            self._request(self._touched(server), group, numbers)

    def _request(self, server: Server, group: OpenGroup, numbers: tuple[int, ...]) -> None:
        request = Request(group.item, numbers, server, len(numbers), self.now)
        prompted, endpoint = group.prompted, server.endpoint
        time = endpoint.admission_time + endpoint.admission_time_each * len(numbers)
        if endpoint.prompt_token_time > 0.0:
            time += endpoint.prompt_token_time * (
                prompted.num_prompt_tokens + sum(group.num_tokens(i) for i in numbers)
            )
        if time > 0.0:
            server.delay(time * server.slowdown)
        server.num_held += len(numbers)
        self.num_under_way += 1
        for i in numbers:
            group.begun[i] = server.version
            group.requests[i] = request
            num_before = group.num_tokens(i)
            server.begin((group.item, i), prompted.lengths[i] - num_before, prompted.num_prompt_tokens + num_before)

    def _server_event(self, server: Server, stamp: int) -> None:
        if stamp != server.stamp:
            return
        ended = []
        for job in self._touched(server).take_ended(at_least_one=True):
            item, i = job.key
            group = self.groups[item]
            request = group.requests[i]
            length = group.prompted.lengths[i] - group.num_tokens(i)
            request.ended[i] = continued(group.spans[i], server, job, length)
            ended.append((request, group.prompted.waits[i] if group.prompted.waits else 0.0))
        for request, wait in ended:  # once all are noted: the end of one may let others be withdrawn
            if wait > 0.0:
                self._at(self.now + wait, lambda request=request: self._one_ended(request))  # type: ignore[misc]
            else:
                self._one_ended(request)

    def _one_ended(self, request: Request) -> None:
        request.num_left -= 1
        if request.num_left or request.is_over:
            return
        if (time := request.server.endpoint.request_time) > 0.0:
            self._at(self.now + time, lambda: self._end(request, keeps=True))
        else:
            self._end(request, keeps=True)

    def _end(self, request: Request, *, keeps: bool) -> None:
        """End a request: completions that have ended are finished, and the others are returned with what they have.

        Without ``keeps``, a request of which something is missing begins anew.
        """
        if request.is_over:
            return
        request.is_over = True
        self.num_under_way -= 1
        server, group = self._touched(request.server), self.groups[request.item]
        if self.setup.record is not None and len(request.ended) == len(request.numbers):
            self._record_request(request)
        is_whole = len(request.ended) == len(request.numbers)
        server.num_held -= len(request.numbers)
        for i in request.numbers:
            del group.requests[i]
            if i not in request.ended:
                job = server.jobs[request.item, i]
                num_tokens = server.remove(job.key)
                if keeps and num_tokens:
                    group.spans[i] = continued(group.spans[i], server, job, num_tokens)
                else:
                    self.outcome.num_lost_tokens += num_tokens
                group.begun[i] = None
                self._tell(Returned(self.now, request.item, i, group.num_tokens(i)))
            elif keeps or is_whole:
                group.spans[i], group.is_finished[i] = request.ended[i], True
                self.outcome.num_completions += 1
                self._tell(Finished(self.now, request.item, i, group.prompted.lengths[i]))
            else:
                self.outcome.num_lost_tokens += group.prompted.lengths[i] - group.num_tokens(i)
                group.begun[i] = None
                self._tell(Returned(self.now, request.item, i, group.num_tokens(i)))
        if all(group.is_finished):
            group.is_scoring = True
            self.num_under_way += 1
            if (time := self.setup.score_time) > 0.0:
                self._at(self.now + time, lambda: self._scored(group))
            else:
                self._scored(group)

    def _record_request(self, request: Request) -> None:
        parts = [
            {"number": i, "num_tokens": spans[-1][1], "spans": spans, "finish_reason": "stop"}
            for i, spans in request.ended.items()
        ]
        self._record(
            "request", request.began, endpoint=request.server.endpoint.name, item=request.item, parts=parts, error=None
        )

    def _record(self, kind: str, start: float, **fields: Any) -> None:
        if self.setup.record is not None:
            self.setup.record(kind, {"start_s": start, "end_s": self.now, **fields})

    def _scored(self, group: OpenGroup) -> None:
        del self.groups[group.item]
        self.num_issued -= 1
        self.num_under_way -= 1
        prompted = group.prompted
        rewards = prompted.rewards or (0.0,) * len(prompted.lengths)
        self.setup.history.record(prompted.prompt, prompted.lengths, rewards)
        self._tell(Scored(self.now, group.item, prompted.prompt, prompted.lengths, rewards))
        finished = group.as_group()
        if self.setup.record is not None:
            versions = [version for spans in group.spans for _, _, version in spans]
            self._record(
                "group", self.now, item=group.item, oldest=min(versions), newest=max(versions), rewards=rewards,
                lengths=prompted.lengths,
            )  # fmt: skip
        self._first_version[group.item] = min(spans[0][2] for spans in group.spans)
        if not self.setup.trains_on_equal_rewards and not teaches(finished):
            self._drop(group.item, "equal rewards", counts=True)
        elif self.setup.composer is not None and not self.setup.composer.accepts(finished):
            self._drop(group.item, "filtered", counts=True)
        elif self.waiting.add(finished):
            self.admission.finished(finished.num_tokens if self.setup.unit == "tokens" else 1)
        else:
            self._drop(group.item, "stale")
        self._go_on()

    def _drop(self, item: int, reason: str, *, counts: bool = False) -> None:
        if counts:
            self.admission.finished(0)
        self.outcome.dropped[reason] += 1
        self.outcome.law.left(self._first_version.pop(item), is_trained=False)
        self._tell(Settled(self.now, item, is_trained=False))

    def _drop_stale(self) -> None:
        """Drop the groups, finished or not, that no step from now on can train on."""
        version = self.wanted if self.wanted is not None else self.version
        for finished in self.waiting.advance(version):
            self._drop(finished.item_index, "stale")
        if type(self.setup.staleness).can_train is StalenessPolicy.can_train:
            return
        for group in [*self.groups.values()]:
            firsts = group.first_versions()
            if group.is_scoring or any(v is None or self.setup.staleness.can_train(v, version) for v in firsts):
                continue
            self._tell(Withdrawn(self.now, group.item))
            for request in {id(r): r for r in group.requests.values()}.values():
                request.is_over = True
                self.num_under_way -= 1
                server = self._touched(request.server)
                server.num_held -= len(request.numbers)
                for i in request.numbers:
                    if i not in request.ended:
                        server.remove((group.item, i))
            del self.groups[group.item]
            self.num_issued -= 1
            self.outcome.dropped["stale"] += 1
            self.outcome.law.left(min(v for v in firsts if v is not None), is_trained=False)

    # ------------------------------------------------------------------------------------------------------- training

    def _order(self) -> tuple[int, float]:
        first = next(iter(self.groups.values()), None)
        return self.num_offered + 1 if first is None else first.serial, self.admission.groups_per_step

    def _is_ready(self) -> bool:
        return self.waiting.ready(*self._order())

    def _go_on(self) -> None:
        """Compose a step if there is enough for it."""
        if self.wanted is not None and self._is_ready():
            groups = self.waiting.take(*self._order())
            self.composed = self._batch(groups, self.wanted)
            self._tell(StepReady(self.now, self.wanted))
            self.wanted = None
            self._train_if_idle()

    def _compose(self, version: int) -> None:
        self.wanted = version
        self._drop_stale()
        self._tell(StepWanted(self.now, version, self.admission.num_groups()))
        self._go_on()

    def _begin_phase(self) -> None:
        self._drop_stale()
        self.is_in_phase = True
        self._tell(StepWanted(self.now, self.version, self.admission.num_groups(self.setup.conventional_steps)))

    def _end_phase_if_ready(self) -> None:
        steps = self.setup.conventional_steps
        if self.is_in_phase and self.waiting.num_tokens >= steps * self.setup.step_size:
            self.is_in_phase = False
            self._tell(StepReady(self.now, self.version))
            self._decide()
        if not self.is_in_phase and not self.num_under_way and not self.trainer.groups and not self.phase:
            self._drop_stale()
            self.phase.extend(split_evenly(self.waiting.take_all(), steps))
            self._next_of_phase()

    def _next_of_phase(self) -> None:
        self.composed = self._batch(self.phase.popleft(), self.version)
        self._train_if_idle()

    def _batch(self, groups: Sequence[Group], version: int) -> Batch:
        return batch_of(groups, version, self.setup.staleness, self.setup.composer)

    def _train_if_idle(self) -> None:
        if self.composed is None or self.trainer.groups:
            return
        batch, self.composed = self.composed, None
        self.trainer.groups = batch.groups  # it is under way from now on, and begins once the last step is settled

        def begin() -> None:
            self.trainer.begin(self.now, batch, self.setup.contention.of(self._load[0] + 1))
            self._look_at_trainer()

        self._at(max(self.now, self.ready_at) + self.setup.publish.turnaround, begin)
        if not self.setup.conventional_steps:
            self._compose(batch.version + 1)

    def _trained(self) -> None:
        batch = self.trainer.finish(self.now)
        items = [group.item_index for group in batch.groups]
        self._record("train", self.trainer.began, version=self.version + 1, items=items)
        is_published = not self.setup.conventional_steps or not self.phase
        if not is_published:
            self._settle(batch, None)
            return
        self.trainer.publishes = True
        cost, since = self.setup.publish, self.now
        end = since + cost.total * self.setup.contention.of_publish(self._load[0])
        if cost.pause > 0.0:
            self._at(max(since, end - cost.pause), lambda: self._pause(end))
        self._at(end, lambda: self._settle(batch, since))

    def _pause(self, until: float) -> None:
        for server in self.servers.values():
            self._touched(server).block(until)

    def _settle(self, batch: Batch, published_since: float | None) -> None:
        """A step is complete, and published, if it was: its groups are settled, and the next one may begin."""
        law, outcome = self.outcome.law, self.outcome
        num_composed = (len(self.composed.groups) if self.composed is not None else 0) + sum(map(len, self.phase))
        queued = self.waiting.num_groups + num_composed
        for group in batch.groups:
            law.left(self._first_version.pop(group.item_index), is_trained=True)
            outcome.trained.append(group.item_index)
            versions = [r.version_spans[0].version for r in group.rollouts]
            outcome.group_lags.append(batch.version - min(versions))
            self._tell(Settled(self.now, group.item_index, is_trained=True))
        law.stepped(self.num_issued, queued, len(batch.groups))
        self.version += 1
        self.trainer.groups, self.trainer.publishes, self.ready_at = (), False, self.now
        for server in self.servers.values():
            server.advance(self.now)
            if published_since is not None:
                server.serve(self.version)
        busy = sum(server.busy_time for server in self.servers.values())
        slots = sum(server.slot_time for server in self.servers.values())
        outcome.steps.append(batch.row(self.now, busy, slots, self.trainer.busy_time))
        if published_since is not None:
            pause = self.setup.publish.pause
            pauses = dict.fromkeys(self.servers, pause)
            self._record("publish", published_since, version=self.version, pause_s=pause, paused_s=pauses)
        self._record("step", self.now, version=self.version, time_s=self.now, **batch.fields())
        outcome.num_tokens += batch.num_tokens
        outcome.ages.update(batch.ages)
        outcome.lags.update(batch.lags)
        self._tell(Published(self.now, self.version))
        self.setup.staleness.after_step(self.version, None)
        if not self.setup.conventional_steps:
            self._train_if_idle()
        elif self.phase:
            self._next_of_phase()
        else:
            self._begin_phase()

    # ------------------------------------------------------------------------------------------------------- failures

    def _join(self, server: Server) -> None:
        endpoint = server.endpoint
        server.is_open = True
        if server.now < self.now:
            server.advance(self.now)
        self._tell(Joined(self.now, endpoint.name, endpoint.capacity, endpoint.keeps_partials))
        if endpoint.mean_time_to_failure < math.inf:
            time = self._random.expovariate(1.0 / endpoint.mean_time_to_failure)
            self._at(self.now + time, lambda: self._fail(server))

    def _fail(self, server: Server) -> None:
        """An endpoint is gone, with what ran there; it comes back with the next version that is published."""
        self._touched(server).is_open = False
        self._tell(Left(self.now, server.endpoint.name))
        for group in [*self.groups.values()]:
            for request in {id(r): r for r in group.requests.values() if r.server is server}.values():
                self._end(request, keeps=False)
        self._at(self.now + server.endpoint.restart_time, lambda: self._join(server))

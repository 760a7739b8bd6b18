"""A run in simulated time: the same scheduler objects as in a live run, driven by a model of endpoints and trainer.

An endpoint with b running completions takes max(1, b / knee) units of time per token of each: flat up to the knee of
its roofline, and limited by throughput beyond it. Prompts, publishes and rewards take no time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inflight.contracts import Scheduler
from inflight.errors import InvalidRequestError
from inflight.rollouts.history import HistoryStore
from inflight.scheduling import (
    Abort,
    Finished,
    Issue,
    Joined,
    Offered,
    Published,
    Returned,
    Scored,
    Settled,
    StepReady,
    StepWanted,
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model of one endpoint: up to ``capacity`` completions at a time, whose tokens are slower beyond ``knee``."""

    name: str
    capacity: int
    knee: float = math.inf

    def token_time(self, num_running: int) -> float:
        return max(1.0, num_running / self.knee)


@dataclass(slots=True)
class Outcome:
    """What a simulated run did. Times are in units of one token of an endpoint below its knee."""

    time: float = 0.0
    num_tokens: int = 0
    """Tokens of trained groups."""
    num_lost_tokens: float = 0.0
    """Tokens of aborted completions that were not kept."""
    busy: dict[str, float] = field(default_factory=dict)
    """Time with something running, by endpoint; ``slot_time``: running completions times time."""
    slot_time: dict[str, float] = field(default_factory=dict)
    group_lags: list[int] = field(default_factory=list)
    """For each trained group, the trainer's version minus the version when it was first issued."""
    trained: list[int] = field(default_factory=list)
    """Items in the order in which they were trained."""

    @property
    def utilisation(self) -> float:
        """Share of the time in which an endpoint runs something, averaged over the endpoints."""
        return sum(self.busy.values()) / (len(self.busy) * self.time)

    @property
    def tokens_per_time(self) -> float:
        """Trained tokens per unit of time."""
        return self.num_tokens / self.time


@dataclass(slots=True)
class _Running:
    item: int
    completion: int
    num_left: float


@dataclass(slots=True)
class _Group:
    lengths: tuple[int, ...]
    sampled: list[float]
    first_version: int | None = None
    num_finished: int = 0


class _Run:
    def __init__(
        self,
        scheduler: Scheduler,
        endpoints: Sequence[Endpoint],
        lengths: Callable[[int], tuple[int, ...]],
        prompt: Callable[[int], str],
        history: HistoryStore,
    ) -> None:
        self.scheduler = scheduler
        self.history = history
        self.endpoints = {endpoint.name: endpoint for endpoint in endpoints}
        self.running: dict[str, list[_Running]] = {endpoint.name: [] for endpoint in endpoints}
        self.active: set[tuple[int, int]] = set()
        """(item, completion) pairs that run."""
        self.groups: dict[int, _Group] = {}
        self.finished: deque[tuple[int, _Group]] = deque()
        self.lengths = lengths
        self.prompt = prompt
        self.now = 0.0
        self.version = 0
        self.num_offered = 0
        self.outcome = Outcome(busy=dict.fromkeys(self.running, 0.0), slot_time=dict.fromkeys(self.running, 0.0))

    @property
    def num_running(self) -> int:
        return sum(map(len, self.running.values()))

    def next_end(self) -> float:
        """Return how long it takes until a completion ends."""
        return min(
            (
                min(one.num_left for one in running) * self.endpoints[name].token_time(len(running))
                for name, running in self.running.items()
                if running
            ),
            default=math.inf,
        )

    def advance(self, duration: float) -> None:
        """Let time pass, and end what is complete then."""
        self.now += duration
        for name, running in self.running.items():
            if not running:
                continue
            self.outcome.busy[name] += duration
            self.outcome.slot_time[name] += duration * len(running)
            num_tokens = duration / self.endpoints[name].token_time(len(running))
            for one in running:
                one.num_left -= num_tokens
            ended = [one for one in running if one.num_left <= 1e-9]
            self.running[name] = [one for one in running if one.num_left > 1e-9]
            for one in ended:
                self._end(one)

    def _end(self, one: _Running) -> None:
        group = self.groups[one.item]
        length = group.lengths[one.completion]
        group.sampled[one.completion] = length
        group.num_finished += 1
        self.active.remove((one.item, one.completion))
        self.scheduler.tell(Finished(self.now, one.item, one.completion, length))
        if group.num_finished == len(group.lengths):
            del self.groups[one.item]
            rewards = (0.0,) * len(group.lengths)
            self.history.record(self.prompt(one.item), group.lengths, rewards)
            self.finished.append((one.item, group))
            self.scheduler.tell(Scored(self.now, one.item, self.prompt(one.item), group.lengths, rewards))

    def decide(self, may_offer: Callable[[], bool]) -> None:
        while True:
            while self.scheduler.num_wanted() > 0 and may_offer():
                item, self.num_offered = self.num_offered, self.num_offered + 1
                lengths = self.lengths(item)
                self.groups[item] = _Group(lengths, [0.0] * len(lengths))
                self.scheduler.tell(Offered(self.now, item, self.prompt(item), 1, (0,) * len(lengths)))
            decisions = self.scheduler.decide(self.now)
            if not decisions:
                return
            for decision in decisions:
                match decision:
                    case Issue(endpoint, item, completions):
                        self._issue(endpoint, item, completions)
                    case Abort(item, completions):
                        self._abort(item, completions)

    def _issue(self, endpoint: str, item: int, completions: Sequence[int]) -> None:
        group = self.groups[item]
        if group.first_version is None:
            group.first_version = self.version
        for i in completions:
            if (item, i) in self.active or group.sampled[i] >= group.lengths[i]:
                raise InvalidRequestError(f"completion {i} of item {item} was issued while it ran or had finished")
            self.active.add((item, i))
            self.running[endpoint].append(_Running(item, i, group.lengths[i] - group.sampled[i]))
        if len(self.running[endpoint]) > self.endpoints[endpoint].capacity:
            raise InvalidRequestError(f"{endpoint} was given more than its {self.endpoints[endpoint].capacity}")

    def _abort(self, item: int, completions: Sequence[int]) -> None:
        group = self.groups[item]
        for running in self.running.values():
            for one in [one for one in running if one.item == item and one.completion in completions]:
                running.remove(one)
                self.active.remove((item, one.completion))
                group.sampled[one.completion] = math.floor(group.lengths[one.completion] - one.num_left)
                self.scheduler.tell(Returned(self.now, item, one.completion, int(group.sampled[one.completion])))


def simulate(
    scheduler: Scheduler,
    endpoints: Sequence[Endpoint],
    lengths: Callable[[int], tuple[int, ...]],
    *,
    history: HistoryStore,
    groups_per_step: int,
    num_steps: int,
    step_time: float = 0.0,
    max_lag: int = 8,
    conventional: bool = False,
    prompt: Callable[[int], str] = str,
) -> Outcome:
    """Simulate ``num_steps`` optimizer steps of ``groups_per_step`` groups, each of which trains for ``step_time``.

    ``lengths`` gives the true lengths of the completions of an item, and ``prompt`` what identifies its prompt. In the
    pipeline (the default) at most (``max_lag`` + 1) steps of groups are outstanding, and trainer and endpoints work at
    the same time. In conventional mode they take turns, and a step waits for all that it was offered. Raises
    `InvalidRequestError` if the scheduler issues what it may not, or if nothing can go on.
    """
    run = _Run(scheduler, endpoints, lengths, prompt, history)
    for endpoint in endpoints:
        scheduler.tell(Joined(0.0, endpoint.name, endpoint.capacity, keeps_partials=True))
    trained_at = math.inf
    is_wanted = False
    batch: list[tuple[int, _Group]] = []
    num_offered_before = 0

    def may_offer() -> bool:
        if conventional:
            limit = math.ceil(scheduler.surplus * groups_per_step)
            is_open = trained_at == math.inf and len(run.finished) < groups_per_step
            return is_open and len(run.groups) + len(run.finished) < limit
        outstanding = len(run.groups) + len(run.finished) + len(batch)
        is_idle = not batch and not run.groups
        return len(run.finished) < groups_per_step and (outstanding < (max_lag + 1) * groups_per_step or is_idle)

    while run.version < num_steps:
        if not is_wanted and trained_at == math.inf:
            is_wanted = True
            num_offered_before = run.num_offered
            scheduler.tell(StepWanted(run.now, run.version, groups_per_step))
        run.decide(may_offer)
        if is_wanted and len(run.finished) >= groups_per_step:
            if conventional and run.num_running > 0:
                scheduler.tell(StepReady(run.now, run.version))
                run.decide(lambda: False)
            if not conventional or run.num_running == 0:
                scheduler.tell(StepReady(run.now, run.version))
                batch = [run.finished.popleft() for _ in range(groups_per_step)]
                is_wanted, trained_at = False, run.now + step_time
                run.decide(may_offer)
        until_end, until_trained = run.next_end(), trained_at - run.now
        if until_end == until_trained == math.inf:
            raise InvalidRequestError(
                f"nothing runs at version {run.version}: {len(run.groups)} groups are open, {len(run.finished)} "
                f"finished, and {run.num_offered - num_offered_before} were offered since the last step"
            )
        run.advance(min(until_end, max(0.0, until_trained)))
        if run.now >= trained_at - 1e-9:
            run.version += 1
            for item, group in batch:
                run.outcome.num_tokens += sum(group.lengths)
                run.outcome.trained.append(item)
                run.outcome.group_lags.append(run.version - 1 - (group.first_version or 0))
                scheduler.tell(Settled(run.now, item, is_trained=True))
            batch, trained_at = [], math.inf
            scheduler.tell(Published(run.now, run.version))
    run.outcome.time = run.now
    return run.outcome

"""The state that most schedulers share: endpoints and their free slots, items and their completions."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from inflight.contracts.scheduling import (
    Abort,
    Decision,
    Event,
    Finished,
    Issue,
    Joined,
    Left,
    Offered,
    Returned,
    Scored,
    Withdrawn,
)


@dataclass(slots=True)
class EndpointLoad:
    """An endpoint and the number of completions that run on it."""

    name: str
    capacity: int
    keeps_partials: bool
    is_open: bool = True
    """Whether completions may be issued to it."""
    num_running: int = 0

    @property
    def num_free(self) -> int:
        """The number of completions that may be issued to it now."""
        return self.capacity - self.num_running if self.is_open else 0

    @property
    def load(self) -> float:
        """The share of the endpoint's capacity that is in use, from 0 to 1."""
        return self.num_running / self.capacity


@dataclass(slots=True)
class OpenItem:
    """An item that has been offered but not scored. Each list has one entry per completion."""

    index: int
    prompt: str
    num_prompt_tokens: int
    num_tokens: list[int]
    """Number of tokens that each completion had when it last finished or was returned."""
    running_on: list[str | None]
    is_finished: list[bool]
    started_s: list[float]
    """When each completion was last issued."""
    serial: int = 0
    """The item's position in the order of offers."""
    unissued: tuple[int, ...] = field(init=False)
    """The completions that are neither running nor finished."""
    running: tuple[int, ...] = field(init=False)
    """The completions that are running."""

    def __post_init__(self) -> None:
        self.recount()

    def recount(self) -> None:
        """Update `unissued` and `running`, which schedulers read far more often than they change."""
        running_on, is_finished = self.running_on, self.is_finished
        self.running = tuple([i for i, where in enumerate(running_on) if where is not None])
        self.unissued = tuple([i for i, where in enumerate(running_on) if where is None and not is_finished[i]])

    @property
    def finished_lengths(self) -> list[int]:
        """The lengths, in tokens, of the completions that have finished."""
        if len(self.unissued) == len(self.num_tokens):
            return []
        return [n for n, is_finished in zip(self.num_tokens, self.is_finished, strict=True) if is_finished]


@dataclass(slots=True)
class Board:
    """Tracks endpoints and items.

    A scheduler passes every event and decision to its board, and bases its decisions on the board.
    """

    endpoints: dict[str, EndpointLoad] = field(default_factory=dict)
    items: dict[int, OpenItem] = field(default_factory=dict)
    """The open items, in the order in which they were offered."""
    recent_lengths: deque[int] = field(default_factory=lambda: deque(maxlen=512))
    """Lengths, in tokens, of the completions that finished most recently."""
    token_s: float | None = None
    """Moving average of the seconds per token of a completion; None until the first one has finished."""
    num_open: int = field(default=0, init=False)
    """The number of completions, over all items, that have not finished."""
    _num_offered: int = field(default=0, init=False)
    _unissued: set[int] = field(default_factory=set, init=False)
    """The items with completions to issue, indexed because schedulers read them at every event."""

    def observe(self, event: Event) -> None:
        """Update the board from an event."""
        match event:
            case Joined(_, name, capacity, keeps_partials):
                old = self.endpoints.get(name)
                num_running = 0 if old is None else old.num_running
                self.endpoints[name] = EndpointLoad(name, capacity, keeps_partials, num_running=num_running)
            case Left(_, name):
                if (endpoint := self.endpoints.get(name)) is not None:
                    endpoint.is_open = False
                    self._forget_if_idle(endpoint)
            case Offered(time_s, item, prompt, num_prompt_tokens, num_tokens):
                size = len(num_tokens)
                self._num_offered += 1
                self.items[item] = OpenItem(
                    item,
                    prompt,
                    num_prompt_tokens,
                    [*num_tokens],
                    [None] * size,
                    [False] * size,
                    [time_s] * size,
                    self._num_offered,
                )
                self.num_open += size
                self._unissued.add(item)
            case Finished(time_s, item, completion, num_tokens):
                if num_tokens:  # an episode that failed or was abandoned has none
                    self.recent_lengths.append(num_tokens)
                if item in self.items:
                    self._note_pace(self.items[item], completion, num_tokens, time_s)
                    self.items[item].is_finished[completion] = True
                    self._stopped(self.items[item], completion, num_tokens)
            case Returned(_, item, completion, num_tokens):
                if item in self.items:
                    self._stopped(self.items[item], completion, num_tokens)
            case Withdrawn(_, item) | Scored(_, item):
                if (gone := self.items.pop(item, None)) is not None:
                    for completion in gone.running:
                        self._stopped(gone, completion, 0)
                    self.num_open -= len(gone.unissued)
                    self._unissued.discard(item)
            case _:
                pass

    def record(self, decision: Decision, time_s: float) -> None:
        """Update the board from a decision. An `Abort` has no effect until its completions are returned."""
        match decision:
            case Issue(endpoint, index, completions):
                item = self.items[index]
                for completion in completions:
                    item.running_on[completion] = endpoint
                    item.started_s[completion] = time_s
                self._recount(item)
                self.endpoints[endpoint].num_running += len(completions)
            case Abort():
                pass

    @property
    def num_running(self) -> int:
        """The number of running completions."""
        return sum(endpoint.num_running for endpoint in self.endpoints.values())

    @property
    def capacity(self) -> int:
        """The number of completions that may run at the same time."""
        return sum(endpoint.capacity for endpoint in self.endpoints.values() if endpoint.is_open)

    def unissued(self) -> list[OpenItem]:
        """Return the items that have completions to issue, oldest first."""
        if not self._unissued:
            return []
        return sorted([self.items[index] for index in self._unissued], key=lambda item: item.serial)

    def median_length(self, otherwise: float = 1.0) -> float:
        """Return the median of the recent lengths, or ``otherwise`` if there are none."""
        return statistics.median(self.recent_lengths) if self.recent_lengths else otherwise

    def estimated_tokens(self, item: OpenItem, completion: int, time_s: float) -> float:
        """Return the estimated number of tokens of a running completion, based on the pace of finished ones."""
        if self.token_s is None:
            return item.num_tokens[completion]
        return item.num_tokens[completion] + (time_s - item.started_s[completion]) / self.token_s

    def least_loaded(self, num_completions: int) -> EndpointLoad | None:
        """Return the least loaded endpoint with at least ``num_completions`` free slots; None if there is none."""
        best, least = None, 0.0
        for endpoint in self.endpoints.values():
            if endpoint.is_open and endpoint.capacity - endpoint.num_running >= num_completions:
                load = endpoint.num_running / endpoint.capacity
                if best is None or load < least:
                    best, least = endpoint, load
        return best

    def _note_pace(self, item: OpenItem, completion: int, num_tokens: int, time_s: float) -> None:
        num_new, elapsed_s = num_tokens - item.num_tokens[completion], time_s - item.started_s[completion]
        if num_new > 0 and elapsed_s > 0:
            pace = elapsed_s / num_new
            self.token_s = pace if self.token_s is None else 0.98 * self.token_s + 0.02 * pace

    def _stopped(self, item: OpenItem, completion: int, num_tokens: int) -> None:
        where, item.running_on[completion] = item.running_on[completion], None
        item.num_tokens[completion] = num_tokens
        self._recount(item)
        if where is not None and where in self.endpoints:
            self.endpoints[where].num_running -= 1
            self._forget_if_idle(self.endpoints[where])

    def _recount(self, item: OpenItem) -> None:
        self.num_open -= len(item.unissued) + len(item.running)
        item.recount()
        self.num_open += len(item.unissued) + len(item.running)
        if item.unissued and item.index in self.items:
            self._unissued.add(item.index)
        else:
            self._unissued.discard(item.index)

    def _forget_if_idle(self, endpoint: EndpointLoad) -> None:
        if not endpoint.is_open and endpoint.num_running == 0:
            del self.endpoints[endpoint.name]

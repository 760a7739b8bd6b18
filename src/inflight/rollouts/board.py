"""What most schedulers know: endpoints and their room, items and what has become of their completions."""

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
    """One endpoint, and how many completions run there."""

    name: str
    capacity: int
    keeps_partials: bool
    is_open: bool = True
    """Whether it may be given work."""
    num_running: int = 0

    @property
    def room(self) -> int:
        """Completions that may be issued to it now."""
        return self.capacity - self.num_running if self.is_open else 0

    @property
    def load(self) -> float:
        """Share of its capacity in use."""
        return self.num_running / self.capacity


@dataclass(slots=True)
class OpenItem:
    """An item that was offered and is not scored yet. Lists have one entry per completion."""

    index: int
    prompt: str
    num_prompt_tokens: int
    num_tokens: list[int]
    """Tokens that are known to be there."""
    running_on: list[str | None]
    is_finished: list[bool]
    started_s: list[float]
    """When it was issued last."""
    serial: int = 0
    """Its place in the order of offers."""
    unissued: tuple[int, ...] = field(init=False)
    """Completions that neither run nor have finished."""
    running: tuple[int, ...] = field(init=False)
    """Completions that run."""

    def __post_init__(self) -> None:
        self.recount()

    def recount(self) -> None:
        """Bring `unissued` and `running` up to date; schedulers read them far more often than they change."""
        running_on, is_finished = self.running_on, self.is_finished
        self.running = tuple([i for i, where in enumerate(running_on) if where is not None])
        self.unissued = tuple([i for i, where in enumerate(running_on) if where is None and not is_finished[i]])

    @property
    def finished_lengths(self) -> list[int]:
        """Lengths of the completions that have finished."""
        if len(self.unissued) == len(self.num_tokens):
            return []
        return [n for n, is_finished in zip(self.num_tokens, self.is_finished, strict=True) if is_finished]


@dataclass(slots=True)
class Board:
    """Follows events and decisions. A scheduler tells it everything, and reads it to decide."""

    places: dict[str, EndpointLoad] = field(default_factory=dict)
    items: dict[int, OpenItem] = field(default_factory=dict)
    """In the order in which they were offered."""
    recent_lengths: deque[int] = field(default_factory=lambda: deque(maxlen=512))
    """Lengths of the completions that finished last."""
    token_s: float | None = None
    """Seconds per token of a running completion, a moving average; None before the first has finished."""
    num_open: int = field(default=0, init=False)
    """Completions that have not finished, of all items."""
    _num_offered: int = field(default=0, init=False)
    _unissued: set[int] = field(default_factory=set, init=False)
    """Items with completions to issue: few of thousands that run, and schedulers ask for them at every event."""

    def tell(self, event: Event) -> None:
        match event:
            case Joined(_, endpoint, capacity, keeps_partials):
                old = self.places.get(endpoint)
                num_running = 0 if old is None else old.num_running
                self.places[endpoint] = EndpointLoad(endpoint, capacity, keeps_partials, num_running=num_running)
            case Left(_, endpoint):
                if (place := self.places.get(endpoint)) is not None:
                    place.is_open = False
                    self._forget_if_idle(place)
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

    def decided(self, decision: Decision, time_s: float) -> None:
        """Take note of a decision as carried out. An `Abort` shows once its completions are returned."""
        match decision:
            case Issue(endpoint, index, completions):
                item = self.items[index]
                for completion in completions:
                    item.running_on[completion] = endpoint
                    item.started_s[completion] = time_s
                self._recount(item)
                self.places[endpoint].num_running += len(completions)
            case Abort():
                pass

    @property
    def num_running(self) -> int:
        """Completions that run."""
        return sum(place.num_running for place in self.places.values())

    @property
    def capacity(self) -> int:
        """Completions that may run at a time."""
        return sum(place.capacity for place in self.places.values() if place.is_open)

    def unissued(self) -> list[OpenItem]:
        """Return the items with completions to issue, oldest first."""
        if not self._unissued:
            return []
        return sorted([self.items[index] for index in self._unissued], key=lambda item: item.serial)

    def median_length(self, otherwise: float = 1.0) -> float:
        """Return the median of the recent lengths."""
        return statistics.median(self.recent_lengths) if self.recent_lengths else otherwise

    def tokens_so_far(self, item: OpenItem, completion: int, time_s: float) -> float:
        """Return an estimate of how many tokens a running completion has, by the pace of those that finished."""
        if self.token_s is None:
            return item.num_tokens[completion]
        return item.num_tokens[completion] + (time_s - item.started_s[completion]) / self.token_s

    def least_loaded(self, num_completions: int) -> EndpointLoad | None:
        """Return the endpoint with the smallest share in use, of those with room for so many completions."""
        best, least = None, 0.0
        for place in self.places.values():
            if place.is_open and place.capacity - place.num_running >= num_completions:
                load = place.num_running / place.capacity
                if best is None or load < least:
                    best, least = place, load
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
        if where is not None and where in self.places:
            self.places[where].num_running -= 1
            self._forget_if_idle(self.places[where])

    def _recount(self, item: OpenItem) -> None:
        self.num_open -= len(item.unissued) + len(item.running)
        item.recount()
        self.num_open += len(item.unissued) + len(item.running)
        if item.unissued and item.index in self.items:
            self._unissued.add(item.index)
        else:
            self._unissued.discard(item.index)

    def _forget_if_idle(self, place: EndpointLoad) -> None:
        if not place.is_open and place.num_running == 0:
            del self.places[place.name]

"""One simulated endpoint. Its clock counts the tokens of a hypothetical completion that is always running.

Every running completion gains tokens at the rate of the clock, so the only state needed is a heap of the clock values
at which completions end. The cost of an event is logarithmic in the number of running completions.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from inflight.planning.costs import Endpoint

Key = tuple[str, int]
"""The request of a completion, and the completion's number in that request."""


class Span(NamedTuple):
    """Tokens sampled by one version. It is cheaper to construct than `inflight.wire.VersionSpan`."""

    start: int
    end: int
    version: int


@dataclass(slots=True, eq=False)
class Job:
    """A completion that is running, has ended or was removed."""

    key: Key
    began: float
    """Clock of the endpoint when the completion began here."""
    end: float
    """Clock of the endpoint when the last token is sampled."""
    is_running: bool = True


@dataclass(slots=True, eq=False)
class SimulatedServer:
    """The state of one endpoint at ``now``. Methods other than `advance` and `next_end` act at that time."""

    endpoint: Endpoint
    now: float = 0.0
    clock: float = 0.0
    num_running: int = 0
    num_held: int = 0
    """Number of slots held by requests, including those of completions that have ended before others of the same
    request."""
    slowdown: float = 1.0
    """Factor on the time of each token."""
    blocked_until: float = 0.0
    """Nothing is sampled before this time."""
    busy_time: float = 0.0
    """Total time during which at least one completion was running."""
    slot_time: float = 0.0
    """Total time during which slots were held, summed over slots."""
    stamp: int = 0
    """Incremented by every change that affects `next_end`."""
    jobs: dict[Key, Job] = field(default_factory=dict)
    is_open: bool = True
    _heap: list[tuple[float, int, Job]] = field(default_factory=list)
    _longest: list[tuple[float, int, Job]] = field(default_factory=list)
    """A heap by the clock at which each completion would have had zero tokens; used only if context costs time."""
    _serial: itertools.count[int] = field(default_factory=itertools.count)
    _times: list[float] = field(init=False)
    """Time of a token, by the number of running completions."""
    _clocks: list[float] = field(default_factory=lambda: [0.0])
    _versions: list[int] = field(default_factory=lambda: [0])
    """The versions served so far; ``_clocks`` has the clock from which on each was served."""

    def __post_init__(self) -> None:
        endpoint = self.endpoint
        self._times = [endpoint.token_time(i) / endpoint.tokens_per_forward for i in range(endpoint.capacity + 1)]

    def _token_time(self) -> tuple[float, float]:
        """Return the time that the next token takes, and how much longer each further token takes than the one
        before."""
        time = self._times[self.num_running] * self.slowdown
        if not self.endpoint.context_time or not self.num_running:
            return time, 0.0
        longest = self._longest
        while not longest[0][2].is_running:
            heapq.heappop(longest)
        growth = self.endpoint.context_time / self.endpoint.tokens_per_forward * self.num_running * self.slowdown
        return time + growth * (self.clock - longest[0][0]), growth

    def advance(self, now: float) -> None:
        """Advance to the time ``now``."""
        elapsed = now - self.now
        if elapsed > 0.0:
            if self.num_running:
                self.busy_time += elapsed
                sampling = now - self.blocked_until if self.blocked_until > self.now else elapsed
                if sampling > 0.0:
                    time, growth = self._token_time()
                    # The solution of sampling = time * tokens + growth * tokens ** 2 / 2.
                    self.clock += 2 * sampling / (time + math.sqrt(time * time + 2 * growth * sampling))
            self.slot_time += elapsed * self.num_held
            self.now = now

    def next_end(self) -> float:
        """Return when the next completion ends if nothing changes before then; infinity if none is running."""
        heap = self._heap
        while heap and not heap[0][2].is_running:
            heapq.heappop(heap)
        if not heap:
            return math.inf
        left = max(0.0, heap[0][0] - self.clock)
        time, growth = self._token_time()
        return max(self.now, self.blocked_until) + left * (time + growth * left / 2)

    def begin(self, key: Key, num_tokens: float, num_before: int = 0) -> None:
        """Start a completion with ``num_tokens`` left to sample, after ``num_before`` tokens including its prompt."""
        job = self.jobs[key] = Job(key, self.clock, self.clock + num_tokens)
        heapq.heappush(self._heap, (job.end, next(self._serial), job))
        if self.endpoint.context_time:
            heapq.heappush(self._longest, (self.clock - num_before, next(self._serial), job))
        self.num_running += 1

    def take_ended(self, *, at_least_one: bool) -> list[Job]:
        """Remove and return the completions that have ended. If ``at_least_one`` is set, the next one counts as
        ended."""
        heap, ended = self._heap, list[Job]()
        while heap:
            end, _, job = heap[0]
            if job.is_running:
                if at_least_one and not ended:
                    self.clock = max(self.clock, end)
                elif end > self.clock + 1e-9:
                    break
                job.is_running = False
                del self.jobs[job.key]
                self.num_running -= 1
                ended.append(job)
            heapq.heappop(heap)
        return ended

    def remove(self, key: Key) -> int:
        """End a running completion; return the number of tokens that it gained here."""
        job = self.jobs.pop(key)
        job.is_running = False
        self.num_running -= 1
        return max(0, min(math.floor(self.clock - job.began + 1e-9), math.ceil(job.end - job.began) - 1))

    def block(self, until: float) -> None:
        """Sample nothing before the time ``until``."""
        self.blocked_until = max(self.blocked_until, until)

    def delay(self, duration: float) -> None:
        """Sample nothing for ``duration`` after any earlier block has ended."""
        self.blocked_until = max(self.blocked_until, self.now) + duration

    def serve(self, version: int) -> None:
        """From now on, sample tokens with this version."""
        if self._clocks[-1] == self.clock:
            self._versions[-1] = version
        else:
            self._clocks.append(self.clock)
            self._versions.append(version)
        if len(self._clocks) > 4096:
            self._forget()

    @property
    def version(self) -> int:
        return self._versions[-1]

    def spans_of(self, job: Job, num_tokens: int, before: int = 0) -> list[Span]:
        """Return the spans of the first ``num_tokens`` tokens of a completion, with positions that start at ``before``.

        Token k was sampled when the clock had moved k tokens from where the completion began.
        """
        i = bisect.bisect_right(self._clocks, job.began) - 1
        spans, start = list[Span](), 0
        while start < num_tokens:
            is_last = i + 1 == len(self._clocks)
            end = num_tokens if is_last else min(num_tokens, math.floor(self._clocks[i + 1] - job.began + 1e-9))
            if end > start:
                spans.append(Span(before + start, before + end, self._versions[i]))
                start = end
            i += 1
        return spans

    def _forget(self) -> None:
        """Drop the versions that sampled none of the tokens of running completions."""
        oldest = min((job.began for job in self.jobs.values()), default=self.clock)
        first = max(0, bisect.bisect_right(self._clocks, oldest) - 1)
        del self._clocks[:first], self._versions[:first]

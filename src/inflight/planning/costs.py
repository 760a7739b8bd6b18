"""What things cost in simulated time: tokens of an endpoint by its load, steps of the trainer, publishes, sharing.

All times are in one unit, seconds where costs were measured.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from inflight.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TokenTime:
    """Time of one token of each running completion, by the number of completions that run: a curve through points.

    Between two points it is linear, before the first one it is flat, and after the last one it continues with the
    slope of the last two. One point is a constant. With a curve that begins flat this is a roofline.
    """

    points: tuple[tuple[float, float], ...]
    """(running completions, time of a token), by completions, ascending."""

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not self.points or sizes != sorted(set(sizes)) or min(time for _, time in self.points) <= 0:
            raise ConfigError(
                f"a curve of token times needs points (running completions, time above 0), ascending; not {self.points}"
            )

    @classmethod
    def roofline(cls, base: float, knee: float = math.inf) -> TokenTime:
        """Return ``base`` up to ``knee`` running completions, and in proportion to their number beyond it."""
        if knee == math.inf:
            return cls(((1.0, base),))
        return cls(((knee, base), (2 * knee, 2 * base)))

    def __call__(self, num_running: float) -> float:
        points = self.points
        if num_running <= points[0][0] or len(points) == 1:
            return points[0][1]
        i = min(bisect.bisect_left(points, (num_running,)), len(points) - 1)
        (low, at_low), (high, at_high) = points[i - 1], points[i]
        return at_low + (at_high - at_low) * (num_running - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model of one endpoint."""

    name: str
    capacity: int
    """Completions that it may be given at a time."""
    token_time: TokenTime = field(default_factory=lambda: TokenTime.roofline(1.0))
    context_time: float = 0.0
    """Added to the time of a token for each token of context that is read: running completions times the tokens of the
    longest, prompt included. So it is where attention pads completions to the longest of them."""
    prompt_token_time: float = 0.0
    """For each token of a prompt, nothing else is sampled for so long. Completions of a request share their prompt."""
    admission_time: float = 0.0
    """For each request, nothing else is sampled for so long; ``admission_time_each``: for each of its completions."""
    admission_time_each: float = 0.0
    request_time: float = 0.0
    """From the end of the last completion of a request until the run has it."""
    tokens_per_forward: float = 1.0
    """1 and the drafted tokens that a forward accepts on average."""
    keeps_partials: bool = True
    mean_time_to_failure: float = math.inf
    """Failures come at random, with this mean time between the start of the endpoint and its failure."""
    restart_time: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainerCost:
    """Time of an optimizer step: a part for each token, and a part for each step."""

    per_step: float = 0.0
    per_token: float = 0.0

    def __call__(self, num_tokens: int) -> float:
        return self.per_step + self.per_token * num_tokens


@dataclass(frozen=True, slots=True)
class PublishCost:
    """From the end of a step until its version is served."""

    total: float = 0.0
    pause: float = 0.0
    """The last part of it, in which endpoints sample nothing."""
    turnaround: float = 0.0
    """From there until the next step begins, if its batch is ready."""


@dataclass(frozen=True, slots=True)
class Contention:
    """How much slower processes are that share the same cores.

    What was not measured is in proportion to the next larger number that was, or to the largest.
    """

    shared: Mapping[int, float] = field(default_factory=dict)
    """By how many of the endpoints and the trainer work: the factor on the time of each of them. Cores are shared
    fairly, so that it is the same."""
    publish: Mapping[int, float] = field(default_factory=dict)
    """By endpoints that work: the factor on the time of a publish."""

    @property
    def is_any(self) -> bool:
        return bool(self.shared) or bool(self.publish)

    def of(self, num_working: int) -> float:
        return _nearest(self.shared, max(1, num_working))

    def of_publish(self, num_busy: int) -> float:
        return _nearest(self.publish, num_busy)


def _nearest(factors: Mapping[int, float], num: int) -> float:
    """Return the factor for a number; one that was not measured is in proportion, as cores are shared fairly."""
    if not factors or num in factors:
        return factors.get(num, 1.0)
    least = max((factor for known, factor in factors.items() if known < num), default=1.0)
    nearest = min((known for known in factors if known > num), default=max(factors))
    return max(least, factors[nearest] * max(1, num) / max(1, nearest))

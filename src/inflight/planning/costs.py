"""The cost model of simulated runs: token times by load, optimizer steps, publishes, and contention for cores.

All times have the same unit, which is seconds for measured costs.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from inflight.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TokenTime:
    """The time of one decode step as a function of the number of running completions, each of which receives one token.

    The function interpolates linearly between points, is constant before the first, and is extrapolated from the last
    two. With a single point, it is constant. A curve that begins flat is a roofline.
    """

    points: tuple[tuple[float, float], ...]
    """Pairs (running completions, time of a token), in ascending order."""

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not self.points or sizes != sorted(set(sizes)) or min(time for _, time in self.points) <= 0:
            raise ConfigError(
                f"token times must be pairs (running completions, time above 0) in ascending order, not {self.points}"
            )

    @classmethod
    def roofline(cls, base: float, knee: float = math.inf) -> TokenTime:
        """Return a curve that is ``base`` up to ``knee`` running completions and proportional to their number beyond
        that."""
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
    """The maximum number of completions that the endpoint runs at a time."""
    token_time: TokenTime = field(default_factory=lambda: TokenTime.roofline(1.0))
    context_time: float = 0.0
    """Time that each token of context adds to the time of a token. The context is the number of running completions
    times the length of the longest, including its prompt. This models attention that pads all completions to the
    longest."""
    prompt_token_time: float = 0.0
    """How long sampling stops for each prompt token of a new request. Its completions share the prompt."""
    admission_time: float = 0.0
    """How long sampling stops for each new request; ``admission_time_each`` is added for each of its completions."""
    admission_time_each: float = 0.0
    request_time: float = 0.0
    """Time from the end of the last completion of a request until the run receives the answer."""
    tokens_per_forward: float = 1.0
    """1 plus the mean number of drafted tokens that are accepted per forward pass."""
    keeps_partials: bool = True
    mean_time_to_failure: float = math.inf
    """Failures are random, with this mean time between an endpoint's start and its failure."""
    restart_time: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainerCost:
    """The time of an optimizer step: a constant plus a time per token."""

    per_step: float = 0.0
    per_token: float = 0.0

    def __call__(self, num_tokens: int) -> float:
        return self.per_step + self.per_token * num_tokens


_HEADERS = 1.045
"""Bytes on an Ethernet link per byte of payload, because of TCP, IP and frame headers."""


@dataclass(frozen=True, slots=True)
class Links:
    """The links over which weights are sent from trainer hosts to the hosts of endpoints."""

    size_bytes: float
    num_senders: int
    sender_bytes_per_s: float
    """Bandwidth of each sending trainer host's link."""
    endpoint_bytes_per_s: float
    """Bandwidth of each endpoint host's link."""
    are_forwarded: bool = False
    """Whether endpoints forward what they receive, as in gloo's broadcast, which is a binomial tree."""

    def transfer_s(self, num_endpoints: int) -> float:
        """Return how long a transfer takes if each endpoint receives all weights and senders share the sending
        equally."""
        num_sent = num_endpoints.bit_length() if self.are_forwarded else num_endpoints
        # The first endpoint that a sender of a tree serves forwards to one endpoint fewer than the sender does.
        num_through_endpoint = max(1, num_sent - 1) if self.are_forwarded else 1
        sending = num_sent * self.size_bytes / (self.num_senders * self.sender_bytes_per_s)
        return _HEADERS * max(sending, num_through_endpoint * self.size_bytes / self.endpoint_bytes_per_s)


@dataclass(frozen=True, slots=True)
class PublishCost:
    """The time from the end of a step until its version is served. ``links`` add the time of the transfer to
    ``total``."""

    total: float = 0.0
    pause: float = 0.0
    """The last part of ``total``, during which endpoints sample nothing."""
    turnaround: float = 0.0
    """The time from the end of the publish until the next step begins, if its batch is ready."""
    links: Links | None = None

    def with_endpoints(self, num_endpoints: int) -> PublishCost:
        """Return the cost with this number of endpoints."""
        if self.links is None:
            return self
        return replace(self, total=self.total + self.links.transfer_s(num_endpoints), links=None)


@dataclass(frozen=True, slots=True)
class Contention:
    """The slowdown of processes that share cores.

    A factor that was not measured is scaled from the factor of the next larger measured number or, if there is none, of
    the largest measured number.
    """

    shared: Mapping[int, float] = field(default_factory=dict)
    """Factor on the time of each working process, by the number of working endpoints and trainers. It is the same for
    all processes, because cores are shared evenly."""
    publish: Mapping[int, float] = field(default_factory=dict)
    """Factor on the time of a publish, by the number of working endpoints."""

    @property
    def is_any(self) -> bool:
        return bool(self.shared) or bool(self.publish)

    def of(self, num_working: int) -> float:
        return _nearest(self.shared, max(1, num_working))

    def of_publish(self, num_busy: int) -> float:
        return _nearest(self.publish, num_busy)


def _nearest(factors: Mapping[int, float], num: int) -> float:
    """Return the factor for a number. An unmeasured factor is scaled in proportion, as if cores were shared
    evenly."""
    if not factors or num in factors:
        return factors.get(num, 1.0)
    least = max((factor for known, factor in factors.items() if known < num), default=1.0)
    nearest = min((known for known in factors if known > num), default=max(factors))
    return max(least, factors[nearest] * max(1, num) / max(1, nearest))

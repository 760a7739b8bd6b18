"""A simulated trainer: each version of its weights is one shade of a `Palette`.

It reacts to a failed publish as a real trainer does.
"""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from inflight.conformance.calls import PendingCall
from inflight.conformance.fleet.faults import Faults, FaultyEndpoint
from inflight.conformance.fleet.palette import Palette, Shade
from inflight.conformance.fleet.plan import SENDER, Fault, FaultPlan, Transport, UpdateStep
from inflight.conformance.fleet.second_rank import SecondRank
from inflight.conformance.fleet.sender import FaultySender
from inflight.conformance.fleet.servers import Testbed, TestedServer
from inflight.conformance.fleet.sources import ShadeSource
from inflight.conformance.judge import Hung
from inflight.errors import FencedError, InflightError, PublishError
from inflight.types import EndpointOutcome, PublishReport
from inflight.weights.encode.bucket_bytes import Rounding
from inflight.weights.send.endpoint_update import query_endpoint, query_endpoints
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.transports import make_sender
from inflight.wire import DTYPE_SIZES, InFlightPolicy

T = TypeVar("T")

_BUCKET_ELEMENTS = 10_000
CLEAN_UP_S = 6.0
"""How long, in seconds, a publish may take beyond its deadline."""
_CONNECT_S = 2.0
_HANG_S = 20.0
"""A publish that has not returned this many seconds after its deadline counts as hung."""


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """How a trainer publishes; the settings are drawn from a seed."""

    run_id: str
    transport: Transport
    policy: InFlightPolicy
    encoding: Rounding
    delta: bool
    staged: bool
    quorum: int | None
    deadline_s: float
    scale: float
    """Factor for every other deadline."""
    num_senders: int = 1
    """If 2, a second rank in its own process sends a part of the weights."""

    @staticmethod
    def drawn(
        random_: random.Random, plan: FaultPlan, testbed: Testbed, deadline_s: float, num_senders: int
    ) -> TrainerSettings:
        capabilities = testbed.capabilities
        delta = random_.random() < 0.4 and "delta" in capabilities.encodings
        known: Sequence[Rounding] = ("raw", "raw", "bfloat16", *(("float8",) if num_senders == 1 else ()))
        roundings = [it for it in known if it == "raw" or it in capabilities.encodings]
        return TrainerSettings(
            run_id=f"fleet-{plan.seed}",
            transport=plan.transport,
            policy=random_.choice([policy for policy in InFlightPolicy if policy in capabilities.in_flight_policies]),
            encoding="raw" if delta else random_.choice(roundings),
            delta=delta,
            staged=random_.random() < 0.75,
            quorum=random_.choice((None, None, *range(1, testbed.num_servers + 1))),
            deadline_s=deadline_s,
            scale=testbed.scale,
            num_senders=num_senders,
        )


@dataclass(frozen=True, slots=True)
class PublishRecord:
    """One call of `publish_weights`: its report, its duration, and the ``error`` that it raised, if any."""

    shade: Shade
    started: float
    ended: float
    deadline_s: float
    report: PublishReport | None
    error: BaseException | None
    quorum: int | None
    endpoints: tuple[str, ...]

    @property
    def succeeded(self) -> bool:
        """Whether the call returned, which means that its quorum serves the new version."""
        return self.error is None


@dataclass(eq=False)
class FleetTrainer:
    """One incarnation of the run's trainer. If ``given_incarnation`` is None, the trainer determines its own."""

    servers: Sequence[TestedServer]
    faults: Faults
    palette: Palette
    frozen: tuple[str, ...]
    settings: TrainerSettings
    directory: Path
    random_: random.Random
    given_incarnation: int | None
    is_dead: threading.Event = field(default_factory=threading.Event)
    """Set once this trainer makes no more calls."""
    is_fenced: bool = False
    publisher: WeightPublisher | None = None
    published: list[PublishRecord] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._left_out: set[str] = set()
        where = None if self.settings.transport == "gloo" else self.directory
        self._inner_sender = make_sender(self.settings.transport, directory=where)
        self._sender = FaultySender(self._inner_sender, self.directory, self._due, self.is_dead)
        settings = self.settings
        self.second_rank = (
            SecondRank(settings.transport, self.frozen, self.directory, self.faults, self.is_dead, settings.scale)
            if settings.num_senders > 1
            else None
        )

    def _due(self, step: str, bucket: int) -> Fault | None:
        return self.faults.due(SENDER, UpdateStep.SEND, bucket) if step == "send" else None

    @property
    def incarnation(self) -> int:
        """The trainer's incarnation; 0 before it is connected."""
        return 0 if self.publisher is None else self.publisher.incarnation

    def connect(self, num_tries: int = 3) -> bool:
        """Connect to every server that is not gone; return whether all connections succeeded."""
        settings = self.settings
        timeout_s = _CONNECT_S * settings.scale
        for _ in range(num_tries):
            indices = [i for i, server in enumerate(self.servers) if not server.is_gone]
            if not indices or self.is_dead.is_set() or self.is_fenced:
                return False
            publisher = WeightPublisher(
                [FaultyEndpoint(self.servers[i], i, self.faults, self.is_dead) for i in indices],
                self._sender,
                run_id=settings.run_id,
                incarnation=self.given_incarnation,
                encoding=settings.encoding,
                delta=settings.delta,
                staged=settings.staged,
                sharded=None if self.second_rank is None else self.second_rank.source,
                connect_timeout_s=timeout_s,
            )
            try:
                self._guarded(publisher.__enter__, f"connecting within {timeout_s} s", timeout_s)
            except FencedError:
                self.is_fenced = True
            except InflightError:
                time.sleep(0.05)  # a server may be restarting
            else:
                self.publisher = publisher
                self._left_out = set()
                return True
        return False

    def publish(self, version: int, *, deadline_s: float | None = None, quorum_is_all: bool = False) -> bool:
        """Publish one version and record the result; return whether it succeeded."""
        assert self.publisher is not None
        publisher = self.publisher
        deadline_s = deadline_s or self.settings.deadline_s
        shade = Shade(version, self.incarnation)
        self.palette.add(shade)
        source, tensors = ShadeSource(self.frozen), self.palette.tensors(shade)
        if self.second_rank is not None:
            source = self.second_rank.source
            self.second_rank.begin_publish(version, tensors, deadline_s, is_sharded=self.random_.random() < 0.8)
        source.hold(version, tensors)
        endpoints = {e: can for e, can in publisher.endpoints.items() if e.name not in self._left_out}
        names = tuple(endpoint.name for endpoint in endpoints)
        quorum = None if quorum_is_all or self.settings.quorum is None else min(self.settings.quorum, len(names))
        report: PublishReport | None = None
        error: BaseException | None = None
        started = time.monotonic()
        try:
            report = self._guarded(
                lambda: publish_weights(
                    source,
                    publisher,
                    endpoints=endpoints,
                    in_flight=self.settings.policy,
                    deadline_s=deadline_s,
                    bucket_bytes=_BUCKET_ELEMENTS * DTYPE_SIZES[source.parameter_specs()[0].dtype],
                    quorum=quorum or None,
                ),
                f"publishing version {version} within {deadline_s} s",
                deadline_s,
            )
        except PublishError as raised:
            report, error = raised.report, raised
        except InflightError as raised:
            error = raised
            self.is_fenced = self.is_fenced or isinstance(raised, FencedError)
        except Exception as raised:
            error = raised
            self.problems.append(f"publish_weights raised {raised!r}: {traceback.format_exc()[-600:]}")
        ended = time.monotonic()
        if self.second_rank is not None:
            self._end_second_rank(self.second_rank)
        self.published.append(PublishRecord(shade, started, ended, deadline_s, report, error, quorum, names))
        return error is None

    def _end_second_rank(self, second_rank: SecondRank) -> None:
        """Wait for rank 1; if the ranks have lost their connection to each other, end this trainer, with or without
        cleaning up."""
        second_rank.end_publish()
        if second_rank.is_lost:
            if self.random_.random() < 0.5:
                self.close()
            self.is_dead.set()

    def react(self) -> None:
        """After a failed publish, exclude servers that were not reached, and include excluded ones that answer
        again."""
        report = self.published[-1].report
        assert self.publisher is not None
        if self.random_.random() < 0.2:
            return
        lost = (EndpointOutcome.UNREACHABLE, EndpointOutcome.TIMED_OUT)
        for endpoint in () if report is None else report.endpoints:
            if endpoint.outcome in lost and len(self.publisher.endpoints) - len(self._left_out) > 1:
                self._left_out.add(endpoint.endpoint)
        if self.random_.random() < 0.5:
            self._take_back(self._left_out, 0.3 * self.settings.scale)

    def gather_all(self) -> None:
        """Exclude the servers that are gone, and include those that are alive."""
        assert self.publisher is not None
        gone = {server.name for server in self.servers if server.is_gone}
        self._take_back(self._left_out - gone, 5.0 * self.settings.scale)
        self._left_out |= gone & {endpoint.name for endpoint in self.publisher.endpoints}

    def _take_back(self, names: Collection[str], timeout_s: float) -> None:
        assert self.publisher is not None
        calls = {it.name: partial(query_endpoint, it) for it in self.publisher.endpoints if it.name in names}
        found: Mapping[str, object] = self.publisher.run(query_endpoints, calls, 0, timeout_s)
        self._left_out -= {name for name, answer in found.items() if not isinstance(answer, BaseException)}

    def close(self) -> None:
        """End the trainer and remove what it stored."""
        if self.publisher is not None:
            self.publisher.close()
        self._inner_sender.abort()
        if self.second_rank is not None:
            self.second_rank.close()
            self.problems += self.second_rank.problems
            self.second_rank.problems = []

    def _guarded(self, call: Callable[[], T], what: str, deadline_s: float) -> T:
        """Return the result of a call. If it hangs, record that and raise `InflightError`."""
        try:
            return PendingCall(call, "inflight-fleet-trainer").result(deadline_s + _HANG_S * self.settings.scale)
        except Hung:
            self.problems.append(f"{what} hangs")
            self.is_dead.set()
            raise InflightError(f"{what} hangs") from None

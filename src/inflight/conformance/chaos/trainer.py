"""A trainer whose weights are shades of a palette: what it does when a publish fails is what a trainer would do."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from inflight.conformance.chaos.faults import Faults, FaultyEndpoint, FaultySender, TrainerLife
from inflight.conformance.chaos.palette import Palette, Shade, spec_of
from inflight.conformance.chaos.plan import Transport
from inflight.conformance.chaos.servers import EmbeddedServer
from inflight.errors import FencedError, InflightError, PublishError
from inflight.types import Outcome, PublishReport, WeightBucket
from inflight.weights.encoding import Rounding
from inflight.weights.publish import publish_weights
from inflight.weights.publisher import WeightPublisher
from inflight.weights.transports import make_sender
from inflight.wire import BucketSpec, InFlightPolicy, TensorSpec

T = TypeVar("T")

RUN_ID = "chaos"
BUCKET_BYTES = 16_000
CLEAN_UP_S = 6.0
"""How much longer than its deadline a publish may take."""
_CONNECT_S = 2.0
_HANG_S = 20.0
"""After its deadline a publish that has not returned counts as hanging."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How a trainer publishes; drawn by seed."""

    transport: Transport
    policy: InFlightPolicy
    encoding: Rounding
    delta: bool
    staged: bool
    quorum: int | None
    deadline_s: float

    @staticmethod
    def drawn(random_: random.Random, transport: Transport, num_endpoints: int, deadline_s: float) -> Manner:
        """Return a manner."""
        delta = random_.random() < 0.4
        return Manner(
            transport=transport,
            policy=random_.choice(list(InFlightPolicy)),
            encoding="raw" if delta else random_.choice(("raw", "raw", "bfloat16", "float8")),
            delta=delta,
            staged=random_.random() < 0.75,
            quorum=random_.choice((None, None, *range(1, num_endpoints + 1))),
            deadline_s=deadline_s,
        )


@dataclass(frozen=True, slots=True)
class Published:
    """One call of `publish_weights`: what it said, and how long it took. ``error`` is what it raised."""

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
        """Whether it returned, which says that as many endpoints as had to serve the new version."""
        return self.error is None


class ShadeSource:
    """Rank 0 of 1 whose weights are one shade; satisfies `PartialWeightSource`."""

    rank = 0
    world_size = 1

    def __init__(self, palette: Palette, shade: Shade) -> None:
        named = palette.tensors(shade)
        self.version = shade.version
        self._frozen = palette.frozen
        self._tensors = [tensor for name, tensor in named.items() if name not in palette.frozen]
        self._specs = [spec_of(name, tensor) for name, tensor in named.items() if name not in palette.frozen]

    def parameter_specs(self) -> Sequence[TensorSpec]:
        """See `WeightSource.parameter_specs`."""
        return self._specs

    def frozen_names(self) -> Sequence[str]:
        """See `PartialWeightSource.frozen_names`."""
        return self._frozen

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        """See `WeightSource.gather_weights`."""
        for bucket in buckets:
            part = slice(bucket.start, bucket.stop)
            yield WeightBucket(bucket.index, tuple(self._specs[part]), tuple(self._tensors[part]))


class Trainer:
    """One incarnation of the run's trainer. ``epoch`` None has it find its own."""

    def __init__(
        self,
        servers: Sequence[EmbeddedServer],
        faults: Faults,
        palette: Palette,
        manner: Manner,
        directory: Path,
        random_: random.Random,
        epoch: int | None,
    ) -> None:
        self.servers = servers
        self.life = TrainerLife()
        self.published: list[Published] = []
        self.problems: list[str] = []
        self.is_fenced = False
        self.publisher: WeightPublisher | None = None
        self._faults = faults
        self._palette = palette
        self._manner = manner
        self._random = random_
        self._epoch = epoch
        where = None if manner.transport == "gloo" else directory
        self._inner_sender = make_sender(manner.transport, directory=where)
        self._sender = FaultySender(self._inner_sender, directory, faults, self.life)

    @property
    def epoch(self) -> int:
        """Its epoch, once it is connected."""
        return 0 if self.publisher is None else self.publisher.epoch

    def connect(self, timeout_s: float = _CONNECT_S, num_tries: int = 3) -> bool:
        """Connect to every server that is not gone; return whether that came about."""
        manner = self._manner
        for _ in range(num_tries):
            indices = [i for i, server in enumerate(self.servers) if not server.is_gone]
            if not indices or self.life.is_dead or self.is_fenced:
                return False
            publisher = WeightPublisher(
                [FaultyEndpoint(self.servers[i], i, self._faults, self.life) for i in indices],
                self._sender,
                run_id=RUN_ID,
                epoch=self._epoch,
                encoding=manner.encoding,
                delta=manner.delta,
                staged=manner.staged,
                connect_timeout_s=timeout_s,
            )
            try:
                self._guarded(publisher.__enter__, f"connecting within {timeout_s} s", timeout_s)
            except FencedError:
                self.is_fenced = True
            except InflightError:
                time.sleep(0.05)  # a server may be coming back
            else:
                self.publisher = publisher
                self.life.epoch = publisher.epoch
                return True
        return False

    def publish(self, version: int, *, deadline_s: float | None = None, quorum_is_all: bool = False) -> bool:
        """Publish one version, and note how it went; return whether it succeeded."""
        assert self.publisher is not None
        publisher = self.publisher
        deadline_s = deadline_s or self._manner.deadline_s
        shade = Shade(version, self.epoch)
        self._palette.add(shade)
        names = publisher.endpoints
        quorum = None if quorum_is_all or self._manner.quorum is None else min(self._manner.quorum, len(names))
        report: PublishReport | None = None
        error: BaseException | None = None
        started = time.monotonic()
        try:
            report = self._guarded(
                lambda: publish_weights(
                    ShadeSource(self._palette, shade),
                    publisher,
                    in_flight=self._manner.policy,
                    deadline_s=deadline_s,
                    bucket_bytes=BUCKET_BYTES,
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
        self.published.append(Published(shade, started, ended, deadline_s, report, error, quorum, names))
        return error is None

    def react(self) -> None:
        """After a failed publish: leave out who is not reached, and ask those left out whether they are back."""
        publisher, report = self.publisher, self.published[-1].report
        assert publisher is not None
        if self._random.random() < 0.2:
            return
        lost = [e for e in report.endpoints if e.outcome in (Outcome.UNREACHABLE, Outcome.TIMED_OUT)] if report else []
        for endpoint in lost:
            if len(publisher.endpoints) > 1:
                publisher.remove(endpoint.endpoint)
        if self._random.random() < 0.5:
            publisher.restore(*publisher.removed, timeout_s=0.3)

    def gather_all(self) -> None:
        """Leave out the servers that are gone, and take back those that live."""
        assert self.publisher is not None
        gone = {server.name for server in self.servers if server.is_gone}
        for name in gone:
            self.publisher.remove(name)
        self.publisher.restore(*(set(self.publisher.removed) - gone), timeout_s=5.0)

    def close(self) -> None:
        """End it, and remove what it stored."""
        if self.publisher is not None:
            self.publisher.close()
        self._inner_sender.abort()

    def _guarded(self, call: Callable[[], T], what: str, deadline_s: float) -> T:
        """Return what a call returns that must not hang. Raises `InflightError` if it does, and notes it."""
        results: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(call())
            except BaseException as error:  # raised below, in the caller's thread
                errors.append(error)

        thread = threading.Thread(target=work, name="inflight-chaos-trainer", daemon=True)
        thread.start()
        thread.join(deadline_s + _HANG_S)
        if thread.is_alive():
            self.problems.append(f"{what} hangs")
            self.life.is_dead = True
            raise InflightError(f"{what} hangs")
        if errors:
            raise errors[0]
        return results[0]

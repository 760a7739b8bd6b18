"""Fault plans: which faults are injected where. A plan is a pure function of its seed and can be printed.

A site is a step of an update combined with a kind of fault that can happen there. Among four consecutive seeds per
site, every site is the first fault of a plan.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Transport = Literal["gloo", "shm", "file", "http"]
TRANSPORTS: tuple[Transport, ...] = ("gloo", "shm", "file", "http")
SENDER = -1
"""Stands for the trainer's end of the data plane, in place of an endpoint's number."""
NUM_BUCKETS = 3
"""Faults are injected into one of this many first buckets, which every update has."""


class UpdateStep(StrEnum):
    """Where a fault is injected: a call of the contract, or the trainer's sending or storing of one bucket."""

    CONNECT = "connect"
    JOIN = "join"
    REQUEST = "request"
    RECEIVE = "receive"
    SEND = "send"
    COMMIT = "commit"
    ABORT = "abort"
    VERSION = "version"
    GENERATE = "generate"


class Kind(StrEnum):
    """The effect on the call."""

    DELAY = "delay"
    LOSE_REQUEST = "lose_request"
    """The call never arrives; the caller gets `UnreachableError`."""
    SILENCE = "silence"
    """The call never arrives; the caller gets no answer."""
    LOSE_ANSWER = "lose_answer"
    """The call succeeds; the caller gets `UnreachableError`."""
    REPEAT = "repeat"
    """The call is made twice at the same time."""
    REPEAT_LATE = "repeat_late"
    """The call is made again after later calls, perhaps in the next session."""
    REORDER = "reorder"
    """The caller gets `UnreachableError`; the call arrives after later ones, perhaps in the next session."""
    CUT = "cut"
    """The data connection is cut, or a stored bucket is truncated or removed."""
    CORRUPT = "corrupt"
    """Bytes change in transit or in storage."""
    KILL = "kill"
    """The endpoint dies during the call."""
    RESTART = "restart"
    """The endpoint dies during the call, and restarts with its checkpoint."""
    STOP = "stop"
    """The endpoint's process is stopped for a while."""
    DISCONNECT = "disconnect"
    """Every connection of the endpoint is cut during the call."""
    TEAR = "tear"
    """Loading fails in the middle of the model."""
    KILL_TRAINER = "kill_trainer"
    """The trainer makes no more calls."""
    TAKE_OVER = "take_over"
    """A second trainer of the run takes over while the first keeps calling."""


INSIDE = frozenset({Kind.TEAR})
"""Kinds that reach into the engine."""
OUTSIDE = frozenset({Kind.STOP, Kind.DISCONNECT})
"""Kinds that need a process and connections."""

_LOST = (Kind.DELAY, Kind.LOSE_REQUEST, Kind.SILENCE, Kind.LOSE_ANSWER)
_CONTROL = (*_LOST, Kind.REPEAT, Kind.REPEAT_LATE, Kind.REORDER, Kind.KILL, Kind.RESTART, *sorted(OUTSIDE))
_TRAINER = (Kind.KILL_TRAINER, Kind.TAKE_OVER)
_KINDS: dict[UpdateStep, tuple[Kind, ...]] = {
    UpdateStep.CONNECT: (*_LOST, Kind.KILL, Kind.RESTART),
    UpdateStep.JOIN: (*_CONTROL, *_TRAINER),
    UpdateStep.REQUEST: (*_CONTROL, *_TRAINER),
    UpdateStep.RECEIVE: (*_CONTROL, *_TRAINER),
    UpdateStep.SEND: (Kind.DELAY, Kind.CUT, Kind.CORRUPT, *_TRAINER),
    UpdateStep.COMMIT: (*_CONTROL, Kind.TEAR, *_TRAINER),
    UpdateStep.ABORT: _CONTROL,
    UpdateStep.VERSION: _LOST,
    UpdateStep.GENERATE: (Kind.DELAY, Kind.LOSE_REQUEST, Kind.LOSE_ANSWER, Kind.KILL, Kind.RESTART),
}
_OVER_TCP: dict[Transport, dict[UpdateStep, tuple[Kind, ...]]] = {
    "gloo": {UpdateStep.JOIN: (Kind.CUT,)},
    "http": {UpdateStep.JOIN: (Kind.CUT,), UpdateStep.RECEIVE: (Kind.CUT, Kind.CORRUPT)},
}
"""Faults that a proxy between an endpoint and the trainer injects into the data plane."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. It is injected when ``step`` of the endpoint is called for the ``occurrence``-th time, counted from 0.

    ``bucket`` selects a bucket for `RECEIVE` and `SEND`. ``seconds`` is a duration, and ``num_calls`` is the number of
    later calls of the endpoint that arrive first, for the kinds that need them.
    """

    endpoint: int
    step: UpdateStep
    kind: Kind
    occurrence: int = 0
    bucket: int = 0
    seconds: float = 0.05
    num_calls: int = 3

    def __str__(self) -> str:
        where = "trainer" if self.endpoint == SENDER else f"endpoint {self.endpoint}"
        bucket = f" of bucket {self.bucket}" if self.step in (UpdateStep.RECEIVE, UpdateStep.SEND) else ""
        extent = (
            f"{self.seconds:.2f} s" if self.kind not in (Kind.REPEAT_LATE, Kind.REORDER) else f"{self.num_calls} calls"
        )
        return f"{self.kind} {self.step}{bucket} #{self.occurrence} at {where} ({extent})"


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The faults of one schedule. The same seed, number of endpoints, transport and kinds give the same plan."""

    seed: int
    transport: Transport
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        return f"seed {self.seed} over {self.transport}: " + ("; ".join(map(str, self.faults)) or "no fault")


def sites(transport: Transport, kinds: Collection[Kind] = INSIDE) -> list[tuple[UpdateStep, Kind]]:
    """Return every step of a transport, each with every kind of fault that can happen there.

    ``kinds`` are the kinds of `INSIDE` and `OUTSIDE` that can be injected into the servers.
    """
    impossible = (INSIDE | OUTSIDE) - set(kinds)
    every = [
        (step, kind) for step in UpdateStep for kind in (*_KINDS[step], *_OVER_TCP.get(transport, {}).get(step, ()))
    ]
    return [(step, kind) for step, kind in every if kind not in impossible]


def fault_plan(
    seed: int,
    num_endpoints: int,
    transport: Transport,
    deadline_s: float = 1.0,
    kinds: Collection[Kind] = INSIDE,
) -> FaultPlan:
    """Return a plan of one to three faults; if the first is at `UpdateStep.ABORT`, others make the trainer abort."""
    random_ = random.Random(f"plan {seed} {transport}")
    known = sites(transport, kinds)
    if set(kinds) != INSIDE:  # a campaign over processes is short, and should still reach every step
        random.Random("sites").shuffle(known)
    chosen = [known[(seed // len(TRANSPORTS)) % len(known)]]
    chosen += random_.choices(known, k=random_.choice((0, 0, 1, 2)))
    faults = [_fault(random_, num_endpoints, step, kind, deadline_s) for step, kind in chosen]
    if faults[0].step is UpdateStep.ABORT:
        victim = (faults[0].endpoint + 1) % num_endpoints
        faults.append(Fault(victim, UpdateStep.RECEIVE, Kind.REORDER, 0, 1, num_calls=2))
        faults.append(Fault(victim, UpdateStep.RECEIVE, Kind.LOSE_REQUEST, 1, 1))
        faults.append(Fault(victim, UpdateStep.RECEIVE, Kind.LOSE_REQUEST, 2, 1))
    return FaultPlan(seed, transport, tuple(faults))


def _fault(random_: random.Random, num_endpoints: int, step: UpdateStep, kind: Kind, deadline_s: float) -> Fault:
    endpoint = SENDER if step is UpdateStep.SEND else random_.randrange(num_endpoints)
    is_long = kind is Kind.STOP or (kind is Kind.DELAY and random_.random() < 0.25)
    longest_s = 0.02 if kind in (Kind.KILL, Kind.RESTART, Kind.CUT, Kind.DISCONNECT) else 0.15
    return Fault(
        endpoint,
        step,
        kind,
        occurrence=random_.choice((0, 0, 1)) if step not in (UpdateStep.ABORT, UpdateStep.CONNECT) else 0,
        bucket=random_.randrange(NUM_BUCKETS),
        seconds=round(deadline_s * random_.uniform(0.9, 1.4) if is_long else random_.uniform(0.0, longest_s), 3),
        num_calls=random_.randint(1, 9),
    )

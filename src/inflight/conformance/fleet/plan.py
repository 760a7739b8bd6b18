"""Fault plans: which faults are injected, and where. A plan is a pure function of its seed and can be printed.

A site is a step of an update combined with a kind of fault that can happen there. Over a range of consecutive seeds
four times as long as the list of sites, every site is the first fault of some plan.
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
RANK = -2
"""Stands for the trainer's rank 1 if two ranks each send the tensors that they hold."""
RANK_LOST_S = 3.0
"""How long, in seconds, some stops of rank 1 last beyond a deadline. By then, rank 0 has abandoned rank 1."""
NUM_BUCKETS = 3
"""A fault that concerns a bucket is injected into one of the first `NUM_BUCKETS`; every update has at least as many."""


class UpdateStep(StrEnum):
    """Where a fault is injected: a call of the contract, or the trainer's sending or storing of one bucket.

    Faults of rank 1 are injected just before the named step; those of ``RANK_ANSWER``, between sending a part and
    receiving its answer.
    """

    CONNECT = "connect"
    JOIN = "join"
    REQUEST = "request"
    RECEIVE = "receive"
    SEND = "send"
    COMMIT = "commit"
    ABORT = "abort"
    VERSION = "version"
    GENERATE = "generate"
    RANK_OPEN = "rank_open"
    RANK_JOIN = "rank_join"
    RANK_BEGIN = "rank_begin"
    RANK_ENCODE = "rank_encode"
    RANK_SEND = "rank_send"
    RANK_ANSWER = "rank_answer"
    RANK_LAST = "rank_last"
    """The message with which rank 1 waits for the instruction to end."""
    RANK_END = "rank_end"


class Kind(StrEnum):
    """A kind of fault: its effect on the call."""

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
    """The data connection is cut, or a stored bucket is truncated or deleted."""
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
    UNLINK = "unlink"
    """The connection between the trainer's ranks is cut."""
    COME_BACK = "come_back"
    """Rank 1 is stopped, and resumes after its trainer has died and another trainer has taken over."""


INSIDE = frozenset({Kind.TEAR})
"""Kinds of faults that reach into the engine."""
OUTSIDE = frozenset({Kind.STOP, Kind.DISCONNECT})
"""Kinds of faults that need a server process and its connections."""

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
_RANK = (Kind.DELAY, Kind.KILL, Kind.STOP, Kind.UNLINK)
_RANK_KINDS: dict[UpdateStep, tuple[Kind, ...]] = {
    UpdateStep.RANK_OPEN: _RANK,
    UpdateStep.RANK_JOIN: _RANK,
    UpdateStep.RANK_BEGIN: (*_RANK, Kind.COME_BACK),
    UpdateStep.RANK_ENCODE: (*_RANK, Kind.COME_BACK),
    UpdateStep.RANK_SEND: (*_RANK, Kind.CUT, Kind.CORRUPT, Kind.COME_BACK, *_TRAINER),
    UpdateStep.RANK_ANSWER: (*_RANK, Kind.COME_BACK, *_TRAINER),
    UpdateStep.RANK_LAST: (*_RANK, Kind.COME_BACK),
    UpdateStep.RANK_END: _RANK,
}
"""Faults of rank 1, which is always a process of the campaign, wherever the servers run."""
OF_BUCKETS = frozenset(
    {UpdateStep.RECEIVE, UpdateStep.SEND, UpdateStep.RANK_ENCODE, UpdateStep.RANK_SEND, UpdateStep.RANK_ANSWER}
)
"""Steps that are taken once for each bucket."""
_OVER_TCP: dict[Transport, dict[UpdateStep, tuple[Kind, ...]]] = {
    "gloo": {UpdateStep.JOIN: (Kind.CUT,)},
    "http": {UpdateStep.JOIN: (Kind.CUT,), UpdateStep.RECEIVE: (Kind.CUT, Kind.CORRUPT)},
}
"""Faults that a proxy between an endpoint and the trainer injects into the data plane."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, injected when ``step`` of the endpoint is called for the ``occurrence``-th time, counted from 0.

    ``bucket`` selects a bucket for the steps in `OF_BUCKETS`. Some kinds need ``seconds``, a duration, or
    ``num_calls``, the number of later calls to the endpoint that arrive first.
    """

    endpoint: int
    step: UpdateStep
    kind: Kind
    occurrence: int = 0
    bucket: int = 0
    seconds: float = 0.05
    num_calls: int = 3

    def __str__(self) -> str:
        where = {SENDER: "trainer", RANK: "rank 1"}.get(self.endpoint, f"endpoint {self.endpoint}")
        bucket = f" of bucket {self.bucket}" if self.step in OF_BUCKETS else ""
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


def sites(
    transport: Transport, kinds: Collection[Kind] = INSIDE, num_senders: int = 1
) -> list[tuple[UpdateStep, Kind]]:
    """Return the sites of a transport: every step, combined with each kind of fault that can happen there.

    ``kinds`` are the kinds of `INSIDE` and `OUTSIDE` that can be injected into the servers. The steps of rank 1 come
    first, if there are 2 senders.
    """
    impossible = (INSIDE | OUTSIDE) - set(kinds)
    every = [(step, kind) for step in _KINDS for kind in (*_KINDS[step], *_OVER_TCP.get(transport, {}).get(step, ()))]
    return _rank_sites(num_senders) + [(step, kind) for step, kind in every if kind not in impossible]


def _rank_sites(num_senders: int) -> list[tuple[UpdateStep, Kind]]:
    return [(step, kind) for step in _RANK_KINDS for kind in _RANK_KINDS[step]] if num_senders > 1 else []


def fault_plan(
    seed: int,
    num_endpoints: int,
    transport: Transport,
    deadline_s: float = 1.0,
    kinds: Collection[Kind] = INSIDE,
    num_senders: int = 1,
) -> FaultPlan:
    """Return a plan of one to three faults; if the first is at `UpdateStep.ABORT`, three more make the trainer abort.

    With two senders, the first fault is one of rank 1.
    """
    random_ = random.Random(f"plan {seed} {transport}")
    known = sites(transport, kinds, num_senders)
    firsts = _rank_sites(num_senders) or known
    if set(kinds) != INSIDE:  # a campaign over processes is short, and should still reach every step
        random.Random("sites").shuffle(firsts)
    chosen = [firsts[(seed // len(TRANSPORTS)) % len(firsts)]]
    chosen += random_.choices(known, k=random_.choice((0, 0, 1, 2)))
    faults = [_fault(random_, num_endpoints, step, kind, deadline_s) for step, kind in chosen]
    if faults[0].step is UpdateStep.ABORT:
        victim = (faults[0].endpoint + 1) % num_endpoints
        faults.append(Fault(victim, UpdateStep.RECEIVE, Kind.REORDER, 0, 1, num_calls=2))
        faults.append(Fault(victim, UpdateStep.RECEIVE, Kind.LOSE_REQUEST, 1, 1))
        faults.append(Fault(victim, UpdateStep.RECEIVE, Kind.LOSE_REQUEST, 2, 1))
    return FaultPlan(seed, transport, tuple(faults))


def _fault(random_: random.Random, num_endpoints: int, step: UpdateStep, kind: Kind, deadline_s: float) -> Fault:
    endpoint = SENDER if step is UpdateStep.SEND else RANK if step in _RANK_KINDS else random_.randrange(num_endpoints)
    is_long = kind is Kind.STOP or (kind is Kind.DELAY and random_.random() < 0.25)
    longest_s = 0.02 if kind in (Kind.KILL, Kind.RESTART, Kind.CUT, Kind.DISCONNECT) else 0.15
    longer_s = RANK_LOST_S if step in _RANK_KINDS and kind is Kind.STOP and random_.random() < 0.25 else 0.0
    return Fault(
        endpoint,
        step,
        kind,
        occurrence=random_.choice((0, 0, 1)) if step not in (UpdateStep.ABORT, UpdateStep.CONNECT) else 0,
        bucket=random_.randrange(NUM_BUCKETS),
        seconds=round(
            longer_s + (deadline_s * random_.uniform(0.9, 1.4) if is_long else random_.uniform(0.0, longest_s)), 3
        ),
        num_calls=random_.randint(1, 9),
    )

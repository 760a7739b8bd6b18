"""The health of a fleet over many publishes: who is published to, who may be given work, who is asked again and when.

    JOINING -> HEALTHY            a publish was applied
    HEALTHY -> SUSPECT            no answer in time: left out, and asked once more before the next publish; in time is
                                  within two seconds for the question that comes first, if enough others answer it
    HEALTHY -> DEAD               gone, and a suspect that stays silent, and one that failed its only try to come in
    SUSPECT, DEAD -> JOINING      it answers again: the next publish is its try
    HEALTHY -> JOINING            it missed a version, or its weights are torn: the next publish makes it whole

Only a healthy member holds the version that was published last, and only it may be given work. Nobody gets from dead to
healthy but through an applied publish. This module knows publishers and workers by their contracts, no engine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum

import torch
import torch.distributed as dist

from inflight.contracts import InferenceEndpoint, WeightSource
from inflight.engines.kinds import connect_endpoint
from inflight.errors import ConfigError, InflightError, PublishError, UnsupportedError, UpdateError
from inflight.types import EndpointReport, Outcome, PublishReport, PublishSpans
from inflight.weights.buckets import DEFAULT_BUCKET_BYTES
from inflight.weights.publish import publish_weights
from inflight.weights.publisher import ANSWER_S, WeightPublisher
from inflight.wire import InFlightPolicy

_NUM_ATTEMPTS = 3
"""A fleet that lost a member, or was left torn by it, is brought to the present version by publishing again."""
_FIRST_PAUSE_S = 1.0
"""Before a dead member is asked again for the first time."""
_MAX_PAUSE_S = 60.0
"""Longest pause before a dead member is asked again; each is twice the one before."""


class MemberState(StrEnum):
    """What is known of one member of a fleet."""

    HEALTHY = "healthy"
    """It applied the last publish."""
    SUSPECT = "suspect"
    """It gave no answer in time, and is asked once more before the next publish."""
    DEAD = "dead"
    """It is gone; it is asked from time to time."""
    JOINING = "joining"
    """It answers, and does not hold the version that was published last."""


@dataclass(frozen=True, slots=True)
class StateChange:
    """A member that is not after a publish what it was before it; ``before`` is None for one that was not known."""

    endpoint: str
    before: MemberState | None
    after: MemberState


@dataclass(slots=True)
class _Member:
    """One member; ``endpoint`` is set while the publisher does not know it yet, because it gave no answer so far."""

    state: MemberState = MemberState.JOINING
    ask_at: float = 0.0
    pause_s: float = _FIRST_PAUSE_S
    is_on_trial: bool = False
    """It came in for the publish that runs, and is out again if that fails because of it."""
    why: str = ""
    endpoint: InferenceEndpoint | None = None


class _Verdict(IntEnum):
    """How one attempt to publish ended, as all ranks agree; the highest of any rank counts."""

    DONE = 0
    AGAIN = 1
    TOO_FEW = 2
    FAILED = 3


class Fleet:
    """The endpoints of a publisher, and who of them is healthy. Every rank has one; rank 0's has the publisher.

    ``quorum`` is how many have to hold each version, None for all that can be reached, and at least one. ``token`` is
    for those that join by URL. Used from one thread at a time; the publisher belongs to it until it is closed.
    """

    def __init__(
        self, publisher: WeightPublisher | None, *, quorum: int | None = None, token: str | None = None
    ) -> None:
        if quorum is not None and not quorum >= 1:
            raise ConfigError(f"quorum must be at least 1, not {quorum}")
        self._publisher = publisher
        self._quorum = quorum
        self._token = token
        self._members = {} if publisher is None else {name: _Member() for name in publisher.endpoints}
        self._known = self.states
        self._notes: list[str] = []
        self._changes: tuple[StateChange, ...] = ()

    @property
    def states(self) -> Mapping[str, MemberState]:
        """State of every member (rank 0; empty on the others)."""
        return {name: member.state for name, member in self._members.items()}

    @property
    def healthy(self) -> tuple[str, ...]:
        """Names of the members that may be given work."""
        return tuple(name for name, member in self._members.items() if member.state is MemberState.HEALTHY)

    @property
    def changes(self) -> tuple[StateChange, ...]:
        """What the last publish changed, and what joined or left since the one before."""
        return self._changes

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of the last publish: attempts that failed, and servers that do not fit."""
        return tuple(self._notes)

    def join(self, endpoint: InferenceEndpoint | str) -> None:
        """Have the next publish bring one more endpoint in, by URL or connected; rank 0 calls it between two publishes.

        One that gives no answer is dead, and asked again. Raises `ConfigError` for a name that is a member's, and
        `UnsupportedError` if it lacks what every publish needs; the fleet is as before then.
        """
        if self._publisher is None:
            raise ConfigError("join is for rank 0, which has the publisher")
        if isinstance(endpoint, str):
            endpoint = connect_endpoint(endpoint, token=self._token)
        if endpoint.name in self._members:
            raise ConfigError(f"{endpoint.name} is a member of this fleet already")
        member = _Member(endpoint=endpoint)
        self._admit(member)
        self._members[endpoint.name] = member

    def leave(self, name: str) -> None:
        """Forget a member; what it runs goes on, and no publish goes to it any more. Unknown names are ignored."""
        member = self._members.pop(name, None)
        if member is not None and member.endpoint is None and self._publisher is not None:
            self._publisher.drop(name)

    def ask_all(self) -> None:
        """Have the next publish ask everybody who was left out, whatever their pause."""
        for member in self._members.values():
            member.ask_at = 0.0

    def close(self) -> None:
        """Close the publisher; servers go on. Idempotent."""
        if self._publisher is not None:
            self._publisher.close()

    def publish(
        self,
        worker: WeightSource,
        *,
        in_flight: InFlightPolicy = InFlightPolicy.KEEP,
        deadline_s: float = 60.0,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> PublishReport | None:
        """Bring whoever can be reached to the worker's weights: who is gone is left out, who is back comes in.

        Every rank calls it, in the default process group of torch if there are several. Rank 0 returns the report of
        the last attempt, the others None. If fewer can be reached than the quorum asks for, the report has not
        succeeded, nobody is healthy, and the next publish asks again.

        Raises what `publish_weights` does, on rank 0, if publishing again would not help: `FencedError` says that this
        trainer was replaced. The other ranks raise `UpdateError` then.
        """
        report: PublishReport | None = None
        num_failed = 0
        self._notes = []
        self._invite()
        self._leave_silent_out(deadline_s)
        verdict = _agreed(worker, self._is_possible())
        while verdict is _Verdict.AGAIN:
            report, verdict = self._attempt(
                worker, in_flight, deadline_s, bucket_bytes, may_fail=num_failed < _NUM_ATTEMPTS - 1
            )
            if verdict is not _Verdict.DONE:
                num_failed += 1
                self._notes += [] if report is None else [report.summary()]
        if verdict is _Verdict.TOO_FEW:
            for member in self._members.values():
                member.state = MemberState.JOINING if member.state is MemberState.HEALTHY else member.state
        self._note_changes()
        if self._publisher is None:
            return None
        return self._absent(worker) if report is None else report

    def _attempt(
        self,
        worker: WeightSource,
        in_flight: InFlightPolicy,
        deadline_s: float,
        bucket_bytes: int,
        *,
        may_fail: bool,
    ) -> tuple[PublishReport | None, _Verdict]:
        """Publish once; returns the report (rank 0 only), and on every rank how it ended. Raises if it is no use."""
        report: PublishReport | None = None
        failure: Exception | None = None
        verdict = _Verdict.DONE
        had_group = self._publisher is not None and self._publisher.has_group
        try:
            report = publish_weights(
                worker,
                self._publisher,
                in_flight=in_flight,
                deadline_s=deadline_s,
                bucket_bytes=bucket_bytes,
                quorum=self._quorum,
            )
            if report is not None:
                self._judge(report, had_group=had_group, may_fail=True)
        except PublishError as error:
            report, failure = error.report, error
            may_help = self._judge(report, had_group=had_group, may_fail=may_fail)
            verdict = self._is_possible() if may_help else _Verdict.FAILED
        except Exception as error:  # the other ranks are told, then it is raised
            verdict, failure = _Verdict.FAILED, error
        agreed = _agreed(worker, verdict)
        if agreed is _Verdict.FAILED:
            self._note_changes()
            raise failure or UpdateError("the publish failed on another rank, whose error says why")
        return report, agreed

    def _is_possible(self) -> _Verdict:
        if self._publisher is None:
            return _Verdict.DONE  # rank 0 decides
        enough = len(self._publisher.endpoints) >= (self._quorum or 1)
        return _Verdict.AGAIN if enough else _Verdict.TOO_FEW

    def _judge(self, report: PublishReport, *, had_group: bool, may_fail: bool) -> bool:
        """Note what became of every member; true if publishing again to those that are left may succeed.

        A server that was restarted refuses what is sent to the group that it was a member of. So a refusal counts
        once the group was formed for it. One that has just come in has one try, which others may spoil.
        """
        silent = {e.endpoint for e in report.endpoints if e.outcome in (Outcome.TIMED_OUT, Outcome.UNREACHABLE)}
        gone, refused = set[str](), False
        for part in report.endpoints:
            member = self._members[part.endpoint]
            if part.outcome is Outcome.APPLIED:
                member.state, member.pause_s, member.is_on_trial = MemberState.HEALTHY, _FIRST_PAUSE_S, False
                continue
            is_spoilt = part.outcome is Outcome.ABORTED and silent
            if part.endpoint in silent or (member.is_on_trial and not is_spoilt):
                gone.add(part.endpoint)
                self._remove(member, part)
                continue
            member.state, member.why = MemberState.JOINING, part.detail
            refused = refused or part.outcome is Outcome.REFUSED
        return False if refused and not had_group else may_fail or bool(gone)

    def _remove(self, member: _Member, part: EndpointReport) -> None:
        """Leave a member out until it answers again."""
        assert self._publisher is not None
        self._publisher.remove(part.endpoint)
        member.why = part.detail
        if part.outcome is Outcome.TIMED_OUT and not member.is_on_trial:
            member.state = MemberState.SUSPECT
        else:
            self._bury(member)
        member.is_on_trial = False

    def _bury(self, member: _Member) -> None:
        """Ask a member again later, and each time later than the time before."""
        member.state, member.is_on_trial = MemberState.DEAD, False
        member.ask_at = time.monotonic() + member.pause_s
        member.pause_s = min(2 * member.pause_s, _MAX_PAUSE_S)

    def _invite(self) -> None:
        """Ask the members that were left out and whose pause is over; those that answer are on trial."""
        if self._publisher is None:
            return
        now = time.monotonic()
        due = {
            name: member
            for name, member in self._members.items()
            if member.state in (MemberState.SUSPECT, MemberState.DEAD) and member.ask_at <= now
        }
        unknown = {name: member for name, member in due.items() if member.endpoint is not None}
        for name, member in unknown.items():
            try:
                self._admit(member)
            except UnsupportedError as error:
                member.why = str(error)
                self._notes.append(member.why)
                self._bury(member)
            del due[name]
        unfit = self._publisher.restore(*due, timeout_s=ANSWER_S)
        for name, member in due.items():
            if name in unfit:
                member.why = str(unfit[name])
                self._notes += [member.why] if isinstance(unfit[name], UnsupportedError) else []
                self._bury(member)
            else:
                member.state, member.is_on_trial = MemberState.JOINING, True

    def _leave_silent_out(self, deadline_s: float) -> None:
        """Leave out who does not say at once that it is there, if enough others do; it is asked before the next one."""
        if self._publisher is None:
            return
        for name in self._publisher.silent(self._quorum or 1, deadline_s):
            why = f"did not say within {ANSWER_S:g} s which version it serves: left out of this publish"
            self._remove(self._members[name], EndpointReport(name, Outcome.TIMED_OUT, None, why))
            self._notes.append(f"{name} {why}")

    def _admit(self, member: _Member) -> None:
        """Have the publisher know an endpoint; one that gives no answer is asked again later."""
        assert self._publisher is not None and member.endpoint is not None
        try:
            self._publisher.add(member.endpoint, timeout_s=ANSWER_S)
        except (ConfigError, UnsupportedError):
            raise
        except InflightError as error:
            member.why = str(error)
            self._bury(member)
        else:
            member.state, member.is_on_trial, member.endpoint = MemberState.JOINING, True, None

    def _note_changes(self) -> None:
        before, self._known = self._known, self.states
        changes = (StateChange(name, before.get(name), state) for name, state in self._known.items())
        self._changes = tuple(change for change in changes if change.before is not change.after)

    def _absent(self, worker: WeightSource) -> PublishReport:
        """Return what to say of a publish that had nobody to go to."""
        assert self._publisher is not None
        parts = [
            EndpointReport(
                name,
                Outcome.ABORTED if member.state is MemberState.JOINING else Outcome.UNREACHABLE,
                None,
                member.why or "fewer can be reached than have to hold a version",
            )
            for name, member in self._members.items()
        ]
        spans = PublishSpans(gather_s=0.0, hold_s=0.0, wire_s=0.0, load_s=0.0, first_token_s=None, total_s=0.0)
        return PublishReport(
            self._publisher.run_id, worker.version, 0, tuple(parts), spans, num_needed=self._quorum or 1, sent_bytes=0
        )


def _agreed(worker: WeightSource, verdict: _Verdict) -> _Verdict:
    """Return the highest verdict of any rank on every rank."""
    if worker.world_size == 1:
        return verdict
    device = "cpu" if "cpu" in dist.get_backend_config() else "cuda"
    agreed = torch.tensor(int(verdict), device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return _Verdict(int(agreed))

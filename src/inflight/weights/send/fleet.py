"""The members of a fleet: which of them receive a publish, which receive work, and when the others are queried again.

    JOINING -> HEALTHY            a publish was applied
    HEALTHY -> SUSPECT            no answer in time (within two seconds for the query at the start of a publish, if
                                  enough others answer it): left out, and queried once more before the next publish
    any state -> DEAD             it is unreachable, it is a suspect that still does not answer, its only attempt to
                                  join failed, its memory is released, or another run has taken it over
    SUSPECT, DEAD -> JOINING      it answers again: the next publish is its attempt to join
    HEALTHY -> JOINING            it missed a version, or its weights are torn: the next publish repairs it

Only a healthy member holds the version that was published last, and only a healthy member may receive work. A dead
member becomes healthy only through an applied publish.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from inflight.base.backoff import Backoff
from inflight.contracts import InferenceEndpoint, WeightSource
from inflight.errors import ConfigError, PublishError, UpdateError, UpdateRefusedError
from inflight.http.kinds import connect_endpoint
from inflight.types import EndpointOutcome, EndpointReport, PublishReport, PublishSpans
from inflight.weights.encode.buckets import DEFAULT_BUCKET_BYTES
from inflight.weights.send.endpoint_update import ANSWER_S, query_endpoint, query_endpoints
from inflight.weights.send.gathering import gather_only
from inflight.weights.send.publisher import WeightPublisher, close_all, publish_weights
from inflight.weights.send.ranks import PartSender
from inflight.wire import Capabilities, EndpointState, InFlightPolicy, Needs, WeightVersion

_NUM_ATTEMPTS = 3
"""Attempts per publish. When a member is lost, other members' weights may be torn, and another attempt repairs them."""
_FIRST_PAUSE_S = 1.0
"""Delay in seconds before a dead member is first queried again."""
_MAX_PAUSE_S = 60.0
_RELEASED = "has released its memory and accepts no update until it is restored: left out of this publish"


class MemberState(StrEnum):
    """The state of one member of a fleet."""

    HEALTHY = "healthy"
    """The member applied the last publish."""
    SUSPECT = "suspect"
    """The member did not answer in time, and is queried once more before the next publish."""
    DEAD = "dead"
    """The member is unreachable, and is queried from time to time."""
    JOINING = "joining"
    """The member answers or was never queried, and it does not hold the last published version."""


class StateChange(NamedTuple):
    """A member whose state a publish changed; ``before`` is None for a new member."""

    endpoint: str
    before: MemberState | None
    after: MemberState


@dataclass(slots=True)
class _Member:
    """The known state of one member."""

    endpoint: InferenceEndpoint
    url: str | None = None
    """The URL with which the member was specified; None if it was passed as a connected endpoint."""
    capabilities: Capabilities | None = None
    """The capabilities that the member last reported; None before its first answer."""
    state: MemberState = MemberState.JOINING
    backoff: Backoff = field(default_factory=lambda: Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S))
    has_held: bool = False
    """Whether the member has held a version of this run since it joined."""
    is_taken_over: bool = False
    """Whether another run has published to the member since it held that version."""
    is_on_trial: bool = False
    """Whether the member joined for the current publish. If it makes that publish fail, it is left out again."""
    why: str = ""

    @property
    def takes_part(self) -> bool:
        return self.capabilities is not None and self.state in (MemberState.HEALTHY, MemberState.JOINING)

    def mark_dead(self, why: str) -> None:
        """Leave the member out, and query it again after a pause that becomes longer each time."""
        self.state, self.is_on_trial, self.why = MemberState.DEAD, False, why
        self.backoff.next(time.monotonic())

    def leave_out(self, outcome: EndpointOutcome, why: str) -> None:
        """Leave the member out until it answers again."""
        if outcome is EndpointOutcome.TIMED_OUT and not self.is_on_trial:
            self.state, self.why = MemberState.SUSPECT, why
        else:
            self.mark_dead(why)


class _Verdict(IntEnum):
    """How one attempt to publish ended. All ranks agree on the highest value that any rank reports."""

    DONE = 0
    AGAIN = 1
    TOO_FEW = 2
    FAILED = 3


class Fleet:
    """The servers that receive publishes, with their health.

    Rank 0 has a fleet; other ranks call `take_part`. The fleet starts with the endpoints of ``publisher``, and owns
    ``publisher`` from then on. ``quorum`` is the number of endpoints that have to hold each version; None means all
    endpoints that can be reached, and at least one. ``token`` is for endpoints specified by URL. Use a fleet from one
    thread at a time.

    ``group`` is a process group of all ranks for a sharded publisher whose publishes overlap training: the ranks use it
    instead of torch's default group to agree on each attempt, and servers that would need gathered weights are left
    out.
    """

    def __init__(
        self,
        publisher: WeightPublisher,
        *,
        quorum: int | None = None,
        token: str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if quorum is not None and not quorum >= 1:
            raise ConfigError(f"quorum must be at least 1, not {quorum}")
        self._publisher = publisher
        self._quorum = quorum
        self._token = token
        self._group = group
        self._members = {e.name: _Member(e, capabilities=can) for e, can in publisher.endpoints.items()}
        self._known = self.states
        self._notes: list[str] = []
        self._changes: tuple[StateChange, ...] = ()

    @property
    def states(self) -> Mapping[str, MemberState]:
        """The state of every member, by endpoint name."""
        return {name: member.state for name, member in self._members.items()}

    @property
    def healthy(self) -> tuple[str, ...]:
        """The names of the members that may receive work."""
        return tuple(name for name, member in self._members.items() if member.state is MemberState.HEALTHY)

    @property
    def changes(self) -> tuple[StateChange, ...]:
        """The state changes in the last publish, and the members that joined since the publish before it."""
        return self._changes

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages for the user about the last publish: failed attempts, and incompatible servers."""
        return tuple(self._notes)

    def set_members(self, wanted: Iterable[InferenceEndpoint | str]) -> None:
        """Set the members from now on, given as names, URLs or connected endpoints.

        A new member joins with the next publish that it answers. A member that is not listed leaves: its requests
        continue, but it receives no further publishes. If a URL is invalid, raises `ConfigError` and leaves the fleet
        unchanged.
        """
        known = {member.url or name: member for name, member in self._members.items()} | self._members
        members: dict[str, _Member] = {}
        for one in wanted:
            if not isinstance(one, str):
                old = self._members.get(one.name)
                member = old if old is not None and old.endpoint is one else _Member(one)
            elif one in known:
                member = known[one]
            else:
                endpoint = connect_endpoint(one, token=self._token)
                member = self._members.get(endpoint.name, _Member(endpoint))
                member.url = one
            members.setdefault(member.endpoint.name, member)
        stay = [member.endpoint for member in members.values()]
        gone = [member.endpoint for member in self._members.values() if member.endpoint not in stay]
        self._members = members
        if gone:
            self._publisher.run(close_all, gone)

    def ask_all(self) -> None:
        """Make the next publish query every member that was left out, even if its pause is not over yet."""
        for member in self._members.values():
            member.backoff.due_at = 0.0

    def close(self) -> None:
        """Close the publisher and every connection. Servers keep running. Idempotent.

        The group's resources, such as shared memory, are released first, because a server that hangs can delay the
        rest.
        """
        self._publisher.group.lose()
        self.set_members(())
        self._publisher.close()

    def publish(
        self,
        worker: WeightSource,
        *,
        in_flight: InFlightPolicy = InFlightPolicy.KEEP,
        deadline_s: float = 60.0,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> PublishReport:
        """Publish the worker's weights to every member that can be reached, including members that answer again.

        Rank 0 calls this while every other rank calls `take_part`. Returns the report of the last attempt. If fewer
        members than the quorum can be reached, the report says that the publish did not succeed, no member is healthy,
        and the next publish queries all of them again.

        Raises the errors of `publish_weights` if another attempt would not help. `FencedError` means that this trainer
        has been replaced.
        """
        report: PublishReport | None = None
        num_failed = 0
        self._notes = []
        self._invite(in_flight)
        self._leave_some_out(deadline_s)
        verdict = _agree_on_verdict(worker, self._is_possible(), self._group)
        while verdict is _Verdict.AGAIN:
            failure: Exception | None = None
            endpoints = {m.endpoint: m.capabilities for m in self._members.values() if m.takes_part and m.capabilities}
            had_group = self._publisher.group.members == endpoints.keys()
            try:
                report = publish_weights(
                    worker,
                    self._publisher,
                    endpoints=endpoints,
                    in_flight=in_flight,
                    deadline_s=deadline_s,
                    bucket_bytes=bucket_bytes,
                    quorum=self._quorum,
                )
                self._judge(report, had_group=had_group)
                verdict = _Verdict.DONE
            except PublishError as error:
                report, failure = error.report, error
                num_failed += 1
                self._notes.append(report.summary())
                may_help = self._judge(report, had_group=had_group, may_fail=num_failed < _NUM_ATTEMPTS)
                calls = {m.endpoint.name: m.endpoint.weight_version for m in self._members.values() if m.takes_part}
                self._leave_out_taken_over(self._publisher.run(query_endpoints, calls))
                verdict = self._is_possible() if may_help else _Verdict.FAILED
            except Exception as error:  # raised below, after notifying the other ranks
                verdict, failure = _Verdict.FAILED, error
            verdict = _agree_on_verdict(worker, verdict, self._group)
            if verdict is _Verdict.FAILED:
                self._note_changes()
                raise failure or _other_rank_error()
        if verdict is _Verdict.TOO_FEW:
            for member in self._members.values():
                member.state = MemberState.JOINING if member.state is MemberState.HEALTHY else member.state
            if lost := [member.why for member in self._members.values() if member.is_taken_over]:
                raise UpdateRefusedError("; ".join(lost))
        self._note_changes()
        return self._report_absence(worker) if report is None else report

    def _is_possible(self) -> _Verdict:
        num_left = sum(member.takes_part for member in self._members.values())
        return _Verdict.AGAIN if num_left >= (self._quorum or 1) else _Verdict.TOO_FEW

    def _judge(self, report: PublishReport, *, had_group: bool, may_fail: bool = True) -> bool:
        """Record the outcome of every member. Return whether publishing again to the remaining members may succeed.

        A restarted server refuses everything that is sent to its former group, so a refusal counts only after a new
        group has been formed. A member on trial has one attempt, but an attempt that failed because other members did
        not answer does not count.
        """
        silent = {
            e.endpoint
            for e in report.endpoints
            if e.outcome in (EndpointOutcome.TIMED_OUT, EndpointOutcome.UNREACHABLE)
        }
        is_anybody_gone = has_anybody_refused = False
        for part in report.endpoints:
            member = self._members[part.endpoint]
            was_spoilt = part.outcome is EndpointOutcome.ABORTED and silent
            if part.outcome is EndpointOutcome.APPLIED:
                member.state, member.is_on_trial, member.has_held = MemberState.HEALTHY, False, True
                member.backoff.reset()
            elif part.endpoint in silent or (member.is_on_trial and not was_spoilt):
                is_anybody_gone = True
                member.leave_out(part.outcome, part.detail)
            else:
                member.state, member.why = MemberState.JOINING, part.detail
                has_anybody_refused |= part.outcome is EndpointOutcome.REFUSED
        return False if has_anybody_refused and not had_group else may_fail or is_anybody_gone

    def _invite(self, in_flight: InFlightPolicy) -> None:
        """Query the members that do not take part and whose pause is over. Those that answer take part on trial."""
        now = time.monotonic()
        due = {n: m for n, m in self._members.items() if not m.takes_part and m.backoff.is_due(now)}
        found: Mapping[str, tuple[Capabilities, WeightVersion] | Exception] = self._publisher.run(
            query_endpoints, {name: partial(query_endpoint, member.endpoint) for name, member in due.items()}
        )
        for name, member in due.items():
            answer = found.get(name)
            if answer is None:
                member.mark_dead(f"{name}: did not answer within {ANSWER_S:g} s")
            elif isinstance(answer, Exception):
                member.mark_dead(str(answer) or repr(answer))
            elif problem := self._problem(member, *answer, in_flight):
                member.mark_dead(f"{name} {problem}")
                self._notes.append(member.why)
            else:
                member.capabilities, member.state, member.is_on_trial = answer[0], MemberState.JOINING, True

    def _problem(
        self, member: _Member, can: Capabilities, serves: WeightVersion, in_flight: InFlightPolicy
    ) -> str | None:
        """Return why a member that answers cannot take part."""
        if serves.state is EndpointState.RELEASED:
            return _RELEASED
        if problem := self._taken_over(member, serves):
            return problem
        before = member.capabilities or can
        if (can.dtype, can.vocab_size) != (before.dtype, before.vocab_size):
            return (
                f"now serves {can.model} in {can.dtype} with {can.vocab_size} tokens, but served {before.model} in "
                f"{before.dtype} with {before.vocab_size} before"
            )
        group = self._publisher.group
        needs = Needs(
            in_flight=in_flight,
            transport=group.transport,
            encodings=group.encoder.encodings,
            sharded=self._group is not None,
        )
        missing = can.missing(needs)
        return f"does not support {', '.join(missing.values())}" if missing else None

    def _leave_some_out(self, deadline_s: float) -> None:
        """Leave out members whose memory is released.

        If enough members answer promptly, also leave out the members that do not.

        The members that are left out are queried again before the next publish.
        """
        present = {name: member for name, member in self._members.items() if member.takes_part}
        calls = {name: member.endpoint.weight_version for name, member in present.items()}
        found: Mapping[str, WeightVersion | Exception] = self._publisher.run(
            query_endpoints, calls, self._quorum or 1, deadline_s
        )
        for name, answer in found.items():
            if isinstance(answer, WeightVersion) and answer.state is EndpointState.RELEASED:
                present[name].mark_dead(f"{name} {_RELEASED}")
                self._notes.append(present[name].why)
        self._leave_out_taken_over(found)
        for name in present.keys() - found.keys():
            why = f"did not report within {ANSWER_S:g} s which version it serves: left out of this publish"
            present[name].leave_out(EndpointOutcome.TIMED_OUT, why)
            self._notes.append(f"{name} {why}")

    def _leave_out_taken_over(self, found: Mapping[str, WeightVersion | Exception]) -> None:
        """Leave out members that another run has taken over. Taking them back would mix the tokens of both runs."""
        for name, answer in found.items():
            member = self._members[name]
            if isinstance(answer, WeightVersion) and (problem := self._taken_over(member, answer)):
                member.mark_dead(f"{name} {problem}")
                self._notes.append(member.why)

    def _taken_over(self, member: _Member, serves: WeightVersion) -> str | None:
        """Return the problem if a member that has held a version of this run now belongs to another run, or None."""
        others = {serves.owner_run_id, serves.run_id} - {None, self._publisher.run_id}
        member.is_taken_over = member.has_held and bool(others)
        if not member.is_taken_over:
            return None
        return f"was taken over by run {', '.join(sorted(filter(None, others)))!r}: give each run its own servers"

    def _note_changes(self) -> None:
        before, self._known = self._known, self.states
        changes = (StateChange(name, before.get(name), state) for name, state in self._known.items())
        self._changes = tuple(change for change in changes if change.before is not change.after)

    def _report_absence(self, worker: WeightSource) -> PublishReport:
        parts = [
            EndpointReport(
                name,
                EndpointOutcome.ABORTED if member.state is MemberState.JOINING else EndpointOutcome.UNREACHABLE,
                None,
                member.why or "fewer members than the quorum requires can be reached",
            )
            for name, member in self._members.items()
        ]
        spans = PublishSpans(gather_s=0.0, pause_s=0.0, wire_s=0.0, load_s=0.0, first_token_s=None, total_s=0.0)
        return PublishReport(
            self._publisher.run_id, worker.version, 0, tuple(parts), spans, num_needed=self._quorum or 1, sent_bytes=0
        )


def take_part(
    worker: WeightSource,
    parts: PartSender | None = None,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    deadline_s: float = 60.0,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Gather the weights, or send this rank's part of them with ``parts``, in each attempt that rank 0 makes.

    Every rank other than 0 calls this while rank 0 calls `Fleet.publish`.

    ``parts`` and ``deadline_s`` are needed if the publisher of rank 0 is sharded.

    ``group`` is the process group over which the ranks agree, the same as for `Fleet`; None means torch's default
    group.

    Raises the errors of gathering, and `UpdateError` if the publish failed on another rank.
    """
    verdict = _agree_on_verdict(worker, _Verdict.DONE, group)
    while verdict is _Verdict.AGAIN:
        failure: Exception | None = None
        try:
            if parts is None:
                gather_only(worker, bucket_bytes)
            else:
                parts.send(deadline_s)
        except Exception as error:  # raised below, after notifying the other ranks
            failure = error
        verdict = _agree_on_verdict(worker, _Verdict.DONE if failure is None else _Verdict.FAILED, group)
        if verdict is _Verdict.FAILED:
            raise failure or _other_rank_error()


def _other_rank_error() -> UpdateError:
    return UpdateError("the publish failed on another rank, whose error states the reason")


def _agree_on_verdict(worker: WeightSource, verdict: _Verdict, group: dist.ProcessGroup | None) -> _Verdict:
    """Return, on every rank, the highest verdict of any rank."""
    if worker.world_size == 1:
        return verdict
    device = "cpu" if "cpu" in dist.get_backend_config(group) else "cuda"
    agreed = torch.tensor(int(verdict), device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    return _Verdict(int(agreed))

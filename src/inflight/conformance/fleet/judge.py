"""The requirements that every schedule must meet, whichever faults were injected.

- No hang: every publish ends within its deadline plus the time to clean up, and no pause outlives its lease.
- No false success: a server that is reported to have applied a version serves and reports it; a publish that returns
  has reached its quorum; a trainer publishes nothing after a later incarnation has joined.
- No torn weights: a server samples from the weights of one version, and a poisoned server refuses to generate.
- Correct spans and no lost work: see `inflight.conformance.fleet.clients`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from inflight.conformance.fleet.palette import Shade
from inflight.conformance.fleet.servers import TestedServer, version_of
from inflight.conformance.fleet.trainer import CLEAN_UP_S, FleetTrainer, PublishRecord
from inflight.errors import InflightError, PoisonedError
from inflight.types import EndpointOutcome
from inflight.wire import EndpointState, GenerateRequest, SamplingParams, WeightVersion

_WATCH_S = 0.03


class ServerObservation(NamedTuple):
    """A server's report and the weights that it samples from.

    ``is_steady`` means that the report did not change while the weights were observed.
    """

    said: WeightVersion
    shade: Shade | None
    is_steady: bool


def outcome(published: PublishRecord) -> str:
    """Return the outcome of a publish as text, for statistics."""
    said = "returned" if published.error is None else type(published.error).__name__
    kinds = [] if published.report is None else sorted(e.outcome.value for e in published.report.endpoints)
    return ":".join((said, *kinds))


def publishes(trainers: Sequence[FleetTrainer], servers: Sequence[TestedServer], scale: float) -> list[str]:
    """Return what is wrong with the reports and durations of publishes."""
    problems = []
    all_lived = all(server.num_starts == 1 for server in servers)  # a restarted server has forgotten incarnations
    for trainer in trainers:
        for one in trainer.published:
            what, took_s = f"the publish of {one.shade}", one.ended - one.started
            if took_s > one.deadline_s + CLEAN_UP_S * scale:
                problems.append(f"{what} took {took_s:.1f} s, but its deadline was {one.deadline_s} s")
            if one.report is None:
                continue
            names = tuple(e.endpoint for e in one.report.endpoints)
            num_applied = sum(e.outcome is EndpointOutcome.APPLIED for e in one.report.endpoints)
            num_needed = len(one.endpoints) if one.quorum is None else one.quorum
            if names != one.endpoints:
                problems.append(f"{what} went to {one.endpoints}, but its report covers {names}")
            if one.succeeded != (num_applied >= num_needed):
                problems.append(
                    f"{what}: {num_applied} of {num_needed} endpoints applied it, but succeeded is {one.succeeded}"
                )
            later = [other for t in trainers if t.incarnation > trainer.incarnation for other in t.published]
            if one.succeeded and all_lived and any(_is_everywhere(other, before=one.started) for other in later):
                problems.append(f"{what} succeeded although a later trainer had published everywhere")
    return problems


def _is_everywhere(published: PublishRecord, before: float) -> bool:
    """Return whether a publish had reached every endpoint before that time."""
    return published.ended < before and published.report is not None and published.report.applied_everywhere


async def _seen(server: TestedServer) -> ServerObservation | None:
    """Return a server's report and the weights that it samples from, or None if the server is down."""
    try:
        said = await version_of(server)
        if said.state is not EndpointState.READY:
            return ServerObservation(said, None, is_steady=False)
        shade = await server.shade()
        again = await version_of(server)
    except InflightError:
        return None
    names = ("state", "version", "run_id", "session_id")
    return ServerObservation(said, shade, is_steady=all(getattr(said, name) == getattr(again, name) for name in names))


async def served(servers: Sequence[TestedServer], published: PublishRecord, *, is_alone: bool) -> list[str]:
    """Return the differences between the report of a publish and the weights that the servers serve.

    ``is_alone`` means that no other trainer is publishing.
    """
    problems = []
    reports = {} if published.report is None else {e.endpoint: e for e in published.report.endpoints}
    for server in servers:
        report = reports.get(server.name)
        is_applied = report is not None and report.outcome is EndpointOutcome.APPLIED
        if is_applied and not server.may_have_held(published.shade):
            problems.append(f"{server.name} is reported to have applied {published.shade} but never held it")
        seen = await _seen(server)
        if seen is None:
            continue
        said, shade = seen.said, seen.shade
        if said.state is EndpointState.POISONED:
            problems += await _poisoned(server)
        if not seen.is_steady:
            continue
        is_comparable = is_alone and server.num_starts == 1
        if shade is None or shade.version != said.version:
            problems.append(f"{server.name} reports version {said.version} but samples from {shade}")
        elif is_comparable and is_applied and shade != published.shade:
            problems.append(f"{server.name} is reported to serve {published.shade} but samples from {shade}")
        elif is_comparable and report is not None and report.serves not in (None, said.version):
            problems.append(f"{server.name} is reported to serve version {report.serves} but samples from {shade}")
    return problems


async def _poisoned(server: TestedServer) -> list[str]:
    """Return what is wrong with a server that reports torn weights."""
    request = GenerateRequest(request_id="poisoned", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1))
    try:
        await server.deliver(lambda endpoint: endpoint.generate(request))
    except PoisonedError:
        return [] if server.was_torn else [f"{server.name} is poisoned, but no fault has torn its weights"]
    except InflightError:  # it died meanwhile
        return []
    return [f"{server.name} is poisoned but generates"]


async def together(servers: Sequence[TestedServer], shade: Shade) -> list[str]:
    """Return which servers do not serve the version of the last publish, which had no injected faults."""
    problems = []
    for server in servers:
        if server.is_gone:
            continue
        seen = await _seen(server)
        wanted = (shade, EndpointState.READY, shade.version)
        if seen is None or (seen.shade, seen.said.state, seen.said.version) != wanted:
            problems.append(f"{server.name} does not serve the last publish, of {shade}: {seen or 'it is down'}")
    return problems


async def watch(server: TestedServer, longest_pause_s: Callable[[], float], note: Callable[[str], None]) -> None:
    """Report each pause that outlives its lease, until cancelled."""
    since: float | None = None
    while True:
        await asyncio.sleep(_WATCH_S)
        try:
            state = (await version_of(server)).state
        except InflightError:
            since = None
            continue
        if state in (EndpointState.READY, EndpointState.POISONED):
            since = None
        elif since is None:
            since = time.monotonic()
        elif time.monotonic() - since > longest_pause_s():
            note(f"{server.name}: {state} for more than {longest_pause_s():.1f} s")
            since = None

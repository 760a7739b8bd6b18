"""Faults in staged updates, in named sessions, and in replacing trainers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.wire import BucketTransfer, InFlightPolicy, TransportSpec, UpdateRef, WeightUpdate, WeightVersion
from tests.conformance.mutants.control import end_what_is_open
from tests.conformance.mutants.faults import applies_as_they_arrive
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import announcing, replaces


@replaces("request_weight_update")
async def reports_paused_while_staging(endpoint: EmbeddedEndpoint, own: Any, update: WeightUpdate) -> None:
    await own(update)
    if update.staged:
        await endpoint._in_engine(lambda: endpoint._engine.pauses.pause(InFlightPolicy.KEEP, lambda: None))


@replaces("_updates._session.abort")
def ends_requests_with_a_staged_update(endpoint: EmbeddedEndpoint, own: Any, *, torn: bool = False) -> None:
    is_staged = endpoint._updates._session.update is not None and endpoint._updates._session.update.staged
    own(torn=torn)
    if is_staged:
        endpoint._engine.call(endpoint._engine.scheduler.cancel_all)


def stages_for_ever(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    return announcing(lambda update: {"lease_s": 3600.0} if update.staged else {})(endpoint)


def asking(method: str, answer: Callable[[Any], bool]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Replace the session's answer about what it remembers."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        setattr(endpoint._updates._session, method, answer)
        return endpoint

    return infect


def remembering(num_sessions: int) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Remember only the last ``num_sessions`` ended sessions."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        session: Any = endpoint._updates._session
        session._over = deque(maxlen=num_sessions)
        return endpoint

    return infect


@replaces("_updates.receive")
async def renewed_by_what_it_refuses(endpoint: EmbeddedEndpoint, own: Any, bucket: BucketTransfer) -> None:
    if endpoint._updates._open is not None:
        endpoint._updates._renew_lease(endpoint._updates._open)
    await own(bucket)


def forgets_expired_sessions(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Remember only the sessions that were aborted or replaced."""
    faulty: Any = endpoint._updates
    end, abort, join = faulty._end, faulty.abort, faulty.join
    asked: set[UpdateRef] = set()

    async def ending(opened: Any) -> None:
        await end(opened)
        if opened.update.ref not in asked and opened.update.ref in faulty._session._over:
            faulty._session._over.remove(opened.update.ref)

    async def aborting(ref: UpdateRef) -> None:
        asked.add(ref)
        await abort(ref)

    async def joining(spec: TransportSpec) -> None:
        if faulty._open is not None:
            asked.add(faulty._open.update.ref)
        await join(spec)

    faulty._end, faulty.abort, faulty.join = ending, aborting, joining
    return endpoint


@replaces("_updates._session.request")
def served_once_requested(endpoint: EmbeddedEndpoint, own: Any, update: WeightUpdate) -> Any:
    opened = own(update)
    endpoint._updates._session._served_incarnation = update.incarnation
    return opened


@replaces("abort_weight_update")
async def identifies_sessions_by_version(endpoint: EmbeddedEndpoint, own: Any, ref: UpdateRef) -> WeightVersion:
    if (await endpoint.weight_version()).updating_to != ref.version:
        return await own(ref)
    update = endpoint._updates.session.update
    assert update is not None
    return await own(update.ref)


@replaces("_updates._session.is_served")
def compares_commits_by_version(endpoint: EmbeddedEndpoint, own: Any, ref: UpdateRef) -> bool:
    served = endpoint._updates._session._served
    if ref.session_id and (ref.run_id, ref.version) == (served.run_id, served.version):
        return own(served)
    return own(ref)


@replaces("_updates._session.fence")
def any_incarnation(endpoint: EmbeddedEndpoint, _: Any, run_id: str, incarnation: int) -> None:
    endpoint._updates._session._owner, endpoint._updates._session._incarnation = run_id, incarnation


@replaces("weight_version")
async def reports_the_owner_alone(endpoint: EmbeddedEndpoint, own: Any) -> WeightVersion:
    found: WeightVersion = await own()
    return found.model_copy(update={"incarnations": {found.owner_run_id: found.incarnation}})


@replaces("_updates._session.fence")
def fences_the_owner_alone(endpoint: EmbeddedEndpoint, own: Any, run_id: str, incarnation: int) -> None:
    session = endpoint._updates._session
    highest = session.incarnations.get(run_id, 0)
    own(run_id, incarnation if run_id == session.owner else max(incarnation, highest))


@replaces("init_process_group")
async def fenced_too_late(endpoint: EmbeddedEndpoint, own: Any, spec: TransportSpec) -> None:
    await end_what_is_open(endpoint, spec.run_id)
    await own(spec)


def receives_again(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    faulty: Any = endpoint
    arrived: set[tuple[UpdateRef, int]] = set()

    async def receive(bucket: BucketTransfer) -> None:
        key = (bucket.ref, bucket.bucket_index)
        if key in arrived:
            await asyncio.sleep(bucket.timeout_s)
        await EmbeddedEndpoint.receive_weights(endpoint, bucket)
        arrived.add(key)

    faulty.receive_weights = receive
    return endpoint


MUTANTS = (
    Mutant(
        "staged update pauses",
        "E-45",
        "A staged update pauses sampling when it is requested.",
        reports_paused_while_staging,
    ),
    Mutant(
        "staged update not staged",
        "E-45",
        "A staged update is applied without staging.",
        announcing(lambda _: {"staged": False}),
    ),
    Mutant(
        "staged weights applied as they arrive",
        "E-45",
        "The buckets of a staged update go into the model that is sampled from.",
        applies_as_they_arrive,
    ),
    Mutant(
        "requests end with a staged update",
        "E-46",
        "The end of a staged update ends running requests.",
        ends_requests_with_a_staged_update,
    ),
    Mutant("staged update without a lease", "E-46", "A staged update never expires.", stages_for_ever),
    Mutant(
        "repeated request refused",
        "E-47",
        "A repeated request for an update is refused because the update is already open.",
        asking("is_open", lambda _: False),
    ),
    Mutant(
        "repeated commit refused",
        "E-47",
        "A repeated commit is refused because no update is open.",
        asking("is_served", lambda _: False),
    ),
    Mutant(
        "repeated bucket awaited",
        "E-47",
        "If the call for a bucket that has arrived is repeated, the endpoint waits for the bucket again.",
        receives_again,
    ),
    Mutant("forgets ended sessions", "E-48", "An aborted session may be requested again.", remembering(0)),
    Mutant(
        "remembers eight sessions",
        "E-48",
        "A session may be requested again after eight others have ended.",
        remembering(8),
    ),
    Mutant(
        "commits compared by version",
        "E-48",
        "A late commit of an aborted session succeeds once another session has committed the same version.",
        compares_commits_by_version,
    ),
    Mutant(
        "refused calls renew",
        "E-48",
        "A bucket of any session renews the lease of the open update, even if the bucket is refused.",
        renewed_by_what_it_refuses,
    ),
    Mutant(
        "expired sessions reopen",
        "E-48",
        "A session whose lease has expired may be requested again.",
        forgets_expired_sessions,
    ),
    Mutant(
        "late abort ends another session",
        "E-48",
        "An abort checks the version, not the session.",
        identifies_sessions_by_version,
    ),
    Mutant(
        "any incarnation accepted",
        "E-49",
        "The last caller owns the run, regardless of its incarnation.",
        any_incarnation,
    ),
    Mutant(
        "fenced too late",
        "E-49",
        "A call of an earlier incarnation ends the open update before it is refused.",
        fenced_too_late,
    ),
    Mutant(
        "incarnation of what was requested",
        "U-58",
        "Versions are compared within an incarnation from its first request on, even if that update is aborted.",
        served_once_requested,
    ),
    Mutant(
        "only the owner's incarnation reported",
        "E-88",
        "The incarnations of runs other than the owner are not reported.",
        reports_the_owner_alone,
    ),
    Mutant(
        "only the owner fenced",
        "E-88",
        "Incarnations are compared only for the run that owns the endpoint.",
        fences_the_owner_alone,
    ),
)

"""Faults of pauses and of the state machine."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.errors import InvalidRequestError, UpdateRefusedError
from inflight.wire import (
    BucketTransfer,
    EndpointState,
    GenerateRequest,
    GenerateResponse,
    InFlightPolicy,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
)
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import announcing, pausing, replaces


async def end_what_is_open(endpoint: EmbeddedEndpoint, run_id: str) -> None:
    """Abort the open update, whatever its version."""
    update = endpoint._updates.session.update
    if update is not None:
        ref = UpdateRef(run_id=run_id, version=update.version, session_id=update.session_id)
        await EmbeddedEndpoint.abort_weight_update(endpoint, ref)


@replaces("request_weight_update")
async def hangs_on_a_pause(endpoint: EmbeddedEndpoint, own: Any, update: WeightUpdate) -> None:
    await own(update)
    if update.in_flight is InFlightPolicy.KEEP:
        await asyncio.Event().wait()


def stops_late(engine: Any, pause: Callable[..., None], policy: InFlightPolicy, on_paused: Callable[[], None]) -> None:
    if policy is not InFlightPolicy.RECOMPUTE:
        return pause(policy, on_paused)
    threading.Timer(0.7, lambda: engine.call(lambda: pause(policy, lambda: None))).start()
    return on_paused()


def never_stops(engine: Any, pause: Callable[..., None], policy: InFlightPolicy, on_paused: Callable[[], None]) -> None:
    return on_paused() if policy is InFlightPolicy.KEEP else pause(policy, on_paused)


def drains_behind_its_back(
    engine: Any, pause: Callable[..., None], policy: InFlightPolicy, on_paused: Callable[[], None]
) -> None:
    if policy is not InFlightPolicy.DRAIN:
        return pause(policy, on_paused)
    pause(policy, lambda: None)
    return on_paused()


def pauses_as(taken: InFlightPolicy, instead: InFlightPolicy) -> Callable[..., None]:
    return lambda engine, pause, policy, on_paused: pause(instead if policy is taken else policy, on_paused)


@replaces("_engine.scheduler.cancel_started")
def ends_what_runs(endpoint: EmbeddedEndpoint, _: Any) -> None:
    scheduler = endpoint._engine.scheduler
    for request in dict.fromkeys(sequence.request for sequence in scheduler.running.values()):
        scheduler.cancel(request)


@replaces("_engine.scheduler.cancel_started")
def ends_what_has_tokens(endpoint: EmbeddedEndpoint, _: Any) -> None:
    scheduler = endpoint._engine.scheduler
    for sequence in [*scheduler.running.values(), *(it for it in scheduler.waiting if it.token_ids)]:
        scheduler.waiting = deque(it for it in scheduler.waiting if it is not sequence)
        scheduler.finish(sequence, "abort")


def recomputes_last(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    scheduler: Any = endpoint._engine.scheduler
    recompute = scheduler.recompute_running

    def faulty() -> None:
        num = len(scheduler.running)
        recompute()
        scheduler.waiting.rotate(-num)

    scheduler.recompute_running = faulty
    return endpoint


@replaces("_engine.pauses.resume")
def keeps_waiting_for_a_drain(endpoint: EmbeddedEndpoint, resume: Callable[[], float]) -> float:
    """Keep the callback of a refused drain, which still pauses sampling once no request is running."""
    pauses = endpoint._engine.pauses
    on_drained = pauses._on_drained if pauses.paused_since is None else None
    paused_s = resume()
    pauses._on_drained = on_drained
    return paused_s


@replaces("generate")
async def refuses_newcomers(endpoint: EmbeddedEndpoint, own: Any, request: GenerateRequest) -> GenerateResponse:
    if (await endpoint.weight_version()).state is not EndpointState.READY:
        raise InvalidRequestError("weights are being updated; come back later")
    return await own(request)


@replaces("request_weight_update")
async def accepts_a_second_pause(endpoint: EmbeddedEndpoint, own: Any, update: WeightUpdate) -> None:
    await end_what_is_open(endpoint, update.run_id)
    await own(update)


@replaces("commit_weight_update")
async def commits_nothing(endpoint: EmbeddedEndpoint, own: Any, ref: UpdateRef) -> WeightVersion:
    version = await endpoint.weight_version()
    return version if version.updating_to is None else await own(ref)


@replaces("commit_weight_update")
async def ended_by_an_early_commit(endpoint: EmbeddedEndpoint, own: Any, ref: UpdateRef) -> WeightVersion:
    try:
        return await own(ref)
    except UpdateRefusedError:
        await end_what_is_open(endpoint, ref.run_id)
        raise


@replaces("_updates._session._reason_to_refuse")
def accepts_stale_versions(endpoint: EmbeddedEndpoint, reason: Any, update: WeightUpdate) -> str | None:
    text: str | None = reason(update)
    return None if text is not None and "is already served" in text else text


@replaces("_updates._session._reason_to_refuse")
def accepts_any_run(endpoint: EmbeddedEndpoint, reason: Any, update: WeightUpdate) -> str | None:
    endpoint._updates._session._group_run_id = endpoint._updates._session._group_run_id and update.run_id
    text: str | None = reason(update)
    return text


@replaces("abort_weight_update")
async def aborts_whatever_is_open(endpoint: EmbeddedEndpoint, _: Any, ref: UpdateRef) -> WeightVersion:
    await end_what_is_open(endpoint, ref.run_id)
    return await endpoint.weight_version()


@replaces("_updates.receive")
async def no_lease_once_complete(endpoint: EmbeddedEndpoint, own: Any, bucket: BucketTransfer) -> None:
    await own(bucket)
    opened = endpoint._updates._open
    if opened is not None and bucket.bucket_index == len(opened.update.buckets) - 1:
        opened.stop_lease()


def repetitions_renew_nothing(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    faulty: Any = endpoint._updates
    request, receive, renew = faulty.request, faulty.receive, faulty._renew_lease

    async def without_renewing(repeated: bool, call: Any) -> None:
        faulty._renew_lease = (lambda _: None) if repeated else renew
        try:
            await call
        finally:
            faulty._renew_lease = renew

    faulty.request = lambda it: without_renewing(faulty._session.is_open(it.ref), request(it))
    faulty.receive = lambda it: without_renewing(faulty._session.has_bucket(it), receive(it))
    return endpoint


def lease_from_the_pause_on(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    faulty: Any = endpoint
    leases = []

    async def request(update: WeightUpdate) -> None:
        async def end() -> None:
            await asyncio.sleep(update.lease_s)
            if (await endpoint.weight_version()).updating_to == update.version:
                await EmbeddedEndpoint.abort_weight_update(endpoint, update.ref)

        await EmbeddedEndpoint.request_weight_update(endpoint, update)
        leases.append(asyncio.ensure_future(end()))

    faulty.request_weight_update = request
    return endpoint


@replaces("commit_weight_update")
async def answers_before_the_switch(endpoint: EmbeddedEndpoint, own: Any, ref: UpdateRef) -> WeightVersion:
    before = await endpoint.weight_version()
    await own(ref)
    return before


@replaces("weight_version")
async def reports_paused_to_the_end(endpoint: EmbeddedEndpoint, own: Any) -> WeightVersion:
    version = await own()
    is_updating = version.state is EndpointState.UPDATING
    return version.model_copy(update={"state": EndpointState.PAUSED}) if is_updating else version


MUTANTS = (
    Mutant("hang on pause", "E-30", "`request_weight_update` under keep never returns.", hangs_on_a_pause),
    Mutant(
        "sampling continues after pause",
        "E-30",
        "A pause under keep is acknowledged, but sampling continues.",
        pausing(never_stops),
    ),
    Mutant(
        "stops late",
        "E-31",
        "A pause under recompute stops sampling 0.7 s after it was acknowledged.",
        pausing(stops_late),
    ),
    Mutant(
        "paused requests aborted under keep",
        "E-32",
        "A pause under keep ends running requests.",
        pausing(pauses_as(InFlightPolicy.KEEP, InFlightPolicy.ABORT)),
    ),
    Mutant("newcomers refused", "E-33", "Requests that arrive during a pause are refused.", refuses_newcomers),
    Mutant(
        "drain acknowledged early",
        "E-34",
        "A drain is acknowledged while requests still run.",
        pausing(drains_behind_its_back),
    ),
    Mutant(
        "recomputed last",
        "E-34",
        "Requests that an update under recompute interrupts queue behind those that have not begun.",
        recomputes_last,
    ),
    Mutant(
        "drain without a deadline",
        "E-35",
        "A drain has no deadline.",
        announcing(lambda update: {"deadline_s": 3600.0}),
    ),
    Mutant(
        "drain ends after its refusal",
        "E-35",
        "A drain that was refused still pauses sampling once no request is running.",
        keeps_waiting_for_a_drain,
    ),
    Mutant(
        "abort that pauses",
        "E-36",
        "A pause under abort pauses running requests instead of ending them.",
        pausing(pauses_as(InFlightPolicy.ABORT, InFlightPolicy.KEEP)),
    ),
    Mutant(
        "recomputed although paused by abort",
        "E-36",
        "A pause under abort does not end requests that wait to be recomputed.",
        ends_what_runs,
    ),
    Mutant(
        "siblings outlive a pause by abort",
        "E-36",
        "A pause under abort ends running completions, but others of the same request keep waiting for a slot.",
        ends_what_has_tokens,
    ),
    Mutant("double pause accepted", "E-37", "A second update replaces the open one.", accepts_a_second_pause),
    Mutant("commit of nothing", "E-38", "A commit without an update returns the served version.", commits_nothing),
    Mutant("early commit ends the update", "E-39", "A refused commit ends the update.", ended_by_an_early_commit),
    Mutant(
        "stale version accepted", "E-40", "A version lower than the served one is accepted.", accepts_stale_versions
    ),
    Mutant("foreign run accepted", "E-41", "Any run may use a group that another run formed.", accepts_any_run),
    Mutant("abort of whatever is open", "E-42", "An abort ignores the version.", aborts_whatever_is_open),
    Mutant("no lease", "E-43", "A pause never expires.", announcing(lambda update: {"lease_s": 3600.0})),
    Mutant(
        "lease never renewed",
        "E-43",
        "A lease starts with the pause, and no message renews it.",
        lease_from_the_pause_on,
    ),
    Mutant(
        "no lease once complete",
        "E-43",
        "An update whose buckets have all arrived never expires.",
        no_lease_once_complete,
    ),
    Mutant(
        "repetitions renew nothing",
        "E-43",
        "A repeated request and a repeated bucket do not renew the lease.",
        repetitions_renew_nothing,
    ),
    Mutant(
        "answer before the switch", "E-44", "A commit returns the previously served version.", answers_before_the_switch
    ),
    Mutant("paused to the end", "E-44", "The state stays paused while buckets arrive.", reports_paused_to_the_end),
)

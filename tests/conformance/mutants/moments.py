"""Faults that show only around a pause, an update, an abort or a release."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import torch

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.slot_attention import StepPlan
from inflight.errors import ReleasedError, UpdateRefusedError
from inflight.wire import (
    AbortRequests,
    EndpointState,
    InFlightPolicy,
    ScoreRequest,
    UpdateRef,
    WeightUpdate,
)
from tests.conformance.mutants.caches import cached
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import replaces


def prefilled_during_pauses(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    engine: Any = endpoint._engine
    add, append = engine.scheduler.add, engine.steps._append
    early: dict[Any, Any] = {}

    def adding(request: Any) -> None:
        add(request)
        if engine.pauses.paused_since is None or request.images:
            return
        ids = request.prompt_token_ids
        slot = engine.scheduler.store.open(len(ids), len(ids) + 1)
        plan = StepPlan(engine.scheduler.store, [slot], [len(ids)], engine.weights.device)
        assert not plan.decoding_slots
        engine.weights.model.base_model(
            input_ids=torch.tensor([ids]),
            position_ids=torch.tensor([plan.positions()]),
            use_cache=False,
            step_plan=plan,
        )
        keys, values = cached(slot, len(ids))
        early[request] = (keys.clone(), values.clone())
        engine.scheduler.store.close(slot)

    def appending(drawn: Any) -> Any:
        s = drawn.sequence
        if not s.token_ids and s.request in early:
            for part, kept in zip(cached(s.slot, len(s.request.prompt_token_ids)), early[s.request], strict=True):
                part.copy_(kept)
        return append(drawn)

    engine.scheduler.add, engine.steps._append = adding, appending
    return endpoint


@replaces("generate")
async def all_aborted(endpoint: EmbeddedEndpoint, own: Any, request: Any) -> Any:
    response = await own(request)
    if any(c.finish_reason == "abort" for c in response.completions):
        changed = tuple(c.model_copy(update={"finish_reason": "abort"}) for c in response.completions)
        return response.model_copy(update={"completions": changed})
    return response


@replaces("_updates._session._reason_to_refuse")
def served_version_refused(endpoint: EmbeddedEndpoint, reason: Any, update: WeightUpdate) -> Any:
    session = endpoint._updates._session
    if session.run_id == update.run_id and update.version == session.version:
        return f"version {update.version} of this run is already served"
    return reason(update)


def staged_abort_pauses(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    pause = endpoint.pause

    async def faulty(update: WeightUpdate) -> None:
        if update.staged and update.in_flight is InFlightPolicy.ABORT:
            update = update.model_copy(update={"in_flight": InFlightPolicy.KEEP})
        await pause(update)

    endpoint.pause = faulty
    return endpoint


def recompute_lost_after_abort(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """The first update after an abort recomputes nothing."""
    abort, scheduler, aborted = endpoint.abort_requests, endpoint._engine.scheduler, []
    recompute = scheduler.recompute_running

    async def faulty(requests: Any) -> None:
        await abort(requests)
        aborted.append(requests)

    def lost() -> None:
        if not aborted:
            recompute()
        aborted.clear()

    endpoint.abort_requests, scheduler.recompute_running = faulty, lost
    return endpoint


def replaced_commit_answered(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    own = endpoint.commit_weight_update
    done: set[UpdateRef] = set()

    async def faulty(ref: UpdateRef) -> Any:
        if ref in done and ref.session_id:
            return await endpoint.weight_version()
        answer = await own(ref)
        done.add(ref)
        return answer

    endpoint.commit_weight_update = faulty
    return endpoint


@replaces("release_memory")
async def releases_while_staging(endpoint: EmbeddedEndpoint, own: Any) -> Any:
    update = endpoint._updates.session.update
    if update is not None and update.staged:
        await EmbeddedEndpoint.abort_weight_update(endpoint, update.ref)
    return await own()


@replaces("score")
async def scores_while_released(endpoint: EmbeddedEndpoint, own: Any, request: ScoreRequest) -> Any:
    try:
        return await own(request)
    except ReleasedError:
        session = endpoint._updates.session
        session.refuse_to_sample = lambda: None
        try:
            return await own(request)
        finally:
            del session.refuse_to_sample


@replaces("generate_stream")
async def streams_while_released(endpoint: EmbeddedEndpoint, own: Any, request: Any) -> Any:
    session = endpoint._updates.session
    if session.state is EndpointState.RELEASED:
        while session.state is EndpointState.RELEASED:  # noqa: ASYNC110 - nothing announces its end
            await asyncio.sleep(0.02)
    async for chunk in own(request):
        yield chunk


@replaces("_engine.free_memory")
def kept_lost_by_release(endpoint: EmbeddedEndpoint, own: Any) -> None:
    own()
    kept = endpoint._sink._kept
    if kept is not None:
        kept.flats = [torch.zeros_like(f) for f in kept.flats]


@replaces("request_weight_update")
async def refused_request_resumes(endpoint: EmbeddedEndpoint, own: Any, update: WeightUpdate) -> None:
    try:
        await own(update)
    except UpdateRefusedError:
        if endpoint._updates._open is not None and not endpoint._updates._open.update.staged:
            await endpoint.resume()
        raise


@replaces("request_weight_update")
async def repeated_request_at_once(endpoint: EmbeddedEndpoint, own: Any, update: WeightUpdate) -> None:
    if endpoint._updates._open is not None and endpoint._updates._session.is_open(update.ref):
        return
    await own(update)


@replaces("abort_weight_update")
async def abort_of_any_run(endpoint: EmbeddedEndpoint, own: Any, ref: UpdateRef) -> Any:
    update = endpoint._updates.session.update
    if update is not None and update.version == ref.version and update.session_id == ref.session_id:
        ref = update.ref
    return await own(ref)


def forgets_after_sixteen(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    known: Any = endpoint._updates._session._incarnations
    own = known.admit

    def faulty(run_id: str, incarnation: int) -> None:
        for name in set(known._highest) - set(known.reported()):
            del known._highest[name]
        own(run_id, incarnation)

    known.admit = faulty
    return endpoint


def appending(before: Callable[[EmbeddedEndpoint, Any], None], after: Callable[[Any, Any], None] | None = None) -> Any:
    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        steps: Any = endpoint._engine.steps
        own = steps._append

        def faulty(drawn: Any) -> Any:
            before(endpoint, drawn.sequence)
            reason = own(drawn)
            if after is not None:
                after(endpoint, drawn.sequence)
            return reason

        steps._append = faulty
        return endpoint

    return infect


def _fork(endpoint: EmbeddedEndpoint, s: Any) -> None:
    """A completion that starts late copies the prompt's keys of one that runs already."""
    if s.token_ids or s.index == 0:
        return
    for other in s.request.sequences:
        if other is not s and other.slot is not None and other.token_ids:
            num = len(s.request.prompt_token_ids)
            for part, kept in zip(cached(s.slot, num), cached(other.slot, num), strict=True):
                part.copy_(kept)
            return


late_completions_fork = appending(_fork)


def _aborting(abort: Any) -> Any:
    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        engine: Any = endpoint._engine
        own = engine.scheduler.abort
        engine.scheduler.abort = lambda ids: abort(engine, own, list(ids))
        return endpoint

    return infect


first_id_only = _aborting(lambda engine, own, ids: own(ids[:1]))


@replaces("abort_requests")
async def stops_with_unknown(endpoint: EmbeddedEndpoint, own: Any, requests: AbortRequests) -> None:
    """The first id that does not run ends the loop."""
    known = []
    for i in requests.request_ids:
        if i not in endpoint._engine.scheduler.requests:
            break
        known.append(i)
    if known:
        await own(AbortRequests(request_ids=tuple(known)))


def spans_of_first(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """All completions of a request report the spans of the first one, cut to their length."""
    own = endpoint.generate

    async def faulty(request: Any) -> Any:
        response = await own(request)
        first = response.completions[0]
        changed = [first]
        for c in response.completions[1:]:
            num = len(c.token_ids)
            spans = [s.model_copy(update={"end": min(s.end, num)}) for s in first.version_spans if s.start < num]
            if spans and spans[-1].end < num:
                spans[-1] = spans[-1].model_copy(update={"end": num})
            changed.append(c.model_copy(update={"version_spans": tuple(spans) or c.version_spans}))
        return response.model_copy(update={"completions": tuple(changed)})

    endpoint.generate = faulty
    return endpoint


@replaces("resume")
async def numbers_again_after_an_abort(endpoint: EmbeddedEndpoint, own: Any) -> None:
    def restart() -> None:
        for s in endpoint._engine.scheduler.running.values():
            if s.request.sampling.seed is not None:
                s.uniform = random.Random(f"{s.request.sampling.seed}:{s.index}").random

    endpoint._engine.call(restart)
    await own()


def reporting(**changes: Any) -> Any:
    @replaces("weight_version")
    async def faulty(endpoint: EmbeddedEndpoint, own: Any) -> Any:
        found = await own()
        return found.model_copy(update={k: v(found) if callable(v) else v for k, v in changes.items()})

    return faulty


def drain_without_streams(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """A drain does not wait for streams, which are paused."""
    engine: Any = endpoint._engine
    scheduler = engine.scheduler

    def faulty() -> bool:
        if any(s.request.on_token is None for s in scheduler.running.values()):
            return True
        return bool(scheduler.waiting and scheduler.waiting[0].token_ids)

    scheduler.has_started = faulty
    return endpoint


def abort_spares_streams(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    scheduler: Any = endpoint._engine.scheduler

    def faulty() -> None:
        started = [*scheduler.running.values(), *(s for s in scheduler.waiting if s.token_ids)]
        for request in dict.fromkeys(s.request for s in started):
            if request.on_token is None:
                scheduler.cancel(request)

    scheduler.cancel_started = faulty
    return endpoint


@replaces("_updates._renew_lease")
def staged_lease_never_renewed(endpoint: EmbeddedEndpoint, own: Any, opened: Any) -> None:
    if opened.update.staged and opened.lease is not None:
        return
    own(opened)


@replaces("abort_requests")
async def aborts_lost_in_pauses(endpoint: EmbeddedEndpoint, own: Any, requests: AbortRequests) -> None:
    if endpoint._engine.pauses.paused_since is None:
        await own(requests)


MUTANTS = (
    Mutant(
        "prefilled during pauses",
        "E-33",
        "Prompts that arrive during a pause are computed at once, by the weights of then.",
        prefilled_during_pauses,
    ),
    Mutant("drain without streams", "E-34", "A drain does not wait for streams.", drain_without_streams),
    Mutant("streams outlive a pause by abort", "E-36", "A pause by abort pauses streams.", abort_spares_streams),
    Mutant(
        "refused request resumes",
        "E-37",
        "A request for an update that is refused ends the pause of the open one.",
        refused_request_resumes,
    ),
    Mutant("served version refused", "E-40", "The served version cannot be published again.", served_version_refused),
    Mutant(
        "owner of the served weights",
        "E-41",
        "owner_run_id names the run of the served weights.",
        reporting(owner_run_id=lambda v: v.run_id),
    ),
    Mutant("abort of any run", "E-42", "An abort ignores the run.", abort_of_any_run),
    Mutant(
        "staged lease never renewed",
        "E-43",
        "No message renews the lease of a staged update.",
        staged_lease_never_renewed,
    ),
    Mutant(
        "staged abort pauses",
        "E-45",
        "Under abort, the commit of a staged update pauses running requests.",
        staged_abort_pauses,
    ),
    Mutant(
        "repeated request answered at once",
        "E-47",
        "A repeated request for an update does not wait for the drain that has begun.",
        repeated_request_at_once,
    ),
    Mutant(
        "recompute lost after an abort",
        "U-75",
        "The first update after an abort recomputes nothing.",
        recompute_lost_after_abort,
    ),
    Mutant(
        "commit of a replaced session answered",
        "E-48",
        "A commit of a session that was replaced is answered as if its weights were served.",
        replaced_commit_answered,
    ),
    Mutant(
        "incarnations forgotten after sixteen runs",
        "E-88",
        "The incarnations of runs that are no longer reported are forgotten.",
        forgets_after_sixteen,
    ),
    Mutant("release ends a staged update", "E-64", "A release aborts a staged update.", releases_while_staging),
    Mutant("scores while released", "E-65", "Scores are computed while memory is released.", scores_while_released),
    Mutant("streams wait while released", "E-65", "Streams wait while memory is released.", streams_while_released),
    Mutant(
        "base of deltas lost by a release",
        "E-66",
        "A release loses the base of deltas, which is still reported.",
        kept_lost_by_release,
    ),
    Mutant(
        "finished completions called aborted",
        "E-69",
        "Completions that had ended when their request was aborted get the finish reason abort.",
        all_aborted,
    ),
    Mutant("first id only", "E-69", "Only the first of several ids is aborted.", first_id_only),
    Mutant(
        "unknown id ends an abort", "E-69", "Ids after one that is not running are not aborted.", stops_with_unknown
    ),
    Mutant(
        "aborts lost in pauses", "E-69", "Requests that are aborted during a pause continue.", aborts_lost_in_pauses
    ),
    Mutant(
        "random numbers again after a pause",
        "U-56",
        "The generators of running requests are recreated when a pause ends without an update.",
        numbers_again_after_an_abort,
    ),
    Mutant(
        "spans of the first completion",
        "U-20",
        "All completions of a request have the spans of the first one.",
        spans_of_first,
    ),
    Mutant(
        "late completions share old keys",
        "U-34",
        "A completion that waited gets the prompt's keys and values from one of its request that runs.",
        late_completions_fork,
    ),
)

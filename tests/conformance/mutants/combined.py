"""Faults that show only where two conditions meet: a kind of request and a state, an edge and a setting."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import torch

import inflight.engines.embedded.sampler
import inflight.engines.embedded.stepping
import inflight.http.server
import inflight.weights.receive.staging
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.errors import InvalidRequestError, PoisonedError, ReleasedError, UpdateRefusedError
from inflight.wire import (
    AbortRequests,
    BucketTransfer,
    EndpointState,
    InFlightPolicy,
    SamplingParams,
    ScoreRequest,
    TransportSpec,
)
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import replaces, sampling_with

_CANDIDATES = 1024


@replaces("generate_stream")
async def streams_when_poisoned(endpoint: EmbeddedEndpoint, own: Any, request: Any) -> AsyncIterator[Any]:
    session: Any = endpoint._updates.session
    if session.state is EndpointState.POISONED:
        session.refuse_to_sample = lambda: None
    try:
        async for chunk in own(request):
            yield chunk
    finally:
        session.__dict__.pop("refuse_to_sample", None)


@replaces("_updates._session.note_group_formed")
def healed_by_a_group(endpoint: EmbeddedEndpoint, own: Any, run_id: str) -> None:
    session: Any = endpoint._updates._session
    own(run_id)
    if session._state is EndpointState.POISONED:
        session._state = EndpointState.READY


def healed_by_a_lease(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    updates: Any = endpoint._updates
    own = updates._renew_lease

    async def end(opened: Any) -> None:
        await updates._end(opened)
        updates._session._state = EndpointState.READY

    def faulty(opened: Any) -> None:
        own(opened)
        if opened.lease is not None and updates._session.is_torn:
            opened.lease.cancel()
            loop = asyncio.get_running_loop()
            opened.lease = loop.call_later(opened.update.lease_s, lambda: updates._calls.start(end(opened)))

    updates._renew_lease = faulty
    return endpoint


@replaces("release_memory")
async def healed_by_a_release(endpoint: EmbeddedEndpoint, own: Any) -> Any:
    session: Any = endpoint._updates._session
    try:
        return await own()
    except PoisonedError:
        session._state = EndpointState.READY
        raise


def drains_until_answered(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    engine: Any = endpoint._engine
    cancel, complete, pause, left = engine.scheduler.cancel, engine.pauses.complete_drain, engine.pauses.pause, []

    def pausing(policy: InFlightPolicy, on_paused: Callable[[], None]) -> None:
        left.clear()
        pause(policy, on_paused)

    def cancelling(request: Any) -> None:
        left.append(request)
        cancel(request)

    engine.pauses.pause, engine.scheduler.cancel = pausing, cancelling
    engine.pauses.complete_drain = lambda: None if left else complete()
    return endpoint


def staged_drain_left_behind(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """A staged update whose drain has timed out ends without resuming."""
    updates: Any = endpoint._updates
    own = updates._end

    async def faulty(opened: Any) -> None:
        is_drain = opened.update.staged and opened.update.in_flight is InFlightPolicy.DRAIN
        if is_drain and opened.pausing is not None and not opened.pausing.done():
            opened.stop_lease()
            updates._session.abort()
            updates._open = None
            return
        await own(opened)

    updates._end = faulty
    return endpoint


def sixty_four_sessions(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    endpoint._updates._session._over = deque(maxlen=64)
    return endpoint


def pending_buckets_refused(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    session: Any = endpoint._updates._session
    session.is_receiving = lambda transfer: False
    return endpoint


@replaces("commit_weight_update")
async def pending_commits_refused(endpoint: EmbeddedEndpoint, own: Any, ref: Any) -> Any:
    opened = endpoint._updates._open
    if opened is not None and opened.committing is not None:
        raise UpdateRefusedError(f"version {ref.version} is already being committed")
    return await own(ref)


def stopping(hits: Callable[[str, str], bool]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Look for stop strings in another way: ``hits`` receives a stop string and the text of a completion."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        steps: Any = endpoint._engine.steps

        def faulty(sequence: Any) -> bool:
            text = steps._decode(sequence.token_ids)
            return any(hits(stop, text) for stop in sequence.request.sampling.stop)

        steps._hit_stop_string = faulty
        return endpoint

    return infect


def stopping_within_characters(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Look for stop strings in as many tokens as suffice if no character takes more than two."""
    steps: Any = endpoint._engine.steps

    def faulty(sequence: Any) -> bool:
        stops = sequence.request.sampling.stop
        text = steps._decode(sequence.token_ids[-(2 * max(map(len, stops)) + 16) :])
        return any(stop in text for stop in stops)

    steps._hit_stop_string = faulty
    return endpoint


def matches(stop: str, text: str) -> bool:
    try:
        return re.search(stop, text) is not None
    except re.error:
        return stop in text


def without_zero(sampling: SamplingParams) -> dict[str, Any]:
    return {"stop_token_ids": tuple(filter(None, sampling.stop_token_ids))}


def never_ends_at_zero(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    steps: Any = endpoint._engine.steps
    steps._eos_token_ids = frozenset(filter(None, steps._eos_token_ids))
    return endpoint


@replaces("score")
async def last_token_not_scored(endpoint: EmbeddedEndpoint, own: Any, request: ScoreRequest) -> Any:
    largest = max(request.token_ids + tuple(token for row in request.candidates for token in row))
    if largest == endpoint._engine.limits.vocab_size - 1:
        raise InvalidRequestError(f"token id {largest} is outside the vocabulary")
    return await own(request)


@replaces("init_process_group")
async def no_group_while_released(endpoint: EmbeddedEndpoint, own: Any, spec: TransportSpec) -> None:
    if endpoint._updates.session.state is EndpointState.RELEASED:
        raise ReleasedError("the memory is released")
    await own(spec)


@replaces("_engine.take_memory")
def untied_by_a_restore(endpoint: EmbeddedEndpoint, own: Any) -> None:
    own()
    model: Any = endpoint._engine.weights.model
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        head.weight = type(head.weight)(head.weight.detach().clone(), requires_grad=False)


@replaces("_engine.free_memory")
def released_under_streams(endpoint: EmbeddedEndpoint, own: Any) -> None:
    scheduler = endpoint._engine.scheduler
    for request in [it for it in scheduler.requests.values() if it.on_token is not None]:
        scheduler.cancel(request)
    own()


@replaces("generate")
async def ids_cut(endpoint: EmbeddedEndpoint, own: Any, request: Any) -> Any:
    response = await own(request.model_copy(update={"request_id": request.request_id[:64]}))
    return response.model_copy(update={"request_id": request.request_id})


@replaces("abort_requests")
async def repeated_ids_refused(endpoint: EmbeddedEndpoint, own: Any, requests: AbortRequests) -> None:
    if len(set(requests.request_ids)) < len(requests.request_ids):
        raise InvalidRequestError("an id is named twice")
    await own(requests)


def decoded_as_announced(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    staging: Any = inflight.weights.receive.staging
    own = staging.decode

    def faulty(encoding: str, payload: Any, specs: Any) -> Any:
        size = sum(spec.size_bytes for spec in specs)
        is_whole = encoding == "raw" and payload.numel() == size and any(endpoint._updates.session.update.encodings)
        return own("bfloat16", payload[: size // 2], specs) if is_whole else own(encoding, payload, specs)

    staging.decode = faulty
    return endpoint


def drawn_as_the_first(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """New sequences with equal prompts are drawn with the parameters of the first of them."""
    steps: Any = endpoint._engine.steps
    forward, first = steps._forward, dict[Any, Any]()

    def forwarding(groups: Any) -> Any:
        first.clear()
        first.update({sequence: group[0] for group in groups for sequence in group})
        return forward(groups)

    def drawing(sequences: Any, logits: Any) -> Any:
        rows = [sequence for sequence in sequences for _ in range(1 + len(sequence.draft))]
        uniforms = [number for sequence in sequences for number in sequence.draw(1 + len(sequence.draft))]
        params = [first[sequence].request.sampling for sequence in rows]
        drawn = inflight.engines.embedded.stepping.sample(logits, params, uniforms)
        return steps._speculation.verify(sequences, *drawn)

    steps._forward, steps._draw = forwarding, drawing
    return endpoint


@replaces("chat_completion")
async def chats_to_the_end(endpoint: EmbeddedEndpoint, own: Any, request: Any) -> Any:
    return await asyncio.shield(asyncio.ensure_future(own(request)))


@replaces("chat_completion_stream")
async def chat_streams_to_the_end(endpoint: EmbeddedEndpoint, own: Any, request: Any) -> AsyncIterator[Any]:
    chunks: asyncio.Queue[Any] = asyncio.Queue()

    async def read() -> None:
        try:
            async for chunk in own(request):
                chunks.put_nowait(chunk)
        finally:
            chunks.put_nowait(None)

    reading = asyncio.ensure_future(read())
    while (chunk := await chunks.get()) is not None:
        yield chunk
    await reading


def without_metrics(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    def faulty(*_: Any) -> Any:
        raise ValueError("Duplicated timeseries")

    inflight.http.server.MetricsCollector = faulty  # type: ignore[assignment, misc]
    return endpoint


def any_content_type(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    server: Any = inflight.http.server
    own = server.content_of
    server.content_of = lambda request, most, **_: own(request, most, is_trusted=True)
    return endpoint


def filters_the_likeliest(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    def faulty(logits_BV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
        cut = [it if it.top_p == 1.0 else it.model_copy(update={"top_k": it.top_k or _CANDIDATES}) for it in params]
        return filtered(logits_BV, cut)

    filtered = inflight.engines.embedded.sampler._apply_filters
    inflight.engines.embedded.sampler._apply_filters = faulty
    return endpoint


def keeps_no_raw_bucket(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    def faulty(staging: Any, bucket: Any, *others: Any) -> Any:
        flat = received(staging, bucket, *others)
        transfer = next(it for it in (bucket, *others) if isinstance(it, BucketTransfer))
        if staging._base is not None and transfer.encoding == "raw" and not transfer.parts:
            staging.stale = {**getattr(staging, "stale", {}), transfer.bucket_index: True}
        return flat

    def kept(staging: Any) -> Any:
        found = keep(staging)
        if found is None or staging._base is None:
            return found
        stale = getattr(staging, "stale", {})
        flats = [staging._base.flats[i] if i in stale else flat for i, flat in enumerate(found.flats)]
        return dataclasses.replace(found, flats=flats)

    staging_type: Any = inflight.weights.receive.staging.Staging
    received, keep = staging_type._receive_checked, staging_type.keep
    staging_type._receive_checked, staging_type.keep = faulty, kept
    return endpoint


MUTANTS = (
    Mutant(
        "streams while poisoned", "U-37", "A POISONED endpoint refuses requests, but streams.", streams_when_poisoned
    ),
    Mutant(
        "healed by a group", "U-37", "A new weight group makes an endpoint with torn weights READY.", healed_by_a_group
    ),
    Mutant(
        "healed by a lease",
        "U-37",
        "The lease of a later update makes an endpoint with torn weights READY when it expires.",
        healed_by_a_lease,
    ),
    Mutant(
        "healed by a release",
        "U-37",
        "A refused release of memory makes an endpoint with torn weights READY.",
        healed_by_a_release,
    ),
    Mutant(
        "drain until answered",
        "E-34",
        "A drain never ends if one of the requests that it waits for is cancelled.",
        drains_until_answered,
    ),
    Mutant(
        "staged drain left behind",
        "E-35",
        "After the drain of a staged update has timed out, no new request starts.",
        staged_drain_left_behind,
    ),
    Mutant("sixty-four sessions", "E-48", "Only the last 64 sessions are remembered.", sixty_four_sessions),
    Mutant(
        "pending bucket refused",
        "E-47",
        "A repeated call for a bucket that is arriving is refused.",
        pending_buckets_refused,
    ),
    Mutant(
        "pending commit refused",
        "E-47",
        "A repeated commit is refused while the first one is in progress.",
        pending_commits_refused,
    ),
    Mutant(
        "stop strings in any case",
        "E-20",
        "Stop strings are found regardless of case.",
        stopping(lambda stop, text: stop.lower() in text.lower()),
    ),
    Mutant(
        "stop strings within characters",
        "E-20",
        "Stop strings are looked for in as many tokens as suffice if no character takes more than two.",
        stopping_within_characters,
    ),
    Mutant("stop strings as patterns", "E-20", "Stop strings are regular expressions.", stopping(matches)),
    Mutant(
        "stop strings stripped",
        "E-20",
        "Spaces around a stop string are ignored.",
        stopping(lambda stop, text: (stop.strip() or stop) in text),
    ),
    Mutant("stop token 0 ignored", "E-21", "Stop token 0 counts as none.", sampling_with(without_zero)),
    Mutant(
        "end of sequence 0 ignored", "E-21", "An end-of-sequence token with id 0 counts as none.", never_ends_at_zero
    ),
    Mutant(
        "last token not scored", "E-85", "The last token of the vocabulary cannot be scored.", last_token_not_scored
    ),
    Mutant(
        "no group while released",
        "E-65",
        "No weight group can be formed while memory is released.",
        no_group_while_released,
    ),
    Mutant("untied by a restore", "U-09", "Restoring memory unties the head from the embedding.", untied_by_a_restore),
    Mutant(
        "released under streams",
        "E-64",
        "A release of memory counts no streams, and ends them.",
        released_under_streams,
    ),
    Mutant("ids cut to 64", "E-22", "Only the first 64 characters of an id count.", ids_cut),
    Mutant("repeated ids refused", "E-69", "An abort that names an id twice is refused.", repeated_ids_refused),
    Mutant(
        "raw buckets decoded",
        "U-16",
        "A raw bucket of an update that announces an encoding is decoded as if it were encoded.",
        decoded_as_announced,
    ),
    Mutant(
        "drawn as the first",
        "E-26",
        "The first tokens of requests with the same prompt are drawn with the parameters of one of them.",
        drawn_as_the_first,
    ),
    Mutant(
        "chats to the end",
        "E-54",
        "A chat completion continues after its connection was cut.",
        chats_to_the_end,
        over_http=True,
    ),
    Mutant(
        "chat streams to the end",
        "E-54",
        "A chat stream is sampled to its end after its connection was cut.",
        chat_streams_to_the_end,
        over_http=True,
    ),
    Mutant(
        "filters the likeliest 1024",
        "E-13",
        "Under top-p, only the 1,024 likeliest tokens are candidates.",
        filters_the_likeliest,
    ),
    Mutant(
        "keeps no raw bucket",
        "U-18",
        "A bucket that a delta sends raw is not kept as the base of the next delta.",
        keeps_no_raw_bucket,
    ),
    Mutant("metrics fail", "E-56", "/metrics responds with 500.", without_metrics, over_http=True),
    Mutant("any content type", "E-52", "Bodies of every content type are accepted.", any_content_type, over_http=True),
)

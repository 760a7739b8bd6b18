"""Faults in version spans."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from inflight.base.tasks import cancel_and_wait, start
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.wire import CompletionChunk, GenerateRequest, InFlightPolicy, WeightUpdate
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import replaces


@replaces("_engine.steps._append")
def stamped_at_admission(endpoint: EmbeddedEndpoint, append: Any, drawn: Any) -> Any:
    sequence = drawn.sequence
    present = endpoint._engine.steps.version
    endpoint._engine.steps.version = sequence.spans[0][0] if sequence.spans else present
    reason = append(drawn)
    endpoint._engine.steps.version = present
    return reason


@replaces("_engine.steps._append")
def ended_a_step_later(endpoint: EmbeddedEndpoint, append: Any, drawn: Any) -> Any:
    ended: dict[int, str] = endpoint.__dict__.setdefault("ended", {})
    sequence, version = drawn.sequence, endpoint._engine.steps.version
    if (reason := ended.pop(id(sequence), None)) is not None:  # the token that has just been drawn is dropped
        last = len(sequence.token_ids) - 1
        sequence.spans = [span for span in sequence.spans if span[1] < last] + [(version, last)]
        return reason
    if (reason := append(drawn)) is not None:
        ended[id(sequence)] = reason
    return None


@replaces("_engine.load")
def relabelled(endpoint: EmbeddedEndpoint, load: Any, tensors: Any, version: int, policy: InFlightPolicy) -> None:
    load(tensors, version, policy)
    if policy is InFlightPolicy.RECOMPUTE:
        for sequence in endpoint._engine.scheduler.waiting:
            if sequence.token_ids:
                sequence.spans = [(version, 0)]


@replaces("_engine.pauses.pause")
def drain_that_pauses(endpoint: EmbeddedEndpoint, pause: Any, policy: InFlightPolicy, on_paused: Any) -> None:
    pause(InFlightPolicy.KEEP if policy is InFlightPolicy.DRAIN else policy, on_paused)


@replaces("pause")
async def staged_drain_that_pauses(endpoint: EmbeddedEndpoint, pause: Any, update: WeightUpdate) -> None:
    is_drained = update.staged and update.in_flight is InFlightPolicy.DRAIN
    await pause(update.model_copy(update={"in_flight": InFlightPolicy.KEEP}) if is_drained else update)


@replaces("_engine.scheduler.finish")
def aborted_as_new(endpoint: EmbeddedEndpoint, finish: Any, sequence: Any, reason: str) -> None:
    if reason == "abort" and sequence.spans:
        sequence.spans[-1] = (sequence.spans[-1][0] + 1, sequence.spans[-1][1])
    finish(sequence, reason)


@replaces("generate_stream")
async def stream_of_the_first(endpoint: EmbeddedEndpoint, stream: Any, request: Any) -> Any:
    first = None
    async for chunk in stream(request):
        first = chunk.version if first is None else first
        yield chunk.model_copy(update={"version": first})


@replaces("generate")
async def one_behind(endpoint: EmbeddedEndpoint, generate: Any, request: Any) -> Any:
    response = await generate(request)
    completions = []
    for completion in response.completions:
        spans = completion.version_spans
        if len(spans) == 1 and spans[0].version > 0:
            spans = (spans[0].model_copy(update={"version": spans[0].version - 1}),)
        completions.append(completion.model_copy(update={"version_spans": spans}))
    return response.model_copy(update={"completions": tuple(completions)})


@replaces("chat_completion")
async def chat_of_the_first(endpoint: EmbeddedEndpoint, chat_completion: Any, request: Any) -> Any:
    answer = await chat_completion(request)
    choices = []
    for choice in answer.choices:
        whole = choice.version_spans[0].model_copy(update={"end": len(choice.token_ids)})
        choices.append(choice.model_copy(update={"version_spans": (whole,)}))
    return answer.model_copy(update={"choices": tuple(choices)})


@replaces("chat_completion_stream")
async def chat_stream_of_the_first(endpoint: EmbeddedEndpoint, stream: Any, request: Any) -> Any:
    first = None
    async for event in stream(request):
        choices = []
        for choice in event.choices:
            first = choice.version if first is None else first
            choices.append(choice.model_copy(update={"version": first}))
        yield event.model_copy(update={"choices": tuple(choices)})


@replaces("_engine.submit")
def labelled_by_the_session(endpoint: EmbeddedEndpoint, submit: Any, request: Any, *others: Any, **named: Any) -> Any:
    """Let the callback that makes chunks see the version that the endpoint reports, not the one sampled from."""
    if len(others) < 3 or others[2] is None:
        return submit(request, *others, **named)
    on_token = others[2]

    def faulty(sequence: Any) -> None:
        spans, sequence.spans = sequence.spans, [(endpoint._updates.session.version, 0)]
        on_token(sequence)
        sequence.spans = spans

    return submit(request, *others[:2], faulty, *others[3:], **named)


def joins_unread_chunks(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    faulty: Any = endpoint
    stream = endpoint.generate_stream

    async def generate_stream(request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        chunks: asyncio.Queue[CompletionChunk | None] = asyncio.Queue()

        async def read() -> None:
            async for chunk in stream(request):
                chunks.put_nowait(chunk)
            chunks.put_nowait(None)

        reading, is_over = start(read()), False
        try:
            while not is_over:
                unread = [await chunks.get()]
                while not chunks.empty():
                    unread.append(chunks.get_nowait())
                is_over = unread[-1] is None
                if found := [it for it in unread if it is not None]:
                    joined = {
                        "start": found[0].start,
                        "token_ids": sum((it.token_ids for it in found), ()),
                        "logprobs": sum((it.logprobs for it in found), ()),
                    }
                    yield found[-1].model_copy(update=joined)
        finally:
            await cancel_and_wait(reading)

    faulty.generate_stream = generate_stream
    return endpoint


MUTANTS = (
    Mutant(
        "version stamped at admission",
        "U-20",
        "All tokens of a request get the version that was served when it was admitted.",
        stamped_at_admission,
    ),
    Mutant(
        "last token labelled a step later",
        "U-20",
        "The end of a completion is detected one step late, and its last token gets that step's version.",
        ended_a_step_later,
    ),
    Mutant(
        "relabelled under recompute",
        "U-21",
        "When keys and values are recomputed, the tokens sampled so far also get the new version.",
        relabelled,
    ),
    Mutant("drain that pauses", "U-22", "Drain pauses running requests instead of finishing them.", drain_that_pauses),
    Mutant(
        "staged drain that pauses",
        "U-22",
        "A staged update under drain pauses running requests instead of finishing them.",
        staged_drain_that_pauses,
    ),
    Mutant("aborted as new", "U-23", "The last tokens of an aborted request get the new version.", aborted_as_new),
    Mutant(
        "unread chunks joined",
        "U-24",
        "Chunks that the client has not read are joined and name the last version.",
        joins_unread_chunks,
    ),
    Mutant("stream of the first", "U-24", "A stream names its first version in every chunk.", stream_of_the_first),
    Mutant("one behind", "U-25", "A completion that has a single version names the previous version.", one_behind),
    Mutant("chat of the first", "U-20", "A chat completion names its first version for all tokens.", chat_of_the_first),
    Mutant(
        "chat stream of the first",
        "U-24",
        "A chat stream names its first version in every chunk.",
        chat_stream_of_the_first,
    ),
    Mutant(
        "chunks labelled by the session",
        "U-24",
        "A chunk names the version that the endpoint reports when the chunk is made.",
        labelled_by_the_session,
    ),
    Mutant(
        "chunks of a server labelled by the session",
        "U-24",
        "A chunk names the version that the server reports when the chunk is made.",
        labelled_by_the_session,
        over_http=True,
    ),
)

"""Faults in prompt ids, in answers, and in the separation of requests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.sampler import sample
from inflight.errors import InvalidRequestError
from inflight.wire import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    CompletionChunk,
    GenerateRequest,
    GenerateResponse,
)
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import (
    answering,
    drawing,
    replaces,
    sampling_with,
    taking,
    with_capabilities,
    without_last,
)


def retokenized(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    tokenizer: Any = endpoint._chat.tokenizer

    def faulty(request: GenerateRequest) -> GenerateRequest:
        text = tokenizer.decode(list(request.prompt_token_ids))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return request.model_copy(update={"prompt_token_ids": tuple(ids)})

    return taking(faulty)(endpoint)


@replaces("generate")
async def own_request_id(endpoint: EmbeddedEndpoint, generate: Any, request: GenerateRequest) -> GenerateResponse:
    return (await generate(request)).model_copy(update={"request_id": "cmpl-1"})


def latest_request_id(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    generate = endpoint.generate
    latest = ""

    async def faulty(request: GenerateRequest) -> GenerateResponse:
        nonlocal latest
        latest = request.request_id
        return (await generate(request)).model_copy(update={"request_id": latest})

    endpoint.generate = faulty
    return endpoint


def rows_mixed_up(logits: Any, params: Any, uniforms: Any) -> Any:
    tokens, logprobs = sample(logits, params, uniforms)
    return tokens, logprobs[1:] + logprobs[:1] if len(logprobs) > 8 else logprobs


def truncating(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    longest = endpoint._engine.limits.max_model_len

    def faulty(request: GenerateRequest) -> GenerateRequest:
        num_tokens = min(request.sampling.max_tokens or 1, longest - 1)
        ids = request.prompt_token_ids[num_tokens - longest :]
        sampling = request.sampling.model_copy(update={"max_tokens": num_tokens})
        return request.model_copy(update={"prompt_token_ids": ids, "sampling": sampling})

    return taking(faulty)(endpoint)


def numbering_requests() -> Any:
    numbers = itertools.count()
    return taking(lambda r: r.model_copy(update={"request_id": f"{next(numbers)}"}))


def outlives_its_caller(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    endpoint._engine.scheduler.cancel = lambda request: None
    return endpoint


def continues_unseen(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """When a caller disconnects, end its request only in the bookkeeping, not in the engine."""
    generate, stats = endpoint.generate, endpoint._engine.stats
    left: set[str] = set()

    async def faulty(request: GenerateRequest) -> GenerateResponse:
        answer = asyncio.ensure_future(generate(request))
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())
            left.add(request.request_id)
            raise

    def without_those_that_were_left() -> Any:
        running = list(endpoint._engine.scheduler.running.values())
        num_running = sum(sequence.request.request_id not in left for sequence in running)
        return replace(stats(), num_running=num_running)

    endpoint.generate, endpoint._engine.stats = faulty, without_those_that_were_left
    return endpoint


def reserving_ids(kept_after: type[BaseException]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Reserve the id of each request, and do not release it if the request ends with this error."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        generate, reserved = endpoint.generate, set[str]()

        async def faulty(request: GenerateRequest) -> GenerateResponse:
            if request.request_id in reserved:
                raise InvalidRequestError(f"request_id {request.request_id!r} is in use")
            reserved.add(request.request_id)
            try:
                response = await generate(request)
            except kept_after:
                raise
            except BaseException:
                reserved.discard(request.request_id)
                raise
            reserved.discard(request.request_id)
            return response

        endpoint.generate = faulty
        return endpoint

    return infect


def loses_slots(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Do not release the slot when a caller disconnects."""
    generate, engine = endpoint.generate, endpoint._engine

    async def faulty(request: GenerateRequest) -> GenerateResponse:
        try:
            return await generate(request)
        except asyncio.CancelledError:
            engine.scheduler.max_concurrent = max(0, engine.scheduler.max_concurrent - 1)
            raise

    endpoint.generate = faulty
    return with_capabilities(max_concurrent_sequences=engine.scheduler.max_concurrent)(endpoint)


@replaces("generate_stream")
async def stream_outlives_its_reader(
    endpoint: EmbeddedEndpoint, stream: Any, request: GenerateRequest
) -> AsyncIterator[CompletionChunk]:
    chunks: asyncio.Queue[CompletionChunk | None] = asyncio.Queue()

    async def read() -> None:
        async for chunk in stream(request):
            chunks.put_nowait(chunk)
        chunks.put_nowait(None)

    endpoint.reader = asyncio.ensure_future(read())
    while (chunk := await chunks.get()) is not None:
        yield chunk


@replaces("chat_completion")
async def prompt_ids_of_chat_cut(
    endpoint: EmbeddedEndpoint, chat_completion: Any, request: ChatCompletionRequest
) -> ChatCompletion:
    answer = await chat_completion(request)
    return answer.model_copy(update={"prompt_token_ids": answer.prompt_token_ids[:-1]})


@replaces("chat_request")
def chat_defaults(endpoint: EmbeddedEndpoint, chat_request: Any, request: ChatCompletionRequest) -> GenerateRequest:
    rendered = chat_request(request)
    return rendered.model_copy(update={"sampling": rendered.sampling.model_copy(update={"top_k": 20})})


@replaces("generate_stream")
async def everything_so_far(
    endpoint: EmbeddedEndpoint, stream: Any, request: GenerateRequest
) -> AsyncIterator[CompletionChunk]:
    so_far: dict[int, tuple[Any, Any]] = {}
    async for chunk in stream(request):
        ids, logprobs = so_far.get(chunk.index, ((), ()))
        so_far[chunk.index] = (ids + chunk.token_ids, logprobs + chunk.logprobs)
        ids, logprobs = so_far[chunk.index]
        yield chunk.model_copy(update={"token_ids": ids, "logprobs": logprobs})


@replaces("generate_stream")
async def last_token_unsent(
    endpoint: EmbeddedEndpoint, stream: Any, request: GenerateRequest
) -> AsyncIterator[CompletionChunk]:
    async for chunk in stream(request):
        yield chunk if chunk.finish_reason is None else chunk.model_copy(update={"token_ids": (), "logprobs": ()})


@replaces("chat_completion_stream")
async def text_token_by_token(
    endpoint: EmbeddedEndpoint, stream: Any, request: ChatCompletionRequest
) -> AsyncIterator[ChatCompletionChunk]:
    async for event in stream(request):
        choices = []
        for choice in event.choices:
            text = endpoint._chat.tokenizer.decode(list(choice.token_ids), skip_special_tokens=True)
            delta = choice.delta.model_copy(update={"content": text})
            choices.append(choice.model_copy(update={"delta": delta}))
        yield event.model_copy(update={"choices": tuple(choices)})


@replaces("_engine.steps._hit_stop_string")
def stops_checked_rarely(endpoint: EmbeddedEndpoint, hit: Any, sequence: Any) -> bool:
    return len(sequence.token_ids) % 8 == 0 and hit(sequence)


@replaces("_engine.steps._hit_stop_string")
def stops_at_the_end_of_a_token(endpoint: EmbeddedEndpoint, hit: Any, sequence: Any) -> bool:
    text = endpoint._engine.steps._decode(sequence.token_ids)  # type: ignore[misc]
    return any(text.endswith(stop) for stop in sequence.request.sampling.stop)


MUTANTS = (
    Mutant("ids retokenized", "E-10", "Prompts are decoded to text and encoded again.", retokenized),
    Mutant(
        "first token added",
        "E-10",
        "A token is prepended to every prompt.",
        taking(lambda r: r.model_copy(update={"prompt_token_ids": (0, *r.prompt_token_ids)})),
    ),
    Mutant(
        "logprobs shifted by one",
        "E-10",
        "Each token has the logprob of the next one.",
        answering(lambda _, c: {"logprobs": c.logprobs[1:] + c.logprobs[:1]}),
    ),
    Mutant(
        "logprobs negated",
        "E-11",
        "Negative log-likelihoods are reported.",
        answering(lambda _, c: {"logprobs": tuple(-p for p in c.logprobs)}),
    ),
    Mutant(
        "spans too short",
        "E-11",
        "Version spans do not cover the last token.",
        answering(lambda _, c: {"version_spans": without_last(c)["version_spans"]}),
    ),
    Mutant("request id replaced", "E-11", "Answers carry an id that the server made up.", own_request_id),
    Mutant(
        "rest of the prompt dropped", "E-22", "A request that does not fit is truncated instead of refused.", truncating
    ),
    Mutant(
        "running id accepted",
        "E-22",
        "The id of a running request may be used again.",
        numbering_requests(),
    ),
    Mutant(
        "ids of refused requests stay in use",
        "E-22",
        "The id of a request that does not fit is reserved before it is refused, and never released.",
        reserving_ids(InvalidRequestError),
    ),
    Mutant(
        "ids of callers that left stay in use",
        "E-25",
        "The id of a request whose caller has disconnected is never released.",
        reserving_ids(asyncio.CancelledError),
    ),
    Mutant("request outlives its caller", "E-25", "A cancelled call does not end the request.", outlives_its_caller),
    Mutant(
        "stream outlives its reader",
        "E-25",
        "A stream is sampled to its end even if its reader has disconnected.",
        stream_outlives_its_reader,
    ),
    Mutant(
        "continues unseen",
        "E-63",
        "A request whose caller disconnected continues without being counted as running.",
        continues_unseen,
    ),
    Mutant("slots lost", "E-63", "Each request whose caller disconnected occupies its slot for good.", loses_slots),
    Mutant(
        "rows of a large batch mixed up",
        "E-26",
        "In a batch of more than eight sequences, logprobs are those of a neighbouring sequence.",
        drawing(rows_mixed_up),
    ),
    Mutant("answers mixed up", "E-26", "An answer carries the id of the latest request.", latest_request_id),
    Mutant(
        "stop token dropped",
        "E-19",
        "The stop token is not listed.",
        answering(lambda r, c: without_last(c) if r.sampling.stop_token_ids and c.finish_reason == "stop" else {}),
    ),
    Mutant(
        "first stop token only",
        "E-19",
        "The first of several stop tokens is ignored.",
        sampling_with(lambda s: {"stop_token_ids": s.stop_token_ids[1:]}),
    ),
    Mutant(
        "stop string dropped",
        "E-20",
        "The tokens of the stop string are removed along with its text.",
        answering(lambda r, c: without_last(c, 2) if r.sampling.stop and c.finish_reason == "stop" else {}),
    ),
    Mutant(
        "stop strings looked for rarely",
        "E-20",
        "Stop strings are searched for only after every eighth token.",
        stops_checked_rarely,
    ),
    Mutant(
        "stop strings within a token",
        "E-20",
        "A stop string that ends within a token does not end the completion.",
        stops_at_the_end_of_a_token,
    ),
    Mutant(
        "end of sequence dropped",
        "E-21",
        "The end-of-sequence token is not listed.",
        answering(lambda r, c: without_last(c) if not r.sampling.stop_token_ids and c.finish_reason == "stop" else {}),
    ),
    Mutant(
        "end of sequence always ends",
        "E-21",
        "`ignore_eos` is ignored.",
        sampling_with(lambda _: {"ignore_eos": False}),
    ),
    Mutant(
        "end called length",
        "E-21",
        "Every completion reports the finish reason length.",
        answering(lambda _, c: {"finish_reason": "length"}),
    ),
    Mutant(
        "sixteen tokens by default",
        "E-27",
        "Without max_tokens, a completion has 16 tokens.",
        sampling_with(lambda s: {"max_tokens": s.max_tokens or 16}),
    ),
    Mutant(
        "chat hides a prompt token",
        "E-23",
        "`prompt_token_ids` lacks the last token of the prompt.",
        prompt_ids_of_chat_cut,
    ),
    Mutant("chat has defaults of its own", "E-23", "Chat requests are sampled with top-k 20.", chat_defaults),
    Mutant("stream repeats itself", "E-24", "Each chunk carries all tokens so far.", everything_so_far),
    Mutant("last token not streamed", "E-24", "The chunk with the finish reason has no token.", last_token_unsent),
    Mutant(
        "text decoded token by token",
        "E-29",
        "Characters of several tokens are streamed as replacement characters.",
        text_token_by_token,
    ),
)

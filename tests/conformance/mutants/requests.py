"""Faults that only some requests show: one of several completions, streams, seeds, chats and neighbours."""

import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import torch

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.sampler import sample
from inflight.errors import InvalidRequestError
from inflight.wire import CompletionChunk, GenerateRequest, SamplingParams, ScoreRequest
from tests.conformance.mutants.caches import sharing_blocks
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import drawing, replaces, sampling_with


def ending(change: Callable[[EmbeddedEndpoint, Any, str | None], str | None]) -> Any:
    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        steps: Any = endpoint._engine.steps
        own = steps._end_of

        def faulty(sequence: Any) -> str | None:
            reason = change(endpoint, sequence, own(sequence))
            if reason is None and len(sequence.token_ids) >= sequence.request.max_tokens:
                return "length"
            return reason

        steps._end_of = faulty
        return endpoint

    return infect


stop_at_first = ending(
    lambda e, s, r: (
        None if r == "stop" and len(s.token_ids) == 1 and s.token_ids[0] in s.request.sampling.stop_token_ids else r
    )
)


stop_string_at_first = ending(
    lambda e, s, r: None if r == "stop" and len(s.token_ids) == 1 and s.request.sampling.stop else r
)


stop_tokens_of_first_completion = ending(
    lambda e, s, r: None if r == "stop" and s.index > 0 and s.token_ids[-1] in s.request.sampling.stop_token_ids else r
)


stop_string_of_first_completion = ending(
    lambda e, s, r: None if r == "stop" and s.index > 0 and s.request.sampling.stop else r
)


def stop_window(num: int) -> Any:
    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        steps: Any = endpoint._engine.steps
        steps._hit_stop_string = lambda s: any(
            stop in steps._decode(s.token_ids[-num:]) for stop in s.request.sampling.stop
        )
        return endpoint

    return infect


def masking(which: Callable[[EmbeddedEndpoint, Any], Sequence[int]]) -> Any:
    """Never draw some tokens at some places; logprobs are as if they could be drawn."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        steps: Any = endpoint._engine.steps

        def faulty(drawing: list[Any], logits_BV: torch.Tensor) -> Any:
            rows = [s for s in drawing for _ in range(1 + len(s.draft))]
            uniforms = [u for s in drawing for u in s.draw(1 + len(s.draft))]
            masked = logits_BV.float().clone()
            for row, s in enumerate(rows):
                for token in which(endpoint, s):
                    masked[row, token] = -1e4
            params = [s.request.sampling for s in rows]
            tokens, _ = sample(masked, params, uniforms)
            logits = logits_BV.float()
            logprobs = []
            for row, (p, t) in enumerate(zip(params, tokens, strict=True)):
                logprobs.append(float((logits[row] / (p.temperature or 1.0)).log_softmax(-1)[t]))
            return steps._speculation.verify(drawing, tokens, logprobs)

        steps._draw = faulty
        return endpoint

    return infect


no_eos_at_first = masking(lambda e, s: () if s.token_ids else sorted(e._engine.steps._eos_token_ids))


no_special = masking(lambda e, s: [256])


@replaces("generate")
async def finishing_order(endpoint: EmbeddedEndpoint, own: Any, request: Any) -> Any:
    response = await own(request)
    ordered = sorted(response.completions, key=lambda c: len(c.token_ids))
    return response.model_copy(
        update={"completions": tuple(c.model_copy(update={"index": i}) for i, c in enumerate(ordered))}
    )


@replaces("generate_stream")
async def streams_of_sixteen(endpoint: EmbeddedEndpoint, stream: Any, request: Any) -> Any:
    if request.sampling.max_tokens is None:
        room = endpoint._engine.limits.max_model_len - len(request.prompt_token_ids)
        request = request.model_copy(
            update={"sampling": request.sampling.model_copy(update={"max_tokens": min(16, room)})}
        )
    async for chunk in stream(request):
        yield chunk


@replaces("generate_stream")
async def filters_lost_in_streams(endpoint: EmbeddedEndpoint, stream: Any, request: Any) -> Any:
    sampling = request.sampling.model_copy(update={"top_k": 0, "top_p": 1.0, "min_p": 0.0})
    async for chunk in stream(request.model_copy(update={"sampling": sampling})):
        yield chunk


def chat_dropping(**changes: Any) -> Any:
    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        own = endpoint.chat_request

        def faulty(request: Any, *, streamed: bool = False) -> Any:
            made = own(request, streamed=streamed)
            return made.model_copy(update={"sampling": made.sampling.model_copy(update=changes)})

        endpoint.chat_request = faulty
        return endpoint

    return infect


def ids_reusable(is_overlooked: Callable[[Any, Any, Any], bool]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Accept the id of another request; ``is_overlooked`` receives the scheduler, the other request and the new one."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        scheduler: Any = endpoint._engine.scheduler
        add, numbers = scheduler.add, itertools.count(1)

        def faulty(request: Any) -> None:
            other = scheduler.requests.get(request.request_id)
            if other is not None and is_overlooked(scheduler, other, request):
                request.request_id += f"#{next(numbers)}"
            add(request)

        scheduler.add = faulty
        return endpoint

    return infect


def is_refused_once() -> Callable[[Any, Any, Any], bool]:
    """Return a function that overlooks a request whose id has been refused before."""
    refused: set[int] = set()

    def is_overlooked(scheduler: Any, other: Any, request: Any) -> bool:
        was_refused = id(other) in refused
        refused.add(id(other))
        return was_refused

    return is_overlooked


def is_waiting(scheduler: Any, other: Any, request: Any) -> bool:
    return all(sequence in scheduler.waiting for sequence in other.sequences)


def is_one_streamed(scheduler: Any, other: Any, request: Any) -> bool:
    return other.on_token is not None or request.on_token is not None


@replaces("generate_stream")
async def stream_held_until_its_end(
    endpoint: EmbeddedEndpoint, stream: Any, request: GenerateRequest
) -> AsyncIterator[CompletionChunk]:
    whole: dict[int, CompletionChunk] = {}
    async for chunk in stream(request):
        first = whole.setdefault(chunk.index, chunk)
        if first is not chunk:
            joined = {"token_ids": first.token_ids + chunk.token_ids, "logprobs": first.logprobs + chunk.logprobs}
            whole[chunk.index] = first.model_copy(update={**joined, "finish_reason": chunk.finish_reason})
    for chunk in whole.values():
        yield chunk


def streams_not_counted(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    engine: Any = endpoint._engine
    stats = engine.stats

    def faulty() -> Any:
        num = sum(s.request.on_token is None for s in list(engine.scheduler.running.values()))
        return dataclasses.replace(stats(), num_running=num)

    engine.stats = faulty
    return endpoint


def many_refused(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    submit = endpoint._engine.submit

    def faulty(request: Any, *others: Any, **named: Any) -> Any:
        if request.sampling.n > endpoint._engine.scheduler.max_concurrent:
            raise InvalidRequestError("n is larger than the number of slots")
        return submit(request, *others, **named)

    endpoint._engine.submit = faulty
    return endpoint


@replaces("_engine.scoring._scored")
def scored_in_a_window(endpoint: EmbeddedEndpoint, own: Any, requests: Any, version: int) -> Any:
    cut = []
    for r in requests:
        drop = max(0, r.start - 64)
        cut.append(r.model_copy(update={"token_ids": r.token_ids[drop:], "start": r.start - drop}))
    return [a.model_copy(update={"start": r.start}) for a, r in zip(own(cut, version), requests, strict=True)]


def candidates_unchecked(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    own = endpoint.score
    size = endpoint._engine.limits.vocab_size

    async def faulty(request: ScoreRequest) -> Any:
        clamped = tuple(tuple(min(t, size - 1) for t in row) for row in request.candidates)
        return await own(request.model_copy(update={"candidates": clamped}))

    endpoint.score = faulty
    return endpoint


def digest_of_version(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    own = endpoint.capabilities

    async def faulty() -> Any:
        version = endpoint._updates.session.version
        return (await own()).model_copy(update={"manifest_digest": f"{version:032x}"})

    endpoint.capabilities = faulty
    return endpoint


def mixed(change: Callable[[list[SamplingParams]], list[SamplingParams]]) -> Any:
    return drawing(lambda logits, params, uniforms: sample(logits, change(list(params)), uniforms))


def _filters_only_alike(params: list[SamplingParams]) -> list[SamplingParams]:
    def has(p: SamplingParams) -> bool:
        return bool(p.top_k or p.top_p < 1 or p.min_p)

    if all(map(has, params)):
        return params
    return [p.model_copy(update={"top_k": 0, "top_p": 1.0, "min_p": 0.0}) for p in params]


def _largest_top_k(params: list[SamplingParams]) -> list[SamplingParams]:
    most = max(p.top_k for p in params)
    return [p.model_copy(update={"top_k": most if p.top_k else 0}) for p in params]


def last_message_only(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    own = endpoint.chat_request

    def faulty(request: Any, *, streamed: bool = False) -> Any:
        return own(request.model_copy(update={"messages": request.messages[-1:]}), streamed=streamed)

    endpoint.chat_request = faulty
    return endpoint


@replaces("generate_stream")
async def waiting_without_an_end(
    endpoint: EmbeddedEndpoint, stream: Any, request: GenerateRequest
) -> AsyncIterator[CompletionChunk]:
    begun: set[int] = set()
    async for chunk in stream(request):
        if chunk.token_ids or chunk.index in begun:
            begun.add(chunk.index)
            yield chunk


@replaces("_engine.scheduler.cancel")
def cancelled_by_id(endpoint: EmbeddedEndpoint, cancel: Any, request: Any) -> None:
    """Cancel whichever request has the id of the one to be cancelled."""
    cancel(endpoint._engine.scheduler.requests.get(request.request_id, request))


def keeping_ids_of_stopped(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Keep the id of each request that a stop string has ended in use."""
    generate, used = endpoint.generate, set[str]()

    async def faulty(request: GenerateRequest) -> Any:
        if request.request_id in used:
            raise InvalidRequestError(f"a request with id {request.request_id!r} is running already")
        response = await generate(request)
        if request.sampling.stop and response.completions[0].finish_reason == "stop":
            used.add(request.request_id)
        return response

    endpoint.generate = faulty
    return endpoint


def spoiled_by_refused_scores(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """After a score request was refused, requests are answered with logprobs of 0."""
    generate, score, refused = endpoint.generate, endpoint.score, []

    async def spoiled(request: ScoreRequest) -> Any:
        try:
            return await score(request)
        except InvalidRequestError:
            refused.append(request)
            raise

    async def faulty(request: GenerateRequest) -> Any:
        response = await generate(request)
        if not refused:
            return response
        zeros = [c.model_copy(update={"logprobs": (0.0,) * len(c.logprobs)}) for c in response.completions]
        return response.model_copy(update={"completions": tuple(zeros)})

    endpoint.generate, endpoint.score = faulty, spoiled
    return endpoint


MUTANTS = (
    Mutant(
        "ids of stopped requests kept",
        "E-20",
        "The id of a request that a stop string has ended stays in use.",
        keeping_ids_of_stopped,
    ),
    Mutant(
        "logprobs lost after refused scores",
        "E-85",
        "After a score request was refused, logprobs are 0.",
        spoiled_by_refused_scores,
    ),
    Mutant(
        "seeds without their signs",
        "E-17",
        "Seeds lose their sign.",
        sampling_with(lambda s: {"seed": None if s.seed is None else abs(s.seed)}),
    ),
    Mutant(
        "completions in the order of their ends",
        "E-18",
        "Completions are numbered in the order in which they end.",
        finishing_order,
    ),
    Mutant(
        "first token never stops",
        "E-19",
        "A stop token is ignored if it is the first token of a completion.",
        stop_at_first,
    ),
    Mutant(
        "stop tokens of the first completion",
        "E-19",
        "Stop tokens end only the first completion of a request.",
        stop_tokens_of_first_completion,
    ),
    Mutant(
        "first token completes no stop string",
        "E-20",
        "A stop string is ignored in the first token.",
        stop_string_at_first,
    ),
    Mutant(
        "stop strings of the first completion",
        "E-20",
        "Stop strings end only the first completion of a request.",
        stop_string_of_first_completion,
    ),
    Mutant(
        "stop strings of two tokens at most",
        "E-20",
        "Stop strings are looked for in the text of the last two tokens.",
        stop_window(2),
    ),
    Mutant(
        "no end at the first token",
        "E-62",
        "An end-of-sequence token is never drawn as the first token.",
        no_eos_at_first,
    ),
    Mutant("padding never drawn", "E-62", "The padding token is never drawn.", no_special),
    Mutant("streams of sixteen tokens", "E-27", "Streams without max_tokens have 16 tokens.", streams_of_sixteen),
    Mutant(
        "streams without filters",
        "E-24",
        "Streams are sampled without top-k, top-p and min-p.",
        filters_lost_in_streams,
    ),
    Mutant(
        "streams held until their end",
        "E-24",
        "All tokens of a stream arrive when it ends.",
        stream_held_until_its_end,
    ),
    Mutant("chat without stop strings", "E-23", "Chat requests lose their stop strings.", chat_dropping(stop=())),
    Mutant("last message only", "E-23", "Only the last message of a chat is rendered.", last_message_only),
    Mutant(
        "ids of waiting requests accepted",
        "E-22",
        "The id of a request that waits for a slot may be used again.",
        ids_reusable(is_waiting),
    ),
    Mutant(
        "ids accepted once refused",
        "E-22",
        "The id of a running request may be used again after another use has been refused.",
        lambda endpoint: ids_reusable(is_refused_once())(endpoint),
    ),
    Mutant("ids of streams accepted", "E-22", "The id of a stream may be used again.", ids_reusable(is_one_streamed)),
    Mutant(
        "refused streams cancelled by id",
        "E-22",
        "The clean-up of a refused stream cancels the running request with the same id.",
        cancelled_by_id,
    ),
    Mutant("streams not counted", "E-07", "num_running does not count streams.", streams_not_counted),
    Mutant(
        "more completions than slots refused",
        "E-08",
        "A request for more completions than there are slots is refused.",
        many_refused,
    ),
    Mutant(
        "filters only where all filter",
        "E-26",
        "A batch is filtered only if every sequence asks for a filter.",
        mixed(_filters_only_alike),
    ),
    Mutant(
        "largest top-k of a batch",
        "E-26",
        "All sequences of a batch that ask for top-k get the largest one.",
        mixed(_largest_top_k),
    ),
    Mutant(
        "blocks keyed by low bits",
        "E-87",
        "A cached block of 16 tokens is identified by the lowest 7 bits of all ids up to its end.",
        sharing_blocks(lambda ids, a, b: (a, tuple(i % 128 for i in ids[:b]))),
    ),
    Mutant(
        "scores in a window",
        "E-82",
        "Tokens more than 64 before the first scored token are dropped.",
        scored_in_a_window,
    ),
    Mutant(
        "candidates clamped",
        "E-85",
        "Candidates outside the vocabulary are taken for its last token.",
        candidates_unchecked,
    ),
    Mutant("digest of the version", "E-01", "manifest_digest changes with every update.", digest_of_version),
    Mutant("chat without top-k", "E-23", "Chat requests lose top_k.", chat_dropping(top_k=0)),
    Mutant("chat without min-p", "E-23", "Chat requests lose min_p.", chat_dropping(min_p=0.0)),
    Mutant(
        "waiting streams without an end",
        "E-24",
        "Completions that are still waiting when their stream is aborted receive no chunk.",
        waiting_without_an_end,
    ),
)

"""Turns of an episode that may move between endpoints: an unfinished turn continues on the next endpoint.

A conversation consists of token ids, so any endpoint can continue it. The tokens of a turn that were streamed, or that
an abort returned, are kept with their logprobs and versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from inflight.base.tasks import EndedByOwnerError, TaskOwner
from inflight.environments.playing import Generate, Stream
from inflight.environments.recording import completion_of
from inflight.errors import ProtocolError
from inflight.rollouts import continuation, joined
from inflight.wire import Capabilities, Completion, CompletionChunk, GenerateRequest

T = TypeVar("T")

_AGAIN_S = 0.05
"""How long to wait before a request that was aborted without a token is sent again."""


@dataclass(frozen=True, slots=True, eq=False)
class TurnSampler:
    """An endpoint on which turns can be sampled."""

    generate: Generate
    stream: Stream | None


class MovingSampler:
    """Samples the turns of one episode, on one endpoint after another.

    ``failures`` are the errors after which a turn continues on another endpoint. Each is passed to ``on_failure``,
    which may raise it to abandon the turn. Turns then wait until `go_to` is called with another endpoint.
    """

    def __init__(self, failures: tuple[type[Exception], ...], on_failure: Callable[[Exception], None]) -> None:
        self._failures = failures
        self._on_failure = on_failure
        self._place: TurnSampler | None = None
        self._arrived = asyncio.Event()
        self._asking = TaskOwner()
        self.num_moved = 0
        """Number of turns that continued on another endpoint."""

    def go_to(self, place: TurnSampler) -> None:
        """Sample on this endpoint from now on."""
        self.leave()
        self._place = place
        self._arrived.set()

    def leave(self) -> None:
        """Abort the turns on the current endpoint; they wait for the next one."""
        self._place = None
        self._arrived.clear()
        self._asking.cancel()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the completion of a request. Errors not in ``failures``, or raised by ``on_failure``, propagate."""
        done: Completion | None = None
        for number in range(2**31):
            place = await self._here()
            part = await self._answer(place, place.generate(_remaining_request(request, done, number)))
            done = _append_part(done, part)
            if done is not None and not _is_cut(done, request):
                return _as_finished(done)
            if part is not None and not part.num_tokens:
                await asyncio.sleep(_AGAIN_S)
        raise AssertionError

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        """Yield the tokens of one completion. Raises the same errors as `generate`."""
        done: Completion | None = None
        for number in range(2**31):
            place = await self._here()
            rest = _remaining_request(request, done, number)
            start = 0 if done is None else done.num_tokens
            chunks: list[CompletionChunk] = []
            async with aclosing(self._chunks(place, rest)) as parts:
                async for chunk in parts:
                    chunks.append(chunk)
                    yield _as_part_of_turn(chunk, start)
            done = _append_part(done, _part(chunks))
            if done is not None and not _is_cut(done, request):
                if done.finish_reason == "abort":
                    yield _final_chunk(request, _as_finished(done))
                return
            if not any(chunk.token_ids for chunk in chunks):
                await asyncio.sleep(_AGAIN_S)

    async def _here(self) -> TurnSampler:
        while self._place is None:
            await self._arrived.wait()
        return self._place

    async def _chunks(self, place: TurnSampler, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        """Yield the chunks of a request from an endpoint, until the request ends or the endpoint fails."""
        if place.stream is None:
            completion = await self._answer(place, place.generate(request))
            for chunk in () if completion is None else _chunks_of(request, completion):
                yield chunk
            return
        async with aclosing(place.stream(request)) as stream:
            said: CompletionChunk | None
            while (said := await self._answer(place, anext(stream, _END))) is not None and said is not _END:
                yield said
                if said.finish_reason is not None:
                    return
            if said is _END:
                self._failed(place, ProtocolError("the stream ended without a finish reason"))

    async def _answer(self, place: TurnSampler, call: Awaitable[T]) -> T | None:
        """Return an endpoint's answer; None if the endpoint fails, or if the turn leaves that endpoint meanwhile."""
        try:
            return await self._asking.run(call)
        except EndedByOwnerError:
            return None
        except self._failures as error:
            self._failed(place, error)
            return None

    def _failed(self, place: TurnSampler, error: Exception) -> None:
        self.num_moved += 1
        if self._place is place:  # otherwise, it was left already
            self.leave()
            self._on_failure(error)


_END = CompletionChunk(request_id="end", index=0, start=0, token_ids=(), logprobs=(), version=0)


def without_unsupported_seed(request: GenerateRequest, declared: Capabilities) -> GenerateRequest:
    """Return a request without its seed if the endpoint does not support seeds."""
    if declared.seeds:
        return request
    return request.model_copy(update={"sampling": request.sampling.model_copy(update={"seed": None})})


def _remaining_request(request: GenerateRequest, done: Completion | None, number: int) -> GenerateRequest:
    """Return the request for the rest of a completion, with a new id."""
    if number == 0:
        return request
    request_id = f"{request.request_id}-again-{number}"
    if done is None or not done.num_tokens:
        return request.model_copy(update={"request_id": request_id})
    return continuation(request, done, request_id)


def _append_part(done: Completion | None, part: Completion | None) -> Completion | None:
    return part if done is None else done if part is None else joined(done, part)


def _is_cut(done: Completion, request: GenerateRequest) -> bool:
    """Return whether a completion was aborted before it reached its length limit."""
    return done.finish_reason == "abort" and done.num_tokens != request.sampling.max_tokens


def _as_finished(done: Completion) -> Completion:
    return done.model_copy(update={"finish_reason": "length"}) if done.finish_reason == "abort" else done


def _part(chunks: list[CompletionChunk]) -> Completion | None:
    """Return the completion that the chunks form, marked as aborted if the last chunk is missing."""
    if not chunks:
        return None
    *before, last = chunks
    return completion_of([*before, last.model_copy(update={"finish_reason": last.finish_reason or "abort"})])


def _as_part_of_turn(chunk: CompletionChunk, start: int) -> CompletionChunk:
    """Return a chunk as a part of the whole turn, which continues if only the request was cut off."""
    is_cut = chunk.finish_reason == "abort"
    if not (start or is_cut):
        return chunk
    update = {"start": start + chunk.start, "finish_reason": None if is_cut else chunk.finish_reason}
    return chunk.model_copy(update=update)


def _final_chunk(request: GenerateRequest, done: Completion) -> CompletionChunk:
    return CompletionChunk(
        request_id=request.request_id,
        index=0,
        start=done.num_tokens,
        token_ids=(),
        logprobs=(),
        version=done.version_spans[-1].version if done.version_spans else 0,
        finish_reason=done.finish_reason,
    )


def _chunks_of(request: GenerateRequest, completion: Completion) -> Iterator[CompletionChunk]:
    """Yield a completion as chunks, one for each version."""
    spans = completion.version_spans
    for span in spans:
        yield CompletionChunk(
            request_id=request.request_id,
            index=0,
            start=span.start,
            token_ids=completion.token_ids[span.start : span.end],
            logprobs=completion.logprobs[span.start : span.end],
            version=span.version,
        )
    yield _final_chunk(request, completion)

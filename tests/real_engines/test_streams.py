"""Streams of the real engines: the version in each chunk is the one that sampled its tokens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import pytest

from inflight.contracts import InferenceEndpoint, StreamingEndpoint
from inflight.errors import InvalidRequestError, UnsupportedError
from inflight.wire import AbortRequests, ChatCompletionRequest, ChatMessage, CompletionChunk, GenerateRequest
from tests.real_engines.servers import RealEngine, is_uniform, muted, publish, request

VOCAB_SIZE = 258
NUM_COMPLETIONS, NUM_TOKENS = 3, 1000
_LIMIT_S = 60.0


class Reader:
    """Reads the stream of one request in the background."""

    def __init__(self, endpoint: Any, asked: GenerateRequest) -> None:
        self.asked = asked.model_copy(update={"stream": True})
        self.chunks: list[CompletionChunk] = []
        self._endpoint = endpoint
        self._grown = asyncio.Event()
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for chunk in self._endpoint.generate_stream(self.asked):
            self.chunks.append(chunk)
            self._grown.set()

    def num_tokens(self, index: int) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks if chunk.index == index)

    async def grow(self, num: int = 8) -> None:
        """Return once each completion has ``num`` tokens more than now."""
        wanted = [self.num_tokens(index) + num for index in range(self.asked.sampling.n)]
        async with asyncio.timeout(_LIMIT_S):
            while any(self.num_tokens(index) < num for index, num in enumerate(wanted)):
                assert not self.task.done(), "the stream ended before the update"
                self._grown.clear()
                await self._grown.wait()


def test_each_chunk_names_the_version_that_sampled_it_while_updates_commit(engine: RealEngine) -> None:
    """Under the oracle every logprob is -ln V, so a token shows which of the two weights sampled it.

    The updates are not staged: nothing is sampled from the beginning of an update to its end.
    """

    async def main() -> list[CompletionChunk]:
        async with contextlib.aclosing(engine.endpoint()) as endpoint:
            assert (await endpoint.capabilities()).streaming
            return await stream_through_updates(endpoint)

    async def stream_through_updates(endpoint: InferenceEndpoint) -> list[CompletionChunk]:
        with engine.publisher() as publisher:
            publisher.staged = False
            reader = Reader(endpoint, request(NUM_TOKENS, n=NUM_COMPLETIONS, temperature=1.0))
            for version in (101, 102, 103):
                await reader.grow()
                tensors = muted(engine.tensors) if version % 2 else engine.tensors
                await asyncio.to_thread(publish, publisher, tensors, version)
            async with asyncio.timeout(_LIMIT_S):
                await reader.task
            await asyncio.to_thread(publish, publisher, engine.tensors, 104)
        return reader.chunks

    chunks = asyncio.run(main())
    for index in range(NUM_COMPLETIONS):
        of_one = [chunk for chunk in chunks if chunk.index == index]
        assert [chunk.start for chunk in of_one] == [
            sum(len(chunk.token_ids) for chunk in of_one[:i]) for i in range(len(of_one))
        ]
        assert sum(len(chunk.token_ids) for chunk in of_one) == NUM_TOKENS
        assert [chunk.finish_reason for chunk in of_one] == [None] * (len(of_one) - 1) + ["length"]
        versions = [chunk.version for chunk in of_one for _ in chunk.token_ids]
        uniform = [is_uniform(logprob, VOCAB_SIZE) for chunk in of_one for logprob in chunk.logprobs]
        changes = [version for version, _ in itertools.groupby(versions)]
        assert len(changes) == 4 and changes[1:] == [101, 102, 103]  # the first is that of the test before
        assert uniform == [version in (101, 103) for version in versions]


def test_a_stream_ends_with_an_abort_even_if_nobody_reads_it(engine: RealEngine) -> None:
    async def main() -> None:
        endpoint: Any = engine.endpoint()
        asked = request(900, n=2, temperature=1.0).model_copy(update={"stream": True})
        async with asyncio.timeout(_LIMIT_S), contextlib.aclosing(endpoint.generate_stream(asked)) as stream:
            await anext(stream)
            await endpoint.abort_requests(AbortRequests(request_ids=(asked.request_id,)))
            rest = [chunk async for chunk in stream]
        assert sorted(chunk.index for chunk in rest if chunk.finish_reason == "abort") == [0, 1]
        await endpoint.aclose()

    asyncio.run(main())


def test_a_stream_that_the_engine_refuses_raises_as_generate_does(engine: RealEngine) -> None:
    async def main() -> None:
        endpoint: Any = engine.endpoint()
        assert isinstance(endpoint, StreamingEndpoint)
        with pytest.raises(InvalidRequestError, match="max_model_len"):
            await anext(aiter(endpoint.generate_stream(request(1_000_000))))
        unsupported = request(4).model_copy(update={"routed_experts": True})
        with pytest.raises(UnsupportedError):
            await anext(aiter(endpoint.generate_stream(unsupported)))
        model = (await endpoint.capabilities()).model
        chat = ChatCompletionRequest(model=model, messages=(ChatMessage(role="user", content="1+1"),), max_tokens=8)
        chunks = [chunk async for chunk in endpoint.chat_completion_stream(chat)]
        assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason
        await endpoint.aclose()

    asyncio.run(main())

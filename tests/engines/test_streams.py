"""The chunks of an engine's stream."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from inflight.engines.streams import TokenStream
from inflight.wire import CompletionChunk, GenerateRequest, SamplingParams

NUM_COMPLETIONS = 2
ADDED = st.lists(
    st.tuples(st.integers(0, NUM_COMPLETIONS - 1), st.integers(0, 3), st.integers(1, 2), st.booleans()), max_size=30
)
"""Of each addition: the completion, its number of tokens, their version, and whether the caller reads after it."""


def stream_of(request_id: str) -> TokenStream:
    sampling = SamplingParams(n=NUM_COMPLETIONS)
    return TokenStream(GenerateRequest(request_id=request_id, prompt_token_ids=(1,), sampling=sampling), lambda: 0)


async def read(added: list[tuple[int, int, int, bool]], *, is_slow: bool) -> list[CompletionChunk]:
    """Add tokens and end the completions. A caller that is not slow reads after every addition."""
    stream = stream_of("a")
    labels: list[list[dict[str, Any]]] = [[] for _ in range(NUM_COMPLETIONS)]
    chunks: list[CompletionChunk] = []
    was_read = asyncio.Event()

    async def sample() -> None:
        num_added = 0
        for index, num, version, is_read in added:
            start = stream.num_tokens(index)
            if num:
                labels[index].append({"version": f"{version}@run", "start": start, "end": start + num})
            ids = list(range(num_added, num_added + num))
            stream.add(index, ids, [-float(token_id) for token_id in ids], labels[index], None)
            num_added += num
            while (is_read or not is_slow) and sum(len(chunk.token_ids) for chunk in chunks) < num_added:
                was_read.clear()
                await was_read.wait()
        for index in range(NUM_COMPLETIONS):
            stream.add(index, (), (), labels[index], "length")

    async with asyncio.timeout(60):
        async for chunk in stream.read(sample):
            chunks.append(chunk)
            was_read.set()
    return chunks


def completion_of(chunks: list[CompletionChunk], index: int) -> list[tuple[int, float, int]]:
    """Return the token, logprob and version of each token; require contiguous chunks, of which the last ends it."""
    own = [chunk for chunk in chunks if chunk.index == index]
    assert [chunk.start for chunk in own] == [sum(len(it.token_ids) for it in own[:at]) for at in range(len(own))]
    assert [chunk.finish_reason for chunk in own] == [None] * (len(own) - 1) + ["length"]
    return [
        (token_id, logprob, chunk.version)
        for chunk in own
        for token_id, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True)
    ]


@given(added=ADDED)
def test_chunks_that_a_slow_caller_finds_merged_are_the_concatenation_of_the_others(
    added: list[tuple[int, int, int, bool]],
) -> None:
    merged, unmerged = (asyncio.run(read(added, is_slow=is_slow)) for is_slow in (True, False))
    assert sum(1 for chunk in unmerged if chunk.token_ids) >= sum(1 for _, num, _, _ in added if num)
    for index in range(NUM_COMPLETIONS):
        assert completion_of(merged, index) == completion_of(unmerged, index)


@given(added=ADDED)
def test_a_caller_that_reads_nothing_before_the_end_finds_one_chunk_for_each_run_of_a_version(
    added: list[tuple[int, int, int, bool]],
) -> None:
    chunks = asyncio.run(read([(*it[:3], False) for it in added], is_slow=True))
    for index in range(NUM_COMPLETIONS):
        versions = [version for _, _, version in completion_of(chunks, index)]
        num_runs = len(list(itertools.groupby(versions)))
        assert sum(chunk.index == index for chunk in chunks) == max(1, num_runs)


def test_a_stream_that_nobody_reads_starts_nothing() -> None:
    started = []

    async def sample() -> None:
        started.append(True)

    async def leave() -> None:
        await stream_of("left").read(sample).aclose()

    asyncio.run(leave())
    assert started == []

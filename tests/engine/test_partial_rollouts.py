"""Requests of the embedded engine that are aborted: what comes back, and what becomes of it when it is continued."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from inflight.rollouts import continuation, joined
from inflight.wire import AbortRequests, Completion, CompletionChunk
from tests.engine.reference import (
    WAIT_S,
    assert_close,
    forward_logprobs,
    kept_cache_logprobs,
    load_reference,
    make_request,
    random_prompt,
    serving,
)
from tests.engine.test_in_flight_policies import models, publishing, versions_of  # noqa: F401 - a fixture
from tests.gates import slowed, until

PROMPT = random_prompt(20, 1)


def abort(*request_ids: str) -> AbortRequests:
    return AbortRequests(request_ids=request_ids)


def test_parts_that_were_sampled_across_updates_keep_their_logprobs_and_spans(model_dir: Path, models) -> None:  # noqa: F811
    request = make_request("a", PROMPT, max_tokens=800, ignore_eos=True, seed=3)
    models = {**models, 3: models[1]}
    with publishing(model_dir, max_concurrent=4) as it:
        (running,) = it.start(request)
        it.wait_for_tokens(20)
        it.publish(models[1], 1, "keep")
        it.wait_for_tokens(20)
        it.publisher.start(it.endpoint.abort_requests, abort("a")).result(WAIT_S)
        num_tokens = it.endpoint.stats().num_tokens
        (first,) = running.result(WAIT_S).completions
        assert num_tokens == len(first.token_ids)
        it.publish(models[2], 2, "keep")
        (running,) = it.start(rest := continuation(request, first, "a again"))
        it.wait_for_tokens(20)
        it.publish(models[3], 3, "keep")
        (second,) = running.result(WAIT_S).completions
    whole = joined(first, second)
    assert (first.finish_reason, whole.finish_reason, len(whole.token_ids)) == ("abort", "length", 800)
    assert (versions_of(first), versions_of(second), versions_of(whole)) == ([0, 1], [2, 3], [0, 1, 2, 3])
    for asked, part in ((request, first), (rest, second)):
        assert_close(part.logprobs, kept_cache_logprobs(models, asked.prompt_token_ids, part))


def finish_reasons(completions: tuple[Completion, ...]) -> list[tuple[str, bool]]:
    return [(completion.finish_reason, bool(completion.token_ids)) for completion in completions]


def test_a_completion_that_waits_ends_without_a_token_and_one_that_has_ended_stays_as_it_is(model_dir: Path) -> None:
    several = make_request("several", PROMPT, n=3, max_tokens=300, ignore_eos=True)
    behind = make_request("behind", PROMPT, ignore_eos=True)

    async def run() -> list[tuple[Completion, ...]]:
        async with serving(model_dir, max_concurrent=1) as endpoint, asyncio.timeout(WAIT_S):
            with slowed(endpoint, after=310):
                answers = [asyncio.ensure_future(endpoint.generate(request)) for request in (several, behind)]
                await until(lambda: endpoint.stats().num_tokens > 310)
                await endpoint.abort_requests(abort("behind", "several"))
            assert endpoint.stats().num_running == endpoint.stats().num_waiting == 0
            return [response.completions for response in await asyncio.gather(*answers)]

    of_several, of_behind = asyncio.run(run())
    assert finish_reasons(of_several) == [("length", True), ("abort", True), ("abort", False)]
    assert finish_reasons(of_behind) == [("abort", False)]
    assert of_behind[0].version_spans == ()


def test_other_requests_go_on_and_unknown_ids_are_ignored(model_dir: Path) -> None:
    other = make_request("other", PROMPT, max_tokens=200, ignore_eos=True)

    async def run() -> Completion:
        async with serving(model_dir) as endpoint, asyncio.timeout(WAIT_S):
            with slowed(endpoint):
                long = make_request("a", PROMPT, ignore_eos=True)
                answers = [asyncio.ensure_future(endpoint.generate(it)) for it in (long, other)]
                await until(lambda: endpoint.stats().num_running == 2)
                await endpoint.abort_requests(abort("never seen", "a"))
            await endpoint.abort_requests(abort("a"))
            return (await asyncio.gather(*answers))[1].completions[0]

    completion = asyncio.run(run())
    assert completion.finish_reason == "length"
    assert_close(completion.logprobs, forward_logprobs(load_reference(model_dir), PROMPT, completion.token_ids))


@pytest.mark.parametrize("max_concurrent", [1, 2])
def test_a_stream_that_is_aborted_ends_with_a_chunk_that_says_so(model_dir: Path, max_concurrent: int) -> None:
    async def run() -> list[CompletionChunk]:
        async with serving(model_dir, max_concurrent=max_concurrent) as endpoint, asyncio.timeout(WAIT_S):
            chunks: list[CompletionChunk] = []

            async def stream() -> None:
                async for chunk in endpoint.generate_stream(make_request("a", PROMPT, ignore_eos=True)):
                    chunks.append(chunk)

            with slowed(endpoint):
                first = asyncio.ensure_future(endpoint.generate(make_request("first", PROMPT, ignore_eos=True)))
                await until(lambda: endpoint.stats().num_running)
                streaming = asyncio.ensure_future(stream())
                await until(lambda: endpoint.stats().num_waiting if max_concurrent == 1 else chunks)
                await endpoint.abort_requests(abort("a"))
                await streaming
                first.cancel()
            return chunks

    *others, last = asyncio.run(run())
    assert (last.finish_reason, last.token_ids) == ("abort", ())
    assert last.start == sum(len(chunk.token_ids) for chunk in others)
    assert bool(others) == (max_concurrent == 2)

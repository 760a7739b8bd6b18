"""Turns that continue elsewhere when their endpoint fails, is left, or aborts them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import pytest

from inflight.environments.moving import MovingSampler, TurnSampler
from inflight.environments.recording import completion_of
from inflight.errors import ProtocolError, UnreachableError
from inflight.wire import Completion, CompletionChunk, GenerateRequest, SamplingParams, VersionSpan
from tests.gates import SOON_S, until

REQUEST = GenerateRequest(
    request_id="turn", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=6, seed=9, temperature=0.5)
)


class Scripted:
    """A place that samples a token of its version at a time, up to a number of them, and then does what it is told."""

    def __init__(self, version: int, num_tokens: int, end: str, streams: bool) -> None:
        self.asked: list[GenerateRequest] = []
        self._version, self._num_tokens, self._end = version, num_tokens, end
        self.place = TurnSampler(self.generate, self.stream if streams else None)
        self.began = asyncio.Event()
        self.hangs = asyncio.Event()
        """All of its tokens have been taken."""

    async def generate(self, request: GenerateRequest) -> Completion:
        return completion_of([chunk async for chunk in self.stream(request)])

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        self.asked.append(request)
        self.began.set()
        num_tokens = min(self._num_tokens, request.sampling.max_tokens or 0)
        for i in range(num_tokens):
            is_last = i + 1 == num_tokens and self._end in ("length", "abort")
            yield CompletionChunk(
                request_id=request.request_id,
                index=0,
                start=i,
                token_ids=(100 * self._version + i,),
                logprobs=(-self._version - i / 8,),
                version=self._version,
                finish_reason=self._end if is_last else None,  # type: ignore[arg-type]
            )
        match self._end:
            case "fails":
                raise UnreachableError("gone", "place")
            case "hangs":
                self.hangs.set()
                await asyncio.sleep(3600)


def run(call: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(call, SOON_S))


async def sampled(moving: MovingSampler, streamed: bool) -> Completion:
    if not streamed:
        return await moving.generate(REQUEST)
    return completion_of([chunk async for chunk in moving.stream(REQUEST)])


@pytest.mark.parametrize("end", ["fails", "ends without a reason"])
@pytest.mark.parametrize("second_streams", [False, True])
def test_a_streamed_turn_goes_on_behind_the_tokens_that_arrived(end: str, second_streams: bool) -> None:
    async def play() -> None:
        first, second = Scripted(1, 2, end, True), Scripted(2, 9, "length", second_streams)
        errors: list[Exception] = []
        moving = MovingSampler((UnreachableError, ProtocolError), errors.append)
        moving.go_to(first.place)
        turn = asyncio.ensure_future(sampled(moving, True))
        await until(lambda: errors, "no place failed")
        moving.go_to(second.place)
        whole = await turn
        assert whole.token_ids == (100, 101, 200, 201, 202, 203)
        assert whole.logprobs == (-1.0, -1.125, -2.0, -2.125, -2.25, -2.375)
        assert whole.version_spans == (VersionSpan(version=1, start=0, end=2), VersionSpan(version=2, start=2, end=6))
        assert whole.finish_reason == "length"
        (asked,) = second.asked
        assert asked.prompt_token_ids == (1, 2, 3, 100, 101)
        assert (asked.sampling.max_tokens, asked.sampling.temperature) == (4, 0.5)
        assert asked.sampling.seed != REQUEST.sampling.seed
        assert moving.num_moved == 1

    run(play())


def test_a_turn_that_is_not_streamed_is_asked_again_of_the_next_place() -> None:
    async def play() -> None:
        first, second = Scripted(1, 2, "fails", False), Scripted(2, 9, "length", False)
        moving = MovingSampler((UnreachableError,), lambda _: moving.go_to(second.place))
        moving.go_to(first.place)
        whole = await moving.generate(REQUEST)
        assert whole.token_ids == (200, 201, 202, 203, 204, 205)
        assert second.asked[0] == REQUEST.model_copy(update={"request_id": second.asked[0].request_id})
        assert second.asked[0].request_id != REQUEST.request_id

    run(play())


@pytest.mark.parametrize("streamed", [False, True])
def test_an_aborted_turn_gives_its_tokens_back_and_is_continued(streamed: bool) -> None:
    async def play() -> None:
        aborting, other = Scripted(1, 2, "abort", True), Scripted(2, 9, "length", True)
        moving = MovingSampler((), lambda error: None)
        moving.go_to(aborting.place)
        turn = asyncio.ensure_future(sampled(moving, streamed))
        await aborting.began.wait()
        moving.go_to(other.place)
        whole = await turn
        assert whole.token_ids[:2] == (100, 101)
        assert whole.num_tokens == 6
        assert whole.finish_reason == "length"

    run(play())


@pytest.mark.parametrize("streamed", [False, True])
def test_a_turn_whose_place_is_left_ends_there_and_goes_on_at_the_next(streamed: bool) -> None:
    async def play() -> None:
        slow, other = Scripted(1, 2, "hangs", True), Scripted(2, 9, "length", True)
        moving = MovingSampler((), lambda error: None)
        moving.go_to(slow.place)
        turn = asyncio.ensure_future(sampled(moving, streamed))
        await slow.hangs.wait()
        moving.leave()
        done, _ = await asyncio.wait({turn}, timeout=0.05)
        assert not done
        moving.go_to(other.place)
        whole = await turn
        kept = (100, 101) if streamed else ()
        assert whole.token_ids == (*kept, 200, 201, 202, 203, 204, 205)[:6]
        assert moving.num_moved == 0  # nothing has failed

    run(play())


def test_a_turn_is_given_up_with_what_on_failure_raises() -> None:
    async def play() -> None:
        def give_up(error: Exception) -> None:
            raise error

        moving = MovingSampler((UnreachableError,), give_up)
        moving.go_to(Scripted(1, 2, "fails", False).place)
        with pytest.raises(UnreachableError, match="gone"):
            await moving.generate(REQUEST)

    run(play())

"""Calls of a model run in the order of their numbers, each once; results are retrieved later, and again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.base.tasks import cancel_and_wait
from inflight.dialects.tinker import futures as futures_module
from inflight.dialects.tinker import ordering
from inflight.dialects.tinker.futures import FailedCall, Futures, GoneError
from inflight.dialects.tinker.ordering import OrderedCalls
from inflight.errors import InvalidRequestError, TrainerError
from tests.gates import until


def run(call: Callable[[Futures], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        futures = Futures()
        try:
            async with asyncio.timeout(30):
                return await call(futures)
        finally:
            await futures.aclose()

    return asyncio.run(main())


@settings(max_examples=30)
@given(st.permutations(range(1, 8)), st.sets(st.integers(1, 7)), st.sets(st.integers(1, 7)))
def test_calls_run_in_order_and_repeated_ones_once(arrival: list[int], failing: set[int], twice: set[int]) -> None:
    ran: list[int] = []

    def call_of(number: int) -> Callable[[], Awaitable[dict[str, Any]]]:
        async def execute() -> dict[str, Any]:
            await asyncio.sleep(0)
            ran.append(number)
            if number in failing:
                raise TrainerError(f"{number} fails")
            return {"number": number}

        return execute

    async def main(futures: Futures) -> None:
        calls, ids = OrderedCalls(futures), {}
        for number in arrival:
            ids[number] = calls.submit(number, b"%d" % number, call_of(number))
            if number in twice:
                await asyncio.sleep(0)
                assert calls.submit(number, b"%d" % number, call_of(number)) == ids[number]
        for number, request_id in ids.items():
            wanted = FailedCall(f"{number} fails", "server") if number in failing else {"number": number}
            assert await futures.retrieve(request_id) == wanted
            assert await futures.retrieve(request_id) == wanted  # an answer that was lost

    run(main)
    assert ran == list(range(1, 8))


def test_a_client_that_waits_is_told_to_ask_again_when_the_server_stops() -> None:
    async def main(futures: Futures) -> None:
        request_id = futures.start(asyncio.Event().wait)
        waiting = asyncio.ensure_future(futures.retrieve(request_id))
        await asyncio.sleep(0)
        await futures.aclose()
        assert await waiting is None

    run(main)


async def done() -> dict[str, Any]:
    return {}


def test_a_number_that_is_used_for_another_call_is_refused() -> None:
    async def main(futures: Futures) -> None:
        calls = OrderedCalls(futures)
        calls.submit(1, b"one", done)
        with pytest.raises(InvalidRequestError, match="seq_id 1 was used for another call"):
            calls.submit(1, b"other", done)
        with pytest.raises(InvalidRequestError, match="numbered from 1"):
            calls.submit(0, b"zero", done)

    run(main)


def test_a_call_whose_predecessor_never_arrives_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering, "WAIT_S", 0.05)

    async def main(futures: Futures) -> FailedCall:
        outcome = await futures.retrieve(OrderedCalls(futures).submit(2, b"two", done))
        assert isinstance(outcome, FailedCall)
        return outcome

    assert "call 1 did not arrive within 0.05 s" in run(main).error


def test_calls_long_over_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering, "NUM_REMEMBERED", 10)

    async def main(futures: Futures) -> None:
        calls = OrderedCalls(futures)
        for number in range(1, 101):
            await futures.retrieve(calls.submit(number, b"%d" % number, done))
        assert len(calls._calls) <= 11
        with pytest.raises(InvalidRequestError, match="those up to 90 ended long ago"):
            calls.submit(50, b"50", done)

    run(main)


def test_a_pending_call_is_held_and_an_unknown_one_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures_module, "KEPT_AFTER_RETRIEVAL_S", 0.0)

    async def main(futures: Futures) -> None:
        going_on = asyncio.Event()

        async def waits() -> dict[str, Any]:
            await going_on.wait()
            return {"a": 1}

        request_id = futures.start(waits)
        assert await futures.retrieve(request_id, hold_s=0.02) is None
        going_on.set()
        assert await futures.retrieve(request_id) == {"a": 1}
        await asyncio.sleep(0.01)
        with pytest.raises(GoneError):
            await futures.retrieve(request_id)
        assert len(futures) == 0

    run(main)


def test_a_call_that_no_client_retrieves_is_cancelled_if_it_can_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures_module, "ABANDONED_S", 0.1)
    ended: list[str] = []

    async def main(futures: Futures) -> None:
        def waiting(name: str) -> Callable[[], Awaitable[Any]]:
            async def wait() -> None:
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.append(name)

            return wait

        abandoned = futures.start(waiting("abandoned"), is_repeatable=True)
        left = futures.start(waiting("left"), is_repeatable=True)
        held = futures.start(waiting("held"), is_repeatable=True)
        step = futures.start(waiting("step"))
        holding = asyncio.ensure_future(futures.retrieve(held))
        leaving = asyncio.ensure_future(futures.retrieve(left))
        other = asyncio.ensure_future(futures.retrieve(left))
        await until(lambda: ended == ["abandoned"])
        with pytest.raises(GoneError):
            await futures.retrieve(abandoned)
        await cancel_and_wait(leaving)
        await asyncio.sleep(0.3)
        assert ended == ["abandoned"]  # the other retrieval still waits
        await cancel_and_wait(other)
        await until(lambda: ended == ["abandoned", "left"])
        assert held in futures and step in futures and left not in futures and not holding.done()
        await cancel_and_wait(holding)

    run(main)


@pytest.mark.parametrize(
    ("error", "category", "text"),
    [
        (InvalidRequestError("no such path"), "user", "no such path"),
        (TrainerError("a rank died"), "server", "a rank died"),
        (ValueError("oops"), "server", "ValueError: oops"),
    ],
)
def test_failures_state_who_caused_them(error: Exception, category: str, text: str) -> None:
    assert FailedCall.of(error) == FailedCall(text, category)

"""Tasks with owners: what was started has ended, and every error is raised or is a note of the one that is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from inflight.base.tasks import EndedByOwnerError, TaskOwner, all_of, beside, cancel, result_unless, start


class Calls:
    """Calls that record how they ended."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    async def endless(self, name: str, last_error: Exception | None = None) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # its cleanup takes a while
            await asyncio.sleep(0)
            self.ends.append(name)
            if last_error is not None:
                raise last_error


async def failing(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


async def returning(value: int) -> int:
    await asyncio.sleep(0)
    return value


def run(call: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def with_limit() -> None:
        async with asyncio.timeout(30):
            await call()

    asyncio.run(with_limit())


def test_results_of_all_calls_come_in_the_order_of_the_calls():
    async def body() -> None:
        assert await all_of(returning(i) for i in range(3)) == [0, 1, 2]

    run(body)


def test_the_first_failure_is_raised_once_the_other_calls_have_ended_with_their_errors_as_notes():
    async def body() -> None:
        calls = Calls()
        with pytest.raises(ValueError, match="first") as raised:
            await all_of([calls.endless("other", OSError("second")), failing(ValueError("first"))])
        assert calls.ends == ["other"]
        assert raised.value.__notes__ == ["At the same time: OSError: second"]
        assert raised.value.__context__ is None

    run(body)


def test_what_runs_beside_a_body_has_ended_after_it():
    async def body() -> None:
        calls = Calls()
        async with beside(calls.endless("call")):
            await asyncio.sleep(0)
        assert calls.ends == ["call"]

    run(body)


def test_a_failure_of_the_body_is_raised_with_what_its_calls_raise_when_they_are_cancelled():
    async def body() -> None:
        calls = Calls()

        async def with_body() -> None:
            async with beside(calls.endless("call", OSError("call"))):
                await failing(ValueError("body"))

        with pytest.raises(ValueError, match="body") as raised:
            await with_body()
        assert calls.ends == ["call"]
        assert raised.value.__notes__ == ["At the same time: OSError: call"]

    run(body)


def test_a_call_that_fails_beside_a_body_ends_the_body_and_the_other_calls():
    async def body() -> None:
        calls = Calls()

        async def with_body() -> None:
            async with beside(calls.endless("other"), failing(ValueError("call"))):
                await calls.endless("body", OSError("body"))

        with pytest.raises(ValueError, match="call") as raised:
            await with_body()
        assert sorted(calls.ends) == ["body", "other"]
        assert raised.value.__notes__ == ["At the same time: OSError: body"]

    run(body)


def test_a_call_that_ends_first_gives_its_result_and_the_other_has_ended():
    async def body() -> None:
        calls = Calls()
        assert await result_unless(returning(7), calls.endless("end"), ValueError) == 7
        assert calls.ends == ["end"]

    run(body)


def test_a_call_is_cancelled_when_the_end_comes_and_its_own_error_is_a_note():
    async def body() -> None:
        calls = Calls()
        with pytest.raises(TimeoutError) as raised:
            await result_unless(calls.endless("call", OSError("broken")), returning(0), TimeoutError)
        assert calls.ends == ["call"]
        assert raised.value.__notes__ == ["At the same time: OSError: broken"]
        with pytest.raises(KeyError):
            await result_unless(calls.endless("call"), failing(KeyError("end")), TimeoutError)
        assert calls.ends == ["call"] * 2

    run(body)


def test_a_call_may_still_answer_shortly_after_the_end():
    async def body() -> None:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def end() -> None:
            asyncio.get_running_loop().call_later(0.01, answer.set_result, 3)

        assert await result_unless(answer, end(), TimeoutError, grace_s=20) == 3

    run(body)


def test_cancelled_tasks_have_ended_even_if_who_waits_for_them_is_cancelled_too():
    async def body() -> None:
        calls = Calls()
        task = start(calls.endless("task"))
        await asyncio.sleep(0)
        waiting = start(cancel([task]))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        assert calls.ends == ["task"]

    run(body)


def test_an_owner_ends_its_tasks_and_calls_under_it_report_that():
    async def body() -> None:
        calls, owner = Calls(), TaskOwner()
        owner.start(calls.endless("task"))
        called = start(owner.run(calls.endless("call")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert owner
        owner.cancel()
        with pytest.raises(EndedByOwnerError):
            await called
        await owner.aclose()
        assert sorted(calls.ends) == ["call", "task"]
        assert not owner

    run(body)


def test_an_owner_waits_for_its_tasks_before_it_cancels_them():
    async def body() -> None:
        owner = TaskOwner()
        task = owner.start(asyncio.sleep(0.01, "done"))
        await owner.aclose(wait_s=20)
        assert task.result() == "done"

    run(body)


def test_a_cancelled_call_under_an_owner_ends_before_its_caller_does():
    async def body() -> None:
        calls, owner = Calls(), TaskOwner()
        called = start(owner.run(calls.endless("call")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        called.cancel()
        await asyncio.wait({called})
        assert called.cancelled()
        assert calls.ends == ["call"]

    run(body)

"""Tasks that belong together: which failure is raised, where the others are, and that nothing keeps running."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from inflight.base.tasks import (
    EndedByOwnerError,
    TaskOwner,
    add_failures_to,
    any_of,
    cancel_and_wait,
    finish_all,
    result_unless,
    run_in_background,
    run_together,
    start,
    text_of,
)


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 30))

    return run


async def fail(message: str) -> None:
    raise ValueError(message)


async def fail_when_cancelled(message: str) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise ValueError(message)


@in_a_loop
async def test_the_first_failure_ends_the_body_and_carries_what_failed_after_it() -> None:
    with pytest.raises(ValueError, match="first") as raised:
        async with run_in_background(fail("first"), fail_when_cancelled("second")):
            await asyncio.Event().wait()
    assert text_of(raised.value) == "first\nalso failed: ValueError: second"


@in_a_loop
async def test_calls_that_still_run_are_ended_with_the_body() -> None:
    ended = asyncio.Event()

    async def call() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with run_in_background(call()):
        await asyncio.sleep(0)
    assert ended.is_set()


@in_a_loop
async def test_an_error_of_the_body_is_raised_as_itself() -> None:
    async def body() -> None:
        async with run_in_background(fail_when_cancelled("call")):
            await asyncio.sleep(0)
            raise KeyError("body")

    with pytest.raises(KeyError, match="body") as raised:
        await body()
    assert "also failed: ValueError: call" in text_of(raised.value)


@in_a_loop
async def test_calls_together_end_at_the_first_failure() -> None:
    with pytest.raises(ValueError, match="first") as raised:
        await run_together(fail("first"), fail_when_cancelled("second"))
    assert text_of(raised.value) == "first\nalso failed: ValueError: second"


@in_a_loop
async def test_every_call_is_finished_though_another_fails() -> None:
    done = []

    async def call() -> None:
        await asyncio.sleep(0.01)
        done.append(True)

    with pytest.raises(ValueError, match="first") as raised:
        await finish_all(fail("first"), call(), fail("second"))
    assert done == [True]
    assert text_of(raised.value) == "first\nalso failed: ValueError: second"


@in_a_loop
async def test_results_of_finished_calls_come_in_the_order_of_the_calls() -> None:
    assert await finish_all(asyncio.sleep(0.01, "slow"), asyncio.sleep(0, "fast")) == ["slow", "fast"]


@in_a_loop
async def test_a_cancelled_task_has_ended() -> None:
    task = asyncio.ensure_future(fail_when_cancelled("ended"))
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    assert task.done()


def test_what_fails_while_a_failure_is_handled_is_told_with_it() -> None:
    error = ValueError("first")
    with add_failures_to(error):
        raise KeyError("second")
    assert text_of(error) == "first\nalso failed: KeyError: 'second'"


class Endless:
    """Calls that end only when they are cancelled, and a moment later; ``ends`` are those that have ended."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    async def __call__(self, name: str, last_error: Exception | None = None) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            self.ends.append(name)
            if last_error is not None:
                raise last_error


async def returning(value: int) -> int:
    await asyncio.sleep(0)
    return value


@in_a_loop
async def test_results_of_calls_together_come_in_the_order_of_the_calls() -> None:
    assert await run_together(*(returning(i) for i in range(3))) == [0, 1, 2]


@in_a_loop
async def test_a_call_that_ends_first_gives_its_result_and_the_other_has_ended() -> None:
    call = Endless()
    assert await result_unless(returning(7), call("end"), ValueError) == 7
    assert call.ends == ["end"]


@in_a_loop
async def test_a_call_is_cancelled_when_the_end_comes_and_its_own_error_is_a_note() -> None:
    call = Endless()
    with pytest.raises(TimeoutError) as raised:
        await result_unless(call("call", OSError("broken")), returning(0), TimeoutError)
    assert call.ends == ["call"]
    assert text_of(raised.value) == "\nalso failed: OSError: broken"
    with pytest.raises(ValueError, match="end"):
        await result_unless(call("another"), fail("end"), TimeoutError)
    assert call.ends == ["call", "another"]


@in_a_loop
async def test_a_call_may_still_answer_shortly_after_the_end() -> None:
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def end() -> None:
        asyncio.get_running_loop().call_later(0.01, answer.set_result, 3)

    assert await result_unless(answer, end(), TimeoutError, grace_s=20) == 3


@in_a_loop
async def test_the_first_call_that_ends_is_named_and_the_others_have_ended() -> None:
    call = Endless()
    assert await any_of(call("call"), returning(5)) == (1, 5)
    assert call.ends == ["call"]


@in_a_loop
async def test_cancelled_tasks_have_ended_even_if_who_waits_for_them_is_cancelled_too() -> None:
    call = Endless()
    task = start(call("task"))
    await asyncio.sleep(0)
    waiting = start(cancel_and_wait(task))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert call.ends == ["task"]


@pytest.mark.filterwarnings("error")
@in_a_loop
async def test_a_call_that_is_cancelled_before_it_begins_ends_too() -> None:
    await cancel_and_wait(start(returning(1)), start(asyncio.get_running_loop().create_future()))
    gc.collect()


@in_a_loop
async def test_an_owner_ends_its_tasks_and_calls_under_it_report_that() -> None:
    call, owner = Endless(), TaskOwner()
    owner.start(call("task"))
    called = start(owner.run(call("call")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert owner
    owner.cancel()
    with pytest.raises(EndedByOwnerError):
        await called
    await owner.aclose()
    assert sorted(call.ends) == ["call", "task"]
    assert not owner


@in_a_loop
async def test_an_owner_waits_for_its_tasks_before_it_cancels_them() -> None:
    owner = TaskOwner()
    task = owner.start(asyncio.sleep(0.01, "done"))
    await owner.aclose(wait_s=20)
    assert task.result() == "done"


@in_a_loop
async def test_a_cancelled_call_under_an_owner_ends_before_its_caller_does() -> None:
    call, owner = Endless(), TaskOwner()
    called = start(owner.run(call("call")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    called.cancel()
    await asyncio.wait({called})
    assert called.cancelled()
    assert call.ends == ["call"]


async def ignore_the_first_cancellation(end: asyncio.Event) -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await end.wait()


def test_an_owner_logs_and_leaves_a_task_that_does_not_end_when_it_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("inflight.base.tasks._END_S", 0.05)

    @in_a_loop
    async def close_twice() -> None:
        owner, end = TaskOwner(), asyncio.Event()
        task = owner.start(ignore_the_first_cancellation(end))
        await asyncio.sleep(0)
        await owner.aclose()
        assert not task.done()
        assert owner
        end.set()
        await task
        assert not owner
        await owner.aclose()

    with caplog.at_level(logging.WARNING, "inflight.base.tasks"):
        close_twice()
    (record,) = caplog.records
    assert "have not ended 0.05 s after they were cancelled" in record.getMessage()
    assert "ignore_the_first_cancellation" in record.getMessage()

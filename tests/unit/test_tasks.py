"""Tasks that belong together: which failure is raised, where the others are, and that nothing keeps running."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from inflight.base.tasks import also_failing, cancel_and_wait, finish_all, run_together, running, text_of


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

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
        async with running(fail("first"), fail_when_cancelled("second")):
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

    async with running(call()):
        await asyncio.sleep(0)
    assert ended.is_set()


@in_a_loop
async def test_an_error_of_the_body_is_raised_as_itself() -> None:
    async def body() -> None:
        async with running(fail_when_cancelled("call")):
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
async def test_a_cancelled_task_has_ended() -> None:
    task = asyncio.ensure_future(fail_when_cancelled("ended"))
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    assert task.done()


def test_what_fails_while_a_failure_is_handled_is_told_with_it() -> None:
    error = ValueError("first")
    with also_failing(error):
        raise KeyError("second")
    assert text_of(error) == "first\nalso failed: KeyError: 'second'"

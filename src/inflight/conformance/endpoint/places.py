"""Level tokens, the places of requests whose callers left. What an endpoint says of itself is not asked here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from inflight.conformance.checks import check, fail, skip
from inflight.conformance.endpoint.aftermath import within
from inflight.conformance.endpoint.subject import EndpointSubject, cancelled_at_the_end

LEVEL = "tokens"
_MOST_PLACES = 256
_LONG = 512
"""Tokens of the requests that fill the endpoint while one more is asked for."""
_SHORT = 4
_ADMITTED_S = 0.2
"""For requests that were sent to be in their places."""
_GONE_S = 5.0
"""From the moment that callers leave to the moment that nothing of their requests runs, as in E-25."""
_TIMES_SLOWER = 5.0
_FIRST_S = 20.0
"""For the first time: an engine may compile while it is filled."""


@check(
    "E-63",
    deadline_s=90,
    look_at="whether a request that is cancelled ends in the engine, running or waiting, or only in the books, and "
    "what its end gives back",
)
async def places_come_back(subject: EndpointSubject) -> None:
    """As many sequences as are declared run at a time, also after the callers of more requests than that have left: a
    request that its caller leaves gives its place back."""
    num_places = subject.capabilities.max_concurrent_sequences
    if num_places > _MOST_PLACES:
        skip(f"{num_places} sequences run at a time, and the kit fills {_MOST_PLACES} places at most")
    before_s = await _fill(subject, "before any caller left", _FIRST_S)
    limit_s = _GONE_S + _TIMES_SLOWER * before_s
    subject.note(**{"seconds until one more was answered, before": before_s, "limit": limit_s})
    num_left = 0
    for is_streamed in (False, *((True,) if subject.capabilities.streaming else ())):
        num_left += await _leave(subject, 2 * num_places, is_streamed)
        when = f"after the callers of {num_left} requests left"
        after_s = await _fill(subject, when, limit_s)
        subject.note(**{f"seconds until one more was answered, {when}": after_s})


async def _fill(subject: EndpointSubject, when: str, limit_s: float) -> float:
    """Fill all places but one, ask for one more, and require that it is answered while all the others run.

    Return how long that took.
    """
    num_others = subject.capabilities.max_concurrent_sequences - 1
    for num_tokens in subject.lengths(_LONG):
        started = time.monotonic()
        requests = [subject.request(subject.prompt(seed=i), max_tokens=num_tokens, seed=i) for i in range(num_others)]
        others = [asyncio.ensure_future(subject.endpoint.generate(request)) for request in requests]
        await subject.enter(cancelled_at_the_end(others))
        await asyncio.sleep(_ADMITTED_S)
        what = f"{when}, one request beside {num_others} others"
        await within(limit_s, subject.endpoint.generate(subject.request(max_tokens=_SHORT)), what)
        seconds = time.monotonic() - started
        num_ended = sum(task.done() for task in others)
        await _cancel(others)
        if num_ended == 0:
            return seconds
    fail(
        f"{when}, one request of {_SHORT} tokens was answered only once {num_ended} of {num_others} requests of "
        f"{num_tokens} tokens had ended: fewer than the declared {num_others + 1} sequences run at a time"
    )


async def _leave(subject: EndpointSubject, num: int, is_streamed: bool) -> int:
    """Start so many requests to the end of the context, of which a part waits, and leave them; return the number."""
    longest = subject.capabilities.max_model_len - len(subject.prompt())

    async def ask(i: int) -> None:
        request = subject.request(subject.prompt(seed=i), max_tokens=longest, seed=i, stream=is_streamed)
        if is_streamed:
            async for _ in subject.streaming.generate_stream(request):
                pass
        else:
            await subject.endpoint.generate(request)

    callers = [asyncio.ensure_future(ask(i)) for i in range(num)]
    await subject.enter(cancelled_at_the_end(callers))
    await asyncio.sleep(_ADMITTED_S)
    for caller in callers:
        if caller.done():
            caller.result()
    await _cancel(callers)
    return num


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""What must be true after something went wrong: calls end in time, and the endpoint serves whole weights or none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from inflight.conformance.checks import fail, require
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.errors import PoisonedError
from inflight.wire import EndpointState, WeightVersion

T = TypeVar("T")

SLACK_S = 4.0
"""How much later than its own deadline a call may end, and a lease: for slow machines and for the reason to arrive."""
GRACE_S = 0.3
"""For what left the endpoint before a call returned, and is still on its way."""


async def within(seconds: float, call: Awaitable[T], what: str) -> T:
    """Return what ``call`` returns or raise what it raises; require that it ends within so many seconds."""
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait([task], timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
    require(done, f"{what} had not ended after {seconds:g} s")
    return task.result()


async def until(holds: Callable[[], object], seconds: float, what: str) -> None:
    """Return once ``holds`` does; require that it does within so many seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        require(time.monotonic() < deadline, f"{what} within {seconds:g} s")
        await asyncio.sleep(0.005)


async def until_running(subject: EndpointSubject, num: int, seconds: float, what: str) -> None:
    """Return once this many sequences run; require that they do within so many seconds."""
    deadline = time.monotonic() + seconds
    while (found := (await subject.endpoint.weight_version()).num_running) != num:
        require(time.monotonic() < deadline, f"{what} after {seconds:.2g} s (num_running is {found})")
        await asyncio.sleep(0.005)


async def settled(subject: EndpointSubject, when: str, seconds: float = SLACK_S) -> WeightVersion:
    """Return the version once no update is open; require that this is so within so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        version = await within(SLACK_S, subject.endpoint.weight_version(), f"{when}, weight_version")
        if version.state in (EndpointState.READY, EndpointState.POISONED):
            return version
        if time.monotonic() > deadline:
            fail(f"{when}, the endpoint is still {version.state} {seconds:g} s later")
        await asyncio.sleep(0.02)


async def require_old_weights(
    subject: EndpointSubject, when: str, *, seconds: float = SLACK_S, may_be_torn: bool = False
) -> None:
    """Require that the update leaves no trace: READY, with the checkpoint's weights under the version of before.

    Where bytes of it had arrived (``may_be_torn``) POISONED will do, if nothing is generated then.
    """
    version = await settled(subject, when, seconds)
    subject.note(**{f"state {when}": version.state})
    if may_be_torn and version.state is EndpointState.POISONED:
        await subject.require_raises(
            subject.endpoint.generate(subject.request()), (PoisonedError,), f"{when}, a request to a poisoned endpoint"
        )
        return
    require(version.state is EndpointState.READY, f"{when}, the state is {version.state}, not ready")
    require(
        version.version == subject.publisher.version and version.updating_to is None,
        f"{when}, version {version.version} (updating to {version.updating_to}) is said to be served, "
        f"not {subject.publisher.version}",
    )
    await subject.require_serves(subject.reference.weights, when)


async def require_recovers(subject: EndpointSubject, when: str) -> None:
    """Require that a complete update over a new group succeeds, and is what is served then."""
    other = subject.reference.with_final_norm(0.5, "A halved")
    subject.publisher.lose_group()
    await subject.publisher.publish(other)
    await subject.require_serves(other, f"after a complete update {when}")

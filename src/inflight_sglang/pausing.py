"""Pausing and resuming an SGLang server's sampling, ending requests, and labelling its weights."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from inflight.base.tasks import finish_all
from inflight.engines.detached_calls import ignore_engine_errors
from inflight.engines.routes import EngineRoutes
from inflight.errors import InflightError, UpdateRefusedError
from inflight.wire import InFlightPolicy

_POLL_S = 0.01
_CALLS_AT_ONCE = 16
_ABORT_AGAIN_S = 0.1
_FLUSHES = 20
"""Number of attempts to empty the cache once all requests are retracted."""


async def stop(routes: EngineRoutes, policy: InFlightPolicy, num_sent: Callable[[], int]) -> float:
    """Stop sampling as the policy specifies; return the time at which it stopped (`time.monotonic`).

    ``num_sent`` returns the number of this client's unanswered requests. After a failure, sampling may be paused.
    """
    if policy in (InFlightPolicy.DRAIN, InFlightPolicy.ABORT):
        return await _stop_when_idle(routes, num_sent, abort=policy is InFlightPolicy.ABORT)
    await _pause(routes, "in_place" if policy is InFlightPolicy.KEEP else "retract")
    # SGLang answers the pause before its scheduler has seen it. The scheduler answers the next call after its step.
    is_empty = await _flush(routes)
    paused_since = time.monotonic()
    if policy is InFlightPolicy.RECOMPUTE:
        for _ in range(_FLUSHES):
            if is_empty:
                break
            await asyncio.sleep(_POLL_S)
            is_empty = await _flush(routes)
        if not is_empty:
            raise UpdateRefusedError(
                "SGLang did not empty its prefix cache, so running requests would keep using "
                "keys and values of the old weights"
            )
    return paused_since


async def _stop_when_idle(routes: EngineRoutes, num_sent: Callable[[], int], *, abort: bool) -> float:
    """Wait until all requests have ended, including other clients', then pause. With ``abort``, end them all."""
    aborted_at = 0.0
    while True:
        if abort and time.monotonic() > aborted_at + _ABORT_AGAIN_S:
            await routes.post("/abort_request", {"abort_all": True})
            aborted_at = time.monotonic()
        if num_sent() == 0 and await _flush(routes):
            await _pause(routes, "in_place")
            paused_since = time.monotonic()
            if await _flush(routes):
                return paused_since
            await resume_sampling(routes)  # another client's request arrived before the pause
        await asyncio.sleep(_POLL_S)


async def abort(routes: EngineRoutes, rids: Sequence[str]) -> None:
    """End the requests with these ids, which return the tokens sampled so far.

    Ids of requests that are not running are ignored.
    """
    slots = asyncio.Semaphore(_CALLS_AT_ONCE)

    async def end(rid: str) -> None:
        async with slots:
            await routes.post("/abort_request", {"rid": rid})

    await finish_all(*map(end, rids))


async def resume_sampling(routes: EngineRoutes) -> None:
    """Resume sampling."""
    await routes.post("/continue_generation", {"torch_empty_cache": False})


async def set_label(routes: EngineRoutes, label: str) -> None:
    """Label the weights; tokens sampled from now on carry this label."""
    await routes.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})


async def poison(routes: EngineRoutes, label: str) -> None:
    """End every request, then label the weights as torn, so that no span carries that label; the server stays paused.

    Does nothing if the server cannot be reached.
    """
    with contextlib.suppress(InflightError):
        await _pause(routes, "retract")
        await routes.post("/abort_request", {"abort_all": True})
    await ignore_engine_errors(set_label(routes, label))


async def _pause(routes: EngineRoutes, mode: str) -> None:
    await routes.post("/pause_generation", {"mode": mode})


async def _flush(routes: EngineRoutes) -> bool:
    """Empty the prefix cache. Return False if requests are running, because SGLang then refuses to do so."""
    status, _ = await routes.ask("POST", "/flush_cache")
    return status == 200

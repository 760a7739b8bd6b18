"""Stopping and resuming an SGLang server's sampling, and the label by which it calls its weights. Knows no updates."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from inflight.engines.calls import quietly
from inflight.engines.routes import EngineRoutes
from inflight.errors import InflightError, UpdateRefusedError
from inflight.wire import InFlightPolicy

_POLL_S = 0.01
_ABORT_AGAIN_S = 0.1
_FLUSHES = 20
"""Attempts to empty the cache once everything is retracted."""


async def stop(routes: EngineRoutes, policy: InFlightPolicy, num_sent: Callable[[], int]) -> float:
    """Return when nothing is being sampled any more, as the policy says; return since when (`time.monotonic`).

    ``num_sent`` counts the requests of this client that are not answered. After a failure sampling may be paused.
    """
    if policy in (InFlightPolicy.DRAIN, InFlightPolicy.ABORT):
        return await _stop_when_idle(routes, num_sent, abort=policy is InFlightPolicy.ABORT)
    await _pause(routes, "in_place" if policy is InFlightPolicy.KEEP else "retract")
    # The pause is answered before the scheduler has seen it. It answers this one, when the step has ended.
    is_empty = await _flush(routes)
    held_since = time.monotonic()
    if policy is InFlightPolicy.RECOMPUTE:
        for _ in range(_FLUSHES):
            if is_empty:
                break
            await asyncio.sleep(_POLL_S)
            is_empty = await _flush(routes)
        if not is_empty:
            raise UpdateRefusedError("SGLang did not empty its cache: running requests would keep what is in it")
    return held_since


async def _stop_when_idle(routes: EngineRoutes, num_sent: Callable[[], int], *, abort: bool) -> float:
    """Pause once no request runs; with ``abort``, end them all. Requests of other clients count too."""
    aborted_at = 0.0
    while True:
        if abort and time.monotonic() > aborted_at + _ABORT_AGAIN_S:
            await routes.post("/abort_request", {"abort_all": True})
            aborted_at = time.monotonic()
        if num_sent() == 0 and await _flush(routes):
            await _pause(routes, "in_place")
            held_since = time.monotonic()
            if await _flush(routes):
                return held_since
            await go_on(routes)  # another client's request came in between
        await asyncio.sleep(_POLL_S)


async def go_on(routes: EngineRoutes) -> None:
    """Sample again."""
    await routes.post("/continue_generation", {"torch_empty_cache": False})


async def set_label(routes: EngineRoutes, label: str) -> None:
    """Call the weights so: tokens that are sampled from now on carry it."""
    await routes.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})


async def poison(routes: EngineRoutes, label: str) -> None:
    """End every request, then label the weights, so that no span names it; the server stays paused.

    A server that cannot be reached any more has no weights to label.
    """
    with contextlib.suppress(InflightError):
        await _pause(routes, "retract")
        await routes.post("/abort_request", {"abort_all": True})
    await quietly(set_label(routes, label))


async def _pause(routes: EngineRoutes, mode: str) -> None:
    await routes.post("/pause_generation", {"mode": mode})


async def _flush(routes: EngineRoutes) -> bool:
    """Empty the prefix cache; False if requests are running, which SGLang refuses."""
    status, _ = await routes.ask("POST", "/flush_cache")
    return status == 200

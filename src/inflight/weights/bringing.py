"""One endpoint's way to a new version: it accepts the update, receives every bucket, and commits.

A publish does this with all of its endpoints at once, a follower with one. It knows the Protocols only.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from inflight.contracts import InferenceEndpoint
from inflight.errors import DeadlineError, InflightError, PoisonedError, UnreachableError, UpdateRefusedError
from inflight.types import EndpointReport, Outcome
from inflight.wire import BucketTransfer, EndpointState, UpdateRef, WeightUpdate, WeightVersion

T = TypeVar("T")

_CLEAN_UP_S = 3.0
"""How long an endpoint may take to say what it serves once its update has failed."""
_REPEAT_PAUSES_S = (0.05, 0.2)
"""Pauses before a call without an answer is made again; calls of a named session are idempotent."""


async def nobody_else() -> None:
    """Return at once: an endpoint that is brought by itself meets nobody."""


def in_words(cause: InflightError | None) -> str:
    """Return why an endpoint that is brought by itself could not go on."""
    return "the deadline passed" if cause is None else str(cause)


async def bring(
    endpoint: InferenceEndpoint,
    update: WeightUpdate,
    transfers: AsyncGenerator[BucketTransfer, None],
    limit: asyncio.Timeout,
    *,
    meet: Callable[[], Awaitable[None]] = nobody_else,
    on_failure: Callable[[InflightError | None], str] = in_words,
) -> EndpointReport:
    """Bring one endpoint to an update, and return what became of it.

    ``meet`` is awaited twice: after the endpoint has accepted, and after it has received every bucket. ``limit`` ends
    the attempt at a deadline, which whoever made it may bring forward. ``on_failure`` learns at once why the endpoint
    cannot go on (None: others ended the attempt) and returns that in words. After a failure the update is aborted.
    """
    is_asked = is_committing = False
    cause: InflightError | None = None
    deadline = limit.when() or math.inf

    async def ask(call: Callable[[], Awaitable[T]]) -> T:
        nonlocal is_asked
        is_asked = True
        answer = await repeated(call)
        is_asked = False
        return answer

    try:
        async with limit:
            await ask(lambda: endpoint.request_weight_update(update))
            await meet()
            async with contextlib.aclosing(transfers):
                async for transfer in transfers:
                    await ask(lambda transfer=transfer: endpoint.receive_weights(transfer))  # type: ignore[misc]
            await meet()
            is_committing = True
            answer = await ask(lambda: endpoint.commit_weight_update(update.ref))
            if serves(answer, update.ref):
                return EndpointReport(endpoint.name, Outcome.APPLIED, answer.version, timings=answer.last_update)
            cause = UpdateRefusedError(f"the commit left it {answer.state} at version {answer.version}")
    except InflightError as error:
        cause = error
    except TimeoutError:
        if is_asked and asyncio.get_running_loop().time() >= deadline:
            cause = DeadlineError("gave no answer before the deadline", endpoint.name)
    except BaseException:
        await released(endpoint, update.ref, None, "the publisher stopped")
        raise
    return await released(endpoint, update.ref, cause, on_failure(cause), is_committing=is_committing)


async def released(
    endpoint: InferenceEndpoint,
    ref: UpdateRef,
    cause: InflightError | None,
    detail: str,
    *,
    is_requested: bool = True,
    is_committing: bool = False,
) -> EndpointReport:
    """End an update on one endpoint that failed, and return what the endpoint serves.

    Takes a few seconds at most.
    """
    detail = detail.removeprefix(f"{endpoint.name}: ")
    outcome, version = Outcome.ABORTED, None
    try:
        async with asyncio.timeout(_CLEAN_UP_S):
            answer = await _abort(endpoint, ref) if is_requested else await repeated(endpoint.weight_version)
    except (TimeoutError, DeadlineError) as error:
        return EndpointReport(endpoint.name, Outcome.TIMED_OUT, None, detail or str(error))
    except InflightError as error:
        return EndpointReport(endpoint.name, Outcome.UNREACHABLE, None, detail or str(error))
    version = answer.version
    if answer.state is EndpointState.POISONED or isinstance(cause, PoisonedError):
        outcome, version = Outcome.POISONED, None
    elif is_committing and serves(answer, ref):
        outcome = Outcome.APPLIED  # it committed, only its answer was lost
    elif isinstance(cause, UpdateRefusedError):
        outcome = Outcome.REFUSED
    return EndpointReport(endpoint.name, outcome, version, detail)


async def _abort(endpoint: InferenceEndpoint, ref: UpdateRef) -> WeightVersion:
    try:
        return await repeated(lambda: endpoint.abort_weight_update(ref))
    except UpdateRefusedError:  # another session holds it
        return await repeated(endpoint.weight_version)


def serves(answer: WeightVersion, ref: UpdateRef) -> bool:
    """Return whether an endpoint serves what a session brought. Endpoints may leave the session's name out."""
    if answer.state is not EndpointState.READY or answer.run_id is None:
        return False
    served = UpdateRef(run_id=answer.run_id, version=answer.version, session_id=answer.session_id)
    return served in (ref, ref.model_copy(update={"session_id": ""}))


async def repeated(call: Callable[[], Awaitable[T]]) -> T:
    """Return the answer of an idempotent call, which is made again if it gets none."""
    for pause_s in _REPEAT_PAUSES_S:
        try:
            return await call()
        except UnreachableError:
            await asyncio.sleep(pause_s)
    return await call()

"""One endpoint's part in an update, and questions to endpoints of which some may not answer.

A publish runs `bring` for all of its endpoints at once, a follower for one. It knows the Protocols only.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from inflight.contracts import InferenceEndpoint
from inflight.errors import DeadlineError, InflightError, PoisonedError, UnreachableError, UpdateRefusedError
from inflight.types import EndpointOutcome, EndpointReport
from inflight.wire import BucketTransfer, Capabilities, EndpointState, UpdateRef, WeightUpdate, WeightVersion

T = TypeVar("T")

ANSWER_S = 2.0
"""How long an endpoint may keep the others waiting for an answer that an idle endpoint gives in milliseconds."""
_CLEAN_UP_S = 3.0
"""How long an endpoint may take to say what it serves after its update has failed."""
_REPEAT_PAUSES_S = (0.05, 0.2)
"""Pauses before an unanswered call is repeated. Calls of a named session are idempotent."""


async def nobody_else() -> None:
    """Return at once: an endpoint updated alone waits for nobody."""


def in_words(cause: InflightError | None) -> str:
    """Return why an endpoint updated alone could not go on."""
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

    Awaits ``meet`` twice: after the endpoint has accepted, and after it has received every bucket. ``limit`` ends the
    attempt at a deadline, which its owner may bring forward. Calls ``on_failure`` as soon as the endpoint cannot go on,
    with the cause (None: others ended the attempt); it returns the cause in words. A failed update is aborted.
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
                return EndpointReport(
                    endpoint.name, EndpointOutcome.APPLIED, answer.version, timings=answer.last_update
                )
            cause = UpdateRefusedError(f"the commit left it {answer.state} at version {answer.version}")
    except InflightError as error:
        cause = error
    except TimeoutError:
        if is_asked and asyncio.get_running_loop().time() >= deadline:
            cause = DeadlineError("did not answer before the deadline", endpoint.name)
    except BaseException:
        await resumed(endpoint, update.ref, None, "the publisher stopped")
        raise
    return await resumed(endpoint, update.ref, cause, on_failure(cause), is_committing=is_committing)


async def resumed(
    endpoint: InferenceEndpoint,
    ref: UpdateRef,
    cause: InflightError | None,
    detail: str,
    *,
    is_requested: bool = True,
    is_committing: bool = False,
) -> EndpointReport:
    """End a failed update on one endpoint within a few seconds, and return what the endpoint serves."""
    detail = detail.removeprefix(f"{endpoint.name}: ")
    outcome, version = EndpointOutcome.ABORTED, None
    try:
        async with asyncio.timeout(_CLEAN_UP_S):
            answer = await _abort(endpoint, ref) if is_requested else await repeated(endpoint.weight_version)
    except (TimeoutError, DeadlineError) as error:
        return EndpointReport(endpoint.name, EndpointOutcome.TIMED_OUT, None, detail or str(error))
    except InflightError as error:
        return EndpointReport(endpoint.name, EndpointOutcome.UNREACHABLE, None, detail or str(error))
    version = answer.version
    if answer.state is EndpointState.POISONED or isinstance(cause, PoisonedError):
        outcome, version = EndpointOutcome.POISONED, None
    elif is_committing and serves(answer, ref):
        outcome = EndpointOutcome.APPLIED  # the commit succeeded, only its answer was lost
    elif isinstance(cause, UpdateRefusedError):
        outcome = EndpointOutcome.REFUSED
    return EndpointReport(endpoint.name, outcome, version, detail)


async def _abort(endpoint: InferenceEndpoint, ref: UpdateRef) -> WeightVersion:
    try:
        return await repeated(lambda: endpoint.abort_weight_update(ref))
    except UpdateRefusedError:  # another session holds it
        return await repeated(endpoint.weight_version)


def serves(answer: WeightVersion, ref: UpdateRef) -> bool:
    """Return whether an endpoint serves this session's weights. Endpoints may omit the session's name."""
    if answer.state is not EndpointState.READY or answer.run_id is None:
        return False
    served = UpdateRef(run_id=answer.run_id, version=answer.version, session_id=answer.session_id)
    return served in (ref, ref.model_copy(update={"session_id": ""}))


async def repeated(call: Callable[[], Awaitable[T]]) -> T:
    """Return the answer of an idempotent call, repeating the call if no answer comes."""
    for pause_s in _REPEAT_PAUSES_S:
        try:
            return await call()
        except UnreachableError:
            await asyncio.sleep(pause_s)
    return await call()


async def declared(endpoint: InferenceEndpoint) -> tuple[Capabilities, WeightVersion]:
    """Return what an endpoint declares and serves. A client may cache the former; the latter asks the server."""
    return await endpoint.capabilities(), await endpoint.weight_version()


async def answers(
    calls: Mapping[str, Callable[[], Coroutine[Any, Any, T]]], num_needed: int = 0, timeout_s: float = ANSWER_S
) -> dict[str, T | BaseException]:
    """Return what each call returned or raised. Calls that took too long are cancelled and left out.

    Each call has `ANSWER_S` seconds. If fewer than ``num_needed`` have answered by then, the others have up to
    ``timeout_s``.
    """
    tasks = {name: asyncio.ensure_future(call()) for name, call in calls.items()}
    pending = set(tasks.values())
    deadline = time.monotonic() + timeout_s
    left_s = min(ANSWER_S, timeout_s)
    wait_for = asyncio.ALL_COMPLETED
    try:
        while pending and left_s > 0:
            _, pending = await asyncio.wait(pending, timeout=left_s, return_when=wait_for)
            is_enough = len(tasks) - len(pending) >= num_needed
            left_s, wait_for = 0.0 if is_enough else deadline - time.monotonic(), asyncio.FIRST_COMPLETED
        done = {name: task for name, task in tasks.items() if task not in pending}
        return {name: task.exception() or task.result() for name, task in done.items()}
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

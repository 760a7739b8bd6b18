"""Updates one endpoint, and queries several endpoints, some of which may not answer."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from inflight.contracts import InferenceEndpoint
from inflight.errors import DeadlineError, InflightError, PoisonedError, UnreachableError, UpdateRefusedError
from inflight.types import EndpointOutcome, EndpointReport
from inflight.wire import BucketTransfer, Capabilities, EndpointState, UpdateRef, WeightUpdate, WeightVersion

T = TypeVar("T")

ANSWER_S = 2.0
"""How long, in seconds, to wait for an answer that an idle endpoint gives in milliseconds."""
_CLEAN_UP_S = 3.0
"""How long, in seconds, an endpoint may take to report what it serves after its update has failed."""
_RETRY_PAUSES_S = (0.05, 0.2)
"""Pauses, in seconds, before an unanswered call is retried. Calls of a named session are idempotent."""
_FIRST_TOKEN_WAIT_S = 0.05
_FIRST_TOKEN_POLL_S = 0.002


async def wait_for_no_one() -> None:
    """Return immediately, because an endpoint that is updated alone does not wait for others."""


def describe_cause(cause: InflightError | None) -> str:
    """Return why an update of a single endpoint failed."""
    return "the deadline passed" if cause is None else str(cause)


async def update_endpoint(
    endpoint: InferenceEndpoint,
    update: WeightUpdate,
    transfers: AsyncGenerator[BucketTransfer, None],
    limit: asyncio.Timeout,
    *,
    meet: Callable[[], Awaitable[None]] = wait_for_no_one,
    on_failure: Callable[[InflightError | None], str] = describe_cause,
) -> EndpointReport:
    """Update one endpoint, and return what it serves afterwards.

    Awaits the barrier ``meet`` twice: after the endpoint has accepted the update, and after it has received every
    bucket. ``limit`` ends the attempt at a deadline, which the owner of ``limit`` may reschedule to an earlier time. As
    soon as the endpoint has failed, this calls ``on_failure`` with the cause, or with None if ``limit`` ended the
    attempt through no fault of the endpoint; ``on_failure`` returns the cause as text. A failed update is aborted.
    """
    is_asked = is_committing = False
    cause: InflightError | None = None
    deadline = limit.when() or math.inf

    async def ask(call: Callable[[], Awaitable[T]]) -> T:
        nonlocal is_asked
        is_asked = True
        answer = await retry_unanswered(call)
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
        await abort_and_report(endpoint, update.ref, None, "the publisher stopped")
        raise
    return await abort_and_report(endpoint, update.ref, cause, on_failure(cause), is_committing=is_committing)


async def abort_and_report(
    endpoint: InferenceEndpoint,
    ref: UpdateRef,
    cause: InflightError | None,
    detail: str,
    *,
    is_requested: bool = True,
    is_committing: bool = False,
) -> EndpointReport:
    """Abort a failed update on one endpoint within a few seconds, and return what the endpoint serves."""
    detail = detail.removeprefix(f"{endpoint.name}: ")
    outcome, version = EndpointOutcome.ABORTED, None
    try:
        async with asyncio.timeout(_CLEAN_UP_S):
            answer = await _abort(endpoint, ref) if is_requested else await retry_unanswered(endpoint.weight_version)
    except (TimeoutError, DeadlineError) as error:
        return EndpointReport(endpoint.name, EndpointOutcome.TIMED_OUT, None, detail or str(error))
    except InflightError as error:
        return EndpointReport(endpoint.name, EndpointOutcome.UNREACHABLE, None, detail or str(error))
    version = answer.version
    if answer.state is EndpointState.POISONED or isinstance(cause, PoisonedError):
        outcome, version = EndpointOutcome.POISONED, None
    elif is_committing and serves(answer, ref):
        outcome = EndpointOutcome.APPLIED  # the commit succeeded, but its answer was lost
    elif isinstance(cause, UpdateRefusedError):
        outcome = EndpointOutcome.REFUSED
    return EndpointReport(endpoint.name, outcome, version, detail)


async def _abort(endpoint: InferenceEndpoint, ref: UpdateRef) -> WeightVersion:
    try:
        return await retry_unanswered(lambda: endpoint.abort_weight_update(ref))
    except UpdateRefusedError:  # another session holds it
        return await retry_unanswered(endpoint.weight_version)


async def wait_for_first_token(endpoint: InferenceEndpoint, ref: UpdateRef, report: EndpointReport) -> EndpointReport:
    """Return the report of an applied update, with the time to its first token if that token is sampled in time."""
    with contextlib.suppress(TimeoutError, InflightError):
        async with asyncio.timeout(_FIRST_TOKEN_WAIT_S):
            while True:
                answer = await endpoint.weight_version()
                if not serves(answer, ref) or answer.last_update is None:
                    break
                report = replace(report, timings=answer.last_update)
                if answer.last_update.first_token_s is not None or not answer.num_running:
                    break
                await asyncio.sleep(_FIRST_TOKEN_POLL_S)
    return report


def serves(answer: WeightVersion, ref: UpdateRef) -> bool:
    """Return whether an endpoint serves this session's weights. Endpoints may omit the session name."""
    if answer.state is not EndpointState.READY or answer.run_id is None:
        return False
    served = UpdateRef(run_id=answer.run_id, version=answer.version, session_id=answer.session_id)
    return served in (ref, ref.model_copy(update={"session_id": ""}))


async def retry_unanswered(call: Callable[[], Awaitable[T]]) -> T:
    """Return the answer to an idempotent call, retrying the call if there is no answer."""
    for pause_s in _RETRY_PAUSES_S:
        try:
            return await call()
        except UnreachableError:
            await asyncio.sleep(pause_s)
    return await call()


async def query_endpoint(endpoint: InferenceEndpoint) -> tuple[Capabilities, WeightVersion]:
    """Return an endpoint's capabilities, which a client may cache, and what the server serves now."""
    return await endpoint.capabilities(), await endpoint.weight_version()


async def query_endpoints(
    calls: Mapping[str, Callable[[], Coroutine[Any, Any, T]]], num_needed: int = 0, timeout_s: float = ANSWER_S
) -> dict[str, T | Exception]:
    """Return what each call returned or raised. Calls that take too long are cancelled and omitted.

    Each call has `ANSWER_S` seconds. If fewer than ``num_needed`` calls have ended by then, the others may take up to
    ``timeout_s`` seconds in total, until enough have ended.
    """
    answers: dict[str, T | Exception] = {}

    async def ask(name: str, call: Callable[[], Coroutine[Any, Any, T]]) -> None:
        try:
            answers[name] = await call()
        except Exception as error:  # the caller judges it
            answers[name] = error

    deadline = time.monotonic() + timeout_s
    left_s = min(ANSWER_S, timeout_s)
    wait_for = asyncio.ALL_COMPLETED
    async with asyncio.TaskGroup() as tasks:
        pending = {tasks.create_task(ask(name, call)) for name, call in calls.items()}
        while pending and left_s > 0:
            _, pending = await asyncio.wait(pending, timeout=left_s, return_when=wait_for)
            is_enough = len(answers) >= num_needed
            left_s, wait_for = 0.0 if is_enough else deadline - time.monotonic(), asyncio.FIRST_COMPLETED
        found = dict(answers)
        for task in pending:
            task.cancel()
    return found

"""Level faults, an update that fails while it is applied: into POISONED, what holds there, and out of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from inflight.conformance.checks import check, require
from inflight.conformance.endpoint.aftermath import SLACK_S, within
from inflight.conformance.endpoint.failing import Failure
from inflight.conformance.endpoint.holds import start
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.reference import Weights
from inflight.errors import EndpointError, PoisonedError
from inflight.wire import EndpointState, GenerateResponse, InFlightPolicy

LEVEL = "faults"
_FAILURES: tuple[Failure, ...] = ("instead", "afterwards")


@check(
    "U-37",
    needs=("updates", "failing"),
    deadline_s=60,
    look_at="give_up of the adapter: it ends what runs and what waits, whether sampling is held or goes on already; "
    "and that nothing but a commit makes weights whole",
)
async def in_and_out(subject: EndpointSubject) -> None:
    """When applying an update fails, the commit raises PoisonedError, every request ends, and the endpoint is POISONED:
    it refuses to generate, also after a further update is aborted, until a complete one is served."""
    reference = subject.reference
    turns = [reference.with_final_norm(-1.0, "B"), reference.weights]
    await subject.publisher.form_group()
    cases = [(policy, _FAILURES[i % 2], False) for i, policy in enumerate(subject.capabilities.in_flight_policies)]
    cases.append((cases[0][0], _FAILURES[1], subject.capabilities.staging))
    for i, (policy, failure, staged) in enumerate(cases):
        what = f"an apply that failed under {policy}{', staged' if staged else ''} ({failure})"
        await _into(subject, reference.perturbed("torn", seed=i), policy, failure, what, staged=staged)
        await _require_poisoned(subject, f"after {what}")
        update = await subject.publisher.request(turns[i % 2])
        await subject.publisher.abort(update)
        await _require_poisoned(subject, f"after {what}, and after an update that was aborted")
        await subject.publisher.publish(turns[i % 2])
        await subject.require_state(EndpointState.READY, f"after {what}, and after a complete update")
        await subject.require_serves(turns[i % 2], f"after {what}, and after a complete update")


async def _into(
    subject: EndpointSubject, weights: Weights, policy: InFlightPolicy, failure: Failure, what: str, *, staged: bool
) -> None:
    """Have an apply fail under requests that run and under some that wait; require that all of them end."""
    publisher = subject.publisher
    running: list[Any] = []
    if policy in (InFlightPolicy.KEEP, InFlightPolicy.RECOMPUTE):
        running = [task for _, task in await subject.start_running(4)]
    update = await publisher.request(weights, in_flight=policy, staged=staged)
    longest = subject.capabilities.max_model_len - len(subject.prompt())  # so that none ends before all must
    waiting = [] if staged else [task for _, task in await start(subject, 2, longest)]
    await publisher.send(update, weights, 0)
    subject.failing.fails = failure
    commit = within(update.lease_s, subject.endpoint.commit_weight_update(update.ref), what)
    error = await subject.require_raises(commit, (PoisonedError,), what)
    subject.note(**{what: str(error)})
    await _require_ended(running, f"requests that ran during {what}")
    await _require_ended(waiting, f"requests that waited during {what}")


async def _require_ended(tasks: Sequence[asyncio.Task[GenerateResponse]], what: str) -> None:
    """Require that requests end at once, with what they have or with an error of the endpoint's."""
    if not tasks:
        return
    answers = await within(SLACK_S, asyncio.gather(*tasks, return_exceptions=True), what)
    for answer in answers:
        if isinstance(answer, BaseException):
            require(isinstance(answer, EndpointError), f"{what} raised {type(answer).__name__}: {answer}")
            continue
        reasons = {completion.finish_reason for completion in answer.completions}
        require(reasons == {"abort"}, f"{what} ended by {sorted(reasons)}: tokens were sampled from torn weights")


async def _require_poisoned(subject: EndpointSubject, when: str) -> None:
    """Require that the endpoint is POISONED, runs nothing and refuses to generate."""
    version = await subject.endpoint.weight_version()
    require(version.state is EndpointState.POISONED, f"{when}, the state is {version.state}, not poisoned")
    require(version.num_running == 0, f"{when}, {version.num_running} sequences are said to run")
    call = within(SLACK_S, subject.generate(), f"{when}, a request")
    await subject.require_raises(call, (PoisonedError,), f"{when}, a request")

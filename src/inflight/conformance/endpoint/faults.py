"""Level ``faults``: transfers that are missing, late or partial, and updates that fail while they are applied."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

from inflight.conformance.checks import check, look_at, require
from inflight.conformance.endpoint.aftermath import (
    require_all_whole,
    require_old_weights,
    require_recovers,
    wait_until_settled,
)
from inflight.conformance.endpoint.failing import Failure
from inflight.conformance.endpoint.kinds import UpdateChain, supported_kinds
from inflight.conformance.endpoint.loras import SPEC as LORA
from inflight.conformance.endpoint.loras import make_lora, merge_lora
from inflight.conformance.endpoint.publishing import TRANSFER_TIMEOUT_S
from inflight.conformance.endpoint.releasing import require_nothing_answered
from inflight.conformance.endpoint.scoring import plain_request
from inflight.conformance.endpoint.subject import EndpointSubject, Running
from inflight.conformance.endpoint.waiting import SERVED_S, SLACK_S, SLOWNESS, within
from inflight.conformance.reference import ReferenceWeights
from inflight.contracts import ScoringEndpoint
from inflight.errors import (
    EndpointError,
    InflightError,
    PoisonedError,
    TransferError,
    UpdateAbortedError,
    UpdateRefusedError,
)
from inflight.wire import EndpointState, InFlightPolicy, ScoreResponse, WeightUpdate

LEVEL = "faults"
_SHORT_S = 0.7
"""Timeout for calls that fail, and the lease of a pause whose publisher stops sending messages."""
_FAILURES: tuple[Failure, ...] = ("instead", "afterwards")
_LATE_S = 1.2
"""Delay of a slow sender, well within the timeout."""
_PAUSED_S = 2.4
"""Pause between two buckets, which is one and a half times the timeout of each transfer."""
_DEADLINES = "whether the message's timeout is passed to the collective, and whether a blocked call can be abandoned"


@check("U-40", "updates", deadline_s=30, look_at=_DEADLINES)
async def sender_never_joins(subject: EndpointSubject) -> None:
    """If the group is not formed, init_process_group raises TransferError within its timeout, and the endpoint keeps
    serving."""
    absent = subject.publisher.open_group(_SHORT_S)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # and does not listen
        unreachable = absent.model_copy(update={"master_address": "127.0.0.1", "master_port": probe.getsockname()[1]})
        for spec, what in ((absent, "a group that nobody else joins"), (unreachable, "a group without a store")):
            joining = subject.begin(subject.endpoint.init_process_group(spec))
            await require_all_whole(subject.start(1, 16), f"a request while the endpoint joins {what}")
            await subject.require_raises(joining, TransferError, f"joining {what}", _SHORT_S + SLACK_S)
    await require_old_weights(subject, "after groups that were not formed")
    await require_recovers(subject, "after groups that were not formed")


@check("U-41", "updates", deadline_s=30, look_at=_DEADLINES)
async def bucket_never_sent(subject: EndpointSubject) -> None:
    """If a bucket is not sent, receive_weights raises TransferError within its timeout."""
    publisher = subject.publisher
    update = await publisher.request(subject.reference.with_final_norm(-1.0, "B"))
    receiving = subject.endpoint.receive_weights(publisher.transfer(update, 0, _SHORT_S))
    what = f"receiving a bucket that is not sent within {_SHORT_S:g} s"
    await subject.require_raises(receiving, TransferError, what, _SHORT_S + SLACK_S)
    await require_old_weights(subject, "after a bucket that was not sent", may_be_torn=True)
    await require_recovers(subject, "after a bucket that was not sent")


@check("U-44", "updates", deadline_s=30, look_at=_DEADLINES)
async def slow_sender(subject: EndpointSubject) -> None:
    """A bucket arrives even if it is sent late, as long as that is within the timeout of its transfer, and even if the
    pause between the previous bucket and its transfer is longer than that timeout."""
    publisher, other = subject.publisher, subject.reference.with_final_norm(-1.0, "B")
    update = await publisher.request(other, bucket_bytes=other.size_bytes // 2)
    for index in range(len(update.buckets)):
        await publisher.send(update, other, index, delay_s=0.0 if index else _LATE_S)
    await publisher.commit(update)
    subject.note(delay_s=_LATE_S, timeout_s=TRANSFER_TIMEOUT_S)
    await subject.require_serves(other, "after an update whose sender was slow")
    third, timeout_s = subject.reference.perturbed("C", seed=2), _PAUSED_S / 1.5 * SLOWNESS.get()
    update = await publisher.request(third, bucket_bytes=third.size_bytes // 2)
    for index in range(len(update.buckets)):
        await publisher.send_bucket(update, publisher.bucket(update, third, index), timeout_s=timeout_s)
        await asyncio.sleep(_PAUSED_S * SLOWNESS.get() if index == 0 else 0.0)
    await publisher.commit(update)
    await subject.require_serves(third, "after an update whose publisher paused between two buckets")


@check("U-48", "updates", deadline_s=60)
@look_at("whether buckets are staged separately from the model, and what staging leaves for the next update")
async def torn_update(subject: EndpointSubject) -> None:
    """An update that ends after some of its buckets have arrived leaves no trace: the endpoint serves exactly the old
    weights, or is POISONED. If an update of any kind ends after all of its buckets have arrived, the next update
    applies nothing from it."""
    publisher, other = subject.publisher, subject.reference.perturbed("B")
    running, is_poisoned, short_s = subject.start(2, 32), False, _SHORT_S * SLOWNESS.get()
    for ending in ("an abort", "its lease"):
        lease_s = 20.0 if ending == "an abort" else short_s
        update = await publisher.request(other, bucket_bytes=other.size_bytes // 4, lease_s=lease_s)
        num_sent, last_message = len(update.buckets) // 2, time.monotonic()
        require(num_sent, "the update travels in one bucket")
        for index in range(num_sent):
            try:
                await publisher.send(update, other, index)
            except UpdateRefusedError:
                if ending == "an abort" or not index or time.monotonic() - last_message < lease_s:
                    raise
                break  # on a busy machine, the lease has ended already
            last_message = time.monotonic()
        subject.note(buckets=len(update.buckets), sent=num_sent)
        if ending == "an abort":
            await publisher.abort(update)
        when = f"after half of an update, ended by {ending}"
        await require_old_weights(subject, when, seconds=short_s + SLACK_S, may_be_torn=True)
        is_poisoned |= (await subject.endpoint.weight_version()).state is EndpointState.POISONED
        publisher.lose_group()
    what = "a request that runs while updates end halfway"
    if is_poisoned:  # no weights are left to sample it from
        ended = asyncio.gather(*(task for _, task in running), return_exceptions=True)
        await within(SERVED_S, ended, what)
    else:
        await require_all_whole(running, what)
    third = subject.reference.perturbed("C", seed=2)
    await publisher.publish(third, bucket_bytes=third.size_bytes // 4)
    await subject.require_serves(third, "after a complete update")
    await publisher.publish(subject.reference.weights, keep=True)
    await _abort_each_kind(subject)


async def _abort_each_kind(subject: EndpointSubject) -> None:
    """Abort an update of each kind after it has fully arrived; require that later updates apply nothing from it."""
    reference, publisher, chain = subject.reference, subject.publisher, UpdateChain(subject)
    served, norm, can = reference.weights, reference.final_norm, subject.capabilities
    frozen = tuple(name for name in served.tensors if name != norm)
    policy = can.in_flight_policies[0]
    for i, kind in enumerate(kind for kind in supported_kinds(subject, turn=2) if kind.encoding != "delta"):  # see U-18
        sent = await chain.send(kind, policy)
        await sent.publisher.abort(sent.update)
        sent.publisher.lose_group()
        when = f"after {kind.name} that was aborted once everything had arrived"
        if (await wait_until_settled(subject, when)).state is EndpointState.POISONED:
            continue
        await subject.require_serves(served, when)
        if can.partial_updates:
            served = reference.with_final_norm((2.0, 1.0)[i % 2], f"A with its final norm times {(2, 1)[i % 2]}")
            alone = ReferenceWeights("its final norm", {norm: served.tensors[norm]})
            await publisher.publish(alone, frozen=frozen, keep=True)
            await subject.require_serves(served, f"after an update of the final norm, {when}")
        if can.lora:
            base = served if can.partial_updates else reference.weights
            lora = make_lora(base, i, (".o_proj",))
            await publisher.publish(lora, lora=LORA)
            served = merge_lora(base, lora)
            await subject.require_serves(served, f"after a LoRA of other layers, {when}")


@check("U-49", "updates", deadline_s=30)
@look_at("whether the abort abandons the group, so that a blocked collective ends or is left behind")
async def abort_while_receiving(subject: EndpointSubject) -> None:
    """An abort from another connection ends a pending receive_weights, and both return at once."""
    publisher, other = subject.publisher, await subject.another_connection()
    update = await publisher.request(subject.reference.with_final_norm(-1.0, "B"))
    pending = subject.begin(subject.endpoint.receive_weights(publisher.transfer(update, 0, 3 * SLACK_S)))
    await asyncio.sleep(0.2)
    require(not pending.done(), "receive_weights returned although nothing was sent")
    since = time.monotonic()
    await within(SLACK_S, other.abort_weight_update(update.ref), "an abort while a bucket is awaited")
    what = "receiving a bucket of an update that was aborted"
    await subject.require_raises(pending, (TransferError, UpdateAbortedError), what)
    subject.note(**{"seconds until both had ended": time.monotonic() - since})
    await require_old_weights(subject, "after an abort while a bucket was awaited", may_be_torn=True)
    await require_recovers(subject, "after an abort while a bucket was awaited")


@check("U-37", "updates failing", deadline_s=60)
@look_at(
    "fail_requests of the adapter: it must end running and waiting requests, whether or not sampling is paused; and "
    "nothing but a commit may make weights whole"
)
async def in_and_out(subject: EndpointSubject) -> None:
    """When applying an update fails, the commit raises PoisonedError, every request ends, and the endpoint is POISONED:
    it refuses to generate, even after another update is aborted or a new group is formed, until a complete update is
    served."""
    reference, publisher = subject.reference, subject.publisher
    turns = [reference.with_final_norm(-1.0, "B"), reference.weights]
    await publisher.form_group()
    cases = [(policy, _FAILURES[i % 2], False) for i, policy in enumerate(subject.capabilities.in_flight_policies)]
    cases.append((cases[0][0], _FAILURES[1], subject.capabilities.staging))
    for i, (policy, failure, staged) in enumerate(cases):
        what = f"an apply that failed under {policy}{', staged' if staged else ''} ({failure})"
        await _poison(subject, reference.perturbed("torn", seed=i), policy, failure, what, staged=staged)
        await _require_poisoned(subject, f"after {what}")
        await publisher.abort(await publisher.request(turns[i % 2]))
        await _require_poisoned(subject, f"after {what}, and after an update that was aborted")
        if i == 0:
            await _require_nothing_heals(subject, turns[1], f"after {what}")
        await _require_parts_refused(subject, turns[i % 2], f"after {what}")
        await publisher.publish(turns[i % 2])
        await subject.require_state(EndpointState.READY, f"after {what}, and after a complete update")
        await subject.require_serves(turns[i % 2], f"after {what}, and after a complete update")


async def _require_nothing_heals(subject: EndpointSubject, weights: ReferenceWeights, when: str) -> None:
    """Require that an endpoint with torn weights answers no request of any kind, and that neither an expired lease, nor
    a new group, nor a release of memory makes it READY."""
    publisher = subject.publisher
    await require_nothing_answered(subject, PoisonedError, when)
    short_s = _SHORT_S * SLOWNESS.get()
    await publisher.request(weights, lease_s=short_s)
    await asyncio.sleep(1.5 * short_s)
    await wait_until_settled(subject, f"{when}, and after the lease of an update")
    await _require_poisoned(subject, f"{when}, and after the lease of an update expired")
    publisher.lose_group()
    await publisher.form_group()
    await _require_poisoned(subject, f"{when}, and after a new group was formed")
    if subject.capabilities.releases_memory:
        await subject.require_raises(subject.releasing.release_memory(), InflightError, f"{when}, a release of memory")
        with contextlib.suppress(InflightError):
            await subject.releasing.restore_memory()
        await _require_poisoned(subject, f"{when}, and after a release of memory was refused")


async def _require_parts_refused(subject: EndpointSubject, weights: ReferenceWeights, when: str) -> None:
    """Require that an endpoint whose weights may all be torn accepts neither a part of the weights nor a LoRA."""
    reference, calls = subject.reference, dict[str, WeightUpdate]()
    if subject.capabilities.partial_updates:
        alone = ReferenceWeights("its final norm", {reference.final_norm: weights.tensors[reference.final_norm]})
        frozen = tuple(name for name in weights.tensors if name != reference.final_norm)
        calls["an update in part"] = subject.publisher.announcement(alone, frozen=frozen)
    if subject.capabilities.lora:
        calls["a LoRA"] = subject.publisher.announcement(make_lora(weights, 1), lora=LORA)
    for what, update in calls.items():
        await subject.require_refused(subject.endpoint.request_weight_update(update), f"{what}, {when},")
        await _require_poisoned(subject, f"{when}, and after {what} was refused")


async def _poison(
    subject: EndpointSubject,
    weights: ReferenceWeights,
    policy: InFlightPolicy,
    failure: Failure,
    what: str,
    *,
    staged: bool,
) -> None:
    """Make an apply fail while some requests run and others wait; require that all of them end."""
    running: Running = []
    if policy in (InFlightPolicy.KEEP, InFlightPolicy.RECOMPUTE):
        running = await subject.start_running(4)
    update = await subject.publisher.request(weights, in_flight=policy, staged=staged)
    waiting = [] if staged else subject.start(2, subject.remaining_tokens())  # too long to end by themselves
    scores: list[asyncio.Task[ScoreResponse]] = []
    if isinstance(subject.endpoint, ScoringEndpoint) and subject.capabilities.scoring and not staged:
        scores = [subject.begin(subject.endpoint.score(plain_request(subject, subject.prompt(), 1)))]
    await subject.publisher.send(update, weights, 0)
    assert subject.can_fail is not None
    subject.can_fail.fails = failure
    commit = subject.endpoint.commit_weight_update(update.ref)
    await subject.require_raises(commit, PoisonedError, what, update.lease_s)
    await _require_ended(running, f"requests that ran during {what}")
    await _require_ended(waiting, f"requests that waited during {what}")
    waited = f"a score request that waited during {what}"
    for answer in await within(SLACK_S, asyncio.gather(*scores, return_exceptions=True), waited):
        # If the commit fails at its very end, the adapter may already have resumed sampling.
        has_ended = isinstance(answer, EndpointError | ScoreResponse)
        require(has_ended, f"{waited} ended with {answer!r}, not with an EndpointError")


async def _require_ended(running: Running, what: str) -> None:
    """Require that requests end immediately, with the tokens sampled so far or with an `EndpointError`."""
    answers = await within(SLACK_S, asyncio.gather(*(task for _, task in running), return_exceptions=True), what)
    for answer in answers:
        if isinstance(answer, BaseException):
            require(isinstance(answer, EndpointError), f"{what} raised {type(answer).__name__}: {answer}")
            continue
        reasons = {completion.finish_reason for completion in answer.completions}
        require(
            reasons == {"abort"}, f"{what} ended with reasons {sorted(reasons)}: tokens were sampled from torn weights"
        )


async def _require_poisoned(subject: EndpointSubject, when: str) -> None:
    """Require that the endpoint is POISONED, runs nothing and refuses to generate."""
    version = await subject.endpoint.weight_version()
    require(version.state is EndpointState.POISONED, f"{when}, the state is {version.state}, not poisoned")
    require(version.num_running == 0, f"{when}, num_running is {version.num_running}, not 0")
    await subject.require_raises(subject.generate(), PoisonedError, f"{when}, a request")

"""Level ``control``: which control calls are accepted in which state, and what they return."""

from __future__ import annotations

import asyncio

from inflight.conformance.checks import check, look_at, require
from inflight.conformance.endpoint.aftermath import (
    require_all_sampled_from,
    require_all_whole,
    require_old_weights,
    require_serving,
)
from inflight.conformance.endpoint.publishing import SteppedPublisher
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.endpoint.waiting import GRACE_S, SLACK_S
from inflight.conformance.reference import ReferenceWeights
from inflight.wire import EndpointState, WeightUpdate, WeightVersion

LEVEL = "control"
_LEASE_S = 1.2
_PAUSE_S = 0.7
"""Time between two messages: shorter than the lease, but more than half of it."""
_SEEN_LENGTH = 64
"""Length of a prompt that is sent again. Engines cache whole pages of 16 tokens or more."""
_STATES = (
    "the transitions of docs/contract.md: which call is allowed in which state; a refused call must change no state"
)


@check("E-37", "updates", look_at=_STATES)
async def second_request_refused(subject: EndpointSubject) -> None:
    """While an update is open, every other request_weight_update is refused, and the open update can be completed."""
    publisher, other = subject.publisher, subject.reference.with_final_norm(-1.0, "B")
    update = await publisher.request(other)
    waiting = subject.start(1, 16)
    for version, what in ((update.version + 1, "a later version"), (update.version, "the same version again")):
        second = publisher.announcement(other, version=version)
        call = subject.endpoint.request_weight_update(second)
        await subject.require_refused(call, f"while an update is open, {what}")
        await require_open(subject, update, f"after {what} was refused")
    await asyncio.sleep(GRACE_S)
    require(not waiting[0][1].done(), "a request was answered during a pause, after another update was refused")
    await publisher.complete(update, other)
    await require_all_sampled_from(subject, other, waiting, "a request that waited while another update was refused")
    await subject.require_serves(other, "after the first update was committed")


@check("E-38", "updates", look_at=_STATES)
async def nothing_requested(subject: EndpointSubject) -> None:
    """Unless an update was requested, receive_weights and commit_weight_update are refused."""
    publisher, other = subject.publisher, subject.reference.with_final_norm(-1.0, "B")
    update = publisher.announcement(other)
    for when in ("before any group", "with a group"):
        for call, what in (
            (subject.endpoint.receive_weights(publisher.transfer(update, 0)), "receive_weights"),
            (subject.endpoint.commit_weight_update(update.ref), "commit_weight_update"),
        ):
            await subject.require_refused(call, f"{what} without a requested update, {when},")
        await require_old_weights(subject, f"after calls without a requested update, {when}")
        await publisher.form_group()


@check("E-39", "updates", look_at=_STATES)
async def early_commit(subject: EndpointSubject) -> None:
    """A commit that comes before all buckets have arrived is refused and does not end the update."""
    publisher, other = subject.publisher, subject.reference.with_final_norm(-1.0, "B")
    update = await publisher.request(other, bucket_bytes=other.size_bytes // 3)
    num_buckets = len(update.buckets)
    for index in range(num_buckets):
        if index in (0, num_buckets - 1):
            what = f"a commit with {index} of {num_buckets} buckets"
            await subject.require_refused(subject.endpoint.commit_weight_update(update.ref), what)
            await require_open(subject, update, f"after {what} was refused")
        await publisher.send(update, other, index)
    await publisher.commit(update)
    await subject.require_serves(other, f"after a commit with {num_buckets} of {num_buckets} buckets")


@check("E-40", "updates", look_at="whether versions are compared within a run, and with < instead of <=")
async def versions_never_go_back(subject: EndpointSubject) -> None:
    """A version of the same run that is lower than the served one is refused; the served version may be published
    again, even with other weights; requests then use nothing that was computed with the previous weights."""
    publisher, reference = subject.publisher, subject.reference
    prompt = subject.prompt(min(_SEEN_LENGTH, subject.context_len // 2))
    other = reference.perturbed("B")  # weights whose keys and values differ too
    for _ in range(2):
        await publisher.publish(reference.weights)
    lower = subject.endpoint.request_weight_update(publisher.announcement(other, version=publisher.version - 1))
    await subject.require_refused(lower, "a version lower than the served one")
    await require_old_weights(subject, "after a version lower than the served one was refused")
    await subject.require_serves(reference.weights, "before the served version is published again", prompt)
    answer, version = await publisher.publish(other, version=publisher.version), publisher.version
    require(answer.version == version, f"version {version} was published again, but {answer.version} is served")
    when = "after the served version was published again with other weights"
    await subject.require_serves(other, f"{when}, for a prompt not seen before")
    await subject.require_serves(other, f"{when}, for a prompt seen before", prompt)


@check("E-41", "updates")
@look_at("whether the run of the group that was formed last is remembered, and forgotten with the group")
async def foreign_run(subject: EndpointSubject) -> None:
    """An update of a run that does not own the weight group is refused."""
    publisher, other = subject.publisher, subject.reference.with_final_norm(-1.0, "B")

    async def refused(run: SteppedPublisher, whose: str) -> None:
        call = subject.endpoint.request_weight_update(run.announcement(other))
        await subject.require_refused(call, f"an update of {whose}")

    await refused(publisher, "a run with no group")
    await publisher.form_group()
    second = subject.another_publisher()
    await refused(second, "a run that does not own the group")
    await second.form_group()
    owner = (await subject.endpoint.weight_version()).owner_run_id
    require(owner == second.run_id, f"run {second.run_id!r} has formed the group, but {owner!r} is reported as owner")
    await refused(publisher, "the run that owned the group before")
    await require_old_weights(subject, "after updates of other runs were refused")
    answer, run_id = await second.publish(other), second.run_id
    require(answer.run_id == run_id, f"run {run_id} published, but run {answer.run_id!r} is reported as served")
    await subject.require_serves(other, "after the owner's update")


@check("E-42", "updates", look_at=_STATES)
async def repeated_abort(subject: EndpointSubject) -> None:
    """An abort without an open update returns the served version, and an abort of another update is refused."""
    publisher, other, endpoint = subject.publisher, subject.reference.with_final_norm(-1.0, "B"), subject.endpoint
    await publisher.form_group()
    answer = await endpoint.abort_weight_update(publisher.announcement(other).ref)
    require_serving(answer, publisher.version, "an abort without an update")
    update = await publisher.request(other)
    wrong = update.ref.model_copy(update={"version": update.version + 1})
    await subject.require_refused(endpoint.abort_weight_update(wrong), "an abort of another version")
    await require_open(subject, update, "after an abort of another version was refused")
    wrong = update.ref.model_copy(update={"run_id": f"{update.run_id}-2"})
    await subject.require_refused(endpoint.abort_weight_update(wrong), "an abort of another run")
    await require_open(subject, update, "after an abort of another run was refused")
    for what in ("an abort", "the same abort again"):
        require_serving(await publisher.abort(update), publisher.version, what)
    await require_old_weights(subject, "after an update was aborted twice")
    await publisher.publish(other)
    answer = await publisher.abort(publisher.announcement(other, version=publisher.version).ref)
    require_serving(answer, publisher.version, "an abort of a committed update")
    await subject.require_serves(other, "after an abort of a committed update")


@check("E-43", "updates", deadline_s=45, look_at="the timer that aborts the update, and the calls that restart it")
async def lease(subject: EndpointSubject) -> None:
    """When its lease expires, a pause ends on its own, with the old weights, even if all buckets have arrived; every
    accepted call of the update, including repeated ones, renews the lease."""
    publisher, other = subject.publisher, subject.reference.with_final_norm(-1.0, "B")
    for staged in (False, True) if subject.capabilities.staging else (False,):
        options = {"staged": staged, "lease_s": _LEASE_S, "bucket_bytes": other.size_bytes // 2}
        update = await publisher.request(other, **options)
        for index in range(len(update.buckets)):
            await asyncio.sleep(_PAUSE_S)
            await publisher.send(update, other, index)
        await asyncio.sleep(_PAUSE_S)
        await publisher.commit(update)
        await publisher.publish(subject.reference.weights)

    update = await publisher.request(other, lease_s=_LEASE_S)
    waiting = subject.start(1, 16)
    await require_old_weights(subject, f"after a lease of {_LEASE_S:g} s had expired", seconds=_LEASE_S + SLACK_S)
    await require_all_whole(waiting, "a request that waited for a lease to expire")
    await subject.require_refused(publisher.commit(update), "a commit after the lease")
    await _repeated_calls_renew(subject, other)
    await _lease_of_a_complete_update(subject, other)


async def _repeated_calls_renew(subject: EndpointSubject, weights: ReferenceWeights) -> None:
    """Require that repeated calls of a named session renew its lease: the lease is longer than the time between any two
    calls, but would expire without the repeated ones."""
    publisher, endpoint = subject.publisher, subject.endpoint
    update = await publisher.request(weights, session_id="repeated", lease_s=_LEASE_S)
    await asyncio.sleep(_PAUSE_S)
    await endpoint.request_weight_update(update.model_copy())
    await asyncio.sleep(_PAUSE_S)
    await require_open(subject, update, f"{_PAUSE_S:g} s after request_weight_update was repeated")
    await publisher.send_all(update, weights)
    await asyncio.sleep(_PAUSE_S)
    await endpoint.receive_weights(publisher.transfer(update, 0))
    await asyncio.sleep(_PAUSE_S)
    await require_open(subject, update, f"{_PAUSE_S:g} s after a bucket that had arrived was repeated")
    await publisher.commit(update)
    await publisher.publish(subject.reference.weights)


async def _lease_of_a_complete_update(subject: EndpointSubject, weights: ReferenceWeights) -> None:
    """Require that an update whose buckets have all arrived, but that is not committed, ends when its lease expires."""
    update = await subject.publisher.request(weights, lease_s=_LEASE_S, bucket_bytes=weights.size_bytes // 2)
    await subject.publisher.send_all(update, weights)
    when = f"after the lease of {_LEASE_S:g} s of an update whose buckets had all arrived"
    await require_old_weights(subject, when, seconds=_LEASE_S + SLACK_S, may_be_torn=True)
    await subject.require_refused(subject.publisher.commit(update), f"a commit {when}")


@check("E-44", "updates")
@look_at("what weight_version returns while an update is open, and whether a commit returns after the switch")
async def answers_name_what_is_served(subject: EndpointSubject) -> None:
    """weight_version reports paused, then updating, and the version of the update; the commit returns ready, the
    version and the run."""
    publisher, other, endpoint = subject.publisher, subject.reference.with_final_norm(-1.0, "B"), subject.endpoint
    before = await endpoint.weight_version()
    update = await publisher.request(other, bucket_bytes=other.size_bytes // 2)
    found = await require_open(subject, update, "after the pause")
    require(found.state is EndpointState.PAUSED, f"after the pause the state is {found.state}, not paused")
    for index in range(len(update.buckets)):
        require(found.version == before.version, f"before the commit, version {found.version} is reported as served")
        await publisher.send(update, other, index)
        found = await require_open(subject, update, f"after bucket {index}")
        require(found.state is EndpointState.UPDATING, f"after bucket {index} the state is {found.state}, not updating")
    answer = await publisher.commit(update)
    require_serving(answer, update.version, "the commit")
    later = await endpoint.weight_version()
    require_serving(later, update.version, "weight_version")
    subject.note(commit=answer.model_dump(mode="json"))
    require(
        answer.run_id == later.run_id == update.run_id,
        f"run {update.run_id} was committed; the commit names {answer.run_id!r}, weight_version {later.run_id!r}",
    )


async def require_open(subject: EndpointSubject, update: WeightUpdate, when: str) -> WeightVersion:
    """Require that this update is the open one; return the endpoint's answer."""
    version = await subject.endpoint.weight_version()
    require(
        version.state in (EndpointState.PAUSED, EndpointState.UPDATING) and version.updating_to == update.version,
        f"{when}, the state is {version.state} (updating to {version.updating_to}), "
        f"and the update to version {update.version} should be open",
    )
    return version

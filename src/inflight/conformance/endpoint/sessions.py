"""Level control, sessions with names and trainers that are replaced: calls that are repeated, late, or of nobody."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from inflight.conformance.checks import check, fail, require
from inflight.conformance.endpoint.aftermath import SLACK_S, require_old_weights, within
from inflight.conformance.endpoint.control import require_open
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.errors import FencedError, InflightError
from inflight.wire import UpdateRef, WeightUpdate, WeightVersion

LEVEL = "control"
T = TypeVar("T")
_NAMES = "whether run, version and session are remembered of what is open, what is served, and what is over"


@check("E-47", needs=("updates",), deadline_s=40, look_at=_NAMES)
async def repeated_calls(subject: EndpointSubject) -> None:
    """A call of a named session may be repeated: request, a bucket that has arrived, commit and abort change nothing
    the second time and are answered as the first time."""
    publisher, endpoint = subject.publisher, subject.endpoint
    other = subject.reference.with_final_norm(-1.0, "B")
    update = await publisher.request(other, session_id="first", bucket_bytes=other.size_bytes // 2)
    await _again(endpoint.request_weight_update(update.model_copy()), "request_weight_update")
    await require_open(subject, update, "after request_weight_update was repeated")
    for index in range(len(update.buckets)):
        await publisher.send(update, other, index)
        for arrived in range(index + 1):
            await _again(endpoint.receive_weights(publisher.transfer(update, arrived)), f"bucket {arrived}")
        await _again(endpoint.request_weight_update(update.model_copy()), f"request_weight_update after bucket {index}")
        await require_open(subject, update, f"after the calls up to bucket {index} were repeated")
    answer = await publisher.commit(update)
    _require_same(answer, await _again(endpoint.commit_weight_update(update.ref), "the commit"), "the commit")
    await subject.require_serves(other, "after a session whose calls were repeated")
    ended = await _again(endpoint.abort_weight_update(update.ref), "an abort of what was committed")
    _require_same(answer, ended, "an abort of what was committed")

    second = await publisher.request(subject.reference.weights, session_id="second")
    await publisher.send(second, subject.reference.weights, 0)
    aborted = await publisher.abort(second)
    _require_same(answer, aborted, "an abort of the next session")
    _require_same(aborted, await _again(publisher.abort(second), "the abort"), "the abort")
    await subject.require_serves(other, "after a session that was aborted twice")


@check("E-48", needs=("updates",), deadline_s=40, look_at=_NAMES)
async def late_calls(subject: EndpointSubject) -> None:
    """A call of a named session that was aborted is refused, also one that its abort has overtaken, and disturbs no
    update that is open."""
    publisher, endpoint = subject.publisher, subject.endpoint
    other = subject.reference.with_final_norm(-1.0, "B")
    bucket_bytes = other.size_bytes // 2
    first = await publisher.request(other, session_id="first", bucket_bytes=bucket_bytes)
    await publisher.send(first, other, 0)
    await publisher.abort(first)
    publisher.lose_group()
    await publisher.form_group()
    overtaken = publisher.announcement(other, session_id="overtaken")
    await publisher.abort(overtaken)
    await _require_refused(subject, endpoint.request_weight_update(overtaken), "a request that its abort has overtaken")
    for call, what in _calls(subject, first)[:3]:
        await _require_refused(subject, call(), f"{what} of a session that was aborted")
    await require_old_weights(subject, "after the calls of a session that was aborted")

    second = await publisher.request(other, session_id="second", bucket_bytes=bucket_bytes)
    for index in range(len(second.buckets)):
        for call, what in _calls(subject, first):
            await _require_refused(subject, call(), f"{what} of an aborted session, while the next one is open,")
            await require_open(subject, second, f"after {what} of an aborted session")
        await publisher.send(second, other, index)
    answer = await publisher.commit(second)
    require(
        (answer.version, answer.session_id) == (second.version, "second"),
        f"the commit of session 'second' names version {answer.version} and session {answer.session_id!r}",
    )
    await subject.require_serves(other, "after the second attempt")


def _calls(subject: EndpointSubject, update: WeightUpdate) -> list[tuple[Callable[[], Awaitable[object]], str]]:
    """Return the calls of a session; the last one is the abort."""
    endpoint, last = subject.endpoint, len(update.buckets) - 1
    return [
        (lambda: endpoint.request_weight_update(update), "request_weight_update"),
        (lambda: endpoint.receive_weights(subject.publisher.transfer(update, last)), "receive_weights"),
        (lambda: endpoint.commit_weight_update(update.ref), "commit_weight_update"),
        (lambda: endpoint.abort_weight_update(update.ref), "abort_weight_update"),
    ]


@check(
    "E-49",
    needs=("updates",),
    deadline_s=40,
    look_at="whether the epoch is looked at before anything of the open update is ended",
)
async def replaced_trainer(subject: EndpointSubject) -> None:
    """Once a later epoch of a run has called, init_process_group and request_weight_update of an earlier one raise
    FencedError, and the later one's group and update go on."""
    first, endpoint = subject.publisher, subject.endpoint
    other, third = subject.reference.with_final_norm(-1.0, "B"), subject.reference.with_final_norm(0.5, "C")
    earlier = subject.another_publisher(run_id=first.run_id, epoch=1)
    await earlier.publish(subject.reference.weights)
    later = subject.another_publisher(run_id=first.run_id, epoch=2)
    later.version = earlier.version
    update = await later.request(other, session_id="later", bucket_bytes=other.size_bytes // 2)
    calls: tuple[tuple[Callable[[], Awaitable[None]], str], ...] = (
        (lambda: endpoint.init_process_group(earlier.open_group(SLACK_S / 2)), "init_process_group"),
        (lambda: endpoint.request_weight_update(earlier.announcement(third)), "request_weight_update"),
    )
    for index in range(len(update.buckets)):
        for call, method in calls:
            what = f"{method} of an earlier epoch"
            error = await subject.require_raises(within(SLACK_S, call(), what), (FencedError,), what)
            subject.note(**{method: str(error)})
            await require_open(subject, update, f"after {what} was refused")
        await later.send(update, other, index)
    await later.commit(update)
    await subject.require_serves(other, "after the later epoch's update")
    found = await endpoint.weight_version()
    require(
        (found.owner_run_id, found.epoch) == (later.run_id, 2),
        f"epoch 2 of run {later.run_id!r} has taken over; epoch {found.epoch} of {found.owner_run_id!r} is named",
    )
    await later.publish(third)
    await subject.require_serves(third, "after the later epoch's next update, over the same group")


async def _again(call: Awaitable[T], what: str) -> T:
    """Return the answer of a call that was made before. It must come at once, and not be refused."""
    try:
        return await within(SLACK_S, call, f"{what}, repeated,")
    except InflightError as error:
        fail(f"{what}, repeated, raised {type(error).__name__} ({error}) where it changes nothing and is answered")


async def _require_refused(subject: EndpointSubject, call: Awaitable[object], what: str) -> None:
    await subject.require_refused(within(SLACK_S, call, what), what)


def _require_same(first: WeightVersion, again: WeightVersion, what: str) -> None:
    """Require that two answers say the same of what is served."""
    served = [(a.state, UpdateRef(run_id=a.run_id or "none", version=a.version), a.session_id) for a in (first, again)]
    require(served[0] == served[1], f"{what} answered {served[1]}, the call before it {served[0]}")

"""One publish, which updates all endpoints at the same time while the training thread supplies the buckets.

    request (refuse or accept) -> every bucket, verified on arrival -> commit (pause, apply, resume)

The endpoints wait for each other twice: nothing is sent before all have accepted, and nothing is committed before all
have received every bucket. As soon as too few endpoints remain, the publish ends for all of them, so that none waits
for further buckets.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from inflight.base.tasks import combine_failures
from inflight.contracts import InferenceEndpoint
from inflight.errors import ConfigError, FencedError, InflightError, UnsupportedError, UpdateAbortedError
from inflight.types import EndpointOutcome, EndpointReport, PublishReport, PublishSpans, WeightBucket
from inflight.weights.encode.bucket_bytes import bucket_transfer
from inflight.weights.send.endpoint_update import abort_and_report, update_endpoint, wait_for_first_token
from inflight.weights.send.weight_group import WeightGroup
from inflight.wire import BucketTransfer, Capabilities, InFlightPolicy, WeightUpdate

_REFUSAL_GRACE_S = 1.0
"""How long, in seconds, to wait for the other endpoints' answers to the request after one has refused it."""
_COLLECTIVE_GRACE_S = 0.1
"""How much longer than sending, in seconds, receiving may take: in a collective transfer, an endpoint may have to wait
for another endpoint.
"""
_SHARE_OF_PARTS = 0.9
"""Share of the remaining time within which an endpoint has to receive the parts of a bucket."""
CLOSED = (anyio.BrokenResourceError, anyio.ClosedResourceError)
"""The errors that sending raises once either end of a stream is closed."""


class Publish:
    """One attempt to update some endpoints, of which ``num_needed`` have to apply the update.

    The deadline starts when the attempt is created. With ``staged``, endpoints that support staging keep sampling while
    weights arrive.
    """

    def __init__(
        self,
        group: WeightGroup,
        endpoints: Mapping[InferenceEndpoint, Capabilities],
        update: WeightUpdate,
        *,
        deadline_s: float,
        num_needed: int,
        staged: bool,
    ) -> None:
        self._group = group
        self._endpoints = endpoints
        self._update = update
        self._num_needed = num_needed
        self._deadline_s = deadline_s
        self._deadline = time.monotonic() + deadline_s
        # A drain may fail, so every endpoint must pause before any endpoint commits.
        may_fail = update.in_flight is InFlightPolicy.DRAIN
        self._staged = {e.name for e, can in endpoints.items() if staged and can.staging and not may_fail}
        """The endpoints at which only the commit pauses sampling."""
        self._participants: dict[str, _Participant] = {}
        """The endpoints that still take part, by name."""
        self.buckets: MemoryObjectSendStream[WeightBucket | None]
        """The stream of buckets to send, with None after the last one. Sending to the stream returns when the previous
        bucket has been sent to the endpoints.
        """
        self._to_send: MemoryObjectReceiveStream[WeightBucket | None]
        self._sending: asyncio.Timeout | None = None
        self._unfit: dict[str, InflightError] = {}
        """Why endpoints could not join the group."""
        self._problem = ""
        """Why the publish has ended for all endpoints."""
        self._fenced: FencedError | None = None
        self._gate = _Gate()
        self._travelling = Stopwatch()
        self._num_sent_bytes = 0
        self._pause: tuple[float, float] | None = None
        """The times when the first endpoint was asked to pause and when the last endpoint resumed."""

    def encode(self, bucket: WeightBucket) -> WeightBucket:
        """Return a gathered bucket in the form in which it is sent. Called in the training thread."""
        return self._group.encoder.encode(bucket, self._update)

    async def prepare(self) -> None:
        """Form the group unless there is one, and begin the update on the sender. A failure appears in the report.

        Raises `ConfigError`, `UnsupportedError` or `FencedError` before any endpoint has received a request.
        """
        group, incarnation = self._group, self._update.incarnation
        self.buckets, self._to_send = anyio.create_memory_object_stream[WeightBucket | None](0)
        try:
            self._unfit = await group.form(self._endpoints, incarnation, self._remaining_s(), self._num_needed)
            self._update = await group.begin_update(self._update, self._remaining_s())
        except BaseException as error:
            if isinstance(error, InflightError) and not isinstance(error, ConfigError | UnsupportedError | FencedError):
                self._end(str(error))
                return
            self._close()
            raise

    def _close(self) -> None:
        self.buckets.close()
        self._to_send.close()
        for participant in self._participants.values():
            participant.feed.close()

    async def run(self) -> PublishReport:
        """Update every endpoint with the buckets sent to the stream, and report what each endpoint serves.

        If an endpoint reports that another trainer has taken over, raises `FencedError` once all endpoints have
        resumed.
        """
        updates: list[asyncio.Task[EndpointReport]] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                updates = [tasks.create_task(call) for call in self._calls()]
                tasks.create_task(self._send())
        except ExceptionGroup as group:
            raise combine_failures(group.exceptions) from group
        finally:
            self._gate.accepted.set()
            self._close()
        reports = tuple(task.result() for task in updates)
        is_everywhere = all(report.outcome is EndpointOutcome.APPLIED for report in reports)
        has_failed_late = any(
            r.outcome is not EndpointOutcome.APPLIED for r in reports if r.endpoint in self._participants
        )
        if has_failed_late and not self._problem:
            self._abort()
        elif not self._problem:
            self._group.end_update(self._update, is_applied_everywhere=is_everywhere)
        if self._fenced is not None:
            raise self._fenced
        return self._report(reports)

    async def wait_until_accepted(self) -> None:
        """Return once all endpoints have accepted (and paused, unless they stage the update) or the publish is over."""
        await self._gate.accepted.wait()

    async def end(self, problem: str) -> None:
        """End the publish for all endpoints. `run` returns when they have resumed."""
        self._end(problem)

    # ------------------------------------------------------------------------------------------------- the endpoints

    def _calls(self) -> Iterator[Coroutine[Any, Any, EndpointReport]]:
        """Yield one call per endpoint, to update it or, if it cannot take part, to ask what it serves."""
        grace_s = _COLLECTIVE_GRACE_S if self._group.sender.is_collective else 0.0
        able = [] if self._problem else [endpoint for endpoint in self._endpoints if endpoint.name not in self._unfit]
        for endpoint in able:
            feed, transfers = anyio.create_memory_object_stream[BucketTransfer](0)
            self._participants[endpoint.name] = _Participant(
                asyncio.timeout(self._remaining_s() + grace_s), feed, transfers
            )
        if any(endpoint.name not in self._staged for endpoint in able):
            self._begin_pause()
        for endpoint in self._endpoints:
            if endpoint in able:
                yield self._update_endpoint(endpoint, self._participants[endpoint.name])
            else:
                cause = self._unfit.get(endpoint.name)
                detail = self._problem if cause is None else str(cause)
                yield abort_and_report(endpoint, self._update.ref, cause, detail, is_requested=False)

    async def _update_endpoint(self, endpoint: InferenceEndpoint, participant: _Participant) -> EndpointReport:
        with participant.transfers:
            report = await update_endpoint(
                endpoint,
                self._update.model_copy(update={"staged": endpoint.name in self._staged}),
                self._transfers_of(participant),
                participant.limit,
                meet=self._meet,
                on_failure=functools.partial(self._drop, endpoint),
            )
        if self._pause is not None:
            self._pause = (self._pause[0], time.monotonic())
        is_applied = report.outcome is EndpointOutcome.APPLIED
        return await wait_for_first_token(endpoint, self._update.ref, report) if is_applied else report

    async def _transfers_of(self, participant: _Participant) -> AsyncGenerator[BucketTransfer, None]:
        with participant.transfers:
            async for transfer in participant.transfers:
                with self._travelling:
                    yield transfer

    async def _meet(self) -> None:
        """Return once every participant has reached this barrier.

        Raises `UpdateAbortedError` if the publish has ended.
        """
        self._gate.num_waiting += 1
        opened = self._gate.opened
        self._open_gate_if_all_wait()
        await opened.wait()
        if self._problem:
            raise UpdateAbortedError(self._problem)

    def _open_gate_if_all_wait(self) -> None:
        gate = self._gate
        if gate.num_waiting < len(self._participants):
            return
        if not self._problem:
            gate.num_meetings += 1
            self._gate.accepted.set()
        if gate.num_meetings == 2:
            self._begin_pause()
        gate.opened.set()
        gate.opened, gate.num_waiting = asyncio.Event(), 0

    def _drop(self, endpoint: InferenceEndpoint, cause: InflightError | None) -> str:
        """Continue without an endpoint if enough others remain and do not depend on it; otherwise end the publish."""
        if isinstance(cause, FencedError):
            self._fenced = cause
        why = str(cause or self._problem or f"the deadline of {self._deadline_s:g} s passed")
        if self._gate.num_meetings == 2:
            return why  # a failed commit does not prevent the commits of the others
        self._participants.pop(endpoint.name).feed.close()
        is_collective = self._group.sender.is_collective
        if self._fenced is not None or is_collective or len(self._participants) < self._num_needed:
            self._end(why if cause is None else f"another endpoint failed: {why}")
        elif not self._problem:
            self._group.remove(endpoint)
        self._open_gate_if_all_wait()
        return why

    def _end(self, problem: str) -> None:
        if self._problem:
            return
        self._problem = problem
        grace_s = _REFUSAL_GRACE_S if self._gate.num_meetings == 0 else 0.0
        limits = [self._sending, *(participant.limit for participant in self._participants.values())]
        for limit in filter(None, limits):
            with contextlib.suppress(RuntimeError):  # the limit has not begun, or has just ended
                limit.reschedule(asyncio.get_running_loop().time() + grace_s)
        self._abort()

    def _abort(self) -> None:
        with contextlib.suppress(InflightError):  # the failure that led here is the one to report
            self._group.abort_update()

    def _begin_pause(self) -> None:
        if self._pause is None:
            self._pause = (time.monotonic(), time.monotonic())

    # ---------------------------------------------------------------------------------------------------- the sender

    async def _send(self) -> None:
        """Send each bucket once the previous bucket has been sent, and ask every endpoint to receive it."""
        what = "the first bucket"
        try:
            async with asyncio.timeout(self._remaining_s()) as self._sending:
                while self._gate.num_meetings == 0:
                    if self._problem or not self._participants:
                        return
                    await self._gate.opened.wait()
                while (bucket := await self._to_send.receive()) is not None:
                    what = f"bucket {bucket.index} of {len(self._update.buckets)}"
                    self._num_sent_bytes += sum(spec.size_bytes for spec in bucket.specs)
                    self._num_sent_bytes += sum(sent.size_bytes or 0 for sent in bucket.others)
                    with self._travelling:
                        await self._send_one(bucket)
                for participant in self._participants.values():
                    participant.feed.close()
        except TimeoutError:
            self._end(f"{what} was not sent: the deadline of {self._deadline_s:g} s passed")
        except InflightError as error:
            self._end(f"{what} was not sent: {error}")

    async def _send_one(self, bucket: WeightBucket) -> None:
        """Send a bucket and ask every endpoint to receive it. Return once each has received the previous bucket."""
        timeout_s = self._remaining_s()
        # An endpoint knows for which of several senders it waits, so its error should arrive before the deadline.
        transfer = bucket_transfer(bucket, self._update.ref, timeout_s * (_SHARE_OF_PARTS if bucket.others else 1.0))

        async def offer(feed: MemoryObjectSendStream[BucketTransfer]) -> None:
            with contextlib.suppress(*CLOSED):  # the endpoint no longer takes part
                await feed.send(transfer)

        try:
            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(self._group.send(bucket, timeout_s))
                if not self._group.sender.is_collective:
                    await asyncio.wait([sending])  # endpoints read buckets once they are stored
                for participant in self._participants.values():
                    tasks.create_task(offer(participant.feed))
        except ExceptionGroup as group:
            raise combine_failures(group.exceptions) from group

    # ---------------------------------------------------------------------------------------------------- the report

    def _remaining_s(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def _report(self, reports: tuple[EndpointReport, ...]) -> PublishReport:
        timings = [report.timings for report in reports if report.timings is not None]
        return PublishReport(
            self._update.run_id,
            self._update.version,
            self._update.manifest.size_bytes,
            reports,
            PublishSpans(
                gather_s=0.0,
                pause_s=0.0 if self._pause is None else self._pause[1] - self._pause[0],
                wire_s=self._travelling.total_s,
                load_s=max((t.load_s for t in timings), default=0.0),
                first_token_s=max((t.first_token_s for t in timings if t.first_token_s is not None), default=None),
                total_s=time.monotonic() - self._deadline + self._deadline_s,
            ),
            num_needed=self._num_needed,
            sent_bytes=self._num_sent_bytes,
        )


@dataclass(slots=True)
class _Participant:
    """One endpoint's part in a publish: its time limit, and the stream of requests to receive buckets."""

    limit: asyncio.Timeout
    feed: MemoryObjectSendStream[BucketTransfer]
    transfers: MemoryObjectReceiveStream[BucketTransfer]


@dataclass(slots=True)
class _Gate:
    """A barrier at which the endpoints of a publish wait for each other."""

    opened: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the waiting endpoints may continue."""
    accepted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all endpoints have reached the barrier for the first time, or once the publish has ended."""
    num_waiting: int = 0
    num_meetings: int = 0


class Stopwatch:
    """Measures the total time during which the context is entered at least once."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._num_entered = 0
        self._started = 0.0

    def __enter__(self) -> None:
        if self._num_entered == 0:
            self._started = time.monotonic()
        self._num_entered += 1

    def __exit__(self, *_: object) -> None:
        self._num_entered -= 1
        if self._num_entered == 0:
            self.total_s += time.monotonic() - self._started

"""One publish: brings all endpoints to the update at the same time, while the training thread feeds the buckets.

    request (refuse or accept) -> every bucket, compared on arrival -> commit (pause, apply, go on)

`publish` gathers in the training thread; everything else runs in the publisher's event loop. The endpoints wait for
each other twice: nothing is sent before all have accepted, and nothing is committed before all have received
everything. As soon as too few endpoints are left, the publish ends for all of them, so that none waits for the rest of
the gathering.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from dataclasses import replace
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from inflight.base.threads import run_abandonable
from inflight.contracts import InferenceEndpoint, SendsFromDevice
from inflight.errors import ConfigError, FencedError, InflightError, UnsupportedError, UpdateAbortedError
from inflight.types import EndpointOutcome, EndpointReport, PublishReport, PublishSpans, WeightBucket
from inflight.weights.send.endpoint_update import ANSWER_S, bring, repeated, resumed, serves
from inflight.weights.send.gathering import outgoing_bucket, transfer_of
from inflight.weights.send.publisher import WeightPublisher
from inflight.wire import BucketTransfer, Capabilities, InFlightPolicy, WeightUpdate, WeightVersion

_Transfers = MemoryObjectReceiveStream[BucketTransfer]
_REFUSAL_GRACE_S = 1.0
"""How long the other endpoints may still answer the request after one refused it."""
_COLLECTIVE_GRACE_S = 0.1
"""How much later receiving ends than sending: in a collective, an endpoint may only be waiting for another one."""
_CLOSED = (anyio.BrokenResourceError, anyio.ClosedResourceError)
"""What sending raises once either end of a stream is closed."""
_FIRST_TOKEN_WAIT_S = 0.05
_FIRST_TOKEN_POLL_S = 0.002


def publish(
    publisher: WeightPublisher,
    endpoints: Mapping[InferenceEndpoint, Capabilities],
    update: WeightUpdate,
    gathered: Iterator[WeightBucket],
    deadline_s: float,
    num_needed: int,
) -> PublishReport:
    """Publish what is gathered to ``endpoints``, of which ``num_needed`` have to apply it.

    The deadline begins when the first bucket is gathered. Whatever the worker or an interrupt raises ends the publish
    on all endpoints before it is raised here.
    """
    gathering = _Clock()
    with gathering:
        bucket = next(gathered, None)
    session = PublishSession(publisher, endpoints, update, deadline_s, num_needed)
    publisher.run(session.prepare)
    running = publisher.start(session.run)
    try:
        with contextlib.suppress(*_CLOSED):  # the session has ended; its report says why
            while bucket is not None:
                with gathering:
                    parcel = session.parcel(bucket)
                publisher.run(session.parcels.send, parcel)
                with gathering:
                    bucket = next(gathered, None)
            publisher.run(session.parcels.send, None)
        report = running.result()
    except BaseException as error:
        publisher.run(session.end, f"{type(error).__name__} in the trainer")
        with contextlib.suppress(Exception):
            running.result()
        raise
    return replace(report, spans=replace(report.spans, gather_s=gathering.total_s))


class PublishSession:
    """What the endpoints of one publish share: the update, its deadline, who still takes part, and where they meet."""

    def __init__(
        self,
        publisher: WeightPublisher,
        endpoints: Mapping[InferenceEndpoint, Capabilities],
        update: WeightUpdate,
        deadline_s: float,
        num_needed: int,
    ) -> None:
        self._publisher = publisher
        self._endpoints = endpoints
        self._update = update
        self._num_needed = num_needed
        self._started = time.monotonic()
        self._deadline_s = deadline_s
        self._limits: dict[str, asyncio.Timeout] = {}
        """The time limit of each endpoint that still takes part."""
        self.parcels: MemoryObjectSendStream[WeightBucket | None]
        """Takes the buckets to send, None after the last. Sending one returns when the one before has left."""
        self._to_send: MemoryObjectReceiveStream[WeightBucket | None]
        self._feeds: list[MemoryObjectSendStream[BucketTransfer]] = []
        self._sending: asyncio.Timeout | None = None
        self._unfit: dict[str, InflightError] = {}
        """Why endpoints could not join the group."""
        self._problem = ""
        """Why the publish has ended for all."""
        self._fenced: FencedError | None = None
        self._gate = asyncio.Event()
        self._num_at_gate = self._num_meetings = 0
        self._travelling = _Clock()
        self._num_sent_bytes = 0
        self._pause_started: float | None = None
        self._pause_ended = 0.0

    def parcel(self, bucket: WeightBucket) -> WeightBucket:
        """Return a bucket as it travels. Called in the training thread."""
        publisher, snapshot, ref = self._publisher, self._publisher.snapshot, self._update.ref
        if snapshot is None:
            packed = publisher.packer.packed(bucket)
            sender = publisher.sender
            on_device = isinstance(sender, SendsFromDevice) and sender.sends_from_device
            return outgoing_bucket(packed, ref, encoding=publisher.encoding, on_device=on_device)
        delta = snapshot.encode(bucket.index, bucket.tensors, bucket.specs)
        if delta is None or self._update.base is None:
            return outgoing_bucket(bucket, ref, payload=snapshot.flat(bucket.index))
        return outgoing_bucket(bucket, ref, encoding="delta", payload=delta)

    async def prepare(self) -> None:
        """Form the group unless there is one, and begin the update on the sender; the report tells of a failure.

        Raises `ConfigError`, `UnsupportedError` and `FencedError`, before any endpoint was asked for anything.
        """
        self.parcels, self._to_send = anyio.create_memory_object_stream[WeightBucket | None](0)
        try:
            self._unfit = await self._publisher.form_group(self._endpoints, self._remaining_s(), self._num_needed)
            await self._choose_base()
            await self._publisher.begin_update(self._update, self._remaining_s())
        except BaseException as error:
            if isinstance(error, InflightError) and not isinstance(error, ConfigError | UnsupportedError | FencedError):
                self._end(str(error))
                return
            self._close()
            raise

    def _close(self) -> None:
        self.parcels.close()
        self._to_send.close()
        for feed in self._feeds:
            feed.close()

    async def run(self) -> PublishReport:
        """Bring every endpoint to the update with the buckets that are fed; return what each serves.

        If an endpoint says that another trainer has taken over, raises `FencedError` once all are resumed.
        """
        publisher = self._publisher
        brought: list[asyncio.Task[EndpointReport]] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                brought = [tasks.create_task(call) for call in self._calls()]
                tasks.create_task(self._send())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            self._close()
        reports = tuple(task.result() for task in brought)
        is_everywhere = all(report.outcome is EndpointOutcome.APPLIED for report in reports)
        has_failed_late = any(r.outcome is not EndpointOutcome.APPLIED for r in reports if r.endpoint in self._limits)
        if has_failed_late and not self._problem:
            self._give_up()
        elif not self._problem:
            publisher.end_update(is_done=is_everywhere)
        if is_everywhere and publisher.snapshot is not None:
            publisher.snapshot.applied(self._update.ref)
        if self._fenced is not None:
            raise self._fenced
        return self._report(reports)

    async def end(self, problem: str) -> None:
        """End the publish for all endpoints; `run` returns when they are resumed."""
        self._end(problem)

    # ------------------------------------------------------------------------------------------------- the endpoints

    def _calls(self) -> Iterator[Coroutine[Any, Any, EndpointReport]]:
        """Yield each endpoint's call, which brings it to the update, or asks what it serves if it cannot take part."""
        grace_s = _COLLECTIVE_GRACE_S if self._publisher.sender.is_collective else 0.0
        ref = self._update.ref
        able = [] if self._problem else [endpoint for endpoint in self._endpoints if endpoint.name not in self._unfit]
        self._limits = {endpoint.name: asyncio.timeout(self._remaining_s() + grace_s) for endpoint in able}
        if not all(self._is_staged(endpoint) for endpoint in able):
            self._pause_started = time.monotonic()
        for endpoint in self._endpoints:
            if endpoint in able:
                feed, transfers = anyio.create_memory_object_stream[BucketTransfer](0)
                self._feeds.append(feed)
                yield self._bring(endpoint, transfers)
            else:
                cause = self._unfit.get(endpoint.name)
                detail = self._problem if cause is None else str(cause)
                yield resumed(endpoint, ref, cause, detail, is_requested=False)

    async def _bring(self, endpoint: InferenceEndpoint, transfers: _Transfers) -> EndpointReport:
        with transfers:
            report = await bring(
                endpoint,
                self._update.model_copy(update={"staged": self._is_staged(endpoint)}),
                self._arriving(transfers),
                self._limits[endpoint.name],
                meet=self._meet,
                on_failure=functools.partial(self._fell_out, endpoint),
            )
        self._pause_ended = time.monotonic()
        return await self._with_first_token(endpoint, report) if report.outcome is EndpointOutcome.APPLIED else report

    async def _arriving(self, transfers: _Transfers) -> AsyncGenerator[BucketTransfer, None]:
        with transfers:
            async for transfer in transfers:
                with self._travelling:
                    yield transfer

    async def _meet(self) -> None:
        """Return once every endpoint that still takes part has arrived here. Raises `UpdateAbortedError` if all end."""
        self._num_at_gate += 1
        gate = self._gate
        self._open_gate_if_all_are_there()
        await gate.wait()
        if self._problem:
            raise UpdateAbortedError(self._problem)

    def _open_gate_if_all_are_there(self) -> None:
        if self._num_at_gate < len(self._limits):
            return
        if not self._problem:
            self._num_meetings += 1
        if self._num_meetings == 2 and self._pause_started is None:
            self._pause_started = time.monotonic()
        self._gate.set()
        self._gate, self._num_at_gate = asyncio.Event(), 0

    def _fell_out(self, endpoint: InferenceEndpoint, cause: InflightError | None) -> str:
        """Go on without an endpoint if enough others are left and do not depend on it; else end the publish for all."""
        if isinstance(cause, FencedError):
            self._fenced = cause
        why = str(cause or self._problem or f"the deadline of {self._deadline_s:g} s passed")
        if self._num_meetings == 2:
            return why  # a failed commit does not keep the others from theirs
        del self._limits[endpoint.name]
        is_collective = self._publisher.sender.is_collective
        if self._fenced is not None or is_collective or len(self._limits) < self._num_needed:
            self._end(why if cause is None else f"another endpoint failed: {why}")
        elif not self._problem:
            self._publisher.left_group(endpoint)
        self._open_gate_if_all_are_there()
        return why

    def _end(self, problem: str) -> None:
        if self._problem:
            return
        self._problem = problem
        grace_s = _REFUSAL_GRACE_S if self._num_meetings == 0 else 0.0
        limits = [*self._limits.values(), *([] if self._sending is None else [self._sending])]
        for limit in limits:
            with contextlib.suppress(RuntimeError):  # the limit has not begun, or has just ended
                limit.reschedule(asyncio.get_running_loop().time() + grace_s)
        self._give_up()

    def _give_up(self) -> None:
        with contextlib.suppress(InflightError):  # the failure that led here is the one to report
            self._publisher.sender.end(is_done=False)
        self._publisher.lose_group()

    async def _with_first_token(self, endpoint: InferenceEndpoint, report: EndpointReport) -> EndpointReport:
        with contextlib.suppress(TimeoutError, InflightError):
            async with asyncio.timeout(_FIRST_TOKEN_WAIT_S):
                while True:
                    answer = await endpoint.weight_version()
                    if not serves(answer, self._update.ref) or answer.last_update is None:
                        break
                    report = replace(report, timings=answer.last_update)
                    if answer.last_update.first_token_s is not None or not answer.num_running:
                        break
                    await asyncio.sleep(_FIRST_TOKEN_POLL_S)
        return report

    # ---------------------------------------------------------------------------------------------------- the sender

    async def _send(self) -> None:
        """Send each bucket once the one before has left, and ask every endpoint to receive it."""
        what = "the first bucket"
        try:
            async with asyncio.timeout(self._remaining_s()) as self._sending:
                while self._num_meetings == 0:
                    if self._problem or not self._limits:
                        return
                    await self._gate.wait()
                while (bucket := await self._to_send.receive()) is not None:
                    what = f"bucket {bucket.index} of {len(self._update.buckets)}"
                    self._num_sent_bytes += sum(spec.size_bytes for spec in bucket.specs)
                    with self._travelling:
                        await self._send_one(bucket)
                for feed in self._feeds:
                    feed.close()
        except TimeoutError:
            self._end(f"{what} was not sent: the deadline of {self._deadline_s:g} s passed")
        except InflightError as error:
            self._end(f"{what} was not sent: {error}")

    async def _send_one(self, bucket: WeightBucket) -> None:
        timeout_s = self._remaining_s()
        send = functools.partial(self._publisher.sender.send, bucket, timeout_s)
        sending = asyncio.ensure_future(run_abandonable(send, "inflight-send"))
        try:
            if not self._publisher.sender.is_collective:
                await sending  # endpoints read buckets once they are stored
            handing_over = asyncio.ensure_future(self._hand_over(bucket))
            try:
                await asyncio.gather(sending, handing_over)
            finally:
                handing_over.cancel()
        finally:
            sending.cancel()

    async def _hand_over(self, bucket: WeightBucket) -> None:
        """Ask every endpoint to receive a bucket; return when each has begun, and so finished the bucket before."""
        transfer = transfer_of(bucket, self._update.ref, self._remaining_s())

        async def give(feed: MemoryObjectSendStream[BucketTransfer]) -> None:
            with contextlib.suppress(*_CLOSED):  # the endpoint no longer takes part
                await feed.send(transfer)

        await asyncio.gather(*(give(feed) for feed in self._feeds))

    # ---------------------------------------------------------------------------------------------------- the update

    def _remaining_s(self) -> float:
        return max(0.001, self._started + self._deadline_s - time.monotonic())

    def _is_staged(self, endpoint: InferenceEndpoint) -> bool:
        """Return whether the commit pauses this endpoint. A drain may fail, so it must come before any commit."""
        may_fail = self._update.in_flight is InFlightPolicy.DRAIN
        return not may_fail and self._publisher.staged and self._endpoints[endpoint].staging

    async def _choose_base(self) -> None:
        """Make the update a delta if every endpoint has kept what the snapshot holds."""
        snapshot = self._publisher.snapshot
        if snapshot is None:
            return
        base = snapshot.ref
        if base is not None and snapshot.is_cut_as(self._update):
            answers = await asyncio.gather(
                *(asyncio.wait_for(repeated(e.weight_version), ANSWER_S) for e in self._endpoints),
                return_exceptions=True,
            )  # an endpoint that does not answer is asked again, for the update itself
            if all(isinstance(answer, WeightVersion) and answer.kept == base for answer in answers):
                self._update = self._update.model_copy(update={"base": base, "encodings": ("delta",)})
        self._update = self._update.model_copy(update={"keep": True})
        snapshot.begin(self._update)

    def _report(self, reports: tuple[EndpointReport, ...]) -> PublishReport:
        timings = [report.timings for report in reports if report.timings is not None]
        return PublishReport(
            self._update.run_id,
            self._update.version,
            self._update.manifest.size_bytes,
            reports,
            PublishSpans(
                gather_s=0.0,
                pause_s=0.0 if self._pause_started is None else max(0.0, self._pause_ended - self._pause_started),
                wire_s=self._travelling.total_s,
                load_s=max((t.load_s for t in timings), default=0.0),
                first_token_s=max((t.first_token_s for t in timings if t.first_token_s is not None), default=None),
                total_s=time.monotonic() - self._started,
            ),
            num_needed=self._num_needed,
            sent_bytes=self._num_sent_bytes,
        )


class _Clock:
    """Adds up the time during which it is entered at least once."""

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

"""One publish: the training thread gathers and hands buckets over; all that speaks to endpoints runs in the publisher's
event loop, which ends the session by itself as soon as it cannot succeed, so that no endpoint waits for the rest of
the gathering.

    request (refuse or accept) -> every bucket, compared on arrival -> commit (hold, apply, go on)

While the endpoints compare a bucket and answer, the next one travels already, where their transport takes it.
Nothing is committed anywhere before all of it has arrived and was compared everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from inflight.contracts import InferenceEndpoint
from inflight.errors import (
    ConfigError,
    DeadlineError,
    FencedError,
    InflightError,
    PoisonedError,
    TrainerError,
    UnreachableError,
    UnsupportedError,
    UpdateRefusedError,
)
from inflight.types import EndpointReport, Outcome, PublishReport, PublishSpans, WeightBucket
from inflight.weights.checksums import checksum, on_host
from inflight.weights.encoding import encode
from inflight.weights.packing import pack, unpack
from inflight.weights.publisher import ANSWER_S, WeightPublisher
from inflight.weights.staging import payload_spec
from inflight.weights.threads import run_abandonable
from inflight.wire import (
    BucketTransfer,
    Encoding,
    EndpointState,
    InFlightPolicy,
    TensorSpec,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
)

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_CLEAN_UP_S = 3.0
"""How long the endpoints are waited for once a session has failed."""
_REFUSAL_GRACE_S = 1.0
"""How long the other endpoints may still answer the request when one refused it."""
_REPEAT_PAUSES_S = (0.05, 0.2)
"""Before a call that got no answer is made again; calls of a session are idempotent."""
_FIRST_TOKEN_WAIT_S = 0.05
_FIRST_TOKEN_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class _Parcel:
    """One bucket as it travels; ``transfer`` is what the endpoints are told of it."""

    bucket: WeightBucket
    transfer: BucketTransfer


class PublishSession:
    """One publish. Methods that are async run in the publisher's event loop, the others in the training thread.

    ``update`` is what endpoints are asked for; whether it is staged, and whether it is a delta, is decided here.
    """

    def __init__(
        self, publisher: WeightPublisher, update: WeightUpdate, deadline_s: float, quorum: int | None = None
    ) -> None:
        self._publisher = publisher
        self._endpoints = publisher.members
        self._active = list(self._endpoints)
        self._num_needed = len(self._endpoints) if quorum is None else quorum
        self._update = update
        self._deadline_s = deadline_s
        self._started = time.monotonic()
        self._deadline = self._started + deadline_s
        self._pending: list[Future[None]] = []
        self._sent: Future[None] = Future()
        self._settled: asyncio.Event | None = None
        self._num_travelling = 0
        self._failures: dict[str, InflightError] = {}
        self._problem = ""
        self._is_requested = False
        self._failed = False
        self._committing = False
        self._fenced: FencedError | None = None
        self._reports: dict[str, EndpointReport] = {}
        self._num_gathered = 0
        self._num_sent_bytes = 0
        self._gather_s = 0.0
        self._wire_started = 0.0
        self._wire_s = 0.0
        self._hold_started: float | None = None
        self._hold_s = 0.0

    def publish(self, gathered: Iterator[WeightBucket]) -> PublishReport:
        """Run the session to its end, good or bad; what the worker or an interrupt raises ends it first."""
        try:
            bucket = self._gather(gathered)
            self._deadline = time.monotonic() + self._deadline_s
            self._join_group()
            self._begin()
            while bucket is not None and not self._failed:
                self._push(self._parcel(bucket))
                bucket = self._gather(gathered)
            self._wait_for_pending()
            if not self._failed:
                self._publisher.run(self._commit)
            if not self._failed:
                self._publisher.end_update(is_done=len(self._active) == len(self._endpoints))
        except BaseException as error:
            if self._is_requested:
                for pending in self._pending:
                    pending.cancel()
                self._problem = f"{type(error).__name__} in the trainer"
                self._publisher.run(self._end)
            raise
        if self._fenced is not None:
            raise self._fenced
        return self._report()

    # ------------------------------------------------------------------------------------------ in the training thread

    def _gather(self, gathered: Iterator[WeightBucket]) -> WeightBucket | None:
        """Return the next bucket, packed; None after the last. Raises `TrainerError` if it was not announced so."""
        started = time.monotonic()
        bucket = next(gathered, None)
        num_announced = len(self._update.buckets)
        if bucket is None and self._num_gathered != num_announced:
            raise TrainerError(f"the worker yielded {self._num_gathered} buckets, {num_announced} were asked for")
        if bucket is not None:
            _check(bucket, self._num_gathered, self._update)
            self._num_gathered += 1
            if self._publisher.snapshot is None:
                bucket = self._publisher.packer.packed(bucket)
        self._gather_s += time.monotonic() - started
        return bucket

    def _parcel(self, bucket: WeightBucket) -> _Parcel:
        """Return a bucket as it travels."""
        started = time.monotonic()
        ref = self._update.ref
        encoding, payload = self._encoded(bucket)
        host = on_host(payload)  # copied once, for the checksum and for the transports that send from there
        digest = checksum(host)
        payload = payload if self._publisher.backend == "nccl" else host
        is_raw = encoding == "raw"
        specs = bucket.specs if is_raw else (payload_spec(payload.numel()),)
        tensors = tuple(unpack(payload, specs)) if is_raw else (payload,)
        sent = WeightBucket(bucket.index, specs, tensors, encoding, digest, ref)
        transfer = BucketTransfer(
            run_id=ref.run_id,
            version=ref.version,
            session_id=ref.session_id,
            bucket_index=bucket.index,
            encoding=encoding,
            size_bytes=payload.numel(),
            checksum=digest,
            timeout_s=self._remaining_s(),
        )
        self._num_sent_bytes += payload.numel()
        self._gather_s += time.monotonic() - started
        return _Parcel(sent, transfer)

    def _encoded(self, bucket: WeightBucket) -> tuple[Encoding, torch.Tensor]:
        """Return how a bucket travels, and its bytes."""
        publisher, snapshot = self._publisher, self._publisher.snapshot
        if publisher.encoding != "raw":
            return publisher.encoding, encode(bucket.tensors, bucket.specs, publisher.encoding)
        if snapshot is None:
            return "raw", pack(bucket.tensors)
        changed = snapshot.encode(bucket.index, bucket.tensors, bucket.specs)
        if changed is None or self._update.base is None:
            return "raw", snapshot.flat(bucket.index)
        return "delta", changed

    def _join_group(self) -> None:
        try:
            self._failures |= self._publisher.ensure_group(self._remaining_s(), self._num_needed)
            if self._failures:
                self._publisher.run(self._leave_behind)
        except (ConfigError, UnsupportedError, FencedError):
            raise
        except InflightError as error:
            self._problem = str(error)
            self._publisher.run(self._end)

    def _begin(self) -> None:
        if self._failed:
            return
        self._publisher.run(self._choose_base)
        try:
            self._publisher.begin_update(self._update, self._remaining_s())
        except InflightError as error:
            self._problem = str(error)
            self._publisher.run(self._end)
            return
        self._is_requested = True
        if not all(self._is_staged(endpoint) for endpoint in self._endpoints):
            self._hold_started = time.monotonic()
        self._publisher.run(self._request)

    def _push(self, parcel: _Parcel) -> None:
        """Send a bucket while the next is gathered, as soon as the one before has left."""
        if self._pending:
            wait([self._sent, self._pending[-1]], return_when=FIRST_COMPLETED)
            self._wait_for_pending(1)
        if not self._failed:
            self._sent = Future()
            self._pending.append(self._publisher.start(self._transfer, parcel, self._sent))

    def _wait_for_pending(self, num_left: int = 0) -> None:
        """Return when no more than so many buckets are under way; raise what one raised that ended."""
        while len(self._pending) > num_left:
            self._pending.pop(0).result()

    def _remaining_s(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    # ---------------------------------------------------------------------------------------------- in the event loop

    def _is_staged(self, endpoint: InferenceEndpoint) -> bool:
        """Return whether the commit holds this endpoint. A drain may fail, and must before anything is committed."""
        if self._update.in_flight is InFlightPolicy.DRAIN:
            return False
        return self._publisher.staged and self._publisher.capabilities[endpoint.name].staging

    async def _choose_base(self) -> None:
        """Make the update a delta if every endpoint has kept what the snapshot holds."""
        snapshot = self._publisher.snapshot
        if snapshot is None:
            return
        base = snapshot.ref
        if base is not None and snapshot.is_cut_as(self._update):
            answers = await asyncio.gather(
                *(asyncio.wait_for(_repeated(e.weight_version), ANSWER_S) for e in self._active),
                return_exceptions=True,
            )  # who gives no answer is asked once more, for the update itself
            if all(isinstance(answer, WeightVersion) and answer.kept == base for answer in answers):
                self._update = self._update.model_copy(update={"base": base, "encodings": ("delta",)})
        self._update = self._update.model_copy(update={"keep": True})
        snapshot.begin(self._update)

    async def _request(self) -> None:
        """Ask every endpoint to accept; what has been refused so far was refused before anything was sent."""
        calls = [asyncio.ensure_future(self._request_one(endpoint)) for endpoint in self._active]
        if self._num_needed == len(self._endpoints) or self._publisher.sender.is_collective:
            _, pending = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                await asyncio.wait(pending, timeout=_REFUSAL_GRACE_S)
        else:
            await asyncio.wait(calls)
        await _cancelled(calls)
        _raise_what_is_no_answer(calls)
        await self._leave_behind()

    async def _request_one(self, endpoint: InferenceEndpoint) -> None:
        update = self._update.model_copy(update={"staged": self._is_staged(endpoint)})
        await self._ask(endpoint, lambda e: e.request_weight_update(update))

    async def _ask(self, endpoint: InferenceEndpoint, call: Callable[[InferenceEndpoint], Awaitable[T]]) -> T:
        """Return one endpoint's answer within the deadline; a failure is noted under its name, and raised."""
        try:
            async with asyncio.timeout(self._remaining_s()):
                return await _repeated(lambda: call(endpoint))
        except TimeoutError as error:
            late = DeadlineError("gave no answer before the publish's deadline", endpoint.name)
            self._failures.setdefault(endpoint.name, late)
            raise late from error
        except InflightError as error:
            self._failures.setdefault(endpoint.name, error)
            if isinstance(error, FencedError):
                self._fenced = error
            raise

    async def _transfer(self, parcel: _Parcel, sent: Future[None]) -> None:
        """Bring one bucket to every endpoint: it leaves at once, and is asked for when the one before is settled.

        ``sent`` is done when the bucket's memory is free, or the session has failed.
        """
        before, mine = self._settled, asyncio.Event()
        self._settled = mine
        if self._num_travelling == 0:
            self._wire_started = time.monotonic()
        self._num_travelling += 1
        timeout_s = self._remaining_s()
        sending = asyncio.ensure_future(self._send(parcel, timeout_s))
        sending.add_done_callback(lambda _: sent.set_result(None))
        try:
            if before is not None:
                await before.wait()
            if not self._failed:
                transfer = parcel.transfer.model_copy(update={"timeout_s": self._remaining_s()})
                await (self._broadcast if self._publisher.sender.is_collective else self._store)(sending, transfer)
        except BaseException:
            self._failed = True  # the training thread hears of it by the future of this call
            raise
        finally:
            self._num_travelling -= 1
            if self._num_travelling == 0:
                self._wire_s += time.monotonic() - self._wire_started
            mine.set()
            await _cancelled([sending])

    async def _broadcast(self, sending: asyncio.Future[None], transfer: BucketTransfer) -> None:
        """Have every endpoint receive a bucket that is being sent; the first failure, or the deadline, ends it all."""
        receiving = [
            asyncio.ensure_future(self._ask(e, lambda e: e.receive_weights(transfer))) for e in self._endpoints
        ]
        calls = [sending, *receiving]
        try:
            done, pending = await asyncio.wait(calls, timeout=transfer.timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await _cancelled(calls)
        _raise_what_is_no_answer(calls)
        if pending or any(call.exception() for call in done):
            errors = [error for call in done if (error := call.exception()) is not None]
            self._problem = f"bucket {transfer.bucket_index} of {len(self._update.buckets)} did not travel: " + (
                str(errors[0]) if errors else f"the deadline of {self._deadline_s:g} s passed"
            )
            await self._end()

    async def _store(self, sending: asyncio.Future[None], transfer: BucketTransfer) -> None:
        """Have every endpoint read a bucket once it is stored; who fails is left behind, if the others are enough."""
        try:
            async with asyncio.timeout(transfer.timeout_s):
                await sending
        except (TimeoutError, InflightError) as error:
            why = str(error) or f"the deadline of {self._deadline_s:g} s passed"
            self._problem = f"bucket {transfer.bucket_index} of {len(self._update.buckets)} was not stored: {why}"
            await self._end()
            return
        calls = [asyncio.ensure_future(self._ask(e, lambda e: e.receive_weights(transfer))) for e in self._active]
        if self._num_needed == len(self._endpoints):
            await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            failed = [call.exception() for call in calls if call.done() and call.exception() is not None]
            self._problem = "" if not failed else f"another endpoint failed: {failed[0]}"
        else:
            await asyncio.wait(calls)
        await _cancelled(calls)
        _raise_what_is_no_answer(calls)
        await self._leave_behind()

    async def _send(self, parcel: _Parcel, timeout_s: float) -> None:
        await run_abandonable(lambda: self._publisher.sender.send(parcel.bucket, timeout_s), "inflight-send")

    async def _leave_behind(self) -> None:
        """Go on without the endpoints that failed if the others are enough and need nothing of them; else end it."""
        failed = [endpoint for endpoint in self._active if endpoint.name in self._failures]
        if not failed:
            return
        left = [endpoint for endpoint in self._active if endpoint.name not in self._failures]
        if self._fenced is not None or self._publisher.sender.is_collective or len(left) < self._num_needed:
            await self._end()
            return
        self._active = left
        self._publisher.forget_group()  # who was left behind gave it up, and joins the next one
        await asyncio.gather(*(self._end_one(endpoint) for endpoint in failed))

    async def _commit(self) -> None:
        """Switch every endpoint; one that fails does not keep the others from switching."""
        self._committing = True
        if self._hold_started is None:
            self._hold_started = time.monotonic()
        calls = [asyncio.ensure_future(self._ask(e, self._commit_one)) for e in self._active]
        await asyncio.wait(calls)
        self._hold_s = time.monotonic() - self._hold_started
        _raise_what_is_no_answer(calls)
        if self._failures:
            await self._end()
        else:
            await self._note_first_tokens()
            if self._publisher.snapshot is not None and len(self._active) == len(self._endpoints):
                self._publisher.snapshot.applied(self._update.ref)

    async def _commit_one(self, endpoint: InferenceEndpoint) -> None:
        answer = await endpoint.commit_weight_update(self._update.ref)
        if not self._is_new(answer):
            raise UpdateRefusedError(f"the commit left it {answer.state} at version {answer.version}")
        self._reports[endpoint.name] = EndpointReport(
            endpoint.name, Outcome.APPLIED, answer.version, timings=answer.last_update
        )

    def _is_new(self, answer: WeightVersion) -> bool:
        """Return whether the endpoint serves what this session brought; who tells its session is taken at its word."""
        if answer.state is not EndpointState.READY or answer.run_id is None:
            return False
        served = UpdateRef(run_id=answer.run_id, version=answer.version, session_id=answer.session_id)
        return served in (self._update.ref, self._update.ref.model_copy(update={"session_id": ""}))

    async def _note_first_tokens(self) -> None:
        """Ask for the time to the first token of the new version, where something is running."""

        async def one(endpoint: InferenceEndpoint) -> None:
            while True:
                answer = await endpoint.weight_version()
                timings = answer.last_update
                if not self._is_new(answer) or timings is None:
                    return
                self._reports[endpoint.name] = replace(self._reports[endpoint.name], timings=timings)
                if timings.first_token_s is not None or not answer.num_running:
                    return
                await asyncio.sleep(_FIRST_TOKEN_POLL_S)

        waiting = [asyncio.ensure_future(one(endpoint)) for endpoint in self._active]
        await asyncio.wait(waiting, timeout=_FIRST_TOKEN_WAIT_S)
        await _cancelled(waiting)

    async def _end(self) -> None:
        """Give the group up, tell every endpoint that has not applied the update to end it, note what each serves."""
        self._failed = True
        with contextlib.suppress(InflightError):  # the failure that led here is the one to tell
            self._publisher.sender.end(is_done=False)
        self._publisher.lose_group()
        await asyncio.gather(*(self._end_one(e) for e in self._active if e.name not in self._reports))
        if self._hold_started is not None:
            self._hold_s = time.monotonic() - self._hold_started

    async def _end_one(self, endpoint: InferenceEndpoint) -> None:
        cause = self._failures.get(endpoint.name)
        detail = str(cause).removeprefix(f"{endpoint.name}: ") if cause is not None else self._problem
        try:
            async with asyncio.timeout(_CLEAN_UP_S):
                outcome, serves = self._outcome(await self._release(endpoint), cause)
        except (TimeoutError, DeadlineError) as error:
            outcome, serves, detail = Outcome.TIMED_OUT, None, detail or str(error)
        except InflightError as error:
            outcome, serves, detail = Outcome.UNREACHABLE, None, detail or str(error)
        self._reports[endpoint.name] = EndpointReport(endpoint.name, outcome, serves, detail)

    async def _release(self, endpoint: InferenceEndpoint) -> WeightVersion:
        """Return what the endpoint serves once it is not held by this session."""
        if not self._is_requested:
            return await _repeated(endpoint.weight_version)
        try:
            return await _repeated(lambda: endpoint.abort_weight_update(self._update.ref))
        except UpdateRefusedError:  # it is held by another session, not by this one
            return await _repeated(endpoint.weight_version)

    def _outcome(self, answer: WeightVersion, cause: InflightError | None) -> tuple[Outcome, int | None]:
        """Outcome and version served of an endpoint that says what it serves."""
        if answer.state is EndpointState.POISONED or isinstance(cause, PoisonedError):
            return Outcome.POISONED, None
        if self._committing and self._is_new(answer):
            return Outcome.APPLIED, answer.version  # it committed, only its answer was lost
        if isinstance(cause, UpdateRefusedError):
            return Outcome.REFUSED, answer.version
        return Outcome.ABORTED, answer.version

    def _report(self) -> PublishReport:
        reports = tuple(self._reports[endpoint.name] for endpoint in self._endpoints)
        timings = [report.timings for report in reports if report.timings is not None]
        first_tokens = [t.first_token_s for t in timings if t.first_token_s is not None]
        spans = PublishSpans(
            gather_s=self._gather_s,
            hold_s=self._hold_s,
            wire_s=self._wire_s,
            load_s=max((t.load_s for t in timings), default=0.0),
            first_token_s=max(first_tokens, default=None),
            total_s=time.monotonic() - self._started,
        )
        return PublishReport(
            self._update.run_id,
            self._update.version,
            self._update.manifest.size_bytes,
            reports,
            spans,
            num_needed=self._num_needed,
            sent_bytes=self._num_sent_bytes,
        )


async def _repeated(call: Callable[[], Awaitable[T]]) -> T:
    """Return the answer of an idempotent call that is made again when it got none."""
    for pause_s in _REPEAT_PAUSES_S:
        try:
            return await call()
        except UnreachableError:
            await asyncio.sleep(pause_s)
    return await call()


async def _cancelled(calls: Sequence[asyncio.Future[None]]) -> None:
    """Cancel what is still pending, and return when all have ended."""
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


def _raise_what_is_no_answer(calls: Sequence[asyncio.Future[None]]) -> None:
    """Raise the first error that is not an endpoint's or transport's own way to fail."""
    for call in calls:
        error = None if call.cancelled() else call.exception()
        if error is not None and not isinstance(error, InflightError):
            raise error


def _check(bucket: WeightBucket, index: int, update: WeightUpdate) -> None:
    """Raise `TrainerError` unless the bucket is number ``index`` and holds the tensors that were announced for it."""
    if bucket.index != index or index >= len(update.buckets):
        raise TrainerError(f"the worker yielded bucket {bucket.index}, bucket {index} of {len(update.buckets)} is next")
    announced = update.buckets[index]
    specs: tuple[TensorSpec, ...] = update.manifest.tensors[announced.start : announced.stop]
    found = [(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in bucket.tensors]
    wanted = [(spec.shape, str(spec.dtype)) for spec in specs]
    if found != wanted:
        raise TrainerError(f"bucket {bucket.index} holds tensors {found[:5]}, parameter_specs announced {wanted[:5]}")

"""Publishing: gather from the workers, move, commit on the endpoints, and a statement of who serves what.

One publish is a `_Session`: the training thread gathers and hands buckets over; all that speaks to endpoints runs in
the publisher's event loop, which ends the session by itself as soon as anything fails, so that no endpoint is held for
the rest of the gathering. This module knows the Protocols only, no engine and no trainer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Literal

from inflight.contracts import InferenceEndpoint, WeightSource
from inflight.errors import (
    ConfigError,
    DeadlineError,
    InflightError,
    PoisonedError,
    PublishError,
    TrainerError,
    UnsupportedError,
    UpdateRefusedError,
)
from inflight.types import EndpointReport, Outcome, PublishReport, PublishSpans, WeightBucket
from inflight.weights.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from inflight.weights.publisher import WeightPublisher
from inflight.weights.threads import run_abandonable
from inflight.wire import (
    BucketTransfer,
    EndpointState,
    InFlightPolicy,
    Manifest,
    TensorSpec,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
)

__all__ = ["WeightPublisher", "publish_weights"]

_CLEAN_UP_S = 3.0
"""How long the endpoints are waited for once a session has failed."""
_LEASE_SLACK_S = 5.0
"""How much longer than the deadline an endpoint stays held when nothing is heard of the publisher."""
_REFUSAL_GRACE_S = 1.0
"""How long the other endpoints may still answer the request when one refused it."""
_PREPARATION_SHARE = 0.9
"""Of the deadline, for the endpoints' preparation: a drain that takes longer leaves no time to send anything."""
_FIRST_TOKEN_WAIT_S = 0.05
_FIRST_TOKEN_POLL_S = 0.002


def publish_weights(
    worker: WeightSource,
    publisher: WeightPublisher | None,
    *,
    in_flight: InFlightPolicy | Literal["keep", "recompute", "drain", "abort"] = InFlightPolicy.KEEP,
    deadline_s: float = 60.0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> PublishReport | None:
    """Bring every endpoint to the worker's present weights, between two token steps; returns who serves what.

    Every rank calls it: rank 0 with a connected publisher, the others with None, which gather and return None. The
    version is ``worker.version``. The first bucket is gathered before sampling is held; later ones while the one before
    travels. Ends within ``deadline_s`` seconds plus the time that gathering takes, and a few seconds to clean up.

    Raises `PublishError` on rank 0 unless every endpoint applied the update; its report names each endpoint's state.
    `ConfigError` and `UnsupportedError` mean that no endpoint was asked for anything; what gathering raises is raised.
    Whatever is raised, the collective gather was completed on every rank, and no endpoint is left held: those that can
    be reached were told to abort, the others release themselves when their lease ends.
    """
    specs = worker.parameter_specs()
    buckets = plan_buckets(specs, bucket_bytes)
    gathered = worker.gather_weights(buckets)
    if worker.rank != 0:
        _exhaust(gathered)
        return None
    try:
        if publisher is None:
            raise ConfigError("publish_weights needs a WeightPublisher on rank 0")
        if not deadline_s > 0:
            raise ConfigError(f"deadline_s must be above 0, not {deadline_s}")
        update = WeightUpdate(
            run_id=publisher.run_id,
            version=worker.version,
            manifest=Manifest(tensors=tuple(specs)),
            buckets=buckets,
            in_flight=_declared_policy(in_flight, publisher),
            deadline_s=deadline_s * _PREPARATION_SHARE,
            lease_s=deadline_s + _LEASE_SLACK_S,
        )
        report = _Session(publisher, update, deadline_s).publish(gathered)
    finally:
        _exhaust(gathered)
    if not report.applied_everywhere:
        raise PublishError(f"the publish did not reach every endpoint: {report.summary()}", report)
    return report


def _exhaust(gathered: Iterator[WeightBucket]) -> None:
    for _ in gathered:
        pass


def _declared_policy(name: str, publisher: WeightPublisher) -> InFlightPolicy:
    if name not in list(InFlightPolicy):
        raise ConfigError(f"in_flight must be one of {', '.join(InFlightPolicy)}, not {name!r}")
    policy = InFlightPolicy(name)
    for endpoint, capabilities in publisher.capabilities.items():
        if endpoint in publisher.endpoints and policy not in capabilities.in_flight_policies:
            declared = ", ".join(capabilities.in_flight_policies)
            raise UnsupportedError(f"{endpoint} declares the policies {declared}, not {policy}")
    return policy


class _Session:
    """One publish. Methods that are async run in the publisher's event loop, the others in the training thread."""

    def __init__(self, publisher: WeightPublisher, update: WeightUpdate, deadline_s: float) -> None:
        self._publisher = publisher
        self._endpoints = publisher.members
        self._update = update
        self._deadline_s = deadline_s
        self._started = time.monotonic()
        self._deadline = self._started + deadline_s
        self._pending: Future[None] | None = None
        self._failures: dict[str, InflightError] = {}
        self._problem = ""
        self._failed = False
        self._committing = False
        self._reports: dict[str, EndpointReport] = {}
        self._num_gathered = 0
        self._gather_s = 0.0
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
                self._push(bucket)
                bucket = self._gather(gathered)
            self._wait_for_pending()
            if not self._failed:
                self._publisher.run(self._commit)
        except BaseException as error:
            if self._hold_started is not None:
                if self._pending is not None:
                    self._pending.cancel()
                self._problem = f"{type(error).__name__} in the trainer"
                self._publisher.run(self._end)
            raise
        return self._report()

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
            bucket = self._publisher.packer.packed(bucket)
        self._gather_s += time.monotonic() - started
        return bucket

    def _join_group(self) -> None:
        try:
            self._publisher.ensure_group(self._remaining_s())
        except (ConfigError, UnsupportedError):
            raise
        except InflightError as error:
            self._problem = str(error)
            self._publisher.run(self._end)

    def _begin(self) -> None:
        if not self._failed:
            self._hold_started = time.monotonic()
            self._publisher.run(self._request)

    def _push(self, bucket: WeightBucket) -> None:
        """Send a bucket while the next is gathered; waits for the one before."""
        self._wait_for_pending()
        if not self._failed:
            self._pending = self._publisher.start(self._transfer, bucket)

    def _wait_for_pending(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _remaining_s(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    async def _request(self) -> None:
        """Ask every endpoint to hold; one refusal ends the session, since nothing has been sent."""
        calls = [
            asyncio.ensure_future(self._ask(e, lambda e: e.request_weight_update(self._update)))
            for e in self._endpoints
        ]
        _, pending = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=_REFUSAL_GRACE_S)
        await _cancelled(calls)
        _raise_what_is_no_answer(calls)
        if self._failures:
            await self._end()

    async def _ask(self, endpoint: InferenceEndpoint, call: Callable[[InferenceEndpoint], Awaitable[object]]) -> None:
        """Await one endpoint's answer within the deadline; a failure is noted under its name, and raised."""
        try:
            async with asyncio.timeout(self._remaining_s()):
                await call(endpoint)
        except TimeoutError as error:
            late = DeadlineError("gave no answer before the publish's deadline", endpoint.name)
            self._failures.setdefault(endpoint.name, late)
            raise late from error
        except InflightError as error:
            self._failures.setdefault(endpoint.name, error)
            raise

    async def _transfer(self, bucket: WeightBucket) -> None:
        """Send one bucket while every endpoint receives it; the first failure, or the deadline, ends the session."""
        started = time.monotonic()
        timeout_s = self._remaining_s()
        ref = self._update.ref
        transfer = BucketTransfer(
            run_id=ref.run_id, version=ref.version, bucket_index=bucket.index, timeout_s=timeout_s
        )
        receiving = [
            asyncio.ensure_future(self._ask(e, lambda e: e.receive_weights(transfer))) for e in self._endpoints
        ]
        send = run_abandonable(lambda: self._publisher.sender.send(bucket, timeout_s), "inflight-send")
        calls = [asyncio.ensure_future(send), *receiving]
        try:
            done, pending = await asyncio.wait(calls, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await _cancelled(calls)
            self._wire_s += time.monotonic() - started
        _raise_what_is_no_answer(calls)
        if pending or any(call.exception() for call in done):
            errors = [error for call in done if (error := call.exception()) is not None]
            self._problem = f"bucket {bucket.index} of {len(self._update.buckets)} did not travel: " + (
                str(errors[0]) if errors else f"the deadline of {self._deadline_s:g} s passed"
            )
            await self._end()

    async def _commit(self) -> None:
        """Switch every endpoint; one that fails does not keep the others from switching."""
        self._committing = True
        calls = [asyncio.ensure_future(self._ask(e, self._commit_one)) for e in self._endpoints]
        await asyncio.wait(calls)
        self._hold_s = time.monotonic() - (self._hold_started or self._started)
        _raise_what_is_no_answer(calls)
        if self._failures:
            await self._end()
        else:
            await self._note_first_tokens()

    async def _commit_one(self, endpoint: InferenceEndpoint) -> None:
        answer = await endpoint.commit_weight_update(self._update.ref)
        if not self._is_new(answer):
            raise UpdateRefusedError(f"the commit left it {answer.state} at version {answer.version}")
        self._reports[endpoint.name] = EndpointReport(
            endpoint.name, Outcome.APPLIED, answer.version, timings=answer.last_update
        )

    def _is_new(self, answer: WeightVersion) -> bool:
        ref = UpdateRef(run_id=answer.run_id, version=answer.version) if answer.run_id else None
        return answer.state is EndpointState.READY and ref == self._update.ref

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

        waiting = [asyncio.ensure_future(one(endpoint)) for endpoint in self._endpoints]
        await asyncio.wait(waiting, timeout=_FIRST_TOKEN_WAIT_S)
        await _cancelled(waiting)

    async def _end(self) -> None:
        """Give the group up, tell every endpoint that has not applied the update to end it, note what each serves."""
        self._failed = True
        self._publisher.lose_group()
        await asyncio.gather(*(self._end_one(e) for e in self._endpoints if e.name not in self._reports))
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
        if self._hold_started is None:
            return await endpoint.weight_version()
        try:
            return await endpoint.abort_weight_update(self._update.ref)
        except UpdateRefusedError:  # it is held by another session, not by this one
            return await endpoint.weight_version()

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
            self._update.run_id, self._update.version, self._update.manifest.size_bytes, reports, spans
        )


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

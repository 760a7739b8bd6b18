"""Publishing: gather from the workers, move, commit on the endpoints, and a statement of who serves what.

The workers are sync and the endpoints async: a `WeightPublisher` runs the endpoints' side in an event loop of its own
thread, while the training thread gathers. This module knows the Protocols only, no engine and no trainer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from types import TracebackType
from typing import Any, Literal, TypeVar

import anyio
import anyio.from_thread

from inflight.contracts import InferenceEndpoint, TrainerWorker, WeightSender
from inflight.errors import (
    ConfigError,
    DeadlineError,
    InflightError,
    PoisonedError,
    PublishError,
    TransferError,
    UpdateRefusedError,
)
from inflight.http.client import HttpEndpoint
from inflight.types import EndpointReport, Outcome, PublishReport, PublishSpans, WeightBucket
from inflight.weights.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from inflight.weights.threads import run_abandonable
from inflight.weights.transports.process_group import ProcessGroupSender
from inflight.wire import (
    BucketTransfer,
    Capabilities,
    EndpointState,
    InFlightPolicy,
    Manifest,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
)

T = TypeVar("T")

_FIRST_TOKEN_WAIT_S = 0.05
_CLEAN_UP_S = 5.0


class WeightPublisher:
    """Trainer rank 0's connection to a fleet of endpoints. Use as a context manager, or call `close`.

    Entering asks each endpoint for its capabilities and forms the weight group; it raises `ConfigError`,
    `UnreachableError`, `DeadlineError` or `TransferError` if that fails, and nothing is left behind. After a failed
    publish the group is formed anew by the next one, with the endpoints that were not removed.
    """

    def __init__(
        self,
        endpoints: Sequence[InferenceEndpoint],
        sender: WeightSender,
        *,
        run_id: str,
        connect_timeout_s: float = 60.0,
    ) -> None:
        if not endpoints:
            raise ConfigError("a WeightPublisher needs at least one endpoint")
        self.run_id = run_id
        self._endpoints = list(endpoints)
        self._sender = sender
        self._connect_timeout_s = connect_timeout_s
        self._capabilities: dict[str, Capabilities] = {}
        self._group_is_usable = False
        self._portal: anyio.from_thread.BlockingPortal | None = None
        self._portal_context: AbstractContextManager[anyio.from_thread.BlockingPortal] | None = None

    @classmethod
    def connect(
        cls,
        urls: Sequence[str],
        *,
        run_id: str,
        token: str | None = None,
        backend: Literal["gloo", "nccl"] = "gloo",
        address: str = "127.0.0.1",
        connect_timeout_s: float = 60.0,
    ) -> WeightPublisher:
        """Return a publisher, connected, to servers that speak the contract over HTTP.

        ``address`` is this machine's address as the servers see it.
        """
        endpoints = [HttpEndpoint(url, token=token) for url in urls]
        sender = ProcessGroupSender(backend, address)
        return cls(endpoints, sender, run_id=run_id, connect_timeout_s=connect_timeout_s).__enter__()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Names of the endpoints that the next publish goes to."""
        return tuple(endpoint.name for endpoint in self._endpoints)

    @property
    def capabilities(self) -> dict[str, Capabilities]:
        """What each endpoint declared when the group was formed."""
        return dict(self._capabilities)

    def __enter__(self) -> WeightPublisher:
        if self._portal is not None:
            return self
        self._portal_context = anyio.from_thread.start_blocking_portal("asyncio")
        self._portal = self._portal_context.__enter__()
        try:
            self.run(self._ask_capabilities)
            self.ensure_group()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Leave the group and close the connections; servers go on. Idempotent."""
        self._sender.abort()
        if self._portal is not None and self._portal_context is not None:
            self._portal.call(self._close_endpoints)
            self._portal = None
            self._portal_context.__exit__(None, None, None)

    def remove(self, name: str) -> None:
        """Leave an endpoint out from now on; the group is formed anew by the next publish."""
        self._endpoints = [endpoint for endpoint in self._endpoints if endpoint.name != name]
        self._group_is_usable = False

    def ensure_group(self) -> None:
        """Form the weight group if it is not usable. Raises `TransferError` or the endpoint's error in time."""
        if self._group_is_usable:
            return
        if not self._endpoints:
            raise ConfigError("no endpoint is left to publish to")
        self.run(self._form_group)
        self._group_is_usable = True

    def run(self, call: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run an async call in the publisher's event loop and return its result."""
        return self._open_portal().call(call, *args)

    def start(self, call: Callable[..., Awaitable[T]], *args: Any) -> Future[T]:
        """Start an async call in the publisher's event loop."""
        return self._open_portal().start_task_soon(call, *args)

    def lose_group(self) -> None:
        """Give the group up, ending what is pending on it; the next publish forms it anew."""
        self._group_is_usable = False
        self._sender.abort()

    def _open_portal(self) -> anyio.from_thread.BlockingPortal:
        if self._portal is None:
            raise ConfigError("this WeightPublisher is not connected; use it as a context manager")
        return self._portal

    async def _ask_capabilities(self) -> None:
        answers = await asyncio.gather(*(endpoint.capabilities() for endpoint in self._endpoints))
        self._capabilities = {e.name: answer for e, answer in zip(self._endpoints, answers, strict=True)}

    async def _form_group(self) -> None:
        num_ranks = [self._capabilities[endpoint.name].num_ranks for endpoint in self._endpoints]
        timeout_s = self._connect_timeout_s
        specs = self._sender.specs(self.run_id, num_ranks, timeout_s)
        calls = [
            asyncio.ensure_future(endpoint.init_process_group(spec))
            for endpoint, spec in zip(self._endpoints, specs, strict=True)
        ]
        try:
            async with asyncio.timeout(timeout_s + _CLEAN_UP_S):
                await asyncio.gather(run_abandonable(self._sender.join, "inflight-join"), *calls)
        except BaseException as error:
            self._sender.abort()
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            if isinstance(error, TimeoutError):
                raise TransferError(f"the weight group was not formed within {timeout_s:g} s") from error
            raise

    async def _close_endpoints(self) -> None:
        await asyncio.gather(*(endpoint.aclose() for endpoint in self._endpoints), return_exceptions=True)


def publish_weights(
    worker: TrainerWorker,
    publisher: WeightPublisher | None,
    *,
    in_flight: InFlightPolicy | Literal["keep", "recompute", "drain", "abort"] = InFlightPolicy.KEEP,
    deadline_s: float = 60.0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> PublishReport | None:
    """Bring every endpoint to the worker's present weights, between two token steps; returns who serves what.

    Every rank calls it: rank 0 with a connected publisher, the others with None, which gather and return None. The
    version is ``worker.version``. The first bucket is gathered before sampling is held; later ones while the one before
    travels. Ends within ``deadline_s`` seconds plus the time that gathering takes.

    Raises `PublishError` on rank 0 unless every endpoint applied the update; its report names each endpoint's state.
    Whatever is raised, the collective gather was completed on every rank, and no endpoint is left held: those that can
    be reached were told to abort, the others release themselves when their lease ends.
    """
    specs = worker.parameter_specs()
    buckets = plan_buckets(specs, bucket_bytes)
    gathered = worker.gather_weights(buckets)
    if worker.rank != 0:
        _exhaust(gathered)
        return None
    if publisher is None:
        _exhaust(gathered)
        raise ConfigError("publish_weights needs a WeightPublisher on rank 0")
    started = time.monotonic()
    try:
        publisher.ensure_group()
        update = WeightUpdate(
            run_id=publisher.run_id,
            version=worker.version,
            manifest=Manifest(tensors=tuple(specs)),
            buckets=buckets,
            in_flight=InFlightPolicy(in_flight),
            deadline_s=deadline_s,
            lease_s=deadline_s + _CLEAN_UP_S,
        )
        session = _Session(publisher, update, started)
        first = session.gather(gathered)
        session.begin()
        for bucket in chain([first], iter(lambda: session.gather(gathered), None)):
            assert bucket is not None
            session.push(bucket)
        report = session.commit()
    finally:
        _exhaust(gathered)
    if not report.applied_everywhere:
        raise PublishError(f"the publish did not reach every endpoint: {report.summary()}", report)
    return report


def _exhaust(gathered: Iterator[WeightBucket]) -> None:
    for _ in gathered:
        pass


class _Session:
    """One publish, driven by the training thread."""

    def __init__(self, publisher: WeightPublisher, update: WeightUpdate, started: float) -> None:
        self._publisher = publisher
        self._endpoints = list(publisher._endpoints)
        self._sender = publisher._sender
        self._update = update
        self._started = started
        self._deadline = started + update.deadline_s
        self._pending: Future[None] | None = None
        self._failures: dict[str, BaseException] = {}
        self._failed = False
        self._committing = False
        self._reports: dict[str, EndpointReport] = {}
        self._gather_s = 0.0
        self._wire_s = 0.0
        self._hold_started = 0.0
        self._hold_s = 0.0

    def gather(self, gathered: Iterator[WeightBucket]) -> WeightBucket | None:
        """Return the next bucket, None after the last; what the worker raises ends the session first."""
        started = time.monotonic()
        try:
            return next(gathered, None)
        except BaseException:
            self._end_early()
            raise
        finally:
            self._gather_s += time.monotonic() - started

    def begin(self) -> None:
        """Ask every endpoint to hold; one refusal ends the session, since nothing has been sent."""
        self._deadline = time.monotonic() + self._update.deadline_s
        self._hold_started = time.monotonic()
        self._publisher.run(self._on_each, lambda endpoint: endpoint.request_weight_update(self._update))

    def push(self, bucket: WeightBucket) -> None:
        """Send a bucket while the next is gathered; waits for the one before."""
        self._wait_for_pending()
        if not self._failed:
            self._pending = self._publisher.start(self._transfer, bucket)

    def commit(self) -> PublishReport:
        """Wait for the last bucket, switch every endpoint, and report; or end early and report that."""
        self._wait_for_pending()
        if not self._failed:
            self._committing = True
            self._publisher.run(self._on_each, self._commit_one)
            self._hold_s = time.monotonic() - self._hold_started
        if self._failed:
            self._end_early()
        else:
            self._publisher.run(self._note_first_tokens)
        return self._report()

    def _wait_for_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _end_early(self) -> None:
        if not self._hold_started:
            return
        self._failed = True
        if self._pending is not None:
            self._pending.cancel()
        self._publisher.lose_group()
        self._publisher.run(self._abort_all)
        self._hold_s = time.monotonic() - self._hold_started

    def _remaining_s(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    async def _on_each(self, call: Callable[[InferenceEndpoint], Awaitable[object]]) -> None:
        """Await a call on every endpoint, all at once and within the deadline; failures are kept by name."""

        async def one(endpoint: InferenceEndpoint) -> None:
            try:
                async with asyncio.timeout(self._remaining_s()):
                    await call(endpoint)
            except TimeoutError:
                self._fail(endpoint, DeadlineError("gave no answer before the publish's deadline", endpoint.name))
            except InflightError as error:
                self._fail(endpoint, error)

        await asyncio.gather(*(one(endpoint) for endpoint in self._endpoints))

    def _fail(self, endpoint: InferenceEndpoint, error: BaseException) -> None:
        self._failures.setdefault(endpoint.name, error)
        self._failed = True

    async def _transfer(self, bucket: WeightBucket) -> None:
        """Send one bucket while every endpoint receives it; the first failure, or the deadline, ends all of it."""
        started = time.monotonic()
        timeout_s = self._remaining_s()
        transfer = BucketTransfer(
            run_id=self._update.run_id,
            version=self._update.version,
            bucket_index=bucket.index,
            timeout_s=timeout_s,
        )
        receiving: dict[asyncio.Future[None], InferenceEndpoint] = {
            asyncio.ensure_future(endpoint.receive_weights(transfer)): endpoint for endpoint in self._endpoints
        }
        sending: asyncio.Future[None] = asyncio.ensure_future(
            run_abandonable(lambda: self._sender.send(bucket, timeout_s), "inflight-send")
        )
        calls = {sending, *receiving}
        try:
            _, pending = await asyncio.wait(calls, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            self._wire_s += time.monotonic() - started
        self._failed = self._failed or bool(pending)
        for call in calls - pending:
            error = call.exception()
            if error is None:
                continue
            self._failed = True
            if call in receiving:
                self._fail(receiving[call], error)
            elif not isinstance(error, InflightError):
                raise error

    async def _commit_one(self, endpoint: InferenceEndpoint) -> None:
        ref = self._update.ref
        answer = await endpoint.commit_weight_update(ref)
        if answer.state is not EndpointState.READY or (answer.run_id, answer.version) != (ref.run_id, ref.version):
            raise UpdateRefusedError(f"the commit left it {answer.state} at version {answer.version}")
        self._reports[endpoint.name] = EndpointReport(
            endpoint.name, Outcome.APPLIED, answer.version, timings=answer.last_update
        )

    async def _note_first_tokens(self) -> None:
        """Ask for the time to the first token of the new version, where something is running."""

        async def one(endpoint: InferenceEndpoint) -> None:
            answer: WeightVersion | None = None
            while answer is None or (
                answer.num_running and answer.last_update is not None and answer.last_update.first_token_s is None
            ):
                answer = await endpoint.weight_version()
            report = self._reports[endpoint.name]
            if answer.version == self._update.version:
                self._reports[endpoint.name] = replace(report, timings=answer.last_update)

        waiting = [asyncio.ensure_future(one(endpoint)) for endpoint in self._endpoints]
        _, pending = await asyncio.wait(waiting, timeout=_FIRST_TOKEN_WAIT_S)
        for call in pending:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    async def _abort_all(self) -> None:
        """Tell every endpoint that has not applied the update to end it, and note what it serves then."""

        async def one(endpoint: InferenceEndpoint) -> None:
            if endpoint.name in self._reports:
                return
            cause = self._failures.get(endpoint.name)
            detail = "" if cause is None else str(cause).removeprefix(f"{endpoint.name}: ")
            try:
                async with asyncio.timeout(_CLEAN_UP_S):
                    answer = await endpoint.abort_weight_update(self._update.ref)
            except (InflightError, TimeoutError) as error:
                timed_out = isinstance(error, TimeoutError | DeadlineError)
                outcome = Outcome.TIMED_OUT if timed_out else Outcome.UNREACHABLE
                self._reports[endpoint.name] = EndpointReport(endpoint.name, outcome, None, detail or str(error))
                return
            outcome, serves = self._outcome(answer, cause)
            self._reports[endpoint.name] = EndpointReport(endpoint.name, outcome, serves, detail)

        await asyncio.gather(*(one(endpoint) for endpoint in self._endpoints))

    def _outcome(self, answer: WeightVersion, cause: BaseException | None) -> tuple[Outcome, int | None]:
        """Outcome and version served of an endpoint that answered an abort."""
        if answer.state is EndpointState.POISONED or isinstance(cause, PoisonedError):
            return Outcome.POISONED, None
        if self._committing and (answer.run_id, answer.version) == (self._update.run_id, self._update.version):
            return Outcome.APPLIED, answer.version  # it committed, only its answer was lost
        if isinstance(cause, UpdateRefusedError):
            return Outcome.REFUSED, answer.version
        if isinstance(cause, DeadlineError):
            return Outcome.TIMED_OUT, answer.version
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


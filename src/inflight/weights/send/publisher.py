"""Publishing: the connection from trainer rank 0 to endpoints, and the call that publishes a worker's weights to them.

Workers are synchronous and endpoints are async: a `WeightPublisher` runs the endpoints' side in an event loop in its
own thread, while the training thread gathers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar, get_args

from anyio.from_thread import BlockingPortal

from inflight.base.requirements import require
from inflight.base.tasks import cancel_and_wait, combine_failures
from inflight.base.threads import start_portal
from inflight.contracts import (
    InferenceEndpoint,
    MergingLoraSource,
    ShardedWeightSource,
    WeightSender,
    WeightSource,
)
from inflight.errors import ConfigError, DeadlineError, PublishError, TransferError
from inflight.http.kinds import connect_endpoint
from inflight.types import EndpointOutcome, PublishReport, WeightBucket
from inflight.weights.encode.bucket_bytes import Rounding
from inflight.weights.encode.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from inflight.weights.send.endpoint_update import query_endpoint
from inflight.weights.send.gathering import gather_rest, require_announced, weight_update_of
from inflight.weights.send.open_publish import OpenPublish
from inflight.weights.send.publish import Publish, Stopwatch
from inflight.weights.send.ranks import RankSenders
from inflight.weights.send.weight_group import WeightGroup
from inflight.weights.transports import make_sender
from inflight.wire import Capabilities, InFlightPolicy, Needs, TransportName, WeightUpdate

T = TypeVar("T")


class WeightPublisher:
    """The connection from trainer rank 0 to endpoints. Use it as a context manager, or call `close`.

    ``incarnation`` is the number of times that a run's trainer was started: endpoints refuse calls from a lower
    incarnation than the highest that they have seen. None means the next higher incarnation. ``encoding`` rounds
    weights for the transfer. With ``delta``, only the changes since the last publish that every endpoint applied are
    sent, which needs one more copy of the weights in host memory on each side. With ``staged``, sampling continues
    while weights arrive on endpoints that support staging. ``sharded`` is a source whose ranks each send the parts that
    they hold, if every endpoint supports this; the ranks other than 0 then call `PartSender.send` instead of
    `gather_only` for each publish. ``connect_timeout_s`` is the maximum wait for the endpoints' answers, and for a
    weight group to form.

    Entering the context asks each endpoint for its capabilities and forms the weight group. If that fails, entering
    raises `ConfigError`, `UnsupportedError`, `UnreachableError`, `UnauthorizedError`, `DeadlineError` or
    `TransferError`, and leaves no group or connection open. A publish forms a new group if its endpoints differ from
    those of the previous publish, or if the previous publish failed. Any thread may call `run` and `start`, even during
    a publish; publish from one thread at a time.
    """

    def __init__(
        self,
        endpoints: Sequence[InferenceEndpoint],
        sender: WeightSender,
        *,
        run_id: str,
        incarnation: int | None = None,
        encoding: Rounding = "raw",
        delta: bool = False,
        staged: bool = True,
        sharded: ShardedWeightSource | None = None,
        connect_timeout_s: float = 60.0,
    ) -> None:
        names = [endpoint.name for endpoint in endpoints]
        if not names:
            raise ConfigError("a WeightPublisher needs at least one endpoint")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(
                f"these endpoints are listed twice: {', '.join(twice)}; list each endpoint once, because it has its "
                "own ranks in the group"
            )
        if not run_id:
            raise ConfigError("run_id is empty: pass a name, by which servers recognize the run when it restarts")
        if encoding not in get_args(Rounding):
            raise ConfigError(f"encoding must be one of {', '.join(get_args(Rounding))}, not {encoding!r}")
        if delta and encoding != "raw":
            raise ConfigError(
                f"delta sends changed elements without rounding them, so encoding must be 'raw', not {encoding!r}"
            )
        if sharded is not None and encoding == "float8":
            raise ConfigError("float8 computes scales from whole tensors: omit sharded, or use another encoding")
        self.run_id = run_id
        self.staged = staged
        self.ranks = None if sharded is None else RankSenders(sender, sharded, delta=delta)
        """The senders of all ranks if each rank sends the parts that it holds, otherwise None."""
        sender = self.ranks or sender
        self.group = WeightGroup(
            sender, run_id=run_id, encoding=encoding, delta=delta, form_timeout_s=connect_timeout_s
        )
        self.merges_lora = False
        """Whether a LoRA has been published as merged weights."""
        self._incarnation = incarnation
        self._connected = tuple(endpoints)
        self._endpoints: dict[InferenceEndpoint, Capabilities] = {}
        self._connect_timeout_s = connect_timeout_s
        self._calls: set[asyncio.Task[Any]] = set()
        """The running calls that `start` began."""
        self._portal: BlockingPortal | None = None
        self._portal_thread: threading.Thread | None = None
        self._opening = threading.Lock()
        self._opened: OpenPublish | None = None
        """The publish that was opened last."""

    @classmethod
    def connect(
        cls,
        urls: Sequence[str],
        *,
        run_id: str,
        token: str | None = None,
        transport: TransportName = "gloo",
        address: str = "127.0.0.1",
        directory: Path | None = None,
        incarnation: int | None = None,
        encoding: Rounding = "raw",
        delta: bool = False,
        staged: bool = True,
        sharded: ShardedWeightSource | None = None,
        connect_timeout_s: float = 60.0,
    ) -> WeightPublisher:
        """Return a connected publisher for servers of the contract, or for engines' own servers (``ENGINE+http://``).

        ``token`` is the servers' control token, or None if they need none. ``transport`` is the name of the transport
        (see `make_sender`). ``address`` is the address at which the servers reach this machine. ``directory`` is where
        the transport ``file`` stores weights. The other arguments are those of the class.
        """
        if isinstance(urls, str):
            raise ConfigError(f"urls is the string {urls!r}, not a list of URLs: pass [{urls!r}]")
        return cls(
            [connect_endpoint(url, token=token) for url in urls],
            make_sender(transport, address=address, directory=directory),
            run_id=run_id,
            incarnation=incarnation,
            encoding=encoding,
            delta=delta,
            staged=staged,
            sharded=sharded,
            connect_timeout_s=connect_timeout_s,
        ).__enter__()

    @property
    def incarnation(self) -> int:
        """The incarnation of the run's trainer; 0 until connected."""
        return self._incarnation or 0

    @property
    def endpoints(self) -> Mapping[InferenceEndpoint, Capabilities]:
        """The connected endpoints with their capabilities. Call endpoints only through `run` and `start`."""
        return self._endpoints

    def __enter__(self) -> WeightPublisher:
        if self._portal is not None:
            return self
        self._portal, self._portal_thread = start_portal("inflight-publisher")
        try:
            self.run(self._connect)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the calls that `start` began, leave the group, and close the connections. Idempotent.

        Servers keep running.
        """
        self.group.lose()
        if self._portal is not None and self._portal_thread is not None:
            self._portal.call(self._cancel_calls)
            self._portal.call(close_all, self._connected)
            portal, self._portal = self._portal, None
            portal.call(portal.stop)
            self._portal_thread.join()

    def run(self, call: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run an async call in the publisher's event loop and return its result. An interrupt cancels the call."""
        future = self._start(call, *args)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, call: Callable[..., Awaitable[T]], *args: Any) -> Future[T]:
        """Start an async call in the publisher's event loop and return its future, which `close` cancels."""
        return self._start(self._call, call, *args)

    async def _call(self, call: Callable[..., Awaitable[T]], *args: Any) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            return await call(*args)
        finally:
            self._calls.discard(task)

    async def _cancel_calls(self) -> None:
        await cancel_and_wait(*self._calls)

    def _start(self, call: Callable[..., Awaitable[T]], *args: Any) -> Future[T]:
        if self._portal is None:
            raise ConfigError("this WeightPublisher is not connected, or has been closed: connect another one")
        return self._portal.start_task_soon(call, *args)

    def publish(
        self,
        endpoints: Mapping[InferenceEndpoint, Capabilities],
        update: WeightUpdate,
        gathered: Iterator[WeightBucket],
        *,
        deadline_s: float,
        num_needed: int,
    ) -> PublishReport:
        """Publish the gathered buckets to ``endpoints``, of which ``num_needed`` have to apply the update.

        The deadline starts once the first bucket has been gathered. Any exception from the worker, or an interrupt,
        ends the publish on all endpoints before it is raised here. To publish the weights of a worker, call
        `publish_weights`.
        """
        gathering = Stopwatch()
        with gathering:
            first = next(gathered, None)
        opened = self.open(endpoints, update, deadline_s=deadline_s, num_needed=num_needed, staged=self.staged)
        return opened.send(gathered if first is None else itertools.chain([first], gathered), gathering)

    def open(
        self,
        endpoints: Mapping[InferenceEndpoint, Capabilities],
        update: WeightUpdate,
        *,
        deadline_s: float,
        num_needed: int,
        staged: bool,
    ) -> OpenPublish:
        """Ask ``endpoints`` to accept an update, and return immediately. `OpenPublish.send` then sends its buckets.

        The deadline starts now. Raises the errors of `Publish.prepare`, and `ConfigError` if another publish is open.
        """
        publish = Publish(self.group, endpoints, update, deadline_s=deadline_s, num_needed=num_needed, staged=staged)
        with self._opening:
            if self._opened is not None and not self._opened.is_over:
                raise ConfigError("this WeightPublisher is already publishing: publish from one thread at a time")
            self.run(publish.prepare)
            self._opened = OpenPublish(self.run, publish, self._start(publish.run))
            return self._opened

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._connect_timeout_s), asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(query_endpoint(endpoint)) for endpoint in self._connected]
        except TimeoutError as error:
            names = ", ".join(endpoint.name for endpoint in self._connected)
            raise DeadlineError(f"not all of {names} answered within {self._connect_timeout_s:g} s") from error
        except ExceptionGroup as group:
            raise combine_failures(group.exceptions) from group
        answers = [task.result() for task in asked]
        self._endpoints = {endpoint: can for endpoint, (can, _) in zip(self._connected, answers, strict=True)}
        if self._incarnation is None:
            seen = [v.incarnation if v.owner_run_id == self.run_id else 0 for _, v in answers]
            self._incarnation = 1 + max([0, *seen, *(v.incarnations.get(self.run_id, 0) for _, v in answers)])
        if self.ranks is None:  # the other ranks join in the first publish
            await self.group.form(self._endpoints, self.incarnation, self._connect_timeout_s, len(self._endpoints))


def publish_weights(
    worker: WeightSource,
    publisher: WeightPublisher,
    *,
    endpoints: Mapping[InferenceEndpoint, Capabilities] | None = None,
    in_flight: InFlightPolicy | Literal["keep", "recompute", "drain", "abort"] = InFlightPolicy.KEEP,
    deadline_s: float = 60.0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    quorum: int | None = None,
    keep_base: bool = False,
    version: int | None = None,
) -> PublishReport:
    """Update every endpoint to the worker's current weights between two token steps, and return the report.

    Rank 0 calls this while every other rank calls `gather_only`. The version is ``worker.version``; pass ``version``
    for servers to which several trainers publish in turn. ``endpoints`` maps the target endpoints to their
    capabilities; None means the endpoints to which ``publisher`` was connected.

    Endpoints that support staging keep sampling until every bucket has arrived at every endpoint; the others are paused
    once the first bucket has been gathered. Each bucket is gathered while the previous one is being sent. The call ends
    within ``deadline_s`` seconds, plus the time that gathering takes and a few seconds to clean up.

    ``quorum`` is the number of endpoints that have to apply the update; None means all of them. If the transport is not
    collective, an endpoint that fails is dropped while the others continue. If it is collective, a failure before the
    commit ends the publish for all endpoints.

    ``keep_base`` makes endpoints keep these weights in host memory. Engines that fuse tensors need them if a later
    update is a LoRA or omits some weights, unless the weights are those of the engine's checkpoint.

    A LoRA is sent as such if every endpoint supports LoRA. If an endpoint supports only partial updates, a
    `MergingLoraSource` merges its LoRA: from then on, all endpoints receive the merged weights that the LoRA changes.

    Raises `PublishError` if fewer endpoints applied the update; its report contains each endpoint's state.
    `ConfigError` and `UnsupportedError` mean that no endpoint has received a request, and `FencedError` that another
    trainer has replaced this one. Errors raised while gathering propagate. Whatever is raised, the collective gather
    was completed on every rank, and no endpoint stays paused: reachable endpoints have aborted the update, and the
    others resume by themselves when their lease ends.
    """
    if not isinstance(worker, WeightSource):
        raise ConfigError(
            f"publish_weights needs a WeightSource, not {type(worker).__name__}: pass ModuleWeights(model) or a worker"
        )
    source = _source_for(worker, publisher, endpoints, bucket_bytes)
    targets = publisher.endpoints if endpoints is None else endpoints
    ranks = _sharing_ranks(source, publisher, targets, bucket_bytes, deadline_s)
    with contextlib.ExitStack() as stack:
        gathered: Iterator[WeightBucket] = iter(())
        if ranks is None:
            gathered = source.gather_weights(plan_buckets(source.parameter_specs(), bucket_bytes))
            stack.callback(gather_rest, gathered)
        else:
            sending = stack.enter_context(ranks.sending(bucket_bytes, deadline_s))
        if worker.rank != 0:
            raise ConfigError(f"publish_weights is for rank 0; rank {worker.rank} calls gather_only(worker)")
        if not deadline_s > 0:
            raise ConfigError(f"deadline_s must be above 0, not {deadline_s}")
        if quorum is not None and not quorum >= 1:
            raise ConfigError(f"quorum must be at least 1, not {quorum}")
        if in_flight not in list(InFlightPolicy):
            raise ConfigError(f"in_flight must be one of {', '.join(InFlightPolicy)}, not {in_flight!r}")
        encoder = publisher.group.encoder
        update = weight_update_of(
            source,
            run_id=publisher.run_id,
            incarnation=publisher.incarnation,
            bucket_bytes=bucket_bytes,
            deadline_s=deadline_s,
            in_flight=InFlightPolicy(in_flight),
            encoding=encoder.encoding,
            keep=keep_base,
            version=version,
            sharded=ranks is not None,
        )
        needs = replace(Needs.of_update(update), encodings=encoder.encodings, staging=False)
        for endpoint, can in targets.items():
            require(can, needs, endpoint.name)
        num_needed = len(targets) if quorum is None else quorum
        if ranks is None:
            checked = require_announced(gathered, update)
            report = publisher.publish(targets, update, checked, deadline_s=deadline_s, num_needed=num_needed)
        else:
            if not ranks.has_others:
                publisher.group.lose()
            opened = publisher.open(
                targets, update, deadline_s=deadline_s, num_needed=num_needed, staged=publisher.staged
            )
            report = opened.send(_until_lost(require_announced(sending.buckets_of(update), update), opened))
            sending.is_applied = all(part.outcome is EndpointOutcome.APPLIED for part in report.endpoints)
    if not report.succeeded:
        num_applied = sum(part.outcome is EndpointOutcome.APPLIED for part in report.endpoints)
        raise PublishError(
            f"the publish updated {num_applied} of {len(report.endpoints)} endpoints, but at least {num_needed} must "
            f"be updated: {report.summary()}",
            report,
        )
    return report


def _until_lost(parts: Iterator[WeightBucket], opened: OpenPublish) -> Iterator[WeightBucket]:
    """Yield the parts. If another rank fails, end the publish, whose report then states the reason."""
    try:
        yield from parts
    except TransferError as error:
        opened.end(str(error))


def _sharing_ranks(
    source: WeightSource,
    publisher: WeightPublisher,
    targets: Mapping[InferenceEndpoint, Capabilities],
    bucket_bytes: int,
    deadline_s: float,
) -> RankSenders | None:
    """Return the senders of all ranks if each rank is to send the parts that it holds, otherwise None.

    If such senders exist but cannot be used, this orders the other ranks to gather whole tensors.
    """
    ranks = publisher.ranks
    if ranks is None or source.rank != 0:
        return None
    if source is ranks.source and ranks.source.shardings() and all(can.sharded for can in targets.values()):
        return ranks
    ranks.gather(bucket_bytes, deadline_s)
    return None


def _source_for(
    worker: WeightSource,
    publisher: WeightPublisher,
    endpoints: Mapping[InferenceEndpoint, Capabilities] | None,
    bucket_bytes: int,
) -> WeightSource:
    """Return the worker, or its LoRA's merged weights if an endpoint supports partial updates but not LoRA.

    Once merged weights have been published, they would be the base of any LoRA that follows, so merged weights are
    published from then on.
    """
    if not isinstance(worker, MergingLoraSource) or worker.rank != 0:
        return worker
    capabilities = (publisher.endpoints if endpoints is None else endpoints).values()
    if not publisher.merges_lora and all(can.lora for can in capabilities):
        return worker
    if not all(can.partial_updates for can in capabilities):
        return worker
    publisher.merges_lora = True
    return worker.merged(bucket_bytes)


async def close_all(endpoints: Iterable[InferenceEndpoint]) -> None:
    """Close the connections to these endpoints. The servers keep running."""
    await asyncio.gather(*(endpoint.aclose() for endpoint in endpoints), return_exceptions=True)

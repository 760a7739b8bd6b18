"""Injects faults into calls, as if a network between a trainer and its endpoints lost, repeated and reordered them.

`FaultyEndpoint` implements the contract's Protocol, so that the library uses it like any other endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar
from urllib.parse import urlsplit

from inflight.base.tasks import cancel_and_wait, start
from inflight.conformance.fleet.plan import OF_BUCKETS, Fault, FaultPlan, Kind, UpdateStep
from inflight.conformance.fleet.servers import Call, Testbed, TestedServer
from inflight.conformance.tcp_proxy import TcpProxy
from inflight.contracts import InferenceEndpoint
from inflight.errors import InflightError, UnreachableError
from inflight.wire import (
    BucketTransfer,
    Capabilities,
    ChatCompletion,
    ChatCompletionRequest,
    GenerateRequest,
    GenerateResponse,
    HttpFileSpec,
    InFlightPolicy,
    ProcessGroupSpec,
    TransportSpec,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
)

T = TypeVar("T")

_LATE_S = 6.0
"""How long, in seconds, `Faults.flush` waits for late calls."""


class Faults:
    """The state of a fault plan while it is executed: pending and injected faults, and late calls.

    Several threads use it. Until `stop`, updates request leases of at most ``lease_s``, so that no schedule waits for
    the longer leases of the library. With ``cancel_arrives``, cancelling a caller also cancels its call at the server.
    """

    def __init__(self, plan: FaultPlan, testbed: Testbed, lease_s: float, *, cancel_arrives: bool) -> None:
        self.testbed = testbed
        self.lease_s = lease_s
        self.cancel_arrives = cancel_arrives
        self.injected: list[Fault] = []
        self.problems: list[str] = []
        """Calls that servers should have refused but accepted."""
        self.take_over = threading.Event()
        self.replaced = threading.Event()
        """Set once a trainer that died has a successor, for which its other ranks wait."""
        self.proxied = {f.endpoint for f in plan.faults if f.kind in (Kind.CUT, Kind.CORRUPT)}
        self.proxies: dict[tuple[int, int], TcpProxy] = {}
        self.aborted: set[TestedServer] = set()
        """Servers that received an update with the policy ``abort``."""
        self.over: set[tuple[TestedServer, int, UpdateRef]] = set()
        """Ended sessions, each with the server and its process. Late calls from these sessions must have no effect."""
        self.incarnations: dict[tuple[TestedServer, int], int] = {}
        """The highest incarnation of the run that has joined each server process."""
        self._lock = threading.Lock()
        self._pending = list(plan.faults)
        self._counts: Counter[tuple[int, UpdateStep, int]] = Counter()
        self._num_calls: Counter[TestedServer] = Counter()
        self._late: list[tuple[TestedServer, Call[Any], int]] = []
        """Late calls: the server, the call, and the total number of calls to the server after which it arrives."""
        self.arriving: list[Future[Any]] = []
        """Calls that `flush` waits for."""

    def due(self, endpoint: int, step: UpdateStep, bucket: int = 0) -> Fault | None:
        """Count one call and return the fault to inject into it, or None."""
        with self._lock:
            key = (endpoint, step, bucket)
            occurrence = self._counts[key]
            self._counts[key] += 1
            for fault in self._pending:
                is_here = (fault.endpoint, fault.step) == (endpoint, step) and fault.occurrence <= occurrence
                if is_here and (step not in OF_BUCKETS or fault.bucket == bucket):
                    self._pending.remove(fault)
                    self.injected.append(fault)
                    if fault.kind is Kind.TAKE_OVER:
                        self.take_over.set()
                    return fault
        return None

    def stop(self) -> None:
        """Inject no further faults, and stop limiting leases."""
        with self._lock:
            self._pending = []
            self.lease_s = float("inf")
        self.replaced.set()

    def postpone(self, server: TestedServer, call: Call[Any], num_calls: int) -> None:
        """Deliver ``call`` after ``num_calls`` more calls to ``server``."""
        with self._lock:
            self._late.append((server, call, self._num_calls[server] + num_calls))

    def count(self, server: TestedServer) -> None:
        """Count a call to ``server``, and deliver the late calls that are now due."""
        with self._lock:
            self._num_calls[server] += 1
        self._let_arrive(lambda late, at: self._num_calls[late] >= at)

    def flush(self) -> None:
        """Deliver every remaining late call, and wait until all have ended; cancel those that take too long."""
        self._let_arrive(lambda *_: True)
        deadline = time.monotonic() + _LATE_S * self.testbed.scale
        for future in self.arriving:
            with contextlib.suppress(InflightError, TimeoutError):
                future.result(max(0.01, deadline - time.monotonic()))
            future.cancel()

    def _let_arrive(self, is_due: Callable[[TestedServer, int], bool]) -> None:
        with self._lock:
            now = [late for late in self._late if is_due(late[0], late[2])]
            self._late = [late for late in self._late if late not in now]
        for server, call, _ in now:
            self.arriving.append(self.testbed.loop.start(_ignore_errors(server.deliver(call))))


async def _ignore_errors(call: Awaitable[Any]) -> None:
    with contextlib.suppress(InflightError):
        await call


class FaultyEndpoint(InferenceEndpoint):
    """The connection of one caller, a trainer or a client, to server number ``index``, with faults injected into calls.

    Once ``is_dead`` is set, the caller is dead: all of its calls raise `UnreachableError`.
    """

    def __init__(self, server: TestedServer, index: int, faults: Faults, is_dead: threading.Event) -> None:
        self.server = server
        self._index = index
        self._faults = faults
        self._is_dead = is_dead

    @property
    def name(self) -> str:
        return self.server.name

    async def capabilities(self) -> Capabilities:
        return await self._call(UpdateStep.CONNECT, lambda e: e.capabilities())

    async def init_process_group(self, spec: TransportSpec) -> None:
        if self._index in self._faults.proxied:
            spec = await self._through_proxy(spec)

        async def join(endpoint: InferenceEndpoint) -> None:
            process = self._process
            await endpoint.init_process_group(spec)
            self._faults.incarnations[process] = max(spec.incarnation, self._faults.incarnations.get(process, 0))

        await self._call(UpdateStep.JOIN, join)

    async def request_weight_update(self, update: WeightUpdate) -> None:
        update = update.model_copy(update={"lease_s": min(update.lease_s, self._faults.lease_s)})
        if update.in_flight is InFlightPolicy.ABORT:
            self._faults.aborted.add(self.server)

        async def request(endpoint: InferenceEndpoint) -> None:
            was_over = (*self._process, update.ref) in self._faults.over
            incarnation = self._faults.incarnations.get(self._process, 0)
            await endpoint.request_weight_update(update)
            if was_over:
                self._note(f"a late request reopened session {update.session_id}, which had ended")
            if update.incarnation < incarnation:
                self._note(f"an update of incarnation {update.incarnation} was accepted after {incarnation} had joined")

        await self._call(UpdateStep.REQUEST, request)

    async def receive_weights(self, bucket: BucketTransfer) -> None:
        await self._call(UpdateStep.RECEIVE, lambda e: e.receive_weights(bucket), bucket.bucket_index)

    async def commit_weight_update(self, ref: UpdateRef) -> WeightVersion:
        return await self._call(UpdateStep.COMMIT, self._recording_end(ref, lambda e: e.commit_weight_update(ref)))

    async def abort_weight_update(self, ref: UpdateRef) -> WeightVersion:
        return await self._call(UpdateStep.ABORT, self._recording_end(ref, lambda e: e.abort_weight_update(ref)))

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        return await self._call(UpdateStep.GENERATE, lambda e: e.generate(request))

    async def chat_completion(self, request: ChatCompletionRequest) -> ChatCompletion:
        return await self._call(UpdateStep.GENERATE, lambda e: e.chat_completion(request))

    async def weight_version(self) -> WeightVersion:
        return await self._call(UpdateStep.VERSION, lambda e: e.weight_version())

    async def aclose(self) -> None:
        """Do nothing, because the server outlives its callers."""

    @property
    def _process(self) -> tuple[TestedServer, int]:
        return self.server, self.server.num_starts

    def _note(self, problem: str) -> None:
        self._faults.problems.append(f"{self.name}: {problem}")

    def _recording_end(self, ref: UpdateRef, call: Call[T]) -> Call[T]:
        """Return a call that also records the end of the session if it succeeds."""

        async def ending(endpoint: InferenceEndpoint) -> T:
            process = self._process
            answer = await call(endpoint)
            self._faults.over.add((*process, ref))
            return answer

        return ending

    async def _call(self, step: UpdateStep, call: Call[T], bucket: int = 0) -> T:
        if self._is_dead.is_set():
            raise UnreachableError("this trainer is dead", self.name)
        fault = self._faults.due(self._index, step, bucket)
        try:
            answer = await (self._deliver(call) if fault is None else self._inject_into(fault, call))
        finally:
            if step is not UpdateStep.GENERATE:
                self._faults.count(self.server)
        if self._is_dead.is_set():
            raise UnreachableError("this trainer is dead", self.name)
        return answer

    async def _inject_into(self, fault: Fault, call: Call[T]) -> T:
        lost = UnreachableError(f"lost: {fault}", self.name)
        match fault.kind:
            case Kind.DELAY | Kind.TAKE_OVER:
                await asyncio.sleep(fault.seconds)
            case Kind.LOSE_REQUEST:
                raise lost
            case Kind.SILENCE:
                await asyncio.get_running_loop().create_future()
            case Kind.LOSE_ANSWER:
                await self._deliver(call)
                raise lost
            case Kind.REPEAT:
                again = start(_ignore_errors(self._deliver(call)))
                try:
                    return await self._deliver(call)
                finally:
                    await asyncio.wait([again], timeout=0.5)
                    await cancel_and_wait(again)
            case Kind.REPEAT_LATE:
                self._faults.postpone(self.server, call, fault.num_calls)
            case Kind.REORDER:
                self._faults.postpone(self.server, call, fault.num_calls)
                raise lost
            case Kind.KILL | Kind.RESTART | Kind.STOP | Kind.DISCONNECT:
                injecting = self._faults.testbed.loop.start(self._inject_into_server(fault))
                self._faults.arriving.append(injecting)
                try:
                    return await self._deliver(call)
                finally:  # a stopped server must be resumed even if its caller has been cancelled
                    await asyncio.shield(asyncio.wrap_future(injecting))
            case Kind.TEAR:
                await self._run_in_loop(self.server.inject(fault.kind, fault.seconds))
            case Kind.KILL_TRAINER:
                self._is_dead.set()
                raise lost
            case Kind.CUT | Kind.CORRUPT:
                self._spoil_proxies(fault)
        return await self._deliver(call)

    async def _inject_into_server(self, fault: Fault) -> None:
        if fault.kind is Kind.STOP:
            await self.server.inject(fault.kind, fault.seconds)
            return
        await asyncio.sleep(fault.seconds / 4)
        if fault.kind is Kind.DISCONNECT:
            await self.server.inject(fault.kind, fault.seconds)
        else:
            await self.server.kill(None if fault.kind is Kind.KILL else 0.1 + fault.seconds)

    async def _deliver(self, call: Call[T]) -> T:
        return await self._run_in_loop(self.server.deliver(call))

    async def _run_in_loop(self, call: Coroutine[Any, Any, T]) -> T:
        """Return the result of a call in the servers' event loop. See ``cancel_arrives`` of `Faults`."""
        future = asyncio.wrap_future(self._faults.testbed.loop.start(call))
        if self._faults.cancel_arrives:
            return await future
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(future)

    async def _through_proxy(self, spec: TransportSpec) -> TransportSpec:
        others = [await self._through_proxy(other) for other in spec.others]
        spec = spec.model_copy(update={"others": tuple(others)})
        if isinstance(spec, ProcessGroupSpec):
            proxy = await self._proxy(spec.master_port)
            return spec.model_copy(update={"master_port": proxy.port})
        if isinstance(spec, HttpFileSpec):
            proxy = await self._proxy(urlsplit(spec.url).port or 0)
            return spec.model_copy(update={"url": f"http://127.0.0.1:{proxy.port}"})
        return spec

    async def _proxy(self, port: int) -> TcpProxy:
        proxy = self._faults.proxies.get((self._index, port))
        if proxy is None:
            proxy = self._faults.proxies[self._index, port] = TcpProxy("127.0.0.1", port)
            await self._run_in_loop(proxy.start())
        return proxy

    def _spoil_proxies(self, fault: Fault) -> None:
        for (index, _), proxy in self._faults.proxies.items():
            if index == self._index:
                num_bytes = int(fault.seconds * 200_000)
                if fault.kind is Kind.CUT:
                    proxy.cut_after_bytes, proxy.num_cuts = num_bytes, 1 + num_bytes % 3
                else:
                    proxy.num_corrupted = 1

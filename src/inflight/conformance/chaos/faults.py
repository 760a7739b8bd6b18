"""How faults strike: an endpoint seen through a network that loses, repeats and reorders calls, and a sender whose
buckets are cut and damaged.

Both wear the contract's Protocols, so that the library cannot tell them from the real thing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch

from inflight.conformance.chaos.plan import SENDER, Fault, FaultPlan, Kind, Step
from inflight.conformance.chaos.proxy import Rule, TcpProxy
from inflight.conformance.chaos.servers import EmbeddedServer, Fleet
from inflight.contracts import InferenceEndpoint, WeightSender
from inflight.errors import InflightError, TransferError, UnreachableError
from inflight.types import WeightBucket
from inflight.wire import (
    BucketTransfer,
    Capabilities,
    ChatCompletion,
    ChatCompletionRequest,
    GenerateRequest,
    GenerateResponse,
    InFlightPolicy,
    ProcessGroupSpec,
    PullSpec,
    TransportSpec,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
)

T = TypeVar("T")
Call = Callable[[InferenceEndpoint], Awaitable[Any]]

_LATE_S = 6.0
"""How long calls that come late are waited for at the end."""


@dataclass(slots=True)
class _LateCall:
    """A call that arrives after ``num_calls`` more calls of its endpoint."""

    server: EmbeddedServer
    call: Call
    num_calls: int


class Faults:
    """A plan under way: which fault is due, which have struck, and the calls that come late. Used by several threads.

    ``lease_s`` takes the place of longer leases while faults strike, so that no schedule waits for the library's own.
    """

    def __init__(self, plan: FaultPlan, fleet: Fleet, lease_s: float, *, cancel_arrives: bool) -> None:
        self.fleet = fleet
        self.lease_s = lease_s
        self.cancel_arrives = cancel_arrives
        self.struck: list[Fault] = []
        self.take_over = threading.Event()
        self.proxied = {f.endpoint for f in plan.faults if f.kind in (Kind.CUT, Kind.CORRUPT) and f.endpoint != SENDER}
        self.proxies: dict[tuple[int, int], TcpProxy] = {}
        self._lock = threading.Lock()
        self._pending = list(plan.faults)
        self._counts: Counter[tuple[int, Step, int]] = Counter()
        self._late: list[_LateCall] = []
        self._arriving: list[Future[Any]] = []

    def due(self, endpoint: int, step: Step, bucket: int = 0) -> Fault | None:
        """Count one call; return the fault that strikes it."""
        with self._lock:
            key = (endpoint, step, bucket)
            occurrence = self._counts[key]
            self._counts[key] += 1
            for fault in self._pending:
                is_here = (fault.endpoint, fault.step) == (endpoint, step) and fault.occurrence <= occurrence
                if is_here and (step not in (Step.RECEIVE, Step.SEND) or fault.bucket == bucket):
                    self._pending.remove(fault)
                    self.struck.append(fault)
                    return fault
        return None

    def stop(self) -> None:
        """From now on nothing strikes."""
        with self._lock:
            self._pending = []
            self.lease_s = float("inf")

    def postpone(self, server: EmbeddedServer, call: Call, num_calls: int) -> None:
        """Have a call arrive after later ones."""
        with self._lock:
            self._late.append(_LateCall(server, call, num_calls))

    def count(self, server: EmbeddedServer) -> None:
        """Note that a call of ``server`` was made: those that waited for it arrive."""
        with self._lock:
            for late in self._late:
                late.num_calls -= late.server is server
            now = [late for late in self._late if late.num_calls <= 0]
            self._late = [late for late in self._late if late.num_calls > 0]
        for late in now:
            self._arrive(late)

    def flush(self) -> None:
        """Have every call arrive that is late still, and return when all of them ended."""
        with self._lock:
            now, self._late = self._late, []
        for late in now:
            self._arrive(late)
        deadline = time.monotonic() + _LATE_S
        for future in self._arriving:
            with contextlib.suppress(InflightError, TimeoutError):
                future.result(max(0.01, deadline - time.monotonic()))
            future.cancel()

    def _arrive(self, late: _LateCall) -> None:
        self._arriving.append(self.fleet.start(_ignored(late.server.deliver(late.call))))


async def _ignored(call: Awaitable[Any]) -> None:
    with contextlib.suppress(InflightError):
        await call


@dataclass(slots=True)
class TrainerLife:
    """Whether a trainer lives, and its epoch: its calls stop when it is dead."""

    is_dead: bool = False
    epoch: int = 0
    requested: list[WeightUpdate] = field(default_factory=list)


class FaultyEndpoint:
    """Endpoint number ``index`` as one trainer, or one client, sees it. Satisfies `InferenceEndpoint`."""

    def __init__(self, server: EmbeddedServer, index: int, faults: Faults, trainer: TrainerLife) -> None:
        self._server = server
        self._index = index
        self._faults = faults
        self._trainer = trainer

    @property
    def name(self) -> str:
        """The server's name."""
        return self._server.name

    async def capabilities(self) -> Capabilities:
        """See `InferenceEndpoint.capabilities`."""
        return await self._called(Step.CONNECT, lambda e: e.capabilities())

    async def init_process_group(self, spec: TransportSpec) -> None:
        """See `InferenceEndpoint.init_process_group`."""
        if self._index in self._faults.proxied:
            spec = await self._proxied(spec)
        await self._called(Step.JOIN, lambda e: e.init_process_group(spec))
        await self._bridged(self._server.note_fence(spec.epoch))

    async def request_weight_update(self, update: WeightUpdate) -> None:
        """See `InferenceEndpoint.request_weight_update`."""
        update = update.model_copy(update={"lease_s": min(update.lease_s, self._faults.lease_s)})
        if update.in_flight is InFlightPolicy.ABORT:
            self._server.num_aborting_updates += 1

        async def request(endpoint: InferenceEndpoint) -> None:
            life = self._server.life
            was_over = life is not None and update.ref in life.over
            await endpoint.request_weight_update(update)
            if was_over and life is not None:
                life.problems.append(f"a late request opened session {update.session_id} again, which was over")

        await self._called(Step.REQUEST, request)

    async def receive_weights(self, bucket: BucketTransfer) -> None:
        """See `InferenceEndpoint.receive_weights`."""
        await self._called(Step.RECEIVE, lambda e: e.receive_weights(bucket), bucket.bucket_index)

    async def commit_weight_update(self, ref: UpdateRef) -> WeightVersion:
        """See `InferenceEndpoint.commit_weight_update`."""

        async def commit(endpoint: InferenceEndpoint) -> WeightVersion:
            answer = await endpoint.commit_weight_update(ref)
            await self._server.shade()  # notes what it serves now
            self._note_over(ref)
            return answer

        return await self._called(Step.COMMIT, commit)

    async def abort_weight_update(self, ref: UpdateRef) -> WeightVersion:
        """See `InferenceEndpoint.abort_weight_update`."""

        async def abort(endpoint: InferenceEndpoint) -> WeightVersion:
            answer = await endpoint.abort_weight_update(ref)
            self._note_over(ref)
            return answer

        return await self._called(Step.ABORT, abort)

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """See `InferenceEndpoint.generate`."""
        return await self._called(Step.GENERATE, lambda e: e.generate(request))

    async def chat_completion(self, request: ChatCompletionRequest) -> ChatCompletion:
        """See `InferenceEndpoint.chat_completion`."""
        return await self._called(Step.GENERATE, lambda e: e.chat_completion(request))

    async def weight_version(self) -> WeightVersion:
        """See `InferenceEndpoint.weight_version`."""
        return await self._called(Step.VERSION, lambda e: e.weight_version())

    async def aclose(self) -> None:
        """See `InferenceEndpoint.aclose`. The server goes on."""

    def _note_over(self, ref: UpdateRef) -> None:
        if self._server.life is not None:
            self._server.life.over.add(ref)

    async def _called(self, step: Step, call: Callable[[InferenceEndpoint], Awaitable[T]], bucket: int = 0) -> T:
        if self._trainer.is_dead:
            raise UnreachableError("this trainer is dead", self.name)
        fault = self._faults.due(self._index, step, bucket)
        try:
            answer = await (self._delivered(call) if fault is None else self._struck(fault, call))
        finally:
            if step is not Step.GENERATE:
                self._faults.count(self._server)
        if self._trainer.is_dead:
            raise UnreachableError("this trainer is dead", self.name)
        return answer

    async def _struck(self, fault: Fault, call: Callable[[InferenceEndpoint], Awaitable[T]]) -> T:
        """Return what the call returns under a fault."""
        lost = UnreachableError(f"lost: {fault}", self.name)
        match fault.kind:
            case Kind.DELAY:
                await asyncio.sleep(fault.seconds)
            case Kind.LOSE_REQUEST:
                raise lost
            case Kind.SILENCE:
                await asyncio.get_running_loop().create_future()
            case Kind.LOSE_ANSWER:
                await self._delivered(call)
                raise lost
            case Kind.REPEAT:
                again = asyncio.ensure_future(_ignored(self._delivered(call)))
                try:
                    return await self._delivered(call)
                finally:
                    await asyncio.wait([again], timeout=0.5)
                    again.cancel()
            case Kind.REPEAT_LATE:
                self._faults.postpone(self._server, call, fault.num_calls)
            case Kind.REORDER:
                self._faults.postpone(self._server, call, fault.num_calls)
                raise lost
            case Kind.KILL | Kind.RESTART:
                back_after_s = None if fault.kind is Kind.KILL else 0.1 + fault.seconds
                killing = asyncio.ensure_future(self._killed(fault.seconds / 4, back_after_s))
                try:
                    return await self._delivered(call)
                finally:
                    await killing
            case Kind.TEAR:
                if (life := self._server.life) is not None:
                    life.tears += 1
            case Kind.KILL_TRAINER:
                self._trainer.is_dead = True
                raise lost
            case Kind.TAKE_OVER:
                self._faults.take_over.set()
                await asyncio.sleep(fault.seconds)
            case Kind.CUT | Kind.CORRUPT:
                self._spoil_proxies(fault)
        return await self._delivered(call)

    async def _killed(self, after_s: float, back_after_s: float | None) -> None:
        await asyncio.sleep(after_s)
        await self._bridged(self._server.kill(back_after_s))

    async def _delivered(self, call: Callable[[InferenceEndpoint], Awaitable[T]]) -> T:
        return await self._bridged(self._server.deliver(call))

    async def _bridged(self, call: Coroutine[Any, Any, T]) -> T:
        """Return what a call returns that runs in the fleet's loop; whether it ends with its caller, is drawn."""
        future = asyncio.wrap_future(self._faults.fleet.start(call))
        if self._faults.cancel_arrives:
            return await future
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(future)

    async def _proxied(self, spec: TransportSpec) -> TransportSpec:
        """Return the same spec through a proxy of its own."""
        if isinstance(spec, ProcessGroupSpec):
            proxy = await self._proxy(spec.master_port)
            return spec.model_copy(update={"master_port": proxy.port})
        if isinstance(spec, PullSpec):
            proxy = await self._proxy(urlsplit(spec.url).port or 0)
            return spec.model_copy(update={"url": f"http://127.0.0.1:{proxy.port}"})
        return spec

    async def _proxy(self, port: int) -> TcpProxy:
        proxy = self._faults.proxies.get((self._index, port))
        if proxy is None:
            proxy = self._faults.proxies[self._index, port] = TcpProxy("127.0.0.1", port)
            await self._bridged(proxy.start())
        return proxy

    def _spoil_proxies(self, fault: Fault) -> None:
        for (index, _), proxy in self._faults.proxies.items():
            if index == self._index:
                num_bytes = int(fault.seconds * 200_000)
                if fault.kind is Kind.CUT:
                    proxy.rule = Rule(cut_after_bytes=num_bytes, num_cuts=1 + num_bytes % 3)
                else:
                    proxy.rule = Rule(num_corrupted=1)


class FaultySender:
    """The trainer's end of a transport whose buckets are struck. ``directory`` is where it stores them."""

    def __init__(self, inner: WeightSender, directory: Path, faults: Faults, trainer: TrainerLife) -> None:
        self._inner = inner
        self._directory = directory
        self._faults = faults
        self._trainer = trainer
        self._update: WeightUpdate | None = None

    @property
    def is_collective(self) -> bool:
        """See `WeightSender.is_collective`."""
        return self._inner.is_collective

    def specs(self, run_id: str, num_ranks: Sequence[int], timeout_s: float) -> Sequence[TransportSpec]:
        """See `WeightSender.specs`."""
        self._require_life()
        return self._inner.specs(run_id, num_ranks, timeout_s)

    def join(self) -> None:
        """See `WeightSender.join`."""
        self._require_life()
        self._inner.join()

    def begin(self, update: WeightUpdate) -> None:
        """See `WeightSender.begin`."""
        self._require_life()
        self._update = update
        self._inner.begin(update)

    def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        """See `WeightSender.send`."""
        self._require_life()
        fault = self._faults.due(SENDER, Step.SEND, bucket.index)
        kind = None if fault is None else fault.kind
        if fault is not None and kind in (Kind.DELAY, Kind.TAKE_OVER):
            if kind is Kind.TAKE_OVER:
                self._faults.take_over.set()
            time.sleep(fault.seconds)
        if kind is Kind.KILL_TRAINER:
            self._trainer.is_dead = True
            self.abort()
            raise TransferError("this trainer is dead")
        if self.is_collective:
            if kind is Kind.CORRUPT:
                bucket = _damaged(bucket)
            elif fault is not None and kind is Kind.CUT:
                threading.Timer(fault.seconds / 4, self._inner.abort).start()
            self._inner.send(bucket, timeout_s)
            return
        self._inner.send(bucket, timeout_s)
        if fault is not None and kind in (Kind.CUT, Kind.CORRUPT):
            self._spoil(bucket.index, fault)

    def end(self, *, is_done: bool) -> None:
        """See `WeightSender.end`."""
        if not self._trainer.is_dead:
            self._inner.end(is_done=is_done)

    def abort(self) -> None:
        """See `WeightSender.abort`. A dead trainer removes nothing; its connections are gone."""
        if self._inner.is_collective or not self._trainer.is_dead:
            self._inner.abort()

    def _require_life(self) -> None:
        if self._trainer.is_dead:
            raise TransferError("this trainer is dead")

    def _spoil(self, index: int, fault: Fault) -> None:
        """Damage a bucket that is stored: bytes changed, file truncated, or removed."""
        assert self._update is not None
        session = f"{self._update.version}-{self._update.session_id}"
        record = next(iter(self._directory.rglob(f"{session}.{index:05d}.json")), None)
        if record is not None:  # shared memory: a bucket is a part of the arena, and the record says where
            if fault.kind is Kind.CUT:
                record.unlink()
                return
            said = json.loads(record.read_text())
            _flip(record.with_name(said["arena"]), said["offset"] + said["size_bytes"] // 2)
            return
        file = next(path for path in self._directory.rglob(f"{index:05d}.safetensors") if path.parent.name == session)
        if fault.kind is Kind.CORRUPT:
            _flip(file, file.stat().st_size - 5)
        elif fault.num_calls % 2:
            file.unlink()
        else:
            with file.open("r+b") as opened:
                opened.truncate(file.stat().st_size // 2)


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x15]))


def _damaged(bucket: WeightBucket) -> WeightBucket:
    """Return a copy with one byte changed."""
    tensors = [tensor.clone() for tensor in bucket.tensors]
    tensors[-1].view(-1).view(torch.uint8)[-1] ^= 0x15
    return replace(bucket, tensors=tuple(tensors))

"""An engine server that one process owns: only that process updates the server, and every request passes through it.

This is for servers whose answers do not report the weight version. Requests wait here while weights change, and weights
change only when no request runs, so that each completion has a single version, which this process knows. Incoming
weights are staged in this process, and one call of the adapter then replaces the server's weights with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING

from inflight.base.requirements import require
from inflight.base.tasks import run_together
from inflight.contracts import InferenceEndpoint
from inflight.engines.detached_calls import AttachOnce
from inflight.engines.requests import check_fit
from inflight.engines.routes import EngineRoutes
from inflight.engines.version_labels import ServedVersion
from inflight.errors import InvalidRequestError, UnsupportedError
from inflight.weights.receive.adapter import PausableEngine
from inflight.weights.receive.receiver import ReceivingEndpoint, UpdateReceiver
from inflight.wire import (
    Capabilities,
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    GenerateRequest,
    GenerateResponse,
    Needs,
    TensorSpec,
    UpdateTimings,
    WeightUpdate,
    WeightVersion,
)

if TYPE_CHECKING:
    import torch


class OwnedEndpoint(ReceivingEndpoint, InferenceEndpoint, PausableEngine):
    """One server, accessed through ``routes``. The only in-flight policy that it supports is ``drain``.

    An instance belongs to the event loop in which it is first used. A later instance, or one in another process, cannot
    know which version the server serves. If several processes publish or sample, put the contract's own server in front
    of one instance.
    """

    def __init__(self, routes: EngineRoutes) -> None:
        self._routes = routes
        self._attaching = AttachOnce(self._attached)
        self._gate = asyncio.Event()
        self._gate.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._running: set[str] = set()
        self._num_running = 0
        self._version = 0  # version of the current weights
        self._timings: UpdateTimings | None = None
        # Set by the first call:
        self._updates: UpdateReceiver
        self._slots: asyncio.Semaphore

    @property
    def name(self) -> str:
        return self._routes.url

    @abstractmethod
    async def _attach(self) -> tuple[Capabilities, Sequence[TensorSpec] | None]:
        """Return the capabilities of the server and, if known, the tensors of its model. Raises `ConfigError`."""

    @abstractmethod
    async def _complete(self, request: GenerateRequest, index: int, version: int) -> Completion:
        """Return one completion of the prompt, sampled with ``version``."""

    @abstractmethod
    async def _replace(self, update: WeightUpdate, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the server's weights. If this raises, they count as torn."""

    async def _attached(self) -> Capabilities:
        from inflight.weights.receive.staged_sink import StagedSink
        from inflight.weights.transports import make_receiver

        can, specs = await self._attach()
        self._slots = asyncio.Semaphore(can.max_concurrent_sequences)
        self._sink = StagedSink(make_receiver)
        self._updates = UpdateReceiver(self, self._sink, specs, can)
        served = await self._served()
        self._updates.session.adopt_report(
            served.version, served.run_id, torn=served.torn, session_id=served.session_id
        )
        self._version = served.version
        return can

    async def _served(self) -> ServedVersion:
        """Return the version that the server serves; 0, the version of its initial checkpoint, if it reports none."""
        return ServedVersion(0, None)

    async def capabilities(self) -> Capabilities:
        """Return the server's capabilities. Raises `ConfigError` if this process cannot attach to the server."""
        return await self._attaching.result()

    async def receiver(self) -> UpdateReceiver:
        await self.capabilities()
        return self._updates

    async def weight_version(self) -> WeightVersion:
        return (await self.receiver()).weight_version(num_running=self._num_running, last_update=self._timings)

    async def num_running(self) -> int:
        return self._num_running

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        can = await self.capabilities()
        require(can, Needs.of_request(request), self.name)
        check_fit(request, max_model_len=can.max_model_len, vocab_size=can.vocab_size)
        if request.request_id in self._running:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use by a running request")
        self._running.add(request.request_id)
        try:
            completions = await run_together(*(self._one(request, index) for index in range(request.sampling.n)))
        finally:
            self._running.discard(request.request_id)
        return GenerateResponse(request_id=request.request_id, completions=tuple(completions))

    async def _one(self, request: GenerateRequest, index: int) -> Completion:
        async with self._sampling() as version:
            return await self._complete(request, index, version)

    @contextlib.asynccontextmanager
    async def _sampling(self) -> AsyncIterator[int]:
        """Keep the weights unchanged while the context is open, and yield their version. Raises `PoisonedError`."""
        self._updates.session.refuse_to_sample()
        async with self._slots:
            await self._gate.wait()
            self._updates.session.refuse_to_sample()
            self._num_running += 1
            self._idle.clear()
            try:
                yield self._version
            finally:
                self._num_running -= 1
                if self._num_running == 0:
                    self._idle.set()

    async def chat_completion(self, request: ChatCompletionRequest) -> ChatCompletion:
        raise UnsupportedError(f"{self.name} does not support chat")

    async def pause(self, update: WeightUpdate) -> None:
        self._gate.clear()
        try:
            await self._idle.wait()
        except BaseException:
            self._gate.set()
            raise

    async def apply(self, update: WeightUpdate) -> None:
        started = time.monotonic()
        await self._replace(update, dict(self._sink.take()))
        seconds = time.monotonic() - started
        self._timings = UpdateTimings(paused_s=seconds, load_s=seconds)
        self._version = update.version
        self._gate.set()

    async def resume(self) -> None:
        self._gate.set()

    async def fail_requests(self) -> None:
        """Refuse waiting requests. No request is running, because weights change only after a drain."""
        self._gate.set()

    async def aclose(self) -> None:
        if self._attaching.has_succeeded:
            await self._updates.aclose()
        await self._attaching.aclose()
        await self._routes.aclose()

"""Weight updates over SGLang's routes: the pause, the load and the commit of one server.

The commit loads staged weights from files, and SGLang's session is open only during the pause. Weights that SGLang
itself receives are loaded as they arrive: see `inflight_sglang.native`. If this process dies while a session is open,
the session shows other clients that the weights may be torn.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from inflight.base.tasks import TaskOwner
from inflight.base.transfer_time import MOVE_S
from inflight.engines.detached_calls import ignore_engine_errors
from inflight.engines.requests import RequestGate
from inflight.engines.routes import EngineRoutes, error_text_of
from inflight.engines.timings import LastUpdate
from inflight.engines.version_labels import ServedVersion, label_of, parse_label, released_label, restored_label
from inflight.errors import BusyError, ProtocolError, TransferError, UpdateRefusedError
from inflight.weights.receive.adapter import PausableEngine
from inflight.weights.receive.releasing import IDLE_S, ReleasableEngine
from inflight.wire import InFlightPolicy, TransportSpec, UpdateRef, UpdateTimings, WeightUpdate
from inflight_sglang import pausing
from inflight_sglang.checkpoint_files import CheckpointFiles

STUCK_S = 1860.0
"""Slightly longer than torch waits for a broadcast in a group that SGLang joined."""
_NO_FILES = "Failed to get weights iterator: Cannot find any model weights"
"""SGLang's answer for an empty directory that it can see. If SGLang cannot see a directory, it searches the Hub for it.
"""


class SglangUpdates(PausableEngine, ReleasableEngine):
    """The weights of one server. ``gate`` is closed while they change.

    If ``files`` is set, it returns the files of the open update, and updates are staged; otherwise they are native.
    """

    def __init__(
        self,
        routes: EngineRoutes,
        gate: RequestGate,
        background: TaskOwner,
        last: LastUpdate,
    ) -> None:
        self._routes = routes
        self._gate = gate
        self._background = background
        self.last = last
        self._lock = asyncio.Lock()
        self._update: UpdateRef | None = None
        self._was_torn = False
        self._session_is_open = False
        self._has_seen_files = False
        self._loading: asyncio.Future[None] | None = None
        self._settling: asyncio.Future[None] | None = None
        self._paused_since = 0.0
        self._is_draining = False
        self.files: Callable[[], CheckpointFiles] | None = None
        self.is_torn = False
        self.has_loaded = False
        """Whether a byte of the open update may be in the model."""

    async def clear(self, spec: TransportSpec, also: Callable[[], Awaitable[None]] | None = None) -> None:
        """Run ``also``, then end the session and the pause of a dead publisher on the server.

        Raises `TransferError` if that takes too long.
        """
        self._has_seen_files = False
        try:
            async with asyncio.timeout(spec.timeout_s), self._exclusive_access():
                if also is not None:
                    await also()
                await self._clear()
        except TimeoutError as error:
            raise TransferError(
                f"the engine was still busy after {spec.timeout_s:g} s: it is waiting for the rest of a bucket from "
                "another publisher, which must leave its group first"
            ) from error

    async def run_alone(self, call: Callable[[], Awaitable[None]]) -> None:
        """Run ``call`` once no other call is pending in the engine."""
        async with self._exclusive_access():
            await call()

    @property
    def is_loading(self) -> bool:
        """Whether the engine is loading a bucket, or waiting for one."""
        return self._loading is not None and not self._loading.done()

    def begin_load(self, call: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        """Begin a call that makes the engine load a bucket. No other call begins until this one has ended by itself."""
        self._loading = self._background.start(call)
        return self._loading

    async def open_session(self) -> None:
        """Open SGLang's session before SGLang itself receives the first bucket."""
        if not self._session_is_open:
            try:
                await self._routes.post("/begin_weight_update", {"selector": "target"})
            except ProtocolError as error:
                raise TransferError(f"the engine refused to begin a weight update: {error.message}") from error
            self._session_is_open = True

    async def pause(self, update: WeightUpdate) -> None:
        ref = update.ref
        self.has_loaded = False
        self._update, self._was_torn = ref, self.is_torn
        if not self.is_torn:
            self._gate.is_open.clear()
        try:
            async with self._exclusive_access():
                try:
                    self._is_draining = update.in_flight is InFlightPolicy.DRAIN
                    self._paused_since = await pausing.stop(self._routes, update.in_flight, lambda: self._gate.num_sent)
                    if self.files is not None:
                        await self._begin_session()
                        if not self._has_seen_files:
                            await self._check_files_are_visible(self.files())
                except BaseException:
                    await asyncio.shield(self._resume_after_failure())
                    raise
        except BaseException:
            if self._update is ref:
                self._gate.is_open.set()
            raise
        finally:
            self._is_draining = False

    async def apply(self, update: WeightUpdate) -> None:
        """Apply the update. The version label changes while nothing is being sampled, so a new span starts with the
        first token sampled from the new weights.
        """
        async with self._exclusive_access():
            started = time.monotonic()
            if self.files is not None:
                files = self.files()
                self.has_loaded = True
                # The engine itself labels its weights: tokens sampled from then on carry the label.
                body = _body_of_files(files.checkpoint) | {"weight_version": label_of(update.ref)}
                await self._routes.post("/update_weights_from_disk", body, STUCK_S)
            await self._routes.post("/end_weight_update", {})
            self._session_is_open = False
            loaded = time.monotonic()
            if self.files is None:
                await pausing.set_label(self._routes, label_of(update.ref))
            await pausing.resume_sampling(self._routes)
            timings = UpdateTimings(load_s=loaded - started, paused_s=time.monotonic() - self._paused_since)
            self.last.timings = timings
            if self._gate.has_requests:
                self._background.start(self.last.note_first_token(timings, self._probe(), loaded))
            self.is_torn = False
            self._gate.is_open.set()

    async def resume(self) -> None:
        try:
            async with self._exclusive_access():
                await self._end_session()
                await self._resume_sampling()
        finally:
            self._gate.is_open.set()

    async def fail_requests(self) -> None:
        """End all requests. The engine stays paused, and its label shows other clients that its weights are torn.

        If the engine is still waiting for a bucket, this continues in the background. If nothing has been loaded when
        that wait ends, the weights are still intact, and the engine resumes sampling.
        """
        self.is_torn = True
        is_stuck = self.is_loading
        if self._settling is None or self._settling.done():
            self._settling = self._background.start(self._settle(may_be_whole=is_stuck))
        if not is_stuck:
            await asyncio.wait([self._settling])
        self._gate.is_open.set()  # waiting requests are now refused

    async def end_requests(self, rids: Sequence[str]) -> None:
        """Ask the engine to end these requests, unless it is paused; a drain does not count as a pause.

        A paused SGLang does not begin requests. It forgets the abort of a request that has not begun, and ignores
        later aborts of that request.
        """
        if self._is_draining:
            await pausing.abort(self._routes, rids)
        elif self._gate.is_open.is_set():
            async with self._exclusive_access():
                status, _ = await self._routes.ask("GET", "/ready")
                if self._gate.is_open.is_set() and status == 200:
                    await pausing.abort(self._routes, rids)

    async def free_memory(self) -> None:
        """Release memory, after a brief wait for other clients' requests.

        A release while a request is running crashes SGLang. The label changes last, because a resume without a release
        crashes SGLang too.
        """
        self._gate.refuse_if_busy()
        async with self._exclusive_access():
            try:
                async with asyncio.timeout(IDLE_S):
                    await pausing.stop(self._routes, InFlightPolicy.DRAIN, lambda: self._gate.num_sent)
            except TimeoutError as error:
                await pausing.resume_sampling(self._routes)
                raise BusyError(
                    f"memory was not released: requests of other clients were still running after {IDLE_S:g} s; try "
                    "again later"
                ) from error
            await self._routes.post("/release_memory_occupation", {}, MOVE_S)
            await pausing.set_label(self._routes, released_label(await self._served_label()))

    async def take_memory(self) -> None:
        async with self._exclusive_access():
            await self._routes.post("/resume_memory_occupation", {}, MOVE_S)
            await pausing.set_label(self._routes, restored_label(await self._served_label()))
            await pausing.resume_sampling(self._routes)

    async def num_running(self) -> int:
        """Return the number of running requests, including those of other clients."""
        loads = await self._routes.get("/v1/loads")
        return sum(int(load["num_running_reqs"]) for load in loads["loads"])

    def adopt_label(self, served: ServedVersion) -> bool:
        """Adopt the state in the server's label; return whether the server's weights are torn."""
        if self._settling is None or self._settling.done():
            self.is_torn = served.torn
        return self.is_torn or served.torn

    # ---------------------------------------------------------------------------------------------------- details

    async def _begin_session(self) -> None:
        """Open SGLang's only session for a load, because two concurrent loads would crash SGLang."""
        self._session_is_open = True
        try:
            await self._routes.post("/begin_weight_update", {"selector": "target"})
        except ProtocolError as error:
            self._session_is_open = False
            raise UpdateRefusedError(f"the engine refused to begin loading the weights: {error.message}") from error

    async def _resume_after_failure(self) -> None:
        await ignore_engine_errors(self._end_session())
        await self._resume_sampling()

    async def _check_files_are_visible(self, files: CheckpointFiles) -> None:
        """Check that the server can see this process's files. The probe directory is empty, so nothing is loaded."""
        status, answer = await self._routes.ask("POST", "/update_weights_from_disk", _body_of_files(files.probe))
        if status == 200 or not error_text_of(answer).startswith(_NO_FILES):
            raise UpdateRefusedError(
                "the server cannot see the files of this process, although its address is on this host; attach with "
                f"?updates=native. The server answered: {error_text_of(answer)}"
            )
        self._has_seen_files = True

    async def _probe(self) -> None:
        name = f"inflight-first-token-{uuid.uuid4().hex}"
        body = {"input_ids": [0], "rid": name, "extra_key": name}
        await self._routes.post("/generate", body | {"sampling_params": {"max_new_tokens": 1, "ignore_eos": True}})

    async def _resume_sampling(self) -> None:
        if not self.is_torn:
            await pausing.resume_sampling(self._routes)

    async def _end_session(self) -> None:
        if self._session_is_open:
            self._session_is_open = False
            await self._routes.post("/end_weight_update", {})

    async def _settle(self, *, may_be_whole: bool) -> None:
        """Wait for the engine's last call, then resume sampling if the weights are intact.

        Otherwise label the weights as torn and end all requests.
        """
        if self._loading is not None:
            await asyncio.wait([self._loading])
        async with self._lock:
            if may_be_whole and not self.has_loaded:
                await ignore_engine_errors(self._end_session())
                self.is_torn = self._was_torn
                await ignore_engine_errors(self._resume_sampling())
                return
            assert self._update is not None
            await ignore_engine_errors(self._end_session())
            await pausing.poison(self._routes, label_of(self._update, torn=True))

    async def _clear(self) -> None:
        """End whatever another client left open: its session and its pause.

        Torn weights stay paused, and so does an engine whose memory is released.
        """
        served = parse_label(await self._served_label())
        self.is_torn = served.torn
        if served.released:
            return
        status, _ = await self._routes.ask("GET", "/ready")
        if status == 200:  # not paused: ending a session would wait until nothing runs
            return
        was_ours, self._session_is_open = self._session_is_open, False
        status, _ = await self._routes.ask("POST", "/end_weight_update", {})
        if status == 200 and not was_ours and not served.torn:  # another client died after the first bucket
            self.is_torn = True
            ref = UpdateRef(run_id=served.run_id or "checkpoint", version=served.version)
            await pausing.poison(self._routes, label_of(ref, torn=True))
        await self._resume_sampling()

    async def _served_label(self) -> str:
        return str((await self._routes.get("/model_info"))["weight_version"])

    @contextlib.asynccontextmanager
    async def _exclusive_access(self) -> AsyncIterator[None]:
        """Hold the lock, once no call is pending in the engine."""
        while True:
            while unsettled := self._pending_calls():
                await asyncio.wait(unsettled)
            async with self._lock:
                if not self._pending_calls():
                    yield
                    return

    def _pending_calls(self) -> list[asyncio.Future[None]]:
        return [task for task in (self._loading, self._settling) if task is not None and not task.done()]


def _body_of_files(directory: Path) -> dict[str, Any]:
    """Return the body of ``/update_weights_from_disk``. SGLang refuses to flush while requests are paused."""
    common = {"load_format": "safetensors", "flush_cache": False, "abort_all_requests": False}
    return {"model_path": str(directory), **common}

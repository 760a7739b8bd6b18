"""Weight updates over vLLM's routes: the pause, the group, the buckets and the commit of one server.

On the engine's side, `inflight_vllm.transfer_engine` stages what arrives, and `inflight_vllm.engine_core` commits it.
Until the commit, the old weights are served. Calls to the engine are made one after another.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from inflight.base.tasks import TaskOwner
from inflight.base.transfer_time import MOVE_S
from inflight.engines.detached_calls import ignore_engine_errors
from inflight.engines.requests import RequestGate
from inflight.engines.routes import EngineRoutes
from inflight.engines.timings import LastUpdate
from inflight.engines.version_labels import label_of, parse_label, released_label, restored_label
from inflight.errors import (
    BusyError,
    DeadlineError,
    EndpointError,
    InflightError,
    ProtocolError,
    TransferError,
    UpdateRefusedError,
)
from inflight.weights.receive.adapter import BucketSink, PausableEngine
from inflight.weights.receive.releasing import IDLE_S, ReleasableEngine
from inflight.wire import (
    BucketSpec,
    BucketTransfer,
    InFlightPolicy,
    TensorSpec,
    TransportSpec,
    UpdateRef,
    UpdateTimings,
    WeightUpdate,
)

PLUGIN_PROTOCOL = 7
"""Version of the plug-in's protocol, which is compared when a client attaches. It increases when a client of the
previous version would misread the plug-in."""
COMMIT = "inflight_commit"
"""The method of ``/collective_rpc`` that loads, labels and resumes: see `inflight_vllm.engine_core`."""
STAGE = "inflight_stage"
"""The method that begins an update, receives a bucket or discards received buckets, without changing the model. Its
argument ``info`` has the fields of `inflight_vllm.transfer_engine.UpdateInfo`. It returns what `STATUS` returns."""
STATUS = "inflight_status"
"""The method that reports the progress of staging in each worker."""
PAUSES = {
    InFlightPolicy.KEEP: "mode=keep&clear_cache=false",  # after clearing the cache, vLLM would recompute everything
    InFlightPolicy.RECOMPUTE: "mode=keep&clear_cache=true",
    InFlightPolicy.DRAIN: "mode=wait&clear_cache=true",
    InFlightPolicy.ABORT: "mode=abort&clear_cache=true",
}
_POLL_S = 0.01
"""Seconds between two status calls."""
_ANSWER_S = 5.0
"""Seconds that the engine has to answer after the timeout of a bucket has expired."""


class VllmUpdates(PausableEngine, ReleasableEngine, BucketSink):
    """The weights of one server. ``gate`` is closed while they change; ``probe`` samples one token."""

    def __init__(
        self,
        routes: EngineRoutes,
        gate: RequestGate,
        background: TaskOwner,
        last: LastUpdate,
        probe: Callable[[], Awaitable[None]],
    ) -> None:
        self._routes = routes
        self._gate = gate
        self._background = background
        self.last = last
        self._probe = probe
        self._lock = asyncio.Lock()
        self._group: str | None = None
        self._update: WeightUpdate | None = None
        self._kept: UpdateRef | None = None
        self._joining: TransportSpec | None = None
        """The latest join, whether pending or done. Any other join has been abandoned."""
        self._has_begun = False
        """Whether the engine may hold staged weights of the update."""
        self._is_torn = False
        self._paused_since = 0.0
        self.has_replicas = False
        """Whether the server runs several engines (data parallel), which pause and resume together."""

    # ------------------------------------------------------------------------------------------------ the sink

    @property
    def has_applied(self) -> bool:
        """Always False: the plug-in stages what arrives."""
        return False

    @property
    def kept(self) -> UpdateRef | None:
        """Return the update that the engine has kept: as reported when the group was formed, or as committed since."""
        return self._kept

    async def join(self, spec: TransportSpec) -> None:
        """Join the group, after ending the session and the pause that a dead publisher left open."""
        self._joining = spec
        async with self._lock:
            self._require(spec)
            await self._clear()
            await self._routes.post("/init_weight_transfer_engine", {"init_info": {"spec": spec.model_dump()}})
            try:
                await self._wait_until_done("joining the weight group", spec.timeout_s, joining=spec)
            except BaseException:
                await asyncio.shield(ignore_engine_errors(self._routes.post("/shutdown_weight_transfer_engine")))
                raise
            # Other clients may have made the engine keep different weights.
            self._kept = _kept_of(await status_of(self._routes))
            self._group = spec.group

    def leave(self) -> None:
        """Leave the group. The engine is notified in the background, or at the end of a pending join."""
        self._joining = None
        if self._group is not None:
            name, self._group = self._group, None
            self._background.start(self._leave(name))

    def begin(self, update: WeightUpdate) -> None:
        """Begin an update. The engine is notified when sampling is paused, or with the first bucket."""
        self._update = update

    async def receive(self, transfer: BucketTransfer, bucket: BucketSpec, tensors: Sequence[TensorSpec]) -> None:
        """Receive a bucket, after the pause if one is still pending."""
        update = self._update
        assert update is not None  # the session lets no bucket through without an update
        await asyncio.sleep(0)  # a pause requested at the same moment takes the lock first
        async with self._lock:
            if update.staged and bucket.index == 0:
                await self._begin(update)
        what = f"receiving bucket {bucket.index}"
        try:
            statuses = await self._stage("bucket", transfer.timeout_s + _ANSWER_S, transfer=transfer.model_dump())
        except ProtocolError as error:
            raise TransferError(f"bucket {bucket.index} was refused by the engine: {error.message}") from error
        except DeadlineError as error:
            raise TransferError(f"{what} failed: the engine had not finished after {transfer.timeout_s:g} s") from error
        await self._wait_until_done(what, transfer.timeout_s, statuses=statuses)

    def note_committed(self) -> None:
        self._kept = self._update.ref if self._update is not None and self._update.keep else None

    # ----------------------------------------------------------------------------------------------- the engine

    async def pause(self, update: WeightUpdate) -> None:
        """Pause sampling, unless the commit in `apply` pauses it."""
        self._gate.is_open.clear()
        if self._pauses_in_commit(update):
            return
        try:
            async with self._lock:
                await self._routes.post(
                    f"/pause?{PAUSES[update.in_flight]}", timeout_s=update.deadline_s + update.lease_s
                )
                self._paused_since = time.monotonic()
                if not update.staged:
                    await self._begin(update)
        except BaseException:
            await self.resume()
            raise

    async def apply(self, update: WeightUpdate) -> None:
        async with self._lock:
            timings = await self._commit(update)
            if self.has_replicas:
                await self._routes.post("/resume")
            resumed = time.monotonic()
            if not self._pauses_in_commit(update):
                timings = timings.model_copy(update={"paused_s": resumed - self._paused_since})
            self._is_torn = False
            self.last.timings = timings
            if self._gate.has_requests:
                probing = self._background.start(self._probe())
                self._background.start(self.last.note_first_token(timings, probing, resumed))
            self._gate.is_open.set()

    def _pauses_in_commit(self, update: WeightUpdate) -> bool:
        """Return whether the commit itself pauses sampling.

        For policies other than ``keep``, vLLM's route also clears the server's caches and waits for requests. Replicas
        resume together, and would wait for a replica that has failed to load.
        """
        return update.staged and update.in_flight is InFlightPolicy.KEEP and not self.has_replicas

    async def _commit(self, update: WeightUpdate) -> UpdateTimings:
        self._has_begun = False
        pauses = self._pauses_in_commit(update)
        method = {"label": label_of(update.ref), "pauses": pauses, "resumes": not self.has_replicas}
        timeout_s = update.lease_s + (update.deadline_s if pauses else 0.0)
        answer = await self._routes.post("/collective_rpc", {"method": COMMIT, "kwargs": method}, timeout_s)
        return UpdateTimings.model_validate(answer["results"][0])

    async def resume(self) -> None:
        """Resume sampling; continues in the background if the caller is cancelled."""
        await asyncio.shield(self._background.start(self._end_and_resume()))

    async def _end_and_resume(self) -> None:
        try:
            async with self._lock:
                await self._forget()
                if not self._is_torn:
                    await self._resume()
        finally:
            self._gate.is_open.set()  # waiting requests themselves notice that the server is unreachable

    async def fail_requests(self) -> None:
        """End all requests. The engine stays paused, and its label shows other clients that its weights are torn."""
        await asyncio.shield(self._background.start(self._fail_requests()))

    async def _fail_requests(self) -> None:
        try:
            async with self._lock:
                self._is_torn = True
                await self._forget(force=True)
                served = parse_label(await self._served_label())
                if not served.torn:
                    await self._set_label(f"torn:{served.version}@{served.run_id or 'checkpoint'}")
                await self._routes.post("/pause?mode=abort&clear_cache=true")
        finally:
            self._gate.is_open.set()  # waiting requests are now refused

    async def free_memory(self) -> None:
        """Release memory, after a brief wait for other clients' requests, which vLLM would otherwise end."""
        self._gate.refuse_if_busy()
        async with self._lock:
            try:
                await self._routes.post("/pause?mode=wait&clear_cache=true", timeout_s=IDLE_S)
            except DeadlineError as error:
                await self._resume()
                raise BusyError(
                    f"memory was not released: requests of other clients were still running after {IDLE_S:g} s; try "
                    "again later"
                ) from error
            await self._set_label(released_label(await self._served_label()))
            await self._routes.post("/sleep?level=1&mode=keep", timeout_s=MOVE_S)  # level 2 would drop the weights

    async def take_memory(self) -> None:
        """Wake the engine, which can then sample; inflight's clients send nothing before they see the new label."""
        async with self._lock:
            answer = await self._routes.post("/wake_up", timeout_s=MOVE_S)
            if answer.get("status") != "awake":
                raise EndpointError(f"POST /wake_up answered {answer!r} instead of status 'awake'", self._routes.url)
            await self._set_label(restored_label(await self._served_label()))

    async def _served_label(self) -> str:
        return str((await self._routes.get("/weight_info"))["weight_version"])

    async def _set_label(self, label: str) -> None:
        await self._routes.post("/update_weight_version", {"new_version": label})

    async def num_running(self) -> int:
        return self._gate.num_sent

    # -------------------------------------------------------------------------------------------------- details

    async def _begin(self, update: WeightUpdate) -> None:
        await self._check_group()
        self._has_begun = True
        try:
            await self._stage("begin", update=update.model_dump(mode="json"))
        except ProtocolError as error:
            raise UpdateRefusedError(
                f"update to version {update.version} refused by the engine: {error.message}"
            ) from error

    async def _stage(self, source: str, timeout_s: float | None = None, **info: Any) -> list[dict[str, Any]]:
        """Call `STAGE`, and return the status of each worker."""
        return await _statuses(self._routes, STAGE, {"info": {"source": source, **info}}, timeout_s)

    async def _check_group(self) -> None:
        """Raise `TransferError` unless every worker belongs to the group that was joined."""
        for status in await status_of(self._routes):
            if status.get("group") != self._group:
                self._group = None
                raise TransferError(
                    "the engine is not in this client's weight group: it was restarted, or another publisher formed "
                    "a group. Form the group again"
                )

    def _require(self, joining: TransportSpec) -> None:
        if self._joining is not joining:
            raise TransferError("joining the weight group was abandoned: the client has left it, or is joining another")

    async def _wait_until_done(
        self,
        what: str,
        timeout_s: float,
        *,
        joining: TransportSpec | None = None,
        statuses: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Return when the plug-in has finished its work. ``statuses`` are those that it has already reported, if any.

        Raises `TransferError` if the work fails or takes too long, or if the group is lost.
        """
        deadline = time.monotonic() + timeout_s + 1.0  # the engine's own error is more specific
        while True:
            if statuses is None:
                statuses = await status_of(self._routes)
            failed = [status["problem"] for status in statuses if status["phase"] in ("failed", "idle")]
            if failed:
                raise TransferError(f"{what} failed: {failed[0] or 'the group was abandoned'}")
            if joining is not None:
                self._require(joining)
            if all(status["phase"] == "done" for status in statuses):
                return
            if time.monotonic() > deadline:
                raise TransferError(f"{what} failed: the engine had not finished after {timeout_s:g} s")
            statuses = None
            await asyncio.sleep(_POLL_S)

    async def _clear(self) -> None:
        """End whatever another client left open: its session, its group, and its pause.

        Torn weights stay paused, and so does an engine whose memory is released.
        """
        await self._forget(force=True)
        await ignore_engine_errors(self._routes.post("/shutdown_weight_transfer_engine"))
        served = parse_label(await self._served_label())
        self._is_torn = served.torn
        if not (served.torn or served.released):
            await self._resume()

    async def _forget(self, *, force: bool = False) -> None:
        """Make the engine discard the staged weights."""
        if not (self._has_begun or force):
            return
        self._has_begun = False
        await ignore_engine_errors(self._stage("drop" if self._group is None else "forget"))

    async def _leave(self, name: str) -> None:
        async with self._lock:
            if self._joining is not None:
                return  # joining the next group leaves this one
            if self._has_begun:
                await ignore_engine_errors(self._stage("drop"))
                return
            with contextlib.suppress(InflightError):
                # Otherwise, the group belongs to another publisher.
                if all(status.get("group") == name for status in await status_of(self._routes)):
                    await self._routes.post("/shutdown_weight_transfer_engine")

    async def _resume(self) -> None:
        """Resume sampling; vLLM refuses this for a short time while an abandoned drain is still pending."""
        deadline = time.monotonic() + 5.0
        while True:
            try:
                await self._routes.post("/resume")
            except ProtocolError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_POLL_S)
            else:
                return


async def status_of(routes: EngineRoutes) -> list[dict[str, Any]]:
    """Return the status that the plug-in reports in each worker."""
    return await _statuses(routes, STATUS, {}, None)


async def _statuses(
    routes: EngineRoutes, method: str, kwargs: Mapping[str, Any], timeout_s: float | None
) -> list[dict[str, Any]]:
    answer = await routes.post("/collective_rpc", {"method": method, "kwargs": kwargs}, timeout_s)
    results = answer.get("results") if isinstance(answer, dict) else None
    if not results or not all(isinstance(result, dict) for result in results):
        raise ProtocolError(f"POST /collective_rpc {method} answered {answer!r}, not one status per worker", routes.url)
    return list(results)


def _kept_of(statuses: Sequence[Mapping[str, Any]]) -> UpdateRef | None:
    """Return the update that every worker has kept, or None."""
    first, *others = [status.get("kept") for status in statuses]
    return UpdateRef.model_validate(first) if first is not None and all(other == first for other in others) else None

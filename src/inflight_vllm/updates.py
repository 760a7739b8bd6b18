"""Weight updates over vLLM's routes: the hold, the group, the buckets and the commit of one server.

The engine's half is `inflight_vllm.transfer_engine`: it stages what arrives, so that everything before
``finish_weight_update`` leaves the old weights serving. Calls on the engine are made one after another.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from inflight.engines.labels import label_of, parse_label
from inflight.errors import (
    DeadlineError,
    EndpointError,
    InflightError,
    ProtocolError,
    TransferError,
    UnreachableError,
    UpdateRefusedError,
)
from inflight.http.connection import HttpConnection
from inflight.wire import (
    BucketSpec,
    BucketTransfer,
    InFlightPolicy,
    ProcessGroupSpec,
    TensorSpec,
    TransportSpec,
    UpdateRef,
    UpdateTimings,
    WeightUpdate,
)

PROTOCOL = 3
"""Of the engine's half, see `inflight_vllm.transfer_engine.PROTOCOL`."""
_PAUSES = {
    InFlightPolicy.KEEP: "mode=keep&clear_cache=false",  # with the cache cleared, vLLM computes it all again
    InFlightPolicy.RECOMPUTE: "mode=keep&clear_cache=true",
    InFlightPolicy.DRAIN: "mode=wait&clear_cache=true",
    InFlightPolicy.ABORT: "mode=abort&clear_cache=true",
}
_LIVENESS_S = 0.8
"""How long an answer is waited for before the server is asked whether its engine lives, and so long for that one."""
_WAIT_S = 0.02
"""How long the engine's half may keep one status call, while nothing is sampled."""
_POLL_S = 0.01
"""Between two status calls while tokens are sampled."""


class VllmRoutes:
    """The control routes of one server. Raises `ProtocolError` with vLLM's own words for an answer other than 200.

    Each call has a connection of its own: vLLM closes one after it answered status 500 on it, and does not say so.
    """

    def __init__(self, url: str, headers: dict[str, str], timeout_s: float) -> None:
        self._http = HttpConnection(url, keeps_alive=False)
        self._url = url
        self._headers = headers
        self._timeout_s = timeout_s

    async def get(self, path: str, timeout_s: float | None = None) -> Any:
        """Return the JSON of a GET."""
        return await self._ask("GET", path, None, timeout_s or self._timeout_s)

    async def post(self, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """Return the JSON of a POST."""
        return await self._ask("POST", path, body, timeout_s or self._timeout_s)

    async def status(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        """Return what the engine's half says in each worker."""
        answer = await self.post("/collective_rpc", {"method": "inflight_status", "kwargs": {"wait_s": wait_s}})
        results = answer.get("results") if isinstance(answer, dict) else None
        if not results or not all(isinstance(result, dict) for result in results):
            raise ProtocolError(f"POST /collective_rpc inflight_status answered {answer!r}", self._url)
        return list(results)

    async def aclose(self) -> None:
        """Close the connections; the server goes on."""
        await self._http.aclose()

    async def _ask(self, method: str, path: str, body: Any, timeout_s: float) -> Any:
        asking = asyncio.ensure_future(self._http.ask(method, path, body, timeout_s=timeout_s, headers=self._headers))
        try:
            while not (await asyncio.wait({asking}, timeout=_LIVENESS_S))[0]:
                await self._raise_if_dead(f"{method} {path}")
            status, answer = asking.result()
        finally:
            asking.cancel()
        if status != 200:
            raise ProtocolError(f"{method} {path} answered status {status}: {words_of(answer)}", self._url)
        return answer

    async def _raise_if_dead(self, waiting_for: str) -> None:
        """Raise `EndpointError` if the server says that its engine has died; it never answers some calls then."""
        with contextlib.suppress(DeadlineError, UnreachableError):
            status, _ = await self._http.exchange("GET", "/health", timeout_s=_LIVENESS_S, headers=self._headers)
            if status == 503:
                raise EndpointError(
                    f"{waiting_for} has no answer, and GET /health says that the engine has died", self._url
                )


def words_of(answer: Any) -> str:
    """Return what vLLM says in an answer that is an error."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:300]


class VllmUpdates:
    """Satisfies `HeldEngine` and `WeightIntake`. ``is_open`` is set while requests may be sent."""

    def __init__(
        self, routes: VllmRoutes, num_running: Callable[[], int], probe: Callable[[], Awaitable[None]]
    ) -> None:
        self._routes = routes
        self._num_running = num_running
        self._probe = probe
        self._lock = asyncio.Lock()
        self._group: str | None = None
        self._update: WeightUpdate | None = None
        self._kept: UpdateRef | None = None
        self._num_joins = 0
        self._session_is_open = False
        self._is_torn = False
        self._telling: set[asyncio.Future[None]] = set()
        self._held_since = 0.0
        self._probing: asyncio.Future[None] | None = None
        self.timings: UpdateTimings | None = None
        self.is_open = asyncio.Event()
        self.is_open.set()

    # ------------------------------------------------------------------------------------------------ the intake

    @property
    def has_applied(self) -> bool:
        """See `WeightIntake.has_applied`. The engine's half stages what arrives."""
        return False

    @property
    def kept(self) -> UpdateRef | None:
        """See `WeightIntake.kept`. As the engine said when its group was formed, since no other group came then."""
        return self._kept

    async def join(self, spec: TransportSpec) -> None:
        """See `WeightIntake.join`. What a publisher that died left behind is cleared first."""
        self._num_joins += 1
        async with self._lock:
            await self._clear()
            await self._routes.post("/init_weight_transfer_engine", {"init_info": {"spec": spec.model_dump()}})
            try:
                await self._done("joining the weight group", spec.timeout_s, wait_s=0.0)
            except BaseException:
                await asyncio.shield(self._quietly(self._routes.post("/shutdown_weight_transfer_engine")))
                raise
            self._kept = _kept_of(await self._routes.status())  # other clients may have had it keep something else
            self._group = spec.group_name if isinstance(spec, ProcessGroupSpec) else f"{spec.backend} of {spec.run_id}"

    def leave(self) -> None:
        """See `WeightIntake.leave`. The engine is told in the background."""
        if self._group is not None:
            name, self._group = self._group, None
            self._in_background(self._leave(name, self._num_joins))

    def begin(self, update: WeightUpdate) -> None:
        """See `WeightIntake.begin`. The engine is told when sampling is held, or by the first bucket."""
        self._update = update

    async def receive(self, transfer: BucketTransfer, bucket: BucketSpec, tensors: Sequence[TensorSpec]) -> None:
        """See `WeightIntake.receive`. A bucket that is offered while the hold is still pending waits for it."""
        update = self._update
        assert update is not None  # the session lets no bucket through without one
        await asyncio.sleep(0)  # a hold that was asked for in the same moment takes the lock first
        async with self._lock:
            try:
                if update.staged and bucket.index == 0:
                    await self._open_session(update)
                body = {"source": "bucket", "transfer": transfer.model_dump()}
                await self._routes.post("/update_weights", {"update_info": body})
            except ProtocolError as error:
                self._session_is_open = False  # vLLM ends a session that fails
                raise TransferError(f"bucket {bucket.index} was refused by the engine: {error.message}") from error
        # A status call that waits would keep the worker from sampling.
        wait_s = 0.0 if update.staged else _WAIT_S
        await self._done(f"receiving bucket {bucket.index}", transfer.timeout_s, wait_s=wait_s)

    def committed(self) -> None:
        """See `WeightIntake.committed`."""
        self._kept = self._update.ref if self._update is not None and self._update.keep else None

    # ----------------------------------------------------------------------------------------------- the engine

    async def hold(self, update: WeightUpdate) -> None:
        """See `HeldEngine.hold`."""
        self.is_open.clear()
        try:
            async with self._lock:
                await self._routes.post(
                    f"/pause?{_PAUSES[update.in_flight]}", timeout_s=update.deadline_s + update.lease_s
                )
                self._held_since = time.monotonic()
                if not update.staged:
                    await self._open_session(update)  # only now: a worker that samples answers after its step
        except BaseException:
            await self.release()
            raise

    async def apply(self, update: WeightUpdate) -> None:
        """See `HeldEngine.apply`."""
        async with self._lock:
            started = time.monotonic()
            self._session_is_open = False
            await self._routes.post(
                "/finish_weight_update", {"weight_version": label_of(update.ref)}, timeout_s=update.lease_s
            )
            loaded = time.monotonic()
            if self._num_running():
                self._probing = asyncio.ensure_future(self._note_first_token(loaded))
            await self._routes.post("/resume")
            self._is_torn = False
            resumed = time.monotonic()
            self.timings = UpdateTimings(load_s=loaded - started, held_s=resumed - self._held_since)
            self.is_open.set()

    async def release(self) -> None:
        """See `HeldEngine.release`. Goes on in the background if the caller is cancelled."""
        await asyncio.shield(self._in_background(self._release()))

    async def _release(self) -> None:
        try:
            async with self._lock:
                await self._end_session()
                if not self._is_torn:
                    await self._resume()
        finally:
            self.is_open.set()  # whoever waits hears from a server that is gone by itself

    async def give_up(self) -> None:
        """See `HeldEngine.give_up`. The engine stays paused; its label tells every other client that it is torn."""
        await asyncio.shield(self._in_background(self._give_up()))

    async def _give_up(self) -> None:
        try:
            async with self._lock:
                self._is_torn = True
                await self._end_session(force=True)
                served = parse_label((await self._routes.get("/weight_info"))["weight_version"])
                if not served.torn:
                    ref = f"torn:{served.version}@{served.run_id or 'checkpoint'}"
                    await self._routes.post("/update_weight_version", {"new_version": ref})
                await self._routes.post("/pause?mode=abort&clear_cache=true")
        finally:
            self.is_open.set()  # whoever waits is refused now

    async def num_running(self) -> int:
        """See `HeldEngine.num_running`."""
        return self._num_running()

    async def aclose(self) -> None:
        """Wait for what is still to be told to the engine."""
        await asyncio.gather(*self._telling, return_exceptions=True)
        if self._probing is not None:
            self._probing.cancel()

    # -------------------------------------------------------------------------------------------------- details

    async def _open_session(self, update: WeightUpdate) -> None:
        await self._check_group()
        await self._routes.post("/start_weight_update")
        self._session_is_open = True
        body = {"source": "begin", "update": update.model_dump(mode="json")}
        try:
            await self._routes.post("/update_weights", {"update_info": body})
        except ProtocolError as error:
            self._session_is_open = False  # vLLM ends a session that fails
            raise UpdateRefusedError(
                f"update to version {update.version} refused by the engine: {error.message}"
            ) from error

    async def _check_group(self) -> None:
        """Raise `TransferError` unless every worker belongs to the group that was joined."""
        for status in await self._routes.status():
            if status.get("group") != self._group:
                self._group = None
                raise TransferError(
                    "the engine belongs to no weight group of this client: it was restarted, or another publisher "
                    "formed a group. Form the group anew"
                )

    async def _done(self, what: str, timeout_s: float, *, wait_s: float) -> None:
        """Return when the engine's half has done what it was asked. Raises `TransferError`."""
        deadline = time.monotonic() + timeout_s + 1.0  # the engine's own words say more
        while True:
            statuses = await self._routes.status(wait_s)
            failed = [status["problem"] for status in statuses if status["phase"] in ("failed", "idle")]
            if failed:
                raise TransferError(f"{what} failed: {failed[0] or 'the group was given up'}")
            if all(status["phase"] == "done" for status in statuses):
                return
            if time.monotonic() > deadline:
                raise TransferError(f"{what} failed: not done after {timeout_s:g} s")
            if not wait_s:
                await asyncio.sleep(_POLL_S)

    async def _clear(self) -> None:
        """End what another client left open: its session, its group, and its hold unless the weights are torn."""
        await self._end_session(force=True)
        await self._quietly(self._routes.post("/shutdown_weight_transfer_engine"))
        self._is_torn = parse_label((await self._routes.get("/weight_info"))["weight_version"]).torn
        if not self._is_torn:
            await self._resume()

    async def _end_session(self, *, force: bool = False) -> None:
        """Forget what was staged and close vLLM's session; nothing of it is loaded."""
        if not (self._session_is_open or force):
            return
        self._session_is_open = False
        # Refused where no session is open, which is what is wanted.
        source = "drop" if self._group is None else "forget"
        await self._quietly(self._routes.post("/update_weights", {"update_info": {"source": source}}))
        await self._quietly(self._routes.post("/finish_weight_update", {}))

    async def _leave(self, name: str, num_joins: int) -> None:
        async with self._lock:
            if num_joins != self._num_joins:
                return  # joining the next group gave the one before up
            if self._session_is_open:
                await self._quietly(self._routes.post("/update_weights", {"update_info": {"source": "drop"}}))
                return
            with contextlib.suppress(InflightError):
                if all(status.get("group") == name for status in await self._routes.status()):
                    await self._routes.post("/shutdown_weight_transfer_engine")  # else it is another publisher's

    async def _resume(self) -> None:
        """Resume; vLLM refuses while a drain that was given up is still pending in it, for a moment."""
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

    async def _note_first_token(self, since: float) -> None:
        """Measure when the first token of the new version comes, by a request for one token."""
        with contextlib.suppress(InflightError):
            await self._probe()
            if self.timings is not None:
                first_token_s = max(0.0, time.monotonic() - since)
                self.timings = self.timings.model_copy(update={"first_token_s": first_token_s})

    def _in_background(self, call: Awaitable[None]) -> asyncio.Future[None]:
        """Do what the engine must be told in any case, whoever waits for it or not."""
        task = asyncio.ensure_future(call)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)
        return task

    @staticmethod
    async def _quietly(call: Awaitable[Any]) -> None:
        with contextlib.suppress(InflightError):
            await call


def _kept_of(statuses: Sequence[Mapping[str, Any]]) -> UpdateRef | None:
    """Return the update that every worker has kept."""
    first, *others = [status.get("kept") for status in statuses]
    return UpdateRef.model_validate(first) if first is not None and all(other == first for other in others) else None

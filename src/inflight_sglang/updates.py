"""Weight updates over SGLang's routes: the hold, the group, the buckets and the commit of one server.

In a group of its own SGLang loads a bucket as it arrives, so that an update that ends after its first one leaves torn
weights. Its session is therefore opened for the first bucket and not before: whoever finds it open knows that bytes may
have been loaded. A staged update is loaded by the commit, from files, and the session is open for the hold only. The
engine cannot be called back from a broadcast, and is sent into one only when its sender is there. Where the sender
stops half way, the call is left behind here, and what it led to is looked at when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight.engines.labels import ServedVersion, label_of, parse_label
from inflight.errors import DeadlineError, InflightError, ProtocolError, TransferError, UpdateRefusedError
from inflight.weights.threads import run_abandonable
from inflight.wire import (
    BucketSpec,
    BucketTransfer,
    ProcessGroupSpec,
    TensorSpec,
    TransportSpec,
    UpdateRef,
    UpdateTimings,
    WeightUpdate,
)
from inflight_sglang import pausing
from inflight_sglang.checkpoint_files import CheckpointFiles
from inflight_sglang.routes import SglangRoutes, words_of

if TYPE_CHECKING:
    from inflight.weights.transports.process_group import AnnouncedRanks

_NOTHING_LOADED = ("Failed to receive weights", "update_weights_from_distributed must run between")
"""How SGLang's refusals of a bucket begin that was not loaded, not even in part."""
_NO_FILES = "Failed to get weights iterator: Cannot find any model weights"
"""How SGLang answers for a directory that it sees and finds empty; it looks for another in the Hub."""
_STUCK_S = 1860.0
"""A little longer than torch waits for a broadcast, in a group that SGLang joined."""


class SglangUpdates:
    """Satisfies `HeldEngine` and `WeightIntake`. ``is_open`` is set while requests may be sent.

    ``num_sent`` counts the requests of this client that the server has not answered. With ``files``, those of the open
    update, it is the engine of staged updates, whose intake is another.
    """

    def __init__(self, routes: SglangRoutes, num_sent: Callable[[], int]) -> None:
        self._routes = routes
        self._num_sent = num_sent
        self._lock = asyncio.Lock()
        self._group: str | None = None
        self._former: set[str] = set()
        self._stale: set[str] = set()
        self._ranks: AnnouncedRanks | None = None
        self._num_received = 0
        self._left: asyncio.Future[None] | None = None
        self._update: UpdateRef | None = None
        self._was_torn = False
        self._session_is_open = False
        self._has_loaded = False
        self._has_seen_files = False
        self._loading: asyncio.Future[None] | None = None
        self._settling: asyncio.Future[None] | None = None
        self._background: set[asyncio.Future[None]] = set()
        self._held_since = 0.0
        self.num_ranks = 1
        self.files: Callable[[], CheckpointFiles] | None = None
        self.is_torn = False
        self.timings: UpdateTimings | None = None
        self.is_open = asyncio.Event()
        self.is_open.set()

    # ------------------------------------------------------------------------------------------------- the intake

    @property
    def has_applied(self) -> bool:
        """See `WeightIntake.has_applied`. A bucket that is under way may be in the model already."""
        return self._has_loaded or (self._loading is not None and not self._loading.done())

    @property
    def kept(self) -> UpdateRef | None:
        """See `WeightIntake.kept`. Nothing is."""
        return None

    async def join(self, spec: TransportSpec) -> None:
        """See `WeightIntake.join`. What a publisher that died left behind is cleared first."""
        from inflight.weights.transports.process_group import AnnouncedRanks

        assert isinstance(spec, ProcessGroupSpec)  # no other transport is declared
        if spec.group_name in self._former:
            raise TransferError(f"the weight group {spec.group_name!r} was joined before; open a new one")
        deadline = time.monotonic() + spec.timeout_s
        self._ranks = ranks = AnnouncedRanks(spec, self.num_ranks)
        await self.clear(spec)
        # SGLang's own joining blocks all of its sampling, for up to half an hour: it begins when everyone is there.
        await run_abandonable(ranks.meet, "inflight-meet")
        body = spec.model_dump(include={"master_address", "master_port", "world_size", "group_name", "backend"})
        self._former.add(spec.group_name)
        try:
            await self._routes.post(
                "/init_weights_update_group", body | {"rank_offset": spec.rank}, max(deadline - time.monotonic(), 1.0)
            )
        except BaseException as error:
            self._stale.add(spec.group_name)
            if isinstance(error, ProtocolError | DeadlineError):
                raise TransferError(f"the engine did not join the weight group: {error.message}") from error
            raise
        self._num_received = 0
        if self._ranks is ranks:
            self._group = spec.group_name
        else:  # given up meanwhile
            self._stale.add(spec.group_name)

    async def clear(self, spec: TransportSpec) -> None:
        """End what a publisher that died left behind on the server. Raises `TransferError` if that takes too long."""
        self._has_seen_files = False
        try:
            async with asyncio.timeout(spec.timeout_s), self._alone():
                await self._clear()
        except TimeoutError as error:
            raise TransferError(
                f"the engine did not come free within {spec.timeout_s:g} s: it waits for the rest of a bucket, whose "
                "publisher has to give its group up"
            ) from error

    def leave(self) -> None:
        """See `WeightIntake.leave`. The engine is told in the background; a broadcast that it is in goes on."""
        if self._ranks is not None:
            self._ranks.give_up()
            self._ranks = None
        if self._left is not None and not self._left.done():
            self._left.set_result(None)
        if self._group is not None:
            self._stale.add(self._group)
            self._group = None
            self.in_background(self._forget_stale_groups())

    def begin(self, update: WeightUpdate) -> None:
        """See `WeightIntake.begin`."""
        self._has_loaded = False

    def committed(self) -> None:
        """See `WeightIntake.committed`."""

    async def receive(self, transfer: BucketTransfer, bucket: BucketSpec, tensors: Sequence[TensorSpec]) -> None:
        """See `WeightIntake.receive`. SGLang is asked once the bucket is being sent, and is not called back."""
        if self._group is None or self._ranks is None:
            raise TransferError("no weight group is formed")
        timeout_s = transfer.timeout_s
        ranks, index, deadline = self._ranks, self._num_received, time.monotonic() + timeout_s
        self._num_received += 1
        await run_abandonable(lambda: ranks.await_send(index, timeout_s), "inflight-await-send")
        if self._group is None:
            raise TransferError(f"the weight group was given up before bucket {bucket.index} travelled")
        self._loading = loading = asyncio.ensure_future(self._load(bucket, tensors, self._group))
        self._left = left = asyncio.get_running_loop().create_future()
        loading.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait({loading, left}, timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            return loading.result()
        if left.done():
            raise TransferError(f"the weight group was given up while bucket {bucket.index} travelled")
        raise TransferError(f"receiving bucket {bucket.index} failed: not done after {timeout_s:g} s")

    async def _load(self, bucket: BucketSpec, tensors: Sequence[TensorSpec], group: str) -> None:
        """Have the engine receive and load one bucket; note whether any of it is in the model."""
        body = {
            "names": [tensor.name for tensor in tensors],
            "dtypes": [tensor.dtype for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": False,  # refused while requests are paused, though the weights would be loaded
            "selector": "target",
        }
        try:
            if not self._session_is_open:
                await self._routes.post("/begin_weight_update", {"selector": "target"})
                self._session_is_open = True
        except ProtocolError as error:
            raise TransferError(f"the engine takes no weights: {error.message}") from error
        try:
            status, answer = await self._routes.ask("POST", "/update_weights_from_distributed", body, _STUCK_S)
        except BaseException:
            self._has_loaded = True
            raise
        words = words_of(answer)
        self._has_loaded = self._has_loaded or not (status != 200 and words.startswith(_NOTHING_LOADED))
        if status != 200:
            raise TransferError(f"bucket {bucket.index} did not arrive in the engine: {words}")

    # ------------------------------------------------------------------------------------------------- the engine

    async def hold(self, update: WeightUpdate) -> None:
        """See `HeldEngine.hold`."""
        ref = update.ref
        self._has_loaded = False
        self._update, self._was_torn = ref, self.is_torn
        if not self.is_torn:
            self.is_open.clear()
        try:
            async with self._alone():
                try:
                    self._held_since = await pausing.stop(self._routes, update.in_flight, self._num_sent)
                    if self.files is not None:
                        await self._begin_session()
                    if self.files is not None and not self._has_seen_files:
                        await self._show(self.files())
                except BaseException:
                    await asyncio.shield(self._resume())
                    raise
        except BaseException:
            if self._update is ref:
                self.is_open.set()
            raise

    async def apply(self, update: WeightUpdate) -> None:
        """See `HeldEngine.apply`. The label changes while nothing is sampled, so that spans change with it."""
        async with self._alone():
            started = time.monotonic()
            if self.files is not None:
                await self._load_files(self.files(), label_of(update.ref))
            await self._routes.post("/end_weight_update", {})
            self._session_is_open = False
            loaded = time.monotonic()
            if self.files is None:
                await pausing.set_label(self._routes, label_of(update.ref))
            await pausing.go_on(self._routes)
            self.timings = UpdateTimings(load_s=loaded - started, held_s=time.monotonic() - self._held_since)
            if self._num_sent():
                self.in_background(self._note_first_token(self.timings, loaded))
            self.is_torn = False
            self.is_open.set()

    async def release(self) -> None:
        """See `HeldEngine.release`."""
        try:
            async with self._alone():
                await self._end_session()
                await self._go_on()
        finally:
            self.is_open.set()

    async def give_up(self) -> None:
        """See `HeldEngine.give_up`. The engine stays paused; its label tells every other client that it is torn.

        While the engine still waits for a bucket this goes on in the background: if nothing was loaded in the end,
        the weights are whole after all, and the engine samples again.
        """
        self.is_torn = True
        is_stuck = self._loading is not None and not self._loading.done()
        if self._settling is None or self._settling.done():
            self._settling = asyncio.ensure_future(self._settle())
        if not is_stuck:
            await asyncio.wait([self._settling])
        self.is_open.set()  # whoever waits is refused now

    async def num_running(self) -> int:
        """See `HeldEngine.num_running`. The requests of other clients are included."""
        loads = await self._routes.get("/v1/loads")
        return sum(int(load["num_running_reqs"]) for load in loads["loads"])

    def found(self, served: ServedVersion) -> bool:
        """Take over what the server's label says; return True if its weights are torn."""
        if self._settling is None or self._settling.done():
            self.is_torn = served.torn
        return self.is_torn or served.torn

    def in_background(self, call: Awaitable[None]) -> None:
        """Have a call run by itself; `aclose` waits for it."""
        task = asyncio.ensure_future(call)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def aclose(self, wait_s: float) -> None:
        """Wait a little for what is still to be told to the engine."""
        pending = {*self._background, *(task for task in (self._loading, self._settling) if task is not None)}
        if pending:
            _, late = await asyncio.wait(pending, timeout=wait_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    # ---------------------------------------------------------------------------------------------------- details

    async def _begin_session(self) -> None:
        """Open the session of a load: SGLang does not survive two loads at the same time, and has one session only.

        It tells others, should this process die meanwhile, that the weights may be torn.
        """
        self._session_is_open = True
        try:
            await self._routes.post("/begin_weight_update", {"selector": "target"})
        except ProtocolError as error:
            self._session_is_open = False
            raise UpdateRefusedError(f"the engine takes no weights now: {error.message}") from error

    async def _resume(self) -> None:
        """Sample again after a hold that failed."""
        await _quietly(self._end_session())
        await self._go_on()

    async def _show(self, files: CheckpointFiles) -> None:
        """Make sure that the server sees files of this process: with none of them to load, nothing is changed."""
        status, answer = await self._routes.ask("POST", "/update_weights_from_disk", _body_of_files(files.probe))
        if status == 200 or not words_of(answer).startswith(_NO_FILES):
            raise UpdateRefusedError(
                "the server does not see the files of this process, though its address is this host's: attach with "
                f"?updates=native. It says: {words_of(answer)}"
            )
        self._has_seen_files = True

    async def _load_files(self, files: CheckpointFiles, label: str) -> None:
        """Have the engine load what was staged, and call it so: tokens that are sampled from then on carry this."""
        self._has_loaded = True
        body = _body_of_files(files.checkpoint) | {"weight_version": label}
        await self._routes.post("/update_weights_from_disk", body, _STUCK_S)

    async def _note_first_token(self, timings: UpdateTimings, since: float) -> None:
        """Measure when the first token of the new version comes, by a request for one token."""
        name = f"inflight-first-token-{uuid.uuid4().hex}"
        body = {"input_ids": [0], "rid": name, "extra_key": name}
        await self._routes.post("/generate", body | {"sampling_params": {"max_new_tokens": 1, "ignore_eos": True}})
        if self.timings is timings:
            self.timings = timings.model_copy(update={"first_token_s": max(0.0, time.monotonic() - since)})

    async def _go_on(self) -> None:
        """Sample again, unless the weights are torn."""
        if not self.is_torn:
            await pausing.go_on(self._routes)

    async def _end_session(self) -> None:
        if self._session_is_open:
            self._session_is_open = False
            await self._routes.post("/end_weight_update", {})

    async def _settle(self) -> None:
        """Once the engine's last call has ended, label it as torn and end its requests; or go on, if it is whole."""
        if self._loading is not None and not self._loading.done():
            await asyncio.wait([self._loading])
        async with self._lock:
            if not self._has_loaded:
                await _quietly(self._end_session())
                self.is_torn = self._was_torn
                await _quietly(self._go_on())
                return
            assert self._update is not None
            await _quietly(self._end_session())
            await pausing.poison(self._routes, label_of(self._update, torn=True))

    async def _clear(self) -> None:
        """End what another client left open: its session, and its hold unless the weights are torn."""
        await self._forget_stale_groups_now()
        served = parse_label(str((await self._routes.get("/model_info"))["weight_version"]))
        self.is_torn = served.torn
        status, _ = await self._routes.ask("GET", "/ready")
        if status == 200:  # not paused: a session is not looked for, which would wait until nothing runs
            return
        was_ours, self._session_is_open = self._session_is_open, False
        status, _ = await self._routes.ask("POST", "/end_weight_update", {})
        if status == 200 and not was_ours and not served.torn:  # somebody died after the first bucket
            self.is_torn = True
            ref = UpdateRef(run_id=served.run_id or "checkpoint", version=served.version)
            await pausing.poison(self._routes, label_of(ref, torn=True))
        await self._go_on()

    async def _forget_stale_groups(self) -> None:
        async with self._alone():
            await self._forget_stale_groups_now()

    async def _forget_stale_groups_now(self) -> None:
        for name in tuple(self._stale):
            await self._routes.ask("POST", "/destroy_weights_update_group", {"group_name": name})
            self._stale.discard(name)

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Hold the lock, with no call left behind in the engine."""
        while True:
            await self._settled()
            async with self._lock:
                if not self._unsettled():
                    yield
                    return

    async def _settled(self) -> None:
        while unsettled := self._unsettled():
            await asyncio.wait(unsettled)

    def _unsettled(self) -> list[asyncio.Future[None]]:
        return [task for task in (self._loading, self._settling) if task is not None and not task.done()]


def _body_of_files(directory: Path) -> dict[str, Any]:
    """Return what `/update_weights_from_disk` takes; flushing would be refused while requests are paused."""
    common = {"load_format": "safetensors", "flush_cache": False, "abort_all_requests": False}
    return {"model_path": str(directory), **common}


async def _quietly(call: Awaitable[Any]) -> None:
    with contextlib.suppress(InflightError):
        await call

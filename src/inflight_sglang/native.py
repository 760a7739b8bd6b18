"""Updates that SGLang itself receives, in a group that it joins, and loads bucket by bucket as they arrive.

An update that stops after its first bucket leaves torn weights. SGLang's session is therefore opened only when the
first bucket arrives: a client that finds a session open knows that bytes may have been loaded. A broadcast in the
engine cannot be cancelled, so the engine enters one only when the sender is ready. If the sender stops halfway, the
call remains pending in the engine, and its outcome is examined when it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from inflight.base.tasks import TaskOwner
from inflight.base.threads import run_abandonable
from inflight.engines.routes import EngineRoutes, error_text_of
from inflight.errors import DeadlineError, ProtocolError, TransferError
from inflight.weights.receive.adapter import BucketSink
from inflight.wire import (
    BucketSpec,
    BucketTransfer,
    ProcessGroupSpec,
    TensorSpec,
    TransportSpec,
    UpdateRef,
    WeightUpdate,
)
from inflight_sglang.updates import STUCK_S, SglangUpdates

if TYPE_CHECKING:
    from inflight.weights.transports.membership import AnnouncedRanks

_NOTHING_LOADED = ("Failed to receive weights", "update_weights_from_distributed must run between")
"""Prefixes of SGLang's errors that mean that no part of the bucket was loaded."""


class NativeSink(BucketSink):
    """Receives buckets in SGLang's own group of ``num_ranks`` ranks; ``engine`` is notified of each load."""

    def __init__(self, routes: EngineRoutes, engine: SglangUpdates, background: TaskOwner, num_ranks: int) -> None:
        self._routes = routes
        self._engine = engine
        self._background = background
        self._num_ranks = num_ranks
        self._group: str | None = None
        self._former: set[str] = set()
        self._stale: set[str] = set()
        self._ranks: AnnouncedRanks | None = None
        self._num_received = 0
        self._left: asyncio.Future[None] | None = None

    @property
    def has_applied(self) -> bool:
        """Return whether a bucket may be in the model, even if only because one is being loaded."""
        return self._engine.has_loaded or self._engine.is_loading

    @property
    def kept(self) -> UpdateRef | None:
        """Always None: nothing is kept."""
        return None

    async def join(self, spec: TransportSpec) -> None:
        """Join the group, after ending the session and the pause that a dead publisher left open."""
        from inflight.weights.transports.membership import AnnouncedRanks

        assert isinstance(spec, ProcessGroupSpec)  # the only supported transport
        if spec.group_name in self._former:
            raise TransferError(f"the weight group {spec.group_name!r} was already joined once; open a new group")
        deadline = time.monotonic() + spec.timeout_s
        self._ranks = ranks = AnnouncedRanks(spec, self._num_ranks)
        await self._engine.clear(spec, self._forget_stale_groups)
        # SGLang's join blocks all of its sampling, for up to half an hour, so it begins only when all ranks are there.
        port = await run_abandonable(ranks.meet, "inflight-meet")
        body = spec.model_dump(include={"master_address", "world_size", "group_name"}) | {"master_port": port}
        self._former.add(spec.group_name)
        try:
            await self._routes.post(
                "/init_weights_update_group",
                body | {"backend": spec.transport, "rank_offset": spec.rank},
                max(deadline - time.monotonic(), 1.0),
            )
        except BaseException as error:
            self._stale.add(spec.group_name)
            if isinstance(error, ProtocolError | DeadlineError):
                raise TransferError(f"the engine did not join the weight group: {error.message}") from error
            raise
        self._num_received = 0
        if self._ranks is ranks:
            self._group = spec.group_name
        else:  # abandoned meanwhile
            self._stale.add(spec.group_name)

    def leave(self) -> None:
        """Leave the group. The engine is notified in the background; a broadcast already in progress continues."""
        if self._ranks is not None:
            self._ranks.abandon()
            self._ranks = None
        if self._left is not None and not self._left.done():
            self._left.set_result(None)
        if self._group is not None:
            self._stale.add(self._group)
            self._group = None
            self._background.start(self._engine.run_alone(self._forget_stale_groups))

    def begin(self, update: WeightUpdate) -> None:
        self._engine.has_loaded = False

    def note_committed(self) -> None:
        """Do nothing, because nothing is kept."""

    async def receive(self, transfer: BucketTransfer, bucket: BucketSpec, tensors: Sequence[TensorSpec]) -> None:
        """Wait until the bucket is being sent, then ask SGLang to receive it. SGLang's call cannot be cancelled."""
        if self._group is None or self._ranks is None:
            raise TransferError("the engine belongs to no weight group; form a group first")
        timeout_s = transfer.timeout_s
        ranks, index, deadline = self._ranks, self._num_received, time.monotonic() + timeout_s
        self._num_received += 1
        await run_abandonable(lambda: ranks.await_send(index, timeout_s), "inflight-await-send")
        if self._group is None:
            raise TransferError(f"the weight group was abandoned before bucket {bucket.index} was sent")
        loading = self._engine.begin_load(self._load(bucket, tensors, self._group))
        self._left = left = asyncio.get_running_loop().create_future()
        await asyncio.wait({loading, left}, timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            return loading.result()
        if left.done():
            raise TransferError(f"the weight group was abandoned while bucket {bucket.index} was being sent")
        raise TransferError(
            f"receiving bucket {bucket.index} failed: the engine had not received it after {timeout_s:g} s"
        )

    async def _load(self, bucket: BucketSpec, tensors: Sequence[TensorSpec], group: str) -> None:
        """Make the engine receive and load one bucket, and record whether any of it may be in the model."""
        body = {
            "names": [tensor.name for tensor in tensors],
            "dtypes": [tensor.dtype for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": False,  # SGLang refuses a flush while requests are paused, after loading the weights
            "selector": "target",
        }
        await self._engine.open_session()
        try:
            status, answer = await self._routes.ask("POST", "/update_weights_from_distributed", body, STUCK_S)
        except BaseException:
            self._engine.has_loaded = True
            raise
        words = error_text_of(answer)
        if status == 200 or not words.startswith(_NOTHING_LOADED):
            self._engine.has_loaded = True
        if status != 200:
            raise TransferError(f"the engine did not receive bucket {bucket.index}: {words}")

    async def _forget_stale_groups(self) -> None:
        for name in tuple(self._stale):
            await self._routes.ask("POST", "/destroy_weights_update_group", {"group_name": name})
            self._stale.discard(name)

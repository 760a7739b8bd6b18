"""The engine's half: a weight transfer engine that vLLM loads in each of its workers, found by its entry point.

    join -> start_weight_update -> update_weights: begin, then once for each bucket -> finish_weight_update

A bucket is received in a thread and staged in host memory, so that the worker goes on answering, a receive can be
ended, and the model is touched by ``finish_weight_update`` only: whatever fails before leaves the old weights serving.
``Worker.inflight_status`` says through vLLM's ``collective_rpc`` how far it is, which vLLM's own calls cannot return.

An update in part is completed with the tensors that vLLM keeps in the same layers, and an adapter is merged into its
base, in that thread too; where these are not known any more the update is refused when it begins. vLLM sets no session
up for the weights to be staged in while it samples: it asks for no pause, and only ``finish_weight_update`` needs one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from inflight.contracts import WeightReceiver
from inflight.errors import UpdateRefusedError
from inflight.weights.adapters import adapter_difference, changed_names
from inflight.weights.base_weights import BaseWeights
from inflight.weights.merging import AdaptedLoad, AdaptedWeights, Named
from inflight.weights.staging import KeptWeights, Staging
from inflight.weights.transports import make_receiver
from inflight.wire import BucketTransfer, Manifest, ProcessGroupSpec, TransportBody, WeightUpdate
from inflight_vllm.reloading import ReloadedModel

BACKEND = "inflight"
"""What ``--weight-transfer-config '{"backend": ...}'`` names."""
PROTOCOL = 3
"""Grows when a client of the one before would be misread; an attaching client compares it."""

Phase = Literal["idle", "busy", "done", "failed"]


def register() -> None:
    """Make the backend known in this vLLM process, and the status readable. vLLM calls it in each of its processes."""
    from vllm.v1.worker.worker_base import WorkerBase

    known = WeightTransferEngineFactory._registry if hasattr(WeightTransferEngineFactory, "_registry") else {}
    if BACKEND not in known:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, InflightTransferEngine.__name__)
    WorkerBase.inflight_status = _status  # a method is all that collective_rpc can call


def _status(worker: Any, wait_s: float = 0.0) -> dict[str, Any]:
    """Return what the worker's transfer engine says, waiting up to ``wait_s`` seconds for what is under way."""
    engine = getattr(worker, "weight_transfer_engine", None)
    if not isinstance(engine, InflightTransferEngine):
        return {"protocol": None, "backend": type(engine).__name__}
    return engine.status(float(wait_s))


@dataclass
class JoinInfo:
    """``init_info``: the contract's `TransportSpec`; the worker's own rank is added to the rank of a group."""

    spec: dict[str, Any]


@dataclass
class UpdateInfo:
    """``update_info``: ``begin`` an update, receive one ``bucket`` of it, ``forget`` what came, or ``drop`` the group.

    ``update`` is the body of a `WeightUpdate`, ``transfer`` of a `BucketTransfer`.
    """

    source: Literal["begin", "bucket", "forget", "drop"]
    update: dict[str, Any] | None = None
    transfer: dict[str, Any] | None = None


class InflightTransferEngine(WeightTransferEngine[JoinInfo, UpdateInfo]):  # type: ignore[misc]  # no vLLM here
    """One worker's half of the updates of its model. vLLM makes it and calls it from the worker's main thread."""

    init_info_cls = JoinInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: WeightTransferConfig, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._receiver: WeightReceiver | None = None
        self._group: str | None = None
        self._update: WeightUpdate | None = None
        self._staging: Staging | None = None
        self._kept: KeptWeights | None = None
        self._num_staged = 0
        self._phase: Phase = "idle"
        self._problem = ""
        self._work: threading.Event = threading.Event()
        self._reloaded = ReloadedModel(model, self.model_config, device)
        self._base = BaseWeights(self.model_config.model, self.model_config.dtype)
        self._completing: list[str] = []
        self._adapted = AdaptedWeights()
        self._prepared: AdaptedLoad | None = None
        self._companions: Named = []

    # ------------------------------------------------------------------------------------------- what vLLM calls

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Give an earlier group up and begin to join; `status` says when it is done."""
        self._drop()
        spec = TransportBody.model_validate(init_info.spec).root
        name = f"{spec.backend} of {spec.run_id}"
        if isinstance(spec, ProcessGroupSpec):
            parallel = self.parallel_config
            offset = parallel.data_parallel_index * parallel.world_size + parallel.rank
            spec, name = spec.model_copy(update={"rank": spec.rank + offset}), spec.group_name
        receiver = self._receiver = make_receiver(spec, self.device)

        def join() -> None:
            receiver.join()
            if self._receiver is receiver:
                self._group = name

        self._begin(join)

    def start_weight_update(self) -> None:
        """Forget what an earlier session left; nothing of the model changes before `finish_weight_update`."""
        self._forget()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Begin an update, or to receive one bucket of it; `status` says when that is staged."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.source == "drop":
            self._drop()
        elif update_info.source == "forget":
            self._forget()
        elif update_info.source == "begin":
            self._begin_update(WeightUpdate.model_validate(update_info.update))
        else:
            self._begin_bucket(BucketTransfer.model_validate(update_info.transfer))

    def finish_weight_update(self) -> None:
        """Load what was staged, if all of it has come; without any of it, nothing changes."""
        if self._phase == "busy":
            raise RuntimeError("a bucket is still being received")
        staging, update, load = self._staging, self._update, self._prepared
        if staging is None or update is None or self._num_staged == 0:
            self._forget()
            return
        if load is None:
            raise RuntimeError(f"{self._num_staged} of {len(update.buckets)} buckets have come")
        self._reloaded.load([*load.tensors, *self._companions])
        self._adapted.loaded(load)
        if update.manifest.adapter is None:
            self._base.loaded(staging.tensors(), keep=update.keep)
        self._kept, self._staging = staging.keep(), None
        self._forget()

    def shutdown(self) -> None:
        """Give the group up."""
        self._drop()

    # --------------------------------------------------------------------------------------------------- status

    def status(self, wait_s: float) -> dict[str, Any]:
        """Return how far the work under way is, after up to ``wait_s`` seconds."""
        if wait_s > 0:
            self._work.wait(wait_s)
        return {
            "protocol": PROTOCOL,
            "backend": BACKEND,
            "phase": self._phase,
            "problem": self._problem,
            "group": self._group,
            "num_staged": self._num_staged,
            "kept": None if self._kept is None else self._kept.ref.model_dump(),
            "is_dirty": self._reloaded.is_dirty,
        }

    def _begin(self, work: Callable[[], None]) -> None:
        """Do ``work`` in a thread of its own; it is left behind when the group is given up meanwhile."""
        self._phase, self._problem = "busy", ""
        done = self._work = threading.Event()

        def run() -> None:
            phase: Phase = "done"
            problem = ""
            try:
                work()
            except Exception as error:  # told by status, whatever it is
                phase, problem = "failed", f"{error}" or type(error).__name__
            if done is self._work:
                self._phase, self._problem = phase, problem
            done.set()

        threading.Thread(target=run, name="inflight-receive", daemon=True).start()

    def _begin_update(self, update: WeightUpdate) -> None:
        receiver = self._receiver
        if receiver is None or self._group is None:
            raise RuntimeError("this engine belongs to no weight group: it was restarted, or gave it up")
        if update.base is not None and (self._kept is None or update.base != self._kept.ref):
            raise RuntimeError(f"version {update.base.version} was not kept here, to which the update is a delta")
        self._forget()
        self._completing = self._completion(update.manifest)
        receiver.begin(update.ref)
        self._update, self._staging = update, Staging(update, self._kept)

    def _completion(self, manifest: Manifest) -> list[str]:
        """Return what has to be loaded beside what an update changes. Raises `UpdateRefusedError` if that is lost."""
        if manifest.adapter is None and not manifest.frozen:
            return []
        shapes = self._base.shapes()
        if manifest.adapter is not None and (problem := adapter_difference(shapes, manifest)) is not None:
            raise UpdateRefusedError(problem)
        adapted = self._adapted.names
        changed = changed_names(manifest)
        companions = self._reloaded.companions([*changed, *adapted], shapes)
        bases = [] if manifest.adapter is None else [name for name in changed if name not in adapted]
        self._base.require([*bases, *companions])
        return companions

    def _prepare(self, manifest: Manifest, staging: Staging, completing: Sequence[str]) -> tuple[AdaptedLoad, Named]:
        """Return what an update that has arrived has loaded, and the other tensors of the same layers."""
        load = self._adapted.prepare(manifest, staging.tensors(), self._base.tensor)
        return load, [(name, self._base.tensor(name)) for name in completing]

    def _begin_bucket(self, transfer: BucketTransfer) -> None:
        if self._phase == "busy":
            raise RuntimeError("a bucket is being received already; wait for it, or drop it")
        receiver, staging, update = self._receiver, self._staging, self._update
        if receiver is None or staging is None or update is None or transfer.ref != update.ref:
            raise RuntimeError("no such update was begun: this engine was restarted, or gave it up")
        bucket = update.buckets[transfer.bucket_index]
        tensors = update.manifest.tensors[bucket.start : bucket.stop]
        completing = self._completing

        def receive() -> None:
            staging.receive(receiver, transfer, bucket, tensors)
            is_last = transfer.bucket_index == len(update.buckets) - 1
            prepared, companions = self._prepare(update.manifest, staging, completing) if is_last else (None, [])
            if staging is self._staging:
                self._num_staged += 1
                self._prepared, self._companions = prepared, companions

        self._begin(receive)

    def _forget(self) -> None:
        staging, self._staging, self._num_staged = self._staging, None, 0
        self._prepared, self._companions = None, []
        if staging is not None:
            staging.drop()

    def _drop(self) -> None:
        receiver, self._receiver, self._group = self._receiver, None, None
        self._forget()
        self._phase, self._problem, self._work = "idle", "", threading.Event()
        if receiver is not None:
            receiver.abort()

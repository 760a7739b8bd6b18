"""The plug-in: a weight transfer engine that vLLM finds by its entry point and loads in each of its workers.

join -> stage (once to begin, then once for each bucket) -> load, which calls finish_weight_update

A bucket is received in a separate thread and staged where its transport delivers it: in host memory, or on the worker's
GPU. On a GPU, a separate stream is used, so that receiving does not wait for the model. The worker therefore keeps
answering, and a receive can be aborted. Only ``finish_weight_update`` changes the model: if anything fails before it,
the old weights are still served. Weights are staged, and progress is reported, by methods that this module adds to
vLLM's workers and that ``collective_rpc`` calls, because vLLM's own calls return nothing.

The thread also prepares the load. It adds the other tensors of the same layers to a partial update, and merges a LoRA
into its base. If those tensors are no longer known, the update is refused when it begins. Weights are staged while vLLM
samples, without a pause; only ``finish_weight_update`` requires one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from inflight.base.transport_registry import receivable_transports, spec_type
from inflight.contracts import WeightReceiver
from inflight.errors import UpdateRefusedError
from inflight.weights.encode.lora_tensors import changed_names, lora_difference
from inflight.weights.encode.transit import finished_on_weight_stream
from inflight.weights.receive.base_weights import AdaptedLoad, AdaptedWeights, BaseWeights, Named
from inflight.weights.receive.staging import KeptWeights, Staging
from inflight.weights.transports import make_receiver
from inflight.wire import BucketTransfer, Manifest, WeightUpdate
from inflight_vllm.drafting import record_history
from inflight_vllm.flags import BACKEND
from inflight_vllm.reloading import PreparedLoad, ReloadedModel
from inflight_vllm.updates import PLUGIN_PROTOCOL

Phase = Literal["idle", "busy", "done", "failed"]


def register() -> None:
    """Register the backend and its methods in this vLLM process. vLLM calls this in each of its processes."""
    from vllm.v1.worker.worker_base import WorkerBase

    from inflight_vllm import engine_core, stop_strings, streamed_versions

    known = WeightTransferEngineFactory._registry if hasattr(WeightTransferEngineFactory, "_registry") else {}
    if BACKEND not in known:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, InflightTransferEngine.__name__)
    WorkerBase.inflight_status = _status  # collective_rpc can only call methods
    WorkerBase.inflight_stage = _stage
    WorkerBase.inflight_load = _load
    engine_core.register()
    streamed_versions.register()
    stop_strings.register()
    WorkerBase.inflight_record_history = record_history


def _status(worker: Any) -> dict[str, Any]:
    """Return the status of the worker's transfer engine."""
    engine = getattr(worker, "weight_transfer_engine", None)
    if not isinstance(engine, InflightTransferEngine):
        return {"protocol": None, "backend": type(engine).__name__}
    return engine.status()


def _stage(worker: Any, info: dict[str, Any]) -> dict[str, Any]:
    """Begin the action that ``info``, the fields of an `UpdateInfo`, selects, and return the status."""
    engine: InflightTransferEngine = worker.weight_transfer_engine
    engine.receive_weights(UpdateInfo(**info))
    return engine.status()


def _finished() -> Future[None]:
    """Return the future of work that is done."""
    work: Future[None] = Future()
    work.set_result(None)
    return work


def _load(worker: Any) -> None:
    """Load the staged weights in a session of vLLM, which is still open if an earlier load failed in it."""
    with contextlib.suppress(RuntimeError):
        worker.start_weight_update()
    worker.finish_weight_update()


@dataclass
class JoinInfo:
    """``init_info``: the contract's `TransportSpec`. Each worker joins as a separate rank."""

    spec: dict[str, Any]


@dataclass
class UpdateInfo:
    """``update_info``, in which ``source`` selects the action.

    ``begin`` begins an update, ``bucket`` receives one bucket of it, ``forget`` discards the received buckets, and
    ``drop`` leaves the group. ``update`` is the body of a `WeightUpdate`, and ``transfer`` that of a `BucketTransfer`.
    """

    source: Literal["begin", "bucket", "forget", "drop"]
    update: dict[str, Any] | None = None
    transfer: dict[str, Any] | None = None


class InflightTransferEngine(WeightTransferEngine[JoinInfo, UpdateInfo]):  # type: ignore[misc]  # no vLLM here
    """One worker's side of its model's updates.

    vLLM creates it, and calls it from the worker's main thread. The engine core may also stage weights from another
    thread, while the model is sampling.
    """

    init_info_cls = JoinInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: WeightTransferConfig, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        if vllm_config.speculative_config is not None:
            from inflight_vllm.verification import repair_verification  # this loads vLLM's sampler

            repair_verification(device)
        self._receiver: WeightReceiver | None = None
        self._group: str | None = None
        self._update: WeightUpdate | None = None
        self._staging: Staging | None = None
        self._kept: KeptWeights | None = None
        self._num_staged = 0
        self._phase: Phase = "idle"
        self._problem = ""
        self.work = _finished()
        """Completed once the latest join or bucket has succeeded or failed."""
        self._lock = threading.RLock()
        """Held while the staged weights change: vLLM's sampling thread and the thread that reads calls both change
        them."""
        self._reloaded = ReloadedModel(model, self.model_config, device)
        self._base = BaseWeights(self.model_config.model, self.model_config.dtype)
        self._completing: list[str] = []
        self._adapted = AdaptedWeights()
        self._prepared: tuple[AdaptedLoad, PreparedLoad] | None = None

    # ------------------------------------------------------------------------------------------- what vLLM calls

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Leave any earlier group and begin to join the new one; `status` reports when the worker has joined."""
        self._drop()
        with contextlib.suppress(UpdateRefusedError):  # without a readable checkpoint, vLLM's loaders load everything
            self._reloaded.find_layers(self._base.shapes())
        spec = spec_type(init_info.spec["transport"]).model_validate(init_info.spec)
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        receiver = self._receiver = make_receiver(spec, self.device, rank)

        def join() -> None:
            receiver.join()
            if self._receiver is receiver:
                self._group = spec.group

        self._begin(join)

    def start_weight_update(self) -> None:
        """Do nothing: an update begins with `receive_weights`, before vLLM's own session."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Parse ``update_info`` and pass it to `receive_weights`."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Begin the action that ``update_info`` selects; `status` reports when a bucket is staged."""
        with self._lock:
            if update_info.source == "drop":
                self._drop()
            elif update_info.source == "forget":
                self._forget()
            elif update_info.source == "begin":
                self._begin_update(WeightUpdate.model_validate(update_info.update))
            else:
                self._begin_bucket(BucketTransfer.model_validate(update_info.transfer))

    def finish_weight_update(self) -> None:
        """Load the staged weights if all have arrived. If none have arrived, change nothing."""
        with self._lock:
            self._finish_update()

    def _finish_update(self) -> None:
        if self._phase == "busy":
            raise RuntimeError("the update cannot be committed: a bucket is still being received")
        staging, update, prepared = self._staging, self._update, self._prepared
        if staging is None or update is None or self._num_staged == 0:
            self._forget()
            return
        if prepared is None:
            raise RuntimeError(
                f"the update cannot be committed: only {self._num_staged} of {len(update.buckets)} buckets have arrived"
            )
        adapted, load = prepared
        self._reloaded.load(load)
        self._adapted.note_loaded(adapted)
        if update.manifest.lora is None:
            self._base.note_loaded(staging.tensors(), keep=update.keep)
        self._kept, self._staging = staging.keep(), None
        self._forget()

    def shutdown(self) -> None:
        """Leave the group."""
        with self._lock:
            self._drop()

    # --------------------------------------------------------------------------------------------------- status

    @property
    def can_stage_while_sampling(self) -> bool:
        """Whether `receive_weights` and `status` may be called while the model is sampling.

        Before the layers are known, and after a load has failed half-way, `receive_weights` may change the model.
        """
        return self._reloaded.is_traced and not self._reloaded.is_dirty

    def status(self) -> dict[str, Any]:
        """Return the progress of the current work."""
        return {
            "protocol": PLUGIN_PROTOCOL,
            "backend": BACKEND,
            "transports": list(receivable_transports(on_gpu=self.device.type == "cuda")),
            "phase": self._phase,
            "problem": self._problem,
            "group": self._group,
            "num_staged": self._num_staged,
            "kept": None if self._kept is None else self._kept.ref.model_dump(),
            "is_dirty": self._reloaded.is_dirty,
        }

    def _begin(self, work: Callable[[], None]) -> None:
        """Do ``work`` in a separate thread. If the group is left in the meantime, the thread is abandoned."""
        self._phase, self._problem = "busy", ""
        done = self.work = Future[None]()

        def run() -> None:
            phase: Phase = "done"
            problem = ""
            try:
                work()
            except Exception as error:  # status reports it
                phase, problem = "failed", f"{error}" or type(error).__name__
            if done is self.work:
                self._phase, self._problem = phase, problem
            done.set_result(None)

        threading.Thread(target=run, name="inflight-receive", daemon=True).start()

    def _begin_update(self, update: WeightUpdate) -> None:
        receiver = self._receiver
        if receiver is None or self._group is None:
            raise RuntimeError(
                "this engine is not in a weight group: it was restarted, or has left its group; form the group again"
            )
        if update.base is not None and (self._kept is None or update.base != self._kept.ref):
            raise RuntimeError(
                f"the update is a delta to version {update.base.version}, which this engine has not kept; send all "
                "weights"
            )
        self._forget()
        self._completing = self._completion(update.manifest)
        receiver.begin(update.ref)
        self._update, self._staging = update, Staging(update, self._kept)

    def _completion(self, manifest: Manifest) -> list[str]:
        """Return the names of the tensors that must be loaded in addition to those that an update changes.

        Raises `UpdateRefusedError` if the tensors are no longer known.
        """
        if manifest.lora is None and not manifest.frozen:
            return []
        shapes = self._base.shapes()
        if manifest.lora is not None and (problem := lora_difference(shapes, manifest)) is not None:
            raise UpdateRefusedError(problem)
        adapted = self._adapted.names
        changed = changed_names(manifest)
        companions = self._reloaded.companions([*changed, *adapted], shapes)
        bases = [] if manifest.lora is None else [name for name in changed if name not in adapted]
        self._base.require([*bases, *companions])
        return companions

    def _begin_bucket(self, transfer: BucketTransfer) -> None:
        if self._phase == "busy":
            raise RuntimeError("another bucket is already being received; wait for it, or drop the group")
        receiver, staging, update = self._receiver, self._staging, self._update
        if receiver is None or staging is None or update is None or transfer.ref != update.ref:
            raise RuntimeError(
                "this update has not begun in this engine: the engine was restarted, or has abandoned the update"
            )
        bucket = update.buckets[transfer.bucket_index]
        tensors = update.manifest.tensors[bucket.start : bucket.stop]
        completing = self._completing

        def receive() -> None:
            staging.receive(receiver, transfer, bucket, tensors)
            is_last = transfer.bucket_index == len(update.buckets) - 1
            prepared = self._prepare(update.manifest, staging.tensors(), completing) if is_last else None
            if staging is self._staging:
                self._num_staged += 1
                self._prepared = prepared

        self._begin(receive)

    def _prepare(
        self, manifest: Manifest, arrived: Named, completing: Sequence[str]
    ) -> tuple[AdaptedLoad, PreparedLoad]:
        """Do everything that can be done before the pause."""
        with finished_on_weight_stream(self.device):
            adapted = self._adapted.prepare(manifest, arrived, self._base.tensor)
            companions = [(name, self._base.tensor(name)) for name in completing]
            return adapted, self._reloaded.prepare(self._on_device([*adapted.tensors, *companions]))

    def _on_device(self, tensors: Named) -> Named:
        return [(name, tensor.to(self.device, non_blocking=True)) for name, tensor in tensors]

    def _forget(self) -> None:
        staging, self._staging, self._num_staged = self._staging, None, 0
        self._prepared = None
        if staging is not None:
            staging.drop()

    def _drop(self) -> None:
        receiver, self._receiver, self._group = self._receiver, None, None
        self._forget()
        self._phase, self._problem, self.work = "idle", "", _finished()
        if receiver is not None:
            receiver.abort()

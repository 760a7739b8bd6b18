"""The engine's half: a weight transfer engine that vLLM loads in each of its workers, found by its entry point.

    join -> start_weight_update -> one update_weights for each bucket -> finish_weight_update

A bucket is received in a thread and staged in host memory, so that the worker goes on answering, a receive can be
ended, and the model is touched by ``finish_weight_update`` only: whatever fails before leaves the old weights serving.
``Worker.inflight_status`` says through vLLM's ``collective_rpc`` how far it is, which vLLM's own calls cannot return.

Facts of vLLM 0.32 that this module takes care of: a reload that failed leaves half-loaded layers behind, which would
corrupt the next one, so that a dirty model is flushed before it is loaded again; on a CPU linear layers are packed, and
a head that is tied to the embedding keeps its old packing until it is packed again.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from inflight.weights.packing import unpack
from inflight.weights.transports.process_group import ProcessGroupReceiver
from inflight.wire import ProcessGroupSpec, TensorSpec

BACKEND = "inflight"
"""What ``--weight-transfer-config '{"backend": ...}'`` names."""
PROTOCOL = 1
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
    """``init_info``: the contract's `ProcessGroupSpec`; the worker's own rank is added to ``rank``."""

    run_id: str
    backend: Literal["gloo", "nccl"]
    group_name: str
    master_address: str
    master_port: int
    rank: int
    world_size: int
    timeout_s: float


@dataclass
class BucketInfo:
    """``update_info``: where one bucket comes from, or ``forget`` what was staged, or ``drop`` the group too.

    ``tensors`` are `TensorSpec` bodies in the order of their bytes. ``shared_memory`` reads the bytes of a bucket from
    the file at ``path``, ``safetensors`` the named tensors from a safetensors file there; ``sha256`` of the file's
    bytes, if given, is compared before anything is staged.
    """

    source: Literal["group", "shared_memory", "safetensors", "forget", "drop"]
    tensors: list[dict[str, Any]] | None = None
    timeout_s: float = 60.0
    path: str | None = None
    sha256: str | None = None


class InflightTransferEngine(WeightTransferEngine[JoinInfo, BucketInfo]):  # type: ignore[misc]  # no vLLM here
    """One worker's half of the updates of its model. vLLM makes it and calls it from the worker's main thread."""

    init_info_cls = JoinInfo
    update_info_cls = BucketInfo
    supports_draft_weight_update = False

    def __init__(self, config: WeightTransferConfig, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._receiver: ProcessGroupReceiver | None = None
        self._group: str | None = None
        self._staged: list[tuple[str, torch.Tensor]] = []
        self._num_staged = 0
        self._phase: Phase = "idle"
        self._problem = ""
        self._work: threading.Event = threading.Event()
        self._is_dirty = False

    # ------------------------------------------------------------------------------------------- what vLLM calls

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Give an earlier group up and begin to join; `status` says when it is done."""
        self._drop()
        parallel = self.parallel_config
        offset = parallel.data_parallel_index * parallel.world_size + parallel.rank
        spec = ProcessGroupSpec(**{**vars(init_info), "rank": init_info.rank + offset})
        receiver = self._receiver = ProcessGroupReceiver(spec, self.device)

        def join() -> None:
            receiver.join()
            if self._receiver is receiver:
                self._group = spec.group_name

        self._begin(join)

    def start_weight_update(self) -> None:
        """Forget what an earlier session left; nothing of the model changes before `finish_weight_update`."""
        self._forget()
        if self._receiver is not None:
            self._receiver.recycle()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Begin to receive one bucket; `status` says when it is staged."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: BucketInfo) -> None:
        """See `update_weights`."""
        if update_info.source == "drop":
            self._drop()
            return
        if update_info.source == "forget":
            self._forget()
            return
        if self._phase == "busy":
            raise RuntimeError("a bucket is being received already; wait for it, or drop it")
        specs = [TensorSpec.model_validate(tensor) for tensor in update_info.tensors or ()]
        fetch = self._source(update_info, specs)
        staged = self._staged

        def receive() -> None:
            arrived = fetch()
            staged.extend((spec.name, tensor) for spec, tensor in zip(specs, arrived, strict=True))
            if staged is self._staged:
                self._num_staged += 1

        self._begin(receive)

    def finish_weight_update(self) -> None:
        """Load everything that was staged; without any, nothing changes."""
        if self._phase == "busy":
            raise RuntimeError("a bucket is still being received")
        staged = self._staged
        self._forget()
        if staged:
            self._load(staged)

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
            "is_dirty": self._is_dirty,
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

    def _forget(self) -> None:
        self._staged, self._num_staged = [], 0

    def _drop(self) -> None:
        receiver, self._receiver, self._group = self._receiver, None, None
        self._forget()
        self._phase, self._problem, self._work = "idle", "", threading.Event()
        if receiver is not None:
            receiver.abort()

    # -------------------------------------------------------------------------------------------------- sources

    def _source(self, info: BucketInfo, specs: list[TensorSpec]) -> Callable[[], list[torch.Tensor]]:
        if info.source == "group":
            receiver = self._receiver
            if receiver is None or self._group is None:
                raise RuntimeError("this engine belongs to no weight group: it was restarted, or gave it up")
            return lambda: receiver.receive(specs, info.timeout_s)
        if info.path is None:
            raise ValueError(f"source {info.source!r} needs a path")
        path = Path(info.path)
        if info.source == "shared_memory":
            return lambda: _from_memory(path, specs, info.sha256)
        return lambda: _from_safetensors(path, specs, info.sha256)

    # -------------------------------------------------------------------------------------------------- loading

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        if self._is_dirty:
            self._flush()
        self._is_dirty = True
        initialize_layerwise_reload(self.model)
        self.model.load_weights((name, tensor.to(self.device)) for name, tensor in tensors)
        finalize_layerwise_reload(self.model, self.model_config)
        self._pack_tied_head()
        self._is_dirty = False

    def _flush(self) -> None:
        """Put back the layers that a load that failed left half-way, without what it had brought for them."""
        initialize_layerwise_reload(self.model)
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)

    def _pack_tied_head(self) -> None:
        if self.device.type != "cpu":
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        embeddings = [m for m in self.model.modules() if type(m) is VocabParallelEmbedding]
        for head in self.model.modules():
            if isinstance(head, ParallelLMHead) and any(_is_tied(head, embedding) for embedding in embeddings):
                dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def _is_tied(head: torch.nn.Module, embedding: torch.nn.Module) -> bool:
    mine: Any = head.weight
    theirs: Any = embedding.weight
    return mine is theirs or (mine.numel() > 0 and mine.data_ptr() == theirs.data_ptr())


def _from_memory(path: Path, specs: list[TensorSpec], sha256: str | None) -> list[torch.Tensor]:
    """Return the tensors whose bytes lie one after another in the file at ``path``, copied out of it."""
    size_bytes = sum(spec.size_bytes for spec in specs)
    with path.open("rb") as file:
        found = path.stat().st_size
        if found < size_bytes:
            raise ValueError(f"{path} holds {found} bytes, the bucket has {size_bytes}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            content = bytearray(mapped[:size_bytes])
    _compare(path, content, sha256)
    return unpack(torch.frombuffer(content, dtype=torch.uint8), specs)


def _from_safetensors(path: Path, specs: list[TensorSpec], sha256: str | None) -> list[torch.Tensor]:
    """Return the named tensors of a safetensors file; raises if one is missing or of another shape or dtype."""
    from safetensors.torch import load

    content = path.read_bytes()
    _compare(path, content, sha256)
    found = load(content)
    for spec in specs:
        tensor = found.get(spec.name)
        if tensor is None:
            raise ValueError(f"{path} has no tensor {spec.name}")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
            raise ValueError(f"{spec.name} in {path} is {dtype} {tuple(tensor.shape)}, not {spec.dtype} {spec.shape}")
    return [found[spec.name] for spec in specs]


def _compare(path: Path, content: bytes | bytearray, sha256: str | None) -> None:
    if sha256 is not None and (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise ValueError(f"{path} was damaged: its sha256 is {found}, {sha256} was announced; nothing was loaded")

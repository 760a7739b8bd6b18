"""Loading tensors into a model that vLLM serves. Only vLLM loads this module.

Layers that load by plain copies alone are prepared before sampling is paused; the others use vLLM's layerwise reload.

This module works around four properties of vLLM 0.32. If a layer is loaded only in part, the rest of it takes whatever
values its memory held, so its other tensors must be loaded too. A failed reload leaves half-loaded layers behind, which
would corrupt the next reload. On a CPU, linear layers are packed, and a head tied to the embedding keeps its old
packed weights until it is packed again. Experts are packed on a CPU too, but only once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from inflight.errors import UnsupportedError
from inflight.weights.encode.transit import synchronise_stream
from inflight_vllm.ready_layers import ReadyLayer, ready_layers, tied_heads
from inflight_vllm.traced_loads import TracedLoad, trace

Named = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class PreparedLoad:
    """The part of a load that remains to be done while sampling is paused."""

    layers: Sequence[ReadyLayer]
    rest: Named
    """The tensors that vLLM's own reload has to load."""


class ReloadedModel:
    """A model in a worker. Call its methods in the worker's main thread, while no forward pass is running."""

    def __init__(self, model: Any, model_config: Any, device: torch.device) -> None:
        self._model = model
        self._model_config = model_config
        self._device = device
        self._traced: TracedLoad | None = None
        self._attention = [module for module in model.modules() if is_deferred_attention_layer(module)]
        self.is_dirty = False
        """Whether a load failed half-way, so that the next one must restore layers first."""

    @property
    def is_traced(self) -> bool:
        """Whether `find_layers` has traced the model."""
        return self._traced is not None

    @torch.no_grad()
    def prepare(self, tensors: Named) -> PreparedLoad:
        """Do the part of a load that needs no pause. May be called in any thread, even during a forward pass."""
        given = dict(tensors)
        if self._traced is None or self.is_dirty:
            return PreparedLoad([], tensors)
        layers, loaded = ready_layers(self._model, self._traced, given, self._device)
        return PreparedLoad(layers, [(name, tensor) for name, tensor in tensors if name not in loaded])

    @torch.no_grad()
    def load(self, prepared: PreparedLoad) -> None:
        """Load the prepared tensors; layers that receive none keep their weights. After any error the model is torn.

        On return the device has read the tensors, so their memory may be reused.
        """
        if self.is_dirty:
            self._put_back()
        self.is_dirty = True
        for layer in prepared.layers:
            layer.take()
        if prepared.rest:
            initialize_layerwise_reload(self._model)
            with self._repack_experts():
                self._model.load_weights((name, tensor.to(self._device)) for name, tensor in prepared.rest)
                self._finish()
            self._pack_tied_head()
        else:
            for attention in self._attention:  # as a reload does at its end: some derive weights from other layers
                attention.process_weights_after_loading(self._model_config.dtype)
        synchronise_stream(self._device)
        self.is_dirty = False

    @torch.no_grad()
    def find_layers(self, shapes: Mapping[str, Sequence[int]]) -> TracedLoad:
        """Return which layers load which tensors; only the first call traces the model.

        ``shapes`` contains the shapes of all tensors in the checkpoint.
        """
        if self.is_dirty:
            self._put_back()
        if self._traced is None:
            self._traced = trace(self._model, shapes, self._put_back)
        return self._traced

    def companions(self, names: Iterable[str], shapes: Mapping[str, Sequence[int]]) -> list[str]:
        """Return the other tensors of the layers that use the named tensors, because these must be loaded together.

        ``shapes`` has the same meaning as for `find_layers`. Raises `UnsupportedError` if it cannot be determined which
        tensors a layer loads.
        """
        traced = self.find_layers(shapes)
        if traced.problem is not None:
            raise UnsupportedError(
                f"inflight cannot determine which checkpoint tensors are loaded into {traced.problem}: this model "
                "supports only complete updates"
            )
        given = wanted = set(names)
        while True:
            sharing = wanted.union(*(layer.sources for layer in traced.layers if layer.sources & wanted))
            if sharing <= wanted:
                return [name for name in shapes if name in wanted - given]
            wanted = sharing

    def _put_back(self) -> None:
        """Restore the layers that are half-loaded, and discard the tensors loaded for them."""
        initialize_layerwise_reload(self._model)
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        self._finish()

    def _finish(self) -> None:
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load() and info.load_numel <= 0:
                info.load_numel_total = 0  # the layer keeps its tensors, and vLLM need not warn about it
        finalize_layerwise_reload(self._model, self._model_config)

    @contextlib.contextmanager
    def _repack_experts(self) -> Iterator[None]:
        """Make vLLM pack the experts that are loaded within the context.

        On a CPU, vLLM packs experts when it creates a layer's kernel, but then copies later weights over the packed
        ones without packing them.
        """
        methods: set[Any] = {getattr(module, "quant_method", None) for module in self._model.modules()}
        kernels: dict[Any, Any] = {it: it.moe_kernel for it in methods if getattr(it, "moe_kernel", None) is not None}
        if self._device.type != "cpu":
            kernels = {}
        for method in kernels:
            method.moe_kernel = None
        try:
            yield
        finally:
            for method, kernel in kernels.items():
                if method.moe_kernel is None:  # nothing was loaded for this layer
                    method.moe_kernel = kernel

    def _pack_tied_head(self) -> None:
        if self._device.type != "cpu":
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for head, _ in tied_heads(self._model):
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)

"""Loading tensors into a model that vLLM serves, by vLLM's own layerwise reload. Only vLLM loads this module.

This module handles three facts of vLLM 0.32. A partly loaded layer becomes whatever its memory held, so its other
tensors must be loaded too. A failed reload leaves half-loaded layers behind, which would corrupt the next reload. On a
CPU linear layers are packed, and a head tied to the embedding keeps its old packing until it is packed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from inflight.errors import UnsupportedError
from inflight.weights.streams import finish


class ReloadedModel:
    """A model in a worker. Call its methods in the worker's main thread, while no forward is under way."""

    def __init__(self, model: Any, model_config: Any, device: torch.device) -> None:
        self._model = model
        self._model_config = model_config
        self._device = device
        self._layers: dict[str, frozenset[int]] = {}
        self.is_dirty = False
        """Whether a load failed half-way, so that the next one has to put layers back first."""

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load checkpoint tensors; layers that take none of them keep theirs. After any error the model is torn.

        On return the device has read them: their memory may be used again.
        """
        if self.is_dirty:
            self._put_back()
        self.is_dirty = True
        initialize_layerwise_reload(self._model)
        self._model.load_weights((name, tensor.to(self._device)) for name, tensor in tensors)
        self._finish()
        self._pack_tied_head()
        finish(self._device)
        self.is_dirty = False

    def companions(self, names: Iterable[str], shapes: Mapping[str, Sequence[int]]) -> list[str]:
        """Return the other tensors of the layers that take those named: they must be loaded together.

        ``shapes`` are those of every tensor of the checkpoint. Raises `UnsupportedError` if the model loads a tensor in
        a way that does not tell which layer takes it.
        """
        if self.is_dirty:
            self._put_back()
        if not self._layers:
            self._layers = self._find_layers(shapes)
        given = wanted = set(names)
        while True:
            layers = frozenset().union(*(self._layers.get(name, ()) for name in wanted))
            sharing = {name for name, mine in self._layers.items() if mine & layers}
            if sharing <= wanted:
                return [name for name in shapes if name in wanted - given]
            wanted = wanted | sharing

    @torch.no_grad()
    def _find_layers(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, frozenset[int]]:
        """Make the model load tensors without memory, and record the layers that hold each of them back for loading."""
        meta = {name: torch.empty(tuple(shape), dtype=torch.float32, device="meta") for name, shape in shapes.items()}
        names = {tensor.untyped_storage()._cdata: name for name, tensor in meta.items()}
        found: dict[str, set[int]] = {}
        initialize_layerwise_reload(self._model)
        layers = list(self._model.modules())
        try:
            for layer in layers:
                get_layerwise_info(layer).load_numel = -math.inf  # no layer is ever complete
            self._model.load_weights(meta.items())
            for index, layer in enumerate(layers):
                for parameter, loaded in get_layerwise_info(layer).loaded_weights:
                    tensors = [t for t in loaded.arguments.values() if isinstance(t, torch.Tensor)]
                    sources = {names[c] for t in tensors if (c := t.untyped_storage()._cdata) in names}
                    if not sources:
                        raise UnsupportedError(
                            f"inflight cannot tell which checkpoint tensors make {type(layer).__name__}.{parameter}: "
                            "this model takes complete updates only"
                        )
                    for name in sources:
                        found.setdefault(name, set()).add(index)
        finally:
            self._put_back()
        return {name: frozenset(found.get(name, ())) for name in shapes}

    def _put_back(self) -> None:
        """Put back the layers that are half-way through a load, without the tensors it had loaded for them."""
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
                info.load_numel_total = 0  # the layer keeps its tensors; vLLM need not warn of that
        finalize_layerwise_reload(self._model, self._model_config)

    def _pack_tied_head(self) -> None:
        if self._device.type != "cpu":
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        embeddings = [m for m in self._model.modules() if type(m) is VocabParallelEmbedding]
        for head in self._model.modules():
            if isinstance(head, ParallelLMHead) and any(_is_tied(head, embedding) for embedding in embeddings):
                dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def _is_tied(head: torch.nn.Module, embedding: torch.nn.Module) -> bool:
    mine: Any = head.weight
    theirs: Any = embedding.weight
    return mine is theirs or (mine.numel() > 0 and mine.data_ptr() == theirs.data_ptr())

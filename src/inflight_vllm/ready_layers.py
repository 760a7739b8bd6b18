"""Layers whose next weights are prepared before sampling is paused. Only vLLM loads this module.

If vLLM computes with weights in the form in which its loaders leave them, the received tensors are ready, and switching
to them is a copy on the device. On a CPU, vLLM packs the weights of linear layers for its kernels. In this case the
next weights are packed in a copy of the layer that shares no memory with it, and at the switch the layer adopts the
packed weights. Quantized layers are never prepared.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from inflight_vllm.traced_loads import StridedRegion, TracedLayer, TracedLoad

_UNQUANTIZED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


@dataclass(frozen=True, slots=True)
class ReadyLayer:
    """A layer, the tensors to copy to its parameters, and the attributes that vLLM has created for its next weights."""

    module: torch.nn.Module
    copies: Sequence[tuple[str, StridedRegion, torch.Tensor]]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def take(self) -> None:
        """Make the layer use its next weights."""
        for name, place, tensor in self.copies:
            place.of(self.module._parameters[name].data).copy_(tensor, non_blocking=True)  # type: ignore[union-attr]
        for name, value in self.attributes.items():
            setattr(self.module, name, value)


def ready_layers(
    model: Any, traced: TracedLoad, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> tuple[list[ReadyLayer], set[str]]:
    """Return the layers that can be prepared, and the names of the tensors that they use. Does not change the model."""
    layers: list[ReadyLayer] = []
    loaded: set[str] = set()
    for layer in traced.repeatable(tensors, lambda it: _is_copied(it, device) or _is_packed(it, device)):
        loaded |= layer.sources
        if _is_packed(layer, device):
            layers += _pack_layers(model, layer, tensors, device)
        else:
            copies = [(write.parameter, write.to, write.value_from(tensors, device)) for write in layer.writes]
            layers.append(ReadyLayer(layer.module, copies))
    return layers, loaded


def tied_heads(model: Any) -> Iterator[tuple[torch.nn.Module, torch.nn.Module]]:
    """Yield each head that computes with an embedding's weights, and that embedding."""
    modules = list(model.modules())
    embeddings = [module for module in modules if type(module) is VocabParallelEmbedding]
    for head in modules:
        if isinstance(head, ParallelLMHead):
            yield from ((head, embedding) for embedding in embeddings if _is_tied(head, embedding))


def _is_copied(layer: TracedLayer, device: torch.device) -> bool:
    """Return whether vLLM computes with the parameters as its loaders leave them."""
    method = getattr(layer.module, "quant_method", None)
    if isinstance(method, QuantizeMethodBase) and (device.type != "cuda" or type(method) not in _UNQUANTIZED):
        return False
    return not is_deferred_attention_layer(layer.module) and all(
        (now := layer.module._parameters.get(name)) is not None
        and (now.shape, now.stride(), now.dtype) == (seen.shape, seen.stride(), seen.dtype)
        for name, seen in layer.parameters.items()
    )


def _is_packed(layer: TracedLayer, device: torch.device) -> bool:
    return device.type == "cpu" and type(getattr(layer.module, "quant_method", None)) in _UNQUANTIZED


def _pack_layers(
    model: Any, layer: TracedLayer, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> Iterator[ReadyLayer]:
    """Yield a layer with its next weights packed, and the heads that are tied to it."""
    module: Any = layer.module
    next_one = _without_memory(module)
    for name, seen in layer.parameters.items():
        weights = torch.empty(seen.shape, dtype=seen.dtype, device=device)
        for write in layer.writes:
            if write.parameter == name:
                write.to.of(weights).copy_(write.value_from(tensors, device))
        next_one._parameters[name] = torch.nn.Parameter(weights, requires_grad=False)
    module.quant_method.process_weights_after_loading(next_one)
    copies = [
        (name, StridedRegion(tuple(weights.shape), weights.stride(), 0), weights.data)
        for name, weights in next_one._parameters.items()
        if weights is not None and weights.numel()
    ]
    yield ReadyLayer(module, copies, _new_attributes(next_one, module))
    for head, embedding in tied_heads(model):
        if embedding is module:
            next_head = _without_memory(head)
            next_head._parameters["weight"] = next_one._parameters["weight"]
            dispatch_cpu_unquantized_gemm(next_head, remove_weight=False)
            yield ReadyLayer(head, [], _new_attributes(next_head, head))


def _without_memory(module: torch.nn.Module) -> Any:
    """Return a copy of a module, with the same attributes but without parameters."""
    made = copy.copy(module)
    made.__dict__ |= {"_parameters": {}, "_buffers": dict(module._buffers), "_modules": dict(module._modules)}
    return made


def _new_attributes(made: torch.nn.Module, module: torch.nn.Module) -> dict[str, Any]:
    tables = ("_parameters", "_buffers", "_modules")
    return {
        name: value
        for name, value in made.__dict__.items()
        if name not in tables and module.__dict__.get(name) is not value
    }


def _is_tied(head: Any, embedding: Any) -> bool:
    mine, theirs = head.weight, embedding.weight
    return mine is theirs or (mine.numel() > 0 and mine.data_ptr() == theirs.data_ptr())

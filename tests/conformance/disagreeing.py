"""Endpoints that each differ from a trainer in one place, for ``inflight check parity``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.loading import load_endpoint
from inflight.wire import Capabilities


def start(model: Path, fault: str) -> EmbeddedEndpoint:
    """Return an embedded endpoint with a fault."""
    return FAULTS[fault](load_endpoint(model, name=fault))


def layer_scales(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Layer 2 attends with another scale."""
    model: Any = endpoint._engine.weights.model
    model.base_model.layers[2].self_attn.scaling *= 1.3
    return endpoint


def loses_an_activation(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """The MLPs of all layers have another activation."""
    model: Any = endpoint._engine.weights.model
    for layer in model.base_model.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    return endpoint


def rounds_logits(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """The head's logits have 8 significant bits."""
    head: Any = endpoint._engine.weights.model.get_output_embeddings()
    head.register_forward_hook(lambda _, __, logits: logits.to(torch.bfloat16).to(logits.dtype))
    return endpoint


def keeps_a_projection(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Updates leave out layer 1's attention output projection, and the engine keeps a different copy of it."""
    engine: Any = endpoint._engine
    load, kept = engine.load, "model.layers.1.self_attn.o_proj.weight"
    mine = dict(engine.weights.model.named_parameters())[kept].detach().clone()

    def faulty(tensors: Any, *others: Any) -> None:
        load(tensors, *others)
        with torch.no_grad():
            dict(engine.weights.model.named_parameters())[kept].copy_(mine * 1.1)

    engine.load = faulty
    return endpoint


def takes_no_seeds(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Nothing differs, but requests cannot have seeds."""
    known = endpoint.capabilities

    async def capabilities() -> Capabilities:
        return (await known()).model_copy(update={"seeds": False})

    endpoint.capabilities = capabilities  # type: ignore[method-assign]
    return endpoint


FAULTS = {
    "none": lambda endpoint: endpoint,
    "layer scales": layer_scales,
    "no seeds": takes_no_seeds,
    "loses an activation": loses_an_activation,
    "rounds logits": rounds_logits,
    "keeps a projection": keeps_a_projection,
}

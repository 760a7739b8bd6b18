"""Embedded endpoints with one planted cause of drift each: tests.doctor.planted:start --option cause=..."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.loading import load_endpoint
from tests.conformance import mutants
from tests.conformance.disagreeing import FAULTS as DISAGREEING


def start(model: Path, cause: str) -> Any:
    """Return an embedded endpoint with a fault."""
    return CAUSES[cause](load_endpoint(model, name=cause))


def mutant(name: str) -> Callable[[EmbeddedEndpoint], Any]:
    return next(it.infect for it in mutants.MUTANTS if it.name == name)


def weights_of(endpoint: EmbeddedEndpoint) -> Any:
    return endpoint._engine.weights.model


def after_loading(change: Callable[[Any], None]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Change the model after each update."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        engine: Any = endpoint._engine
        load = engine.load

        def faulty(*arguments: Any) -> None:
            load(*arguments)
            with torch.no_grad():
                change(engine.weights.model)

        engine.load = faulty
        return endpoint

    return infect


def transform_again(model: Any) -> None:
    """A layout transformation that is applied to weights that have it already."""
    norm = model.base_model.norm.weight
    norm.mul_(1.05)


def quantise(model: Any) -> None:
    """Round the matrices of decoder layers to 15 levels for each output channel."""
    for layer in model.base_model.layers:
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                scale = module.weight.abs().amax(dim=1, keepdim=True) / 7
                module.weight.copy_((module.weight / scale).round() * scale)


def quantised(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    with torch.no_grad():
        quantise(weights_of(endpoint))
    return after_loading(quantise)(endpoint)


def crowded(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """The head computes in fewer bits if several requests run."""
    engine: Any = endpoint._engine
    head = weights_of(endpoint).get_output_embeddings()

    def rounded(_: Any, __: Any, logits: torch.Tensor) -> torch.Tensor:
        crowd = len(engine.scheduler.running) > 1
        return logits.to(torch.bfloat16).to(logits.dtype) if crowd else logits

    head.register_forward_hook(rounded)
    return endpoint


def misrouted(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """The router prefers another expert than the trainer's."""
    for layer in weights_of(endpoint).base_model.layers:
        gate = layer.mlp.gate
        gate.register_forward_pre_hook(lambda _, inputs: (inputs[0] * torch.linspace(0.2, 1.8, inputs[0].shape[-1]),))
    return endpoint


CAUSES: dict[str, Callable[[EmbeddedEndpoint], Any]] = {
    "none": lambda endpoint: endpoint,
    "stale prefix cache": mutant("stale prefix cache"),
    "lost tensor": DISAGREEING["keeps a projection"],
    "update not applied": mutant("update not applied"),
    "transformed again": after_loading(transform_again),
    "tied head": mutant("tied head left old"),
    "raw logprobs": mutant("raw logprobs"),
    "rounded head": DISAGREEING["rounds logits"],
    "misrouted": misrouted,
    "crowded": crowded,
    "quantised": quantised,
    "stamped at admission": mutant("version stamped at admission"),
}

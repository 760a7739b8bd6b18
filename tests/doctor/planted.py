"""Embedded endpoints with one planted cause of drift each: tests.doctor.planted:start --option cause=..."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.loading import load_endpoint
from inflight.wire import ScoreRequest
from tests.conformance import mutants
from tests.conformance.disagreeing import FAULTS as DISAGREEING


def start(model: Path, cause: str, max_model_len: int | None = None) -> Any:
    """Return an embedded endpoint with a fault."""
    return CAUSES[cause](load_endpoint(model, name=cause, max_model_len=max_model_len))


def mutant(name: str) -> Callable[[EmbeddedEndpoint], Any]:
    return mutants.MUTANTS[name].infect


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


def keeping(*kept: str) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Let updates leave out the tensors whose names end like this; without a name, all of them."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        names = [name for name, _ in weights_of(endpoint).named_parameters() if name.endswith(kept or ("",))]
        mine = {name: dict(weights_of(endpoint).named_parameters())[name].detach().clone() for name in names}

        def restore(model: Any) -> None:
            for name, tensor in mine.items():
                dict(model.named_parameters())[name].copy_(tensor)

        return after_loading(restore)(endpoint)

    return infect


def transform_again(model: Any) -> None:
    """A layout transformation that is applied to weights that have it already."""
    norm = model.base_model.norm.weight
    norm.mul_(1.05)


def started_elsewhere(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Start with weights that are not the checkpoint's; updates arrive as they should."""
    with torch.no_grad():
        transform_again(weights_of(endpoint))
    return endpoint


def quantize(model: Any) -> None:
    """Round the matrices of decoder layers to 15 levels for each output channel."""
    for layer in model.base_model.layers:
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                scale = module.weight.abs().amax(dim=1, keepdim=True) / 7
                module.weight.copy_((module.weight / scale).round() * scale)


def quantized(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    with torch.no_grad():
        quantize(weights_of(endpoint))
    return after_loading(quantize)(endpoint)


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


def raw_logprobs(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Report logprobs of the unscaled and unfiltered distribution."""
    faulty: Any = endpoint
    generate = endpoint.generate

    async def raw(request: Any) -> Any:
        response = await generate(request)
        completions = []
        for completion in response.completions:
            token_ids = request.prompt_token_ids + completion.token_ids
            asked = ScoreRequest(request_id=uuid.uuid4().hex, token_ids=token_ids, start=len(request.prompt_token_ids))
            scores = await endpoint.score(asked)
            completions.append(completion.model_copy(update={"logprobs": scores.logprobs}))
        return response.model_copy(update={"completions": tuple(completions)})

    faulty.generate = raw
    return endpoint


CAUSES: dict[str, Callable[[EmbeddedEndpoint], Any]] = {
    "none": lambda endpoint: endpoint,
    "stale prefix cache": mutant("stale prefix cache"),
    "lost tensor": keeping("layers.1.self_attn.o_proj.weight"),
    "update not applied": keeping(),
    "transformed again": after_loading(transform_again),
    "started elsewhere": started_elsewhere,
    "tied head": mutant("tied head left old"),
    "raw logprobs": raw_logprobs,
    "rounded head": DISAGREEING["rounds logits"],
    "misrouted": misrouted,
    "crowded": crowded,
    "quantized": quantized,
    "stamped at admission": mutant("version stamped at admission"),
}

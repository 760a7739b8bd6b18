"""A right engine that is deliberately unusual, and faults of such engines.

Every step computes at most ``chunk`` tokens of a sequence, so an update may fall between two chunks of a prompt.
Weights lie in memory column by column, and images are not supported. It supports every kind of update that needs no
trainer of several ranks. A ``fault`` is one of the model's computation, which checks of updates and caches show too.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from inflight.engines.embedded.loading import load_endpoint
from inflight.weights.receive.base_weights import AdaptedWeights
from inflight.weights.receive.receiver import UpdateReceiver
from inflight.weights.receive.staged_sink import StagedSink
from inflight.weights.transports import make_receiver
from inflight.wire import InFlightPolicy, TensorSpec, WeightUpdate
from tests.conformance.plain.threaded import Sequence, ThreadedEndpoint


def make(model_dir: Path, **options: Any) -> UnusualEndpoint:
    """Return the endpoint; options of the command line are strings."""
    numbers = {name: int(value) for name, value in options.items() if name != "fault"}
    return UnusualEndpoint(model_dir, **numbers, fault=options.get("fault", ""))


def make_late(model_dir: Path, late: str, **options: Any) -> Any:
    """Return an embedded endpoint whose first call of the method ``late`` while requests run arrives once they have
    ended."""
    endpoint = load_endpoint(model_dir, **options)
    method, is_first = getattr(endpoint, late), True

    async def call(*arguments: Any) -> Any:
        nonlocal is_first
        while is_first and (await endpoint.weight_version()).num_running:
            await asyncio.sleep(0.01)
            is_first = (await endpoint.weight_version()).num_running > 0
        return await method(*arguments)

    setattr(endpoint, late, call)
    return endpoint


class UnusualEndpoint(ThreadedEndpoint):
    """The engine with a thread of docs/inference-adapter.md, with chunks, shared pages and further kinds of update."""

    def __init__(
        self, model_dir: Path, *, chunk: int = 4, max_concurrent: int = 4, context: int = 512, fault: str = ""
    ) -> None:
        super().__init__(model_dir, "unusual", max_concurrent, context)
        self.chunk, self.fault = chunk, fault
        for parameter in self.parameters.values():
            if parameter.dim() == 2:
                parameter.data = parameter.data.t().contiguous().t()
        self.adapted = AdaptedWeights()
        self.arrived = StagedSink(make_receiver, self.prepare)
        changes = {"in_flight_policies": (InFlightPolicy.KEEP, InFlightPolicy.RECOMPUTE)}
        flags = dict.fromkeys(("partial_updates", "lora"), True)
        encodings = ("bfloat16", "float8", "delta")
        self.declared = self.declared.model_copy(update={**changes, **flags, "encodings": encodings})
        specs = [TensorSpec(name=n, dtype=self.dtype, shape=tuple(p.shape)) for n, p in self.parameters.items()]
        self.updates = UpdateReceiver(self, self.arrived, specs, self.declared)

    def prepare(self, update: WeightUpdate, arrived: Any) -> Any:
        return self.adapted.prepare(update.manifest, arrived, lambda name: self.parameters[name].detach().clone())

    async def apply(self, update: WeightUpdate) -> None:
        ready = self.arrived.prepared()
        await self.in_engine(lambda: self.load_update(ready, update))

    @torch.no_grad()
    def load_update(self, ready: Any, update: WeightUpdate) -> None:
        for name, tensor in ready.tensors:
            self.parameters[name].copy_(tensor)
        self.adapted.note_loaded(ready)
        for sequence in self.sequences if update.in_flight is InFlightPolicy.RECOMPUTE else ():
            sequence.cache = None
        self.version, self.is_paused = update.version, False

    def sample(self, it: Sequence) -> str | None:
        """Compute the next chunk; add a token if everything before it has been computed."""
        if it.cache is None:
            it.cache, it.num_computed = DynamicCache(), 0
        left = it.ids[it.num_computed :]
        logits = self.compute(it, left[: self.chunk])
        return None if len(left) > self.chunk else self.add_token(it, logits)

    @torch.no_grad()
    def compute(self, it: Sequence, token_ids: list[int]) -> torch.Tensor:
        """Return logits [1, V] after these tokens, whose keys and values are stored."""
        start = it.num_computed
        stop = start + len(token_ids)
        positions = torch.arange(start, stop)
        if self.fault == "positions":
            positions = positions.clamp(max=100)
        if self.fault == "window":
            keep_last(it.cache, 59)
        if self.fault == "chunk edges" and start and len(token_ids) == 1 and start % self.chunk == 0:
            positions = positions - 1
        logits: torch.Tensor = self.model(
            input_ids=torch.tensor([token_ids]), position_ids=positions[None], past_key_values=it.cache, use_cache=True
        ).logits[:, -1]
        it.num_computed = stop
        return logits.bfloat16().float() if self.fault == "rounding" else logits


def keep_last(cache: DynamicCache, num: int) -> None:
    """Drop the keys and values of all but the last tokens."""
    for layer in cache.layers:
        if layer.is_initialized:
            layer.keys, layer.values = layer.keys[:, :, -num:], layer.values[:, :, -num:]

"""Faults in loading and refusing updates."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.parameters import PreparedParameters
from inflight.weights.encode.buckets import manifest_difference
from inflight.wire import Manifest, TensorSpec, WeightUpdate
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import replaces

Tensors = list[tuple[str, torch.Tensor]]


def loading(change: Callable[[Tensors], Tensors]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Load something other than what arrived."""

    @replaces("_engine.load")
    def infect(endpoint: EmbeddedEndpoint, load: Any, ready: PreparedParameters, *others: Any) -> None:
        load(endpoint._engine.weights.prepare(change(list(ready.tensors))), *others)

    return infect


def accepting(
    forgive: Callable[[list[TensorSpec], list[TensorSpec]], list[TensorSpec]],
) -> Callable[..., EmbeddedEndpoint]:
    """Overlook a difference between the manifest and the model."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        session: Any = endpoint._updates._session
        reason = session._reason_to_refuse

        def faulty(update: WeightUpdate) -> str | None:
            offered = forgive(list(session._expected), list(update.manifest.tensors))
            if manifest_difference(session._expected, Manifest.model_construct(tensors=tuple(offered))) is None:
                update = update.model_copy(
                    update={"manifest": update.manifest.model_copy(update={"tensors": tuple(offered)})}
                )
            found: str | None = reason(update)
            return found

        session._reason_to_refuse = faulty
        return endpoint

    return infect


def with_all(expected: list[TensorSpec], offered: list[TensorSpec]) -> list[TensorSpec]:
    names = {spec.name for spec in offered}
    return offered + [spec for spec in expected if spec.name not in names]


def with_known(expected: list[TensorSpec], offered: list[TensorSpec]) -> list[TensorSpec]:
    names = {spec.name for spec in expected}
    return [spec for spec in offered if spec.name in names]


def with_own(field: str) -> Callable[[list[TensorSpec], list[TensorSpec]], list[TensorSpec]]:
    def forgive(expected: list[TensorSpec], offered: list[TensorSpec]) -> list[TensorSpec]:
        mine = {spec.name: getattr(spec, field) for spec in expected}
        return [s.model_copy(update={field: mine[s.name]}) if s.name in mine else s for s in offered]

    return forgive


def tied_head_left_old(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    model: Any = endpoint._engine.weights.model
    if model.config.tie_word_embeddings:
        own = model.get_input_embeddings().weight.detach().clone()
        model.get_output_embeddings().weight = torch.nn.Parameter(own)
    return endpoint


def last_bucket_only(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    sink: Any = endpoint._sink
    own = sink._prepare
    sink._prepare = lambda update, arrived: own(update, arrived[update.buckets[-1].start :])
    return endpoint


def matched_by_position(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Match tensors by their position among those of the same shape, so that every one of them fits."""
    engine: Any = endpoint._engine
    load = engine.load
    own = [(name, parameter.shape) for name, parameter in engine.weights.model.named_parameters()]

    def faulty(ready: PreparedParameters, *others: Any) -> None:
        names: dict[torch.Size, deque[str]] = defaultdict(deque)
        for name, shape in own:
            names[shape].append(name)
        matched = [(names[tensor.shape].popleft(), tensor) for _, tensor in ready.tensors]
        load(engine.weights.prepare(matched), *others)

    engine.load = faulty
    return endpoint


_FIRST: dict[str, torch.Tensor] = {}


def remembers_the_first_checkpoint(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    model: Any = endpoint._engine.weights.model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            first = _FIRST.setdefault(name, parameter.detach().clone())
            if first.shape == parameter.shape and not model.config.tie_word_embeddings:
                parameter.copy_(first)
    return endpoint


@replaces("_engine.load")
def wears_out(endpoint: EmbeddedEndpoint, load: Any, ready: PreparedParameters, *others: Any) -> None:
    engine = endpoint._engine
    load(ready if engine.counters.num_updates < 100 else engine.weights.prepare([]), *others)


def in_half(tensors: Tensors) -> Tensors:
    return [(name, tensor.bfloat16().to(tensor.dtype)) for name, tensor in tensors]


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: [(name, tensor) for name, tensor in tensors if part not in name]


MUTANTS = (
    Mutant("cast on the way", "U-01", "Received tensors are rounded to bfloat16.", loading(in_half)),
    Mutant("update not applied", "U-02", "The commit is acknowledged, but nothing is loaded.", loading(lambda _: [])),
    Mutant(
        "zeros taken for missing",
        "U-03",
        "A tensor of zeros is treated as one that was not sent, and keeps its old values.",
        loading(lambda tensors: [(name, tensor) for name, tensor in tensors if bool(tensor.any())]),
    ),
    Mutant("missing tensor accepted", "U-04", "A manifest without a tensor is accepted.", accepting(with_all)),
    Mutant("unknown tensor accepted", "U-05", "A tensor that the model lacks is accepted.", accepting(with_known)),
    Mutant(
        "misshapen tensor accepted", "U-06", "A tensor with the wrong shape is accepted.", accepting(with_own("shape"))
    ),
    Mutant("wrong dtype accepted", "U-07", "A tensor with the wrong dtype is accepted.", accepting(with_own("dtype"))),
    Mutant("dropped lm_head", "U-08", "The head is left out of every update.", loading(without("lm_head"))),
    Mutant("tied head left old", "U-09", "The head keeps a copy of the embedding it started with.", tied_head_left_old),
    Mutant("last bucket only", "U-10", "Each bucket replaces what was staged before it.", last_bucket_only),
    Mutant("matched by position", "U-11", "Tensors are matched by position instead of by name.", matched_by_position),
    Mutant(
        "first checkpoint remembered",
        "U-12",
        "A restarted endpoint serves the checkpoint that the first one was started from.",
        remembers_the_first_checkpoint,
    ),
    Mutant("wears out", "U-13", "After a hundred updates, the weights of further updates are not loaded.", wears_out),
)

"""Faults that only a comparison with the trainer reveals."""

from __future__ import annotations

from typing import Any

import torch

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import replaces


def positions_shift(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    def shifted(_: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        positions = keywords["position_ids"]
        return arguments, {**keywords, "position_ids": torch.where(positions >= 64, positions + 1, positions)}

    model: Any = endpoint._engine.weights.model
    model.base_model.register_forward_pre_hook(shifted, with_kwargs=True)
    return endpoint


@replaces("_engine.load")
def wears_away(endpoint: EmbeddedEndpoint, load: Any, tensors: Any, *others: Any) -> None:
    load(tensors, *others)
    with torch.no_grad():
        endpoint._engine.weights.model.get_output_embeddings().weight.mul_(
            1.00002**endpoint._engine.counters.num_updates
        )


MUTANTS = (
    Mutant("positions shift", "E-60", "Positions of 64 and above are one too large.", positions_shift),
    Mutant("wears away", "E-61", "Every update scales the head a little more.", wears_away),
)

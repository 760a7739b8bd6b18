"""Faults in which experts an endpoint reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import inflight.engines.embedded.stepping
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.sequences import Sequence
from inflight.model.routing import Experts
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import replaces


def of_a_neighbour(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    recorder: Any = endpoint._engine.steps.recorder
    if recorder is not None:
        take = recorder.take

        def faulty() -> Experts:
            experts_TLK = take()
            experts_TLK[1:] = experts_TLK[:-1].copy()
            return experts_TLK

        recorder.take = faulty
    return endpoint


@replaces("_engine.steps._forward")
def without_the_prompt(endpoint: EmbeddedEndpoint, forward: Any, groups: list[list[Sequence]]) -> Any:
    drawn = forward(groups)
    for group in groups:
        for sequence in group:
            if len(sequence.routed) == 1:
                sequence.routed[0] = sequence.routed[0][:0]
    return drawn


def replaced_by_a_recompute(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Forget the experts of a sequence when its first token is computed again."""
    sequence: Any = Sequence
    note = sequence.note_routed

    def faulty(self: Sequence, start: int, experts_TLK: Experts) -> None:
        if start == 0:
            self.routed = []
        note(self, start, experts_TLK)

    sequence.note_routed = faulty
    return endpoint


def ignoring_unsupported(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    generate = endpoint.generate
    faulty: Any = endpoint
    if not endpoint._engine.records_routing:
        faulty.generate = lambda request: generate(request.model_copy(update={"routed_experts": False}))
    return endpoint


def of_rejected_drafts(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Record the experts of all tokens that a step computes, rejected drafts included; the first record counts."""
    right = inflight.engines.embedded.stepping._note_experts

    def faulty(recorder: Any, slots: Any, num_decoded: list[int], drawn: list[Any], new: Any) -> None:
        computed = [
            SimpleNamespace(sequence=it.sequence, token_ids=[0] * num)
            for it, num in zip(drawn, num_decoded, strict=False)
        ]
        right(recorder, slots, num_decoded, computed, new)  # type: ignore[arg-type]

    inflight.engines.embedded.stepping._note_experts = faulty
    return endpoint


MUTANTS = (
    Mutant(
        "experts of rejected drafts",
        "E-80",
        "A token that replaces a rejected draft is reported with the experts of the draft.",
        of_rejected_drafts,
    ),
    Mutant(
        "experts of a neighbour",
        "E-80",
        "Each token is reported with the experts of the token before it in the step.",
        of_a_neighbour,
    ),
    Mutant(
        "experts without the prompt",
        "E-80",
        "The reported experts begin at the first sampled token, without the prompt.",
        without_the_prompt,
    ),
    Mutant(
        "experts replaced by a recompute",
        "E-80",
        "When a completion is recomputed, the experts of the new weights replace those recorded first.",
        replaced_by_a_recompute,
    ),
    Mutant(
        "unsupported experts ignored",
        "E-81",
        "A model without experts answers a request for routed experts instead of refusing it.",
        ignoring_unsupported,
    ),
)

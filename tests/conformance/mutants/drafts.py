"""Faults in how drafts are verified."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

import inflight.engines.embedded.stepping
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.sampler import sample
from inflight.engines.embedded.speculation import DrawnTokens, num_accepted
from inflight.wire import SamplingParams
from tests.conformance.mutants import patches
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import replaces


@replaces("_engine.speculation.verify")
def accepting_everything(
    endpoint: EmbeddedEndpoint, verify: Any, sequences: Any, token_ids: list[int], logprobs: list[float]
) -> list[DrawnTokens]:
    start = 0
    for sequence in sequences:
        token_ids[start : start + len(sequence.draft)] = sequence.draft
        start += len(sequence.draft) + 1
    return verify(sequences, token_ids, logprobs)


@replaces("_engine.speculation.verify")
def reporting_the_drafts(
    endpoint: EmbeddedEndpoint, verify: Any, sequences: Any, token_ids: list[int], logprobs: list[float]
) -> list[DrawnTokens]:
    return [
        it._replace(logprobs=[0.0] * (len(it.logprobs) - 1) + it.logprobs[-1:])
        for it in verify(sequences, token_ids, logprobs)
    ]


def drawing_again_after_a_rejection(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    speculation: Any = endpoint._engine.speculation
    verify = speculation.verify
    step: list[Any] = []

    def draw(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> patches.Drawn:
        step[:] = [logits, params]
        return sample(logits, params, uniforms)

    def faulty(sequences: Any, token_ids: list[int], logprobs: list[float]) -> list[DrawnTokens]:
        rejected, start = [], 0
        for sequence in sequences:
            accepted = num_accepted(sequence.draft, token_ids[start:])
            rejected.append(start + accepted if accepted < len(sequence.draft) else None)
            start += len(sequence.draft) + 1
        kept = []
        logits, params = step
        for it, row in zip(verify(sequences, token_ids, logprobs), rejected, strict=True):
            if row is not None:
                (token,), (logprob,) = sample(logits[row : row + 1], params[row : row + 1], [random.random()])
                it.token_ids[-1], it.logprobs[-1] = token, logprob
            kept.append(it)
        return kept

    speculation.verify = faulty
    inflight.engines.embedded.stepping.sample = draw
    return endpoint


@replaces("_engine.speculation.verify")
def counting_those_of_the_engine(
    endpoint: EmbeddedEndpoint, verify: Any, sequences: Any, token_ids: list[int], logprobs: list[float]
) -> list[DrawnTokens]:
    kept = verify(sequences, token_ids, logprobs)
    for it in kept:
        it.sequence.num_verifications, it.sequence.num_accepted = 1, endpoint._engine.speculation._counters.num_accepted
    return kept


MUTANTS = (
    Mutant("every draft accepted", "E-70", "Every drafted token is accepted.", accepting_everything),
    Mutant(
        "logprobs of the draft",
        "E-70",
        "Accepted tokens have logprob 0, their logprob under the draft.",
        reporting_the_drafts,
    ),
    Mutant(
        "drawn again after a rejection",
        "E-70",
        "After a rejection, the token is drawn from the whole distribution, so it may be the rejected one.",
        drawing_again_after_a_rejection,
    ),
    Mutant(
        "drafts of the engine counted",
        "E-71",
        "A completion reports all drafted tokens that the engine has accepted, not only its own.",
        counting_those_of_the_engine,
    ),
)

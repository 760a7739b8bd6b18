"""Faults of cached keys and values."""

from __future__ import annotations

from typing import Any

import torch

from inflight.local.endpoint import LocalEndpoint
from inflight.wire import InFlightPolicy
from tests.conformance.mutants.mutant import Mutant


def stale_prefix_cache(endpoint: LocalEndpoint) -> LocalEndpoint:
    engine: Any = endpoint._engine
    append = engine._append
    cache: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def faulty(sequence: Any, token: int, logprob: float) -> None:
        if not sequence.token_ids:
            prompt, slot = sequence.request.prompt_token_ids, sequence.slot
            keys, values = (t[:, slot.row, :, : len(prompt)] for t in (slot.arena.keys_LSKCD, slot.arena.values_LSKCD))
            if prompt in cache:
                keys.copy_(cache[prompt][0])
                values.copy_(cache[prompt][1])
            cache[prompt] = (keys.clone(), values.clone())
        append(sequence, token, logprob)

    engine._append = faulty
    return endpoint


def swapped_policy(taken: InFlightPolicy, instead: InFlightPolicy) -> Any:
    def infect(endpoint: LocalEndpoint) -> LocalEndpoint:
        engine: Any = endpoint._engine
        load = engine.load
        engine.load = lambda tensors, version, policy: load(tensors, version, instead if policy is taken else policy)
        return endpoint

    return infect


MUTANTS = (
    Mutant(
        "stale prefix cache",
        "U-30",
        "A prompt that was seen under older weights gets the keys and values of those.",
        stale_prefix_cache,
    ),
    Mutant(
        "old keys under recompute",
        "U-31",
        "Under recompute, running requests keep the keys and values of old weights.",
        swapped_policy(InFlightPolicy.RECOMPUTE, InFlightPolicy.KEEP),
    ),
    Mutant(
        "recomputed under keep",
        "U-32",
        "Under keep, the keys and values of running requests are computed again.",
        swapped_policy(InFlightPolicy.KEEP, InFlightPolicy.RECOMPUTE),
    ),
)

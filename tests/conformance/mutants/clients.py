"""Faults in what a client assumes about a server that other clients change."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.wire import GenerateRequest, GenerateResponse, InFlightPolicy, UpdateRef, WeightVersion
from tests.conformance.mutants.mutant import Mutant

_PAGE = 256
_serial = itertools.count()


def caches_pages(endpoint: EmbeddedEndpoint) -> dict[str, str]:
    """Make the engine share pages among requests with the same key; return the keys by request id, to be set.

    ``recompute`` drops all pages, ``keep`` none.
    """
    engine: Any = endpoint._engine
    append, load = engine.steps._append, engine.load
    keys: dict[str, str] = {}
    pages: dict[tuple[str, tuple[int, ...]], tuple[torch.Tensor, torch.Tensor]] = {}

    def appending(drawn: Any) -> Any:
        sequence = drawn.sequence
        prompt, slot = sequence.request.prompt_token_ids, sequence.slot
        if not sequence.token_ids and len(prompt) > _PAGE:
            page = [t[:, slot.row, :, :_PAGE] for t in (slot.arena.keys_LSKCD, slot.arena.values_LSKCD)]
            name = (keys[sequence.request.request_id], prompt[:_PAGE])
            for part, cached in zip(page, pages.setdefault(name, (page[0].clone(), page[1].clone())), strict=True):
                part.copy_(cached)
        return append(drawn)

    def loading(tensors: Any, version: int, policy: InFlightPolicy) -> Any:
        if policy is not InFlightPolicy.KEEP:
            pages.clear()
        return load(tensors, version, policy)

    engine.steps._append, engine.load = appending, loading
    return keys


def keyed_by_what_it_published(endpoint: Any, keys: dict[str, str]) -> Any:
    """Make an endpoint a client that derives its key from the updates that went through itself."""
    generate, commit = endpoint.generate, endpoint.commit_weight_update
    name, published = next(_serial), ["nothing"]

    async def generating(request: GenerateRequest) -> GenerateResponse:
        keys[request.request_id] = f"{name}: {published[-1]}"
        return await generate(request)

    async def committing(ref: UpdateRef) -> WeightVersion:
        answer = await commit(ref)
        published.append(str(ref))
        return answer

    endpoint.generate, endpoint.commit_weight_update = generating, committing
    return endpoint


def key_of_the_client(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    keys, plain = caches_pages(endpoint), copy.copy(endpoint)

    def another_client() -> EmbeddedEndpoint:
        client = keyed_by_what_it_published(copy.copy(plain), keys)
        client.aclose = _nothing  # the engine belongs to the first client
        return client

    first: Any = keyed_by_what_it_published(endpoint, keys)
    first.another_client = another_client
    return first


async def _nothing() -> None:
    pass


MUTANTS = (
    Mutant(
        "key of the client",
        "U-26",
        "Under keep, cached prefixes are identified only by a key that each client derives from its own updates.",
        key_of_the_client,
    ),
)

"""Faults of cached keys and values."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.slot_attention import StepPlan
from inflight.wire import InFlightPolicy
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import replaces

Cache = dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]]


def stale_prefix_cache(page: int) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Keep whole pages of every prompt, and reuse them whatever the weights are."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        cache_prompts(endpoint, page)
        return endpoint

    return infect


def dropped_unless_held(*policies: InFlightPolicy) -> Any:
    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        engine: Any = endpoint._engine
        cache = cache_prompts(endpoint, 1)
        load = engine.load

        def faulty(tensors: Any, version: int, policy: InFlightPolicy) -> None:
            running = engine.scheduler.running.values() if policy in policies else ()
            for prompt in cache.keys() - {sequence.request.prompt_token_ids for sequence in running}:
                del cache[prompt]
            load(tensors, version, policy)

        engine.load = faulty
        return endpoint

    return infect


def dropped_with_the_version(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    engine: Any = endpoint._engine
    cache, load = cache_prompts(endpoint, 1), engine.load

    def faulty(tensors: Any, version: int, policy: InFlightPolicy) -> None:
        if version != engine.steps.version:
            cache.clear()
        load(tensors, version, policy)

    engine.load = faulty
    return endpoint


def cache_prompts(endpoint: EmbeddedEndpoint, page: int) -> Cache:
    """Give the engine a prefix cache that nothing drops; return it."""
    engine: Any = endpoint._engine
    append = engine.steps._append
    cache: Cache = {}

    def faulty(drawn: Any) -> Any:
        sequence = drawn.sequence
        prompt, slot = sequence.request.prompt_token_ids, sequence.slot
        if not sequence.token_ids and (length := len(prompt) // page * page):
            keys, values = cached(slot, length)
            if prompt[:length] in cache:
                keys.copy_(cache[prompt[:length]][0])
                values.copy_(cache[prompt[:length]][1])
            cache[prompt[:length]] = (keys.clone(), values.clone())
        return append(drawn)

    engine.steps._append = faulty
    return cache


def cached(slot: Any, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return slot.arena.keys_LSKCD[:, slot.row, :, :length], slot.arena.values_LSKCD[:, slot.row, :, :length]


def sharing_blocks(key: Callable[[tuple[int, ...], int, int], object], page: int = 16) -> Any:
    """Reuse the keys and values of whole pages of prompts by what ``key`` makes of a prompt and a page's edges.

    Nothing is reused across updates.
    """

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        engine: Any = endpoint._engine
        append, load = engine.steps._append, engine.load
        pages: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}

        def appending(drawn: Any) -> Any:
            sequence = drawn.sequence
            prompt = sequence.request.prompt_token_ids
            for start in range(0, len(prompt) - page + 1, page) if not sequence.token_ids else ():
                parts = [part[..., start : start + page, :] for part in cached(sequence.slot, len(prompt))]
                known = pages.setdefault(key(prompt, start, start + page), (parts[0].clone(), parts[1].clone()))
                for part, kept in zip(parts, known, strict=True):
                    part.copy_(kept)
            return append(drawn)

        def loading(*arguments: Any) -> None:
            pages.clear()
            load(*arguments)

        engine.steps._append, engine.load = appending, loading
        return endpoint

    return infect


def overwriting_blocks(num_blocks: int, page: int = 16) -> Any:
    """Cache whole pages of prompts, identified by all tokens up to their end, in ``num_blocks`` blocks used in turn.

    A block that has been overwritten is still found under its previous tokens. Nothing is reused across updates.
    """

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        engine: Any = endpoint._engine
        append, load = engine.steps._append, engine.load
        index: dict[tuple[int, ...], int] = {}
        blocks: dict[int, list[torch.Tensor]] = {}

        def appending(drawn: Any) -> Any:
            sequence = drawn.sequence
            prompt = sequence.request.prompt_token_ids
            for stop in range(page, len(prompt) + 1, page) if not sequence.token_ids else ():
                parts = [part[..., stop - page :, :] for part in cached(sequence.slot, stop)]
                if prompt[:stop] not in index:
                    index[prompt[:stop]] = len(index) % num_blocks
                    blocks[index[prompt[:stop]]] = [part.clone() for part in parts]
                for part, kept in zip(parts, blocks[index[prompt[:stop]]], strict=True):
                    part.copy_(kept)
            return append(drawn)

        def loading(*arguments: Any) -> None:
            index.clear()
            load(*arguments)

        engine.steps._append, engine.load = appending, loading
        return endpoint

    return infect


def continuing_completions(num_missing: int, *, is_dropped: bool = True) -> Any:
    """Keep the keys and values of finished completions for prompts that continue them, in pages of one token.

    Those of the last ``num_missing`` tokens have not been computed. ``is_dropped`` states whether an update drops all.
    """

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        engine: Any = endpoint._engine
        append, load, finish = engine.steps._append, engine.load, engine.scheduler.finish
        kept: Cache = {}

        def finishing(sequence: Any, reason: str) -> None:
            if sequence.slot is not None and sequence.token_ids:
                ids = tuple(sequence.all_ids())
                keys, values = (part.clone() for part in cached(sequence.slot, len(ids)))
                for part in (keys, values):
                    part[..., len(ids) - num_missing :, :] = 0
                kept[ids] = keys, values
            finish(sequence, reason)

        def appending(drawn: Any) -> Any:
            sequence = drawn.sequence
            prompt = sequence.request.prompt_token_ids
            for ids, parts in kept.items() if not sequence.token_ids else ():
                if prompt[: len(ids)] == ids and len(prompt) > len(ids):
                    for part, known in zip(cached(sequence.slot, len(ids)), parts, strict=True):
                        part.copy_(known)
            return append(drawn)

        def loading(*arguments: Any) -> None:
            if is_dropped:
                kept.clear()
            load(*arguments)

        engine.scheduler.finish, engine.steps._append, engine.load = finishing, appending, loading
        return endpoint

    return infect


@replaces("_engine.load")
def recomputing_four(endpoint: EmbeddedEndpoint, load: Any, tensors: Any, version: int, policy: InFlightPolicy) -> None:
    others = dict(list(endpoint._engine.scheduler.running.items())[4:]) if policy is InFlightPolicy.RECOMPUTE else {}
    for slot in others:
        del endpoint._engine.scheduler.running[slot]
    load(tensors, version, policy)
    endpoint._engine.scheduler.running |= others


@replaces("_engine.load")
def keeping_under_the_same_version(
    endpoint: EmbeddedEndpoint, load: Any, tensors: Any, version: int, policy: InFlightPolicy
) -> None:
    is_new = version != endpoint._engine.steps.version
    load(tensors, version, policy if is_new else InFlightPolicy.KEEP)


def keeping_chunks(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Prefill the first half of a long prompt in its own step, and keep it across updates."""
    engine: Any = endpoint._engine
    step, append = engine.steps.step, engine.steps._append
    chunks: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def read(sequence: Any) -> None:
        ids = sequence.request.prompt_token_ids[: len(sequence.request.prompt_token_ids) // 2]
        slot = engine.scheduler.store.open(len(ids), len(ids) + 1)
        plan = StepPlan(engine.scheduler.store, [slot], [len(ids)], engine.weights.device)
        decoding = plan.decoding_slots
        assert not decoding
        packed = torch.tensor([ids], device=engine.weights.device)
        positions = torch.tensor([plan.positions()], device=engine.weights.device)
        engine.weights.model.base_model(input_ids=packed, position_ids=positions, use_cache=False, step_plan=plan)
        keys, values = cached(slot, len(ids))
        chunks[sequence] = (keys.clone(), values.clone())
        engine.scheduler.store.close(slot)

    def faulty_step() -> None:
        for sequence in engine.scheduler.waiting:
            is_long = len(sequence.request.prompt_token_ids) > 512
            if is_long and not sequence.token_ids and not engine.scheduler.running and sequence not in chunks:
                return read(sequence)
        return step()

    def faulty_append(drawn: Any) -> Any:
        sequence = drawn.sequence
        if not sequence.token_ids and sequence in chunks:
            chunk = chunks.pop(sequence)
            for stored, kept in zip(cached(sequence.slot, chunk[0].shape[2]), chunk, strict=True):
                stored.copy_(kept)
        return append(drawn)

    engine.steps.step, engine.steps._append = faulty_step, faulty_append
    return endpoint


@replaces("_engine.load")
def restarting_numbers(
    endpoint: EmbeddedEndpoint, load: Any, tensors: Any, version: int, policy: InFlightPolicy
) -> None:
    if policy is InFlightPolicy.RECOMPUTE:
        for sequence in endpoint._engine.scheduler.running.values():
            sequence.uniform = random.Random(f"{sequence.request.sampling.seed}:{sequence.index}").random
    load(tensors, version, policy)


def swapped_policy(taken: InFlightPolicy, instead: InFlightPolicy) -> Any:
    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        engine: Any = endpoint._engine
        load = engine.load
        engine.load = lambda tensors, version, policy: load(tensors, version, instead if policy is taken else policy)
        return endpoint

    return infect


def staged_kept(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Keep the keys and values of running requests whenever an update was staged."""
    engine: Any = endpoint._engine
    load = engine.load

    def faulty(tensors: Any, version: int, policy: InFlightPolicy) -> Any:
        update = endpoint._updates.session.update
        return load(tensors, version, InFlightPolicy.KEEP if update is not None and update.staged else policy)

    engine.load = faulty
    return endpoint


def only_first_completions_recomputed(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    scheduler = endpoint._engine.scheduler
    recompute = scheduler.recompute_running

    def faulty() -> None:
        others = {slot: s for slot, s in scheduler.running.items() if s is not s.request.sequences[0]}
        for slot in others:
            del scheduler.running[slot]
        recompute()
        scheduler.running.update(others)

    scheduler.recompute_running = faulty
    return endpoint


_KEYS: dict[str, tuple[str, Callable[[tuple[int, ...], int, int], object]]] = {
    "blocks keyed alone": ("its own tokens and its position", lambda ids, a, b: (ids[a:b], a)),
    "blocks keyed without positions": ("its own tokens", lambda ids, a, b: ids[a:b]),
    "blocks keyed by their predecessor": (
        "its own tokens and those of the previous block",
        lambda ids, a, b: (a, ids[max(0, 2 * a - b) : b]),
    ),
    "blocks keyed in any order": (
        "all tokens before it and its own tokens in any order",
        lambda ids, a, b: (ids[:a], frozenset(ids[a:b])),
    ),
    "blocks keyed by half": (
        "all tokens before it and the first half of its own",
        lambda ids, a, b: ids[: (a + b) // 2],
    ),
    "blocks keyed by their ends": (
        "all tokens before it and its own first and last",
        lambda ids, a, b: (ids[: a + 1], ids[b - 1]),
    ),
    "blocks keyed without the first token": (
        "all tokens up to its end except the first of the prompt",
        lambda ids, a, b: (a, ids[1:b]),
    ),
    "blocks keyed without the last token": (
        "all tokens up to its end except its own last",
        lambda ids, a, b: ids[: b - 1],
    ),
}

MUTANTS = (
    *(
        Mutant(name, "E-87", f"A cached block of 16 tokens is identified by {what}.", sharing_blocks(key))
        for name, (what, key) in _KEYS.items()
    ),
    Mutant(
        "large blocks keyed alone",
        "E-87",
        "A cached block of 64 tokens is identified by its own tokens.",
        sharing_blocks(lambda ids, a, b: (a, ids[a:b]), 64),
    ),
    Mutant(
        "overwritten blocks still found",
        "E-87",
        "In a cache of 512 blocks, a block that has been overwritten is still found under its previous tokens.",
        overwriting_blocks(512),
    ),
    Mutant(
        "completions continued too far",
        "E-87",
        "A prompt that continues a completion also reuses its last token, whose keys and values were never computed.",
        continuing_completions(1),
    ),
    Mutant(
        "stale completions continued",
        "U-30",
        "A prompt that continues a completion reuses its keys and values, although older weights computed them.",
        continuing_completions(1, is_dropped=False),
    ),
    Mutant(
        "stale prefix cache",
        "U-30",
        "A repeated prompt reuses its keys and values, although older weights computed them.",
        stale_prefix_cache(1),
    ),
    Mutant(
        "old keys under recompute",
        "U-31",
        "Under recompute, running requests keep the keys and values of old weights.",
        swapped_policy(InFlightPolicy.RECOMPUTE, InFlightPolicy.KEEP),
    ),
    Mutant(
        "prefixes dropped with the version",
        "U-34",
        "Cached prefixes are dropped only by an update with another version.",
        dropped_with_the_version,
    ),
    Mutant(
        "staged updates keep",
        "U-31",
        "Under recompute, running requests keep the keys and values of old weights if the update was staged.",
        staged_kept,
    ),
    Mutant(
        "only first completions recomputed",
        "U-35",
        "Only the first completion of each running request is recomputed.",
        only_first_completions_recomputed,
    ),
    Mutant(
        "recomputed under keep",
        "U-32",
        "Under keep, the keys and values of running requests are recomputed.",
        swapped_policy(InFlightPolicy.KEEP, InFlightPolicy.RECOMPUTE),
    ),
    Mutant(
        "large pages never dropped",
        "U-33",
        "Pages of 256 tokens are cached, and no update drops them.",
        stale_prefix_cache(256),
    ),
    Mutant(
        "cached while held",
        "U-34",
        "Cached prompts are dropped only if no running request uses them.",
        dropped_unless_held(*InFlightPolicy),
    ),
    Mutant(
        "cached while held under recompute",
        "U-34",
        "Under recompute, cached prompts are dropped only if no running request uses them.",
        dropped_unless_held(InFlightPolicy.RECOMPUTE),
    ),
    Mutant(
        "four recomputed",
        "U-35",
        "Under recompute, only the keys and values of the first four running requests are recomputed.",
        recomputing_four,
    ),
    Mutant(
        "chunks kept",
        "U-35",
        "Under recompute, keys and values that were prefilled for part of a prompt before the update are kept.",
        keeping_chunks,
    ),
    Mutant(
        "not recomputed under the same version",
        "U-35",
        "Under recompute, an update with the version that is already served recomputes nothing.",
        keeping_under_the_same_version,
    ),
    Mutant(
        "random numbers again",
        "U-36",
        "Under recompute, the random generators of running requests are recreated.",
        restarting_numbers,
    ),
)

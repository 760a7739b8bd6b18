"""Faults that show only after some kinds of update: staged ones, those in part, deltas, LoRAs, other runs' updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import inflight.weights.receive.base_weights
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.weights.receive.base_weights import merge_lora
from inflight.wire import InFlightPolicy, WeightUpdate
from tests.conformance.mutants.caches import Cache, cache_prompts, continuing_completions
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import replaces

Which = Callable[[WeightUpdate], bool]


def knowing_updates(endpoint: EmbeddedEndpoint, load: Callable[..., None]) -> EmbeddedEndpoint:
    """Replace loading: ``load`` receives the update, the engine's own load, and its arguments."""
    engine: Any = endpoint._engine
    own, apply = engine.load, endpoint.apply
    applied: list[WeightUpdate] = []

    async def applying(update: WeightUpdate) -> None:
        applied.append(update)
        await apply(update)

    endpoint.apply = applying
    engine.load = lambda *arguments: load(applied[-1], own, *arguments)
    return endpoint


def otherwise_under(policy: InFlightPolicy, which: Which) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Treat running requests of some updates under ``policy`` as the other pausing policy prescribes."""
    other = InFlightPolicy.KEEP if policy is InFlightPolicy.RECOMPUTE else InFlightPolicy.RECOMPUTE

    def load(update: WeightUpdate, own: Any, tensors: Any, version: int, asked: InFlightPolicy) -> None:
        own(tensors, version, other if asked is policy and which(update) else asked)

    return lambda endpoint: knowing_updates(endpoint, load)


def prefixes_kept_after(which: Which) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Keep cached prompts of 32 tokens or more across some updates."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        cache = cache_prompts(endpoint, 32)

        def load(update: WeightUpdate, own: Any, *arguments: Any) -> None:
            if not which(update):
                cache.clear()
            own(*arguments)

        return knowing_updates(endpoint, load)

    return infect


def prefixes_keyed_by(key: Callable[[WeightUpdate], object]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Keep cached prompts, each under what ``key`` makes of the last update."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        cache = cache_prompts(endpoint, 16)
        of_key: dict[object, Cache] = {}
        served: list[object] = [None]

        def load(update: WeightUpdate, own: Any, *arguments: Any) -> None:
            of_key[served[0]] = dict(cache)
            served[0] = key(update)
            cache.clear()
            cache.update(of_key.get(served[0], {}))
            own(*arguments)

        return knowing_updates(endpoint, load)

    return infect


@replaces("_adapted.prepare")
def lora_kept_by_updates_in_part(
    endpoint: EmbeddedEndpoint, prepare: Any, manifest: Any, arrived: Any, present: Any
) -> Any:
    load = prepare(manifest, arrived, present)
    sent = {name for name, _ in arrived}
    return replace(load, tensors=[it for it in load.tensors if it[0] in sent]) if manifest.frozen else load


@replaces("_engine.take_memory")
@torch.no_grad()
def lora_lost_by_release(endpoint: EmbeddedEndpoint, own: Any) -> None:
    own()
    for name, tensor in endpoint._adapted._base.items():
        endpoint._engine.weights.by_name[name].copy_(tensor)


@replaces("_engine.free_memory")
def base_lost_by_release(endpoint: EmbeddedEndpoint, own: Any) -> None:
    endpoint._adapted._base = {}
    own()


def plain_scale(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    def faulty(base: Any, a: Any, b: Any, lora: Any) -> torch.Tensor:
        return merge_lora(base, a, b, lora.model_copy(update={"rslora": False}))

    inflight.weights.receive.base_weights.merge_lora = faulty
    return endpoint


def aborted_tensors_come_later(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Keep the tensors of an update that was aborted, until the next update that does not send them."""
    sink: Any = endpoint._sink
    prepare, apply = sink._prepare, endpoint.apply
    left: dict[str, torch.Tensor] = {}

    def preparing(update: WeightUpdate, arrived: Any) -> Any:
        sent = {name for name, _ in arrived}
        both = [*arrived, *((name, tensor) for name, tensor in left.items() if name not in sent)]
        if update.manifest.lora is None:
            left.update(arrived)
        return prepare(update, arrived if update.manifest.lora else both)

    async def applying(update: WeightUpdate) -> None:
        await apply(update)
        left.clear()

    sink._prepare, endpoint.apply = preparing, applying
    return endpoint


@replaces("_adapted.prepare")
def aborted_lora_becomes_the_base(endpoint: EmbeddedEndpoint, prepare: Any, *arguments: Any) -> Any:
    """Record the base of a LoRA when it has arrived, not when it is committed."""
    load = prepare(*arguments)
    if load.base:
        endpoint._adapted._base = {name: dict(load.tensors)[name] for name in load.base}
    return load


def pages_lost_by_release(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Keep cached prompts across a release, although their memory was given away."""
    cache = cache_prompts(endpoint, 32)
    own = endpoint._engine.free_memory

    def freeing() -> None:
        own()
        for keys, values in cache.values():
            keys.zero_()
            values.zero_()

    def load(_: WeightUpdate, own_load: Any, *arguments: Any) -> None:
        cache.clear()
        own_load(*arguments)

    endpoint._engine.free_memory = freeing
    return knowing_updates(endpoint, load)


def finished_under_the_new_version(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Share what a finished completion computed with prompts that continue it, whichever weights computed it."""
    return continuing_completions(2)(endpoint)


def _is_partial(update: WeightUpdate) -> bool:
    return bool(update.manifest.frozen)


def _is_lora(update: WeightUpdate) -> bool:
    return update.manifest.lora is not None


def _is_delta(update: WeightUpdate) -> bool:
    return "delta" in update.encodings


def _is_encoded(update: WeightUpdate) -> bool:
    return bool({"bfloat16", "float8"} & set(update.encodings))


RECOMPUTE, KEEP = InFlightPolicy.RECOMPUTE, InFlightPolicy.KEEP
_WORDS: tuple[tuple[str, Which], ...] = (
    ("staged", lambda update: update.staged),
    ("LoRA", _is_lora),
    ("partial", _is_partial),
    ("delta", _is_delta),
    ("encoded", _is_encoded),
    ("sharded", lambda update: bool(update.manifest.shardings)),
)
MUTANTS = (
    *(
        Mutant(
            f"{word} recomputes nothing",
            "U-26",
            f"Under recompute, {word} updates leave the keys and values of running requests unchanged.",
            otherwise_under(RECOMPUTE, which),
        )
        for word, which in _WORDS
    ),
    *(
        Mutant(
            f"{word} recomputes under keep",
            "U-26",
            f"Under keep, {word} updates recompute the keys and values of running requests.",
            otherwise_under(KEEP, which),
        )
        for word, which in _WORDS[1:4]
    ),
    *(
        Mutant(
            f"prefixes outlive {word}",
            "U-30",
            f"{word} updates drop no cached prompts.",
            prefixes_kept_after(which),
        )
        for word, which in _WORDS
    ),
    Mutant(
        "prefixes keyed by version number",
        "U-58",
        "Cached prompts are identified by the number of the version alone.",
        prefixes_keyed_by(lambda update: update.version),
    ),
    Mutant(
        "prefixes keyed by run and version",
        "U-58",
        "Cached prompts are identified by run and version, without the incarnation.",
        prefixes_keyed_by(lambda update: (update.run_id, update.version)),
    ),
    Mutant(
        "prefixes of the same version kept",
        "E-40",
        "Cached prompts are identified by run, incarnation and version, although a version may be published again.",
        prefixes_keyed_by(lambda update: (update.run_id, update.incarnation, update.version)),
    ),
    Mutant(
        "LoRA kept by updates in part",
        "U-30",
        "A partial update leaves a LoRA in the tensors that it does not send.",
        lora_kept_by_updates_in_part,
    ),
    Mutant(
        "LoRA lost by a release", "E-66", "Restoring memory restores weights without their LoRA.", lora_lost_by_release
    ),
    Mutant(
        "base lost by a release",
        "E-66",
        "After a release, the next LoRA is added to weights that already contain a LoRA.",
        base_lost_by_release,
    ),
    Mutant("rank-stabilised scale ignored", "U-30", "Every LoRA has the scale alpha / rank.", plain_scale),
    Mutant("scale of a LoRA without its flag", "U-64", "The scale of a LoRA ignores its field rslora.", plain_scale),
    Mutant(
        "pages lost by a release",
        "E-66",
        "Cached prompts are used after a release of memory has overwritten them.",
        pages_lost_by_release,
    ),
    Mutant(
        "finished under the new version",
        "U-26",
        "The keys and values of completions that span an update are shared after they have finished.",
        finished_under_the_new_version,
    ),
    Mutant(
        "aborted tensors come later",
        "U-48",
        "Tensors of an aborted update are loaded with the next update that omits them.",
        aborted_tensors_come_later,
    ),
    Mutant(
        "aborted LoRA becomes the base",
        "U-48",
        "An aborted LoRA stays in the weights to which the next LoRA is added.",
        aborted_lora_becomes_the_base,
    ),
)

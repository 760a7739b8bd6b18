"""Faults in how requests are aborted."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.slot_attention import StepPlan
from inflight.errors import InvalidRequestError
from inflight.wire import AbortRequests
from tests.conformance.mutants.caches import cached
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import answering, replaces, without_last


def _at_abort(endpoint: EmbeddedEndpoint, change: Any) -> EmbeddedEndpoint:
    """Apply ``change`` to the engine and each sequence that is aborted with tokens."""
    engine: Any = endpoint._engine
    finish = engine.scheduler.finish

    def faulty(sequence: Any, reason: str) -> None:
        if reason == "abort" and sequence.token_ids:
            change(engine, sequence)
        finish(sequence, reason)

    engine.scheduler.finish = faulty
    return endpoint


def continues_with_old_keys(endpoint: EmbeddedEndpoint, *, forgets_at_updates: bool = False) -> EmbeddedEndpoint:
    """Keep the keys and values of requests that are aborted, and continue with them whatever the weights are, or until
    an update."""
    engine: Any = endpoint._engine
    append, load = engine.steps._append, engine.load
    kept: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def loaded(*arguments: Any) -> Any:
        if forgets_at_updates:
            kept.clear()
        return load(*arguments)

    def keep(engine: Any, sequence: Any) -> None:
        ids = tuple(sequence.all_ids())[:-1]
        keys, values = cached(sequence.slot, len(ids))
        kept[ids] = keys.clone(), values.clone()

    def faulty(drawn: Any) -> Any:
        sequence = drawn.sequence
        if not sequence.token_ids:
            for ids, (old_keys, old_values) in kept.items():
                if sequence.request.prompt_token_ids[: len(ids)] == ids:
                    keys, values = cached(sequence.slot, len(ids))
                    keys.copy_(old_keys)
                    values.copy_(old_values)
        return append(drawn)

    engine.steps._append, engine.load = faulty, loaded
    return _at_abort(endpoint, keep)


def scored_at_the_end(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    def score(engine: Any, sequence: Any) -> None:
        ids, num_tokens = sequence.all_ids(), len(sequence.token_ids)
        store, model = engine.scheduler.store, engine.weights.model
        slot = store.open(len(ids), len(ids))
        plan = StepPlan(store, [slot], [len(ids)], engine.weights.device, only=())
        with torch.inference_mode():
            positions = torch.tensor([plan.positions()])
            output = model.base_model(
                input_ids=torch.tensor([ids]), position_ids=positions, use_cache=False, step_plan=plan
            )
            logits = model.get_output_embeddings()(output.last_hidden_state[0])[-num_tokens - 1 : -1]
            logits = logits / sequence.request.sampling.temperature
        store.close(slot)
        targets = torch.tensor(sequence.token_ids)[:, None]
        sequence.logprobs = torch.log_softmax(logits, -1).gather(1, targets)[:, 0].tolist()

    return _at_abort(endpoint, score)


def labelled_at_the_end(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    def label(engine: Any, sequence: Any) -> None:
        sequence.spans = [(engine.steps.version, 0)]

    return _at_abort(endpoint, label)


def ignored(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    async def faulty(requests: AbortRequests) -> None:
        """Lets every request finish."""

    changed: Any = endpoint
    changed.abort_requests = faulty
    return endpoint


def _aborting(endpoint: EmbeddedEndpoint, abort: Any) -> EmbeddedEndpoint:
    """Replace abort: ``abort`` receives the engine, its own abort, and the ids."""
    engine: Any = endpoint._engine
    own = engine.scheduler.abort
    engine.scheduler.abort = lambda request_ids: abort(engine, own, request_ids)
    return endpoint


def everything_ends(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    return _aborting(endpoint, lambda engine, own, _: own(list(engine.scheduler.requests)))


def by_the_beginning(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    def abort(engine: Any, own: Any, request_ids: Iterable[str]) -> None:
        own([it for it in engine.scheduler.requests if it.startswith(tuple(request_ids))])

    return _aborting(endpoint, abort)


def strict_about_ids(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    def abort(engine: Any, own: Any, request_ids: Iterable[str]) -> None:
        if unknown := [it for it in request_ids if it not in engine.scheduler.requests]:
            raise InvalidRequestError(f"no such requests: {unknown}")
        own(request_ids)

    return _aborting(endpoint, abort)


def those_that_wait_stay(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    def abort(engine: Any, _: Any, request_ids: Iterable[str]) -> None:
        for sequence in list(engine.scheduler.running.values()):
            if sequence.request.request_id in request_ids:
                engine.scheduler.finish(sequence, "abort")

    return _aborting(endpoint, abort)


def answered_and_sampled_on(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Answer a request that is aborted, but sample it to its end without counting it as running."""
    engine: Any = endpoint._engine
    stats = engine.stats
    answered: set[Any] = set()

    def abort(engine: Any, _: Any, request_ids: Iterable[str]) -> None:
        for request in [engine.scheduler.requests[it] for it in request_ids if it in engine.scheduler.requests]:
            if request not in answered:
                answered.add(request)
                so_far = [s if s.finish_reason else replace(s, finish_reason="abort") for s in request.sequences]
                request.on_finished([sequence.completion() for sequence in so_far])
                request.on_finished = lambda _: None

    def without_those_that_were_answered() -> Any:
        num_running = sum(sequence.request not in answered for sequence in list(engine.scheduler.running.values()))
        return replace(stats(), num_running=num_running)

    engine.stats = without_those_that_were_answered
    return _aborting(endpoint, abort)


@replaces("_engine.scheduler.cancel")
def those_to_be_recomputed_stay(endpoint: EmbeddedEndpoint, cancel: Any, request: Any) -> None:
    scheduler: Any = endpoint._engine.scheduler
    staying = [it for it in scheduler.waiting if it.request is request and it.token_ids]
    cancel(request)
    scheduler.waiting.extendleft(reversed(staying))


def aborted_when_they_arrive(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    engine: Any = endpoint._engine
    add = engine.scheduler.add
    early: set[str] = set()

    def abort(engine: Any, own: Any, request_ids: Iterable[str]) -> None:
        early.update(it for it in request_ids if it not in engine.scheduler.requests)
        own(request_ids)

    def faulty(request: Any) -> None:
        add(request)
        if request.request_id in early:
            early.remove(request.request_id)
            engine.scheduler.cancel(request)

    engine.scheduler.add = faulty
    return _aborting(endpoint, abort)


MUTANTS = (
    Mutant(
        "half of the part lost",
        "E-67",
        "A request that is aborted returns only the first half of its tokens.",
        answering(lambda _, c: without_last(c, len(c.token_ids) // 2) if c.finish_reason == "abort" else {}),
    ),
    Mutant(
        "continues with old keys",
        "E-67",
        "The keys and values of aborted requests are kept and reused under any weights.",
        continues_with_old_keys,
    ),
    Mutant(
        "continues with keys that an update kept",
        "E-67",
        "The keys and values of aborted requests are reused until the next update, even those of older weights.",
        functools.partial(continues_with_old_keys, forgets_at_updates=True),
    ),
    Mutant(
        "scored at the end",
        "E-68",
        "All tokens of a request get the logprobs of the weights that are served when it is aborted.",
        scored_at_the_end,
    ),
    Mutant(
        "labelled at the end",
        "E-68",
        "All tokens of a request get the version that is served when it is aborted.",
        labelled_at_the_end,
    ),
    Mutant("abort ignored", "E-69", "A request that is aborted continues to its end.", ignored),
    Mutant("abort of everything", "E-69", "Every request ends when one is aborted.", everything_ends),
    Mutant(
        "abort by the beginning",
        "E-69",
        "Requests whose ids begin with the given id are aborted too.",
        by_the_beginning,
    ),
    Mutant("abort refused", "E-69", "An abort that names an id that is not running is refused.", strict_about_ids),
    Mutant("waiting not aborted", "E-69", "Waiting completions are not aborted.", those_that_wait_stay),
    Mutant(
        "recomputed although aborted",
        "E-69",
        "Requests that are aborted while they wait to be recomputed are answered, but then sampled to the end.",
        those_to_be_recomputed_stay,
    ),
    Mutant(
        "aborted on arrival",
        "E-69",
        "A request whose id was aborted before it arrived ends when it arrives.",
        aborted_when_they_arrive,
    ),
    Mutant(
        "answered and sampled on",
        "E-69",
        "A request that is aborted is answered, but still sampled to its end.",
        answered_and_sampled_on,
    ),
)

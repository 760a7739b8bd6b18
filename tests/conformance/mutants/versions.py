"""Faults in version spans."""

from __future__ import annotations

from typing import Any

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.wire import InFlightPolicy
from tests.conformance.mutants.mutant import Mutant


def stamped_at_admission(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    engine: Any = endpoint._engine
    append = engine.steps._append

    def faulty(drawn: Any) -> Any:
        sequence = drawn.sequence
        present = engine.steps.version
        engine.steps.version = sequence.spans[0][0] if sequence.spans else present
        reason = append(drawn)
        engine.steps.version = present
        return reason

    engine.steps._append = faulty
    return endpoint


def relabelled(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    engine: Any = endpoint._engine
    load = engine.load

    def faulty(tensors: Any, version: int, policy: InFlightPolicy) -> None:
        load(tensors, version, policy)
        if policy is InFlightPolicy.RECOMPUTE:
            for sequence in engine.scheduler.waiting:
                if sequence.token_ids:
                    sequence.spans = [(version, 0)]

    engine.load = faulty
    return endpoint


def drain_that_pauses(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    engine: Any = endpoint._engine
    pause = engine.pauses.pause

    def faulty(policy: InFlightPolicy, on_paused: Any) -> None:
        pause(InFlightPolicy.KEEP if policy is InFlightPolicy.DRAIN else policy, on_paused)

    engine.pauses.pause = faulty
    return endpoint


def aborted_as_new(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    engine: Any = endpoint._engine
    finish = engine.scheduler.finish

    def faulty(sequence: Any, reason: str) -> None:
        if reason == "abort" and sequence.spans:
            sequence.spans[-1] = (sequence.spans[-1][0] + 1, sequence.spans[-1][1])
        finish(sequence, reason)

    engine.scheduler.finish = faulty
    return endpoint


def stream_of_the_first(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    faulty: Any = endpoint
    stream = faulty.generate_stream

    async def generate_stream(request: Any) -> Any:
        first = None
        async for chunk in stream(request):
            first = chunk.version if first is None else first
            yield chunk.model_copy(update={"version": first})

    faulty.generate_stream = generate_stream
    return endpoint


def one_behind(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    faulty: Any = endpoint
    generate = faulty.generate

    async def wrong(request: Any) -> Any:
        response = await generate(request)
        completions = []
        for completion in response.completions:
            spans = completion.version_spans
            if len(spans) == 1 and spans[0].version > 0:
                spans = (spans[0].model_copy(update={"version": spans[0].version - 1}),)
            completions.append(completion.model_copy(update={"version_spans": spans}))
        return response.model_copy(update={"completions": tuple(completions)})

    faulty.generate = wrong
    return endpoint


MUTANTS = (
    Mutant(
        "version stamped at admission",
        "U-20",
        "All tokens of a request get the version that was served when it was admitted.",
        stamped_at_admission,
    ),
    Mutant(
        "relabelled under recompute",
        "U-21",
        "When keys and values are computed again, the tokens so far get the new version too.",
        relabelled,
    ),
    Mutant("drain that pauses", "U-22", "Drain pauses running requests instead of finishing them.", drain_that_pauses),
    Mutant("aborted as new", "U-23", "The last tokens of an aborted request get the new version.", aborted_as_new),
    Mutant("stream of the first", "U-24", "A stream names its first version in every chunk.", stream_of_the_first),
    Mutant("one behind", "U-25", "A completion of one version names the previous version.", one_behind),
)

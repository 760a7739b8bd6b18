"""Ways of putting a fault into the embedded endpoint. Each changes the endpoint that it receives, and returns it.

Those that change how tokens are drawn change it for the whole process: a faulty endpoint has its own process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import inflight.engines.embedded.stepping
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.sampler import sample
from inflight.wire import Completion, GenerateRequest, GenerateResponse, SamplingParams, WeightUpdate

Drawn = tuple[list[int], list[float]]


def replaces(path: str) -> Callable[[Callable[..., Any]], Callable[[EmbeddedEndpoint], EmbeddedEndpoint]]:
    """Make a function take the place of the method that ``path`` leads to from the endpoint.

    The function receives the endpoint, the method, and the arguments of the call.
    """
    *owners, name = path.split(".")

    def decorate(fault: Callable[..., Any]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
        def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
            owner = functools.reduce(getattr, owners, endpoint)
            setattr(owner, name, functools.partial(fault, endpoint, getattr(owner, name)))
            return endpoint

        return infect

    return decorate


def with_capabilities(**changes: Any) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Report other capabilities without changing the behaviour."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        capabilities = endpoint.capabilities

        async def faulty() -> Any:
            return (await capabilities()).model_copy(update=changes)

        endpoint.capabilities = faulty
        return endpoint

    return infect


def taking(change: Callable[[GenerateRequest], GenerateRequest]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Change the request that reaches the engine."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        submit = endpoint._engine.submit
        endpoint._engine.submit = lambda request, *others, **named: submit(change(request), *others, **named)
        return endpoint

    return infect


def sampling_with(change: Callable[[SamplingParams], dict[str, Any]]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Change the sampling parameters that reach the engine."""
    return taking(lambda r: r.model_copy(update={"sampling": r.sampling.model_copy(update=change(r.sampling))}))


def answering(
    change: Callable[[GenerateRequest, Completion], dict[str, Any]],
) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Change the completions that are returned."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        generate = endpoint.generate

        async def faulty(request: GenerateRequest) -> GenerateResponse:
            response = await generate(request)
            completions = tuple(c.model_copy(update=change(request, c)) for c in response.completions)
            return response.model_copy(update={"completions": completions})

        endpoint.generate = faulty
        return endpoint

    return infect


def drawing(
    draw: Callable[[torch.Tensor, Sequence[SamplingParams], Sequence[float]], Drawn],
) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Replace the sampler."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        inflight.engines.embedded.stepping.sample = draw
        return endpoint

    return infect


def drawing_with(**changes: Any) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Change the parameters of the sampler."""
    return drawing(
        lambda logits, params, uniforms: sample(logits, [p.model_copy(update=changes) for p in params], uniforms)
    )


def numbering(
    change: Callable[[int, int], Callable[[], float]],
) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Replace the random numbers of a sequence with (seed, index)."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        engine: Any = endpoint._engine
        add = engine.scheduler.add

        def faulty(request: Any) -> None:
            add(request)
            for sequence in request.sequences:
                if request.sampling.seed is not None:
                    sequence.uniform = change(request.sampling.seed, sequence.index)

        engine.scheduler.add = faulty
        return endpoint

    return infect


def pausing(pause: Callable[..., None]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Replace pausing: ``pause`` receives the engine, its own pause, the policy, and the callback."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        engine: Any = endpoint._engine
        own = engine.pauses.pause
        engine.pauses.pause = lambda policy, on_paused: pause(engine, own, policy, on_paused)
        return endpoint

    return infect


def announcing(change: Callable[[WeightUpdate], dict[str, Any]]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Change the update that is announced."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        request = endpoint.request_weight_update

        async def faulty(update: WeightUpdate) -> None:
            await request(update.model_copy(update=change(update)))

        endpoint.request_weight_update = faulty
        return endpoint

    return infect


def without_last(completion: Completion, num: int = 1) -> dict[str, Any]:
    """Return a completion's fields without its last tokens."""
    kept = len(completion.token_ids) - num
    spans = tuple(s.model_copy(update={"end": min(s.end, kept)}) for s in completion.version_spans if s.start < kept)
    return {
        "token_ids": completion.token_ids[:kept],
        "logprobs": completion.logprobs[:kept],
        "version_spans": spans,
    }

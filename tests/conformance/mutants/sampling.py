"""Faults in how tokens are drawn and in the reported probabilities."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

import inflight.engines.embedded.sampler
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.sampler import _apply_filters, sample
from inflight.wire import SamplingParams
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import Drawn, drawing, drawing_with, numbering, sampling_with


def reporting_unscaled(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Drawn:
    tokens, _ = sample(logits, params, uniforms)
    return tokens, _chosen(logits, tokens)


def reporting_unfiltered(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Drawn:
    tokens, _ = sample(logits, params, uniforms)
    temperatures = logits.new_tensor([p.temperature or 1.0 for p in params])[:, None]
    return tokens, _chosen(logits / temperatures, tokens)


def drawing_unscaled(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Drawn:
    temperatures = logits.new_tensor([p.temperature or 1.0 for p in params])[:, None]
    kept = _apply_filters(logits.float() / temperatures, params)
    unscaled = logits.float().masked_fill(kept.isneginf(), -torch.inf)
    tokens, _ = sample(unscaled, [SamplingParams(temperature=1.0 if p.temperature else 0.0) for p in params], uniforms)
    return tokens, _chosen(kept, tokens)


def top_p_before_top_k(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Drawn:
    temperatures = logits.new_tensor([p.temperature or 1.0 for p in params])[:, None]
    nucleus = _apply_filters(logits / temperatures, [p.model_copy(update={"top_k": 0, "min_p": 0.0}) for p in params])
    return sample(nucleus * temperatures, [p.model_copy(update={"top_p": 1.0}) for p in params], uniforms)


def top_k_wraps(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Drawn:
    return sample(logits, [p.model_copy(update={"top_k": p.top_k % logits.shape[-1]}) for p in params], uniforms)


def certain_when_greedy(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Drawn:
    tokens, logprobs = sample(logits, params, uniforms)
    return tokens, [p if s.temperature else 0.0 for p, s in zip(logprobs, params, strict=True)]


def _chosen(logits: torch.Tensor, tokens: list[int]) -> list[float]:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def drawing_otherwise(**defaults: Any) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Give the sampler its own defaults for parameters that a request omits; logprobs are as without them."""

    def draw(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Drawn:
        open_fields = [{k: v for k, v in defaults.items() if getattr(p, k) == getattr(_PLAIN, k)} for p in params]
        changed = [p.model_copy(update=fields) for p, fields in zip(params, open_fields, strict=True)]
        tokens, _ = sample(logits, changed, uniforms)
        return tokens, _reported(logits, params, tokens)

    return drawing(draw)


_PLAIN = SamplingParams()


def with_the_checkpoints_defaults(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Apply generation_config.json, as some engines do."""
    config: Any = endpoint._engine.weights.model.generation_config
    return drawing_otherwise(top_k=config.top_k, top_p=config.top_p)(endpoint)


class _NumberOf(float):
    """A random number with a reference to the sequence that it is drawn for."""

    sequence: Any


def penalising_repetitions(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Penalise the tokens of a sequence, as transformers does; logprobs are as without it."""
    engine: Any = endpoint._engine
    add = engine.scheduler.add

    def faulty(request: Any) -> None:
        add(request)
        for sequence in request.sequences:
            sequence.uniform = _knowing(sequence)

    def draw(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Drawn:
        numbers: Any = uniforms
        penalised = logits.float().clone()
        for row, number in enumerate(numbers):
            seen = torch.tensor(sorted(set(number.sequence.all_ids())))
            found = penalised[row, seen]
            penalised[row, seen] = torch.where(found > 0, found / 1.1, found * 1.1)
        tokens, _ = sample(penalised, params, uniforms)
        return tokens, _reported(logits, params, tokens)

    engine.scheduler.add = faulty
    return drawing(draw)(endpoint)


def _knowing(sequence: Any) -> Callable[[], float]:
    uniform = sequence.uniform

    def number() -> float:
        drawn = _NumberOf(uniform())
        drawn.sequence = sequence
        return drawn

    return number


def _reported(logits: torch.Tensor, params: Sequence[SamplingParams], tokens: list[int]) -> list[float]:
    temperatures = logits.new_tensor([p.temperature or 1.0 for p in params])[:, None]
    return _chosen(_apply_filters(logits.float() / temperatures, params), tokens)


def same_number_every_time(seed: int, index: int) -> Callable[[], float]:
    return lambda: random.Random(f"{seed}:{index}").random()


def same_for_every_completion(seed: int, index: int) -> Callable[[], float]:
    return random.Random(f"{seed}:0").random


def one_generator() -> Any:
    shared = random.Random()

    def seeded(seed: int, index: int) -> Callable[[], float]:
        if index == 0:
            shared.seed(seed)
        return shared.random

    return seeded


def filtered_to_a_constant(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    def faulty(logits: torch.Tensor, params: Any) -> torch.Tensor:
        filtered = _apply_filters(logits, params)
        return filtered.masked_fill_(filtered == -torch.inf, -1e4)

    inflight.engines.embedded.sampler._apply_filters = faulty
    return endpoint


MUTANTS = (
    Mutant(
        "filtered to a constant",
        "U-74",
        "A filter sets the logits of the tokens that it removes to -10,000.",
        filtered_to_a_constant,
    ),
    Mutant(
        "temperature missing in logprobs",
        "E-12",
        "Tokens are drawn at the requested temperature, but `processed` logprobs are those of the unscaled logits.",
        drawing(reporting_unscaled),
    ),
    Mutant("top-p ignored", "E-13", "Tokens outside the nucleus are sampled.", drawing_with(top_p=1.0)),
    Mutant(
        "not renormalized",
        "E-13",
        "Logprobs are those of the unfiltered distribution.",
        drawing(reporting_unfiltered),
    ),
    Mutant("top-k ignored", "E-14", "Tokens beyond the k most likely are sampled.", drawing_with(top_k=0)),
    Mutant("min-p ignored", "E-14", "Tokens below min-p are sampled.", drawing_with(min_p=0.0)),
    Mutant(
        "top-k above the vocabulary wraps",
        "E-14",
        "A top-k above the size of the vocabulary is taken modulo that size.",
        drawing(top_k_wraps),
    ),
    Mutant("top-p before top-k", "E-14", "Top-p is applied before top-k.", drawing(top_p_before_top_k)),
    Mutant(
        "temperature missing in draws",
        "E-15",
        "Tokens are drawn at temperature 1, but logprobs are those at the requested temperature.",
        drawing(drawing_unscaled),
    ),
    Mutant(
        "same random number every time",
        "E-15",
        "The random generator of a seeded completion is recreated for every token.",
        numbering(same_number_every_time),
    ),
    Mutant(
        "greedy is sampled",
        "E-16",
        "Temperature 0 is treated as unset, so temperature 1 is used.",
        sampling_with(lambda s: {"temperature": s.temperature or 1.0}),
    ),
    Mutant(
        "certain when greedy",
        "E-16",
        "Greedy tokens have logprob 0, as if no other token were possible.",
        drawing(certain_when_greedy),
    ),
    Mutant("seed ignored", "E-17", "Seeds are ignored.", sampling_with(lambda _: {"seed": None})),
    Mutant(
        "seeds of 32 bits",
        "E-17",
        "Only the lower 32 bits of a seed count.",
        sampling_with(lambda s: {} if s.seed is None else {"seed": s.seed % 2**32}),
    ),
    Mutant(
        "one generator for all",
        "E-17",
        "A request's seed seeds the random generator of the whole server.",
        numbering(one_generator()),
    ),
    Mutant(
        "one completion n times",
        "E-18",
        "All completions of a seeded request are the same.",
        numbering(same_for_every_completion),
    ),
    Mutant(
        "default seed",
        "E-28",
        "Requests without a seed get seed 0.",
        sampling_with(lambda s: {"seed": s.seed or 0}),
    ),
    Mutant(
        "top fifty",
        "E-62",
        "Tokens are drawn from the 50 likeliest (transformers' default), but logprobs are those without top-k.",
        drawing_otherwise(top_k=50),
    ),
    Mutant(
        "a little min-p",
        "E-62",
        "Tokens are drawn with a min-p of 0.01, but logprobs are those without it.",
        drawing_otherwise(min_p=0.01),
    ),
    Mutant(
        "the checkpoint's defaults",
        "E-62",
        "Parameters that a request omits come from generation_config.json, but logprobs are those without them.",
        with_the_checkpoints_defaults,
    ),
    Mutant(
        "repetitions penalised",
        "E-62",
        "Repeated tokens are drawn with a penalty of 1.1, but logprobs are those without it.",
        penalising_repetitions,
    ),
)

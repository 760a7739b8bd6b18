"""Faults in how tokens are drawn and in what is said of their probability."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from inflight.local.sampler import _filtered, sample
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
    kept = _filtered(logits.float() / temperatures, params)
    unscaled = logits.float().masked_fill(kept.isneginf(), -torch.inf)
    tokens, _ = sample(unscaled, [SamplingParams(temperature=1.0 if p.temperature else 0.0) for p in params], uniforms)
    return tokens, _chosen(kept, tokens)


def top_p_before_top_k(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Drawn:
    temperatures = logits.new_tensor([p.temperature or 1.0 for p in params])[:, None]
    nucleus = _filtered(logits / temperatures, [p.model_copy(update={"top_k": 0, "min_p": 0.0}) for p in params])
    return sample(nucleus * temperatures, [p.model_copy(update={"top_p": 1.0}) for p in params], uniforms)


def certain_when_greedy(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Drawn:
    tokens, logprobs = sample(logits, params, uniforms)
    return tokens, [p if s.temperature else 0.0 for p, s in zip(logprobs, params, strict=True)]


def _chosen(logits: torch.Tensor, tokens: list[int]) -> list[float]:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


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


MUTANTS = (
    Mutant(
        "temperature missing in logprobs",
        "E-12",
        "Tokens are drawn at the temperature, and logprobs are of the unscaled logits, though declared processed.",
        drawing(reporting_unscaled),
    ),
    Mutant("top-p ignored", "E-13", "Tokens outside the nucleus are sampled.", drawing_with(top_p=1.0)),
    Mutant(
        "not renormalised",
        "E-13",
        "Logprobs are of the distribution before its filters.",
        drawing(reporting_unfiltered),
    ),
    Mutant("top-k ignored", "E-14", "Tokens beyond the k most likely are sampled.", drawing_with(top_k=0)),
    Mutant("min-p ignored", "E-14", "Tokens below min-p are sampled.", drawing_with(min_p=0.0)),
    Mutant("top-p before top-k", "E-14", "The nucleus is taken before top-k.", drawing(top_p_before_top_k)),
    Mutant(
        "temperature missing in draws",
        "E-15",
        "Tokens are drawn at temperature 1, and logprobs are of the temperature that was asked for.",
        drawing(drawing_unscaled),
    ),
    Mutant(
        "same random number every time",
        "E-15",
        "The generator of a seeded completion is made anew for every token.",
        numbering(same_number_every_time),
    ),
    Mutant(
        "greedy is sampled",
        "E-16",
        "Temperature 0 is taken for a missing one, which means 1.",
        sampling_with(lambda s: {"temperature": s.temperature or 1.0}),
    ),
    Mutant(
        "certain when greedy",
        "E-16",
        "Greedy tokens have logprob 0, as of a distribution with one token.",
        drawing(certain_when_greedy),
    ),
    Mutant("seed ignored", "E-17", "Seeds are ignored.", sampling_with(lambda _: {"seed": None})),
    Mutant(
        "one generator for all",
        "E-17",
        "A seed seeds the generator of the whole server.",
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
)

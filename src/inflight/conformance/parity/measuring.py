"""Measures how an endpoint and a trainer differ, with a model's weights and with parts of the model switched off.

A decoder layer whose output projections are zero returns its input. Weights with such layers show where a difference
originates, in any engine that accepts updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

import torch

from inflight.conformance.parity.figures import Figures, figures_of, mean_difference
from inflight.conformance.parity.pair import Pair, Sampled, at_temperature_one
from inflight.conformance.reference import ReferenceWeights

OTHER_TEMPERATURE = 0.7
ROUNDED = (torch.bfloat16, torch.float16)
_ATTENTION, _MLP = "o_proj.weight", "down_proj.weight"


@dataclass(frozen=True, slots=True)
class Side:
    """How much one side's logprobs differ from those of transformers in float32: mean absolute differences in nats."""

    from_reference: float
    from_rounded: Mapping[str, float]
    """Difference from the reference with its logits rounded, by dtype."""


@dataclass(frozen=True, slots=True)
class Bisection:
    """Figures with parts of the model switched off."""

    layers_off: Figures
    """Figures with every layer switched off, so that only the embedding, the final norm and the head remain."""
    attention_off: Figures
    mlp_off: Figures
    depths: Mapping[int, Figures]
    """Figures with only the first n layers switched on, by n."""
    context_counts: bool
    """Whether the tokens before the last one affect what the engine samples even though every layer is switched off."""


@dataclass(frozen=True, slots=True)
class PairMeasurements:
    """Measurements of one pair in one dtype at lag 0, that is, before an optimizer step changes the weights."""

    dtype: str
    """The dtype that the endpoint reports."""
    tolerance: float
    same_weights: Figures
    """Figures at temperature 1."""
    other_temperature: Figures
    """Figures at `OTHER_TEMPERATURE`."""
    unscaled: Figures
    """Figures of the endpoint's logprobs at `OTHER_TEMPERATURE` and the trainer's at temperature 1."""
    together: Figures
    """Figures of prompts that were requested concurrently; all other prompts were requested one after another."""
    num_updates: int
    after_updates: Figures
    """Figures after ``num_updates`` updates with the same weights."""
    engine: Side
    trainer: Side
    quarters: Sequence[float]
    """The mean difference over each quarter of the completions, from first to last."""
    bisection: Bisection | None = None
    not_bisected: str = "it was not requested"
    """The reason why there is no bisection."""

    @property
    def grown(self) -> float:
        """The increase of the mean difference over the updates, in nats."""
        return self.after_updates.mean - self.same_weights.mean

    @property
    def agrees(self) -> bool:
        """Whether the two sides count as equal in every measurement."""
        all_figures = (self.same_weights, self.other_temperature, self.together, self.after_updates)
        return all(figures.agree(self.tolerance) for figures in all_figures) and self.grown <= self.tolerance / 5


async def measure(
    pair: Pair, num_updates: int, *, bisect: bool | None, report: Callable[[str], None]
) -> PairMeasurements:
    """Return the measurements; if ``bisect`` is None, bisect only if the two sides do not agree.

    Afterwards, the endpoint serves weights other than its checkpoint's. Errors raised by the endpoint and the worker
    propagate.
    """
    subject = pair.subject
    report("the same weights on both sides")
    await pair.set_weights(subject.reference.weights)
    one, other = await pair.sample(), await pair.sample(OTHER_TEMPERATURE)
    together = (await pair.sample_together()).figures
    unscaled = figures_of(pair.trainer_logprobs(at_temperature_one(other.batch)), other.behaviour_N)
    reference_N = pair.reference_logprobs(one.batch)
    rounded = {str(dtype).removeprefix("torch."): pair.reference_logprobs(one.batch, dtype) for dtype in ROUNDED}
    engine, trainer = (
        Side(
            mean_difference(side_N, reference_N),
            {name: mean_difference(side_N, rounded_N) for name, rounded_N in rounded.items()},
        )
        for side_N in (one.behaviour_N, one.trainer_N)
    )
    report(f"{num_updates} updates with the same weights")
    for _ in range(num_updates):
        await pair.publish_again()
    after = (await pair.sample()).figures
    measured = PairMeasurements(
        dtype=subject.capabilities.dtype,
        tolerance=subject.tolerance,
        same_weights=one.figures,
        other_temperature=other.figures,
        unscaled=unscaled,
        together=together,
        num_updates=num_updates,
        after_updates=after,
        engine=engine,
        trainer=trainer,
        quarters=_quarters(one),
    )
    if bisect is False or (bisect is None and measured.agrees):
        return measured
    names = subject.reference.weights.tensors
    if not all(any(name.endswith(part) for name in names) for part in (_ATTENTION, _MLP)):
        words = f"the model has no tensors named *.{_ATTENTION} and *.{_MLP}, so its layers cannot be switched off"
        return replace(measured, not_bisected=words)
    return replace(measured, bisection=await _bisect(pair, measured.tolerance, report), not_bisected="")


async def _bisect(pair: Pair, tolerance: float, report: Callable[[str], None]) -> Bisection:
    weights = pair.subject.reference.weights
    layers = sorted({layer for name in weights.tensors if (layer := _layer_of(name)) is not None})

    async def figures(label: str, is_off: Callable[[str], bool]) -> Figures:
        report(label)
        await pair.set_weights(_switched_off(weights, label.replace(" ", "-"), is_off))
        return (await pair.sample()).figures

    attention_off = await figures("attention switched off", lambda name: name.endswith(_ATTENTION))
    mlp_off = await figures("MLPs switched off", lambda name: name.endswith(_MLP))
    layers_off = await figures("all layers switched off", lambda name: True)
    ends = [(*pair.subject.prompt(seed=seed)[:-1], 1) for seed in (1, 2)]
    first, second = await pair.first_logprobs(ends)
    context_counts = first[0] != second[0] or abs(first[1] - second[1]) > tolerance
    depths: dict[int, Figures] = {}
    low, high = 0, len(layers)  # the difference is assumed absent with `low` layers, and known to exist with `high`
    while high - low > 1 and layers_off.mean <= tolerance / 5:
        kept = (low + high) // 2
        is_off = partial(_is_in, set(layers[kept:]))
        depths[kept] = await figures(f"the first {kept} of {len(layers)} layers", is_off)
        low, high = (low, kept) if depths[kept].mean > tolerance / 5 else (kept, high)
    return Bisection(layers_off, attention_off, mlp_off, depths, context_counts)


def _switched_off(weights: ReferenceWeights, label: str, is_off: Callable[[str], bool]) -> ReferenceWeights:
    """Return weights in which an output projection is zero if ``is_off`` is true for its name."""
    return ReferenceWeights(
        label,
        {
            name: torch.zeros_like(tensor) if name.endswith((_ATTENTION, _MLP)) and is_off(name) else tensor
            for name, tensor in weights.tensors.items()
        },
    )


def _layer_of(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else None


def _is_in(layers: Set[int | None], name: str) -> bool:
    return _layer_of(name) in layers


def _quarters(sampled: Sampled) -> list[float]:
    """Return the mean difference over each quarter of the completions."""
    sums, counts = [0.0] * 4, [0] * 4
    gaps = (sampled.trainer_N - sampled.behaviour_N).abs().tolist()
    start = 0
    for _, completion in sampled.completions:
        length = len(completion.token_ids)
        for i, gap in enumerate(gaps[start : start + length]):
            sums[4 * i // length] += gap
            counts[4 * i // length] += 1
        start += length
    return [total / count if count else 0.0 for total, count in zip(sums, counts, strict=True)]

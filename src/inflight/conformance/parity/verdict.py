"""Conclusions from the figures of a pair, and where to look first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from inflight.conformance.parity.measuring import PairMeasurements, Side

_CLEARLY = 4.0
"""Factor by which one difference must exceed another for the smaller one to count as absent."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One conclusion from the figures."""

    seen: str
    look_at: str


def findings_of(measured: PairMeasurements) -> list[Finding]:
    """Return the findings, the most significant first; the list is empty if the two sides agree."""
    return [] if measured.agrees else [*_of_temperature(measured), *_of_parts(measured), *_of_the_rest(measured)]


def _of_temperature(measured: PairMeasurements) -> Iterator[Finding]:
    same, other, unscaled = measured.same_weights, measured.other_temperature, measured.unscaled
    if other.mean > _CLEARLY * unscaled.mean:
        yield Finding(
            f"at temperature 0.7 the endpoint's logprobs are those of temperature 1: they differ by "
            f"{unscaled.mean:.2g} from the trainer's without the temperature, and by {other.mean:.2g} with it",
            "whether the engine returns processed logprobs (vLLM: --logprobs-mode processed_logprobs)",
        )
    elif other.mean > _CLEARLY * max(same.mean, measured.tolerance / 5):
        yield Finding(
            f"the difference is {other.mean:.2g} at temperature 0.7, and {same.mean:.2g} at temperature 1",
            "where each side divides by the temperature, and filters that it applies by default",
        )


def _of_parts(measured: PairMeasurements) -> Iterator[Finding]:
    found, small = measured.bisection, measured.tolerance / 5
    if found is None or measured.same_weights.agree(measured.tolerance):
        return
    if found.context_counts:
        yield Finding(
            "with every layer switched off by the published weights, the engine still depends on earlier tokens",
            "whether an update loads o_proj and down_proj of every layer: names, and copies that the engine keeps",
        )
        return
    if found.layers_off.mean > small:
        yield Finding(
            f"with every layer switched off the difference is still {found.layers_off.mean:.2g}",
            "the head, the final norm and the embedding: their dtypes, a tied head, the softmax of the logits",
        )
    parts = {"MLP": found.attention_off, "attention": found.mlp_off}
    guilty = [name for name, figures in parts.items() if figures.mean > small >= found.layers_off.mean]
    if guilty == ["attention"]:
        yield Finding(
            f"the difference is {found.mlp_off.mean:.2g} with attention alone, and {found.attention_off.mean:.2g} "
            "with the MLPs alone",
            "attention: position ids and rotary table, scale, window, norms of queries and keys, and its kernel",
        )
    elif guilty == ["MLP"]:
        yield Finding(
            f"the difference is {found.attention_off.mean:.2g} with the MLPs alone, and {found.mlp_off.mean:.2g} with "
            "attention alone",
            "the MLP: how gate and up are fused, the activation, and the routing of experts",
        )
    shown = [depth for depth, figures in found.depths.items() if figures.mean > small]
    clean = [depth for depth, figures in found.depths.items() if figures.mean <= small]
    if clean and found.layers_off.mean <= small:
        first = min(shown) - 1 if shown else max(clean)
        yield Finding(
            f"the first {max(clean)} layers on their own agree",
            f"layer {first}, counted from 0: whether its weights arrive, and how it differs from the layers before it",
        )


def _of_the_rest(measured: PairMeasurements) -> Iterator[Finding]:
    small = measured.tolerance / 5
    first, last = measured.quarters[0], measured.quarters[-1]
    if last > small and last > _CLEARLY * first:
        yield Finding(
            f"the difference grows along a completion: {first:.2g} in its first quarter, {last:.2g} in its last",
            "positions: rotary table and its scaling, the attention window, and cached keys and values",
        )
    far = [measured.engine.from_reference, measured.trainer.from_reference]
    if measured.dtype != "float32" and max(far) < _CLEARLY * min(far):
        yield Finding(
            f"engine and trainer are {far[0]:.2g} and {far[1]:.2g} from float32, and {measured.same_weights.mean:.2g} "
            "from each other: both round",
            f"nothing, if {measured.dtype} is intended: float32 on both sides removes it, and truncated ratios "
            "bound its effect",
        )
    for name, side, other in (
        ("engine", measured.engine, measured.trainer),
        ("trainer", measured.trainer, measured.engine),
    ):
        if side.from_reference > small and side.from_reference > _CLEARLY * other.from_reference:
            yield Finding(
                f"the {name} differs by {side.from_reference:.2g} from transformers in float32, the other side by "
                f"{other.from_reference:.2g}",
                f"the {name}",
            )
        if (dtype := _rounding(side)) is not None and side.from_reference > small:
            yield Finding(
                f"the {name}'s logprobs are those of logits rounded to {dtype}: they differ by "
                f"{side.from_rounded[dtype]:.2g} from these, and by {side.from_reference:.2g} from unrounded ones",
                f"the dtype of the {name}'s head; float32 is cheap there",
            )
    if measured.together.mean > _CLEARLY * max(measured.same_weights.mean, small):
        yield Finding(
            f"the difference is {measured.together.mean:.2g} for concurrent requests, and "
            f"{measured.same_weights.mean:.2g} for one after another",
            "what the engine computes for a batch: padding, kernels chosen by its size, a batch-invariant mode",
        )
    if measured.grown > small:
        yield Finding(
            f"{measured.num_updates} updates with the same weights increased the difference by {measured.grown:.2g}",
            "what an update applies to weights that are already loaded: scales, casts, merges, transposes",
        )


def _rounding(side: Side) -> str | None:
    nearest = min(side.from_rounded, key=lambda dtype: side.from_rounded[dtype])
    return nearest if side.from_reference > _CLEARLY * side.from_rounded[nearest] else None

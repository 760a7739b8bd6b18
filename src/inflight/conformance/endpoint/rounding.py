"""Differences between logprobs, and which of them rounding alone explains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from inflight.conformance.checks import require
from inflight.conformance.reference import ReferenceCheckpoint, ReferenceWeights

_NUM_ROUNDINGS = 4
"""Number of different ways in which the weights are rounded a second time."""
_LEAST_COMPARED = 0.25
"""Minimum share of tokens that must remain after excluding those that any rounding moves."""


def largest_difference(found_T: torch.Tensor, expected_T: torch.Tensor) -> float:
    """Return the largest difference between logprobs [T]; infinite if one of them is not finite, and 0 if T is 0."""
    gaps_T = torch.nan_to_num((found_T - expected_T).abs(), nan=float("inf"))
    return float(gaps_T.max()) if len(gaps_T) else 0.0


def unexplained_difference(
    found_T: torch.Tensor,
    exact_T: torch.Tensor,
    rounded: Iterable[torch.Tensor],
    tolerance: float,
    dtype: str,
    most: float = 0.5,
) -> float:
    """Return the largest difference between logprobs [T], without tokens whose logprobs rounding alone moves.

    ``rounded`` are the logprobs [T] of the reference in the order of `roundings`; those after the first that explains
    every difference beyond the tolerance are not computed. Raises `CheckFailed` as `moved_by_rounding`
    does, or if fewer than a quarter of the tokens remain after all roundings.
    """
    gap, kept_T = float("inf"), torch.ones(len(exact_T), dtype=torch.bool)
    for rounded_T in rounded:
        kept_T &= ~moved_by_rounding(rounded_T - exact_T, tolerance, dtype, most)
        num = int(kept_T.sum())
        words = (
            f"different roundings to {dtype} leave {num} of {len(kept_T)} logprobs of the reference itself unchanged"
        )
        require(num >= _LEAST_COMPARED * len(kept_T), f"{words}: too few to compare")
        if (gap := largest_difference(found_T[kept_T], exact_T[kept_T])) <= tolerance:
            break
    return gap


def moved_by_rounding(errors_T: torch.Tensor, tolerance: float, dtype: str, most: float = 0.5) -> torch.Tensor:
    """Return bool [T]: whether rounding alone changes a token's logprob so much that the logprob proves nothing.

    ``errors_T`` are the errors of the reference's own logprobs in ``dtype``, which has 16 bits. Deep models amplify
    rounding after tokens that they consider unlikely: logprobs of SmolLM2 in bfloat16 differed by 18 nats between two
    torch kernels. Raises `CheckFailed` if rounding moves more than the share ``most`` of tokens.
    """
    moved_T = errors_T.abs() > tolerance / 4
    num = int(moved_T.sum())
    words = f"rounding to {dtype} changes {num} of {len(moved_T)} logprobs of the reference itself too much"
    require(num <= most * len(moved_T), f"{words} to compare them")
    return moved_T


def roundings(reference: ReferenceCheckpoint, dtype: str) -> Iterator[tuple[ReferenceCheckpoint, str]]:
    """Yield pairs of a reference and the dtype in which it computes: first one that rounds activations to ``dtype``,
    and then several whose weights are rounded a second time, each in a different way.

    The rounding of activations alone may leave a logprob unchanged by chance.
    """
    yield reference, dtype
    for seed in range(1, 1 + _NUM_ROUNDINGS):
        yield _RoundedReference(reference, dtype, seed), "float32"


class _RoundedReference(ReferenceCheckpoint):
    """A view of a reference in which all weights are rounded a second time before they are used."""

    def __init__(self, reference: ReferenceCheckpoint, dtype: str, seed: int) -> None:
        self.__dict__.update(reference.__dict__)  # the loaded models are shared
        self._dtype, self._seed = dtype, seed

    def logits(self, weights: ReferenceWeights, *arguments: Any, **options: Any) -> torch.Tensor:
        return super().logits(self._rounded(weights), *arguments, **options)

    def mixed_logits(
        self, parts: Sequence[tuple[ReferenceWeights, int]], *arguments: Any, **options: Any
    ) -> torch.Tensor:
        return super().mixed_logits([(self._rounded(it), stop) for it, stop in parts], *arguments, **options)

    def _rounded(self, weights: ReferenceWeights) -> ReferenceWeights:
        return self.rounded_again(weights, self._dtype, self._seed)

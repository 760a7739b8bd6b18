"""What rounding alone does to the logprobs of the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from inflight.conformance.reference import ReferenceCheckpoint, ReferenceWeights

_NUM_ROUNDINGS = 4
"""Number of different ways in which the weights are rounded a second time."""


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

    def _model_of(self, weights: ReferenceWeights, dtype: str) -> Any:
        return super()._model_of(self.rounded_again(weights, self._dtype, self._seed), dtype)

"""How much two computations of the same number may differ, by the worker's dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest differences between values that count as equal. The kit's models have two layers and logits of
    several units."""

    dtype: str
    logprob: float
    """Maximum difference of one logprob, in nats."""
    gradient: float
    """Relative difference of a gradient norm."""
    change: float
    """Difference in the change of weights over steps, relative to that change's 2-norm.

    Adam divides by small numbers.
    """
    update: float
    """Relative difference of the change of one tensor over single steps, in elements whose gradients are not small."""
    rounding: float
    """Relative difference of one stored weight: half a unit in the last place."""


_TOLERANCES = (
    # Logprobs and norms differ by about 1e-5 on CPUs; GPUs sum in another order, and transposed products round once
    # more. A shift, a lost temperature or an average is off by more than 0.1.
    Tolerance("float32", logprob=1e-3, gradient=1e-3, change=5e-3, update=2e-4, rounding=2.0**-24),
    # Norms and rotary angles inside the models are float32 in most implementations.
    Tolerance("float64", logprob=1e-4, gradient=1e-4, change=1e-3, update=1e-5, rounding=2.0**-53),
    # 8 bits: logits of 8 are rounded to 1/32, and so are the numbers they are made of.
    Tolerance("bfloat16", logprob=1.0, gradient=0.15, change=0.3, update=0.6, rounding=2.0**-9),
)


def tolerance_of(options: Mapping[str, object]) -> Tolerance:
    """Return the tolerance for a worker's option ``dtype``, which defaults to float32."""
    known = {tolerance.dtype: tolerance for tolerance in _TOLERANCES}
    return known.get(str(options.get("dtype", "float32")), known["bfloat16"])

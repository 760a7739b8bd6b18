"""Least squares with coefficients that cannot be negative: small, exact, and without another package."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from inflight.errors import ConfigError


def fit(rows: Sequence[Sequence[float]], values: Sequence[float], sizes: Sequence[float] | None = None) -> list[float]:
    """Return the coefficients, none negative, that come closest to ``values``.

    Squares are divided by ``sizes``, which are the values if they are not given, and above 0: sums agree then, which a
    fit of relative errors would make too small where values scatter. Columns without a value get 0. Raises
    `ConfigError` if there are no rows.
    """
    import numpy

    if not len(rows):
        raise ConfigError("there is nothing to fit: the run has too few steps")
    target = numpy.asarray(values, float)
    weights = 1.0 / numpy.sqrt(numpy.maximum(target if sizes is None else sizes, 1e-9))
    return _fitted(numpy.asarray(rows, float) * weights[:, None], target * weights)


def _fitted(matrix: Any, target: Any) -> list[float]:
    """Return the least squares without negative coefficients: the best of every set of columns."""
    import numpy

    used = [i for i in range(matrix.shape[1]) if matrix[:, i].any()]
    best, least = [0.0] * matrix.shape[1], float(target @ target)
    for size in range(1, len(used) + 1):
        for columns in itertools.combinations(used, size):
            found, *_ = numpy.linalg.lstsq(matrix[:, columns], target, rcond=None)
            rest = target - matrix[:, columns] @ found
            if (found >= 0).all() and float(rest @ rest) < least:
                least = float(rest @ rest)
                best = [0.0] * matrix.shape[1]
                for column, coefficient in zip(columns, found, strict=True):
                    best[column] = float(coefficient)
    return best

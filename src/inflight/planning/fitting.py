"""Exact non-negative least squares for a few columns, without additional dependencies."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from inflight.errors import ConfigError


def fit(rows: Sequence[Sequence[float]], values: Sequence[float], sizes: Sequence[float] | None = None) -> list[float]:
    """Return the non-negative coefficients that fit ``values`` best.

    Squared errors are divided by ``sizes``, which must be above 0 and default to the values. By default, the fit and
    the values have the same sum, whereas fitting relative errors would give too small a result for scattered values.
    The coefficient of an all-zero column is 0. Raises `ConfigError` if there are no rows.
    """
    import numpy

    if not len(rows):
        raise ConfigError("the run has too few steps to fit its costs: record a longer run")
    target = numpy.asarray(values, float)
    weights = 1.0 / numpy.sqrt(numpy.maximum(target if sizes is None else sizes, 1e-9))
    return _fitted(numpy.asarray(rows, float) * weights[:, None], target * weights)


def _fitted(matrix: Any, target: Any) -> list[float]:
    """Return the best non-negative least-squares fit over all subsets of columns."""
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

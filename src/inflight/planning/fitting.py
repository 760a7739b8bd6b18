"""Least squares with coefficients that cannot be negative: small, exact, and without another package."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from inflight.errors import ConfigError


def fit(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the coefficients, none negative, that come closest to ``values``; columns without a value get 0.

    Every set of columns is tried: meant for a few columns. Raises `ConfigError` if there are no rows.
    """
    import numpy

    matrix, target = numpy.asarray(rows, float), numpy.asarray(values, float)
    if matrix.size == 0:
        raise ConfigError("there is nothing to fit: the run has too few steps")
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

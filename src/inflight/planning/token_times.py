"""Fits the token times of endpoints to stretches of requests.

A stretch takes (n (a + c x) + k r) f. Here n is the number of tokens that its longest completion gains, x the number of
running completions times the length of the longest, k the number of requests that the endpoint admits during the
stretch, and f the slowdown caused by shared cores. The last stretch of a request takes o longer. The fit determines a,
c, r and o.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from inflight.planning.costs import Contention
from inflight.planning.fitting import fit
from inflight.planning.loads import Stretch


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """The fitted times in seconds. Fields have the same meaning as in `inflight.planning.costs.Endpoint`."""

    token_time: float
    context_time: float
    admission_time: float
    admission_time_each: float
    request_time: float
    error: float
    """Mean relative difference between stretches and their fit."""
    spread: float
    """Standard deviation of x divided by its mean. If it is small, the data cannot distinguish a, c and r."""


def token_times(stretches: Sequence[Stretch], contention: Contention) -> TokenTimes:
    """Return the best fit to stretches. Raises `ConfigError` if there are none."""
    rows = [_row(stretch, contention) for stretch in stretches]
    found = fit(rows, [stretch.seconds for stretch in stretches])
    errors = [
        abs(sum(c * x for c, x in zip(found, row, strict=True)) / stretch.seconds - 1)
        for row, stretch in zip(rows, stretches, strict=True)
    ]
    request_time, token_time, context_time, admission_time = found
    # If all requests have the same size, the cost of other sizes is unknown, so it is attributed to completions.
    sizes = {stretch.size for stretch in stretches}
    each = admission_time / sizes.pop() if len(sizes) == 1 else 0.0
    admission_time = 0.0 if each else admission_time
    contexts = [row[2] / row[1] for row in rows]
    spread = statistics.pstdev(contexts) / max(1e-9, statistics.fmean(contexts))
    return TokenTimes(
        max(1e-9, token_time), context_time, admission_time, each, request_time, statistics.fmean(errors), spread
    )


def _row(stretch: Stretch, contention: Contention) -> list[float]:
    """Return the coefficients of o, a, c and r.

    The tokens of each part of a stretch are proportional to its time divided by its slowdown.
    """
    work = [(part.seconds / contention.of(part.num_working), part.context) for part in stretch.parts]
    total = sum(seconds for seconds, _ in work)
    factor = stretch.seconds / total
    context = sum(seconds * context for seconds, context in work) / total
    tokens = stretch.num_tokens * factor
    return [float(stretch.is_last), tokens, tokens * context, stretch.num_admitted * factor]

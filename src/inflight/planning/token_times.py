"""Token times of endpoints, fitted to stretches of requests.

A stretch takes (n (a + c x) + k r) f, with n tokens of its longest completion, x running completions times the tokens
of the longest of them, k requests that the endpoint admits meanwhile, and the factor f of what shares its cores; the
last stretch of a request takes o more.
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
    """What was found, in seconds; the fields are those of `inflight.planning.costs.Endpoint`."""

    token_time: float
    context_time: float
    admission_time: float
    admission_time_each: float
    request_time: float
    error: float
    """Mean relative difference between stretches and their fit."""
    spread: float
    """Standard deviation of x over its mean. If it is small, the data cannot distinguish a, c and r."""


def token_times(stretches: Sequence[Stretch], contention: Contention) -> TokenTimes:
    """Return the times that explain stretches best. Raises `ConfigError` if there are none."""
    rows = [_row(stretch, contention) for stretch in stretches]
    found = fit(rows, [stretch.seconds for stretch in stretches])
    errors = [
        abs(sum(c * x for c, x in zip(found, row, strict=True)) / stretch.seconds - 1)
        for row, stretch in zip(rows, stretches, strict=True)
    ]
    request_time, token_time, context_time, admission_time = found
    # Where all requests are of one size, nothing states what another size would cost: completions then share the cost.
    sizes = {stretch.size for stretch in stretches}
    each = admission_time / sizes.pop() if len(sizes) == 1 else 0.0
    admission_time = 0.0 if each else admission_time
    contexts = [row[2] / row[1] for row in rows]
    spread = statistics.pstdev(contexts) / max(1e-9, statistics.fmean(contexts))
    return TokenTimes(
        max(1e-9, token_time), context_time, admission_time, each, request_time, statistics.fmean(errors), spread
    )


def _row(stretch: Stretch, contention: Contention) -> list[float]:
    """Return what o, a, c and r are multiplied by.

    Tokens are made in each part of a stretch in proportion to its time over its factor.
    """
    work = [(part.seconds / contention.of(part.num_working), part.context) for part in stretch.parts]
    total = sum(seconds for seconds, _ in work)
    factor = stretch.seconds / total
    context = sum(seconds * context for seconds, context in work) / total
    tokens = stretch.num_tokens * factor
    return [float(stretch.is_last), tokens, tokens * context, stretch.num_admitted * factor]

"""Level ``parity``: the difference between engine and trainer with the same weights, and whether updates increase it.

This difference is called mismatch: it exists at lag 0, and importance ratios should not have to correct it. The
reference is the given worker, or else the forward pass of transformers. ``inflight check parity`` looks for the cause.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict

from inflight.conformance.checks import check, look_at, require
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.parity.pair import Pair

LEVEL = "parity"
_NUM_PROMPTS, _FEWEST_PROMPTS = 8, 3
_NUM_TOKENS = 96
_SAMPLE_S = 1.0
"""Longest time of a completion on endpoints that sample for all prompts; slower endpoints sample for fewer."""
_DRIFT_UPDATES, _FEWEST_DRIFT_UPDATES, _DRIFT_S = 50, 20, 15.0


@check("E-60", "updates", deadline_s=60)
@look_at("dtypes of the head and of the softmax, position ids, attention scale, and which temperature is applied where")
async def mismatch(subject: EndpointSubject) -> None:
    """With the same weights, behaviour logprobs and trainer logprobs agree within the tolerance of the dtype."""
    with closing(_pair(subject)) as pair:
        await pair.set_weights(subject.reference.weights)
        figures = (await pair.sample()).figures
    values = asdict(figures)
    subject.note(**values)
    bound = subject.tolerance
    require(figures.largest <= bound, f"a logprob differs by {figures.largest:.3g} (tolerance {bound:g}): {values}")
    require(figures.k3 <= bound**2, f"k3 is {figures.k3:.3g} nats per token, more than {bound**2:.3g}: {values}")
    require(figures.ess >= 1 - bound, f"the effective sample size at lag 0 is {figures.ess:.6g}: {values}")


@check("E-61", "updates", deadline_s=90)
@look_at("conversions that are applied to weights that are already loaded: scales, casts, transposes, merges")
async def drift(subject: EndpointSubject) -> None:
    """Up to fifty updates with the same weights (as many as 15 seconds allow, but at least 20) do not move behaviour
    logprobs away from trainer logprobs."""
    with closing(_pair(subject)) as pair:
        await pair.set_weights(subject.reference.weights)
        first = (await pair.sample()).figures
        began, num_updates = time.monotonic(), 0
        while num_updates < _DRIFT_UPDATES:
            if num_updates >= _FEWEST_DRIFT_UPDATES and time.monotonic() - began > _DRIFT_S:
                break
            await pair.publish_again()
            num_updates += 1
        last = (await pair.sample()).figures
    subject.note(
        **{f"{name}, after one update": value for name, value in asdict(first).items()},
        **{f"{name}, after {num_updates} more": value for name, value in asdict(last).items()},
    )
    bound, grown = subject.tolerance / 5, last.mean - first.mean
    require(
        grown <= bound,
        f"after {num_updates} updates with the same weights, the mean difference of logprobs grew by {grown:.3g} "
        f"(more than {bound:.3g})",
    )


def _pair(subject: EndpointSubject) -> Pair:
    token_s = subject.pace.token_s
    share = min(1.0, _SAMPLE_S / (_NUM_TOKENS * token_s)) if token_s else 1.0
    return Pair(subject, subject.target.worker, {}, max(_FEWEST_PROMPTS, int(_NUM_PROMPTS * share)), _NUM_TOKENS)

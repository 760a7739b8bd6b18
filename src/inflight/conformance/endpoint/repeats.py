"""What two answers to the same request must have in common in spite of rounding.

Engines in low precision may round differently from one batch to the next, and a draw at the edge between two tokens
then selects the other token. In a measurement with bfloat16 and a vocabulary of 49,152 tokens, this happened at one
token in seven. It does not happen in float32 within a run of this kit.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from inflight.conformance.checks import require
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.wire import Completion

_LARGEST_FINE_TOLERANCE = 0.01
_LEAST_COMMON = 1 / 8
"""Required share of tokens before the first difference; for unrelated draws, this share is near 0."""


def least_common(subject: EndpointSubject) -> float:
    """Return the share of tokens that must precede the first difference between two answers; 1 unless the precision is
    low."""
    return 1.0 if subject.tolerance <= _LARGEST_FINE_TOLERANCE else _LEAST_COMMON


def require_repeated(subject: EndpointSubject, pairs: Iterable[tuple[Completion, Completion]], what: str) -> None:
    """Require that both completions of each pair have the same tokens, and the same logprobs before any difference."""
    num_common = num_tokens = 0
    largest, example = 0.0, ""
    for first, second in pairs:
        common = _num_common(first.token_ids, second.token_ids)
        longest = max(len(first.token_ids), len(second.token_ids))
        num_common, num_tokens = num_common + common, num_tokens + longest
        if common < longest and not example:
            example = f"; one has {_from(first, common)} and {_from(second, common)} at token {common}"
        if common:
            gap = subject.difference(first.logprobs[:common], torch.tensor(second.logprobs[:common]))
            largest = max(largest, gap)
    subject.note(**{f"same tokens, {what}": f"{num_common} of {num_tokens}", f"logprob difference, {what}": largest})
    require(
        num_common >= least_common(subject) * num_tokens,
        f"{what}, {num_common} of {num_tokens} tokens are the same{example}",
    )
    require(largest <= subject.tolerance, f"{what}, the same tokens have logprobs that differ by up to {largest:.3g}")


def _num_common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def _from(completion: Completion, index: int) -> str:
    return f"{list(completion.token_ids[index : index + 4])} of {len(completion.token_ids)}"

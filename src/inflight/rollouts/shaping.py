"""Pure functions that shape rewards and batches before the loss is computed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from inflight.errors import InvalidRequestError


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer: int) -> float:
    """Return a penalty to add to the reward of a completion: 0, falling to -1 within the last ``buffer`` tokens.

    With L the length: 0 up to max_tokens - buffer, then (max_tokens - buffer - L) / buffer, and -1 beyond max_tokens
    (DAPO, arXiv 2503.14476, eq. 13). Raises `InvalidRequestError` if the buffer is not between 1 and max_tokens.
    """
    if not 1 <= buffer <= max_tokens:
        raise InvalidRequestError(f"buffer must be between 1 and max_tokens ({max_tokens}), not {buffer}")
    return max(-1.0, min(0.0, (max_tokens - buffer - num_tokens) / buffer))


def has_signal(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of a group differ (dynamic sampling, DAPO, section 3.2)."""
    return len(set(rewards)) > 1


def sample_pairs(advantages: Sequence[float], *, keep: float = 0.5) -> list[tuple[int, int]]:
    """Return the pairs of completions of one group with the largest contrast, as indices (better, worse).

    Completions are sorted by advantage and paired, the largest with the smallest and so on inwards; the first pairs, a
    fraction ``keep`` of them but at least one, are kept (pairwise trajectory sampling, Shuffle-R1, arXiv 2508.05612).
    If the number of completions is odd, the one in the middle has no pair. Ties keep their order. Raises
    `InvalidRequestError` if ``keep`` is not in (0, 1].
    """
    if not 0 < keep <= 1:
        raise InvalidRequestError(f"keep must be above 0 and at most 1, not {keep}")
    order = sorted(range(len(advantages)), key=lambda i: -advantages[i])
    pairs = [(order[i], order[-1 - i]) for i in range(len(order) // 2)]
    return pairs[: max(1, math.floor(keep * len(pairs)))] if pairs else []


def shuffle_batch(weights: Sequence[float], size: int, *, num_rounds: int = 8, seed: int = 0) -> list[int]:
    """Return the indices of ``size`` items, drawn in rounds, without replacement within a round.

    An item is drawn with a probability that grows with its weight; the weight of a pair is abs(A1) + abs(A2)
    (advantage-based batch shuffle, Shuffle-R1, arXiv 2508.05612). Items of weight 0 are drawn only when no other is
    left in the round. Each item is drawn at most once per round. Raises `InvalidRequestError` if a weight is negative
    or not finite, or the rounds have too few items.
    """
    if any(not math.isfinite(weight) or weight < 0 for weight in weights):
        raise InvalidRequestError("weights must be finite and at least 0")
    if size > num_rounds * len(weights):
        raise InvalidRequestError(
            f"{num_rounds} rounds over {len(weights)} items cannot yield {size} indices: each round draws an item at "
            "most once"
        )
    generator = random.Random(seed)
    drawn: list[int] = []
    for round_index in range(num_rounds):
        # The largest of u^(1/w) are a weighted draw without replacement (Efraimidis and Spirakis 2006).
        keys = [(math.log(1.0 - generator.random()) / w if w > 0 else -math.inf, i) for i, w in enumerate(weights)]
        quota = math.ceil((size - len(drawn)) / (num_rounds - round_index))
        drawn += [i for _, i in sorted(keys, key=lambda key: -key[0])[:quota]]
    return drawn


def within_budget(lengths: Sequence[int], budget: int) -> list[int]:
    """Return how many tokens of each completion, in order, to train on, so that the numbers add up to ``budget``.

    The completion that crosses the budget is cut there, and later completions get no tokens; the sum is smaller only if
    there are not enough tokens (C3PO, Ring-lite, arXiv 2506.14731: `inflight.losses.Budget` then has the same
    denominator in every step). Compute advantages first, from whole completions. Raises `InvalidRequestError` if the
    budget is not positive.
    """
    if budget < 1:
        raise InvalidRequestError(f"budget must be at least 1 token, not {budget}")
    taken, left = [], budget
    for length in lengths:
        taken.append(min(length, left))
        left -= taken[-1]
    return taken

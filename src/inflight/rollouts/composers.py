"""Composers of optimizer steps, which select groups, completions and tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from inflight.contracts import BatchComposer
from inflight.errors import InvalidRequestError
from inflight.rollouts.shaping import sample_pairs, shuffle_batch, within_budget
from inflight.types import Group, Sample


@dataclass(frozen=True)
class TokenBudget(BatchComposer):
    """Composes each step from as many of the oldest groups as are needed to reach ``tokens_per_step``."""

    tokens_per_step: int

    def compose(self, groups: Sequence[Group], num_tokens: Sequence[int]) -> Sequence[int]:
        total = 0
        for i, num in enumerate(num_tokens):
            total += num
            if total >= self.tokens_per_step:
                return range(i + 1)
        return ()


@dataclass(frozen=True)
class ConstantTokens(BatchComposer):
    """Makes every step train on exactly ``budget`` completion tokens (C3PO of Ring-lite, arXiv 2506.14731).

    Groups are taken, oldest first, until they have enough tokens. The completion that crosses the budget is truncated
    there, and the rest of it is never trained on; advantages are computed from whole completions. Use this composer
    with a loss whose denominator is an `inflight.losses.Budget` of the same number. If ``budget`` is None, it is half
    of ``tokens_per_step``, which leaves the other half for prompts.
    """

    tokens_per_step: int
    budget: int | None = None

    @property
    def num_tokens(self) -> int:
        """The number of completion tokens of a step."""
        return self.budget or self.tokens_per_step // 2

    def compose(self, groups: Sequence[Group], num_tokens: Sequence[int]) -> Sequence[int]:
        total = 0
        for i, (group, num_training) in enumerate(zip(groups, num_tokens, strict=True)):
            # Context counts as training tokens only if its completion has training tokens.
            total += max(0, num_training - sum(rollout.num_context_tokens for rollout in group.rollouts))
            if total >= self.num_tokens:
                return range(i + 1)
        return ()

    def shaped(self, samples: Sequence[Sample], version: int) -> Sequence[Sample]:
        kept = within_budget([sum(sample.loss_mask) for sample in samples], self.num_tokens)
        return [_first(sample, num) for sample, num in zip(samples, kept, strict=True) if num]


@dataclass(frozen=True)
class ShuffledPairs(BatchComposer):
    """Trains on the pairs with the largest contrast of advantages, drawn in rounds (Shuffle-R1, arXiv 2508.05612).

    Within each group, the largest advantage is paired with the smallest, and so on, and a share ``keep`` of these pairs
    is kept. Then as many completions as the groups had are drawn in ``num_rounds`` rounds, so a completion may be
    trained on several times. `TokenBudget` chooses the groups of a step. Draws depend only on ``seed`` and the step.
    """

    tokens_per_step: int
    keep: float = 0.5
    num_rounds: int = 8
    seed: int = 0

    def compose(self, groups: Sequence[Group], num_tokens: Sequence[int]) -> Sequence[int]:
        return TokenBudget(self.tokens_per_step).compose(groups, num_tokens)

    def shaped(self, samples: Sequence[Sample], version: int) -> Sequence[Sample]:
        pairs: list[tuple[Sample, Sample]] = []
        for _, members in groupby(samples, key=lambda sample: sample.group_index):
            group = list(members)
            chosen = sample_pairs([sample.advantages[0] for sample in group], keep=self.keep)
            pairs += [(group[better], group[worse]) for better, worse in chosen]
        if not pairs:
            return samples
        weights = [abs(better.advantages[0]) + abs(worse.advantages[0]) for better, worse in pairs]
        size = min(len(samples) // 2, self.num_rounds * len(pairs))
        drawn = shuffle_batch(weights, size, num_rounds=self.num_rounds, seed=self.seed + version)
        return [sample for i in drawn for sample in pairs[i]]


@dataclass(frozen=True)
class SolvableOnly(BatchComposer):
    """Drops groups whose share of rewards above ``success`` is not between ``low`` and ``high`` (DAPO, 2503.14476).

    By default, these are the groups in which every completion succeeds or every completion fails. The run samples other
    prompts instead. `TokenBudget` composes steps from the remaining groups.
    """

    tokens_per_step: int
    low: float = 0.0
    high: float = 1.0
    success: float = 0.5

    def accepts(self, group: Group) -> bool:
        share = sum(rollout.reward > self.success for rollout in group.rollouts) / len(group.rollouts)
        return self.low < share < self.high

    def compose(self, groups: Sequence[Group], num_tokens: Sequence[int]) -> Sequence[int]:
        return TokenBudget(self.tokens_per_step).compose(groups, num_tokens)


COMPOSERS: dict[str, Callable[..., BatchComposer]] = {
    "token_budget": TokenBudget,
    "constant_tokens": ConstantTokens,
    "shuffled_pairs": ShuffledPairs,
    "solvable_only": SolvableOnly,
}
"""The built-in composers, by name."""


def _first(sample: Sample, num_tokens: int) -> Sample:
    """Return a sample with only the first ``num_tokens`` of its unmasked tokens."""
    if num_tokens < 0:
        raise InvalidRequestError(f"num_tokens must be at least 0, not {num_tokens}")
    mask, left = [], num_tokens
    for is_kept in sample.loss_mask:
        mask.append(is_kept and left > 0)
        left -= mask[-1]
    return dataclasses.replace(sample, loss_mask=mask)

"""How old a token may be: a bound that holds for every token, and admission that keeps it from biting often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from inflight.types import Group


@dataclass(frozen=True, slots=True)
class StalenessPolicy:
    """No token is trained on at a lag above ``max_lag``: trainer version minus the version that sampled the token.

    What makes this true is `mask` alone, applied with the trainer's version when a step's batch is composed: it is
    strict, and per token, so the later tokens of a completion that outlived an update still count.

    Admission (`max_outstanding_groups`) only makes masked tokens rare. If no more groups than it allows are ever
    outstanding, and groups are trained in the order in which they were issued, then a group is at most ``max_lag``
    versions old when its turn comes. Order is what is not guaranteed: while one slow completion runs, groups issued
    after it finish, are trained, and let others in, so its first tokens may grow older without bound.
    """

    max_lag: int

    def mask(self, token_versions: Sequence[int], trainer_version: int) -> list[bool]:
        """Return for each token whether it is young enough to be trained on."""
        return [trainer_version - version <= self.max_lag for version in token_versions]

    def num_trained_tokens(self, group: Group, trainer_version: int) -> int:
        """Return how many tokens of a group a step from ``trainer_version`` trains on, prompts included.

        A completion brings its tokens that `mask` keeps, and its prompt if there is one.
        """
        total = 0
        for rollout in group.rollouts:
            num_kept = sum(
                span.end - span.start
                for span in rollout.version_spans
                if trainer_version - span.version <= self.max_lag
            )
            total += num_kept + len(rollout.prompt_token_ids) if num_kept else 0
        return total

    def max_outstanding_groups(self, groups_per_step: float) -> int:
        """Return how many groups may be in flight, or finished but not trained, at once; at least 1.

        (``max_lag`` + 1) steps' worth, rounded up, as in AReaL (arXiv 2505.24298): with ``max_lag`` 0 exactly one
        batch. ``groups_per_step`` may be an average. When steps are cut by tokens one may need more groups than that,
        so whoever admits must let one more in when none is in flight and the step is not full, or wait forever.
        """
        return max(1, math.ceil((self.max_lag + 1) * groups_per_step))

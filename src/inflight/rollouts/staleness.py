"""How old a token may be: a bound that holds for every token, and admission that keeps it from biting often."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inflight.contracts import StalenessPolicy
from inflight.extensions import make
from inflight.types import Group


@dataclass(frozen=True)
class MaxLag(StalenessPolicy):
    """No token is trained on at a lag above ``max_lag``: trainer version minus the version that sampled the token.

    `mask` alone guarantees this. It works per token, so the later tokens of a completion that outlived an update still
    count.

    `max_outstanding_groups` only makes masked tokens rare. If no more groups than it allows are ever outstanding, and
    groups are trained in the order in which they were issued, then a group is at most ``max_lag`` versions old when its
    turn comes. The order is not guaranteed: while one slow completion runs, groups issued after it finish, are trained,
    and let others in, so its first tokens may grow older without bound.
    """

    max_lag: int

    def mask(self, token_versions: Sequence[int], trainer_version: int) -> list[bool]:
        return [trainer_version - version <= self.max_lag for version in token_versions]

    def max_outstanding_groups(self, groups_per_step: float) -> int:
        """Return (``max_lag`` + 1) steps of groups, rounded up and at least 1, as in AReaL (arXiv 2505.24298)."""
        return max(1, math.ceil((self.max_lag + 1) * groups_per_step))


def load_staleness(name: str, params: Mapping[str, Any], max_lag: int) -> StalenessPolicy:
    """Return a staleness policy by name, made with ``max_lag`` and ``params``. Raises `ConfigError`."""
    policy: StalenessPolicy = make(
        StalenessPolicy, "staleness policy", "staleness", name, {"max_lag": max_lag}, params, {"max_lag": MaxLag}
    )
    return policy


def num_trained_tokens(group: Group, staleness: StalenessPolicy, trainer_version: int) -> int:
    """Return how many tokens of a group a step from ``trainer_version`` trains on, prompts included.

    A prompt counts if any token of its completion does.
    """
    total = 0
    for rollout in group.rollouts:
        num_kept = sum(staleness.mask(rollout.token_versions(), trainer_version))
        total += num_kept + len(rollout.prompt_token_ids) if num_kept else 0
    return total

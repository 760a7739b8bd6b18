"""Staleness policies: a bound on the age of every trained token, and admission that makes masked tokens rare."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inflight.base.extensions import make
from inflight.contracts import StalenessPolicy
from inflight.errors import TrainerError
from inflight.types import OBSERVED, Group, Rollout


@dataclass(frozen=True)
class MaxLag(StalenessPolicy):
    """Masks each token whose lag, the trainer version minus the version that sampled it, is above ``max_lag``.

    `mask` alone guarantees this bound. It works per token, so later tokens of a completion that continued across an
    update may still be trained on.

    `max_outstanding_groups` only makes masked tokens rare. If no more groups than it allows are ever outstanding, and
    groups are trained in the order in which they were issued, then a group is at most ``max_lag`` versions old when its
    turn comes. The order is not guaranteed: while one slow completion runs, groups that were issued later finish, are
    trained on, and make space for others, so the age of the slow completion's first tokens has no bound.
    """

    max_lag: int

    def mask(self, token_versions: Sequence[int], trainer_version: int) -> list[bool]:
        if trainer_version - min(token_versions, default=trainer_version) <= self.max_lag:
            return [True] * len(token_versions)
        return [trainer_version - version <= self.max_lag for version in token_versions]

    def max_outstanding_groups(self, groups_per_step: float) -> int:
        """Return the number of groups in ``max_lag`` + 1 steps, rounded up and at least 1, as in AReaL (arXiv
        2505.24298).
        """
        return max(1, math.ceil((self.max_lag + 1) * groups_per_step))


@dataclass(frozen=True)
class EtaGate(StalenessPolicy):
    """Masks each completion whose first token has a lag above ``max_lag``, AReaL's eta (arXiv 2505.24298).

    AReaL admits a rollout while (eta + version + 1) B - (accepted + running) is positive, with B rollouts per step.
    Since version * B accepted rollouts have been trained on, this bounds the number of rollouts that have not been
    trained on. This policy uses that form of the bound, which can be computed from the ledger. The ledger survives a
    restart, so a restart cannot admit a burst.
    """

    max_lag: int

    def mask(self, token_versions: Sequence[int], trainer_version: int) -> list[bool]:
        return whole_if_young(token_versions, trainer_version, self.max_lag)

    def can_train(self, first_version: int, trainer_version: int) -> bool:
        return trainer_version - first_version <= self.max_lag

    def max_outstanding_groups(self, groups_per_step: float) -> int:
        return max(1, math.floor((self.max_lag + 1) * groups_per_step))


@dataclass(frozen=True)
class TrajectoryLag(StalenessPolicy):
    """Masks each completion whose first token has a lag above ``max_lag``, as RollArt does per trajectory.

    The other completions of the group are still trained on. Admission is the same as for `MaxLag`.
    """

    max_lag: int

    def mask(self, token_versions: Sequence[int], trainer_version: int) -> list[bool]:
        return whole_if_young(token_versions, trainer_version, self.max_lag)

    def can_train(self, first_version: int, trainer_version: int) -> bool:
        return trainer_version - first_version <= self.max_lag

    def max_outstanding_groups(self, groups_per_step: float) -> int:
        return MaxLag(self.max_lag).max_outstanding_groups(groups_per_step)


@dataclass(frozen=True)
class WindowedFifo(StalenessPolicy):
    """Trains only on groups in a window from the oldest unfinished one, which bounds how far others can overtake it.

    The window is ``fraction`` (S + 1) P groups, with S = ``max_lag`` and P groups per step, and at least one step. The
    default of 0.3 is that of TitanRL, which follows Magistral and Kimi-Researcher. A group that waits to be trained on
    does not hold the window back: if other groups in the window were dropped, the rest might never fill a step. Tokens
    beyond ``max_lag`` are masked.
    """

    max_lag: int
    fraction: float = 0.3

    def mask(self, token_versions: Sequence[int], trainer_version: int) -> list[bool]:
        return MaxLag(self.max_lag).mask(token_versions, trainer_version)

    def max_outstanding_groups(self, groups_per_step: float) -> int:
        return MaxLag(self.max_lag).max_outstanding_groups(groups_per_step)

    def trainable(self, waiting: Sequence[int], oldest: int, groups_per_step: float) -> list[bool]:
        return [group < oldest + self.window(groups_per_step) for group in waiting]

    def window(self, groups_per_step: float) -> int:
        """Return the size of the window, in groups from the oldest unfinished one."""
        return max(math.ceil(groups_per_step), math.ceil(self.fraction * (self.max_lag + 1) * groups_per_step))


@dataclass
class EssGuard(StalenessPolicy):
    """Wraps another policy, and reacts to batches that are too far off-policy, as in PipelineRL (arXiv 2509.19128).

    If the effective sample size of a step falls below ``threshold``, the next step uses only tokens sampled afterwards,
    so the run waits for on-policy data. With ``stops``, it ends the run instead.
    """

    policy: StalenessPolicy
    threshold: float
    stops: bool = False
    floor: int = 0
    """The oldest version whose tokens are not masked."""

    def mask(self, token_versions: Sequence[int], trainer_version: int) -> list[bool]:
        masked = self.policy.mask(token_versions, trainer_version)
        if min(token_versions, default=self.floor) >= self.floor:
            return [*masked]
        return [kept and version >= self.floor for kept, version in zip(masked, token_versions, strict=True)]

    def max_outstanding_groups(self, groups_per_step: float) -> int:
        return self.policy.max_outstanding_groups(groups_per_step)

    def trainable(self, waiting: Sequence[int], oldest: int, groups_per_step: float) -> Sequence[bool]:
        return self.policy.trainable(waiting, oldest, groups_per_step)

    def can_train(self, first_version: int, trainer_version: int) -> bool:
        return self.policy.can_train(first_version, trainer_version)

    def after_step(self, version: int, effective_sample_size: float | None) -> None:
        self.policy.after_step(version, effective_sample_size)
        if effective_sample_size is None or effective_sample_size >= self.threshold:
            return
        if self.stops:
            raise TrainerError(
                f"the effective sample size of the step to version {version} is {effective_sample_size:.3f}, below "
                f"rollouts.min_ess {self.threshold:g}: lower the learning rate or rollouts.max_lag, or set "
                "rollouts.on_low_ess to 'wait'"
            )
        self.floor = version

    def state(self) -> dict[str, Any]:
        return {"floor": self.floor, "policy": self.policy.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.floor = int(state.get("floor", 0))
        self.policy.restore(state.get("policy", {}))


STALENESS: dict[str, Callable[..., StalenessPolicy]] = {
    "max_lag": MaxLag,
    "eta_gate": EtaGate,
    "trajectory": TrajectoryLag,
    "windowed_fifo": WindowedFifo,
}
"""The built-in staleness policies, by name."""


def load_staleness(name: str, params: Mapping[str, Any], max_lag: int) -> StalenessPolicy:
    """Return the named staleness policy, constructed with ``max_lag`` and ``params``. Raises `ConfigError`."""
    policy: StalenessPolicy = make(
        StalenessPolicy, "staleness policy", "staleness", name, {"max_lag": max_lag}, params, STALENESS
    )
    return policy


def whole_if_young(token_versions: Sequence[int], trainer_version: int, max_lag: int) -> list[bool]:
    """Return a mask that keeps all tokens of a completion, or none if its first token has a lag above ``max_lag``."""
    is_young = trainer_version - min(token_versions, default=trainer_version) <= max_lag
    return [is_young] * len(token_versions)


def trained_mask(rollout: Rollout, staleness: StalenessPolicy, trainer_version: int) -> list[bool]:
    """Return which completion tokens a step from ``trainer_version`` trains on: sampled ones that the policy keeps."""
    versions = rollout.token_versions()
    if rollout.num_sampled_tokens == len(versions):
        return [*staleness.mask(versions, trainer_version)]
    kept = iter(staleness.mask([version for version in versions if version != OBSERVED], trainer_version))
    return [version != OBSERVED and next(kept) for version in versions]


def num_trained_tokens(group: Group, staleness: StalenessPolicy, trainer_version: int) -> int:
    """Return how many tokens of a group a step from ``trainer_version`` trains on, prompts and observations included.

    Prompts and observations count if any token of their rollout is trained on.
    """
    total = 0
    for rollout in group.rollouts:
        num_kept = sum(trained_mask(rollout, staleness, trainer_version))
        total += num_kept + rollout.num_context_tokens if num_kept else 0
    return total

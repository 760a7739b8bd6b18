"""Advantages of a group from its rewards. Knows nothing of tokens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal, assert_never

from inflight.errors import TaskError

AdvantageEstimator = Literal["mean", "leave_one_out", "std"]
"""``mean``: R - mean of the group (Dr. GRPO, arXiv 2503.20783). ``leave_one_out``: R - mean of the others (RLOO, arXiv
2402.14740; PipelineRL). ``std``: (R - mean) / (std + 1e-4) (GRPO, arXiv 2402.03300)."""

_STD_EPS = 1e-4
"""As in TRL and PipelineRL; verl has 1e-6. With rewards of order 1 it changes advantages by a few 1e-4 at most."""


def group_advantages(rewards: Sequence[float], estimator: AdvantageEstimator) -> list[float]:
    """Return one advantage per completion of a group; exact zeros if all rewards are equal or there is only one.

    The standard deviation is that of a sample (divisor G - 1). Raises `TaskError` if a reward is not finite.
    """
    wrong = [i for i, reward in enumerate(rewards) if not math.isfinite(reward)]
    if wrong:
        raise TaskError(
            f"reward {wrong[0]} of a group of {len(rewards)} is {rewards[wrong[0]]}: Task.score must be finite"
        )
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    total = math.fsum(rewards)
    mean = total / len(rewards)
    match estimator:
        case "mean":
            return [reward - mean for reward in rewards]
        case "leave_one_out":
            return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]
        case "std":
            scale = statistics.stdev(rewards) + _STD_EPS
            return [(reward - mean) / scale for reward in rewards]
        case _:
            assert_never(estimator)

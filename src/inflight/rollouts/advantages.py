"""Advantages of groups from their rewards."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal, assert_never

from inflight.errors import InvalidRequestError, TaskError
from inflight.wire import MAX_REWARD

AdvantageEstimator = Literal[
    "mean", "leave_one_out", "std", "population_std", "leave_one_out_std", "batch_std", "opo", "maxrl", "zero"
]
"""Estimators of advantages, where R is a reward, and mean and std are taken over the rewards of its group:

``mean``               R - mean (Dr. GRPO, arXiv 2503.20783)
``leave_one_out``      R - mean of the others (RLOO, arXiv 2402.14740; PipelineRL)
``std``                (R - mean) / (std + 1e-4) (GRPO, arXiv 2402.03300)
``population_std``     the same with the divisor G instead of G - 1, and 1e-8 (TRL's AsyncGRPOTrainer)
``leave_one_out_std``  (R - mean of the others) / (std of the others + 1e-6) (NeMo-RL)
``batch_std``          (R - mean) / (std of all such differences in the batch + 1e-4) (ScaleRL, arXiv 2510.13786)
``opo``                R - sum(L R) / sum(L), where L are the completions' lengths (OPO, arXiv 2505.23585)
``maxrl``              (R - mean) / mean, or 0 if the mean is not above 0 (MaxRL, arXiv 2602.02710)
``zero``               0, so that rewards have no effect
"""

_STD_EPS = 1e-4
"""The value in TRL and PipelineRL; verl uses 1e-6.

If rewards are about 1, it changes advantages by at most a few 1e-4.
"""


def batch_advantages(
    groups: Sequence[Sequence[float]],
    estimator: AdvantageEstimator,
    lengths: Sequence[Sequence[int]] | None = None,
) -> list[list[float]]:
    """Return one advantage per completion of each group of an optimizer step.

    ``opo`` needs ``lengths``, the number of tokens in each completion. In a group with only one completion, or with
    equal rewards, all advantages are exactly 0. Standard deviations are sample standard deviations (divisor n - 1),
    except for ``population_std``. Raises `TaskError` if a reward is not finite, `InvalidRequestError` if lengths are
    missing.
    """
    if estimator == "batch_std":
        centred = [group_advantages(rewards, "mean") for rewards in groups]
        everything = [advantage for group in centred for advantage in group]
        scale = (statistics.stdev(everything) if len(everything) > 1 else 0.0) + _STD_EPS
        return [[advantage / scale for advantage in group] for group in centred]
    if lengths is not None and [len(of) for of in lengths] != [len(rewards) for rewards in groups]:
        raise InvalidRequestError("each group must have as many lengths as rewards")
    return [
        group_advantages(rewards, estimator, None if lengths is None else lengths[i])
        for i, rewards in enumerate(groups)
    ]


def group_advantages(
    rewards: Sequence[float], estimator: AdvantageEstimator, lengths: Sequence[int] | None = None
) -> list[float]:
    """Return one advantage per completion of a single group.

    Raises the same errors as `batch_advantages`, and refuses ``batch_std``.
    """
    wrong = [i for i, reward in enumerate(rewards) if not abs(reward) <= MAX_REWARD]
    if wrong:
        raise TaskError(
            f"reward {wrong[0]} of a group of {len(rewards)} is {rewards[wrong[0]]}: Task.score must return a finite "
            f"number of at most {MAX_REWARD:g} in magnitude"
        )
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    size = len(rewards)
    total = math.fsum(rewards)
    mean = total / size
    match estimator:
        case "mean":
            return [reward - mean for reward in rewards]
        case "leave_one_out":
            return [reward - (total - reward) / (size - 1) for reward in rewards]
        case "std":
            scale = statistics.stdev(rewards) + _STD_EPS
            return [(reward - mean) / scale for reward in rewards]
        case "population_std":
            scale = statistics.pstdev(rewards) + 1e-8
            return [(reward - mean) / scale for reward in rewards]
        case "leave_one_out_std":
            return [_leave_one_out_std(rewards, i) for i in range(size)]
        case "opo":
            if lengths is None:
                raise InvalidRequestError("the estimator opo weighs rewards by lengths: pass the completions' lengths")
            baseline = math.fsum(n * reward for n, reward in zip(lengths, rewards, strict=True)) / sum(lengths)
            return [reward - baseline for reward in rewards]
        case "maxrl":
            return [(reward - mean) / mean if mean > 0 else 0.0 for reward in rewards]
        case "zero":
            return [0.0] * size
        case "batch_std":
            raise InvalidRequestError("the estimator batch_std needs all groups of the step: call batch_advantages")
        case _:
            assert_never(estimator)


def _leave_one_out_std(rewards: Sequence[float], index: int) -> float:
    """Return the advantage of one completion over the others' mean, divided by the others' standard deviation."""
    others = [reward for i, reward in enumerate(rewards) if i != index]
    scale = statistics.stdev(others) if len(others) > 1 else 0.0
    difference = rewards[index] - statistics.fmean(others)
    # As in NeMo-RL: others that are all equal have no scale.
    return difference / (scale + 1e-6) if scale > 0 else difference

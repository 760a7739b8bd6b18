"""Checks whether training favours some lengths or rewards, by comparing trained and omitted completions. No I/O.

Whether a step trains on a finished completion should not depend on the completion's length or reward. If slow
completions are discarded, long and hard prompts are never trained on (tinker-cookbook #822), and a model learns to be
brief although no reward asks for it.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BiasComparison:
    """How one quantity of trained completions compares with the same quantity of omitted ones."""

    distance: float
    """Kolmogorov-Smirnov statistic: the maximum difference between the two distribution functions."""
    p: float
    """The probability of a statistic at least this large if both samples have the same distribution."""
    median_trained: float
    median_left_out: float


@dataclass(slots=True)
class _Samples:
    trained: list[float] = field(default_factory=list)
    left_out: list[float] = field(default_factory=list)

    def compare(self) -> BiasComparison | None:
        if not self.trained or not self.left_out:
            return None
        return BiasComparison(
            *kolmogorov_smirnov(self.trained, self.left_out),
            statistics.median(self.trained),
            statistics.median(self.left_out),
        )


class BiasAudit:
    """After every ``window`` settled groups, compares the trained completions of these groups with the omitted ones.

    Completions of one prompt resemble each other, so only the first trained completion and the first omitted one of
    each group count; an unbiased choice does not depend on their lengths. Omitted completions are compared with trained
    ones, not with all finished ones, because the test requires independent samples.

    ``false_alarm`` bounds the probability that an unbiased choice raises the alarm in one window for one quantity.
    """

    def __init__(self, window: int = 256, false_alarm: float = 1e-5) -> None:
        self._window = window
        self._false_alarm = false_alarm
        self._samples = {"length": _Samples(), "reward": _Samples()}
        self._num_settled = 0
        self._num_left_out = 0
        self._last: dict[str, float] = {}
        self.num_alarms = 0
        """The number of windows with a significant difference since the process started."""

    def settled(
        self, lengths: Sequence[int], is_trained: Sequence[bool], rewards: Sequence[float] | None = None
    ) -> dict[str, BiasComparison]:
        """Record a settled group; if it completes a window, return the quantities that differ significantly.

        ``rewards`` is None if the group was abandoned before it was scored; in that case ``lengths`` are the lengths
        reached so far.
        """
        for name, values in (("length", lengths), ("reward", rewards)):
            samples = self._samples[name]
            for wanted, side in ((True, samples.trained), (False, samples.left_out)):
                if values is not None and wanted in is_trained:
                    side.append(values[[*is_trained].index(wanted)])
        self._num_settled += 1
        self._num_left_out += not all(is_trained)
        return self._compare() if self._num_settled >= self._window else {}

    def metrics(self) -> dict[str, float]:
        """Return the figures of the last complete window, and the number of alarms."""
        return {"alarms": self.num_alarms, **self._last}

    def _compare(self) -> dict[str, BiasComparison]:
        self._last = {"groups_with_left_out": self._num_left_out}
        found: dict[str, BiasComparison] = {}
        for name, samples in self._samples.items():
            if (comparison := samples.compare()) is not None:
                self._last |= {f"{name}_distance": comparison.distance, f"{name}_p": comparison.p}
                if comparison.p < self._false_alarm:
                    found[name] = comparison
            self._samples[name] = _Samples()
        self._num_settled = self._num_left_out = 0
        self.num_alarms += bool(found)
        return found


def kolmogorov_smirnov(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the two-sample Kolmogorov-Smirnov statistic and its p-value.

    The p-value is the asymptotic one with the correction of Stephens 1970, as in Numerical Recipes, 3rd edition,
    section 14.3.3. Samples with ties, such as rewards of 0 and 1, get a larger p-value than the exact test gives.
    """
    one, other = sorted(first), sorted(second)
    distance = max(
        abs(bisect_right(one, value) / len(one) - bisect_right(other, value) / len(other)) for value in (*one, *other)
    )
    root = math.sqrt(len(one) * len(other) / (len(one) + len(other)))
    return distance, kolmogorov_tail((root + 0.12 + 0.11 / root) * distance)


def kolmogorov_tail(x: float) -> float:
    """Return the probability that Kolmogorov's distribution exceeds x: 2 sum (-1)^(k-1) exp(-2 k^2 x^2)."""
    if x < 0.2:  # 1 to within 1e-12; the sum converges slowly there
        return 1.0
    total = sum(math.exp(-2 * k * k * x * x) * (1 if k % 2 else -1) for k in range(1, 101))
    return min(1.0, max(0.0, 2 * total))

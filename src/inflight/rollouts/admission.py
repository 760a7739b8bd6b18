"""Admits groups according to how many are outstanding. Token counts include prompts."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from inflight.contracts import StalenessPolicy

_NUM_STEPS = 8
"""The number of steps over which open groups are averaged."""
_NUM_AHEAD = 1.5
"""How many steps' worth of groups may wait, or be open in excess of the mean, while sampling keeps up with the trainer.

With a value of 1, simulated trainers wait up to 4 % of the time; with 2, tokens are half a step older at the same
throughput.
"""


@dataclass(slots=True)
class Admission:
    """Estimates the tokens of a group from the most recently finished groups, and admits groups by that estimate."""

    tokens_per_step: int
    expected_tokens: float
    """The number of tokens that a group is assumed to have until four groups have finished."""
    burst: int = 1
    """Once the pipeline has enough groups, new ones are offered only when there is room for this many."""
    _has_enough: bool = False
    _recent: deque[int] = field(default_factory=lambda: deque(maxlen=64))
    _open_seconds: float = 0.0
    """The time from the offer to the rewards, summed over all scored groups."""
    _steps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_NUM_STEPS + 1))
    """The time at which each recent step was settled, and ``_open_seconds`` at that time."""

    def scored(self, open_s: float) -> None:
        """Record that a group has received its rewards, ``open_s`` seconds after it was offered."""
        self._open_seconds += open_s

    def stepped(self, now: float) -> None:
        """Record that a step has been settled."""
        self._steps.append((now, self._open_seconds))

    @property
    def mean_open_groups(self) -> float | None:
        """The mean number of open groups over the recent steps; None until two steps have been settled.

        By Little's law (1961), this is the number of groups scored per second times the seconds that a group takes:
        with fewer open groups, fewer would be scored.
        """
        if len(self._steps) < 2 or (elapsed := self._steps[-1][0] - self._steps[0][0]) <= 0:
            return None
        return (self._steps[-1][1] - self._steps[0][1]) / elapsed

    def finished(self, num_tokens: int) -> None:
        """Record the number of tokens of a finished group; pass 0 if it is not trained on."""
        self._recent.append(num_tokens)

    @property
    def tokens_per_group(self) -> float:
        """The mean number of training tokens per group; groups that are not trained on count as 0."""
        return self.expected_tokens if len(self._recent) < 4 else max(1.0, statistics.fmean(self._recent))

    @property
    def groups_per_step(self) -> float:
        """The number of groups in an average step."""
        return self.tokens_per_step / self.tokens_per_group

    def num_groups(self, num_steps: int = 1) -> int:
        """Return the number of groups that ``num_steps`` steps need."""
        return max(1, math.ceil(num_steps * self.groups_per_step))

    def in_phase(self, num_waiting_tokens: int, num_running: int, num_steps: int, surplus: float) -> bool:
        """Return whether a conventional phase may offer another group.

        The phase may do so until the running and finished groups together have ``surplus`` times the tokens that the
        phase needs.
        """
        num_tokens = num_waiting_tokens + num_running * self.tokens_per_group
        return num_tokens < surplus * num_steps * self.tokens_per_step

    def in_pipeline(
        self,
        staleness: StalenessPolicy,
        num_outstanding: int,
        *,
        num_waiting_tokens: int,
        num_open: int,
        surplus: float,
        is_step_ready: bool,
        has_waited: bool,
        is_idle: bool,
    ) -> bool:
        """Return whether the pipeline may offer another group.

        The number of groups that are offered and not yet trained on stays within the lag bound. If generation is faster
        than training, that bound alone would let every token reach the maximum lag. Therefore, if the trainer did not
        have to wait for its last step, the number of waiting groups plus the number of open groups above its mean is
        limited to ``surplus`` times `_NUM_AHEAD` steps, or, with bursts, to ``burst`` + 1 groups if that is more. After
        the limit has been reached, nothing is offered until there is room for ``burst`` groups. If the trainer had to
        wait, nothing is offered while a whole step is ready.
        """
        if not (is_idle or num_outstanding < staleness.max_outstanding_groups(self.groups_per_step)):
            return False
        if has_waited or (mean := self.mean_open_groups) is None:
            self._has_enough = False
            return not is_step_ready
        num_ahead = num_waiting_tokens / self.tokens_per_group + num_open - mean
        enough = _NUM_AHEAD * surplus * self.groups_per_step
        if self.burst > 1:
            enough = max(enough, self.burst + 1)
            if self._has_enough:
                enough -= self.burst - 1
        self._has_enough = num_ahead >= enough
        return not self._has_enough

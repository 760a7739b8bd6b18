"""Admission of groups, based on the number that is outstanding. Token counts include prompts."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from inflight.contracts import StalenessPolicy


@dataclass(slots=True)
class Admission:
    """Estimates the tokens of a group from the groups that finished last, and admits groups by that estimate."""

    tokens_per_step: int
    expected_tokens: float
    """The assumed tokens of a group until four groups have finished."""
    _recent: deque[int] = field(default_factory=lambda: deque(maxlen=64))

    def finished(self, num_tokens: int) -> None:
        """Record the tokens of a finished group; 0 if it is not trained on."""
        self._recent.append(num_tokens)

    @property
    def tokens_per_group(self) -> float:
        """The training tokens of an average group, including groups that are not trained on."""
        return self.expected_tokens if len(self._recent) < 4 else max(1.0, statistics.fmean(self._recent))

    @property
    def groups_per_step(self) -> float:
        """The number of groups of an average step."""
        return self.tokens_per_step / self.tokens_per_group

    def num_groups(self, num_steps: int = 1) -> int:
        """Return the number of groups that ``num_steps`` steps need."""
        return max(1, math.ceil(num_steps * self.groups_per_step))

    def in_phase(self, num_waiting_tokens: int, num_running: int, num_steps: int, surplus: float) -> bool:
        """Return whether a conventional phase may offer another group.

        It may until running and finished groups together have ``surplus`` times the tokens that the phase needs.
        """
        num_tokens = num_waiting_tokens + num_running * self.tokens_per_group
        return num_tokens < surplus * num_steps * self.tokens_per_step

    def in_pipeline(
        self, staleness: StalenessPolicy, num_outstanding: int, *, is_step_ready: bool, is_idle: bool
    ) -> bool:
        """Return whether the pipeline may offer another group.

        The number of groups that are offered and not yet trained on stays within the lag bound. If generation is faster
        than training, that bound alone would let every token reach the largest lag, so nothing is offered while a
        whole step is ready.
        """
        return not is_step_ready and (
            is_idle or num_outstanding < staleness.max_outstanding_groups(self.groups_per_step)
        )

"""When another group may be issued: bounded staleness in the pipeline, a fixed amount of work in conventional mode."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from inflight.rollouts import StalenessPolicy


class TokensPerGroup:
    """Running mean of the training tokens that a finished group brings; groups that are not trained on bring none."""

    def __init__(self, first_guess: float) -> None:
        self._recent: deque[int] = deque(maxlen=64)
        self._first_guess = first_guess

    def add(self, num_tokens: int) -> None:
        """Note a finished group."""
        self._recent.append(num_tokens)

    def mean(self) -> float:
        """Return the mean over the last groups, at least 1."""
        if len(self._recent) < 4:
            return self._first_guess
        return max(1.0, sum(self._recent) / len(self._recent))


def pipeline_admission(
    staleness: StalenessPolicy,
    tokens_per_step: int,
    tokens_per_group: TokensPerGroup,
    num_outstanding: Callable[[], int],
    num_waiting_tokens: Callable[[], int],
    is_idle: Callable[[], bool],
) -> Callable[[], bool]:
    """Return the rule of the pipeline, which keeps endpoints full as far as that does not make data old.

    Issued and not yet trained groups stay within what the lag bound allows. Where generation is faster than training,
    the bound alone would let every token wait until it is just not too old; so nothing is issued either while the
    tokens of a whole step wait.
    """

    def may_issue() -> bool:
        groups_per_step = tokens_per_step / tokens_per_group.mean()
        bound = staleness.max_outstanding_groups(groups_per_step)
        return num_waiting_tokens() < tokens_per_step and (num_outstanding() < bound or is_idle())

    return may_issue


class PhasedAdmission:
    """The rule of the conventional mode: in a phase, work for a number of tokens; outside of one, none."""

    def __init__(self, tokens_per_phase: int, tokens_per_group: TokensPerGroup) -> None:
        self._tokens_per_phase = tokens_per_phase
        self._tokens_per_group = tokens_per_group
        self._open = False

    def begin(self) -> None:
        """Open a phase."""
        self._open = True

    def end(self) -> None:
        """Close the phase."""
        self._open = False

    def may_issue(self, num_running: int, num_finished_tokens: int) -> bool:
        """True while what runs and what has finished is less than the phase's work."""
        expected = num_finished_tokens + num_running * self._tokens_per_group.mean()
        return self._open and expected < self._tokens_per_phase

"""The setup of a simulated run: the policies of a live run, its workload, and its costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from inflight.contracts import BatchComposer, Scheduler, StalenessPolicy
from inflight.planning.costs import Contention, Endpoint, PublishCost, TrainerCost
from inflight.planning.groups import Prompted, num_kept_tokens, whole_groups
from inflight.rollouts import HistoryStore, MaxLag, TokenBudget
from inflight.rollouts.dispatcher import Dispatcher
from inflight.rollouts.step_queue import StepRules


@dataclass(frozen=True)
class Setup:
    """A run to simulate. Policies have state, so a scheduler cannot be used for a second run."""

    scheduler: Scheduler
    history: HistoryStore
    """The history that the scheduler reads."""
    endpoints: Sequence[Endpoint]
    prompted: Callable[[int, int], Prompted]
    """Returns the simulated outcome of an item that is offered at a version."""
    step_size: int
    num_steps: int
    unit: Literal["tokens", "groups"] = "tokens"
    """The unit of ``step_size``."""
    staleness: StalenessPolicy = field(default_factory=lambda: MaxLag(8))
    composer: BatchComposer | None = None
    """If None, a step consists of the oldest groups that together reach ``step_size``."""
    conventional_steps: int = 0
    """Steps per phase in conventional mode, in which sampling and training alternate. 0 means pipeline mode."""
    burst: int = 1
    """The same as in `Admission`."""
    trainer: TrainerCost = field(default_factory=TrainerCost)
    publish: PublishCost = field(default_factory=PublishCost)
    contention: Contention = field(default_factory=Contention)
    whole_requests: bool = False
    """Whether the completions of a group form one request, which holds all their slots until the last one has ended.
    This is the case for tasks, but not for episodes of an environment."""
    score_time: float = 0.0
    """Time from the end of a group until its rewards are known."""
    trains_on_equal_rewards: bool = True
    expected_tokens: float = 0.0
    """Expected number of tokens of a group before any has finished. 0 means as many as the first group has."""
    seed: int = 0
    """Seed of the random failures."""
    record: Callable[[str, dict[str, Any]], None] | None = None
    """Called with the kind and the fields of every event that `calibrate` would read from a live run."""

    def dispatcher(self) -> Dispatcher:
        """Return the dispatcher of the run."""
        counts_tokens = self.unit == "tokens"
        return Dispatcher(
            self.scheduler,
            self.staleness,
            self.composer or TokenBudget(self.step_size),
            self.history,
            StepRules(
                self.step_size,
                self._expected_size() if counts_tokens else 1.0,
                burst=self.burst,
                steps_per_phase=self.conventional_steps,
                trains_on_equal_rewards=self.trains_on_equal_rewards,
                size_of=(lambda group: group.num_tokens) if counts_tokens else lambda group: 1,
                kept_size_of=num_kept_tokens if counts_tokens else whole_groups,
            ),
            is_one_request=self.whole_requests,
        )

    def _expected_size(self) -> float:
        first = self.prompted(0, 0)
        return self.expected_tokens or sum(first.lengths) + len(first.lengths) * first.num_prompt_tokens

"""What a simulated run is made of: the policies of a live run, its workload, and what things cost."""

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
    """A run to simulate. The policies are used up: a scheduler that has seen one run cannot begin another."""

    scheduler: Scheduler
    history: HistoryStore
    """The scheduler's own."""
    endpoints: Sequence[Endpoint]
    prompted: Callable[[int, int], Prompted]
    """What is sampled for an item that is offered at a version."""
    step_size: int
    num_steps: int
    unit: Literal["tokens", "groups"] = "tokens"
    """Of ``step_size``."""
    staleness: StalenessPolicy = field(default_factory=lambda: MaxLag(8))
    composer: BatchComposer | None = None
    """None: the oldest groups that reach ``step_size``."""
    conventional_steps: int = 0
    """Steps of a phase of the conventional mode, in which sampling and training alternate. 0: the pipeline."""
    trainer: TrainerCost = field(default_factory=TrainerCost)
    publish: PublishCost = field(default_factory=PublishCost)
    contention: Contention = field(default_factory=Contention)
    whole_requests: bool = False
    """Whether the completions of a group are one request, which holds their slots until the last has ended: so it is
    with a task, and not with episodes of an environment."""
    score_time: float = 0.0
    """From the end of a group to its rewards."""
    trains_on_equal_rewards: bool = True
    expected_tokens: float = 0.0
    """Of a group, before any has finished. 0: those of the first."""
    seed: int = 0
    """Of failures."""
    record: Callable[[str, dict[str, Any]], None] | None = None
    """Is given the kind and the fields of events as a live run would write them, as far as `calibrate` reads them."""

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

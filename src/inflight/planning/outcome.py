"""What a simulated run did: totals, and a row for each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from inflight.rollouts.littles_law import LittlesLaw


@dataclass(frozen=True, slots=True)
class StepRow:
    """One optimizer step."""

    time: float
    """When its version was there for the run to continue."""
    num_tokens: int
    """Training tokens, prompts included."""
    num_sequences: int
    age: float
    """Mean over its completions of the step's version minus the one of their first token."""
    lag: float
    """Mean over its tokens of the step's version minus theirs."""
    busy_time: float
    """Until then, of all endpoints, time in which they ran something; ``slot_time``: held slots times time."""
    slot_time: float
    train_time: float


@dataclass(frozen=True, slots=True)
class Steady:
    """Averages over the steps after the first ones, in which pipelines fill."""

    tokens_per_time: float
    steps_per_time: float
    age: float
    lag: float
    busy_share: float
    """Of the endpoints' time, that with something running."""
    slot_share: float
    """Of all slots, those held."""
    train_share: float


@dataclass(slots=True)
class SimulationResult:
    """What a simulated run did. Times are in the unit of its costs."""

    time: float = 0.0
    num_tokens: int = 0
    """Training tokens of trained groups, prompts included."""
    num_completions: int = 0
    """That finished."""
    num_lost_tokens: int = 0
    """Sampled, and thrown away because their completion started again."""
    num_slots: int = 0
    busy: dict[str, float] = field(default_factory=dict)
    """Time with something running, by endpoint; ``slot_time``: held slots times time."""
    slot_time: dict[str, float] = field(default_factory=dict)
    train_time: float = 0.0
    group_lags: list[int] = field(default_factory=list)
    """For each trained group, the trainer's version minus the version when it was first issued."""
    trained: list[int] = field(default_factory=list)
    """Items in the order in which they were trained."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Groups by reason, as the ledger counts them."""
    ages: Counter[int] = field(default_factory=Counter)
    """Trained completions by the lag of their first token."""
    lags: Counter[int] = field(default_factory=Counter)
    """Trained tokens by lag."""
    steps: list[StepRow] = field(default_factory=list)
    law: LittlesLaw = field(default_factory=LittlesLaw)
    scheduler: Mapping[str, float] = field(default_factory=dict)
    """The scheduler's own figures."""

    @property
    def utilisation(self) -> float:
        """Share of the time in which an endpoint runs something, averaged over the endpoints."""
        return sum(self.busy.values()) / (len(self.busy) * self.time)

    @property
    def tokens_per_time(self) -> float:
        """Trained tokens per unit of time."""
        return self.num_tokens / self.time

    def steady(self, num_skipped: int = 0) -> Steady:
        """Return averages over the steps after the first ``num_skipped``."""
        steps = self.steps[num_skipped:]
        empty = StepRow(0.0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
        first, last = self.steps[num_skipped - 1] if num_skipped else empty, steps[-1]
        time = last.time - first.time
        num_tokens = sum(step.num_tokens for step in steps)
        num_sequences = sum(step.num_sequences for step in steps)
        return Steady(
            num_tokens / time,
            len(steps) / time,
            sum(step.age * step.num_sequences for step in steps) / max(1, num_sequences),
            sum(step.lag * step.num_tokens for step in steps) / max(1, num_tokens),
            (last.busy_time - first.busy_time) / (time * len(self.busy)),
            (last.slot_time - first.slot_time) / (time * self.num_slots),
            (last.train_time - first.train_time) / time,
        )

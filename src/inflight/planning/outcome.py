"""The result of a simulated run: totals, and a row for each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from inflight.rollouts.littles_law import LittlesLaw


@dataclass(frozen=True, slots=True)
class StepRow:
    """One optimizer step."""

    time: float
    """When the step's version was served and the run continued."""
    num_tokens: int
    """Number of tokens trained on, including prompts."""
    num_sequences: int
    age: float
    """The step's version minus the version of a completion's first token, averaged over the trained completions."""
    lag: float
    """The step's version minus the version that sampled a token, averaged over the trained tokens."""
    busy_time: float
    """Time so far during which endpoints were busy, summed over endpoints. ``slot_time`` is the time so far during
    which slots were held, summed over slots."""
    slot_time: float
    train_time: float


@dataclass(frozen=True, slots=True)
class Steady:
    """Averages over all steps except the first ones, during which the pipeline fills."""

    tokens_per_time: float
    steps_per_time: float
    age: float
    lag: float
    busy_share: float
    """The share of the time during which endpoints were busy."""
    slot_share: float
    """The share of all slots that were held."""
    train_share: float


@dataclass(slots=True)
class SimulationResult:
    """The result of a simulated run. Times are in the unit of the costs."""

    time: float = 0.0
    num_tokens: int = 0
    """Number of tokens of trained groups, including prompts."""
    num_completions: int = 0
    """Number of completions that finished."""
    num_lost_tokens: int = 0
    """Number of sampled tokens that were discarded because their completion was started again."""
    num_slots: int = 0
    busy: dict[str, float] = field(default_factory=dict)
    """Time during which each endpoint was busy. ``slot_time`` is the time during which its slots were held, summed over
    slots."""
    slot_time: dict[str, float] = field(default_factory=dict)
    train_time: float = 0.0
    group_lags: list[int] = field(default_factory=list)
    """For each trained group, the step's version minus the lowest version that sampled the first token of a
    completion."""
    trained: list[int] = field(default_factory=list)
    """Indices of the items, in the order in which they were trained on."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Dropped groups by reason, as the ledger counts them."""
    ages: Counter[int] = field(default_factory=Counter)
    """Number of trained completions by the lag of their first token."""
    lags: Counter[int] = field(default_factory=Counter)
    """Number of trained tokens by lag."""
    steps: list[StepRow] = field(default_factory=list)
    law: LittlesLaw = field(default_factory=LittlesLaw)
    scheduler: Mapping[str, float] = field(default_factory=dict)
    """Statistics of the scheduler."""

    @property
    def utilisation(self) -> float:
        """Share of the time in which an endpoint is busy, averaged over the endpoints."""
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

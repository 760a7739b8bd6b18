"""The policies of a run, which `preflight` constructs once."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.contracts import BatchComposer, Scheduler, StalenessPolicy
from inflight.rollouts import HistoryStore


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies that schedule rollouts, limit the age of tokens, and compose steps."""

    scheduler: Scheduler
    staleness: StalenessPolicy
    composer: BatchComposer
    history: HistoryStore

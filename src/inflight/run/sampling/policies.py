"""The policies of a run, made once by `preflight`."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.contracts import BatchComposer, Scheduler, StalenessPolicy
from inflight.rollouts import HistoryStore


@dataclass(frozen=True, slots=True)
class Policies:
    """What decides which rollouts run where, which tokens are too old, and what makes up a step."""

    scheduler: Scheduler
    staleness: StalenessPolicy
    composer: BatchComposer
    history: HistoryStore

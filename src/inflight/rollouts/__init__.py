"""Rollouts between the servers and the trainer: tasks, advantages, staleness, the ledger, and packed batches.

No module of this package imports torch.
"""

from inflight.rollouts.advantages import AdvantageEstimator, batch_advantages, group_advantages
from inflight.rollouts.batching import WaitingGroups, load_composer
from inflight.rollouts.composers import TokenBudget
from inflight.rollouts.credit import Credit, teaches, token_advantages
from inflight.rollouts.critic import TurnCritic
from inflight.rollouts.history import HistoryStore
from inflight.rollouts.ledger import Ledger
from inflight.rollouts.packing import pack
from inflight.rollouts.partials import continuation, joined
from inflight.rollouts.schedulers import load_scheduler
from inflight.rollouts.shaping import has_signal, overlong_penalty, sample_pairs, shuffle_batch, within_budget
from inflight.rollouts.staleness import EssGuard, MaxLag, load_staleness, trained_mask
from inflight.rollouts.tasks import load_task

__all__ = [
    "AdvantageEstimator",
    "Credit",
    "EssGuard",
    "HistoryStore",
    "Ledger",
    "MaxLag",
    "TokenBudget",
    "TurnCritic",
    "WaitingGroups",
    "batch_advantages",
    "continuation",
    "group_advantages",
    "has_signal",
    "joined",
    "load_composer",
    "load_scheduler",
    "load_staleness",
    "load_task",
    "overlong_penalty",
    "pack",
    "sample_pairs",
    "shuffle_batch",
    "teaches",
    "token_advantages",
    "trained_mask",
    "within_budget",
]

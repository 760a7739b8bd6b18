"""An actor by itself: its scheduler may be gated, and nothing is trained on or too old by default."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from inflight.contracts import StalenessPolicy
from inflight.rollouts import HistoryStore, Ledger, TokenBudget
from inflight.rollouts.dispatcher import Dispatcher
from inflight.rollouts.schedulers import LeastLoaded
from inflight.rollouts.step_queue import StepRules
from inflight.run.sampling.actor import Actor, Outcome
from inflight.run.sampling.work import Work

NEVER = 1 << 60
"""Tokens of a step that is never composed."""


class Ages(StalenessPolicy):
    """Any number of groups may be outstanding; a completion can be trained on if its first version is young enough."""

    def __init__(self, is_young: Callable[[int], bool]) -> None:
        self._is_young = is_young

    def mask(self, token_versions: Sequence[int], trainer_version: int) -> list[bool]:
        return [True] * len(token_versions)

    def max_outstanding_groups(self, groups_per_step: float) -> int:
        return NEVER

    def can_train(self, first_version: int, trainer_version: int) -> bool:
        return self._is_young(first_version)


class Gated(LeastLoaded):
    """Wants items only while ``may_offer`` allows it."""

    may_offer: Callable[[], bool]

    def num_wanted(self) -> int:
        return super().num_wanted() if self.may_offer() else 0


def actor_of(
    work: Work,
    on_outcome: Callable[[Outcome], None],
    *,
    ledger: Ledger | None = None,
    may_offer: Callable[[], bool] = lambda: True,
    is_young: Callable[[int], bool] = lambda first_version: True,
) -> Actor:
    scheduler = Gated(group_size=work.size)
    scheduler.may_offer = may_offer
    dispatcher = Dispatcher(
        scheduler,
        Ages(is_young),
        TokenBudget(NEVER),
        HistoryStore(),
        StepRules(NEVER, 1.0, trains_on_equal_rewards=True),
        ledger=ledger,
        is_one_request=work.is_one_request,
        is_enough=work.is_enough,
    )
    return Actor(work, dispatcher, seed=0, on_outcome=on_outcome)


def partials_of(actor: Actor) -> dict[str, Any]:
    """Return what is there of the unfinished groups."""
    partials: dict[str, Any] = actor.dispatcher.state(lambda one: one.model_dump(mode="json"))["partials"]
    return partials

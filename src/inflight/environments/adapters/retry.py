"""An environment that lets the model retry a task after a wrong answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from inflight.contracts import Environment, Episode, Task
from inflight.errors import TaskError
from inflight.rollouts.tasks import load_task
from inflight.types import TaskItem


class Retry(Environment):
    """An episode presents one item of a task and gives the model up to ``tries`` turns to answer it.

    ``task`` and ``params`` specify the task, as ``task.name`` and ``task.params`` do in a run. An answer that scores 1
    ends the episode. The reward is the score of the last answer, multiplied by ``discount`` once for each earlier try.
    For runs that assign credit by turn, each turn's reward is its discounted improvement on the best score so far.
    """

    def __init__(
        self,
        seed: int,
        task: str,
        params: Mapping[str, Any] | None = None,
        tries: int = 3,
        discount: float = 0.8,
        says: str = "That is wrong. Try again.",
    ) -> None:
        """Raise `TaskError` if the task is unknown, or is itself an environment."""
        made = load_task(task, params or {}, seed)
        if not isinstance(made, Task):
            raise TaskError(f"{task!r} is an environment, not a task: set the parameter task to the name of a task")
        if tries < 1 or not 0 < discount <= 1:
            raise TaskError(f"tries must be at least 1 and discount in (0, 1], not {tries} and {discount}")
        self._task = made
        self._tries = tries
        self._discount = discount
        self._says = says

    @property
    def name(self) -> str:
        return f"{self._task.name}, up to {self._tries} tries"

    def item(self, index: int) -> TaskItem:
        return self._task.item(index)

    async def play(self, item: TaskItem, episode: Episode) -> float:
        conversation = episode.conversation()
        reply = await conversation.say(item.prompt)
        score = await asyncio.to_thread(self._task.score, item, reply.text)
        best, worth = score, 1.0
        conversation.reward_turn(score)
        for _ in range(1, self._tries):
            if score >= 1:
                break
            worth *= self._discount
            reply = await conversation.say(self._says)
            score = await asyncio.to_thread(self._task.score, item, reply.text)
            conversation.reward_turn(worth * max(0.0, score - best))
            best = max(best, score)
        return score * worth

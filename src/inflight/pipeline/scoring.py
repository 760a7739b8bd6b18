"""The task's side of a group: its item, its prompt as tokens, and the rewards. Tasks and rewards are users' code."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inflight.contracts import Task
from inflight.errors import InflightError, TaskError
from inflight.types import TaskItem
from inflight.weights.threads import run_abandonable
from inflight.wire import Completion


@dataclass(frozen=True)
class Scoring:
    """Makes prompts and rewards. ``tokenizer`` renders prompts (with its chat template, if any) and decodes."""

    task: Task
    tokenizer: Any
    timeout_s: float
    """Longest that the rewards of one group may take."""

    def item(self, index: int) -> TaskItem:
        """Return an item. Raises `TaskError` if the task fails to make it."""
        try:
            return self.task.item(index)
        except Exception as error:  # tasks are user code
            raise TaskError(f"task {self.task.name!r} failed to make item {index}: {error!r}") from error

    def prompt_of(self, item: TaskItem) -> tuple[int, ...]:
        """Return the prompt as token ids."""
        if self.tokenizer.chat_template:
            messages = [{"role": "user", "content": item.prompt}]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return tuple(self.tokenizer(item.prompt)["input_ids"])

    async def rewards(self, item: TaskItem, completions: Sequence[Completion]) -> list[float]:
        """Score in a thread, so that a slow reward function does not block the loop; `TaskError` if it hangs."""

        def score() -> list[float]:
            texts = [
                self.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
                for completion in completions
            ]
            return [float(self.task.score(item, text)) for text in texts]

        try:
            async with asyncio.timeout(self.timeout_s):
                return await run_abandonable(score, "inflight-reward")
        except TimeoutError as error:
            raise TaskError(
                f"the reward of task {self.task.name!r}, item {item.index}, took longer than {self.timeout_s:g} s"
            ) from error
        except InflightError:
            raise
        except Exception as error:  # rewards are user code
            raise TaskError(f"the reward of task {self.task.name!r} raised on item {item.index}: {error!r}") from error

"""TRL's environments, unmodified: the objects that its trainers create with ``environment_factory``.

``reset(**row)`` receives a row of the data set and may return text that is added to the row's prompt. Public methods
are tools. ``get_reward()``, if there is one, is called at the end. The protocol is that of TRL 1.16,
``trl/experimental/async_grpo/async_rollout_worker.py``; TRL itself is not needed.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from inflight.base.extensions import import_object, resolve
from inflight.contracts import Environment, Episode
from inflight.environments.tools.tool_loop import ToolUse, use_tools
from inflight.errors import ConfigError, TaskError
from inflight.types import Message, TaskItem

Row = Mapping[str, Any]


class TrlEnvironment(Environment):
    """Plays each episode with an object created by ``factory``, named as ``module:Class``, and a row of ``prompts``.

    ``prompts`` is a list of strings or rows (a row's ``prompt`` is a string or a list of messages; its other columns
    are up to the environment), the path of a JSONL file of these, or ``module:attribute``. Item i is row i; after the
    last row, the rows repeat from the first. Without ``prompts``, ``reset`` alone provides the prompt.

    The reward is the sum of ``get_reward`` and the ``reward_funcs``. The latter are functions like TRL's, named as
    ``module:function`` and called with one completion at a time. Objects are reused after their episode has ended
    successfully; those of a failed episode are discarded.
    """

    def __init__(
        self,
        seed: int,
        factory: str,
        prompts: str | Sequence[str | Row] = ({},),
        reward_funcs: Sequence[str] = (),
        max_turns: int = 16,
    ) -> None:
        """Raise `TaskError` if factory, rows or rewards are missing, or if the factory's object has no method
        ``reset``.
        """
        del seed  # rows have a fixed order, and the environment has its own randomness
        try:
            self._factory: Callable[[], Any] = resolve(factory)
            self._reward_funcs = [resolve(name) for name in reward_funcs]
            self._rows = _rows(import_object(prompts) if isinstance(prompts, str) and ":" in prompts else prompts)
        except ConfigError as error:
            raise TaskError(str(error)) from error
        self._name = factory
        self._max_turns = max_turns
        first = self._factory()
        if not callable(getattr(first, "reset", None)):
            raise TaskError(f"the object of {factory}, a {type(first).__name__}, has no method reset")
        if not self._reward_funcs and not hasattr(first, "get_reward"):
            raise TaskError(f"{factory} has no method get_reward, and task.params has no reward_funcs")
        self._idle = [first]

    @property
    def name(self) -> str:
        return f"trl {self._name}"

    def item(self, index: int) -> TaskItem:
        row = self._rows[index % len(self._rows)]
        return TaskItem(index, json.dumps(row, default=repr, sort_keys=True), metadata={"row": row})

    async def play(self, item: TaskItem, episode: Episode) -> float:
        row: Row = item.metadata["row"]  # type: ignore[assignment]
        environment = self._idle.pop() if self._idle else await asyncio.to_thread(self._factory)
        observation = await asyncio.to_thread(environment.reset, **row)
        prompt = _asked(row, observation)
        tools = tool_methods(environment)
        conversation = episode.conversation(tools=tools)
        use = await use_tools(
            conversation, *prompt, tools={tool.__name__: tool for tool in tools}, max_turns=self._max_turns
        )
        reward = await self._reward(environment, row, prompt, use)
        self._idle.append(environment)
        return reward

    async def _reward(self, environment: Any, row: Row, prompt: Sequence[Message], use: ToolUse) -> float:
        rewards = [await _called(environment.get_reward)] if hasattr(environment, "get_reward") else []
        completion = [dict(message) for message in use.messages]
        arguments: dict[str, Any] = {name: [value] for name, value in row.items() if name not in _OWN}
        arguments |= {
            "prompts": [[dict(message) for message in prompt]],
            "completions": [completion],
            "completion_ids": [[token_id for reply in use.replies for token_id in reply.token_ids]],
        }
        rewards += [(await _called(function, **arguments))[0] for function in self._reward_funcs]
        return float(sum(reward for reward in rewards if reward is not None))


_OWN = frozenset({"prompt", "completion", "completion_ids"})


def tool_methods(environment: Any) -> list[Callable[..., Any]]:
    """Return the methods that are tools, sorted by name: all public methods except ``reset`` and ``get_reward``."""
    return [
        getattr(environment, name)
        for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)
        if name not in ("reset", "get_reward") and not name.startswith("_")
    ]


async def _called(function: Callable[..., Any], **arguments: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await asyncio.to_thread(function, **arguments)


def _asked(row: Row, observation: Any) -> Sequence[Message]:
    """Return the messages of a row, with the text from ``reset`` appended to the last one."""
    prompt = row.get("prompt", "")
    messages: list[dict[str, Any]] = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(one) for one in prompt]
    )
    if observation is not None:
        messages[-1]["content"] += observation
    return messages


def _rows(given: Any) -> list[Row]:
    """Return rows from a list of strings and rows, or from a JSONL file. Raises `TaskError`."""
    if isinstance(given, str):
        try:
            given = [json.loads(line) for line in Path(given).read_text().splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise TaskError(f"task.params.prompts: {given} cannot be read as JSON lines: {error}") from error
    rows: list[Row] = [{"prompt": one} if isinstance(one, str) else one for one in given]
    wrong = next((row for row in rows if not isinstance(row, Mapping)), None)
    if wrong is not None or not rows:
        found = "it is empty" if wrong is None else f"it contains {wrong!r}"
        raise TaskError(f"task.params.prompts must be a list of strings and rows, but {found}")
    return rows

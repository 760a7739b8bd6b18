"""The tasks of a verifiers taskset, played by a harness that calls the recording proxy of its episode.

Written for verifiers 0.4. The library's rollouts run in this process: its own client relays the harness's requests, and
the proxy records them. The verifiers library then scores the trace, and that score is the episode's reward.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import verifiers.v1 as vf

from inflight.contracts import Environment, Episode
from inflight.environments.adapters import verifiers_harness
from inflight.errors import TaskError
from inflight.types import TaskItem

_MODEL = "inflight"
_HARNESS = "inflight_chat_loop"
"""A module name without dots, under which the verifiers library finds the harness."""
_NO_KEY = "INFLIGHT_HAS_NO_KEY"
"""An environment variable that is not set: no API key is needed, because an episode's URL contains the key."""
_AGENT = {"harness": {"id": _HARNESS}, "runtime": {"type": "subprocess"}, "max_turns": 16}


class VerifiersEnvironment(Environment):
    """A taskset, named as in verifiers, such as ``gsm8k_v1``; item i is its i-th task.

    ``taskset`` is the name, or a table of the taskset's options with its ``id``; ``agent`` and ``env`` are the tables
    with these names in a verifiers configuration. Unless ``agent`` specifies otherwise, the harness is `ChatLoop`, with
    at most 16 turns. With several agents (``env = { id = ... }``), the reward is the mean over the agents that are
    trained. A finite taskset is repeated after its last task. The taskset itself determines the order of tasks and any
    randomness.
    """

    def __init__(
        self,
        seed: int,
        taskset: str | Mapping[str, Any],
        agent: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
    ) -> None:
        """Raise `TaskError` if the taskset is unknown, or if verifiers refuses an option."""
        del seed
        sys.modules.setdefault(_HARNESS, verifiers_harness)
        described = {"id": taskset} if isinstance(taskset, str) else dict(taskset)
        self._name = str(described.get("id", ""))
        options: dict[str, Any] = {"taskset": described, **(env or {})}
        if "id" not in options or agent is not None:
            options["agent"] = {**_AGENT, **(agent or {})}
        try:
            self._config = vf.resolve_env_config(options)
            tasks = vf.load_environment(self._config).taskset
        except Exception as error:  # tasksets are user code
            raise TaskError(f"verifiers cannot load the taskset {self._name!r}: {error}") from error
        self._is_finite = bool(tasks.bounded)
        self._coming: Iterator[Any] = iter(tasks)
        self._tasks: list[Any] = []

    @property
    def name(self) -> str:
        return f"verifiers {self._name}"

    def item(self, index: int) -> TaskItem:
        self._tasks += itertools.islice(self._coming, max(0, index + 1 - len(self._tasks)))
        if not self._tasks or (index >= len(self._tasks) and not self._is_finite):
            raise TaskError(f"the taskset {self._name!r} has ended after {len(self._tasks)} tasks")
        task = self._tasks[index % len(self._tasks)]
        return TaskItem(index, task.data.prompt_text, metadata={"task": task})

    async def play(self, item: TaskItem, episode: Episode) -> float:
        client = vf.EvalClientConfig(base_url=await episode.openai_url(), api_key_var=_NO_KEY)
        environment = vf.load_environment(self._config)  # what it serves belongs to this episode
        async with environment.serving():
            played = await environment.run_episode(item.metadata["task"], vf.ModelContext(_MODEL, client))
        traces = [trace for trace in played.traces if trace.agent.trainable]
        if not played.ok or not traces:
            raise TaskError(f"verifiers: {_problem(played)}")
        return float(sum(trace.reward for trace in traces) / len(traces))


def _problem(played: Any) -> str:
    errors = [*played.errors, *(trace.last_error for trace in played.traces)]
    return "; ".join(f"{error.type}: {error.message}" for error in errors if error is not None) or (
        "no agent of the episode was marked as trained, so it has no reward"
    )

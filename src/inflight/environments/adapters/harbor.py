"""Harbor's tasks: the model works on a task with a shell, and the task's own tests give the reward."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from inflight.contracts import Environment, Episode
from inflight.environments.adapters.harbor_sandboxes import TaskSandbox, machine_problem, open_sandbox
from inflight.environments.adapters.harbor_tasks import read_tasks
from inflight.environments.tools.processes import CommandResult
from inflight.environments.tools.tool_loop import use_tools
from inflight.errors import ConfigError, ContextFullError, TaskError
from inflight.types import TaskItem
from inflight.wire import is_reward

_MAX_REWARD_BYTES = 64 * 1024
_TAIL_CHARACTERS = 200


class HarborEnvironment(Environment):
    """Harbor's task folders. Item i is the i-th folder by name; after the last folder, the folders repeat.

    ``tasks`` is a task folder, or a folder of them. The agent's part of an episode ends when the model calls no tool,
    after ``max_turns`` turns, when the context is full, or after the task's ``agent.timeout_sec``; then the tests run.
    A command is killed after ``command_timeout_s``. The model sees at most ``max_output_bytes`` of a command's output.
    """

    def __init__(
        self,
        seed: int,
        tasks: str,
        max_turns: int = 16,
        command_timeout_s: float = 60.0,
        max_output_bytes: int = 8000,
    ) -> None:
        """Raise a `ConfigError` that lists every reason why a task cannot be run, whether or not it depends on this
        machine.
        """
        del seed  # tasks have a fixed order and no randomness
        limits = {"max_turns": max_turns, "command_timeout_s": command_timeout_s, "max_output_bytes": max_output_bytes}
        for name, limit in limits.items():
            if not 0 < limit < math.inf:
                raise ConfigError(f"{name} is {limit}; it must be positive and finite")
        self._tasks = read_tasks(Path(tasks), machine_problem)
        self._name = Path(tasks).resolve().name
        self._max_turns = max_turns
        self._command_timeout_s = command_timeout_s
        self._max_output_bytes = max_output_bytes

    @property
    def name(self) -> str:
        return f"harbor {self._name}"

    def item(self, index: int) -> TaskItem:
        task = self._tasks[index % len(self._tasks)]
        return TaskItem(index, task.instruction, metadata={"task": task})

    async def play(self, item: TaskItem, episode: Episode) -> float:
        task: Any = item.metadata["task"]
        async with open_sandbox(task, self._max_output_bytes) as sandbox:
            await self._act(task.instruction, task.file.agent.timeout_sec, episode, sandbox)
            return read_reward(*await sandbox.verify())

    async def _act(self, instruction: str, timeout_s: float, episode: Episode, sandbox: TaskSandbox) -> None:
        """Let the model work until it has finished or a limit is reached."""

        async def bash(command: str) -> str:
            """Run a command with bash. Files persist; processes and variables do not. There is no network.

            Args:
                command: The command.

            Returns: The output of the command.
            """
            return (await sandbox.run(command, self._command_timeout_s)).text()

        conversation = episode.conversation(tools=[bash])
        try:
            async with asyncio.timeout(timeout_s) as limit:
                with contextlib.suppress(ContextFullError):
                    await use_tools(conversation, instruction, tools={"bash": bash}, max_turns=self._max_turns)
        except TimeoutError:
            if not limit.expired():
                raise


def read_reward(logs: Path, result: CommandResult) -> float:
    """Return the reward that a verifier wrote, regardless of the verifier's exit status.

    Raises `TaskError` if there is no valid reward.
    """
    texts = {name: _read_regular_file(logs / name) for name in ("reward.json", "reward.txt")}
    end = f"the output of the tests ended with: {result.text()[-_TAIL_CHARACTERS:]}"
    name, text = next(((name, text) for name, text in texts.items() if text is not None), ("", ""))
    if not name:
        raise TaskError(f"the verifier wrote neither reward.json nor reward.txt to /logs/verifier; {end}")
    try:
        rewards = json.loads(text) if name == "reward.json" else {"reward": float(text)}
        values = [*rewards.values(), rewards["reward"]]
    except (ValueError, KeyError, AttributeError, RecursionError):
        values = [None]
    if not all(_is_finite(value) for value in values):
        form = 'an object of finite numbers with the key "reward"' if name == "reward.json" else "a finite number"
        raise TaskError(f"the verifier's {name} is {text[:_TAIL_CHARACTERS]!r}, which is not {form}; {end}")
    return float(rewards["reward"])


def _is_finite(value: object) -> bool:
    return is_reward(value) and not isinstance(value, bool)


def _read_regular_file(path: Path) -> str | None:
    """Return the content of a file that untrusted code wrote, or None if it does not exist. Links are not followed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TaskError(f"the verifier's {path.name} is not a regular file: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise TaskError(f"the verifier's {path.name} is not a regular file")
        content = os.read(fd, _MAX_REWARD_BYTES + 1)
    finally:
        os.close(fd)
    if len(content) > _MAX_REWARD_BYTES:
        raise TaskError(f"the verifier's {path.name} has more than {_MAX_REWARD_BYTES} bytes")
    return content.decode(errors="replace")

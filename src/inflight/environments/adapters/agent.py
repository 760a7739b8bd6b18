"""Agents as commands: each episode is one run of a program that knows only a URL.

The program receives the URL and its key in the environment variables that OpenAI's and Anthropic's clients read
(``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL`` and ``ANTHROPIC_API_KEY``), and the item as JSON on
standard input. It reports its reward by posting ``{"reward": 1.0}`` to ``INFLIGHT_REWARD_URL``, or by printing that
object as the last line of its output.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from inflight.base.extensions import resolve
from inflight.base.tasks import cancel_and_wait
from inflight.contracts import Environment, Episode
from inflight.errors import TaskError
from inflight.types import TaskItem
from inflight.wire import is_reward

_SECRETS = ("INFLIGHT_TOKEN", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "ANTHROPIC_AUTH_TOKEN")
"""Environment variables that an agent does not inherit."""
_PARTING_S = 5.0
"""How long to read the rest of an agent's output after the agent has ended."""
_POLL_S = 0.02
_TAIL_BYTES = 300
_MAX_LINE_BYTES = 64 * 1024


class AgentCommand(Environment):
    """Runs a command for each episode, in its own process group, and ends the whole group with the episode.

    Each of ``roles`` has its own URL, which the item lists under ``roles``, and may receive its own reward. ``tasks``
    is a file with one JSON object per line, or a ``module:function`` that returns the object for an index; the command
    runs in ``directory``. Raises `TaskError` if the tasks cannot be used.
    """

    def __init__(
        self,
        seed: int,
        command: Sequence[str],
        tasks: str,
        directory: str = ".",
        name: str = "agent",
        roles: Sequence[str] = (),
    ) -> None:
        if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
            raise TaskError(f"command must be a list of words, such as ['python', 'my_agent.py'], not {command!r}")
        if isinstance(roles, str) or not all(isinstance(role, str) and role for role in roles):
            raise TaskError(f"roles must be a list of names, such as ['white', 'black'], not {roles!r}")
        if not Path(directory).is_dir():
            raise TaskError(f"the agent's directory {directory!r} does not exist")
        self._command = tuple(command)
        self._directory = directory
        self._name = name
        self._roles = tuple(roles)
        self._item_of = _items(tasks)
        program = str(Path(directory, command[0])) if "/" in command[0] else command[0]
        if shutil.which(program) is None:
            raise TaskError(f"the agent's program {command[0]!r} does not exist, or cannot be executed")
        self._starting: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        """One lock per event loop. Starting a program briefly blocks the loop, so other tasks must run between two
        starts.
        """

    @property
    def name(self) -> str:
        return self._name

    def item(self, index: int) -> TaskItem:
        data = self._item_of(index)
        prompt = data.get("prompt", data.get("question", ""))
        return TaskItem(index, prompt if isinstance(prompt, str) else json.dumps(prompt), metadata=data)

    async def play(self, item: TaskItem, episode: Episode) -> float:
        """Play an episode and return its reward.

        If there is no reward, raises a `TaskError` that quotes the end of standard error.
        """
        url = await episode.openai_url()
        said, complained = bytearray(), bytearray()
        urls = {"roles": {role: await episode.openai_url(role) for role in self._roles}} if self._roles else {}
        given = json.dumps({"index": item.index, "seed": episode.seed, **item.metadata, **urls}) + "\n"
        agent = await self._started(url)
        assert agent.stdin is not None and agent.stdout is not None and agent.stderr is not None
        reading = asyncio.gather(
            _give(agent.stdin, given.encode()),
            _keep_end(agent.stdout, said, _MAX_LINE_BYTES),
            _keep_end(agent.stderr, complained, _TAIL_BYTES),
        )
        try:
            status = await _ended(agent)
        finally:
            _end_group(agent.pid)
            try:
                await _ended(agent)
                await asyncio.wait({reading}, timeout=_PARTING_S)
            finally:
                if not reading.done():  # something outside the group holds its output open
                    agent._transport.close()  # type: ignore[attr-defined]
                reading.add_done_callback(lambda it: it.cancelled() or it.exception())  # marks it as retrieved
                await cancel_and_wait(reading)
        return self._reward(episode.posted_reward, status, bytes(said), bytes(complained))

    async def _started(self, url: str) -> asyncio.subprocess.Process:
        key = url.removesuffix("/v1").rpartition("/")[2]
        inherited = {name: value for name, value in os.environ.items() if name not in _SECRETS}
        variables = {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": key,
            "INFLIGHT_REWARD_URL": f"{url.removesuffix('/v1')}/reward",
            "NO_PROXY": ",".join(filter(None, (inherited.get("NO_PROXY"), "127.0.0.1"))),
        }
        try:
            async with self._starting.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
                return await asyncio.create_subprocess_exec(
                    *self._command,
                    cwd=self._directory,
                    env=inherited | variables,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    start_new_session=True,
                )
        except OSError as error:
            raise TaskError(f"the agent {self._command[0]!r} cannot be started: {error.strerror or error}") from error

    def _reward(self, posted: float | None, status: int, said: bytes, complained: bytes) -> float:
        reward = posted if posted is not None else _last_reward(said)
        if status == 0 and reward is not None:
            return reward
        problem = (
            f"ended with status {status}"
            if status
            else ("reported no reward: post one to INFLIGHT_REWARD_URL, or print it as the last line")
        )
        tail = complained.decode(errors="replace").strip()
        raise TaskError(f"the agent {problem}" + (f"; standard error ends with: {tail}" if tail else ""))


def _items(tasks: str) -> Callable[[int], Mapping[str, Any]]:
    """Return a function that maps an index to its item; a file repeats after its last line. Raises `TaskError`."""
    if not isinstance(tasks, str):
        raise TaskError(f"tasks must be a file of JSON lines, or module:function, not {tasks!r}")
    if ":" in tasks and not Path(tasks).is_file():
        made: Callable[[int], Mapping[str, Any]] = resolve(tasks)
        return made
    try:
        lines = [line for line in Path(tasks).read_text().splitlines() if line.strip()]
        objects = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise TaskError(f"tasks {tasks!r} cannot be read as JSON lines: {error}") from error
    wrong = [number for number, value in enumerate(objects, 1) if not isinstance(value, dict)]
    if wrong or not objects:
        what = f"line {wrong[0]} is not an object" if wrong else "the file is empty"
        raise TaskError(f"tasks {tasks!r} must have one JSON object per line: {what}")
    return lambda index: objects[index % len(objects)]


async def _ended(agent: asyncio.subprocess.Process) -> int:
    """Return the exit status of a process once it has ended, even if another process keeps its output open."""
    while agent.returncode is None:  # noqa: ASYNC110 - asyncio has no event for it
        await asyncio.sleep(_POLL_S)
    return agent.returncode


async def _give(stream: asyncio.StreamWriter, content: bytes) -> None:
    """Write all of a program's input, unless the program closes its input early."""
    with contextlib.suppress(ConnectionError):
        stream.write(content)
        await stream.drain()
    stream.close()


async def _keep_end(stream: asyncio.StreamReader, end: bytearray, size_bytes: int) -> None:
    """Read a stream to its end, keeping only its last bytes."""
    while part := await stream.read(64 * 1024):
        end += part
        del end[:-size_bytes]


def _last_reward(said: bytes) -> float | None:
    """Return the reward in the last line of output, or None if that line is not an object with a reward."""
    lines = said.decode(errors="replace").strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    reward = value.get("reward") if isinstance(value, dict) else None
    is_number = is_reward(reward) and not isinstance(reward, bool)
    return float(reward) if is_number and reward is not None else None


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)

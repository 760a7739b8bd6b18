"""Computes rewards in separate processes: ``python -m inflight.run.sampling.scoring FD TASK SEED MODEL``.

A reward function in a thread of the run holds the interpreter lock for up to 5 ms at a time, which delays the event
loop that feeds every server. Each process constructs the task and the same items, and decodes completions. A call is
the number of an item, its level in a curriculum, the lengths of its completions and their token ids as 32-bit integers.
Answers, and the message that the process is ready, are JSON. A process ends when its standard input ends, even while it
computes rewards.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import sys
import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from inflight.base.tasks import finish_all
from inflight.contracts import Task
from inflight.errors import TaskError
from inflight.model.checkpoints import load_tokenizer
from inflight.rollouts.curriculum import Curriculum
from inflight.rollouts.tasks import TaskSettings
from inflight.types import TaskItem

_HEAD = struct.Struct("<QII")
"""Index of the item, its level (0 without a curriculum) and number of its completions; their lengths follow."""
_SIZE = struct.Struct("<I")
_STOP_S = 2.0


@dataclass(eq=False)
class ScoringPool:
    """Up to ``size`` processes, started when they are needed. Belongs to one event loop."""

    size: int
    task: TaskSettings
    seed: int
    model: Path
    start_timeout_s: float
    _idle: list[_Process] = field(default_factory=list, init=False)
    _all: set[_Process] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.size)

    async def rewards(self, item: TaskItem, completions: Sequence[Sequence[int]], timeout_s: float) -> list[float]:
        """Return the reward of each completion of an item. A process that does not become idle again is killed.

        Raises `TaskError`, or ``TimeoutError`` if scoring takes too long, not counting the wait for a process.
        """
        async with self._room:
            process = self._idle.pop() if self._idle else await self._start()
            is_idle = False
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await process.ask(item, completions)
                is_idle = True
            finally:
                if is_idle:
                    self._idle.append(process)
                else:
                    await process.stop()
                    self._all.discard(process)
        if "error" in answer:
            raise TaskError(answer["error"])
        return [float(reward) for reward in answer["rewards"]]

    async def aclose(self) -> None:
        """End the processes; those that are computing rewards are killed."""
        await finish_all(*(process.stop() for process in self._all))
        self._all.clear()
        self._idle.clear()

    async def _start(self) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "inflight.run.sampling.scoring", str(theirs.fileno())]
            command += [self.task.model_dump_json(), str(self.seed), str(self.model)]
            child = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, pass_fds=(theirs.fileno(),), start_new_session=True
            )
        process = _Process(child, *await asyncio.open_connection(sock=ours))
        self._all.add(process)
        try:
            async with asyncio.timeout(self.start_timeout_s):
                await process.answer("a scoring process was starting")
        except TimeoutError as error:
            raise TaskError(f"a scoring process was not ready within {self.start_timeout_s:g} s") from error
        return process


@dataclass(eq=False)
class _Process:
    child: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, item: TaskItem, completions: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Return the answer of a call. Raises `TaskError` if the process ends."""
        lengths = array("I", map(len, completions))
        ids = [array("I", token_ids).tobytes() for token_ids in completions]
        head = _HEAD.pack(item.index, item.metadata.get("level", 0), len(lengths))
        self.writer.write(b"".join((head, lengths.tobytes(), *ids)))
        return await self.answer(f"item {item.index} was being scored")

    async def answer(self, during: str) -> dict[str, Any]:
        try:
            await self.writer.drain()
            (size,) = _SIZE.unpack(await self.reader.readexactly(_SIZE.size))
            answer: dict[str, Any] = json.loads(await self.reader.readexactly(size))
        except (OSError, asyncio.IncompleteReadError) as error:
            code = await self.child.wait()
            raise TaskError(f"the process ended with status {code} while {during}; its output states why") from error
        return answer

    async def stop(self) -> None:
        self.writer.close()
        assert self.child.stdin is not None
        self.child.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await self.child.wait()
        except TimeoutError:
            self.child.kill()
            await self.child.wait()


# --------------------------------------------------------------------------------------------------- in the process


def answer_calls(stream: BinaryIO, connection: socket.socket, task: Task, tokenizer: Any) -> None:
    """Answer calls until the run closes its end. An exception of the task is sent as the answer."""
    while head := stream.read(_HEAD.size):
        index, level, num_completions = _HEAD.unpack(head)
        lengths = array("I", stream.read(4 * num_completions))
        completions = [array("I", stream.read(4 * length)) for length in lengths]
        try:
            item = task.item_at(level, index) if isinstance(task, Curriculum) else task.item(index)
            texts = [tokenizer.decode(list(ids), skip_special_tokens=True) for ids in completions]
            answer: dict[str, Any] = {"rewards": [float(task.score(item, text)) for text in texts]}
        except Exception as error:  # rewards are user code
            answer = {"error": f"the reward of task {task.name!r} raised on item {index}: {error!r}"}
        _send(connection, answer)


def _send(connection: socket.socket, answer: Mapping[str, Any]) -> None:
    content = json.dumps(answer).encode()
    connection.sendall(_SIZE.pack(len(content)) + content)


def _end_with_the_run() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


def main() -> None:
    """Run one scoring process. It ignores SIGINT, which the run handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    descriptor, settings, seed, model = sys.argv[1:]
    connection = socket.socket(fileno=int(descriptor))
    os.set_inheritable(connection.fileno(), False)  # so that processes started by the task do not keep it open
    task = TaskSettings.model_validate_json(settings).load(int(seed))
    assert isinstance(task, Task), "environments are played in the process of the run"
    tokenizer = load_tokenizer(Path(model))
    with connection.makefile("rb") as stream:
        _send(connection, {})
        answer_calls(stream, connection, task, tokenizer)


if __name__ == "__main__":
    main()

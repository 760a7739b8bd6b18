"""Makes and scores items in separate processes: ``python -m inflight.run.sampling.scoring FD HOW TASK ...``.

User code that blocks or holds the interpreter's lock would stall the run, but a process can be killed. Each process
constructs the task and the same items, and decodes completions. A call consists of its number, the number of an item,
its level in a curriculum, and the lengths and token ids of its completions as 32-bit integers, or -1 instead of these
to request the item itself. Answers, and the message that the process is ready, are JSON. A process ends when its
standard input ends, even while it computes rewards.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from inflight.base.tasks import cancel_and_wait, finish_all, start
from inflight.contracts import Task
from inflight.errors import TaskError
from inflight.model.checkpoints import load_tokenizer
from inflight.rollouts.tasks import TaskSettings
from inflight.run.sampling.user_code import describe_error, item_of, json_of, rewards_of
from inflight.types import TaskItem

_HEAD = struct.Struct("<QQIi")
"""Number of the call, index of the item, its level (0 without a curriculum) and number of its completions."""
_ITEM = -1
"""In a call that requests the item itself, this takes the place of the number of completions."""
_READY = 0
"""The number of the call that is answered once the process is ready."""
_SIZE = struct.Struct("<I")
_STOP_S = 2.0
_PR_SET_PDEATHSIG = 1
_NUM_KEPT = 4096
"""Number of items that a process keeps until it scores them."""

How = Literal["together", "in turn"]
"""Whether a process answers each call in its own thread, or all calls one after another in its main thread."""


@dataclass(eq=False)
class ScoringPool:
    """Up to ``size`` processes, started when they are needed. Use it in one event loop only.

    If ``how`` is "together", one process answers all calls.
    """

    size: int
    task: TaskSettings
    seed: int
    model: Path
    start_timeout_s: float
    how: How = "in turn"
    _idle: list[_Process] = field(default_factory=list, init=False)
    _all: set[_Process] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.size)
        self._starting = asyncio.Lock()

    async def open(self) -> None:
        """Start the first process. Raises `TaskError`."""
        async with self._process():
            pass

    async def item(self, index: int, level: int, timeout_s: float, what: str) -> TaskItem:
        """Return an item, with the metadata that JSON can represent. Raises the same errors as `rewards`."""
        answer = await self._ask(_HEAD.pack(0, index, level, _ITEM), timeout_s, what)
        return TaskItem(**answer["item"])

    async def rewards(
        self, item: TaskItem, completions: Sequence[Sequence[int]], timeout_s: float, what: str
    ) -> list[float]:
        """Return the reward of each completion of an item. A process that does not answer in time is killed.

        Raises `TaskError`, including when ``what`` takes too long; the wait for a process does not count.
        """
        level = item.metadata.get("level", 0)
        lengths = array("I", map(len, completions))
        ids = [array("I", token_ids).tobytes() for token_ids in completions]
        request = b"".join((_HEAD.pack(0, item.index, level, len(lengths)), lengths.tobytes(), *ids))
        return [float(reward) for reward in (await self._ask(request, timeout_s, what))["rewards"]]

    async def aclose(self) -> None:
        """End the processes; those that are computing rewards are killed."""
        await finish_all(*(process.stop() for process in self._all))
        self._all.clear()
        self._idle.clear()

    async def _ask(self, request: bytes, timeout_s: float, what: str) -> dict[str, Any]:
        try:
            async with self._process() as process, asyncio.timeout(timeout_s):
                answer = await process.ask(request, what)
        except TimeoutError as error:
            raise TaskError(f"{what} took longer than {timeout_s:g} s") from error
        if "error" in answer:
            raise TaskError(answer["error"])
        return answer

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncIterator[_Process]:
        if self.how == "together":
            async with self._starting:
                process = next((it for it in self._all if it.is_running), None) or await self._start()
            yield process
            return
        async with self._room:
            process = self._idle.pop() if self._idle else await self._start()
            is_idle = False
            try:
                yield process
                is_idle = True
            finally:
                if is_idle:
                    self._idle.append(process)
                else:
                    await process.stop()
                    self._all.discard(process)

    async def _start(self) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "inflight.run.sampling.scoring", str(theirs.fileno()), self.how]
            command += [self.task.model_dump_json(), str(self.seed), str(self.model)]
            child = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, pass_fds=(theirs.fileno(),), start_new_session=True
            )
        process = _Process(child, *await asyncio.open_connection(sock=ours))
        self._all.add(process)
        try:
            async with asyncio.timeout(self.start_timeout_s):
                await process.answer(_READY, "the task was being loaded")
        except TimeoutError as error:
            raise TaskError(f"the process of the task was not ready within {self.start_timeout_s:g} s") from error
        return process


class _Process:
    def __init__(
        self, child: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.child = child
        self._reader = reader
        self._writer = writer
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {_READY: asyncio.get_running_loop().create_future()}
        self._num_calls = 0
        self._reading = start(self._read())

    @property
    def is_running(self) -> bool:
        return not self._reading.done()

    async def ask(self, request: bytes, what: str) -> dict[str, Any]:
        """Return the answer to a call. Raises `TaskError` if the process ends."""
        self._num_calls += 1
        number = self._num_calls
        self._answers[number] = asyncio.get_running_loop().create_future()
        with contextlib.suppress(OSError):  # the process has ended, which is noticed below
            self._writer.write(number.to_bytes(8, "little") + request[8:])
            await self._writer.drain()
        return await self.answer(number, what)

    async def answer(self, number: int, during: str) -> dict[str, Any]:
        answer = self._answers[number]
        try:
            ends: list[asyncio.Future[Any]] = [answer, self._reading]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                code = await self.child.wait()
                raise TaskError(f"the process of the task ended with status {code}: {during}; its output states why")
            return answer.result()
        finally:
            del self._answers[number]

    async def _read(self) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                (size,) = _SIZE.unpack(await self._reader.readexactly(_SIZE.size))
                answer: dict[str, Any] = json.loads(await self._reader.readexactly(size))
                if (asked := self._answers.get(answer["call"])) is not None and not asked.done():
                    asked.set_result(answer)

    async def stop(self) -> None:
        self._writer.close()
        assert self.child.stdin is not None
        self.child.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await self.child.wait()
        except TimeoutError:
            self.child.kill()
            await self.child.wait()
        finally:
            await cancel_and_wait(self._reading)


# --------------------------------------------------------------------------------------------------- in the process


class _Answering:
    """Answers calls until the run closes its end of the connection."""

    def __init__(self, connection: socket.socket, task: Task, tokenizer: Any) -> None:
        self._connection = connection
        self._task = task
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._items: OrderedDict[tuple[int, int], TaskItem] = OrderedDict()
        """Items that were made but not yet scored, by level and index, so that a task need not make them twice."""

    def answer_calls(self, stream: BinaryIO, how: How) -> None:
        self._send({"call": _READY})
        while (call := self._next_call(stream)) is not None:
            if how == "together":
                threading.Thread(target=self._answer, args=call, daemon=True, name=f"item-{call[2]}").start()
            else:
                self._answer(*call)

    def _next_call(self, stream: BinaryIO) -> tuple[int, int, int, list[array[int]] | None] | None:
        """Return the number, level and item of the next call, and the completions to score; None if the run has ended.

        A run that ends before it has read every answer resets the connection.
        """
        with contextlib.suppress(ConnectionResetError):
            if head := stream.read(_HEAD.size):
                number, index, level, num_completions = _HEAD.unpack(head)
                if num_completions == _ITEM:
                    return number, level, index, None
                lengths = array("I", stream.read(4 * num_completions))
                return number, level, index, [array("I", stream.read(4 * length)) for length in lengths]
        return None

    def _answer(self, number: int, level: int, index: int, completions: Sequence[Sequence[int]] | None) -> None:
        """Answer one call. An exception raised by the task is sent as the answer."""
        answer: dict[str, Any] = {"call": number}
        try:
            if completions is None:
                item = item_of(self._task, index, level)
                answer["item"] = json_of(item)
                self._keep((level, index), item)
            else:
                item = self._kept((level, index)) or item_of(self._task, index, level)
                texts = [self._tokenizer.decode(list(ids), skip_special_tokens=True) for ids in completions]
                answer["rewards"] = rewards_of(self._task, item, texts)
        except TaskError as error:
            answer["error"] = str(error)
        except Exception as error:  # such as token ids that the tokenizer does not have
            answer["error"] = f"item {index} of task {self._task.name!r} cannot be scored: {describe_error(error)}"
        self._send(answer)

    def _kept(self, key: tuple[int, int]) -> TaskItem | None:
        with self._lock:
            return self._items.pop(key) if key in self._items else None

    def _keep(self, key: tuple[int, int], item: TaskItem) -> None:
        with self._lock:
            self._items[key] = item
            if len(self._items) > _NUM_KEPT:
                self._items.popitem(last=False)

    def _send(self, answer: Mapping[str, Any]) -> None:
        content = json.dumps(answer).encode()
        with self._lock, contextlib.suppress(OSError):  # a run that has ended needs no answer
            self._connection.sendall(_SIZE.pack(len(content)) + content)


def _end_with_the_run() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


def main() -> None:
    """Run one process of a task. It ignores SIGINT, which the run handles."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # code that holds the lock keeps all threads waiting
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    descriptor, how, settings, seed, model = sys.argv[1:]
    connection = socket.socket(fileno=int(descriptor))
    os.set_inheritable(connection.fileno(), False)  # so that processes started by the task do not keep it open
    task = TaskSettings.model_validate_json(settings).load(int(seed))
    assert isinstance(task, Task), (
        "a scoring process was started for an environment, but environments are played in the process of the run"
    )
    tokenizer = load_tokenizer(Path(model))
    with connection.makefile("rb") as stream:
        _Answering(connection, task, tokenizer).answer_calls(stream, "together" if how == "together" else "in turn")


if __name__ == "__main__":
    main()

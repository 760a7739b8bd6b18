"""The trainer ranks as the run sees them: one group that is started, fed, told to save, and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from inflight.errors import InflightError, WorkerDiedError, error_from_code
from inflight.pipeline.channel import encode
from inflight.pipeline.config import RunConfig
from inflight.pipeline.messages import (
    Answer,
    Doing,
    Done,
    Failed,
    FinishSave,
    Members,
    Message,
    Publish,
    Save,
    Start,
    Trained,
)
from inflight.pipeline.processes import NUM_LINES, STOP_S, Rank, start_ranks
from inflight.weights.transports.private_directory import remove_left_behind
from inflight.weights.transports.shared_memory import memory_directory

A = TypeVar("A", bound=Answer)

_ANSWER_S = 10.0
"""How long a rank that gave up waiting may take to say so."""
_STOP_AFTER_FAILURE_S = 2.0
"""How long ranks may take to end once one has failed, for which others may wait in a collective."""
_GRACE_S = 2.0
"""How long after a rank that lost another one the cause may take to show."""
_TOGETHER_S = 0.2
"""Within which ranks fail that fail together."""


class TrainerGroup:
    """All ranks of one run. Every call asks all of them; what a rank answers instead is raised in its own words.

    What they warn of goes to ``on_warning``, once.
    """

    def __init__(
        self, config: RunConfig, logs: Path, token: str, on_warning: Callable[[str], None], lock: int | None = None
    ) -> None:
        self._config = config
        self._logs = logs
        self._token = token
        self._on_warning = on_warning
        self._lock = lock
        self._asking = asyncio.Lock()
        self._warned: set[str] = set()
        self.ranks: Sequence[Rank] = ()

    async def spawn(self) -> None:
        """Start the processes, which inherit ``lock``; they load nothing yet."""
        self.ranks = await start_ranks(self._config, self._logs, self._token, self._lock)

    async def load_and_connect(self, urls: Sequence[str], run_id: str, checkpoint: Path | None) -> Done:
        """Load model (or checkpoint), form the weight group, bring the servers to the present weights.

        Returns rank 0's answer.
        """
        start = Start(config=self._config, run_id=run_id, urls=tuple(urls), checkpoint=checkpoint)
        timeout_s = self._config.run.start_timeout_s + self._config.servers.publish_deadline_s
        return (await self._ask_alike(start, timeout_s))[0]

    async def train(self, frames: Sequence[bytes]) -> list[Trained]:
        """Take one optimizer step on each rank's frame; returns every rank's answer."""
        return await self._ask(frames, Trained, self._config.run.step_timeout_s)

    async def publish(self, members: Members) -> Done:
        """Publish the present version to whoever answers, once the ranks are free; returns rank 0's answer.

        Every server that was left out is asked, whatever its pause.
        """
        request = Publish(members=members.model_copy(update={"ask_all": True}))
        return (await self._ask_alike(request, self._config.run.step_timeout_s))[0]

    async def save(self, path: Path) -> list[Done]:
        """Write a checkpoint of the workers; returns every rank's answer.

        If the run saves in the background, the workers wait for an earlier save, copy their state and begin to write
        it. Answers say, as ``saved``, the version whose save has ended on that rank.
        """
        waits_for_another = self._config.run.background_saves
        return await self._ask_alike(Save(path=path), self._config.run.step_timeout_s * (1 + waits_for_another))

    async def finish_save(self) -> list[Done]:
        """Wait until the save that was begun has ended on every rank; returns every rank's answer."""
        return await self._ask_alike(FinishSave(), self._config.run.step_timeout_s + _ANSWER_S)

    async def watch(self) -> None:
        """Wait for a rank to end. Raises `WorkerDiedError` with its last words, after whoever asks it was told."""
        ends = {asyncio.ensure_future(rank.process.wait()): rank for rank in self.ranks}
        try:
            ended, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ends:
                task.cancel()
        async with self._asking:
            raise WorkerDiedError(ends[next(iter(ended))].how_it_ended())

    async def stop(self) -> None:
        """End the ranks' input, wait for them to end, and remove the weights that a killed one has left."""
        for rank in self.ranks:
            rank.channel.close()
        await asyncio.gather(*(rank.stop() for rank in self.ranks))
        for parent in {memory_directory(), Path(tempfile.gettempdir())}:
            with contextlib.suppress(OSError):  # nobody may be told at the end; the next run tries it again
                remove_left_behind(parent)

    async def _ask_alike(self, request: Message, timeout_s: float) -> list[Done]:
        return await self._ask([encode(request)] * len(self.ranks), Done, timeout_s)

    async def _ask(self, frames: Sequence[bytes], kind: type[A], timeout_s: float) -> list[A]:
        try:
            async with self._asking:
                answers = await _ask_all(self.ranks, frames, kind, timeout_s)
        except InflightError:
            for rank in self.ranks:
                rank.stop_s = _STOP_AFTER_FAILURE_S
            raise
        for text in (text for answer in answers for text in answer.warnings if text not in self._warned):
            self._warned.add(text)
            self._on_warning(text)
        return answers


# ------------------------------------------------------------------------------------------ one question to all ranks


class _RankError(Exception):
    """A rank answered an error, or died."""

    def __init__(self, rank: Rank, error: InflightError, *, blames_another: bool = False) -> None:
        super().__init__(str(error))
        self.rank = rank
        self.error = error
        self.blames_another = blames_another


async def _ask_all(ranks: Sequence[Rank], frames: Sequence[bytes], kind: type[A], timeout_s: float) -> list[A]:
    """Send each rank its frame and return every answer, all of one ``kind``.

    The first rank that dies or answers an error ends the wait, whatever the others wait for: `WorkerDiedError` with its
    last words, or the error, and its name where others did not say the same. A rank that only lost the connection to
    another is believed to be the cause if nothing else shows within two seconds. Ranks are not to be asked again after
    a failure.
    """
    asking = [asyncio.ensure_future(_ask_one(rank, frame, kind)) for rank, frame in zip(ranks, frames, strict=True)]
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.wait(asking, return_when=asyncio.FIRST_EXCEPTION)
        failures = await _failures(asking)
    except TimeoutError as error:
        waiting = [rank for rank, task in zip(ranks, asking, strict=True) if not task.done()]
        silent = ", ".join(rank.during(rank.name) for rank in waiting)
        raise WorkerDiedError(f"no answer within {timeout_s:g} s: {silent}") from error
    finally:
        for task in asking:
            task.cancel()
    if failures:
        cause = min(failures, key=lambda failure: failure.blames_another)
        raise _named(cause, failures, len(ranks)) from cause
    return [task.result() for task in asking]


async def _ask_one(rank: Rank, frame: bytes, kind: type[A]) -> A:
    """Return the answer of one rank. Raises `_RankError`."""
    try:
        await rank.channel.send(frame)
        while isinstance(reply := await rank.channel.receive(), Doing):
            rank.doing = reply.what
    except WorkerDiedError as error:
        raise _RankError(rank, WorkerDiedError(await _last_words(rank))) from error
    except InflightError as error:
        raise _RankError(rank, error) from error
    if isinstance(reply, Failed):
        if reply.code is not None:
            said = error_from_code(reply.code, reply.message)
        else:
            lines = "\n".join(f"    {line}" for line in reply.traceback.strip().splitlines()[-NUM_LINES:])
            said = WorkerDiedError(rank.during(f"{rank.name} failed: {reply.message}\n{lines}"))
        raise _RankError(rank, said, blames_another=reply.blames_another_rank)
    assert isinstance(reply, kind)
    rank.doing = ""
    return reply


async def _last_words(rank: Rank) -> str:
    """Say how a rank ended whose channel is closed."""
    try:
        async with asyncio.timeout(STOP_S):
            await rank.process.wait()
    except TimeoutError:
        return rank.during(f"{rank.name} closed its channel to the run and goes on")
    return rank.how_it_ended()


async def _failures(asking: Sequence[asyncio.Future[A]]) -> list[_RankError]:
    """Return the failures of ranks of which one has failed, once the cause is likely to be among them."""
    started = time.monotonic()
    while True:
        failures, waiting = [], [task for task in asking if not task.done()]
        for task in asking:
            try:
                _ = task.done() and task.result()
            except _RankError as failure:
                failures.append(failure)
        grace_s = _GRACE_S if all(failure.blames_another for failure in failures) else _TOGETHER_S
        rest_s = started + grace_s - time.monotonic()
        if not failures or not waiting or rest_s <= 0:
            return failures
        await asyncio.wait(waiting, timeout=rest_s, return_when=asyncio.FIRST_COMPLETED)


def _named(cause: _RankError, failures: Sequence[_RankError], num_ranks: int) -> InflightError:
    """Return the error of a rank with its name, unless all say the same or the error names one already."""
    text, name = str(cause.error), cause.rank.name
    all_say_so = len(failures) == num_ranks and len({str(failure.error) for failure in failures}) == 1
    if all_say_so or name in text or text.startswith("rank "):
        return cause.error
    return error_from_code(cause.error.code, f"{name}: {text}")

"""The group of trainer ranks, which the run starts, sends requests to, and stops."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from inflight.base.tasks import any_of, cancel_and_wait, finish_all, result_unless, start
from inflight.errors import InflightError, WorkerDiedError, error_from_code
from inflight.launchers import Launcher, LocalLauncher
from inflight.rollouts.packing import Packing
from inflight.run.config import RunConfig
from inflight.run.machines.placement import GpuPlacement, place
from inflight.run.machines.processes import NUM_LINES, STOP_S, Rank, start_ranks
from inflight.run.machines.time_limits import TimeLimits, time_limits
from inflight.run.ranks.channel import encode
from inflight.run.ranks.messages import (
    Accumulated,
    Done,
    Failed,
    FinishSave,
    Load,
    Members,
    Message,
    OptimizerStep,
    PublishAs,
    PublishPresent,
    RankAnswer,
    Ready,
    Save,
    Start,
    StatusMessage,
    Stepped,
    Trained,
)
from inflight.types import AdamSettings
from inflight.weights.transports.private_directory import memory_directory, remove_left_behind

A = TypeVar("A", bound=RankAnswer)
T = TypeVar("T")

_ANSWER_S = 10.0
"""How long a rank may take to report that its own wait has timed out."""
_STOP_AFTER_FAILURE_S = 2.0
"""How long ranks may take to end once a rank has failed: the others may be waiting for it in a collective."""
_GRACE_S = 2.0
"""How long to wait for the cause after a rank reports that it has lost another rank."""
_TOGETHER_S = 0.2
"""How long to wait for errors of other ranks that fail at the same time."""


@dataclass(eq=False)
class TrainerGroup:
    """All ranks of one run. Every call sends a request to all ranks, and raises the error of any rank that fails."""

    config: RunConfig
    logs: Path
    token: str
    on_note: Callable[[str], None]
    """Called once for each distinct note of a rank."""
    lock: int | None = None
    """The descriptor of the run directory's lock, which the ranks' processes inherit."""
    places: Sequence[GpuPlacement] = ()
    """The name and GPUs of each rank. If empty, `place` names ranks as on a machine without GPUs."""
    launcher: Launcher = field(default_factory=LocalLauncher)
    ranks: Sequence[Rank] = ()
    data_ranks: Sequence[int] = ()
    """The share of each step's data that each rank computes; known once the model is loaded."""
    ready: Ready | None = None
    """Rank 0's answer once the model is loaded."""
    shares_prefixes: bool = False
    """Whether all ranks compute common prefixes once; known once the model is loaded."""

    def __post_init__(self) -> None:
        self._note_once = functools.cache(self.on_note)
        self._asking = asyncio.Lock()

    @functools.cached_property
    def limits(self) -> TimeLimits:
        """How long the ranks may take for each request."""
        return time_limits(self.config)

    async def spawn(self) -> None:
        """Start the processes, which do not load the model yet."""
        places = self.places or place(self.config, ()).trainers
        self.ranks = await start_ranks(self.config, self.logs, self.token, self.lock, places, self.launcher)

    @property
    def num_shares(self) -> int:
        """The number of shares of the data. Each share is computed by one or several ranks."""
        return max(self.data_ranks) + 1

    @property
    def packing(self) -> Packing:
        """How the data of each step is divided; known once the model is loaded."""
        return Packing(self.config.train.max_tokens_per_micro_batch, self.num_shares, self.shares_prefixes)

    async def load_and_connect(self, members: Members | None, run_id: str, checkpoint: Path | None) -> Ready:
        """Load the model or a checkpoint, connect to the servers if there are any, and update them to these weights.

        Returns rank 0's answer.
        """
        start = Start(
            config=self.config,
            run_id=run_id,
            members=members,
            checkpoint=checkpoint,
            rendezvous=await self._wait_for_ranks(),
        )
        timeout_s = self.config.run.start_timeout_s + self.limits.publish_s
        answers = await self._ask([encode(start)] * len(self.ranks), Ready, timeout_s)
        self.data_ranks = [answer.data_rank for answer in answers]
        self.ready = answers[0]
        self.shares_prefixes = all(answer.shares_prefixes for answer in answers)
        return answers[0]

    async def _wait_for_ranks(self) -> str:
        """Wait until every rank has connected; return the address at which the others reach rank 0."""
        timeout_s = self.config.run.start_timeout_s
        async with self._in_turn():
            return (await _all_of(self.ranks, [_rendezvous_of(rank) for rank in self.ranks], timeout_s))[0]

    async def train(self, frames: Sequence[bytes]) -> list[Trained]:
        """Take one optimizer step on the data of all shares, one frame per share; return every rank's answer.

        If several ranks compute a share together, only the answer of the first has metrics and logprobs.
        """
        answers = await self._ask([frames[share] for share in self.data_ranks], Trained, self.limits.step_s)
        firsts = {share: rank for rank, share in reversed(list(enumerate(self.data_ranks)))}
        return [
            answer if rank in firsts.values() else answer.model_copy(update={"metrics": {}, "logprobs": ()})
            for rank, answer in enumerate(answers)
        ]

    def by_share(self, answers: Sequence[Trained]) -> list[Trained]:
        """Return the answer of each share's first rank."""
        return [answers[self.data_ranks.index(share)] for share in range(self.num_shares)]

    async def publish(self, members: Members) -> Done:
        """Publish the current version, for the first time or again, once the ranks are free; return rank 0's answer.

        The publish retries every server that was left out, without waiting for its backoff. If an earlier publish of
        this version is still in progress, its result is returned instead.
        """
        request = PublishPresent(members=members.model_copy(update={"ask_all": True}))
        return (await self._ask_alike(request, self.limits.step_s))[0]

    async def save(self, path: Path) -> list[Done]:
        """Write a checkpoint of the workers; return every rank's answer.

        If the run saves in the background, the workers wait for an earlier save, copy their state and start writing the
        copy. A publish that overlaps training ends first.
        """
        waits_for_another = self.config.run.background_saves
        publish_s = self.limits.step_s if self.config.updates.overlap else 0.0
        return await self._ask_alike(Save(path=path), self.limits.save_s * (1 + waits_for_another) + publish_s)

    async def finish_save(self) -> list[Done]:
        """Wait until every rank has completed the pending save; return every rank's answer."""
        return await self._ask_alike(FinishSave(), self.limits.save_s + _ANSWER_S)

    async def watch(self) -> None:
        """Wait until a rank has ended and no request is in progress; then raise `WorkerDiedError`.

        The error contains the end of the rank's log.
        """
        number, _ = await any_of(*(rank.process.wait() for rank in self.ranks))
        async with self._asking:
            raise WorkerDiedError(self.ranks[number].how_it_ended())

    async def stop(self) -> None:
        """Close the ranks' input, wait for them to end, and remove stored weights that a killed rank left behind."""
        for rank in self.ranks:
            rank.meeting.close()
        await finish_all(*(rank.stop() for rank in self.ranks))
        for parent in {memory_directory(), Path(tempfile.gettempdir())}:
            with contextlib.suppress(OSError):  # harmless at the end; the next run tries again
                remove_left_behind(parent)

    async def _ask_alike(self, request: Message, timeout_s: float) -> list[Done]:
        return await self._ask([encode(request)] * len(self.ranks), Done, timeout_s)

    @contextlib.asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        """Wait until no other request to the ranks is in progress."""
        try:
            async with self._asking:
                yield
        except InflightError:
            for rank in self.ranks:
                rank.stop_s = _STOP_AFTER_FAILURE_S
            raise

    async def _ask(self, frames: Sequence[bytes], kind: type[A], timeout_s: float) -> list[A]:
        async with self._in_turn():
            calls = [_ask_one(*it, kind) for it in zip(self.ranks, frames, strict=True)]
            answers = await _all_of(self.ranks, calls, timeout_s)
        for answer in answers:
            for text in answer.notes:
                self._note_once(text)
        for answer in answers:
            if answer.refusal is not None:
                raise error_from_code(*answer.refusal)
        return answers

    # ------------------------------------------------------------------------------- training that others control

    async def accumulate(self, frames: Sequence[bytes]) -> list[Accumulated]:
        """Accumulate the gradient of all shares, one frame per share; return the answer of each share's first rank."""
        answers = await self._ask([frames[share] for share in self.data_ranks], Accumulated, self.limits.step_s)
        return [answers[self.data_ranks.index(share)] for share in range(self.num_shares)]

    async def step(self, settings: AdamSettings) -> Stepped:
        """Take an optimizer step with these settings.

        Raises `TrainerError` and `NonFiniteError` as `TrainerWorker.step` does; training can continue after either.
        """
        frame = encode(OptimizerStep(settings=asdict(settings)))
        return (await self._ask([frame] * len(self.ranks), Stepped, self.limits.step_s))[0]

    async def load(self, path: Path, *, optimizer: bool) -> None:
        """Load a checkpoint. If this raises `CheckpointError`, nothing was loaded."""
        await self._ask_alike(Load(path=path, optimizer=optimizer), self.limits.save_s)

    async def publish_as(self, urls: Sequence[str], version: int, *, regroup: bool) -> None:
        """Publish the current weights to servers under this version.

        Raises `PublishError` if a server did not apply it; the ranks still accept requests afterwards.
        """
        await self._ask_alike(PublishAs(urls=tuple(urls), version=version, regroup=regroup), self.limits.step_s)


# ------------------------------------------------------------------------------------------ one request to all ranks


class _RankError(Exception):
    def __init__(self, rank: Rank, error: InflightError, *, blames_another: bool = False) -> None:
        super().__init__(str(error))
        self.rank = rank
        self.error = error
        self.blames_another = blames_another


async def _all_of(ranks: Sequence[Rank], calls: Iterable[Coroutine[Any, Any, T]], timeout_s: float) -> list[T]:
    """Return every rank's answer to its call.

    The first rank that dies or answers with an error ends the wait for all ranks. Raises `WorkerDiedError` with the end
    of a dead rank's log, or the error of a rank; the error names the rank unless all ranks report the same one. A rank
    that has merely lost its connection to another counts as the cause only if no other cause appears within two
    seconds. After a failure, send no more requests to the ranks.
    """
    asking = [start(call) for call in calls]
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.wait(asking, return_when=asyncio.FIRST_EXCEPTION)
        failures = await _failures(asking)
    except TimeoutError as error:
        waiting = [rank for rank, task in zip(ranks, asking, strict=True) if not task.done()]
        silent = ", ".join(rank.during(rank.name) for rank in waiting)
        raise WorkerDiedError(f"no answer within {timeout_s:g} s: {silent}") from error
    finally:
        await cancel_and_wait(*asking)
    if failures:
        cause = min(failures, key=lambda failure: failure.blames_another)
        raise _with_rank_name(cause, failures, len(ranks)) from cause
    return [task.result() for task in asking]


async def _ask_one(rank: Rank, frame: bytes, kind: type[A]) -> A:
    """Return the answer of one rank. Raises `_RankError`."""

    async def answer() -> Message:
        channel = await rank.channel()
        await channel.send(frame)
        while isinstance(reply := await channel.receive(), StatusMessage):
            rank.doing = reply.what
        return reply

    reply = await _cancel_if_lost(rank, answer())
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


async def _rendezvous_of(rank: Rank) -> str:
    """Return the address at which the other ranks reach this one. Raises `_RankError`."""
    rendezvous = await _cancel_if_lost(rank, rank.rendezvous())
    rank.doing = ""
    return rendezvous


async def _cancel_if_lost(rank: Rank, call: Coroutine[Any, Any, T]) -> T:
    """Await a call to a rank, and cancel it soon after the process of the rank has ended. Raises `_RankError`.

    Cancelling is necessary because a lost host does not close its connections.
    """
    lost = WorkerDiedError(f"{rank.name} has ended or is unreachable")
    try:
        # Its last message may still be in transit.
        return await result_unless(call, rank.process.wait(), lambda: lost, _GRACE_S)
    except WorkerDiedError as error:
        raise _RankError(rank, WorkerDiedError(await _how_it_ended(rank))) from error
    except InflightError as error:
        raise _RankError(rank, error) from error


async def _how_it_ended(rank: Rank) -> str:
    try:
        async with asyncio.timeout(STOP_S):
            await rank.process.wait()
    except TimeoutError:
        return rank.during(f"{rank.name} closed its channel to the run but is still running")
    return rank.how_it_ended()


async def _failures(asking: Sequence[asyncio.Future[T]]) -> list[_RankError]:
    """Return the failures of the ranks, after a short wait that lets the cause appear among them."""
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


def _with_rank_name(cause: _RankError, failures: Sequence[_RankError], num_ranks: int) -> InflightError:
    """Return a rank's error, with the rank's name added unless all ranks report the same error or it names a rank."""
    text, name = str(cause.error), cause.rank.name
    all_say_so = len(failures) == num_ranks and len({str(failure.error) for failure in failures}) == 1
    if all_say_so or name in text or text.startswith("rank "):
        return cause.error
    return error_from_code(cause.error.code, f"{name}: {text}")

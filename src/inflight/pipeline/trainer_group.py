"""The trainer ranks as the run sees them: one group that is started, fed, told to save, and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from inflight.errors import InflightError, WorkerDiedError
from inflight.pipeline.channel import Message, encode
from inflight.pipeline.config import RunConfig, ServersSection
from inflight.pipeline.processes import Rank, ask, start_ranks
from inflight.weights.transports.private_directory import remove_left_behind
from inflight.weights.transports.shared_memory import memory_directory

_ANSWER_S = 10.0
"""How long a rank that gave up waiting may take to say so."""
_STOP_AFTER_FAILURE_S = 2.0
"""How long ranks may take to end once one has failed, for which others may wait in a collective."""


class TrainerGroup:
    """All ranks of one run. Every call asks all of them; what a rank answers instead is raised in its own words."""

    def __init__(self, config: RunConfig, ranks: Sequence[Rank], on_warning: Callable[[str], None] = print) -> None:
        self._config = config
        self._asking = asyncio.Lock()
        self._on_warning = on_warning
        self._warned: set[str] = set()
        self.ranks = ranks

    @classmethod
    async def spawn(
        cls, config: RunConfig, logs: Path, token: str, on_warning: Callable[[str], None], lock: int | None = None
    ) -> TrainerGroup:
        """Start the processes, which inherit ``lock``; they load nothing yet.

        What they warn of goes to ``on_warning``, once.
        """
        return cls(config, await start_ranks(config, logs, token, lock), on_warning)

    async def load_and_connect(self, urls: Sequence[str], run_id: str, checkpoint: Path | None) -> Message:
        """Load model (or checkpoint), form the weight group, bring the servers to the present weights.

        Returns rank 0's version and publish report.
        """
        config = self._config
        train = config.train
        message = {
            "type": "start",
            "worker": train.trainer,
            "worker_settings": {
                "model_path": str(config.model.path),
                "dtype": config.model.dtype,
                "master_dtype": train.master_dtype,
                "wire_dtype": config.model.dtype,
                "learning_rate": train.learning_rate,
                "weight_decay": train.weight_decay,
                "max_gradient_norm": train.max_gradient_norm,
                "warmup_steps": train.warmup_steps,
                "schedule": train.schedule,
                "total_steps": config.run.num_steps,
                **train.trainer_options,
            },
            "threads": train.threads,
            "loss": config.loss.policy_loss().model_dump(mode="json"),
            "background_saves": config.run.background_saves,
            "checkpoint": None if checkpoint is None else str(checkpoint),
            "urls": list(urls),
            "run_id": run_id,
            **_how_weights_travel(config.servers),
            "in_flight": config.servers.in_flight.value,
            "publish_deadline_s": config.servers.publish_deadline_s,
        }
        timeout_s = config.run.start_timeout_s + config.servers.publish_deadline_s
        return (await self._ask([encode(message)] * len(self.ranks), timeout_s))[0]

    async def train(self, frames: Sequence[bytes]) -> list[Message]:
        """Take one optimizer step on each rank's frame; returns every rank's answer."""
        return await self._ask(frames, self._config.run.step_timeout_s)

    async def publish(self, members: Mapping[str, Sequence[str]]) -> Message:
        """Publish the present version to whoever answers, once the ranks are free; returns rank 0's answer.

        ``members`` says which URLs ``join`` and which names ``leave`` first, and that servers have ``restarted``.
        """
        message = encode({"type": "publish", **members})
        return (await self._ask([message] * len(self.ranks), self._config.run.step_timeout_s))[0]

    async def save(self, path: Path) -> None:
        """Write a checkpoint of the workers."""
        message = encode({"type": "save", "path": str(path)})
        await self._ask([message] * len(self.ranks), self._config.run.step_timeout_s)

    async def begin_save(self, path: Path) -> list[Message]:
        """Have the workers copy their state and begin to write it; returns every rank's answer.

        An earlier save is waited for first. The answers to it and to later messages say, under ``saved``, the version
        whose save has ended on that rank.
        """
        timeout_s = self._config.run.step_timeout_s
        message = encode({"type": "begin_save", "path": str(path), "timeout_s": timeout_s})
        return await self._ask([message] * len(self.ranks), 2 * timeout_s)

    async def finish_save(self) -> list[Message]:
        """Wait until the save that was begun has ended on every rank; returns every rank's answer."""
        timeout_s = self._config.run.step_timeout_s
        message = encode({"type": "finish_save", "timeout_s": timeout_s})
        return await self._ask([message] * len(self.ranks), timeout_s + _ANSWER_S)

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

    async def _ask(self, frames: Sequence[bytes], timeout_s: float) -> list[Message]:
        try:
            async with self._asking:
                answers = await ask(self.ranks, frames, timeout_s)
        except InflightError:
            for rank in self.ranks:
                rank.stop_s = _STOP_AFTER_FAILURE_S
            raise
        for text in (text for answer in answers for text in answer["warnings"] if text not in self._warned):
            self._warned.add(text)
            self._on_warning(text)
        return answers


def _how_weights_travel(servers: ServersSection) -> Message:
    """What rank 0's publisher and fleet are made with. A directory is named as all processes see it."""
    return {
        "updates": servers.updates,
        "backend": servers.backend,
        "directory": None if servers.directory is None else str(servers.directory.absolute()),
        "quorum": servers.quorum,
        "encoding": servers.encoding,
        "delta": servers.delta,
        "staged": servers.staged,
    }

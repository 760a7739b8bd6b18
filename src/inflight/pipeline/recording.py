"""A run keeps what decided its steps: `inflight.trace.records` is the format, and here is when it is written.

Steps are written in a thread, one behind the training. A checkpoint begins once every step before it is written, so
that a killed run continues with a whole record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from inflight.pipeline.batches import StepBatch, logprobs_of_samples
from inflight.pipeline.checkpoints import latest_checkpoint
from inflight.pipeline.config import RunConfig
from inflight.pipeline.messages import Trained
from inflight.trace.digests import weights_digest
from inflight.trace.records import (
    MANIFEST,
    RECORD,
    Manifest,
    RecordWriter,
    Weights,
    read_manifest,
)
from inflight.trace.steps import Outcome, RecordedStep


class Recording:
    """Writes the record in the directory of a run.

    Every call raises `CheckpointError` if a step cannot be written; earlier steps are whole then.
    """

    def __init__(self, config: RunConfig, directory: Path) -> None:
        self._config = config
        self._directory = directory
        self._writer = RecordWriter(directory / RECORD)
        self._manifest = Manifest(
            config=config.model_dump(mode="json", exclude_unset=True), num_ranks=config.train.num_ranks
        )
        self._writing: asyncio.Task[None] | None = None

    async def begin(self, version: int) -> None:
        """Write down what training starts from; of a run resumed at ``version``, as it was."""
        if version and (self._writer.directory / MANIFEST).exists():
            start = read_manifest(self._writer.directory).start
        else:
            start = await asyncio.to_thread(weights_of, self._config.model.path)
        self._manifest = self._manifest.model_copy(update={"start": start})
        await asyncio.to_thread(self._writer.begin, self._manifest)

    async def step(self, batch: StepBatch, by_share: Sequence[Trained]) -> None:
        """Begin to write a step, once the step before is written; ``by_share`` is what came of each share."""
        await self.written()
        self._writing = asyncio.create_task(asyncio.to_thread(self._write, batch, by_share))

    async def written(self) -> None:
        """Wait until every step is written."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    async def finish(self) -> None:
        """Write down the last checkpoint, once every step is written."""
        await self.written()
        await asyncio.to_thread(self._write_final)

    def _write(self, batch: StepBatch, by_share: Sequence[Trained]) -> None:
        self._writer.write_step(recorded(batch, by_share, self._config.train.max_tokens_per_micro_batch))

    def _write_final(self) -> None:
        checkpoint, state = latest_checkpoint(self._directory)
        if checkpoint is not None and state is not None:
            final = {"final": weights_of(checkpoint), "final_version": state["version"]}
            self._writer.write_manifest(self._manifest.model_copy(update=final))


def recorded(batch: StepBatch, by_share: Sequence[Trained], max_tokens: int) -> RecordedStep:
    """Return a step as it is recorded, from the answers to `frames_of` with ``max_tokens``."""
    return RecordedStep(
        version=batch.version,
        groups=batch.groups,
        samples=batch.samples,
        trainer_logprobs=logprobs_of_samples(batch.samples, max_tokens, [answer.logprobs for answer in by_share]),
        outcome=outcome_of(by_share),
    )


def outcome_of(by_share: Sequence[Trained]) -> Outcome:
    """Return what a step did, from the answer of each share."""
    return Outcome(
        gradient_norm=by_share[0].gradient_norm,
        learning_rate=by_share[0].learning_rate,
        metrics=tuple(answer.metrics for answer in by_share),
    )


def weights_of(directory: Path) -> Weights:
    """Return what tells the weights of a model directory apart. Raises `ConfigError`."""
    sha256, size_bytes = weights_digest(directory)
    return Weights(path=str(directory.absolute()), sha256=sha256, size_bytes=size_bytes)

"""Writes the record of a run, in the format of `inflight.observe.trace.records`.

Each step is written in a thread while the next one trains. A checkpoint begins once every step before it is written, so
that a killed run continues with a whole record.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from inflight.base.tasks import start
from inflight.errors import CheckpointError
from inflight.observe.trace.digests import weights_digest
from inflight.observe.trace.records import (
    MANIFEST,
    RECORD,
    EarlierIncarnation,
    RecordManifest,
    RecordWriter,
    WeightsFile,
    read_manifest,
    versions_of,
)
from inflight.observe.trace.steps import RecordedStep, StepOutcome
from inflight.run.config import RunConfig
from inflight.run.ranks.messages import Trained
from inflight.run.record.checkpoints import latest_checkpoint
from inflight.run.sampling.batches import StepBatch, logprobs_of_samples

_NUM_MEASURED = 3
"""Steps after which the size of a record is estimated."""


class RunRecording:
    """Writes the record in the directory of a run, and reports to ``note`` once how large it becomes.

    Every call raises `CheckpointError` if a step cannot be written; earlier steps are whole then.
    """

    def __init__(self, config: RunConfig, directory: Path, note: Callable[[str], None]) -> None:
        self._config = config
        self._directory = directory
        self._note = note
        self._sizes: list[int] = []
        """Bytes of each step so far."""
        self._last = 0
        """Version that the last step made."""
        self._writer = RecordWriter(directory / RECORD)
        self._manifest = RecordManifest(
            config=config.model_dump(mode="json", exclude_unset=True), num_ranks=config.train.num_ranks
        )
        self._writing: asyncio.Task[int] | None = None

    async def begin(self, version: int) -> None:
        """Write down what training starts from; of a run resumed at ``version``, as it was."""
        record = self._writer.directory
        if version and (record / MANIFEST).exists():
            before = read_manifest(record)
            known = {"start": before.start, "earlier": earlier_incarnations(before, version)}
        else:
            known = {"start": await asyncio.to_thread(weights_of, self._config.model.path)}
        if versions_of(record) != [*range(1, version + 1)]:
            self._note(
                f"recording: not every step up to version {version} was recorded, so what follows can be read and "
                "sampled again, but not trained again"
            )
        self._manifest = self._manifest.model_copy(update=known)
        await asyncio.to_thread(self._writer.begin, self._manifest)

    async def step(self, batch: StepBatch, by_share: Sequence[Trained]) -> None:
        """Begin to write a step, once the step before is written; ``by_share`` is what came of each share."""
        await self.written()
        self._writing = start(asyncio.to_thread(self._write, batch, by_share))

    async def written(self) -> None:
        """Wait until every step is written."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self._sizes.append(await writing)
            if len(self._sizes) == _NUM_MEASURED:
                self._report_size()

    async def finish(self) -> None:
        """Write down the last checkpoint, once every step is written."""
        await self.written()
        await asyncio.to_thread(self._write_final)

    def _write(self, batch: StepBatch, by_share: Sequence[Trained]) -> int:
        self._last = batch.version + 1
        path = self._writer.write_step(recorded(batch, by_share, self._config.train.max_tokens_per_micro_batch))
        return path.stat().st_size

    def _report_size(self) -> None:
        """Report how large the record becomes. Raises `CheckpointError` if the disk has no room for it."""
        run, of_step = self._config.run, sum(self._sizes) / len(self._sizes)
        self._note(
            f"recording: {_megabytes(of_step)} per step, about {_megabytes(of_step * run.num_steps)} for "
            f"{run.num_steps:,} steps"
        )
        num_left = run.num_steps - self._last
        needed, free = of_step * num_left, shutil.disk_usage(self._directory).free
        if needed > free and run.stop_at_reward is None:
            raise CheckpointError(
                f"the record needs about {_megabytes(needed)} for the {num_left:,} steps that are left, but the disk "
                f"of {str(self._directory)!r} has {_megabytes(free)} free: free some space and continue with "
                "--resume, lower run.num_steps, or continue without run.record"
            )

    def _write_final(self) -> None:
        checkpoint, state = latest_checkpoint(self._directory)
        if checkpoint is not None and state is not None:
            final = {"final": weights_of(checkpoint), "final_version": state["version"]}
            self._writer.write_manifest(self._manifest.model_copy(update=final))


def earlier_incarnations(before: RecordManifest, version: int) -> tuple[EarlierIncarnation, ...]:
    """Return the incarnations of a run up to ``version``, where it is resumed, from the manifest of the last one."""
    incarnations = [it for it in before.earlier if it.until < version]
    last = next((it.config for it in before.earlier if it.until >= version), before.config)
    return (*incarnations, EarlierIncarnation(until=version, config=last or {}))


def recorded(batch: StepBatch, by_share: Sequence[Trained], max_tokens: int) -> RecordedStep:
    """Return a step as it is recorded, from the answers to `frames_of` with ``max_tokens``."""
    return RecordedStep(
        version=batch.version,
        groups=batch.groups,
        samples=batch.samples,
        trainer_logprobs=logprobs_of_samples(batch.samples, max_tokens, [answer.logprobs for answer in by_share]),
        outcome=outcome_of(by_share),
    )


def outcome_of(by_share: Sequence[Trained]) -> StepOutcome:
    """Return what a step did, from the answer of each share."""
    return StepOutcome(
        gradient_norm=by_share[0].gradient_norm,
        learning_rate=by_share[0].learning_rate,
        metrics=tuple(answer.metrics for answer in by_share),
    )


def weights_of(directory: Path) -> WeightsFile:
    """Return what identifies the weights of a model directory. Raises `ConfigError`."""
    sha256, size_bytes = weights_digest(directory)
    return WeightsFile(path=str(directory.absolute()), sha256=sha256, size_bytes=size_bytes)


def _megabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:,.{2 if size_bytes < 1e7 else 0}f} MB"

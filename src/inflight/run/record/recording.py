"""Writes the record of a run, in the format of `inflight.observe.trace.records`.

Each step is written in a thread while the next one trains. A checkpoint begins once all earlier steps are written, so
that a killed run resumes with a complete record.
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
from inflight.rollouts.packing import Packing
from inflight.run.config import RunConfig
from inflight.run.ranks.messages import Trained
from inflight.run.record.checkpoints import latest_checkpoint
from inflight.run.sampling.batches import StepBatch, logprobs_of_samples

_NUM_MEASURED = 3
"""Number of steps after which the size of the record is estimated."""


class RunRecording:
    """Writes the record in the directory of a run, and reports its expected size to ``note`` once.

    Every call raises `CheckpointError` if a step cannot be written; earlier steps are then complete.
    """

    def __init__(self, config: RunConfig, directory: Path, note: Callable[[str], None]) -> None:
        self._config = config
        self._directory = directory
        self._note = note
        self._sizes: list[int] = []
        """The size in bytes of each recorded step."""
        self._last = 0
        """The version that the last step produced."""
        self._writer = RecordWriter(directory / RECORD)
        self._manifest = RecordManifest(
            config=config.model_dump(mode="json", exclude_unset=True), num_ranks=config.train.num_ranks
        )
        self._writing: asyncio.Task[int] | None = None

    async def begin(self, version: int) -> None:
        """Write the manifest of a new run, or update the manifest of a run that is resumed at ``version``."""
        record = self._writer.directory
        if version and (record / MANIFEST).exists():
            before = read_manifest(record)
            known = {"start": before.start, "earlier": earlier_incarnations(before, version)}
        else:
            known = {"start": await asyncio.to_thread(weights_of, self._config.model.path)}
        if versions_of(record) != [*range(1, version + 1)]:
            self._note(
                f"recording: some steps up to version {version} were not recorded, so the record can be read, and "
                "its completions can be sampled again, but its training cannot be repeated"
            )
        self._manifest = self._manifest.model_copy(update=known)
        await asyncio.to_thread(self._writer.begin, self._manifest)

    async def step(self, batch: StepBatch, packing: Packing, by_share: Sequence[Trained]) -> None:
        """Begin writing a step once the previous one is written; ``by_share`` contains one answer for each
        share of the data."""
        await self.written()
        self._writing = start(asyncio.to_thread(self._write, batch, packing, by_share))

    async def written(self) -> None:
        """Wait until every step is written."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self._sizes.append(await writing)
            if len(self._sizes) == _NUM_MEASURED:
                self._report_size()

    async def finish(self) -> None:
        """Record the last checkpoint once every step is written."""
        await self.written()
        await asyncio.to_thread(self._write_final)

    def _write(self, batch: StepBatch, packing: Packing, by_share: Sequence[Trained]) -> int:
        self._last = batch.version + 1
        path = self._writer.write_step(recorded_step(batch, packing, by_share))
        return path.stat().st_size

    def _report_size(self) -> None:
        """Report the expected size of the record. Raises `CheckpointError` if the disk has too little free space."""
        run, of_step = self._config.run, sum(self._sizes) / len(self._sizes)
        self._note(
            f"recording: {_megabytes(of_step)} per step, about {_megabytes(of_step * run.num_steps)} for "
            f"{run.num_steps:,} steps"
        )
        num_left = run.num_steps - self._last
        needed, free = of_step * num_left, shutil.disk_usage(self._directory).free
        if needed > free and run.stop_at_reward is None:
            raise CheckpointError(
                f"the record needs about {_megabytes(needed)} for the {num_left:,} remaining steps, but the disk "
                f"of {str(self._directory)!r} has {_megabytes(free)} free: free some space and continue with "
                "--resume, lower run.num_steps, or continue without run.record"
            )

    def _write_final(self) -> None:
        checkpoint, state = latest_checkpoint(self._directory)
        if checkpoint is not None and state is not None:
            final = {"final": weights_of(checkpoint), "final_version": state["version"]}
            self._writer.write_manifest(self._manifest.model_copy(update=final))


def earlier_incarnations(before: RecordManifest, version: int) -> tuple[EarlierIncarnation, ...]:
    """Return the incarnations of a run that is being resumed at ``version``, from the manifest of the last one."""
    incarnations = [it for it in before.earlier if it.until < version]
    last = next((it.config for it in before.earlier if it.until >= version), before.config)
    return (*incarnations, EarlierIncarnation(until=version, config=last or {}))


def recorded_step(batch: StepBatch, packing: Packing, by_share: Sequence[Trained]) -> RecordedStep:
    """Return the recorded form of a step, given the answers to the frames that `frames_of` made with ``packing``."""
    return RecordedStep(
        version=batch.version,
        groups=batch.groups,
        samples=batch.samples,
        trainer_logprobs=logprobs_of_samples(batch.samples, packing, [answer.logprobs for answer in by_share]),
        outcome=outcome_of(by_share),
    )


def outcome_of(by_share: Sequence[Trained]) -> StepOutcome:
    """Return the outcome of a step, given the answer of each share."""
    return StepOutcome(
        gradient_norm=by_share[0].gradient_norm,
        learning_rate=by_share[0].learning_rate,
        metrics=tuple(answer.metrics for answer in by_share),
    )


def weights_of(directory: Path) -> WeightsFile:
    """Return the path and digest of the weights in a model directory. Raises `ConfigError`."""
    sha256, size_bytes = weights_digest(directory)
    return WeightsFile(path=str(directory.absolute()), sha256=sha256, size_bytes=size_bytes)


def _megabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:,.{2 if size_bytes < 1e7 else 0}f} MB"

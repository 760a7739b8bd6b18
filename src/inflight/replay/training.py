"""Repeats the training of a record without engines. The same batches reach the ranks in the same way as in a run."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.base.toml import check_settings
from inflight.contracts import DEFAULT_MAX_CONCURRENT
from inflight.errors import ConfigError
from inflight.model.checkpoints import check_weights, load_config
from inflight.model.images import load_image_processor
from inflight.observe.trace.records import (
    RecordManifest,
    WeightsFile,
    check_steps,
    read_manifest,
    read_step,
    versions_of,
)
from inflight.observe.trace.steps import RecordedStep
from inflight.replay.differences import StepDifference, WeightDifference, step_difference, weight_difference
from inflight.run.config import RunConfig, TrainSection
from inflight.run.ranks.group import TrainerGroup
from inflight.run.record.recording import outcome_of, weights_of
from inflight.run.sampling.batches import frames_of, logprobs_of_samples

_STOP_S = 2.0
"""How long, in seconds, trainer ranks may take to end after Ctrl-C; their state is discarded."""


@dataclass(frozen=True, slots=True)
class ReplayedIncarnation:
    """The configuration of training up to ``until``, the version at which the run was resumed; None means to the
    end."""

    until: int | None
    config: RunConfig


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of repeated training, step by step."""

    trainer: str
    num_ranks: int
    recorded_trainer: str | None
    """None if the record has no configuration of the run."""
    recorded_ranks: int | None
    dtype: str
    steps: tuple[StepDifference, ...]
    final: WeightsFile
    recorded_final: WeightsFile | None
    """None if the run has not ended, or if the replay ended earlier than the run."""
    weights: WeightDifference | None
    """None if the weights are equal, or if the recorded ones no longer exist or cannot be compared."""

    @property
    def is_bit_equal(self) -> bool:
        """Whether every metric of every step, and the final weights, equal those in the record."""
        is_final_equal = self.recorded_final is None or self.recorded_final.sha256 == self.final.sha256
        return is_final_equal and all(step.is_bit_equal for step in self.steps)


def replay_config(
    manifest: RecordManifest,
    directory: Path,
    *,
    base: Mapping[str, Any] | None = None,
    model: Path | None = None,
    trainer: str | None = None,
    num_ranks: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Return the configuration of a replay in ``directory``: that of the recorded run, without its servers.

    ``base`` is used in place of the recorded configuration, which a record may lack. The trainer options of the run are
    kept only if its trainer is kept. Raises `ConfigError` if both configurations are missing, or if the one used is
    invalid.
    """
    recorded = manifest.config if base is None else base
    if recorded is None:
        raise ConfigError(
            f"the record was imported from {manifest.source} and has no configuration: pass one with --config RUN.toml"
        )
    train = {name: value for name, value in recorded.get("train", {}).items() if name not in ("devices", "place")}
    if trainer is not None and trainer != train.get("trainer", "fsdp"):
        train |= {"trainer": trainer, "trainer_options": {}}
    if num_ranks is not None:
        train["num_ranks"] = num_ranks
    train["trainer_options"] = dict(train.get("trainer_options", {}))
    for name, value in (options or {}).items():
        (train if name in TrainSection.model_fields else train["trainer_options"])[name] = value
    kept = {name: value for name, value in recorded["run"].items() if name in _KEPT}
    start = manifest.start
    if model is None and start is not None and not Path(recorded["model"]["path"]).is_dir():
        model = Path(start.path)  # a relative path is relative to the working directory of the run
    sampling = recorded.get("sampling", {})
    values = {
        **recorded,
        "run": {**kept, "directory": str(directory)},
        "servers": {"max_concurrent": max(DEFAULT_MAX_CONCURRENT, int(sampling.get("group_size", 0)))},
        "rollouts": {},
        "train": train,
        "model": {**recorded["model"], **({} if model is None else {"path": str(model)})},
    }
    return check_settings(RunConfig, values, "the configuration in the record is not valid for this release or machine")


_KEPT = {"num_steps", "seed", "start_timeout_s", "step_timeout_s", "save_timeout_s"}
"""Fields of ``run`` that affect training. The other fields set paths, and how sampling and training alternate."""


def replay_incarnations(
    manifest: RecordManifest, directory: Path, *, base: Mapping[str, Any] | None = None, **changes: Any
) -> list[ReplayedIncarnation]:
    """Return the recorded run's incarnations, each configured by `replay_config`, or a single one if ``base`` is
    given."""
    earlier = () if base is not None else manifest.earlier
    incarnations = [
        ReplayedIncarnation(it.until, replay_config(manifest, directory, base=it.config, **changes)) for it in earlier
    ]
    return [*incarnations, ReplayedIncarnation(None, replay_config(manifest, directory, base=base, **changes))]


def check_record(record: Path, manifest: RecordManifest, config: RunConfig, num_steps: int | None = None) -> None:
    """Raise `ConfigError` if training cannot begin where the record begins, or if step files are missing or damaged.

    Only the files of the first ``num_steps`` steps are checked, or all if that is None.
    """
    if "behaviour_logprobs" in manifest.lacks:
        raise ConfigError(
            f"the record has no behaviour logprobs, because {manifest.source} did not store them, and the loss needs "
            "them: the record can be sampled again with --engine, but not trained on"
        )
    versions = versions_of(record)
    if not versions:
        raise ConfigError(f"the record {str(record)!r} has no step")
    if versions[0] != 1:
        raise ConfigError(
            f"the record {str(record)!r} begins with the step to version {versions[0]}, but a replay needs every step "
            "from version 1 on"
        )
    if manifest.final_version is not None and versions[-1] < manifest.final_version:
        raise ConfigError(
            f"the record {str(record)!r} ends with the step to version {versions[-1]}, but the run ended with version "
            f"{manifest.final_version}: the files of its last steps are missing"
        )
    check_steps(record, versions[:num_steps])
    check_weights(config.model.path)
    found = weights_of(config.model.path)
    if manifest.start is not None and found.sha256 != manifest.start.sha256:
        raise ConfigError(
            f"the weights in {str(config.model.path)!r} have SHA-256 {found.sha256[:16]}..., but the run began with "
            f"{manifest.start.sha256[:16]}...: pass the directory with those weights as --model"
        )


def check_tokens(step: RecordedStep, vocab_size: int) -> None:
    """Raise `ConfigError` if a step has tokens that are not in the model's vocabulary."""
    for group in step.groups:
        for rollout in group.rollouts:
            largest = max((*rollout.prompt_token_ids, *rollout.completion_token_ids), default=0)
            if largest >= vocab_size:
                raise ConfigError(
                    f"the record of the step to version {step.version + 1} has token {largest} in item "
                    f"{group.item_index}, but the model's vocabulary has {vocab_size} tokens: the model differs from "
                    "that of the run, or the file was changed"
                )


async def train_again(
    record: Path,
    incarnations: Sequence[ReplayedIncarnation],
    *,
    num_steps: int | None = None,
    note: Callable[[str], None],
    on_step: Callable[[StepDifference], None],
) -> Replayed:
    """Repeat the training steps of a record, and return how each differs from the record.

    As in the run, each incarnation begins with new ranks from a checkpoint. Files are written to ``run.directory``:
    ``logs``, and ``weights`` with the final checkpoint. Raises `ConfigError` for a record that cannot be trained on,
    and the errors that `TrainerGroup` raises.
    """
    manifest, config = read_manifest(record), incarnations[-1].config
    for incarnation in incarnations:
        check_record(record, manifest, incarnation.config, num_steps)
    directory = config.run.directory
    try:
        (directory / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{str(directory)!r} cannot be created: {error.strerror}; choose another directory with --to"
        ) from error
    versions = versions_of(record)[:num_steps]
    differences: list[StepDifference] = []

    def add(difference: StepDifference) -> None:
        differences.append(difference)
        on_step(difference)

    for incarnation in incarnations:
        rest = [it for it in versions[len(differences) :] if incarnation.until is None or it <= incarnation.until]
        if rest:
            checkpoint = directory / "weights" if differences else None
            await _train_incarnation(record, incarnation.config, rest, checkpoint, note, add)
    final = weights_of(directory / "weights")
    recorded_final = manifest.final if manifest.final_version == differences[-1].version else None
    return Replayed(
        trainer=config.train.trainer,
        num_ranks=config.train.num_ranks,
        recorded_trainer=None if manifest.config is None else manifest.config.get("train", {}).get("trainer", "fsdp"),
        recorded_ranks=manifest.num_ranks,
        dtype=config.model.dtype,
        steps=tuple(differences),
        final=final,
        recorded_final=recorded_final,
        weights=_weight_difference(config, final, recorded_final),
    )


async def _train_incarnation(
    record: Path,
    config: RunConfig,
    versions: Sequence[int],
    checkpoint: Path | None,
    note: Callable[[str], None],
    on_step: Callable[[StepDifference], None],
) -> None:
    """Train the steps that produce ``versions`` on new ranks, from a checkpoint if there is one, and save."""
    directory, images = config.run.directory, load_image_processor(config.model.path)
    vocab_size = int(load_config(config.model.path).get_text_config().vocab_size)
    group = TrainerGroup(config, directory / "logs", secrets.token_urlsafe(24), note)
    try:
        await group.spawn()
        await group.load_and_connect(None, "replay", checkpoint)
        for version in versions:
            step = await asyncio.to_thread(read_step, record, version)
            check_tokens(step, vocab_size)
            frames = await asyncio.to_thread(
                frames_of, step, group.packing, publish=None, images=images, returns_logprobs=True
            )
            answers = group.by_share(await group.train(frames))
            logprobs = logprobs_of_samples(step.samples, group.packing, [answer.logprobs for answer in answers])
            on_step(step_difference(step, outcome_of(answers), logprobs))
        await group.save(directory / "weights")
    except asyncio.CancelledError:
        note("interrupted: stopping the trainer ranks; no results are kept")
        for rank in group.ranks:
            rank.stop_s = _STOP_S
        raise
    finally:
        await group.stop()


def _weight_difference(config: RunConfig, final: WeightsFile, recorded: WeightsFile | None) -> WeightDifference | None:
    if recorded is None or recorded.sha256 == final.sha256 or not Path(recorded.path).is_dir():
        return None
    if weights_of(Path(recorded.path)).sha256 != recorded.sha256:
        return None  # the weights there have changed
    return weight_difference(config.model.path, Path(recorded.path), Path(final.path))


def replay_training(
    record: Path,
    make_incarnations: Callable[[Path], Sequence[ReplayedIncarnation]],
    directory: Path | None,
    *,
    num_steps: int | None = None,
    note: Callable[[str], None],
    on_step: Callable[[StepDifference], None] = lambda step: None,
) -> Replayed:
    """Repeat the training with the incarnations that ``make_incarnations`` configures for ``directory``.

    If ``directory`` is None, a temporary one is used.
    """
    with tempfile.TemporaryDirectory(prefix="inflight-replay-") as temporary:
        incarnations = make_incarnations(Path(temporary) if directory is None else directory)
        return asyncio.run(train_again(record, incarnations, num_steps=num_steps, note=note, on_step=on_step))

"""The record of a run: the inputs and results of each optimizer step, in a format that other frameworks can read.

A record is a directory with ``manifest.json`` and one safetensors file per step: ``step-000001.safetensors`` is the
step that produced version 1. The structure of a step is JSON in the metadata of its file, and its tokens are flat
arrays. docs/replay.md describes every field. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from inflight import __version__
from inflight.base.validation import describe_problems
from inflight.errors import CheckpointError, ConfigError
from inflight.observe.trace.steps import RecordedStep, StoredModel, StoredStep, join_step, split_step
from inflight.types import Rollout

FORMAT_VERSION = 1
"""Increases when a field changes its meaning or disappears; readers ignore unknown fields."""
RECORD, MANIFEST = "record", "manifest.json"
_STEP = "step"
"""Key of a step's structure in the metadata of its file."""
_OVERLAP = 8
"""Number of tokens that are decoded again as context, because some tokenizers join adjacent tokens."""
_UNFINISHED = "\ufffd"


class WeightsFile(StoredModel):
    """Weights on disk, identified by `inflight.observe.trace.digests.weights_digest`."""

    path: str
    sha256: str
    size_bytes: int


class EarlierIncarnation(StoredModel):
    """The configuration of a run until it was resumed."""

    until: int
    """The version at which the run was resumed."""
    config: dict[str, Any]


class RecordManifest(StoredModel):
    """The metadata that applies to all steps of a record."""

    format: Literal["inflight record"] = "inflight record"
    format_version: int = FORMAT_VERSION
    inflight: str = __version__
    source: str = "inflight"
    """The framework that produced the run."""
    config: dict[str, Any] | None = None
    """The fields that the run's configuration sets; those of the last incarnation if the run was resumed.

    None if unknown.
    """
    earlier: tuple[EarlierIncarnation, ...] = ()
    """Earlier incarnations, in order."""
    num_ranks: int | None = None
    start: WeightsFile | None = None
    """The model directory from which training began."""
    final: WeightsFile | None = None
    """The checkpoint after the last step; None until the run has ended."""
    final_version: int | None = None
    lacks: tuple[str, ...] = ()
    """Data that an imported record lacks: ``behaviour_logprobs``, or ``token_ids`` if text was tokenized again."""
    notes: tuple[str, ...] = ()
    """Assumptions that were made during the import."""


class RecordWriter:
    """Writes a record. A full disk raises `CheckpointError` and leaves all earlier steps intact."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def begin(self, manifest: RecordManifest) -> None:
        """Write the manifest, and create the directory if it does not exist."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"the record {str(self.directory)!r} cannot be created: {error.strerror}") from error
        self.write_manifest(manifest)

    def write_manifest(self, manifest: RecordManifest) -> None:
        text = manifest.model_dump_json(indent=2) + "\n"
        self._replace(self.directory / MANIFEST, lambda partial: partial.write_text(text))

    def write_step(self, step: RecordedStep) -> Path:
        """Write a step atomically and return its file."""
        facts, arrays = split_step(step)
        metadata = {"format": "inflight record", _STEP: facts.model_dump_json()}
        path = _file_of(self.directory, step.version + 1)
        self._replace(path, lambda partial: save_file(arrays, partial, metadata))
        return path

    def _replace(self, path: Path, write: Callable[[Path], object]) -> None:
        partial = path.with_suffix(".partial")
        try:
            write(partial)
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            why = getattr(error, "strerror", None) or error
            raise CheckpointError(
                f"{str(path)!r} cannot be written: {why}. Check the free space of the disk, and continue with "
                "--resume, or continue without run.record"
            ) from error


def remove_steps(directory: Path, version: int) -> None:
    """Remove the recorded steps after ``version``, because a resumed process repeats them.

    Raises `CheckpointError` if that fails.
    """
    try:
        for path in [*directory.glob("*.partial"), *(it for it in step_files(directory) if _version_of(it) > version)]:
            path.unlink()
    except OSError as error:
        raise CheckpointError(f"the record {str(directory)!r} cannot be changed: {error.strerror}") from error


# ---------------------------------------------------------------------------------------------------------------
# Reading


def record_of(path: Path) -> Path:
    """Return the record in a run directory, or the record itself. Raises `ConfigError` if there is none."""
    for directory in (path / RECORD, path):
        if (directory / MANIFEST).is_file():
            return directory
    raise ConfigError(
        f"{str(path)!r} contains no record: pass the directory of a run with run.record = true, or a directory with "
        f"{MANIFEST}"
    )


def read_manifest(directory: Path) -> RecordManifest:
    """Return the manifest of a record. Raises `ConfigError` if it is missing, damaged or from a newer release."""
    path = directory / MANIFEST
    try:
        values = json.loads(path.read_bytes())
        if values["format"] == "inflight record" and values["format_version"] > FORMAT_VERSION:
            raise ConfigError(
                f"{str(directory)!r} was written by inflight {values['inflight']} in record format "
                f"{values['format_version']}, but this release reads only up to {FORMAT_VERSION}: use that release or "
                "a newer one"
            )
        return RecordManifest.model_validate(values)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{str(path)!r} is not the manifest of a record: {_one_line(error)}") from error


def step_files(directory: Path) -> list[Path]:
    """Return the files of a record's steps, in order."""
    found = (path for path in directory.glob("step-*.safetensors") if path.stem.removeprefix("step-").isdecimal())
    return sorted(found, key=_version_of)


def versions_of(directory: Path) -> list[int]:
    """Return the versions that the recorded steps produced, in order."""
    return [_version_of(path) for path in step_files(directory)]


def check_steps(directory: Path, versions: Sequence[int]) -> None:
    """Raise `ConfigError` if there is a gap between these versions, or if a file is missing or truncated."""
    for before, version in itertools.pairwise(versions):
        if version != before + 1:
            raise ConfigError(
                f"the record {str(directory)!r} has no step between versions {before} and {version}: files are missing"
            )
    for version in versions:
        with _open_step(directory, version):
            pass


def read_steps(directory: Path) -> Iterator[RecordedStep]:
    """Yield the steps of a record in order. Raises `ConfigError` for an unreadable file or a gap."""
    versions = versions_of(directory)
    check_steps(directory, versions)
    for version in versions:
        yield read_step(directory, version)


def read_step(directory: Path, version: int) -> RecordedStep:
    """Return the step that produced ``version``. Raises a `ConfigError` that states the file and the problem."""
    with _open_step(directory, version) as file:
        facts = StoredStep.model_validate_json((file.metadata() or {})[_STEP])
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        step = join_step(facts, arrays)
    if step.version != version - 1:
        raise ConfigError(
            f"{str(_file_of(directory, version))!r} contains the step to version {step.version + 1}: the file was "
            "renamed"
        )
    return step


@contextlib.contextmanager
def _open_step(directory: Path, version: int) -> Iterator[Any]:
    """Open the file of a step. Raises `ConfigError` if it cannot be opened, or if the body reads damaged data."""
    path = _file_of(directory, version)
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except FileNotFoundError as error:
        raise ConfigError(f"the record {str(directory)!r} has no step that produced version {version}") from error
    except (OSError, SafetensorError, KeyError, IndexError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{str(path)!r} is not a recorded step, or is damaged: {_one_line(error)}. Copy it again, or remove it and "
            "all later steps"
        ) from error


# ---------------------------------------------------------------------------------------------------------------
# The details of one item


def item_details(
    directory: Path, version: int, item: int, decode: Callable[[Sequence[int]], str] | None = None
) -> dict[str, Any]:
    """Return one item of the step that produced ``version`` as JSON values, with all recorded data of every token.

    ``decode`` is the method of a tokenizer; with it, ``pieces`` contains the text of each token. Values that do not
    exist are None: logprobs and versions of observations, and advantages of rollouts that the step omitted. Raises
    `ConfigError` if the record has no such step or item.
    """
    step = read_step(directory, version)
    numbers = [number for number, group in enumerate(step.groups) if group.item_index == item]
    if not numbers:
        items = [group.item_index for group in step.groups]
        raise ConfigError(f"the step to version {version} did not train on item {item}: its items are {items[:20]}")
    group = step.groups[numbers[0]]
    samples = {id(sample.rollout): number for number, sample in enumerate(step.samples)}
    rollouts = [_rollout_details(step, rollout, samples.get(id(rollout)), decode) for rollout in group.rollouts]
    return {
        "item": item,
        "version": version,
        "group": group.group_id,
        "endpoint": group.endpoint,
        "rollouts": rollouts,
    }


def _rollout_details(
    step: RecordedStep, rollout: Rollout, number: int | None, decode: Callable[[Sequence[int]], str] | None
) -> dict[str, Any]:
    sample = None if number is None else step.samples[number]
    versions = rollout.token_versions()
    is_sampled = [version >= 0 for version in versions]
    trained = None if step.trainer_logprobs is None or number is None else step.trainer_logprobs[number]
    mask = None if sample is None else sample.loss_mask
    prompt, completion = rollout.prompt_token_ids, rollout.completion_token_ids

    def where(mask: Sequence[bool] | None, values: Sequence[float] | None) -> list[float | None] | None:
        if mask is None or values is None:
            return None
        pairs = zip(mask, values, strict=True)
        return [value if is_there and value == value else None for is_there, value in pairs]  # NaN: unknown

    return {
        "reward": rollout.reward,
        "finish_reason": rollout.finish_reason,
        "temperature": rollout.temperature,
        "role": rollout.role,
        "episode": rollout.episode,
        "turns": [[turn.start, turn.end, turn.reward] for turn in rollout.turns],
        "num_images": len(rollout.images),
        "prompt": {"token_ids": [*prompt], "pieces": None if decode is None else pieces_of(decode, prompt)},
        "completion": {
            "token_ids": [*completion],
            "pieces": None if decode is None else pieces_of(decode, completion),
            "versions": [version if is_there else None for is_there, version in zip(is_sampled, versions, strict=True)],
            "behaviour_logprobs": where(is_sampled, rollout.behaviour_logprobs),
            "trainer_logprobs": where(mask, trained),
            "advantages": where(mask, None if sample is None else sample.advantages),
            "loss_mask": None if mask is None else [*mask],
        },
    }


def pieces_of(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds.

    If several tokens form one character, the last of them adds the whole character.
    """
    pieces: list[str] = []
    read = 0
    for end in range(1, len(token_ids) + 1):
        start = max(0, read - _OVERLAP)
        before, after = decode(token_ids[start:read]), decode(token_ids[start:end])
        is_last = end == len(token_ids)
        is_whole = after.startswith(before) and (is_last or not after.endswith(_UNFINISHED))
        pieces.append(after[len(before) :] if is_whole else "")
        read = end if is_whole else read
    return pieces


def _file_of(directory: Path, version: int) -> Path:
    return directory / f"step-{version:06d}.safetensors"


def _version_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _one_line(error: Exception) -> str:
    if isinstance(error, pydantic.ValidationError):
        return describe_problems(error)
    return " ".join(str(error).split())[:250]

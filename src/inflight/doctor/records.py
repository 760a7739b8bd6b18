"""Reads from a run directory how the engine's logprobs differ from the trainer's for each token at lag 0.

At lag 0, the version that sampled a token is also the version under which the trainer computed its logprob, so a
difference is not caused by staleness. Shape suffix: N tokens at lag 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight.errors import ConfigError
from inflight.observe.trace.files import read_events
from inflight.observe.trace.files import read_steps as read_rows
from inflight.observe.trace.records import MANIFEST, RECORD, read_manifest, read_steps, step_files, versions_of
from inflight.observe.trace.steps import RecordedStep
from inflight.types import Rollout
from inflight.wire import InFlightPolicy

_NO_LOGPROB = -1000.0
"""Engines use lower values, such as -9999, as fillers. No sampled token has a logprob below this."""

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Observations:
    """The tokens at lag 0, one row each. Arrays have shape [N]; logprobs are in nats."""

    difference_N: Floats
    """Trainer logprob minus behaviour logprob, both finite."""
    behaviour_N: Floats
    """Behaviour logprob, as the endpoint returned it."""
    version_N: Integers
    """The version that sampled the token. The step that trained on it produced the next version."""
    position_N: Integers
    """Index in the completion, from 0."""
    since_boundary_N: Integers
    """Number of tokens since the version last changed within the same turn, 0 for the first one; -1 if it did not
    change."""
    endpoint_N: Integers
    """Index into ``endpoints``; -1 if several endpoints sampled the token's group."""
    temperature_N: Floats
    sequence_N: Integers
    """The number of the token's completion."""
    endpoints: tuple[str, ...]
    """Names of the endpoints."""

    def __len__(self) -> int:
        return len(self.difference_N)

    def select(self, rows: npt.NDArray[np.bool_] | Integers) -> Observations:
        """Return some of the tokens, given a mask or indices."""
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in COLUMNS}
        return Observations(**columns, endpoints=self.endpoints)


COLUMNS = (
    "difference_N",
    "behaviour_N",
    "version_N",
    "position_N",
    "since_boundary_N",
    "endpoint_N",
    "temperature_N",
    "sequence_N",
)
"""The arrays of `Observations`."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of a run that determine how its differences are judged."""

    dtype: str
    """The dtype of the computation, ``float32`` or ``bfloat16``."""
    in_flight: InFlightPolicy | None
    """The treatment of running requests at updates; None if unknown."""
    learning_rates: Mapping[int, float]
    """The learning rate of each step, by the version that the step starts from; empty if unknown."""
    mode: str | None = None
    """The run's ``run.mode``, ``pipeline`` or ``conventional``; None if unknown."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenRecords:
    """What the record of a run contains about differences, token by token."""

    settings: RunSettings
    observations: Observations
    num_stale: int
    """Number of trained tokens that were omitted because an older version had sampled them."""
    num_unusable: int
    """Number of tokens at lag 0 that were omitted because a side has no finite logprob for them, or a filler."""


@dataclass(frozen=True, slots=True)
class StepAggregate:
    """Metrics of a step in which all tokens have lag 0."""

    version: int
    """The version that the step starts from."""
    num_tokens: int
    """Number of sampled tokens in the step's groups, including those that the loss omitted."""
    k1: float
    """Mean of behaviour minus trainer logprobs, in nats."""
    k3: float
    """Mean of exp(d) - 1 - d, where d is the trainer logprob minus the behaviour logprob."""


@dataclass(frozen=True, slots=True)
class StepRecords:
    """What a run without ``run.record`` contains about differences: metrics of whole steps."""

    settings: RunSettings
    steps: tuple[StepAggregate, ...]
    num_mixed: int
    """Number of steps that also trained on older tokens, or whose number of tokens is no longer in the events. These
    steps are omitted, because their tokens at lag 0 cannot be counted and those after a span boundary cannot be
    separated."""


def read_differences(directory: Path) -> TokenRecords | StepRecords:
    """Return the differences recorded in a run directory, or in a record outside one.

    Raises `ConfigError` if the directory is not that of a run or a record, if the record lacks logprobs, or if files
    are damaged or missing.
    """
    for record in (directory / RECORD, directory):
        if (record / MANIFEST).is_file():
            return _read_record(record)
        if steps := step_files(record):
            raise ConfigError(
                f"the record {str(record)!r} is damaged: it has {len(steps)} recorded steps but no {MANIFEST}. Copy it "
                "again, or remove it to examine only the run's metrics"
            )
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"{str(directory)!r} contains neither a run nor a record: specify the directory of a run, which contains "
            "config.json and metrics.jsonl"
        )
    return _read_metrics(directory)


# ---------------------------------------------------------------------------------------------------------------
# A record


def _read_record(record: Path) -> TokenRecords:
    manifest = read_manifest(record)
    if "behaviour_logprobs" in manifest.lacks:
        raise ConfigError(
            f"the record {str(record)!r} has no behaviour logprobs, because {manifest.source} did not store them"
        )
    versions = versions_of(record)
    if manifest.final_version is not None and versions and versions[-1] < manifest.final_version:
        raise ConfigError(
            f"the record {str(record)!r} is damaged: it ends at version {versions[-1]}, but the run ended at version "
            f"{manifest.final_version}. Copy the files of its last steps again"
        )
    reader, learning_rates = _TokenReader(), {}
    for step in read_steps(record):
        if step.trainer_logprobs is None:
            raise ConfigError(
                f"the record {str(record)!r} has no trainer logprobs, because {manifest.source} did not store them: "
                "only the record of an inflight run can be examined"
            )
        if step.outcome is not None:
            learning_rates[step.version] = step.outcome.learning_rate
        reader.add(step)
    settings = _settings_of(manifest.config, learning_rates, record / MANIFEST)
    return TokenRecords(settings, reader.observations(), reader.num_stale, reader.num_unusable)


class _TokenReader:
    """Collects the tokens at lag 0 of all steps."""

    def __init__(self) -> None:
        self._columns: list[tuple[npt.NDArray[Any], ...]] = []
        self._endpoints: dict[str, int] = {}
        self._num_sequences = 0
        self.num_stale = 0
        self.num_unusable = 0

    def add(self, step: RecordedStep) -> None:
        for sample, trained in zip(step.samples, step.trainer_logprobs or (), strict=True):
            rollout = sample.rollout
            versions = np.asarray(rollout.token_versions(), np.int64)
            is_target = np.asarray(sample.loss_mask, np.bool_) & (versions >= 0)
            is_current = is_target & (versions == step.version)
            trainer, behaviour = np.asarray(trained, np.float64), np.asarray(rollout.behaviour_logprobs, np.float64)
            is_usable = np.isfinite(trainer) & np.isfinite(behaviour) & (behaviour > _NO_LOGPROB)
            self.num_stale += int((is_target & ~is_current).sum())
            self.num_unusable += int((is_current & ~is_usable).sum())
            rows = np.flatnonzero(is_current & is_usable)
            name = step.groups[sample.group_index].endpoint
            endpoint = self._endpoints.setdefault(name, len(self._endpoints)) if name and "," not in name else -1
            self._num_sequences += 1
            self._columns.append(
                (
                    (trainer - behaviour)[rows],
                    behaviour[rows],
                    versions[rows],
                    rows,
                    _since_boundary(rollout)[rows],
                    np.full(len(rows), endpoint),
                    np.full(len(rows), rollout.temperature, np.float64),
                    np.full(len(rows), self._num_sequences),
                )
            )

    def observations(self) -> Observations:
        columns: list[Any] = [np.concatenate(it) for it in zip(*self._columns, strict=True)]
        columns = columns or [np.empty(0)] * len(COLUMNS)
        return Observations(**dict(zip(COLUMNS, columns, strict=True)), endpoints=tuple(self._endpoints))


def _since_boundary(rollout: Rollout) -> Integers:
    """Return, for each completion token, the number of tokens since the version last changed within the turn, or else
    -1.

    A new turn is a new request, whose keys and values are computed from scratch.
    """
    since = np.full(len(rollout.completion_token_ids), -1)
    starts = {turn.start for turn in rollout.turns}
    before, boundary = None, None
    for span in sorted(rollout.version_spans, key=lambda span: span.start):
        if before is None or before.end != span.start or span.start in starts:
            boundary = None
        elif before.version != span.version:
            boundary = span.start
        if boundary is not None:
            since[span.start : span.end] = np.arange(span.start, span.end) - boundary
        before = span
    return since


# ---------------------------------------------------------------------------------------------------------------
# Metrics of steps


def _read_metrics(directory: Path) -> StepRecords:
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(directory / 'config.json')!r} cannot be read: {error}") from error
    steps, learning_rates, num_rows, num_sampled = [], {}, 0, _num_sampled_tokens(directory)
    for row in read_rows(directory):
        num_rows += 1
        version = row["version"] - 1
        learning_rates[version] = row.get("learning_rate", 0.0)
        num_tokens = num_sampled.get(version, 0)
        if row.get("max_lag") == 0 and "mismatch_k3" in row and num_tokens > 0:
            steps.append(StepAggregate(version, num_tokens, row["mismatch_k1"], row["mismatch_k3"]))
    settings = _settings_of(config, learning_rates, directory / "config.json")
    return StepRecords(settings, tuple(steps), num_rows - len(steps))


def _num_sampled_tokens(directory: Path) -> dict[int, int]:
    """Return the number of sampled tokens of each step, by the version that the step starts from."""
    lengths: dict[int, int] = {}
    num_tokens = {}
    for event in read_events(directory, ("group", "train")):
        if event["kind"] == "group":
            lengths[event["item"]] = sum(event["lengths"])
        else:
            num_tokens[event["version"] - 1] = sum(lengths.get(item, 0) for item in event["items"])
    return num_tokens


def _settings_of(config: Mapping[str, Any] | None, learning_rates: Mapping[int, float], file: Path) -> RunSettings:
    """Return the settings of a run. ``config``, which was read from ``file``, need only contain the fields that were
    set.

    Raises `ConfigError` if ``config`` is damaged.
    """
    if config is None:
        return RunSettings("float32", None, learning_rates)
    try:
        policy = InFlightPolicy(config.get("updates", {}).get("in_flight", InFlightPolicy.KEEP))
        dtype, mode = config.get("model", {}).get("dtype", "float32"), config.get("run", {}).get("mode", "pipeline")
    except (AttributeError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} does not contain the configuration of a run: {error}") from error
    return RunSettings(dtype, policy, learning_rates, mode)

"""Imports rollouts that other frameworks have stored, and writes them as records.

Each file is one step. The manifest lists the data that a format lacks. A record without behaviour logprobs, for
example, can be read and sampled again, but not trained on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError
from inflight.observe.trace.records import MANIFEST, RecordManifest, RecordWriter, remove_steps, step_files
from inflight.observe.trace.steps import RecordedStep
from inflight.rollouts import AdvantageEstimator, MaxLag
from inflight.run.sampling.batches import make_batch
from inflight.types import Group, Rollout
from inflight.wire import is_reward

_ANY_LAG = 1 << 40


@dataclass(slots=True)
class Found:
    """The contents of a framework's files."""

    steps: Iterator[list[Group]] = field(default_factory=lambda: iter(()))
    """The groups of each file, in order. They are read lazily, because a file may contain gigabytes."""
    lacks: set[str] = field(default_factory=set)
    """The same as `inflight.observe.trace.records.RecordManifest.lacks`."""
    assumed: Counter[str] = field(default_factory=Counter)
    """Assumptions, with the number of affected samples. Like ``lacks``, this is complete once all steps have been
    read."""


def write_imported(
    found: Found, directory: Path, *, source: str, advantages: AdvantageEstimator, files: Sequence[Path]
) -> RecordManifest:
    """Write a record and return its manifest.

    Raises `ConfigError` if the directory already has a record. Errors while reading the files propagate, and no step is
    then left in the directory.
    """
    if step_files(directory):
        raise ConfigError(f"{str(directory)!r} already contains a record: choose another directory with --to")
    writer = RecordWriter(directory)
    writer.begin(RecordManifest(source=source))
    try:
        for version, groups in enumerate(found.steps):
            batch = make_batch(groups, version, advantages, MaxLag(_ANY_LAG))
            writer.write_step(RecordedStep(version, batch.groups, batch.samples))
        notes = [f"{what} ({number} samples)" for what, number in found.assumed.items()]
        notes.append(
            f"advantages are computed as {advantages} in each prompt's group, because {source} does not store them"
        )
        notes.append("each file is one step: " + ", ".join(path.name for path in files))
        manifest = RecordManifest(source=source, lacks=tuple(sorted(found.lacks)), notes=tuple(notes))
        writer.write_manifest(manifest)
    except BaseException:
        remove_steps(directory, 0)
        (directory / MANIFEST).unlink(missing_ok=True)
        raise
    return manifest


def grouped(rollouts: Sequence[tuple[Any, Rollout]], first_item: int) -> list[Group]:
    """Return the rollouts grouped by key, in the order of the groups' first rollouts, numbered from ``first_item``."""
    by_key: dict[Any, list[Rollout]] = {}
    for key, rollout in rollouts:
        by_key.setdefault(key, []).append(rollout)
    return [Group(item + 1, item, members) for item, members in enumerate(by_key.values(), first_item)]


def field_of(values: Mapping[str, Any], name: str, is_valid: Callable[[Any], bool], wanted: str, where: str) -> Any:
    """Return a field of a stored sample. Raises a `ConfigError` that states what was expected."""
    value = values.get(name)
    if not is_valid(value):
        raise ConfigError(f"{where}: {name} is {str(value)[:80]!r}, not {wanted}")
    return value


def is_number(value: Any) -> bool:
    """Return whether a stored value is a number in the range of rewards, and not a boolean."""
    return is_reward(value) and not isinstance(value, bool)


def are_numbers(value: Any) -> bool:
    """Return whether a stored value is a list of numbers for which `is_number` is true."""
    return isinstance(value, list) and all(map(is_number, value))


def is_name(value: Any) -> bool:
    """Return whether a stored value can identify a group."""
    return isinstance(value, str | int)


def are_ids(value: Any) -> bool:
    """Return whether a stored value is a list of token ids."""
    return isinstance(value, list) and all(type(it) is int and 0 <= it < 2**31 for it in value)

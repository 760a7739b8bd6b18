"""What a run says of its record, and how it continues with one."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from inflight.errors import CheckpointError
from inflight.observe.trace.records import EarlierIncarnation, RecordManifest, read_manifest, versions_of
from inflight.rollouts.packing import Packing
from inflight.run.config import RunConfig
from inflight.run.ranks.messages import Trained
from inflight.run.record.recording import RunRecording, earlier_incarnations
from inflight.run.sampling.batches import StepBatch
from tests.replay.test_records import example

ANSWER = Trained(
    version=1, gradient_norm=1.0, learning_rate=1.0, metrics={}, span=(0.0, 1.0), logprobs=(np.zeros(5, np.float32),)
)


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def recording(directory: Path, model: Path, notes: list[str], **run: Any) -> RunRecording:
    values = {"run": {"directory": directory, **run}, "model": {"path": model}, "task": {"name": "t"}}
    return RunRecording(RunConfig.model_validate(values), directory, notes.append)


def record(it: RunRecording, begin: int, num_steps: int) -> None:
    """Record steps from a version on, as a run that begins or is resumed there."""

    async def run() -> None:
        await it.begin(begin)
        for version in range(begin, begin + num_steps):
            step = example(version)
            batch = StepBatch(step.groups, step.samples, version, Counter(), 0, [[True, False]])
            await it.step(batch, Packing(4096, 1), [ANSWER])
        await it.written()

    asyncio.run(run())


def test_a_run_says_once_how_large_its_record_becomes(tmp_path: Path, model_dir: Path) -> None:
    notes: list[str] = []
    record(recording(tmp_path / "short", model_dir, notes, num_steps=2), 0, 2)
    assert notes == []
    record(recording(tmp_path, model_dir, notes, num_steps=20000), 0, 5)
    (said,) = notes
    size = (tmp_path / "record" / "step-000001.safetensors").stat().st_size * 20000 / 1e6
    assert said == f"recording: 0.00 MB per step, about {size:.0f} MB for 20,000 steps"


def test_a_record_that_the_disk_cannot_hold_ends_the_run_at_its_beginning(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, 10**6))
    with pytest.raises(CheckpointError, match=r"MB for the 1,997 remaining steps.* has 1\.00 MB free: free some"):
        record(recording(tmp_path, model_dir, [], num_steps=2000), 0, 3)
    assert versions_of(tmp_path / "record") == [1, 2, 3]
    record(recording(tmp_path / "may-end-early", model_dir, [], num_steps=2000, stop_at_reward=0.5), 0, 3)


def test_a_resumed_run_keeps_its_earlier_configurations(tmp_path: Path, model_dir: Path) -> None:
    notes: list[str] = []
    for seed, (begin, num_steps) in enumerate(((0, 2), (2, 1), (3, 1))):
        record(recording(tmp_path, model_dir, notes, num_steps=5, seed=seed), begin, num_steps)
    manifest = read_manifest(tmp_path / "record")
    assert [(incarnation.until, incarnation.config["run"]["seed"]) for incarnation in manifest.earlier] == [
        (2, 0),
        (3, 1),
    ]
    assert manifest.config is not None
    assert manifest.config["run"]["seed"] == 2
    assert notes == []
    record(recording(tmp_path, model_dir, notes), 9, 0)
    assert "some steps up to version 9 were not recorded" in notes[0]


def test_a_incarnation_whose_steps_were_all_removed_is_not_kept() -> None:
    incarnations = (EarlierIncarnation(until=2, config={"a": 1}), EarlierIncarnation(until=4, config={"a": 2}))
    before = RecordManifest(config={"a": 3}, earlier=incarnations)
    assert earlier_incarnations(before, 6) == (*incarnations, EarlierIncarnation(until=6, config={"a": 3}))
    assert earlier_incarnations(before, 4) == incarnations
    assert earlier_incarnations(before, 3) == (incarnations[0], EarlierIncarnation(until=3, config={"a": 2}))

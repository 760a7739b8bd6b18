"""The files in which a staged update is handed to SGLang: what they hold, where they lie, and that they go."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from inflight.errors import TransferError
from inflight.weights.encode.bucket_bytes import pack
from inflight.weights.encode.buckets import plan_buckets
from inflight.wire import InFlightPolicy, Manifest, WeightUpdate
from inflight_sglang.checkpoint_files import CheckpointFiles
from tests.weights.workers import PlainWorker

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.arange(5, dtype=torch.bfloat16),
    "c": torch.zeros(0, dtype=torch.float32),
    "d": torch.tensor(7.0),
}


def update(bucket_bytes: int) -> WeightUpdate:
    specs = PlainWorker(TENSORS).parameter_specs()
    return WeightUpdate(
        run_id="run",
        version=1,
        manifest=Manifest(tensors=tuple(specs)),
        buckets=tuple(plan_buckets(specs, bucket_bytes)),
        in_flight=InFlightPolicy.KEEP,
        deadline_s=1.0,
        lease_s=1.0,
    )


def write(files: CheckpointFiles, announced: WeightUpdate, index: int) -> None:
    bucket = announced.buckets[index]
    specs = announced.manifest.tensors[bucket.start : bucket.stop]
    files.write(bucket, specs, pack([TENSORS[spec.name] for spec in specs]))


@pytest.mark.parametrize("bucket_bytes", [1, 30, 1000])
def test_the_files_of_all_buckets_hold_the_tensors_for_this_user_only(bucket_bytes: int) -> None:
    announced = update(bucket_bytes)
    files = CheckpointFiles(announced)
    try:
        for bucket in announced.buckets:
            write(files, announced, bucket.index)
        found = {name: tensor for file in files.checkpoint.iterdir() for name, tensor in load_file(file).items()}
        assert found.keys() == TENSORS.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
        assert not list(files.probe.iterdir())
        home = files.checkpoint.parent
        assert home.stat().st_mode & 0o077 == 0
    finally:
        files.remove()
    assert not home.exists()


def test_a_bucket_that_comes_after_the_end_leaves_nothing() -> None:
    announced = update(1)
    files = CheckpointFiles(announced)
    write(files, announced, 0)
    home = files.checkpoint.parent
    files.remove()
    files.remove()
    with pytest.raises(TransferError, match="the update has ended"):
        write(files, announced, 1)
    assert not home.exists()


def test_files_that_do_not_fit_into_memory_lie_with_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    announced = update(1000)
    files = CheckpointFiles(announced)
    write(files, announced, 0)
    assert files.checkpoint.is_relative_to(tmp_path)
    files.remove()
    assert not list(tmp_path.iterdir())

"""Saves in the background: what is written, what training sees of it, and what is left after a failure."""

import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import inflight_fsdp
from inflight.contracts import BackgroundSaver
from inflight.errors import CheckpointError
from tests.models import make_model
from tests.selection import first_of_each
from tests.worker.rank_program import ADAM
from tests.worker.ranks import run_ranks
from tests.worker.worker_cases import accumulate, file_bytes, make_batch, settings
from tests.zygote import python

TRAINERS = {"fsdp": inflight_fsdp.FSDP, "torchtitan": inflight_fsdp.TORCHTITAN}
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "qwen3", tokenizer=False)


@pytest.fixture(params=TRAINERS)
def make_worker(request, model_path):
    made = []

    def make():
        options = {**settings(model_path, betas=(0.9, 0.99)), "dtype": "float32", "wire_dtype": "float32"}
        made.append(TRAINERS[request.param].create(options))
        return made[-1]

    yield make
    for worker in reversed(made):
        worker.close()
    assert not dist.is_initialized()


@pytest.fixture
def disk(monkeypatch):
    """Set while the disk works; nothing is written to the end while it is clear."""
    works, fsync = threading.Event(), os.fsync
    works.set()

    def slow_fsync(descriptor):
        assert works.wait(DEADLINE_S)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow_fsync)
    yield works
    works.set()


def train(worker, seed):
    accumulate(worker, [make_batch((9, 4, 17, 6), seed=seed)])
    return worker.step()


def state_of(worker, path):
    worker.save(path)
    return file_bytes(path)


def test_what_is_saved_is_the_state_of_the_beginning_and_training_goes_on_meanwhile(tmp_path, make_worker, disk):
    worker, twin = make_worker(), make_worker()
    assert isinstance(worker, BackgroundSaver)
    for seed in range(2):
        assert train(worker, seed) == train(twin, seed)
    expected = state_of(worker, tmp_path / "blocking")
    disk.clear()
    worker.begin_save(tmp_path / "background")
    for seed in range(2, 4):
        assert train(worker, seed) == train(twin, seed)
    assert worker.save_pending
    assert not (tmp_path / "background").exists()
    with pytest.raises(CheckpointError, match=r"background is still running after 0.1 s"):
        worker.finish_save(0.1)
    assert worker.save_pending
    disk.set()
    worker.finish_save(DEADLINE_S)
    assert not worker.save_pending
    assert file_bytes(tmp_path / "background") == expected
    assert state_of(worker, tmp_path / "ours") == state_of(twin, tmp_path / "twin's")
    worker.finish_save(0.0)  # nothing was begun since


def test_a_save_load_or_close_waits_for_the_save_that_is_under_way(tmp_path, make_worker, disk):
    worker = make_worker()
    calls = {
        "begin": lambda: worker.begin_save(tmp_path / "after"),
        "save": lambda: worker.save(tmp_path / "after"),
        "load": lambda: worker.load(tmp_path / "first"),
        "close": worker.close,
    }
    for call in calls.values():
        train(worker, 1)
        version = worker.version
        disk.clear()
        worker.begin_save(tmp_path / "first")
        threading.Timer(0.3, disk.set).start()
        call()
        assert json.loads((tmp_path / "first" / "trainer.json").read_text())["version"] == version
        worker.finish_save(DEADLINE_S)


def test_a_save_that_fails_is_told_once_and_training_is_as_without_it(tmp_path, make_worker):
    worker, twin = make_worker(), make_worker()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    for path, words in (
        (tmp_path / "thesis", "is not a checkpoint that a worker saved"),
        (tmp_path / "thesis" / "thesis.tex" / "checkpoint", "NotADirectoryError"),
    ):
        worker.begin_save(path)
        assert train(worker, 1) == train(twin, 1)
        with pytest.raises(CheckpointError, match=words):
            worker.finish_save(DEADLINE_S)
        assert not worker.save_pending
        worker.finish_save(0.0)
    for refused in (worker.begin_save, worker.save):
        worker.begin_save(tmp_path / "thesis")
        with pytest.raises(CheckpointError, match="is not a checkpoint that a worker saved"):
            refused(tmp_path / "next")
        assert not (tmp_path / "next").exists()
    assert file_bytes(tmp_path) == {"thesis/thesis.tex": b"years of work"}
    assert state_of(worker, tmp_path / "ours") == state_of(twin, tmp_path / "twin's")


@pytest.mark.parametrize("num_ranks", first_of_each([2, 4], lambda _: "any"))
def test_ranks_save_while_their_collectives_train_and_one_rank_resumes(tmp_path, num_ranks):
    """Four ranks are two copies of two shards."""
    path = make_model(tmp_path / "model", tied=True, vocab_size=259, dtype=torch.float64, tokenizer=False)
    run_ranks(tmp_path, "background_program", num_ranks)
    for rank in range(num_ranks):
        seen = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert seen["pending"]
        assert not seen["there"]
        assert seen["failure"][0] == "CheckpointError"
        assert "is not a checkpoint that a worker saved" in seen["failure"][1]
        assert seen["again"] == seen["steps"]
    assert file_bytes(tmp_path / "background") == file_bytes(tmp_path / "blocking")
    assert file_bytes(tmp_path / "trained again") == file_bytes(tmp_path / "trained on")
    worker = inflight_fsdp.create_worker(settings(path, **ADAM))
    worker.load(tmp_path / "background")
    assert state_of(worker, tmp_path / "on one rank") == file_bytes(tmp_path / "blocking")
    worker.close()


def test_a_worker_that_is_killed_in_the_middle_leaves_the_earlier_checkpoint(tmp_path):
    path = make_model(tmp_path / "model", dtype=torch.float64, tokenizer=False)
    command = [python(), "-m", "tests.worker.killed_program", str(tmp_path)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    deadline = time.monotonic() + DEADLINE_S
    while not (tmp_path / "in the middle").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait(10)
    assert (tmp_path / ".checkpoint.new" / "trainer" / "optimizer.safetensors").stat().st_size > 1000
    assert file_bytes(tmp_path / "checkpoint") == file_bytes(tmp_path / "expected")
    worker = inflight_fsdp.create_worker(settings(path))
    worker.load(tmp_path / "checkpoint")
    assert worker.version == 0
    worker.close()

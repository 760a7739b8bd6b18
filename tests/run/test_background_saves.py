"""Runs that train on while a checkpoint is written, as their user sees them: slow disks, kills, other ranks."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.gates import StepGate
from tests.run.runs import ROOT, RunProcess

pytestmark = pytest.mark.timeout(300)

SLOW_DISK = """
import os, pathlib, time

fsync = os.fsync

def slow_fsync(descriptor):
    deadline = time.monotonic() + 120
    if pathlib.Path({marker!r}).exists():
        pathlib.Path({held!r}).write_text(os.readlink(f"/proc/self/fd/{{descriptor}}"))
    while pathlib.Path({marker!r}).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    fsync(descriptor)

os.fsync = slow_fsync
"""
SAVES = ("--run.background_saves", "true", "--run.checkpoint_every_steps", "2")


@pytest.fixture
def slow_disk(tmp_path: Path) -> Path:
    """A file; while it exists, no process of a run writes any file to the end."""
    marker = tmp_path / "the disk is slow"
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "sitecustomize.py").write_text(SLOW_DISK.format(marker=str(marker), held=f"{marker}: held"))
    return marker


@pytest.fixture
def start_run(start_run: Callable[..., RunProcess], tmp_path: Path) -> Callable[..., RunProcess]:
    return functools.partial(start_run, environment={"PYTHONPATH": f"{tmp_path / 'python'}:{ROOT}"})


def latest(run: RunProcess) -> int:
    pointer = run.directory / "checkpoints" / "latest.json"
    version: Any = json.loads(pointer.read_text())["version"] if pointer.exists() else -1
    return int(version)


def being_saved(run: RunProcess) -> int:
    partial = [path.name for path in (run.directory / "checkpoints").glob(".version-*.new")]
    return int(partial[0].removeprefix(".version-").removesuffix(".new")) if partial else -1


def wait_for_a_held_save(run: RunProcess, slow_disk: Path) -> None:
    """Wait until the slow disk keeps a save of the run from its end."""
    held = slow_disk.with_name(f"{slow_disk.name}: held")
    run.wait_until(lambda: held.exists() and "/.version-" in held.read_text())


def wait_for_checkpoint(run: RunProcess) -> None:
    run.wait_until(lambda: latest(run) >= 0)


@pytest.mark.exhaustive
def test_a_run_trains_on_while_the_disk_is_slow_and_resumes_on_fewer_ranks(
    start_run: Callable[..., RunProcess], slow_disk: Path
) -> None:
    slow_disk.touch()
    run = start_run(*SAVES, "--run.num_steps", "7", "--train.num_ranks", "2")
    run.wait_for_steps(4)  # the save of step 2 is under way; that of step 4 has to wait for it
    assert latest(run) == -1
    assert not list((run.directory / "checkpoints").glob("version-*"))
    slow_disk.unlink()
    assert run.wait() == 0, run.output()
    assert [row["version"] for row in run.rows()] == list(range(1, 8))
    assert latest(run) == 7
    kept = sorted(path.name for path in (run.directory / "checkpoints").glob("version-*/"))
    assert kept == ["version-000006", "version-000007"]
    resumed = start_run(*SAVES, "--run.num_steps", "9", "--resume")
    assert resumed.wait() == 0, resumed.output()
    assert [row["version"] for row in resumed.rows()] == list(range(1, 10))
    assert load_file(run.directory / "checkpoints" / "version-000009" / "model.safetensors")


@pytest.mark.exhaustive
def test_a_run_that_is_killed_while_it_saves_resumes_from_the_checkpoint_before(
    start_run: Callable[..., RunProcess], slow_disk: Path
) -> None:
    run = start_run(*SAVES, "--run.num_steps", "100000")
    wait_for_checkpoint(run)
    slow_disk.touch()
    wait_for_a_held_save(run, slow_disk)
    pending, before = being_saved(run), latest(run)
    run.wait_for_steps(pending + 1)
    run.kill()
    assert latest(run) == before < pending
    assert not (run.directory / "checkpoints" / f"version-{pending:06d}").exists()
    slow_disk.unlink()
    resumed = start_run(*SAVES, "--run.num_steps", str(before + 3), "--resume")
    assert resumed.wait() == 0, resumed.output()
    assert [row["version"] for row in resumed.rows()][-3:] == [before + 1, before + 2, before + 3]
    assert latest(resumed) == before + 3


def test_an_interrupt_waits_for_the_save_and_keeps_every_step(
    start_run: Callable[..., RunProcess], slow_disk: Path
) -> None:
    run = start_run(*SAVES, "--run.num_steps", "100000")
    wait_for_checkpoint(run)
    slow_disk.touch()
    run.wait_for_steps(len(run.rows()) + 1)
    run.interrupt()
    run.wait_for_output("stopping after this step")
    wait_for_a_held_save(run, slow_disk)
    assert run.process.poll() is None, run.output()
    slow_disk.unlink()
    assert run.wait() == 130, run.output()
    assert latest(run) == run.rows()[-1]["version"]


def test_a_save_that_fails_in_the_background_ends_the_run_with_the_cause(
    start_run: Callable[..., RunProcess], tmp_path: Path
) -> None:
    gate = StepGate(tmp_path / "steps", 3)
    run = start_run(*SAVES, "--run.num_steps", "100000", *gate.settings)
    run.wait_until(lambda: latest(run) == 2)
    before = latest(run)
    (run.directory / "checkpoints" / "version-000004").write_text("in the way")
    gate.open()
    assert run.wait() == 1
    assert "is not a checkpoint that a worker saved" in run.output()
    assert "Traceback" not in run.output()
    assert latest(run) >= before


def test_a_worker_that_cannot_save_in_the_background_is_refused(
    start_run: Callable[..., RunProcess], tmp_path: Path
) -> None:
    package = tmp_path / "python" / "plain_worker-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: plain-worker\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[inflight.workers]\nplain = tests.conformance.plain.worker:KIND\n")
    run = start_run(*SAVES, "--train.trainer", "plain")
    assert run.wait() == 1, run.output()
    assert "run.background_saves is true, but worker 'plain' cannot save in the background" in run.output()
    assert "Traceback" not in run.output()

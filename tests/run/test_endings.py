"""How a run ends, or continues, when its terminal, its output or its directory disappears."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run.runs import RunProcess

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("output", ["closed pipe", "/dev/full"])
def test_a_run_goes_on_to_its_end_when_its_output_cannot_be_written(
    start_run: Callable[..., RunProcess], output: str
) -> None:
    if output == "closed pipe":
        readable, writable = os.pipe()
        os.close(readable)
    else:
        writable = os.open(output, os.O_WRONLY)
    run = start_run(stdout=writable)
    os.close(writable)
    assert run.wait() == 0, run.output()
    assert run.summary()["version"] == 6
    assert "standard output cannot be written " in run.output()
    assert "Traceback" not in run.output()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_a_run_whose_terminal_is_closed_saves_and_can_be_resumed(
    start_run: Callable[..., RunProcess], number: signal.Signals
) -> None:
    run = start_run("--run.num_steps", "100000", "--run.checkpoint_every_steps", "100000")
    run.wait_for_steps(2)
    os.kill(run.processes()["controller"], number)
    assert run.wait() == 130, run.output()
    assert "to continue, run the same command with --resume" in run.output()
    assert (run.directory / "checkpoints" / "latest.json").exists()


@pytest.mark.parametrize("moment", ["stopping after this step", "to continue, run the same command"])
def test_impatient_interrupts_end_a_run_as_two_do(start_run: Callable[..., RunProcess], moment: str) -> None:
    run = start_run("--run.num_steps", "100000")
    run.wait_for_steps(2)
    controller = run.processes()["controller"]
    run.interrupt()
    run.wait_for_output(moment)
    for _ in range(5):
        if Path(f"/proc/{controller}").exists():
            os.kill(controller, signal.SIGINT)
    assert run.wait() == 130, run.output()
    assert "Traceback" not in run.output()
    assert "memory" not in run.output()


def test_a_run_whose_directory_is_deleted_ends_and_says_so(
    start_run: Callable[..., RunProcess], tmp_path: Path
) -> None:
    run = start_run("--run.num_steps", "100000")
    run.wait_for_steps(2)
    run.directory.rename(tmp_path / "deleted")
    shutil.rmtree(tmp_path / "deleted", ignore_errors=True)
    assert run.wait() == 1, run.output()
    assert f"run directory '{run.directory}' was deleted or replaced" in run.output()
    assert "inflight: written to" not in run.output()
    assert "Traceback" not in run.output()

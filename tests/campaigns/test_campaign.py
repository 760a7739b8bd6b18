"""A few schedules of the campaign, and the zygote that makes them cheap."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.campaigns import places
from tests.campaigns.campaign import play_all
from tests.run.runs import ends_within, is_alive
from tests.zygote import shared_python, zygote

FAST_SEEDS = (60, 16, 36, 56)
DISK_SEEDS = (51, 6)
"""Schedules that fill disks."""


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_disturbed_runs_hold(tmp_path):
    check(FAST_SEEDS, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_runs_on_full_disks_hold(tmp_path):
    if reason := places.can_mount():
        pytest.skip(reason)
    check(DISK_SEEDS, tmp_path)


def check(seeds, directory):
    said = []
    played = play_all(seeds, directory, num_jobs=4, tell=said.append)
    assert not any(one["problems"] for one in played), "\n".join(said)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    with zygote(tmp_path_factory.mktemp("zygote"), "inflight.cli") as python:
        yield python


@pytest.fixture
def serving(python, tmp_path):
    """A server that is forked from the zygote: what stands for it, and its own process id."""
    with (tmp_path / "server.log").open("wb") as log:
        shim = subprocess.Popen([python, "-m", "http.server", "0"], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    deadline = time.monotonic() + 20.0
    while "server" not in (found := places.processes(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.02)
    yield shim, found["server"]
    with contextlib.suppress(ProcessLookupError):
        os.kill(found["server"], signal.SIGKILL)
    shim.kill()
    shim.wait(10.0)


def test_what_stands_for_a_process_ends_as_it_does(python):
    version = subprocess.run([python, "-m", "inflight", "--version"], capture_output=True, text=True, timeout=60)
    assert version.returncode == 0 and version.stdout.startswith("inflight ")
    wrong = subprocess.run([python, "-m", "inflight", "nonsense"], capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2 and "nonsense" in wrong.stderr


def test_a_process_sees_its_own_input_environment_and_directory(python, tmp_path):
    run = subprocess.run(
        [python, "-m", "tests.campaigns.told", "argument"],
        input="some input",
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={"TOLD": "yes", "PATH": os.environ["PATH"]},
    )
    assert run.stdout.split() == ["some", "input", "yes", str(tmp_path), python, "['argument']"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_what_stands_for_a_process_dies_of_its_signal(serving, number):
    shim, pid = serving
    os.kill(pid, number)
    assert shim.wait(20.0) == -number


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_gets_the_signals_of_what_stands_for_it(serving, number):
    shim, pid = serving
    shim.send_signal(number)
    assert ends_within(pid, 20.0)
    assert shim.wait(20.0) == -number


def test_a_shared_zygote_is_used_once_it_listens_and_its_log_is_shown_if_it_never_does(python, tmp_path):
    assert shared_python(Path(python).with_suffix("")) == python
    (tmp_path / "zygote.log").write_text("ImportError: no such module")
    with pytest.raises(RuntimeError, match=r"did not start within 0.1 s: ImportError"):
        shared_python(tmp_path / "zygote", timeout_s=0.1)


def test_nothing_outlives_the_zygote(tmp_path):
    log = tmp_path / "server.log"
    with zygote(tmp_path, "inflight.cli") as python, log.open("wb") as output:
        shim = subprocess.Popen(
            [python, "-m", "http.server", "0"], stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        deadline = time.monotonic() + 20.0
        pid = shim.pid  # which writes to that log, too, until it is the shim
        while pid == shim.pid:
            assert time.monotonic() < deadline
            time.sleep(0.02)
            pid = places.processes(tmp_path).get("server", shim.pid)
    assert not is_alive(pid) or ends_within(pid, 5.0)
    shim.wait(20.0)

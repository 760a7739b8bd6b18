"""Engines of one's own behind ``inflight serve``: made by a function, or registered and started."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inflight.cli import main
from inflight.conformance import EndpointTarget, Kit, endpoint_checks
from inflight.conformance.verdicts import CheckOutcome

pytestmark = pytest.mark.usefixtures("forks")
THREADED = "tests.conformance.plain.threaded:make"
SERVE = "-m inflight serve {model} --port {port} --token-file {token_file}"
BY_ID = {check.id: check for check in endpoint_checks()}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_function_is_served_with_the_options_that_are_given() -> None:
    command = f"{shlex.quote(sys.executable)} {SERVE} --engine {THREADED} --name mine --engine-arg max_concurrent=3"
    with Kit(EndpointTarget(command=command)) as kit:
        assert kit.facts["capabilities"]["model"] == "mine"
        assert kit.facts["capabilities"]["max_concurrent_sequences"] == 3
        for name in ("E-10", "E-50", "E-54", "U-21", "U-51"):
            verdict = kit.run(BY_ID[name])
            assert verdict.outcome is CheckOutcome.PASSED, verdict


def test_an_installed_engine_is_started_and_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "plain_engine-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: plain-engine\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[inflight.engines]\nplain = tests.conformance.plain.kind:KIND\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), os.getcwd()]))
    with Kit(EndpointTarget(command=f"{shlex.quote(sys.executable)} {SERVE} --engine plain")) as kit:
        assert kit.facts["implementation"] == "plain"
        for name in ("E-10", "U-22"):
            verdict = kit.run(BY_ID[name])
            assert verdict.outcome is CheckOutcome.PASSED, verdict


MODULE = """
import contextlib, pathlib
from inflight.engines.embedded.loading import load_endpoint

def note(word):
    with pathlib.Path("notes").open("a") as notes:
        notes.write(word + "\\n")

class Endpoint:
    def __init__(self, inner): self.inner = inner
    def __getattr__(self, name): return getattr(self.inner, name)
    async def aclose(self):
        await self.inner.aclose()
        note("aclose")

@contextlib.asynccontextmanager
async def make(model_dir, **options):
    note(f"made with {sorted(options)}")
    try:
        yield Endpoint(load_endpoint(model_dir))
    finally:
        note("exit")

def nothing(model_dir):
    return "nothing"
"""


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "end of input"])
def test_an_endpoint_is_closed_before_its_context_manager_is_left(model_dir: Path, tmp_path: Path, how: str) -> None:
    (tmp_path / "my_engine.py").write_text(MODULE)
    command = [sys.executable, "-m", "inflight", "serve", str(model_dir), "--engine", "my_engine:make", "--port", "0"]
    command += ["--ready-file", str(tmp_path / "ready"), "--exit-with-stdin", "--dtype", "float32"]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=log, stderr=log) as server,
    ):
        try:
            deadline = time.monotonic() + 90
            while not (tmp_path / "ready").exists():
                assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.05)
            assert server.stdin is not None
            if how == "end of input":
                server.stdin.close()
            else:
                server.send_signal(getattr(signal, how))
            status = server.wait(60)
        finally:
            server.kill()
    assert (tmp_path / "notes").read_text().splitlines() == ["made with ['dtype']", "aclose", "exit"]
    assert status == {"SIGTERM": 143, "SIGINT": 130, "end of input": 0}[how], (tmp_path / "log").read_text()
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--engine", "no_such_module:make"), ("'no_such_module:make' cannot be imported",)),
        (("--engine", f"{THREADED}r"), ("cannot be imported", "maker")),
        (("--engine", "my engine:make"), ("my engine:make",)),
        (("--engine", THREADED, "--threads", "2"), (THREADED, "threads", "unexpected keyword argument")),
        (("--engine", THREADED, "--engine-arg", "two"), ("--engine-arg 'two' is not KEY=VALUE",)),
        (("--engine", THREADED, "--log", "file"), ("--log", THREADED)),
        (("--engine", "my_engine:nothing"), ("my_engine:nothing returned a str", "InferenceEndpoint")),
    ],
)
def test_what_cannot_be_served_is_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model_dir: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    (tmp_path / "my_engine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    path = list(sys.path)
    try:
        assert main(["serve", str(model_dir), "--port", "0", *arguments]) == 1
    finally:
        sys.path[:] = path
        for number, handler in handlers.items():
            signal.signal(number, handler)
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    for word in words:
        assert word in line

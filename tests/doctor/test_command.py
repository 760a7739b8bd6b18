"""The command ``inflight doctor``: what it prints, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from inflight.cli import main
from inflight.contracts import WorkerKind
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from tests.gates import BrakedServer, Gate, wait_until
from tests.models import make_model
from tests.servers import TOKEN, ServerProcess
from tests.weights.workers import PlainWorker, checkpoint, logprobs, weight_version
from tests.zygote import python

pytestmark = pytest.mark.timeout(300)
FEW = ("--prompts", "4", "--tokens", "24")
ROOT = Path(__file__).parents[2]


class GatedKind(WorkerKind):
    """Creates FSDP2 workers, but waits at the gate ``gate`` before it creates one with changed weights."""

    def create(self, settings: Mapping[str, object]) -> Any:
        from inflight_fsdp import create_worker

        others = dict(settings)
        gate = Gate(Path(str(others.pop("gate"))))
        if "parity" in Path(str(settings["model_path"])).parts:
            gate.pass_through()
        return create_worker(others)


GATED = GatedKind()


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def test_the_report_names_the_cause_the_place_the_evidence_and_what_mends_it(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "doctor.json"
    words = ["tests.doctor.planted:start", "--option", "cause=transformed again", "--model", str(model_dir)]
    assert main(["doctor", *words, *FEW, "--json", str(file)]) == 1
    printed = capsys.readouterr().out
    assert "embedded" in printed and "compared with transformers in float32" in printed
    assert "Cause 3: the loader changes what it loads." in printed
    assert "  evidence: with the same weights, logprobs differ by" in printed
    assert "  fix: load into untransformed parameters" in printed
    found = json.loads(file.read_text())
    assert [it["cause"]["number"] for it in found["findings"]] == [3]
    assert found["examination"]["same"]["same_weights"]["num_tokens"] == 4 * 24


def test_a_server_gets_its_weights_back_and_a_healthy_one_is_not_blamed(
    model_dir: Path,
    start_server: Callable[..., ServerProcess],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INFLIGHT_TOKEN", TOKEN)
    # Completions that run while weights change last for five seconds, or for half of the context.
    server = start_server(model_dir, "--max-model-len", "384")
    before = logprobs(server)
    assert main(["doctor", server.url, "--model", str(model_dir), "--worker", "fsdp", *FEW]) == 0
    assert "No cause of drift was found: the pair is healthy." in capsys.readouterr().out
    assert weight_version(server).state == "ready"
    assert logprobs(server) == pytest.approx(before, abs=1e-5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_gets_its_weights_back_when_the_examination_is_interrupted(
    model_dir: Path, tmp_path: Path, stack: contextlib.ExitStack, number: signal.Signals
) -> None:
    """The doctor waits before its first change of weights; then each token takes the server a tenth of a second."""
    server, progress, gate = (
        BrakedServer(model_dir, tmp_path / "server"),
        tmp_path / "progress",
        Gate(tmp_path / "gate"),
    )
    gate.close()
    stack.callback(server.kill)
    server.wait_until_ready()
    before = logprobs(server)
    with progress.open("wb") as log:
        command = [python(), "-m", "inflight", "doctor", server.url, "--model", str(model_dir), *FEW]
        command += ["--worker", "tests.doctor.test_command:GATED", "--worker-option", f"gate={gate.path}"]
        doctor = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=log, env={**os.environ, "INFLIGHT_TOKEN": TOKEN}
        )
    gate.wait_for_somebody()
    server.brake.put_on()
    gate.open()
    wait_until(lambda: "an update of every tensor" in progress.read_text(), "no update of every tensor")
    wait_until(lambda: logprobs(server) != pytest.approx(before, abs=1e-3), "the server's weights do not change")
    doctor.send_signal(number)
    assert doctor.wait(timeout=90) == 128 + number
    server.brake.release()
    assert weight_version(server).state == "ready"
    assert logprobs(server) == pytest.approx(before, abs=1e-5)


def test_a_server_that_it_started_ends_with_it(model_dir: Path, tmp_path: Path) -> None:
    started = tmp_path / "pid"
    serve = f"{python()} -m inflight serve {{model}} --port {{port}} --token-file {{token_file}}"
    command = [python(), "-m", "inflight", "doctor", "--model", str(model_dir)]
    command += ["--serve", f"sh -c 'echo $$ > {started}; exec {serve}'"]
    doctor = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: started.exists() and started.read_text().strip() != "", "the server was not started")
    doctor.terminate()
    doctor.wait(timeout=60)
    pid = int(started.read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the server still runs")


def test_a_server_with_the_weights_of_a_run_is_refused_and_keeps_them(
    model_dir: Path,
    start_server: Callable[..., ServerProcess],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INFLIGHT_TOKEN", TOKEN)
    server = start_server(model_dir)
    with WeightPublisher.connect([server.url], run_id="precious", token=TOKEN) as publisher:
        publish_weights(PlainWorker(checkpoint(model_dir), 5), publisher)
    assert main(["doctor", server.url, "--model", str(model_dir)]) == 2
    assert "serves version 5 of run 'precious'" in capsys.readouterr().err
    assert (weight_version(server).version, weight_version(server).run_id) == (5, "precious")
    assert main(["doctor", server.url]) == 2
    assert "--model DIR" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["doctor", "check parity"])
@pytest.mark.parametrize("vocab_size", [258, 300])
def test_a_server_of_another_checkpoint_is_refused_and_keeps_its_weights(
    command: str,
    vocab_size: int,
    model_dir: Path,
    tmp_path: Path,
    start_server: Callable[..., ServerProcess],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INFLIGHT_TOKEN", TOKEN)
    server = start_server(model_dir)
    other = make_model(tmp_path / "other", seed=5, vocab_size=vocab_size)
    before = logprobs(server)
    assert main([*command.split(), server.url, "--model", str(other), "--prompts", "2", "--tokens", "16"]) in (1, 2)
    error = capsys.readouterr().err
    assert f"{server.url} does not serve {str(other)!r}" in error and "Nothing was published" in error
    assert vocab_size != 258 or "nats on average" in error
    assert (weight_version(server).version, weight_version(server).run_id) == (0, None)
    assert logprobs(server) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{run}", "--model", "x", "--worker", "fsdp"], "omit --model, --worker"),
        (["{run}", "--prompts", "3"], "omit --prompts"),
        ([], "specify what to examine: the directory of a run"),
        (["http://127.0.0.1:9", "--model", "{model}"], "check that the server is running"),
    ],
)
def test_what_cannot_be_examined_has_status_2(
    words: list[str], said: str, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *(word.format(run=tmp_path, model=model_dir) for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_token_is_reported_with_how_to_give_it(
    model_dir: Path,
    start_server: Callable[..., ServerProcess],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("INFLIGHT_TOKEN", raising=False)
    assert main(["doctor", start_server(model_dir).url, "--model", str(model_dir), "--prompts", "2"]) == 2
    assert "--token-file or $INFLIGHT_TOKEN" in capsys.readouterr().err

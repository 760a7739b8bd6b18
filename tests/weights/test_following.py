"""Servers that take the newest stored version by themselves, while a worker stores and waits for nobody."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from inflight.cli import main
from inflight.errors import ConfigError
from inflight.weights.storing import StoreReport, newest_epoch, store_weights
from inflight.weights.transports import make_sender
from inflight.weights.transports.files import FileSender
from inflight.wire import PullSpec
from tests.servers import ServerProcess
from tests.weights.workers import PlainWorker, checkpoint, logprobs, scaled, weight_version

Start = Callable[..., ServerProcess]
RUN_ID = "followed"


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def stored(worker: PlainWorker, sender: FileSender, version: int, epoch: int = 1) -> StoreReport:
    worker.version = version
    report = store_weights(worker, sender, run_id=RUN_ID, epoch=epoch)
    assert report is not None
    return report


@pytest.mark.parametrize("backend", ["file", "http"])
def test_a_server_takes_what_is_stored_and_goes_to_the_newest_when_it_comes_late(
    backend: str, start_server: Start, model_dir: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "weights"
    sender = make_sender("http" if backend == "http" else "file", directory=directory)
    tensors = scaled(checkpoint(model_dir), 1.05)
    worker = PlainWorker(tensors, 1)
    report = store_weights(worker, sender, run_id=RUN_ID, encoding="raw")
    assert report is not None
    assert report.stored_bytes == report.size_bytes == sum(t.nbytes for t in tensors.values())
    for worker.version in (2, 3):
        store_weights(worker, sender, run_id=RUN_ID)
    place = ["--follow", str(directory)]
    if isinstance(report.spec, PullSpec):
        token_file = tmp_path / "token"
        token_file.write_text(report.spec.token)
        place = ["--follow", report.spec.url, "--follow-token-file", str(token_file)]
    server = start_server(model_dir, *place, "--follow-run", RUN_ID)
    wait_until(lambda: weight_version(server).version == 3, server.log())
    before = logprobs(server)
    worker.tensors = scaled(tensors, 0.9)
    worker.version = 4
    store_weights(worker, sender, run_id=RUN_ID)
    wait_until(lambda: weight_version(server).version == 4, server.log())
    assert logprobs(server) != before
    log = server.log()
    assert f"serving version 3 of run '{RUN_ID}'" in log
    assert "serving version 1" not in log
    sender.abort()


def test_a_damaged_version_is_told_and_left_for_the_next_one(
    start_server: Start, model_dir: Path, tmp_path: Path
) -> None:
    sender = FileSender(tmp_path)
    worker = PlainWorker(checkpoint(model_dir), 1)
    report = stored(worker, sender, 1)
    bucket = next((tmp_path / RUN_ID / f"1-{report.ref.session_id}").glob("*.safetensors"))
    content = bytearray(bucket.read_bytes())
    content[-1] ^= 1
    bucket.write_bytes(content)
    server = start_server(model_dir, "--follow", str(tmp_path), "--follow-run", RUN_ID)
    wait_until(lambda: "trying again" in server.log(), server.log())
    assert weight_version(server).version == 0
    stored(worker, sender, 2)
    wait_until(lambda: weight_version(server).version == 2, server.log())


def test_a_later_incarnation_is_followed_and_an_older_one_is_not(
    start_server: Start, model_dir: Path, tmp_path: Path
) -> None:
    sender = FileSender(tmp_path)
    worker = PlainWorker(checkpoint(model_dir), 7)
    assert newest_epoch(tmp_path, RUN_ID) == 0
    server = start_server(model_dir, "--follow", str(tmp_path), "--follow-run", RUN_ID)
    stored(worker, sender, 7, epoch=1)
    wait_until(lambda: weight_version(server).version == 7, server.log())
    stored(worker, sender, 3, epoch=2)
    wait_until(lambda: weight_version(server).version == 3, server.log())
    assert newest_epoch(tmp_path, RUN_ID) == 2
    stored(worker, sender, 8, epoch=1)
    wait_until(lambda: "epoch 2 has taken over" in server.log(), server.log())
    assert weight_version(server).version == 3


def test_storing_needs_a_sender_that_stores(model_dir: Path) -> None:
    worker = PlainWorker({"x": torch.zeros(2)}, 1)
    for sender in (None, make_sender("gloo")):
        with pytest.raises(ConfigError, match="needs a sender that stores"):
            store_weights(worker, sender, run_id=RUN_ID)
    assert worker.num_exhausted == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--follow", "weights"], "--follow needs --follow-run"),
        (["--follow-run", "x"], "are for --follow DIR_OR_URL"),
        (["--follow", "http://127.0.0.1:9", "--follow-run", "x"], "asks for a token"),
    ],
)
def test_what_to_follow_is_said_whole(
    words: list[str], expected: str, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(model_dir), "--port", "0", *words]) == 1
    assert expected in capsys.readouterr().err

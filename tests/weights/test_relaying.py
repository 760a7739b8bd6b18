"""Relays: versions of a run on another host, copied once, for the servers there."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.cli import main
from inflight.errors import TransferError
from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import checksum
from inflight.weights.receive.following import relay
from inflight.weights.send.storing import store_weights
from inflight.weights.transports import make_sender
from inflight.weights.transports.bucket_files import StoredUpdate
from inflight.weights.transports.file_server import FileServer
from inflight.weights.transports.files import DirectoryReceiver
from inflight.weights.transports.store import run_name, session_name
from inflight.wire import DirectorySpec, HttpFileSpec
from tests.gates import SOON_S, wait_until
from tests.servers import ServerProcess
from tests.weights.stored import CuttingProxy
from tests.weights.workers import PlainWorker, checkpoint, logprobs, scaled, weight_version
from tests.zygote import python

RUN_ID = "relayed"
TOKEN = "a-token-of-relays"


class Relay:
    """`relay` in a thread, until it is left."""

    def __init__(self, spec: DirectorySpec | HttpFileSpec, directory: Path) -> None:
        self.notes: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(spec, directory), daemon=True)

    def _run(self, spec: DirectorySpec | HttpFileSpec, directory: Path) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(
            relay(spec, directory, poll_s=0.02, deadline_s=20.0, note=self.notes.append)
        )
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(lambda: self._task.cancel())
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()
        self._loop.close()


class Damaging:
    """A sender of buckets that are no longer what their checksums say."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sender, name)

    def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        wrong = checksum(torch.zeros(1, dtype=torch.uint8))
        self._sender.send(dataclasses.replace(bucket, checksum=wrong), timeout_s)


def spec_of(directory: Path) -> DirectorySpec:
    return DirectorySpec(run_id=RUN_ID, transport="file", directory=str(directory), timeout_s=10.0)


def newest(directory: Path) -> StoredUpdate | None:
    """Return the newest version, None if there is none or it is just replaced by the next one."""
    receiver = DirectoryReceiver(spec_of(directory))
    ref = receiver.latest(10.0)
    try:
        return None if ref is None else receiver.read_manifest(ref, 10.0)
    except TransferError:
        return None


def files_of(directory: Path, stored: StoredUpdate) -> dict[str, bytes]:
    path = directory / run_name(RUN_ID) / session_name(stored.update.ref)
    return {bucket.file: (path / bucket.file).read_bytes() for bucket in stored.buckets}


@pytest.mark.parametrize("encoding", ["raw", "float8"])
@pytest.mark.parametrize("source", ["file", "http"])
def test_each_version_is_there_as_the_trainer_stored_it(tmp_path: Path, source: str, encoding: str) -> None:
    first, second = tmp_path / "trainer", tmp_path / "relay"
    sender = make_sender("http" if source == "http" else "file", directory=first)
    worker = PlainWorker({f"w{i}": torch.randn(40, 128) for i in range(4)}, 1)
    report = store_weights(worker, sender, run_id=RUN_ID, encoding=encoding, bucket_bytes=50_000)  # type: ignore[arg-type]
    assert isinstance(report.spec, DirectorySpec | HttpFileSpec)
    with Relay(report.spec, second) as relaying:
        for worker.version in (1, 2, 3):
            if worker.version > 1:
                store_weights(worker, sender, run_id=RUN_ID, encoding=encoding, bucket_bytes=50_000)  # type: ignore[arg-type]
            wait_until(lambda: newest(second) == newest(first), "the version did not come")
            here = newest(second)
            assert here is not None
            assert len(here.buckets) > 1
            assert files_of(second, here) == files_of(first, here)
        wait_until(lambda: len(relaying.notes) == 3, "not each version was told")
    sender.abort()


def test_a_bucket_that_arrives_damaged_is_said_and_the_version_before_stays(tmp_path: Path) -> None:
    first, second = tmp_path / "trainer", tmp_path / "relay"
    sender = make_sender("file", directory=first)
    worker = PlainWorker({"w": torch.randn(40, 64)}, 1)
    store_weights(worker, sender, run_id=RUN_ID)
    with Relay(spec_of(first), second) as relaying:
        wait_until(lambda: newest(second) == newest(first), "the version did not come")
        good = newest(second)
        worker.version = 2
        store_weights(worker, Damaging(sender), run_id=RUN_ID)
        wait_until(lambda: any("checksum" in note for note in relaying.notes), "nothing was said")
        assert newest(second) == good
        worker.version = 3
        store_weights(worker, sender, run_id=RUN_ID)
        wait_until(lambda: newest(second) == newest(first), "it did not continue")


def test_servers_of_two_hosts_follow_their_relays_which_form_a_tree(
    start_server: Callable[..., ServerProcess], model_dir: Path, tmp_path: Path
) -> None:
    """The trainer serves one relay, which serves the other one; each version leaves the trainer once."""
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    trainer, upper, lower = (tmp_path / name for name in ("trainer", "upper", "lower"))
    sender = make_sender("file", directory=trainer)
    tensors = checkpoint(model_dir)
    worker = PlainWorker(scaled(tensors, 1.05), 1)
    store_weights(worker, sender, run_id=RUN_ID)
    link = FileServer(trainer, "127.0.0.1", token=TOKEN)
    proxy = CuttingProxy(int(link.url.rpartition(":")[2]), ())
    with contextlib.ExitStack() as stack:
        stack.callback(link.stop)
        stack.callback(proxy.close)
        said = stack.enter_context(relay_process(proxy.url, token_file, upper, "--host", "127.0.0.1"))
        (above,) = (line.split()[-1] for line in said(2) if "serving it at" in line)
        stack.enter_context(relay_process(above, token_file, lower))
        servers = [
            start_server(model_dir, "--follow", str(directory), "--follow-run", RUN_ID)
            for directory in (upper, lower, lower)
        ]
        for version, factor in ((1, 1.05), (2, 0.95)):
            if version > 1:
                store_weights(PlainWorker(scaled(tensors, factor), version), sender, run_id=RUN_ID)
            wait_until(lambda: all(weight_version(s).version == version for s in servers), "it never came")  # noqa: B023
        size = sum(tensor.nbytes for tensor in tensors.values())
        # Three servers by themselves would take 6 times this size.
        assert 2 * size <= proxy.num_bytes < 3 * size  # with headers, manifests and questions
        first, *others = (logprobs(server) for server in servers)
        assert all(first == other for other in others)


@contextlib.contextmanager
def relay_process(source: str, token_file: Path, directory: Path, *more: str) -> Iterator[Callable[[int], list[str]]]:
    words = ["relay", source, "--run", RUN_ID, "--token-file", str(token_file), "--directory", str(directory), *more]
    with subprocess.Popen([python(), "-m", "inflight", *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        stdout = process.stdout
        try:
            yield lambda number: [stdout.readline() for _ in range(number)]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(SOON_S) == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["weights", "--run", "r", "--port", "80"], "--port needs --host"),
        (["weights", "--run", "r", "--host", "127.0.0.1"], "--host needs a token"),
        (["http://127.0.0.1:1", "--run", "r"], "requires a token"),
        (["weights", "--run", "r", "--directory", "weights"], "is the source itself"),
        (["weights", "--run", "r", "--deadline", "0"], "--deadline must be a number above 0"),
    ],
)
def test_what_cannot_be_relayed_is_refused(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("INFLIGHT_TOKEN", raising=False)
    assert main(["relay", *words]) == 1
    assert text in capsys.readouterr().err


def test_an_address_that_cannot_be_bound_is_said(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match=r"203\.0\.113\.1"):
        FileServer(tmp_path, "203.0.113.1")

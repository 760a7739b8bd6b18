"""Servers that take the newest stored version by themselves, while a worker stores and waits for nobody."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from inflight.base.threads import run_abandonable
from inflight.cli import main
from inflight.contracts import InferenceEndpoint
from inflight.errors import ConfigError, TrainerError, TransferError
from inflight.weights.encode.bucket_bytes import checksum, payload_spec
from inflight.weights.receive.following import StoredRun, follow
from inflight.weights.send.storing import StoreReport, newest_incarnation, store_weights
from inflight.weights.transports import make_receiver, make_sender
from inflight.weights.transports.bucket_files import LEASE_S
from inflight.weights.transports.files import DirectorySender
from inflight.weights.transports.store import session_name
from inflight.wire import (
    BucketTransfer,
    DirectorySpec,
    EndpointState,
    HttpFileSpec,
    TensorSpec,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
)
from tests.gates import NEVER_S, SOON_S, until, wait_until
from tests.selection import first_of_each
from tests.servers import ServerProcess
from tests.weights.stored import latest, lease, read_manifest
from tests.weights.workers import LORA, LoraWorker, PlainWorker, checkpoint, logprobs, scaled, weight_version

Start = Callable[..., ServerProcess]
RUN_ID = "followed"


def stored(worker: PlainWorker, sender: DirectorySender, version: int, incarnation: int = 1) -> StoreReport:
    worker.version = version
    report = store_weights(worker, sender, run_id=RUN_ID, incarnation=incarnation)
    assert report is not None
    return report


@pytest.mark.parametrize("transport", ["file", "http"])
def test_a_server_takes_what_is_stored_and_goes_to_the_newest_when_it_comes_late(
    transport: str, start_server: Start, model_dir: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "weights"
    sender = make_sender("http" if transport == "http" else "file", directory=directory)
    tensors = scaled(checkpoint(model_dir), 1.05)
    worker = PlainWorker(tensors, 1)
    report = store_weights(worker, sender, run_id=RUN_ID, encoding="raw")
    assert report is not None
    assert report.stored_bytes == report.size_bytes == sum(t.nbytes for t in tensors.values())
    for worker.version in (2, 3):
        store_weights(worker, sender, run_id=RUN_ID)
    place = ["--follow", str(directory)]
    if isinstance(report.spec, HttpFileSpec):
        token_file = tmp_path / "token"
        token_file.write_text(report.spec.token)
        place = ["--follow", report.spec.url, "--follow-token-file", str(token_file)]
    server = start_server(model_dir, *place, "--follow-run", RUN_ID)
    wait_until(lambda: weight_version(server).version == 3, server.log)
    before = logprobs(server)
    worker.tensors = scaled(tensors, 0.9)
    worker.version = 4
    store_weights(worker, sender, run_id=RUN_ID)
    wait_until(lambda: weight_version(server).version == 4, server.log)
    assert logprobs(server) != before
    log = server.log()
    assert f"serving version 3 of run '{RUN_ID}'" in log
    assert "serving version 1" not in log
    sender.abort()


def test_a_damaged_version_is_told_and_left_for_the_next_one(
    start_server: Start, model_dir: Path, tmp_path: Path
) -> None:
    sender = DirectorySender(tmp_path)
    worker = PlainWorker(checkpoint(model_dir), 1)
    report = stored(worker, sender, 1)
    bucket = next((tmp_path / RUN_ID / f"1-{report.ref.session_id}").glob("*.safetensors"))
    content = bytearray(bucket.read_bytes())
    content[-1] ^= 1
    bucket.write_bytes(content)
    server = start_server(model_dir, "--follow", str(tmp_path), "--follow-run", RUN_ID)
    wait_until(lambda: "retrying" in server.log(), server.log)
    assert weight_version(server).version == 0
    stored(worker, sender, 2)
    wait_until(lambda: weight_version(server).version == 2, server.log)


def test_a_later_incarnation_is_followed_and_an_older_one_is_not(
    start_server: Start, model_dir: Path, tmp_path: Path
) -> None:
    sender = DirectorySender(tmp_path)
    worker = PlainWorker(checkpoint(model_dir), 7)
    assert newest_incarnation(tmp_path, RUN_ID) == 0
    server = start_server(model_dir, "--follow", str(tmp_path), "--follow-run", RUN_ID)
    stored(worker, sender, 7, incarnation=1)
    wait_until(lambda: weight_version(server).version == 7, server.log)
    stored(worker, sender, 3, incarnation=2)
    wait_until(lambda: weight_version(server).version == 3, server.log)
    assert newest_incarnation(tmp_path, RUN_ID) == 2
    stored(worker, sender, 8, incarnation=1)
    wait_until(lambda: "incarnation 2 has taken over" in server.log(), server.log)
    assert weight_version(server).version == 3


def test_what_is_stored_is_announced_and_checked_as_in_a_publish(tmp_path: Path) -> None:
    class Lying(PlainWorker):
        def parameter_specs(self) -> list[TensorSpec]:
            return [spec.model_copy(update={"dtype": "float64"}) for spec in super().parameter_specs()]

    sender = DirectorySender(tmp_path)
    ref = stored(LoraWorker({"a": torch.zeros(2)}, 1), sender, 1).ref
    assert read_manifest(tmp_path, ref).update.manifest.lora == LORA
    with pytest.raises(TrainerError, match="parameter_specs announced"):
        stored(Lying({"w": torch.zeros(2)}, 2), sender, 2)
    assert latest(tmp_path, RUN_ID) == ref


def test_storing_needs_a_sender_that_stores(model_dir: Path) -> None:
    worker = PlainWorker({"x": torch.zeros(2)}, 1)
    with pytest.raises(ConfigError, match="needs a sender that stores"):
        store_weights(worker, make_sender("gloo"), run_id=RUN_ID)
    assert worker.num_exhausted == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--follow", "weights"], "--follow requires --follow-run"),
        (["--follow-run", "x"], "require --follow DIR_OR_URL"),
        (["--follow", "http://127.0.0.1:9", "--follow-run", "x"], "requires a token"),
    ],
)
def test_what_to_follow_is_said_whole(
    words: list[str], expected: str, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(model_dir), "--port", "0", *words]) == 1
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "run_id", "words"),
    [
        ("http://[", "run", "url: .*"),
        ("http://host:port/x", "run", "url: .*[Pp]ort"),
        ("http://a..b", "run", "url: .*neither an IP address nor a host name"),
        ("/a\0b", "run", "directory: .*NUL"),
        ("/a", "r" * 2000, "run_id: .*1024"),
    ],
)
def test_a_place_that_cannot_be_followed_is_no_configuration(place: str, run_id: str, words: str) -> None:
    from inflight.weights.receive.following import store_spec

    with pytest.raises(ConfigError, match=rf"cannot be followed at .*{words}"):
        store_spec(place, run_id, "token")


class SlowReader:
    """An endpoint that waits for something before each bucket, and notes what it serves."""

    name = "slow"

    def __init__(self, pause: Callable[[], Awaitable[None]] | None = None) -> None:
        self.pause = pause
        self.served: list[UpdateRef] = []
        self.state = EndpointState.READY
        self.is_ready = asyncio.Event()

    async def capabilities(self) -> SimpleNamespace:
        return SimpleNamespace(staging=True)

    async def weight_version(self) -> WeightVersion:
        if not self.served:
            return WeightVersion(state=EndpointState.READY, version=0)
        ref = self.served[-1]
        return WeightVersion(state=self.state, version=ref.version, run_id=ref.run_id, session_id=ref.session_id)

    async def init_process_group(self, spec: DirectorySpec | HttpFileSpec) -> None:
        self._receiver = make_receiver(spec)
        await asyncio.to_thread(self._receiver.join)

    async def request_weight_update(self, update: WeightUpdate) -> None:
        self._receiver.begin(update.ref)

    async def receive_weights(self, bucket: BucketTransfer) -> None:
        if self.pause is not None:
            await self.pause()
        assert bucket.size_bytes is not None
        spec = payload_spec(bucket.size_bytes)
        (flat,) = await run_abandonable(lambda: self._receiver.receive((spec,), bucket.timeout_s), "slow")
        assert checksum(flat) == bucket.checksum

    async def commit_weight_update(self, ref: UpdateRef) -> WeightVersion:
        self._receiver.abort()
        self.served.append(ref)
        self.state = EndpointState.READY
        self.is_ready.set()
        return await self.weight_version()

    async def abort_weight_update(self, ref: UpdateRef) -> WeightVersion:
        self._receiver.abort()
        return await self.weight_version()


def complete_updates(directory: Path) -> list[Path]:
    return [path.parent for path in directory.rglob("manifest.json")]


@pytest.mark.parametrize("transport", first_of_each(["file", "http", "http without a directory"], lambda _: "any"))
def test_a_reader_that_is_slower_than_many_publishes_gets_on_and_the_disk_stays_bounded(
    transport: str, tmp_path: Path
) -> None:
    directory = None if "without" in transport else tmp_path
    sender = make_sender("file" if transport == "file" else "http", directory=directory)
    worker = PlainWorker({f"w{i}": torch.full((1000,), float(i)) for i in range(4)}, 1)
    report = store_weights(worker, sender, run_id=RUN_ID, bucket_bytes=4000)
    assert report is not None and isinstance(report.spec, DirectorySpec | HttpFileSpec)
    home = tmp_path if directory is not None else sender._home.path  # type: ignore[attr-defined]
    notes, most = list[str](), 0

    async def let_two_be_stored() -> None:
        enough = worker.version + 2
        await until(lambda: worker.version >= enough, "nothing is stored")

    reader = SlowReader(let_two_be_stored)

    async def main(spec: DirectorySpec | HttpFileSpec) -> None:
        nonlocal most
        endpoint = cast("InferenceEndpoint", reader)
        following = asyncio.ensure_future(follow(endpoint, spec, note=notes.append, deadline_s=NEVER_S))
        while len(reader.served) < 3:
            worker.version += 1
            await asyncio.to_thread(store_weights, worker, sender, run_id=RUN_ID, bucket_bytes=4000)
            most = max(most, len(complete_updates(home)))
            await asyncio.sleep(0.01)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(main(report.spec))
    sender.abort()
    versions = [ref.version for ref in reader.served]
    assert len(versions) == 3 and versions == sorted(set(versions)), notes
    assert worker.version > 2 * versions[0] + 6  # it was slower than several publishes
    assert not [note for note in notes if "retrying" in note]
    assert most <= 2 + 1 + 1  # the newest, the one that is read, and the one that was stored meanwhile


def test_torn_weights_are_replaced_whatever_version_they_are_said_to_be(tmp_path: Path) -> None:
    sender = make_sender("file", directory=tmp_path)
    report = store_weights(PlainWorker({"w": torch.zeros(10)}, 1), sender, run_id=RUN_ID)
    assert report is not None and isinstance(report.spec, DirectorySpec)
    reader = SlowReader()
    reader.served, reader.state = [report.ref], EndpointState.POISONED

    async def main(spec: DirectorySpec) -> None:
        following = asyncio.ensure_future(follow(cast("InferenceEndpoint", reader), spec, note=print))
        async with asyncio.timeout(SOON_S):
            await reader.is_ready.wait()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(main(report.spec))
    sender.abort()
    assert reader.served == [report.ref, report.ref]


@pytest.mark.parametrize("transport", ["file", "http"])
def test_a_version_that_is_removed_before_it_was_leased_is_no_trouble(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_sender(transport, directory=tmp_path)
    worker = PlainWorker({"w": torch.zeros(10)}, 1)
    report = store_weights(worker, sender, run_id=RUN_ID)
    assert report is not None and isinstance(report.spec, DirectorySpec | HttpFileSpec)
    reader, notes, ask = SlowReader(), list[str](), StoredRun.latest

    async def late(self: StoredRun, timeout_s: float) -> UpdateRef | None:
        answer = await ask(self, timeout_s)
        if worker.version < 5:  # between question and lease, the answer goes out of store
            for version in range(2, 6):
                worker.version = version
                await asyncio.to_thread(store_weights, worker, sender, run_id=RUN_ID)
        return answer

    monkeypatch.setattr(StoredRun, "latest", late)

    async def main(spec: DirectorySpec | HttpFileSpec) -> None:
        following = asyncio.ensure_future(follow(cast("InferenceEndpoint", reader), spec, note=notes.append))
        await asyncio.to_thread(wait_until, lambda: reader.served, "no version is served")
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(main(report.spec))
    sender.abort()
    assert [ref.version for ref in reader.served] == [5]
    assert notes == ["serving version 5 of run 'followed'"]


def test_the_lease_of_a_dead_reader_ends_and_at_most_a_few_are_respected(tmp_path: Path) -> None:
    sender = DirectorySender(tmp_path)
    worker = PlainWorker({"w": torch.zeros(10)}, 0)

    def store() -> UpdateRef:
        return stored(worker, sender, worker.version + 1).ref

    def is_there(ref: UpdateRef) -> bool:
        return (tmp_path / RUN_ID / session_name(ref) / "manifest.json").exists()

    dead, alive = store(), store()
    lease(tmp_path, dead, f"lease-{0:016x}")
    lease(tmp_path, alive, f"lease-{1:016x}")
    store(), store(), store()
    assert is_there(dead) and is_there(alive)
    long_ago = time.time() - LEASE_S - 1
    os.utime(tmp_path / RUN_ID / session_name(dead) / f"lease-{0:016x}", (long_ago, long_ago))
    store()
    assert not is_there(dead) and is_there(alive)
    with pytest.raises(TransferError, match="has been removed, or is incomplete"):
        lease(tmp_path, dead, f"lease-{0:016x}")
    lease(tmp_path, store(), f"lease-{1:016x}")  # its reader continues to the next
    store(), store()
    assert not is_there(alive)
    for number in range(20):
        lease(tmp_path, store(), f"lease-{number + 2:016x}")
    assert len(complete_updates(tmp_path)) <= 2 + 4 + 1


def test_a_version_that_is_removed_under_a_reader_ends_its_update_at_once(tmp_path: Path) -> None:
    sender = DirectorySender(tmp_path)
    worker = PlainWorker({f"w{i}": torch.zeros(1000) for i in range(4)}, 1)
    report = store_weights(worker, sender, run_id=RUN_ID, bucket_bytes=4000)
    assert report is not None and isinstance(report.spec, DirectorySpec)
    has_come, may_go_on, num_asked = asyncio.Event(), asyncio.Event(), 0

    async def hold_the_second_bucket() -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 2:
            has_come.set()
            await may_go_on.wait()

    reader, notes = SlowReader(hold_the_second_bucket), list[str]()

    async def main(spec: DirectorySpec) -> None:
        endpoint = cast("InferenceEndpoint", reader)
        following = asyncio.ensure_future(follow(endpoint, spec, note=notes.append, deadline_s=NEVER_S))
        await has_come.wait()
        shutil.rmtree(tmp_path / RUN_ID / session_name(report.ref))
        stored(worker, sender, 2)
        may_go_on.set()
        await until(lambda: reader.served, "no version is served")
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(main(report.spec))
    assert [ref.version for ref in reader.served] == [2]
    assert "has been removed, or is incomplete" in notes[0]

"""Weights over HTTP: who may read what, and what happens when a connection is cut."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import httpx
import pytest
from starlette.responses import FileResponse

from inflight.errors import TransferError
from inflight.weights.transports import ranges
from inflight.weights.transports.http_files import HttpFileReceiver, HttpFileSender
from inflight.weights.transports.store import Attempt
from inflight.wire import HttpFileSpec, TensorSpec
from tests.gates import NEVER_S, SOON_S, wait_until
from tests.weights.stored import (
    CuttingProxy,
    assert_same,
    latest,
    make_buckets,
    make_update,
    open_handles,
    payload,
    plain_update,
    publish,
    receive,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HttpFileSender, HttpFileSpec, Path]]:
    """A sender whose version 1 holds two buckets of a megabyte; tests only read."""
    directory = tmp_path_factory.mktemp("store")
    sender = HttpFileSender(directory)
    (spec,) = sender.specs("run", [1], 5.0)
    update = plain_update(1, size_bytes=1 << 20)
    publish(sender, update, make_buckets(update))
    sender.end(is_done=True)
    yield sender, spec, directory
    sender.abort()


@pytest.fixture
def spec(store: tuple[HttpFileSender, HttpFileSpec, Path]) -> HttpFileSpec:
    return store[1]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_PART_BYTES", 200_000)


UPDATE = plain_update(1, size_bytes=1 << 20)
BUCKETS = make_buckets(UPDATE)


def client(spec: HttpFileSpec, token: str | None = None) -> httpx.Client:
    return httpx.Client(
        base_url=spec.url, headers={"Authorization": f"Bearer {token or spec.token}"}, trust_env=False, timeout=5.0
    )


def test_buckets_of_many_parts_arrive_whole(spec: HttpFileSpec, small_parts: None) -> None:
    receiver = HttpFileReceiver(spec)
    receiver.join()
    assert_same(receive(receiver, UPDATE, BUCKETS), BUCKETS)
    assert_same(receive(receiver, UPDATE, BUCKETS), BUCKETS)
    receiver.abort()


def test_a_header_longer_than_the_first_request_is_read_whole(tmp_path: Path) -> None:
    specs = [TensorSpec(name=f"model.layers.{i}.weight", dtype="bfloat16", shape=(2,)) for i in range(3000)]
    update = make_update(specs=specs, cuts=(0, 3000))
    sender = HttpFileSender(tmp_path)
    receiver = HttpFileReceiver(sender.specs("run", [1], 5.0)[0])
    publish(sender, update, make_buckets(update))
    assert_same(receive(receiver, update, make_buckets(update)), make_buckets(update))
    receiver.abort()
    sender.abort()


@pytest.mark.parametrize(
    "cuts", [[0], [10], [400], [70_000], [100_000, 250_000, 0, 50, 150, 170, 200, 230, 250, 1000, 300_000]]
)
def test_a_connection_that_is_cut_is_resumed_where_it_was(
    spec: HttpFileSpec, small_parts: None, monkeypatch: pytest.MonkeyPatch, cuts: list[int]
) -> None:
    monkeypatch.setattr(ranges, "_NUM_CONNECTIONS", 1)  # of several, one may have ended before its cut
    monkeypatch.setattr(ranges, "_LAST_BACKOFF_S", 0.02)
    proxy = CuttingProxy(int(spec.url.rpartition(":")[2]), cuts)
    receiver = HttpFileReceiver(spec.model_copy(update={"url": proxy.url}))
    assert_same(receive(receiver, UPDATE, BUCKETS), BUCKETS)
    receiver.abort()
    proxy.close()
    assert proxy.num_cut == len(cuts)


def test_a_connection_that_stalls_is_cut_and_resumed(spec: HttpFileSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_STALLED_S", 0.2)
    proxy = CuttingProxy(int(spec.url.rpartition(":")[2]), [200_000], stall=True)
    receiver = HttpFileReceiver(spec.model_copy(update={"url": proxy.url}))
    assert_same(receive(receiver, UPDATE, BUCKETS), BUCKETS)
    receiver.abort()
    proxy.close()


def test_a_server_that_goes_on_cutting_is_given_up_after_the_timeout_with_the_cause(spec: HttpFileSpec) -> None:
    proxy = CuttingProxy(int(spec.url.rpartition(":")[2]), [0] * 1000)
    receiver = HttpFileReceiver(spec.model_copy(update={"url": proxy.url}))
    receiver.begin(UPDATE.ref)
    began = time.monotonic()
    with pytest.raises(TransferError, match=rf"bucket 0 of version 1 failed: {proxy.url}/run/1-s/00000.*after 0.5 s"):
        receiver.receive((payload(1 << 20),), 0.5)
    assert time.monotonic() - began < SOON_S
    assert proxy.num_cut < 30, "it waits between tries"
    receiver.abort()
    proxy.close()


def test_nobody_listening_is_an_error_with_the_address(spec: HttpFileSpec) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    gone = spec.model_copy(update={"url": f"http://127.0.0.1:{port}", "timeout_s": 0.2})
    with pytest.raises(TransferError, match=rf"joining the weight group failed: .*{port}.*refused"):
        HttpFileReceiver(gone).join()


def test_abort_ends_a_fetch_that_stalls(spec: HttpFileSpec) -> None:
    proxy = CuttingProxy(int(spec.url.rpartition(":")[2]), [200_000] * 3, stall=True)
    receiver = HttpFileReceiver(spec.model_copy(update={"url": proxy.url}))
    raised: list[str] = []

    def pending() -> None:
        with pytest.raises(TransferError) as error:
            receive(receiver, UPDATE, BUCKETS)
        raised.append(str(error.value))

    thread = threading.Thread(target=pending)
    thread.start()
    wait_until(lambda: proxy.num_cut, "the proxy has cut nothing")
    receiver.abort()
    thread.join(SOON_S)
    assert raised and "abandoned" in raised[0]

    def busy() -> list[str]:
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if name.startswith(("inflight-pull", "receiving"))]

    wait_until(lambda: not busy(), "its threads do not end")
    proxy.close()


def test_a_wrong_token_is_refused_at_once_and_never_written_anywhere(
    spec: HttpFileSpec, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    receiver = HttpFileReceiver(spec.model_copy(update={"token": "very-wrong"}))
    receiver.begin(UPDATE.ref)
    began = time.monotonic()
    for call in (
        receiver.join,
        lambda: receiver.receive((payload(1 << 20),), NEVER_S),
        lambda: receiver.latest(NEVER_S),
    ):
        with pytest.raises(TransferError, match="refused the token") as raised:
            call()
        assert "very-wrong" not in str(raised.value) + repr(raised.value.__cause__)
    assert time.monotonic() - began < SOON_S
    receiver.abort()
    good = HttpFileReceiver(spec)
    receive(good, UPDATE, BUCKETS)
    good.abort()
    assert "very-wrong" not in caplog.text and spec.token not in caplog.text + repr(spec)


def test_each_group_of_a_new_server_has_a_token_of_its_own(tmp_path: Path) -> None:
    sender = HttpFileSender(tmp_path)
    (first,) = sender.specs("run", [1], 5.0)
    assert sender.specs("run", [1], 5.0) == [first], "the server keeps running"
    sender.abort()
    (second,) = sender.specs("run", [1], 5.0)
    assert first.token != second.token and len(second.token) > 30
    sender.abort()


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/run",
        "/run/",
        "/run/1-s",
        "/run/1-s/",
        "/run/1-s/.hidden",
        "/run/1-s/secret.txt",
        "/run/1-s/../../secret.txt",
        "/run/1-s/..%2f..%2fsecret.txt",
        "/run/../secret.txt",
        "/run/%2e%2e/secret.txt",
        "/%2e%2e/%2e%2e/latest.json",
        "/../latest.json",
        "/./latest.json",
        "/run/1-s/00009.safetensors",
        "/run/2-link/00000.safetensors",
        "/run/1-s/00008.safetensors",
        "/link/latest.json",
        "//etc/passwd",
        "/run/1-s/00000.safetensors%00",
        "/run\x00/latest.json",
    ],
)
def test_nothing_but_the_files_of_the_store_is_served(
    store: tuple[HttpFileSender, HttpFileSpec, Path], path: str
) -> None:
    _, spec, directory = store
    (directory / "secret.txt").write_text("secret")
    (directory / "run" / "1-s" / "secret.txt").write_text("secret")
    outside = directory.parent / "outside"
    outside.mkdir(exist_ok=True)
    for name in ("latest.json", "00000.safetensors"):
        (outside / name).write_text("secret")
    for link in (directory / "run" / "2-link", directory / "link"):
        if not link.is_symlink():
            link.symlink_to(outside)
    linked = directory / "run" / "1-s" / "00008.safetensors"
    if not linked.is_symlink():
        linked.symlink_to(outside / "latest.json")
    host, port = spec.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5.0) as sock:  # as it is: clients tidy paths up
        sock.sendall(
            f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            f"Authorization: Bearer {spec.token}\r\n\r\n".encode()
        )
        answer = b""
        while data := sock.recv(65536):
            answer += data
    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400")), answer
    assert b"secret" not in answer


def test_ranges_tags_and_head_are_answered_and_nothing_is_without_the_token(spec: HttpFileSpec) -> None:
    path = "/run/1-s/00000.safetensors"
    with client(spec) as http:
        head = http.head(path)
        part = http.get(path, headers={"Range": "bytes=8-15", "If-Range": head.headers["etag"]})
        stale = http.get(path, headers={"Range": "bytes=8-15", "If-Range": '"another"'})
        assert (head.status_code, head.content) == (200, b"")
        assert (part.status_code, len(part.content)) == (206, 8)
        assert stale.status_code == 200 and int(head.headers["content-length"]) == len(stale.content)
        assert http.post(path).status_code == 405
    for headers in ({}, {"Authorization": ""}, {"Authorization": "Bearer x"}, {"Authorization": f"Basic {spec.token}"}):
        for path in ("/run/latest.json", "/run/1-s/00000.safetensors", "/run/none/x"):
            answer = httpx.get(f"{spec.url}{path}", headers=headers, trust_env=False)
            assert answer.status_code in (401, 404) and (answer.status_code == 401 or "none" in path)


def test_a_follower_finds_the_latest_version_and_its_manifest(store: tuple[HttpFileSender, HttpFileSpec, Path]) -> None:
    _, spec, directory = store
    receiver = HttpFileReceiver(spec)
    ref = receiver.latest(5.0)
    assert ref is not None and ref == UPDATE.ref == latest(directory, "run")
    assert receiver.read_manifest(ref, 5.0).update == UPDATE
    with pytest.raises(TransferError, match=r"9-s/manifest.json does not exist"):
        receiver.read_manifest(ref.model_copy(update={"version": 9}), 5.0)
    other = HttpFileReceiver(spec.model_copy(update={"run_id": "other"}))
    other.join()
    assert other.latest(5.0) is None
    for each in (receiver, other):
        each.abort()


@pytest.mark.parametrize("what", ["replaced", "removed"])
def test_a_file_that_is_replaced_or_removed_while_it_is_read_is_an_error(
    tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    sender = HttpFileSender(tmp_path)
    receiver = HttpFileReceiver(sender.specs("run", [1], 5.0)[0])
    publish(sender, UPDATE, BUCKETS)
    fill = ranges.RangeClient.fill

    def changed(self, names, *rest):  # type: ignore[no-untyped-def]
        path = tmp_path.joinpath(*names)
        data = path.read_bytes()
        path.unlink()
        if what == "replaced":
            path.write_bytes(data)
        return fill(self, names, *rest)

    monkeypatch.setattr(ranges.RangeClient, "fill", changed)
    receiver.begin(UPDATE.ref)
    with pytest.raises(TransferError, match=f"was {what} while it was read"):
        receiver.receive((payload(1 << 20),), 5.0)
    receiver.abort()
    sender.abort()


def test_a_file_that_is_removed_as_it_is_sent_arrives_whole(
    store: tuple[HttpFileSender, HttpFileSpec, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, spec, directory = store
    path = "/run/1-s/00007.safetensors"
    file, send = directory / path[1:], FileResponse.__call__

    async def send_what_is_gone(self, *channel):  # type: ignore[no-untyped-def]
        file.unlink()
        await send(self, *channel)

    monkeypatch.setattr(FileResponse, "__call__", send_what_is_gone)
    for headers in ({}, {"Range": "bytes=0-"}):
        file.write_bytes(b"12345678")
        with client(spec) as http:
            assert http.get(path, headers=headers).content == b"12345678"


def test_the_address_is_the_only_one_that_is_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sender = HttpFileSender(None, "127.0.0.2")
    (spec,) = sender.specs("run", [1], 5.0)
    port = int(spec.url.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1.0)
    sender.abort()
    with pytest.raises(TransferError, match=r"192\.0\.2\.1"):
        HttpFileSender(None, "192.0.2.1").specs("run", [1], 1.0)
    assert list(tmp_path.iterdir()) == [], "a group that was not opened leaves nothing"


@pytest.mark.parametrize("num_buckets", [[3, 3, 3, 3], [3, 1, 4, 2]], ids=str)
def test_a_sender_without_a_directory_writes_over_the_files_that_nobody_needs(
    num_buckets: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh memory would cost more time than the copy; buckets may be fewer or shorter than those before."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sender = HttpFileSender(None)
    receiver = HttpFileReceiver(sender.specs("run", [1], 5.0)[0])
    used: list[set[int]] = []
    for version, number in enumerate(num_buckets, 1):
        update = plain_update(version, size_bytes=70_000 - 1000 * version, num_buckets=number)
        publish(sender, update, make_buckets(update))
        assert_same(receive(receiver, update, make_buckets(update)), make_buckets(update))
        used.append({file.stat().st_ino for file in tmp_path.rglob(f"{version}-s/*.safetensors")})
        assert len(used[-1]) == number
        sender.end(is_done=True)
    assert len(used[2] & used[0]) == min(num_buckets[0], num_buckets[2])
    assert not used[2] & used[1]
    receiver.abort()
    sender.abort()
    assert list(tmp_path.iterdir()) == []


def test_a_sender_without_a_directory_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    handles, threads = open_handles(), threading.active_count()
    for _ in range(3):
        sender = HttpFileSender(None)
        receiver = HttpFileReceiver(sender.specs("run", [1], 5.0)[0])
        publish(sender, UPDATE, BUCKETS)
        (home,) = tmp_path.iterdir()
        assert home.stat().st_mode & 0o777 == 0o700
        assert_same(receive(receiver, UPDATE, BUCKETS), BUCKETS)
        receiver.abort()
        sender.abort()
        assert list(tmp_path.iterdir()) == []
    assert open_handles() <= handles + 1 and threading.active_count() <= threads + 1
    (tmp_path / "none").write_text("")
    with pytest.raises(TransferError, match="making a directory below"):
        HttpFileSender(tmp_path / "none").specs("run", [1], 1.0)


def test_a_request_that_its_deadline_cuts_short_does_not_hide_what_was_known() -> None:
    attempt = Attempt("receiving bucket 0", 0.05, Future())
    attempt.note(ConnectionResetError("reset"), "it was reset")
    attempt.note(TimeoutError("timed out"), "a stalled server timed out")
    assert attempt.reason == "a stalled server timed out"
    attempt.reason = "it does not exist"
    with pytest.raises(TransferError, match="does not exist"):
        attempt.pause(1.0)
    attempt.note(TimeoutError("timed out"), "cut short")
    assert attempt.reason == "it does not exist"

"""Strangers on the same machine that know a weight group's address, port and name, but not its secret."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from inflight.base.sealed_channel import MAX_UNPROVEN, prove
from inflight.base.threads import start_in_thread
from inflight.errors import PublishError, TransferError
from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import payload_spec
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.transports.groups import new_gloo_group
from inflight.weights.transports.key_store import HostedKeys, KeyStore
from inflight.weights.transports.membership import _proof
from inflight.weights.transports.process_group import ProcessGroupReceiver, ProcessGroupSender
from inflight.wire import ProcessGroupSpec
from tests.gates import SOON_S
from tests.weights.test_abandoned import Local
from tests.weights.workers import PlainWorker, request

dist: Any = torch.distributed
TRY_S = timedelta(seconds=2)
MANY_BYTES = 240_000_000


def torchs_store(spec: ProcessGroupSpec) -> Any:
    return dist.TCPStore(spec.master_address, spec.master_port, is_master=False, timeout=TRY_S)


def joins_as_rank_1(spec: ProcessGroupSpec) -> None:
    name = spec.group_name
    keys = dist.PrefixStore(name, torchs_store(spec))
    keys.set("here/1", "")
    keys.wait(["here/0"], TRY_S)
    keys = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", keys))
    group = new_gloo_group(keys, 1, 2, "127.0.0.1", TRY_S.total_seconds())
    group.broadcast(torch.empty(100, dtype=torch.uint8), 0, TRY_S).wait()


def lists_keys(spec: ProcessGroupSpec) -> None:
    torchs_store(spec).num_keys()


def deletes_keys(spec: ProcessGroupSpec) -> None:
    torchs_store(spec).delete_key(f"{spec.group_name}/here/0")


def stores_much(spec: ProcessGroupSpec) -> None:
    store = torchs_store(spec)
    for i in range(MANY_BYTES // 8_000_000):
        store.set(f"large/{i}", "x" * 8_000_000)


def sends_much(spec: ProcessGroupSpec) -> None:
    with socket.create_connection((spec.master_address, spec.master_port)) as connection:
        connection.settimeout(TRY_S.total_seconds())
        connection.sendall(b"x" * MANY_BYTES)


def guesses_the_secret(spec: ProcessGroupSpec) -> None:
    connection = socket.create_connection((spec.master_address, spec.master_port))
    prove(connection, b"0" * 64, 1).send(b'{"keys":["here/1"]}\n')


STRANGERS = [joins_as_rank_1, lists_keys, deletes_keys, stores_much, sends_much, guesses_the_secret]


def preceded(endpoint: Any, attempt: Callable[[ProcessGroupSpec], None]) -> list[Exception | None]:
    """Let a stranger try something before each join of an endpoint; return the list of the errors that it gets."""
    join, refusals = endpoint.init_process_group, []

    def try_it(spec: ProcessGroupSpec) -> None:
        try:
            attempt(spec)
            refusals.append(None)
        except (RuntimeError, OSError, EOFError) as error:
            refusals.append(error)

    async def join_second(spec: ProcessGroupSpec) -> None:
        await asyncio.to_thread(try_it, spec)
        await join(spec)

    endpoint.init_process_group = join_second
    return refusals


@pytest.mark.parametrize("attempt", STRANGERS)
def test_a_stranger_is_refused_and_the_publish_succeeds(
    attempt: Callable[[ProcessGroupSpec], None], model_dir: Path
) -> None:
    local = Local(model_dir)
    refusals = preceded(local.endpoint, attempt)
    with WeightPublisher([local.endpoint], ProcessGroupSender(), run_id="r", connect_timeout_s=20) as publisher:
        report = publish_weights(PlainWorker(local.tensors, 1), publisher, deadline_s=20)
    assert report is not None and report.applied_everywhere
    (refusal,) = refusals
    assert refusal is not None, f"{attempt.__name__} got in"


def test_ranks_meet_although_strangers_hold_many_connections(model_dir: Path) -> None:
    local = Local(model_dir)
    with contextlib.ExitStack() as held:

        def hold(spec: ProcessGroupSpec) -> None:
            for _ in range(3 * MAX_UNPROVEN):
                held.enter_context(socket.create_connection((spec.master_address, spec.master_port)))

        assert preceded(local.endpoint, hold) == []
        with WeightPublisher([local.endpoint], ProcessGroupSender(), run_id="r", connect_timeout_s=20) as publisher:
            report = publish_weights(PlainWorker(local.tensors, 1), publisher, deadline_s=20)
        assert report is not None and report.applied_everywhere


def refusal_of(keys: KeyStore, value: bytes) -> str:
    for i in range(100_000):
        try:
            keys.set(f"{len(value)}/{i}", value)
        except TransferError as error:
            return str(error)
    raise AssertionError("everything was stored")


def test_a_member_that_stores_too_much_is_refused() -> None:
    sender = ProcessGroupSender()
    (spec,) = sender.specs("r", [1], SOON_S)
    with contextlib.closing(store_of(spec, 1)) as keys:
        assert "bytes, which is the store's limit" in refusal_of(keys, b"x" * 1_000_000)
        assert "keys already, which is its limit" in refusal_of(keys, b"")
        assert keys.get("1000000/0") == b"x" * 1_000_000
        with pytest.raises(TransferError, match=r"closed|reset"):
            keys.set("whole", b"x" * MANY_BYTES)
    sender.abort()


# ------------------------------------------------------------------------------------------- strangers in gloo itself


def store_of(spec: ProcessGroupSpec, rank: int) -> KeyStore:
    return KeyStore(spec.master_address, spec.master_port, spec.secret.encode(), rank, spec.timeout_s)


def in_thread(call: Callable[[], None]) -> Future[None]:
    return start_in_thread(call, "a rank")


def take_place(spec: ProcessGroupSpec, rank: int, way: str, over: threading.Event) -> None:
    """Be a rank's peer in gloo, as whoever connects to the ports of the others first; then prove nothing."""
    with contextlib.closing(store_of(spec, rank)) as keys:
        keys.set(f"here/{rank}", b"")
        keys.wait([f"here/{other}" for other in range(spec.world_size)])
        proofs = {"answers wrongly": bytes(32), "answers as another rank": _proof(spec, keys.get("nonce"), 1)}
        group = new_gloo_group(keys, rank, spec.world_size, "127.0.0.1", spec.timeout_s)
    if way in proofs:
        group.send([torch.frombuffer(bytearray(proofs[way]), dtype=torch.uint8)], 0, 0).wait()
    if way != "leaves":
        over.wait(SOON_S)


@pytest.mark.parametrize("way", ["answers wrongly", "answers as another rank", "stays silent", "leaves"])
def test_a_rank_that_does_not_prove_its_membership_is_named_and_no_group_is_formed(way: str) -> None:
    sender, over = ProcessGroupSender(), threading.Event()
    specs = sender.specs("r", [1, 1], 2.0 if way == "stays silent" else SOON_S)
    receiver = ProcessGroupReceiver(specs[0])
    ends = [in_thread(receiver.join), in_thread(lambda: take_place(specs[1], 2, way, over))]
    with pytest.raises(TransferError, match="rank 2") as refused:
        sender.join()
    assert re.search("does not know the group's secret|proving that every rank knows its secret", str(refused.value))
    with pytest.raises(TransferError, match="no weight group is formed"):
        sender.send(WeightBucket(0, (payload_spec(4),), (torch.ones(4, dtype=torch.uint8),)), 1.0)
    sender.abort()
    receiver.abort()
    over.set()
    wait(ends, SOON_S)
    assert ends[0].exception() is not None


def test_a_receiver_does_not_join_a_sender_that_does_not_prove_its_membership() -> None:
    secret, over = "a" * 64, threading.Event()
    hosted = HostedKeys("127.0.0.1", secret.encode(), 2)
    spec = ProcessGroupSpec(
        run_id="r",
        transport="gloo",
        timeout_s=SOON_S,
        group_name="g",
        master_address="127.0.0.1",
        master_port=hosted.port,
        secret=secret,
        rank=1,
        world_size=2,
    )

    def send() -> None:
        with contextlib.closing(store_of(spec, 0)) as keys:
            keys.set("nonce", b"0" * 32)
            keys.set("here/0", b"")
            group = new_gloo_group(keys, 0, 2, "127.0.0.1", SOON_S)
        proof = torch.empty(32, dtype=torch.uint8)
        group.recv([proof], 1, 0).wait()
        group.broadcast(proof, 0, timedelta(seconds=SOON_S)).wait()
        over.wait(SOON_S)

    sending = in_thread(send)
    with pytest.raises(TransferError, match="rank 0 of the weight group 'g' does not know the group's secret"):
        ProcessGroupReceiver(spec).join()
    over.set()
    sending.result(SOON_S)
    hosted.close()


def test_a_publish_to_a_rank_whose_place_is_taken_fails_and_the_old_weights_are_served(model_dir: Path) -> None:
    local, over = Local(model_dir), threading.Event()
    endpoint: Any = local.endpoint
    join = endpoint.init_process_group

    async def join_as_a_stranger(spec: ProcessGroupSpec) -> None:
        await asyncio.to_thread(take_place, spec, 1, "answers wrongly", over)

    async def served() -> tuple[int, str | None]:
        response = await endpoint.generate(request())
        return (await endpoint.weight_version()).version, response.completions[0].finish_reason

    with WeightPublisher([endpoint], ProcessGroupSender(), run_id="r", connect_timeout_s=20) as publisher:
        publish_weights(PlainWorker(local.tensors, 1), publisher, deadline_s=20)
        publisher.group.lose()
        endpoint.init_process_group = join_as_a_stranger
        with pytest.raises(PublishError, match=r"rank 1 of the weight group .* does not know the group's secret"):
            publish_weights(PlainWorker(local.tensors, 2), publisher, deadline_s=20)
        over.set()
        assert publisher.run(served) == (1, "length")
        endpoint.init_process_group = join
        report = publish_weights(PlainWorker(local.tensors, 3), publisher, deadline_s=20)
        assert report is not None and report.applied_everywhere


def test_the_secret_of_a_group_is_in_no_text_about_it() -> None:
    sender = ProcessGroupSender()
    (spec,) = sender.specs("r", [1], 1.0)
    again = ProcessGroupSender()
    (other,) = again.specs("r", [1], 1.0)
    assert spec.secret != other.secret
    with pytest.raises(TransferError) as late:
        ProcessGroupReceiver(spec).join()
    assert spec.secret not in f"{spec!r} {spec} {late.value!r} {vars(sender)}"
    sender.abort()
    again.abort()

"""Checksums: of known bytes, of every byte, and without a copy."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from inflight.errors import TransferError
from inflight.weights.encode import bucket_bytes
from inflight.weights.encode.bucket_bytes import Rounding, checksum, encode, pack, sums64
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.send.weight_group import WeightGroup
from inflight.weights.transports import make_sender
from inflight.weights.transports.process_group import ProcessGroupSender
from inflight.wire import EndpointState
from tests.servers import ServerProcess
from tests.weights.polled import KIND
from tests.weights.stored import make_buckets, make_update
from tests.weights.workers import PlainWorker, assert_serves, checkpoint, weight_version

Connect = Callable[..., WeightPublisher]
Start = Callable[..., ServerProcess]


def test_the_checksum_is_xxh3_128_in_hexadecimal() -> None:
    # Of the empty input: https://github.com/Cyan4973/xxHash/blob/dev/cli/xsum_sanity_check.c, XXH128 with seed 0.
    assert checksum(torch.empty(0, dtype=torch.uint8)) == "99aa06d3014798d86001c324468d497f"
    assert len(checksum(torch.arange(100, dtype=torch.uint8))) == 32


def test_every_bit_counts() -> None:
    flat = torch.arange(257, dtype=torch.int32).to(torch.uint8)
    sums = {checksum(flat)}
    for i in range(flat.numel()):
        flat[i] ^= 1
        sums.add(checksum(flat))
        flat[i] ^= 1
    assert len(sums) == 1 + flat.numel()


def test_a_view_of_a_larger_buffer_has_the_checksum_of_its_own_bytes() -> None:
    buffer = torch.arange(200, dtype=torch.uint8)
    assert checksum(buffer[3:150]) == checksum(buffer[3:150].clone())


def test_the_bytes_are_not_copied() -> None:
    flat = torch.zeros(1 << 22, dtype=torch.uint8)
    tracemalloc.start()
    try:
        checksum(flat)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 16


def test_bytes_with_gaps_are_refused() -> None:
    with pytest.raises((BufferError, ValueError)):
        checksum(torch.zeros(10, dtype=torch.uint8)[::2])


class OnDevice(torch.Tensor):
    """Bytes that say that they lie on another device until they are copied."""

    @property
    def is_cuda(self) -> bool:
        return True

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def test_bytes_on_a_device_have_the_checksum_of_their_copy_on_the_host() -> None:
    flat = torch.arange(100, dtype=torch.uint8)
    assert checksum(flat.as_subclass(OnDevice)) == checksum(flat)


def test_tensors_without_bytes_are_refused_in_place_of_being_sent_unchecked() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(8, dtype=torch.uint8, device="cuda")
    for flat in (fake, torch.empty(8, dtype=torch.uint8, device="meta")):
        with pytest.raises(TransferError, match="8 bytes cannot be read"):
            checksum(flat)


@pytest.mark.parametrize("encoding", ["raw", "bfloat16"])
def test_a_publish_of_weights_without_bytes_ends_and_the_old_weights_serve(
    encoding: str, connect: Connect, start_server: Start, model_dir: Path
) -> None:
    server = start_server(model_dir)
    tensors = checkpoint(model_dir)
    publisher = connect(server, encoding=encoding)
    unreal = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    with pytest.raises(TransferError, match="bytes cannot be read: a Tensor on meta holds no data"):
        publish_weights(PlainWorker(unreal, 1), publisher)
    assert (weight_version(server).version, weight_version(server).state) == (0, EndpointState.READY)
    publish_weights(PlainWorker(tensors, 1), publisher)
    assert_serves(server, 1)


@pytest.mark.parametrize("is_on_device", [False, True])
@pytest.mark.parametrize("encoding", ["raw", "bfloat16"])
def test_every_bucket_on_a_device_is_announced_with_the_checksum_of_its_bytes(
    is_on_device: bool, encoding: Rounding, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_on_device:
        monkeypatch.setattr(bucket_bytes, "encode", lambda *bucket: encode(*bucket).as_subclass(OnDevice))
    update = make_update()
    sender = ProcessGroupSender(kind=KIND) if is_on_device else make_sender("gloo")
    group = WeightGroup(sender, run_id="run", encoding=encoding, delta=False, form_timeout_s=5.0)
    for bucket in make_buckets(update)[:2]:
        sent = group.encoder.encode(bucket, update)
        expected = pack(bucket.tensors) if encoding == "raw" else encode(bucket.tensors, bucket.specs, encoding)
        assert sent.checksum == (sums64(expected) if is_on_device else checksum(expected))
        assert not sent.tensors[0].is_cuda  # senders that do not send from the device get the copy of the checksum

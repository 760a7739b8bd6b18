"""Levels weights and stores, whether what arrives is what was sent: damage on the way, and transports that store."""

from __future__ import annotations

from dataclasses import replace

import torch

from inflight.conformance.checks import Check
from inflight.conformance.endpoint.aftermath import SLACK_S, require_old_weights, require_recovers, settled, within
from inflight.conformance.endpoint.publishing import TRANSFER_TIMEOUT_S
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.reference import Weights
from inflight.errors import TransferError, UpdateRefusedError
from inflight.wire import Backend


async def damaged_bucket(subject: EndpointSubject) -> None:
    """Announce the checksum of every bucket, and send the last one with another bit."""
    publisher, other = subject.publisher, subject.reference.perturbed("B")
    update = await publisher.request(other, bucket_bytes=_size_bytes(other) // 2)
    last = len(update.buckets) - 1
    for index in range(last):
        await publisher.send_parcel(publisher.parcel(update, other, index, encoding="raw"))
    announced = publisher.parcel(update, other, last, encoding="raw")
    sent = publisher.parcel(update, _with_another_bit(other), last, encoding="raw")
    call = publisher.send_parcel(replace(sent, transfer=announced.transfer))
    error = await subject.require_raises(
        within(TRANSFER_TIMEOUT_S + SLACK_S, call, "a damaged bucket"), (TransferError,), "a damaged bucket"
    )
    subject.note(refusal=str(error))
    await require_old_weights(subject, "after a damaged bucket")
    commit = subject.endpoint.commit_weight_update(update.ref)
    await subject.require_raises(commit, (UpdateRefusedError,), "a commit after a damaged bucket")
    await require_recovers(subject, "after a damaged bucket")


def _with_another_bit(weights: Weights) -> Weights:
    """Return weights whose last tensor differs in one bit."""
    name, tensor = list(weights.tensors.items())[-1]
    damaged = tensor.clone().contiguous()
    damaged.view(-1).view(torch.uint8)[0] ^= 1
    return Weights(f"{weights.label}, damaged", {**weights.tensors, name: damaged})


async def stored_in_memory(subject: EndpointSubject) -> None:
    """Publish over ``shm``."""
    await _publish_over(subject, "shm")


async def stored_in_files(subject: EndpointSubject) -> None:
    """Publish over ``file``."""
    await _publish_over(subject, "file")


async def stored_behind_http(subject: EndpointSubject) -> None:
    """Publish over ``http``."""
    await _publish_over(subject, "http")


async def _publish_over(subject: EndpointSubject, store: Backend) -> None:
    """Publish twice, store a third update and abort it, publish over another group, and remove the store."""
    publisher = subject.another_publisher(backend=store)
    first, second = subject.reference.perturbed("B"), subject.reference.perturbed("C", seed=2)
    third = subject.reference.with_final_norm(-1.0, "D")
    bucket_bytes = _size_bytes(first) // 3
    for weights in (first, second):
        await publisher.publish(weights, bucket_bytes=bucket_bytes)
        await subject.require_serves(weights, f"after an update over {store}")
    update = await publisher.request(third, bucket_bytes=bucket_bytes)
    for index in range(len(update.buckets)):
        await publisher.send(update, third, index)
    await publisher.abort(update)
    await settled(subject, "after the abort of what was stored")
    await subject.require_serves(second, "after the next update was stored, and aborted")
    publisher.lose_group()
    await publisher.publish(first, bucket_bytes=bucket_bytes)
    publisher.lose_group()
    await subject.require_serves(first, f"after an update over another group of {store}, which is gone")


def _size_bytes(weights: Weights) -> int:
    return sum(tensor.nbytes for tensor in weights.tensors.values())


_STORE = (
    "where the transport's part of docs/contract.md puts a bucket, and whether it is copied before its memory is "
    "written again"
)

CHECKS = (
    Check(
        "U-14",
        "weights",
        "A bucket whose checksum is not that of its bytes raises TransferError before anything of the update is "
        "applied, and the old weights serve on.",
        "whether the bytes are compared where they arrived, before they are decoded, copied or loaded",
        damaged_bucket,
        needs=("updates", "staging"),
        deadline_s=30,
    ),
    Check(
        "U-60",
        "stores",
        "An update over shm arrives, and what is served does not change when its memory is written again or goes.",
        _STORE,
        stored_in_memory,
        needs=("updates", "shm"),
        deadline_s=40,
    ),
    Check(
        "U-61",
        "stores",
        "An update over file arrives, and what is served does not change when its files are replaced.",
        _STORE,
        stored_in_files,
        needs=("updates", "file"),
        deadline_s=40,
    ),
    Check(
        "U-62",
        "stores",
        "An update over http arrives, and what is served does not change when the trainer's server is gone.",
        _STORE,
        stored_behind_http,
        needs=("updates", "http"),
        deadline_s=40,
    ),
)

"""A publisher that performs one step at a time, so that checks can omit, repeat or reorder its messages.

Trainers use `inflight.weights.send.publisher`; this publisher does as little as the contract allows.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from inflight.base.threads import run_abandonable
from inflight.conformance.checks import skip
from inflight.conformance.endpoint.cutting import cut_tensors
from inflight.conformance.endpoint.waiting import SLOWNESS
from inflight.conformance.reference import ReferenceWeights
from inflight.contracts import InferenceEndpoint, WeightSender
from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import bucket_transfer, encode_bucket, pack, sent_bytes
from inflight.weights.encode.buckets import plan_buckets
from inflight.weights.encode.delta import element_runs, encode_delta, find_changes
from inflight.weights.encode.parts import boxes_of, part_of_update, part_specs, places_of
from inflight.weights.send.module import tensor_spec
from inflight.weights.transports import make_sender
from inflight.wire import (
    BucketTransfer,
    Capabilities,
    InFlightPolicy,
    LoraSpec,
    Manifest,
    Sharding,
    TensorSpec,
    TransportName,
    TransportSpec,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
)

GROUP_TIMEOUT_S = 8.0
TRANSFER_TIMEOUT_S = 8.0
DEFAULT_BUCKET_BYTES = 64_000_000
_DEADLINE_S, _LEASE_S = 10.0, 20.0
"""Deadline and lease of an update, unless a check needs different ones."""


class SteppedPublisher:
    """The trainer side of one run: forms groups, announces, sends, commits and aborts.

    ``version`` is the last committed version. It starts at the served version, so that no two runs of a check publish
    the same version, because spans contain versions but not runs. ``transport`` defaults to the process group that the
    endpoint supports; ``directory`` is where the transport ``file`` stores weights. If there are several senders, each
    sends a part of every bucket.
    """

    def __init__(
        self,
        endpoint: InferenceEndpoint,
        capabilities: Capabilities,
        version: int = 0,
        *,
        run_id: str | None = None,
        incarnation: int = 0,
        transport: TransportName | None = None,
        directory: Path | None = None,
        num_senders: int = 1,
    ) -> None:
        self._endpoint = endpoint
        self._capabilities = capabilities
        self._transport = transport
        self._directory = directory
        self.run_id = run_id or f"check-{uuid.uuid4().hex[:8]}"
        self.incarnation = incarnation
        self.version = version
        self.touched = False
        """Whether the weights that the endpoint serves may have changed."""
        self._has_group = False
        self._num_senders = num_senders
        self._opened_senders: list[WeightSender] = []

    @property
    def senders(self) -> Sequence[WeightSender]:
        if not self._opened_senders:
            name, folder = self._transport or self.transport(), self._directory
            folders = [folder and folder.with_name(f"{folder.name}{i or ''}") for i in range(self._num_senders)]
            self._opened_senders = [make_sender(name, directory=it) for it in folders]
        return self._opened_senders

    def transport(self) -> Literal["gloo", "nccl"]:
        """Return the transport over which the kit can send to this endpoint; skip the check if there is none."""
        if "nccl" in self._capabilities.transports and torch.cuda.device_count() > 1:
            return "nccl"
        if "gloo" in self._capabilities.transports:
            return "gloo"
        supported = ", ".join(self._capabilities.transports) or "none"
        skip(f"the kit can send over gloo, and over nccl where torch sees two GPUs; the endpoint supports {supported}")

    async def form_group(self, timeout_s: float = GROUP_TIMEOUT_S) -> None:
        """Open a new group and let the senders and the endpoint join it."""
        await self.join_group(self.open_group(timeout_s))

    async def join_group(self, spec: TransportSpec) -> None:
        """Make the senders and the endpoint join the most recently opened group."""

        def join() -> None:
            for sender in self.senders:
                sender.join()

        await asyncio.gather(self._endpoint.init_process_group(spec), run_abandonable(join, "check-join"))
        self._has_group = True

    def open_group(self, timeout_s: float = GROUP_TIMEOUT_S) -> TransportSpec:
        """Open a group that no sender joins yet; return the spec with which the endpoint joins it."""
        self._has_group = False
        self.touched = True
        num_ranks = [self._capabilities.num_ranks]
        own, *others = [sender.specs(self.run_id, num_ranks, timeout_s)[0] for sender in self.senders]
        return own.model_copy(update={"incarnation": self.incarnation, "others": tuple(others)})

    def lose_group(self) -> None:
        """Leave the group, as a publisher does after a failed transfer."""
        self._has_group = False
        for sender in self._opened_senders:
            sender.abort()

    def announcement(
        self,
        weights: ReferenceWeights,
        *,
        version: int | None = None,
        in_flight: InFlightPolicy | str | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        deadline_s: float | None = None,
        lease_s: float | None = None,
        specs: list[TensorSpec] | None = None,
        frozen: tuple[str, ...] = (),
        lora: LoraSpec | None = None,
        shardings: Sequence[Sharding] | None = None,
        **fields: Any,
    ) -> WeightUpdate:
        """Return the message that announces ``weights``, with ``specs`` in place of the true ones if they are given.

        The deadline and the lease are as long as a slow endpoint needs, unless they are given. ``frozen`` names the
        tensors that are left out, and ``lora`` indicates that ``weights`` are those of a LoRA. ``shardings`` divides
        each tensor among the senders; if it is empty, the first sender sends everything. ``fields`` are additional
        fields of `WeightUpdate`.
        """
        specs = specs_of(weights) if specs is None else specs
        if shardings is None:
            shardings = cut_tensors(specs, self._num_senders) if self._num_senders > 1 else ()
        return WeightUpdate(
            run_id=self.run_id,
            version=self.version + 1 if version is None else version,
            incarnation=self.incarnation,
            manifest=Manifest(
                tensors=tuple(specs),
                frozen=frozen,
                lora=lora,
                shardings=tuple(shardings),
                sharding_of=tuple(range(len(shardings))),
            ),
            buckets=plan_buckets(specs, bucket_bytes),
            in_flight=InFlightPolicy(in_flight or self._capabilities.in_flight_policies[0]),
            deadline_s=_DEADLINE_S * SLOWNESS.get() if deadline_s is None else deadline_s,
            lease_s=_LEASE_S * SLOWNESS.get() if lease_s is None else lease_s,
            **fields,
        )

    def transfer(self, update: WeightUpdate, index: int, timeout_s: float = TRANSFER_TIMEOUT_S) -> BucketTransfer:
        """Return the message that asks for one bucket."""
        return BucketTransfer(bucket_index=index, timeout_s=timeout_s, **update.ref.model_dump())

    def bucket(self, update: WeightUpdate, weights: ReferenceWeights, index: int) -> WeightBucket:
        """Return one bucket unencoded, without a checksum."""
        part = slice(update.buckets[index].start, update.buckets[index].stop)
        return WeightBucket(index, update.manifest.tensors[part], tuple(weights.tensors.values())[part])

    def encoded(
        self, update: WeightUpdate, weights: ReferenceWeights, index: int, base: ReferenceWeights | None = None
    ) -> WeightBucket:
        """Return one bucket in the update's encoding, with its checksum; a delta is relative to ``base``."""
        bucket, delta = self.bucket(update, weights, index), None
        if base is not None:
            delta = delta_of(pack(bucket.tensors), pack(self.bucket(update, base, index).tensors), bucket.specs)
        return encode_bucket(bucket, update.ref, encoding=(*update.encodings, "raw")[0], payload=delta)

    def part(
        self,
        update: WeightUpdate,
        weights: ReferenceWeights,
        index: int,
        sender: int,
        base: ReferenceWeights | None = None,
    ) -> WeightBucket:
        """Return the part of a bucket that one of several senders sends; a delta is relative to ``base``."""
        announced = update.buckets[index]
        specs = part_specs(update.manifest, announced, sender)

        def boxes(of: ReferenceWeights) -> tuple[torch.Tensor, ...]:
            cut = boxes_of(update.manifest, announced, sender)
            return tuple(of.tensors[spec.name][tuple(slice(*edges) for edges in box)] for spec, box in cut)

        part, encoding, delta = WeightBucket(index, specs, boxes(weights)), (*update.encodings, "raw")[0], None
        if base is not None:
            delta = delta_of(pack(part.tensors), pack(boxes(base)), specs)
        elif encoding == "delta":
            encoding = "raw"
        return encode_bucket(
            part, update.ref, encoding=encoding, payload=delta, places=places_of(update.manifest, announced, sender)
        )

    async def send_parts(
        self,
        update: WeightUpdate,
        parts: Sequence[WeightBucket],
        *,
        silent: Collection[int] = (),
        timeout_s: float = TRANSFER_TIMEOUT_S,
    ) -> None:
        """Ask the endpoint to receive the parts of a bucket, one from each sender, and send them from all senders that
        are not ``silent``."""
        own, *others = parts
        transfer = bucket_transfer(replace(own, others=tuple(map(sent_bytes, others))), update.ref, timeout_s)
        sends = [self.send_only(part, i) for i, part in enumerate(parts) if i not in silent]
        if not self.senders[0].is_collective:
            await asyncio.gather(*sends)
            sends = []
        await asyncio.gather(self._endpoint.receive_weights(transfer), *sends)

    async def send(
        self,
        update: WeightUpdate,
        weights: ReferenceWeights,
        index: int,
        *,
        base: ReferenceWeights | None = None,
        delay_s: float = 0.0,
    ) -> None:
        """Send one bucket, ``delay_s`` after the endpoint was asked to receive it; the bucket is `encoded` if the
        update is."""
        if update.manifest.shardings:
            parts = [self.part(update, weights, index, i, base) for i in range(self._num_senders)]
            return await self.send_parts(update, parts)
        bucket = self.encoded(update, weights, index, base) if update.encodings else self.bucket(update, weights, index)
        await self.send_bucket(update, bucket, delay_s=delay_s)

    async def send_all(
        self, update: WeightUpdate, weights: ReferenceWeights, base: ReferenceWeights | None = None
    ) -> None:
        """Send every bucket of an update."""
        for index in range(len(update.buckets)):
            await self.send(update, weights, index, base=base)

    async def send_bucket(
        self,
        update: WeightUpdate,
        bucket: WeightBucket,
        *,
        delay_s: float = 0.0,
        timeout_s: float = TRANSFER_TIMEOUT_S,
    ) -> None:
        """Send a bucket while the endpoint receives it, or before that if the transport stores buckets.

        ``timeout_s`` is the timeout with which the endpoint receives the bucket.
        """
        transfer = self.transfer(update, bucket.index, timeout_s)
        if bucket.checksum is not None:
            transfer = bucket_transfer(bucket, update.ref, timeout_s)
        if not self.senders[0].is_collective:
            await self.send_only(bucket)
            await self._endpoint.receive_weights(transfer)
            return

        async def send() -> None:
            await asyncio.sleep(delay_s)
            await self.send_only(bucket)

        await asyncio.gather(self._endpoint.receive_weights(transfer), send())

    async def send_only(self, bucket: WeightBucket, sender: int = 0) -> None:
        """Send a bucket, or a sender's part of it, without asking the endpoint to receive it."""
        await run_abandonable(lambda: self.senders[sender].send(bucket, TRANSFER_TIMEOUT_S), "check-send")

    async def request(self, weights: ReferenceWeights, **options: Any) -> WeightUpdate:
        """Form the group if there is none, announce ``weights``, and return once the endpoint has paused."""
        if not self._has_group:
            await self.form_group()
        update = self.announcement(weights, **options)
        self.begin(update)
        await self._endpoint.request_weight_update(update)
        return update

    def begin(self, update: WeightUpdate) -> None:
        """Begin an update on every sender."""
        for i in range(self._num_senders):
            self.begin_on(update, i)

    def begin_on(self, update: WeightUpdate, sender: int) -> None:
        """Begin an update on one of the senders."""
        self.senders[sender].begin(part_of_update(update, sender) if update.manifest.shardings else update)

    async def commit(self, update: WeightUpdate) -> WeightVersion:
        """Commit the update, and record its version as the served one."""
        answer = await self._endpoint.commit_weight_update(update.ref)
        self.version = update.version
        for sender in self.senders:
            sender.end(is_done=True)
        return answer

    async def abort(self, update: WeightUpdate | UpdateRef) -> WeightVersion:
        return await self._endpoint.abort_weight_update(update.ref if isinstance(update, WeightUpdate) else update)

    async def publish(self, weights: ReferenceWeights, **options: Any) -> WeightVersion:
        """Update the endpoint to ``weights``; return its answer to the commit."""
        return await self.complete(await self.request(weights, **options), weights)

    async def complete(self, update: WeightUpdate, weights: ReferenceWeights) -> WeightVersion:
        """Send every bucket of an update, and commit it."""
        await self.send_all(update, weights)
        return await self.commit(update)


def specs_of(weights: ReferenceWeights) -> list[TensorSpec]:
    """Return the specs with which these tensors are sent."""
    return [tensor_spec(name, tensor, wire_dtype=None) for name, tensor in weights.tensors.items()]


def delta_of(new: torch.Tensor, old: torch.Tensor, specs: Sequence[TensorSpec]) -> torch.Tensor:
    """Return the delta payload that turns the ``old`` bytes of these tensors into the ``new`` ones."""
    patch = find_changes(new, old, element_runs(specs), max_share=1.0)
    assert patch is not None  # no share is too large
    return encode_delta(patch)

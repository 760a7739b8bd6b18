"""A publisher that takes one step at a time against one endpoint, so that checks can stop, repeat or swap its messages.

`inflight.weights.publish` is what a trainer uses; this one does as little as the contract allows.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from inflight.conformance.checks import skip
from inflight.conformance.reference import Weights
from inflight.contracts import InferenceEndpoint, WeightSender
from inflight.types import WeightBucket
from inflight.weights.buckets import plan_buckets
from inflight.weights.delta import element_runs, encode_delta, find_changes
from inflight.weights.outgoing import outgoing_bucket, transfer_of
from inflight.weights.packing import pack
from inflight.weights.threads import run_abandonable
from inflight.weights.transports import make_sender
from inflight.wire import (
    Backend,
    BucketTransfer,
    Capabilities,
    Encoding,
    InFlightPolicy,
    Manifest,
    TensorSpec,
    TransportSpec,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
)

GROUP_TIMEOUT_S = 8.0
TRANSFER_TIMEOUT_S = 8.0
DEFAULT_BUCKET_BYTES = 64_000_000


@dataclass(frozen=True, slots=True)
class Parcel:
    """One bucket as it travels, and the message that asks the endpoint for it."""

    bucket: WeightBucket
    transfer: BucketTransfer


class SteppedPublisher:
    """One run's trainer side: forms groups, announces, sends, commits, aborts.

    ``version`` is the last one committed; it starts at what is served, so that no two versions of any run are equal:
    spans name versions and no runs. ``epoch`` is that of this incarnation of the run's trainer. ``backend`` is how
    weights travel, by default the process group that the endpoint declares; ``directory`` is where ``file`` stores.
    """

    def __init__(
        self,
        endpoint: InferenceEndpoint,
        capabilities: Capabilities,
        version: int = 0,
        *,
        run_id: str | None = None,
        epoch: int = 0,
        backend: Backend | None = None,
        directory: Path | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._capabilities = capabilities
        self._backend = backend
        self._directory = directory
        self.run_id = run_id or f"check-{uuid.uuid4().hex[:8]}"
        self.epoch = epoch
        self.version = version
        self.touched = False
        """Whether anything was asked of the endpoint, so that what it serves may have changed."""
        self._has_group = False
        self._opened_sender: WeightSender | None = None

    @property
    def _sender(self) -> WeightSender:
        if self._opened_sender is None:
            self._opened_sender = make_sender(self._backend or self.backend(), directory=self._directory)
        return self._opened_sender

    def backend(self) -> Literal["gloo", "nccl"]:
        """Return what the kit can send over to this endpoint; skips the check if there is nothing."""
        if "nccl" in self._capabilities.transports and torch.cuda.is_available():
            return "nccl"
        if "gloo" in self._capabilities.transports:
            return "gloo"
        declared = ", ".join(self._capabilities.transports) or "none"
        skip(f"the kit can send over gloo, and over nccl where torch sees a GPU; declared are {declared}")

    # ------------------------------------------------------------------------------------------------------- groups

    async def form_group(self, timeout_s: float = GROUP_TIMEOUT_S) -> None:
        """Join the sender and the endpoint in a new group."""
        await self.join_group(self.open_group(timeout_s))

    async def join_group(self, spec: TransportSpec) -> None:
        """Join the sender and the endpoint in the group that was opened last."""
        await asyncio.gather(self._endpoint.init_process_group(spec), run_abandonable(self._sender.join, "check-join"))
        self._has_group = True

    def open_group(self, timeout_s: float = GROUP_TIMEOUT_S) -> TransportSpec:
        """Open a group that the sender does not join yet; return what the endpoint joins it with."""
        self._has_group = False
        self.touched = True
        (spec,) = self._sender.specs(self.run_id, [self._capabilities.num_ranks], timeout_s)
        return spec.model_copy(update={"epoch": self.epoch})

    def lose_group(self) -> None:
        """Leave the group, as a publisher does whose transfer failed."""
        self._has_group = False
        if self._opened_sender is not None:
            self._opened_sender.abort()

    # ------------------------------------------------------------------------------------------------------ updates

    def announcement(
        self,
        weights: Weights,
        *,
        version: int | None = None,
        in_flight: InFlightPolicy | str | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        deadline_s: float = 10.0,
        lease_s: float = 20.0,
        specs: list[TensorSpec] | None = None,
        frozen: tuple[str, ...] = (),
        **fields: Any,
    ) -> WeightUpdate:
        """Return the message that announces ``weights``; ``specs`` replaces the truth about them.

        ``frozen`` are the tensors that are left out; ``fields`` are others of `WeightUpdate`, as they are there.
        """
        if specs is None:
            specs = specs_of(weights)
        return WeightUpdate(
            run_id=self.run_id,
            version=self.version + 1 if version is None else version,
            epoch=self.epoch,
            manifest=Manifest(tensors=tuple(specs), frozen=frozen),
            buckets=plan_buckets(specs, bucket_bytes),
            in_flight=InFlightPolicy(in_flight or self._capabilities.in_flight_policies[0]),
            deadline_s=deadline_s,
            lease_s=lease_s,
            **fields,
        )

    def transfer(
        self, update: WeightUpdate, index: int, timeout_s: float = TRANSFER_TIMEOUT_S, **fields: Any
    ) -> BucketTransfer:
        """Return the message that asks for one bucket; ``fields`` are others of `BucketTransfer`."""
        ref = update.ref
        return BucketTransfer(
            run_id=ref.run_id,
            version=ref.version,
            session_id=ref.session_id,
            bucket_index=index,
            timeout_s=timeout_s,
            **fields,
        )

    def parcel(
        self, update: WeightUpdate, weights: Weights, index: int, *, encoding: Encoding, base: Weights | None = None
    ) -> Parcel:
        """Return one bucket in an encoding, with its checksum; ``base`` are the weights that a delta is relative to."""
        specs = self._specs(update, index)
        tensors = self._tensors(update, weights, index)
        delta = None
        if encoding == "delta":
            assert base is not None
            patch = find_changes(
                pack(tensors), pack(self._tensors(update, base, index)), element_runs(specs), max_share=1.0
            )
            assert patch is not None  # no share is too large
            delta = encode_delta(patch)
        sent = outgoing_bucket(WeightBucket(index, specs, tensors), update.ref, encoding=encoding, payload=delta)
        return Parcel(sent, transfer_of(sent, update.ref, TRANSFER_TIMEOUT_S))

    async def send(self, update: WeightUpdate, weights: Weights, index: int, *, delay_s: float = 0.0) -> None:
        """Have the endpoint receive one bucket while it is sent, ``delay_s`` after the endpoint was asked."""
        bucket = WeightBucket(index, self._specs(update, index), self._tensors(update, weights, index))
        await self.send_parcel(Parcel(bucket, self.transfer(update, index)), delay_s=delay_s)

    async def send_parcel(self, parcel: Parcel, *, delay_s: float = 0.0) -> None:
        """Have the endpoint receive a bucket while it is sent, or once it is stored."""
        if not self._sender.is_collective:
            await self._send(parcel.bucket)
            await self._endpoint.receive_weights(parcel.transfer)
            return

        async def send() -> None:
            await asyncio.sleep(delay_s)
            await self._send(parcel.bucket)

        await asyncio.gather(self._endpoint.receive_weights(parcel.transfer), send())

    async def send_only(self, update: WeightUpdate, weights: Weights, index: int) -> None:
        """Send one bucket, whether the endpoint was asked to receive it or not."""
        await self._send(WeightBucket(index, self._specs(update, index), self._tensors(update, weights, index)))

    async def _send(self, bucket: WeightBucket) -> None:
        await run_abandonable(lambda: self._sender.send(bucket, TRANSFER_TIMEOUT_S), "check-send")

    def _specs(self, update: WeightUpdate, index: int) -> tuple[TensorSpec, ...]:
        spec = update.buckets[index]
        return update.manifest.tensors[spec.start : spec.stop]

    def _tensors(self, update: WeightUpdate, weights: Weights, index: int) -> tuple[torch.Tensor, ...]:
        spec = update.buckets[index]
        return tuple(weights.tensors.values())[spec.start : spec.stop]

    async def request(self, weights: Weights, **options: Any) -> WeightUpdate:
        """Form the group if there is none, announce ``weights`` and return once the endpoint holds."""
        if not self._has_group:
            await self.form_group()
        update = self.announcement(weights, **options)
        self._sender.begin(update)
        await self._endpoint.request_weight_update(update)
        return update

    async def commit(self, update: WeightUpdate) -> WeightVersion:
        """Commit, and note the version as the one that is served."""
        answer = await self._endpoint.commit_weight_update(update.ref)
        self.version = update.version
        self._sender.end(is_done=True)
        return answer

    async def abort(self, update: WeightUpdate | UpdateRef) -> WeightVersion:
        """Abort an update that is open."""
        return await self._endpoint.abort_weight_update(update.ref if isinstance(update, WeightUpdate) else update)

    async def publish(self, weights: Weights, *, held_s: float = 0.0, **options: Any) -> WeightVersion:
        """Bring the endpoint to ``weights``, held for at least ``held_s``; return its answer to the commit."""
        update = await self.request(weights, **options)
        started = time.monotonic()
        for index in range(len(update.buckets)):
            await self.send(update, weights, index)
        await asyncio.sleep(max(0.0, held_s - (time.monotonic() - started)))
        return await self.commit(update)


def specs_of(weights: Weights) -> list[TensorSpec]:
    """Return how these tensors travel."""
    return [
        TensorSpec.model_validate(
            {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": tuple(tensor.shape)}
        )
        for name, tensor in weights.tensors.items()
    ]

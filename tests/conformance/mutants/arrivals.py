"""Faults in receiving: undetected damage, omitted or wrongly decoded tensors, and stores read or kept wrongly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import inflight.weights.encode.delta
import inflight.weights.encode.float8
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.parameters import PreparedParameters
from inflight.weights.encode.bucket_bytes import pack, unpack
from inflight.weights.encode.float8 import decode_float8, payload_size
from inflight.weights.receive.base_weights import AdaptedLoad
from inflight.weights.transports.arenas import ArenaReceiver
from inflight.weights.transports.store import regular_file
from inflight.wire import BucketTransfer, Manifest, TensorSpec, TransportSpec, UpdateRef, WeightUpdate
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import replaces


@replaces("receive_weights")
async def overlooks_damage(endpoint: EmbeddedEndpoint, own: Any, bucket: BucketTransfer) -> None:
    await own(bucket.model_copy(update={"checksum": None}))


@replaces("_engine.load")
def clears_frozen_tensors(endpoint: EmbeddedEndpoint, own: Any, ready: PreparedParameters, *others: Any) -> None:
    arrived = dict(ready.tensors)
    with torch.no_grad():
        for name, parameter in endpoint._engine.weights.model.named_parameters():
            if name not in arrived:
                parameter.zero_()
    own(ready, *others)


def keeps_the_head_of_complete_updates(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """The head's weight is looked up again only after an update of all tensors."""
    engine: Any = endpoint._engine
    forwards, load, weights = engine.steps._forwards, engine.load, engine.weights
    head = forwards._head
    kept = [head.weight.detach()]

    def loading(ready: PreparedParameters, *others: Any) -> None:
        load(ready, *others)
        if len(ready.tensors) == len(weights.by_name):
            kept[0] = head.weight.detach()

    forwards._head = lambda hidden: torch.nn.functional.linear(hidden, kept[0], head.bias)
    engine.load = loading
    return endpoint


@replaces("_updates._session._reason_to_refuse")
def freezes_what_is_missing(endpoint: EmbeddedEndpoint, own: Any, update: WeightUpdate) -> str | None:
    text: str | None = own(update)
    return None if update.manifest.frozen and text is not None and "are missing" in text else text


@replaces("_adapted.prepare")
def adds_up_loras(endpoint: EmbeddedEndpoint, own: Any, manifest: Manifest, arrived: Any, present: Any) -> AdaptedLoad:
    kept = endpoint._adapted._base
    endpoint._adapted._base = {} if manifest.lora is not None else kept
    try:
        load: AdaptedLoad = own(manifest, arrived, present)
    finally:
        endpoint._adapted._base = kept
    return load


@replaces("_adapted.prepare")
def leaves_out_the_scale(endpoint: EmbeddedEndpoint, own: Any, manifest: Manifest, *others: Any) -> AdaptedLoad:
    if manifest.lora is not None:
        lora = manifest.lora.model_copy(update={"alpha": float(manifest.lora.rank)})
        manifest = manifest.model_copy(update={"lora": lora})
    load: AdaptedLoad = own(manifest, *others)
    return load


@replaces("_updates._session._reason_to_refuse")
def refuses_no_lora(endpoint: EmbeddedEndpoint, own: Any, update: WeightUpdate) -> str | None:
    text: str | None = own(update)
    return text if update.manifest.lora is None else None


def decoding(decoded: Callable[..., torch.Tensor]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Replace how buckets are decoded: ``decoded`` receives the staging, its own method, and its arguments."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        sink: Any = endpoint._sink
        begin = sink.begin

        def faulty(update: WeightUpdate) -> None:
            begin(update)
            staging = sink._staging
            own = staging._decode
            staging._decode = lambda *arguments: decoded(staging, own, *arguments)

        sink.begin = faulty
        return endpoint

    return infect


def halves_taken_for_float16(
    staging: Any, own: Any, transfer: BucketTransfer, bucket: Any, specs: Sequence[TensorSpec], payload: torch.Tensor
) -> torch.Tensor:
    if transfer.encoding != "bfloat16":
        arrived: torch.Tensor = own(transfer, bucket, specs, payload)
        return arrived
    halves = unpack(payload, [spec.model_copy(update={"dtype": "float16"}) for spec in specs])
    return pack([half.to(getattr(torch, spec.dtype)) for half, spec in zip(halves, specs, strict=True)])


def without_scales(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    def decode(payload: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        num_rows, num_columns = payload.numel() and (int(torch.Size(shape[:-1]).numel()), shape[-1])
        num_scales = num_rows * -(-num_columns // inflight.weights.encode.float8.BLOCK)
        changed = payload.clone()
        changed[payload_size(shape) - 4 * num_scales :].view(torch.float32).fill_(1.0)
        return decode_float8(changed, shape, dtype)

    inflight.weights.encode.float8.decode_float8 = decode
    return endpoint


def passes_over_deltas(staging: Any, own: Any, transfer: BucketTransfer, bucket: Any, *others: Any) -> torch.Tensor:
    if transfer.encoding == "delta":
        base: torch.Tensor = staging._base.flats[bucket.index]
        return base
    arrived: torch.Tensor = own(transfer, bucket, *others)
    return arrived


def leaves_aborted_deltas(staging: Any, own: Any, *arguments: Any) -> torch.Tensor:
    arrived: torch.Tensor = own(*arguments)
    transfer, bucket, *_ = arguments
    if transfer.encoding == "delta":
        staging._base.flats[bucket.index] = arrived
    return arrived


def patches_two_buffers_in_turn() -> Callable[..., torch.Tensor]:
    turns: dict[UpdateRef, int] = {}
    buffers: dict[tuple[int, int], torch.Tensor] = {}

    def decoded(staging: Any, own: Any, *arguments: Any) -> torch.Tensor:
        arrived: torch.Tensor = own(*arguments)
        transfer, bucket, *_ = arguments
        if transfer.encoding != "delta":
            return arrived
        turn = turns.setdefault(staging.update.ref, len(turns) % 2)
        return buffers.setdefault((turn, bucket.index), torch.empty_like(arrived)).copy_(arrived)

    return decoded


@replaces("request_weight_update")
async def takes_any_base(endpoint: EmbeddedEndpoint, own: Any, update: WeightUpdate) -> None:
    if update.base is not None:
        kept = endpoint._sink.kept
        changes = {"base": kept} if kept is not None else {"base": None, "encodings": ()}
        update = update.model_copy(update=changes)
    await own(update)


def receiving(change: Callable[[Any], None]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Change the receivers of transports that store."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        sink: Any = endpoint._sink
        own = sink._make_receiver

        def make(spec: TransportSpec) -> Any:
            receiver = own(spec)
            change(receiver)
            return receiver

        sink._make_receiver = make
        return endpoint

    return infect


def always_the_first_file(receiver: Any) -> None:
    receive = receiver.receive

    def faulty(*arguments: Any) -> list[torch.Tensor]:
        if hasattr(receiver, "_num_received"):
            receiver._num_received = 0
        found: list[torch.Tensor] = receive(*arguments)
        return found

    receiver.receive = faulty


def always_the_first_update(receiver: Any) -> None:
    begin, first = receiver.begin, []

    def faulty(ref: UpdateRef) -> None:
        first.append(ref)
        begin(first[0])

    receiver.begin = faulty


def without_a_lock(receiver: Any) -> None:
    """Map memory that the model computes with without a lock, so that the sender reuses it."""
    if not isinstance(receiver, ArenaReceiver):
        return
    faulty: Any = receiver

    def arena(name: str) -> torch.Tensor:
        with regular_file(Path(faulty._spec.directory), name, is_private=True) as (fd, size_bytes):
            mapped: torch.Tensor = faulty._memory.map_memory(fd, size_bytes, faulty._spec)
            return mapped

    faulty._arena = arena


def overlooks_damage_in_shared_memory(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    sink: Any = endpoint._sink
    own, receive, made = sink._make_receiver, endpoint.receive_weights, []

    def make(spec: TransportSpec) -> Any:
        made.append(own(spec))
        return made[-1]

    async def receive_weights(bucket: BucketTransfer) -> None:
        if made and isinstance(made[-1], ArenaReceiver):
            bucket = bucket.model_copy(update={"checksum": None})
        await receive(bucket)

    sink._make_receiver = make
    endpoint.receive_weights = receive_weights  # type: ignore[method-assign]
    return endpoint


def served_from_the_trainer(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Serve from memory of the trainer's device, which is neither copied nor locked."""
    faulty: Any = endpoint

    def change(receiver: Any) -> None:
        without_a_lock(receiver)
        faulty._is_borrowed = False

    return receiving(change)(endpoint)


@replaces("init_process_group")
async def without_the_token(endpoint: EmbeddedEndpoint, own: Any, spec: TransportSpec) -> None:
    if spec.transport == "http":
        spec = spec.model_copy(update={"token": "none"})
    await own(spec)


def counting_escapes_once(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
    """Count adjacent escapes in the gaps of a delta as one."""
    delta: Any = inflight.weights.encode.delta
    indices = delta._indices

    def faulty(gaps: Any, plan: Any) -> Any:
        is_escape = gaps == delta._ESCAPE
        counted = gaps.copy()
        counted[1:][is_escape[1:] & is_escape[:-1]] = 0
        found = (counted + (~is_escape)).cumsum(dtype="int64") - 1
        return indices(gaps, plan) if plan.num_gaps == plan.num_changed else found[~is_escape]

    delta._indices = faulty
    return endpoint


MUTANTS = (
    Mutant("damage overlooked", "U-14", "Checksums are not compared.", overlooks_damage),
    Mutant(
        "frozen tensors cleared", "U-15", "Tensors that are not sent are zero after the update.", clears_frozen_tensors
    ),
    Mutant(
        "head of complete updates",
        "U-15",
        "Logits are computed with the head of the latest complete update.",
        keeps_the_head_of_complete_updates,
    ),
    Mutant("LoRAs added up", "U-64", "A LoRA is added to the previous one.", adds_up_loras),
    Mutant(
        "scale left out", "U-64", "The product of a LoRA's matrices is added without its scale.", leaves_out_the_scale
    ),
    Mutant(
        "misfitting LoRAs accepted", "U-65", "A LoRA is loaded without a check that it fits the model.", refuses_no_lora
    ),
    Mutant("missing counted as frozen", "U-15", "Tensors that are not sent count as frozen.", freezes_what_is_missing),
    Mutant(
        "bfloat16 taken for float16",
        "U-16",
        "Tensors that travelled as bfloat16 are decoded as float16.",
        decoding(halves_taken_for_float16),
    ),
    Mutant("float8 without scales", "U-17", "The scales of float8 are ignored.", without_scales),
    Mutant(
        "deltas passed over",
        "U-18",
        "A delta is acknowledged, but its unchanged base is loaded.",
        decoding(passes_over_deltas),
    ),
    Mutant(
        "escapes of deltas counted once",
        "U-18",
        "A gap between two changed elements is decoded wrongly if it takes several escapes.",
        counting_escapes_once,
    ),
    Mutant(
        "two buffers of deltas",
        "U-18",
        "Decoded deltas are written to two buffers alternately, even after one was aborted.",
        lambda endpoint: decoding(patches_two_buffers_in_turn())(endpoint),
    ),
    Mutant("aborted delta stays", "U-18", "An aborted delta remains in its base.", decoding(leaves_aborted_deltas)),
    Mutant("any base accepted", "U-19", "A delta is applied to whatever base the endpoint has kept.", takes_any_base),
    Mutant(
        "damage in shared memory overlooked",
        "U-60",
        "Checksums of buckets in shared memory are not verified.",
        overlooks_damage_in_shared_memory,
    ),
    Mutant(
        "served from the store",
        "U-60",
        "The model computes with memory that the sender reuses.",
        receiving(without_a_lock),
    ),
    Mutant(
        "served from the trainer",
        "U-63",
        "The model computes with memory on the trainer's device that the sender reuses.",
        served_from_the_trainer,
        over_ipc=True,
    ),
    Mutant("first file only", "U-61", "Every bucket is read from the first file.", receiving(always_the_first_file)),
    Mutant(
        "first update only",
        "U-61",
        "Every later update of a group reads the first update again.",
        receiving(always_the_first_update),
    ),
    Mutant(
        "token left out",
        "U-62",
        "The files of the transport `http` are requested with a wrong token.",
        without_the_token,
    ),
)

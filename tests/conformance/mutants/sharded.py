"""Faults in receiving parts of several senders: parts that are not awaited, compared, or written to their place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

import inflight.weights.receive.staging
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.errors import TransferError
from inflight.weights.encode.bucket_bytes import checksum_as, unpack
from inflight.weights.encode.parts import boxes_of, places_of, read_part, views_of
from inflight.weights.transports.several import SeveralReceivers
from inflight.weights.transports.store import StoredReceiver
from inflight.wire import DTYPE_SIZES, BucketSpec, BucketTransfer, Manifest, Sharding, WeightUpdate
from tests.conformance.mutants.arrivals import always_the_first_update, receiving
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.patches import replaces, with_capabilities

staging_module: Any = inflight.weights.receive.staging


def replacing(**functions: Callable[..., Any]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Replace functions of parts where they arrive, for the whole process."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        for name, function in functions.items():
            setattr(staging_module, name, function)
        return endpoint

    return infect


def receiving_parts(received: Callable[..., torch.Tensor]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Replace how a bucket arrives in parts: ``received`` gets the endpoint, the staging, its method and arguments."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        sink: Any = endpoint._sink
        begin = sink.begin

        def faulty(update: WeightUpdate) -> None:
            begin(update)
            staging = sink._staging
            own = staging._receive_parts
            staging._receive_parts = lambda *arguments: received(endpoint, staging, own, *arguments)

        sink.begin = faulty
        return endpoint

    return infect


def accepting_shardings(is_fine: Callable[[int, int], bool]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Accept boxes by the numbers of elements that they and their tensor have."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        own, faulty = Sharding.problem, Sharding

        def problem(self: Sharding, shape: tuple[int, ...]) -> str | None:
            boxes = [box for boxes in self.senders for box in boxes]
            num_sent = sum(int(torch.Size(b - a for a, b in box).numel()) for box in boxes)
            return None if is_fine(num_sent, int(torch.Size(shape).numel())) else own(self, shape)

        faulty.problem = problem  # type: ignore[method-assign]
        return endpoint

    return infect


def reversed_receivers(receiver: Any) -> None:
    """Take the part of the last sender for that of the first; gloo ends a process that receives more than it asked."""
    if isinstance(receiver, SeveralReceivers) and isinstance(receiver.receivers[0], StoredReceiver):
        receiver.receivers = receiver.receivers[::-1]


def late_sender_of_the_first_session(receiver: Any) -> None:
    if isinstance(receiver, SeveralReceivers):
        always_the_first_update(receiver.receivers[1])


def without_the_last(receiver: Any) -> None:
    """Receive a part of every sender but the last, and continue once those have arrived."""
    if not isinstance(receiver, SeveralReceivers):
        return
    faulty: Any = receiver

    def of_each(call: Callable[[int, Any], None]) -> None:
        for sender, one in enumerate(faulty.receivers):
            try:
                call(sender, one)
            except TransferError as error:
                if "checksum" in str(error):
                    raise

    faulty.of_each = of_each


def equal_slices_exchanged(flat: torch.Tensor, manifest: Manifest, bucket: BucketSpec, sender: int) -> Any:
    """Two senders whose parts have the same shapes are mistaken for each other once their checksums are compared."""
    other = (sender + 1) % manifest.num_senders
    mine, theirs = views_of(flat, manifest, bucket, sender), views_of(flat, manifest, bucket, other)
    return theirs if [it.shape for it in mine] == [it.shape for it in theirs] else mine


def as_rows(flat: torch.Tensor, manifest: Manifest, bucket: BucketSpec, sender: int) -> list[torch.Tensor]:
    """Elements are written one after another from the first one of their box on."""
    tensors = manifest.tensors[bucket.start : bucket.stop]
    offsets = {spec.name: sum(it.size_bytes for it in tensors[:i]) for i, spec in enumerate(tensors)}
    views = []
    for (spec, box), view in zip(
        boxes_of(manifest, bucket, sender), views_of(flat, manifest, bucket, sender), strict=True
    ):
        of_tensor = flat[offsets[spec.name] : offsets[spec.name] + spec.size_bytes].view(spec.shape[0], -1)
        start = box[0][0] * of_tensor.shape[1] + (box[-1][0] * DTYPE_SIZES[spec.dtype] if len(box) > 1 else 0)
        views.append(of_tensor.view(-1)[start : start + view.numel()] if len(box) == 2 else view)
    return views


def torn_by_a_late_part(
    endpoint: Any, staging: Any, own: Any, receiver: Any, transfer: BucketTransfer, bucket: BucketSpec
) -> torch.Tensor:
    """What has arrived of a bucket is served although a part of it is missing."""
    take, taken = receiver.take, []
    receiver.take = lambda size_bytes: taken.append(take(size_bytes)) or taken[0]
    try:
        arrived: torch.Tensor = own(receiver, transfer, bucket)
    except TransferError:
        specs = staging.update.manifest.tensors[bucket.start : bucket.stop]
        with torch.no_grad():
            for spec, tensor in zip(specs, unpack(taken[0], specs), strict=True):
                endpoint._engine.weights.by_name[spec.name].copy_(tensor)
        raise
    finally:
        receiver.take = take
    return arrived


def moves_the_base_at_once(
    endpoint: Any, staging: Any, own: Any, receiver: Any, transfer: BucketTransfer, bucket: BucketSpec
) -> torch.Tensor:
    arrived: torch.Tensor = own(receiver, transfer, bucket)
    if staging._base is not None:
        staging._base.flats[bucket.index] = arrived
    return arrived


def base_of_the_first_part_only(
    endpoint: Any, staging: Any, own: Any, receiver: Any, transfer: BucketTransfer, bucket: BucketSpec
) -> torch.Tensor:
    """Apply deltas to zeros if the first part of their bucket is not a delta."""
    base = staging._base
    if base is not None and transfer.parts[0].encoding != "delta":
        staging._base = SimpleNamespace(flats=[torch.zeros_like(flat) for flat in base.flats])
    try:
        arrived: torch.Tensor = own(receiver, transfer, bucket)
    finally:
        staging._base = base
    return arrived


def first_base_of_the_second_sender() -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Deltas of the second sender are relative to the first base that there was."""
    place, first = threading.local(), {}

    def views(flat: torch.Tensor, manifest: Manifest, bucket: BucketSpec, sender: int) -> list[torch.Tensor]:
        place.key = bucket.index, sender
        return views_of(flat, manifest, bucket, sender)

    def read(of: Sequence[torch.Tensor]) -> torch.Tensor:
        part = read_part(of)
        return first.setdefault(place.key, part.clone()).clone() if place.key[1] else part

    return replacing(views_of=views, read_part=read)


def places_of_all(manifest: Manifest, bucket: BucketSpec, sender: int) -> bytes:
    return b"\0".join(places_of(manifest, bucket, it) for it in range(manifest.num_senders))


def checksum_at_any_place(announced: str, flat: torch.Tensor, places: bytes = b"") -> str:
    found = [checksum_as(announced, flat, it) for it in places.split(b"\0")]
    return announced if announced in found else found[0]


def changing_parts(change: Callable[[Any], tuple[Any, ...]]) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Change the parts in which a bucket is offered."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        faulty: Any = endpoint

        async def receive(bucket: BucketTransfer) -> None:
            await EmbeddedEndpoint.receive_weights(endpoint, bucket.model_copy(update={"parts": change(bucket.parts)}))

        faulty.receive_weights = receive
        return endpoint

    return infect


def uncompared(parts: Any) -> tuple[Any, ...]:
    return tuple(part.model_copy(update={"checksum": None}) for part in parts)


@replaces("_updates._refuse_unsupported")
def group_of_any_size(endpoint: EmbeddedEndpoint, own: Any, update: WeightUpdate) -> None:
    joining, endpoint._updates._joining = endpoint._updates._joining, None
    try:
        own(update)
    finally:
        endpoint._updates._joining = joining


MUTANTS = (
    Mutant(
        "unsupported senders accepted",
        "E-09",
        "Several senders are not supported, but are accepted.",
        with_capabilities(sharded=False),
    ),
    Mutant("senders in reverse order", "U-66", "Parts come from the last sender first.", receiving(reversed_receivers)),
    Mutant(
        "equal slices exchanged",
        "U-66",
        "Parts of the same shape are swapped after their checksums have been compared.",
        replacing(views_of=equal_slices_exchanged),
    ),
    Mutant(
        "columns put as rows",
        "U-66",
        "A part that consists of columns is written as if it consisted of rows.",
        replacing(views_of=as_rows),
    ),
    Mutant(
        "checksum without places",
        "U-66",
        "The checksum of a part covers its bytes, but not their positions.",
        replacing(places_of=lambda *_: b""),
    ),
    Mutant(
        "wrong base of one part",
        "U-67",
        "Deltas of the second sender are always applied to its first base.",
        first_base_of_the_second_sender(),
    ),
    Mutant(
        "base moved without a commit",
        "U-67",
        "Parts of a delta replace their base as they arrive.",
        receiving_parts(moves_the_base_at_once),
    ),
    Mutant(
        "base of the first part only",
        "U-67",
        "Deltas in a bucket whose first part is raw are applied to zeros.",
        receiving_parts(base_of_the_first_part_only),
    ),
    Mutant(
        "committed without a part",
        "U-68",
        "A bucket counts as complete although the last sender's part is late.",
        receiving(without_the_last),
    ),
    Mutant(
        "torn by a late part",
        "U-68",
        "A partly received bucket is served although a part is late.",
        receiving_parts(torn_by_a_late_part),
    ),
    Mutant("damaged parts overlooked", "U-69", "Checksums of parts are not compared.", changing_parts(uncompared)),
    Mutant(
        "first part compared only",
        "U-69",
        "Only the checksum of the first part is compared.",
        changing_parts(lambda parts: (*parts[:1], *uncompared(parts[1:]))),
    ),
    Mutant(
        "places of others accepted",
        "U-70",
        "A part's checksum may cover the positions of any sender's part.",
        replacing(places_of=places_of_all, checksum_as=checksum_at_any_place),
    ),
    Mutant(
        "slice twice accepted",
        "U-71",
        "A manifest may contain elements of a tensor more than once.",
        accepting_shardings(lambda num_sent, num_elements: num_sent > num_elements),
        over_http=True,
    ),
    Mutant(
        "missing slice accepted",
        "U-71",
        "A manifest may omit elements of a tensor.",
        accepting_shardings(lambda num_sent, num_elements: num_sent < num_elements),
        over_http=True,
    ),
    Mutant(
        "further parts dropped",
        "U-72",
        "A bucket may be offered in more parts than there are senders.",
        changing_parts(lambda parts: tuple(parts[:2])),
    ),
    Mutant(
        "group of any size",
        "U-72",
        "The senders of an update are not compared with those of its group.",
        group_of_any_size,
    ),
    Mutant(
        "older session of one sender",
        "U-73",
        "The second sender's parts are always those of the first session.",
        receiving(late_sender_of_the_first_session),
    ),
)

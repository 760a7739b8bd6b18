"""Level weights, updates of which not every byte travels: frozen tensors, rounded ones, and deltas to kept weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from inflight.conformance.checks import Check, require
from inflight.conformance.endpoint.aftermath import require_old_weights, settled
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.reference import Weights
from inflight.errors import UpdateRefusedError
from inflight.wire import Encoding, EndpointState, UpdateRef, WeightUpdate

_REFUSED = (UpdateRefusedError,)
_FLOAT8_BLOCK = 128
_FLOAT8_LARGEST = 448.0
_FLOAT8_MIN_EXPONENT = -124


async def frozen_tensors(subject: EndpointSubject) -> None:
    """Send the final norm alone, with and without saying that all the others are frozen."""
    publisher, reference = subject.publisher, subject.reference
    doubled = reference.with_final_norm(2.0, "A with its final norm doubled")
    alone = Weights("its final norm", {reference.final_norm: doubled.tensors[reference.final_norm]})
    others = tuple(name for name in reference.weights.tensors if name != reference.final_norm)
    await publisher.form_group()
    short = publisher.announcement(alone, frozen=others[1:])
    call = subject.endpoint.request_weight_update(short)
    what = f"an update that neither sends nor freezes {others[0]}"
    error = await subject.require_raises(call, _REFUSED, what)
    subject.note(refusal=str(error))
    await require_old_weights(subject, f"after {what} was refused")
    await publisher.publish(alone, frozen=others)
    await subject.require_serves(doubled, "after an update of the final norm, all else frozen")


async def in_bfloat16(subject: EndpointSubject) -> None:
    """Send weights as ``bfloat16``."""
    await _publish_rounded(subject, "bfloat16", lambda tensor: tensor.to(torch.bfloat16).to(tensor.dtype))


async def in_float8(subject: EndpointSubject) -> None:
    """Send weights as ``float8``."""
    await _publish_rounded(subject, "float8", rounded_to_float8)


async def _publish_rounded(
    subject: EndpointSubject, encoding: Encoding, rounded: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    publisher, other = subject.publisher, subject.reference.perturbed("B")
    decoded = Weights(f"B in {encoding}", {name: rounded(tensor) for name, tensor in other.tensors.items()})
    update = await publisher.request(other, encodings=(encoding,), bucket_bytes=_size_bytes(other) // 3)
    for index in range(len(update.buckets)):
        await publisher.send_parcel(publisher.parcel(update, other, index, encoding=encoding))
    await publisher.commit(update)
    subject.note(**{f"largest logprob difference from B before {encoding}": await subject.difference_from(other)})
    await subject.require_serves(decoded, f"after an update in {encoding}")


def rounded_to_float8(tensor: torch.Tensor) -> torch.Tensor:
    """Return what an endpoint loads of a tensor that travels as ``float8``: one scale for each 128 of a row.

    The scale is the smallest power of two that brings the block's largest magnitude to at most 448.
    """
    if tensor.dim() < 2:
        return tensor
    rows = tensor.double().reshape(-1, tensor.shape[-1])
    decoded = torch.empty_like(rows)
    for row, out in zip(rows, decoded, strict=True):
        for start in range(0, len(row), _FLOAT8_BLOCK):
            block = row[start : start + _FLOAT8_BLOCK]
            exponent, largest = _FLOAT8_MIN_EXPONENT, float(block.abs().max())
            while largest > _FLOAT8_LARGEST * 2.0**exponent:
                exponent += 1
            scale = 2.0**exponent if largest else 1.0
            values = (block / scale).float().to(torch.float8_e4m3fn)
            out[start : start + _FLOAT8_BLOCK] = values.double() * scale
    return decoded.reshape(tensor.shape).to(tensor.dtype)


async def deltas(subject: EndpointSubject) -> None:
    """Send all, and have it kept; then a delta, one that is aborted, and another one to the same base."""
    publisher, reference = subject.publisher, subject.reference
    flipped, unlike = reference.with_final_norm(-1.0, "B"), reference.perturbed("C")
    first = await publisher.request(
        reference.weights, keep=True, session_id="all", bucket_bytes=_size_bytes(reference.weights) // 3
    )
    for index in range(len(first.buckets)):
        await publisher.send(first, reference.weights, index)
    await publisher.commit(first)
    await _require_kept(subject, first, "after an update that asked for it")
    second = await _send_delta(subject, flipped, first, reference.weights, "second")
    await publisher.commit(second)
    await subject.require_serves(flipped, "after a delta")
    await _require_kept(subject, second, "after a delta that asked for it")
    third = await _send_delta(subject, unlike, second, flipped, "third")
    await publisher.abort(third)
    publisher.lose_group()
    await settled(subject, "after a delta that was aborted")
    await subject.require_serves(flipped, "after a delta that was aborted")
    await _require_kept(subject, second, "after a delta that was aborted")
    quartered = reference.with_final_norm(-0.5, "D")
    fourth = await _send_delta(subject, quartered, second, flipped, "fourth")
    await publisher.commit(fourth)
    await subject.require_serves(quartered, "after another delta to the same base")


async def unknown_base(subject: EndpointSubject) -> None:
    """Announce deltas to weights that were never published, before and after others were kept."""
    publisher, reference = subject.publisher, subject.reference
    flipped = reference.with_final_norm(-1.0, "B")
    await publisher.form_group()
    for served, following in ((reference.weights, flipped), (flipped, reference.weights)):
        stranger = UpdateRef(run_id=publisher.run_id, version=publisher.version, session_id="stranger")
        update = publisher.announcement(following, encodings=("delta",), base=stranger, session_id="delta")
        error = await subject.require_raises(
            subject.endpoint.request_weight_update(update), _REFUSED, "a delta to a base that was not kept"
        )
        subject.note(refusal=str(error))
        when = "after a delta to a base that was not kept was refused"
        await subject.require_state(EndpointState.READY, when)
        await subject.require_serves(served, when)
        await publisher.publish(following, keep=True, session_id="all")
        await subject.require_serves(following, "after all of it was sent")


async def _send_delta(
    subject: EndpointSubject, weights: Weights, base: WeightUpdate, base_weights: Weights, session_id: str
) -> WeightUpdate:
    """Bring every bucket of a delta to the endpoint, and return its update, which is open."""
    publisher = subject.publisher
    update = await publisher.request(
        weights,
        encodings=("delta",),
        base=base.ref,
        keep=True,
        session_id=session_id,
        bucket_bytes=_size_bytes(weights) // 3,
    )
    for index in range(len(update.buckets)):
        await publisher.send_parcel(publisher.parcel(update, weights, index, encoding="delta", base=base_weights))
    return update


async def _require_kept(subject: EndpointSubject, update: WeightUpdate, when: str) -> None:
    kept = (await subject.endpoint.weight_version()).kept
    require(kept == update.ref, f"{when}, {kept} is said to be kept, not {update.ref}")


def _size_bytes(weights: Weights) -> int:
    return sum(tensor.nbytes for tensor in weights.tensors.values())


_DECODE = "the layout of a payload in docs/contract.md, and that values are decoded to the manifest's dtype"
_BASE = "what is kept of a committed update, by which name, and that an update that ends leaves it as it was"

CHECKS = (
    Check(
        "U-15",
        "weights",
        "An update that says which tensors are frozen changes the others only; one that neither sends nor freezes a "
        "tensor is refused.",
        "whether tensors that are not sent are left as they are, and counted when the manifest is compared",
        frozen_tensors,
        needs=("updates", "partial_updates"),
    ),
    Check(
        "U-16",
        "weights",
        "After an update in bfloat16 logprobs are those of the weights rounded to bfloat16.",
        _DECODE,
        in_bfloat16,
        needs=("updates", "bfloat16"),
    ),
    Check(
        "U-17",
        "weights",
        "After an update in float8 logprobs are those of the decoded weights, in which tensors of one dimension are "
        "as they were.",
        _DECODE,
        in_float8,
        needs=("updates", "float8"),
    ),
    Check(
        "U-18",
        "weights",
        "After a delta logprobs are those of the new weights; one that is aborted leaves its base as it was.",
        _BASE,
        deltas,
        needs=("updates", "delta"),
        deadline_s=40,
    ),
    Check(
        "U-19",
        "weights",
        "A delta to a base that was not kept is refused when it is requested, and an update that sends all succeeds.",
        _BASE,
        unknown_base,
        needs=("updates", "delta"),
        deadline_s=40,
    ),
)

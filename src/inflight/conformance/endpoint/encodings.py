"""Level ``weights``: updates that send fewer bytes, with frozen or rounded tensors or as deltas against weights that
the endpoint kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from inflight.conformance.checks import check, look_at, require
from inflight.conformance.endpoint.aftermath import require_old_weights, require_recovers, wait_until_settled
from inflight.conformance.endpoint.loras import SPEC, make_lora
from inflight.conformance.endpoint.publishing import TRANSFER_TIMEOUT_S, SteppedPublisher
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.endpoint.waiting import SLACK_S
from inflight.conformance.models import make_tiny_model
from inflight.conformance.reference import ReferenceCheckpoint, ReferenceWeights
from inflight.errors import TransferError
from inflight.wire import Encoding, EndpointState, UpdateRef, WeightUpdate

LEVEL = "weights"
_INEXACT = 1.1
_MANY_TOKENS = 8192
_FLOAT8_BLOCK = 128
_FLOAT8_LARGEST = 448.0
_FLOAT8_MIN_EXPONENT = -124
_DECODE = "the layout of a payload in docs/contract.md, and whether values are decoded to the manifest's dtype"
_BASE = "what is kept of a committed update and under which name, and whether an aborted update leaves it unchanged"


@check("U-15", "updates partial_updates")
@look_at("whether tensors that are not sent are left unchanged, and counted when the manifest is compared")
async def frozen_tensors(subject: EndpointSubject) -> None:
    """An update that names frozen tensors changes only the others; one that leaves a tensor neither sent nor frozen is
    refused."""
    publisher, reference = subject.publisher, subject.reference
    doubled = reference.with_final_norm(2.0, "A with its final norm doubled")
    alone = ReferenceWeights("its final norm", {reference.final_norm: doubled.tensors[reference.final_norm]})
    others = tuple(name for name in reference.weights.tensors if name != reference.final_norm)
    await publisher.form_group()
    call = subject.endpoint.request_weight_update(publisher.announcement(alone, frozen=others[1:]))
    what = f"an update that neither sends nor freezes {others[0]}"
    await subject.require_refused(call, what)
    await require_old_weights(subject, f"after {what} was refused")
    unknown = (*others, "model.layers.0.no_such_layer.weight")
    call = subject.endpoint.request_weight_update(publisher.announcement(alone, frozen=unknown))
    await subject.require_refused(call, f"an update that freezes {unknown[-1]}, which the model does not have,")
    await publisher.publish(alone, frozen=others)
    await subject.require_serves(doubled, "after an update of the final norm, all else frozen")
    outside = {name: it for name, it in reference.perturbed("B").tensors.items() if ".layers." not in name}
    layers = tuple(name for name in others if name not in outside)
    await publisher.publish(ReferenceWeights("its embedding, final norm and head", outside), frozen=layers)
    changed = ReferenceWeights(
        "A with the embedding, final norm and head of B", {**reference.weights.tensors, **outside}
    )
    await subject.require_serves(changed, "after an update of the embedding, the final norm and the head alone")


@check("U-16", "updates bfloat16", look_at=_DECODE)
async def in_bfloat16(subject: EndpointSubject) -> None:
    """After an update in bfloat16, logprobs are those of the weights rounded to bfloat16; buckets that were sent raw
    are not rounded."""
    await _publish_rounded(subject, "bfloat16", lambda tensor: tensor.to(torch.bfloat16).to(tensor.dtype))


@check("U-17", "updates float8", look_at=_DECODE)
async def in_float8(subject: EndpointSubject) -> None:
    """After an update in float8, logprobs are those of the decoded weights; one-dimensional tensors and buckets that
    were sent raw are not rounded."""
    await _publish_rounded(subject, "float8", rounded_to_float8)


async def _publish_rounded(
    subject: EndpointSubject, encoding: Encoding, rounded: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    publisher, perturbed = subject.publisher, subject.reference.perturbed("B")
    # The factor makes one-dimensional tensors, which are often ones, inexact in either encoding.
    tensors = {name: it if it.dim() > 1 else _INEXACT * it for name, it in perturbed.tensors.items()}
    other = ReferenceWeights("B", tensors)
    decoded = ReferenceWeights(f"B in {encoding}", {name: rounded(tensor) for name, tensor in other.tensors.items()})
    await publisher.publish(other, encodings=(encoding,), bucket_bytes=other.size_bytes // 3)
    subject.note(**{f"largest logprob difference from B before {encoding}": await subject.gap_now(other)})
    await subject.require_serves(decoded, f"after an update in {encoding}")
    # A bucket may be sent raw even if the update announces an encoding.
    update = await publisher.request(other, encodings=(encoding,), bucket_bytes=other.size_bytes // 3)
    await publisher.send_bucket(update, publisher.bucket(update, other, 0))
    for index in range(1, len(update.buckets)):
        await publisher.send(update, other, index)
    await publisher.commit(update)
    sent_raw = {spec.name for spec in update.manifest.tensors[: update.buckets[0].stop]}
    mixed = {name: other.tensors[name] if name in sent_raw else tensor for name, tensor in decoded.tensors.items()}
    weights = ReferenceWeights(f"B in {encoding} except for its first bucket", mixed)
    await subject.require_serves(weights, f"after an update in {encoding} whose first bucket was sent raw")


def rounded_to_float8(tensor: torch.Tensor) -> torch.Tensor:
    """Return what an endpoint loads for a tensor that is sent as ``float8``, with one scale per 128 elements of a row.

    The scale is the smallest power of two that reduces the block's largest magnitude to at most 448.
    """
    if tensor.dim() < 2:
        return tensor
    # float32 is exact here, because scales are powers of two.
    rows = tensor.float().reshape(-1, tensor.shape[-1])
    blocks = torch.nn.functional.pad(rows, (0, -rows.shape[1] % _FLOAT8_BLOCK)).reshape(len(rows), -1, _FLOAT8_BLOCK)
    largest = blocks.abs().amax(dim=-1, keepdim=True).double()
    mantissa, exponent = torch.frexp(largest / _FLOAT8_LARGEST)
    exponent = (exponent - (mantissa == 0.5).int()).clamp(min=_FLOAT8_MIN_EXPONENT)
    scale = torch.where(largest > 0, torch.exp2(exponent.double()), 1.0).float()
    decoded: torch.Tensor = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    return decoded.flatten(1)[:, : rows.shape[1]].reshape(tensor.shape).to(tensor.dtype)


@check("U-18", "updates delta", deadline_s=120, look_at=_BASE)
async def deltas(subject: EndpointSubject) -> None:
    """After a delta, logprobs are those of the new weights, even if its base had buckets that were sent raw; aborted
    deltas leave their base unchanged."""
    publisher, reference = subject.publisher, subject.reference
    weights, other, unlike = reference.weights, reference.perturbed("B"), reference.perturbed("C", seed=2)
    # The second delta changes other elements than the first, and leaves long gaps.
    flipped = reference.with_final_norm(-1.0, "B with its final norm negated", other)
    first = await publisher.request(weights, keep=True, session_id="all")
    await publisher.complete(first, weights)
    await _require_kept(subject, first, "after an update that asked for it")
    second = await _send_delta(publisher, other, first, weights, "second")
    await _require_kept(subject, first, "before a delta that asked for it is committed")
    await publisher.commit(second)
    await subject.require_serves(other, "after a delta")
    await _require_kept(subject, second, "after a delta that asked for it")
    for session_id in ("third", "third-again"):
        when = f"after an aborted delta in session {session_id!r}"
        third = await _send_delta(publisher, unlike, second, other, session_id)
        await publisher.abort(third)
        publisher.lose_group()
        await wait_until_settled(subject, when)
        await subject.require_serves(other, when)
        await _require_kept(subject, second, when)
    fourth = await _send_delta(publisher, flipped, second, other, "fourth")
    await publisher.commit(fourth)
    await subject.require_serves(flipped, "after another delta to the same base")
    fields = {"encodings": ("delta",), "base": fourth.ref, "keep": True, "session_id": "fifth"}
    fifth = await publisher.request(unlike, **fields)
    for index in range(len(fifth.buckets)):
        await publisher.send_bucket(fifth, publisher.bucket(fifth, unlike, index))
    await publisher.commit(fifth)
    await subject.require_serves(unlike, "after a delta whose buckets were sent raw")
    last = reference.with_final_norm(-1.0, "C with its final norm negated", unlike)
    sixth = await _send_delta(publisher, last, fifth, unlike, "sixth")
    await publisher.commit(sixth)
    await subject.require_serves(last, "after a delta to an update whose buckets were sent raw")
    await publisher.publish(weights, session_id="unkept")
    if (await subject.endpoint.weight_version()).kept == sixth.ref:
        seventh = await _send_delta(publisher, other, sixth, last, "seventh")
        await publisher.commit(seventh)
        await subject.require_serves(other, "after a delta to an update that was kept before the last one")
    await _require_far_changes(subject)


async def _require_far_changes(subject: EndpointSubject) -> None:
    """Require that a delta changes the right elements even if they are further apart than in the kit's usual model.

    The check starts another endpoint, which serves a model with a larger vocabulary.
    """
    if subject.missing("fresh") is not None:
        return
    reference = ReferenceCheckpoint(make_tiny_model(subject.directory / "many-tokens", vocab_size=_MANY_TOKENS))
    endpoint = (await subject.fresh(reference.path)).endpoint
    can = await endpoint.capabilities()
    reference.cast(can.dtype)
    publisher = subject.publisher_to(endpoint, can)
    flipped = reference.with_final_norm(-1.0, "the final norm negated")
    first = await publisher.request(reference.weights, keep=True, session_id="all")
    await publisher.complete(first, reference.weights)
    second = await _send_delta(publisher, flipped, first, reference.weights, "second")
    await publisher.commit(second)
    request = subject.request([token % _MANY_TOKENS for token in subject.prompt()])
    completion = (await endpoint.generate(request)).completions[0]
    gap = subject.gap(flipped, request, completion, reference)
    subject.note(**{f"largest logprob difference, {_MANY_TOKENS} tokens": gap})
    what = f"after a delta that changes the final norm of a model with {_MANY_TOKENS} tokens, logprobs"
    require(gap <= subject.tiny_tolerance, f"{what} differ by up to {gap:.3g} from those of the new weights")


@check("U-19", "updates delta", deadline_s=40, look_at=_BASE)
async def unknown_base(subject: EndpointSubject) -> None:
    """A request for a delta against a base that was not kept is refused, and an update that sends everything then
    succeeds."""
    publisher, reference = subject.publisher, subject.reference
    flipped = reference.with_final_norm(-1.0, "B")
    await publisher.form_group()
    for served, following in ((reference.weights, flipped), (flipped, reference.weights)):
        stranger = UpdateRef(run_id=publisher.run_id, version=publisher.version, session_id="stranger")
        update = publisher.announcement(following, encodings=("delta",), base=stranger, session_id="delta")
        what = "a delta to a base that was not kept"
        await subject.require_refused(subject.endpoint.request_weight_update(update), what)
        when = f"after {what} was refused"
        await subject.require_state(EndpointState.READY, when)
        await subject.require_serves(served, when)
        await publisher.publish(following, keep=True, session_id="all")
        await subject.require_serves(following, "after an update that sends every tensor")


async def _send_delta(
    publisher: SteppedPublisher,
    weights: ReferenceWeights,
    base: WeightUpdate,
    base_weights: ReferenceWeights,
    session_id: str,
) -> WeightUpdate:
    """Send every bucket of a delta, and return the update, which is still open."""
    fields = {"base": base.ref, "keep": True, "session_id": session_id}
    update = await publisher.request(weights, encodings=("delta",), **fields)
    await publisher.send_all(update, weights, base_weights)
    return update


async def _require_kept(subject: EndpointSubject, update: WeightUpdate, when: str) -> None:
    kept = (await subject.endpoint.weight_version()).kept
    require(kept == update.ref, f"{when}, {kept} is reported as kept, not {update.ref}")


@check("U-14", "updates staging", deadline_s=45)
@look_at("whether the checksum is compared where the bytes arrive, before they are decoded, copied or loaded")
async def damaged_bucket(subject: EndpointSubject) -> None:
    """A bucket whose bytes do not match its checksum, whatever its encoding and even if it belongs to a LoRA, raises
    TransferError before any part of the update is applied, and the old weights stay in service."""
    weights, other = subject.reference.weights, subject.reference.perturbed("B")
    cases: dict[str, dict[str, Any]] = {"a damaged bucket": {}, "a damaged bucket of a staged update": {"staged": True}}
    for encoding in ("bfloat16", "float8"):
        if encoding in subject.capabilities.encodings:
            cases[f"a damaged bucket in {encoding}"] = {"encodings": (encoding,)}
    for what, fields in cases.items():
        await require_damage_refused(subject, other, what, fields)
        await require_recovers(subject, f"after {what}")
        await subject.publisher.publish(weights)
    if "delta" in subject.capabilities.encodings:
        base = await subject.publisher.request(
            weights, keep=True, session_id="base", bucket_bytes=other.size_bytes // 2
        )
        await subject.publisher.complete(base, weights)
        fields = {"encodings": ("delta",), "base": base.ref, "session_id": "delta"}
        await require_damage_refused(subject, other, "a damaged bucket of a delta", fields, weights)
        await require_recovers(subject, "after a damaged bucket of a delta")
    if subject.capabilities.lora:
        await subject.publisher.publish(weights, keep=True)  # an engine may need a base to add a LoRA to
        await require_damage_refused(subject, make_lora(weights, 1), "a damaged bucket of a LoRA", {"lora": SPEC})
        await require_recovers(subject, "after a damaged bucket of a LoRA")


async def require_damage_refused(
    subject: EndpointSubject,
    sent: ReferenceWeights,
    what: str,
    fields: dict[str, Any],
    base: ReferenceWeights | None = None,
    publisher: SteppedPublisher | None = None,
) -> None:
    """Send an update whose last bucket is damaged; require that it is refused and leaves no trace.

    The update comes from ``publisher`` (default: the subject's). A delta is relative to ``base``.
    """
    publisher = publisher or subject.publisher
    update = await publisher.request(sent, bucket_bytes=sent.size_bytes // 2, **fields)
    last = len(update.buckets) - 1
    for index in range(last):
        await publisher.send_bucket(update, publisher.encoded(update, sent, index, base))
    announced = publisher.encoded(update, sent, last, base)
    damaged = publisher.encoded(update, _with_another_bit(sent), last, base)
    call = publisher.send_bucket(update, replace(damaged, checksum=announced.checksum))
    await subject.require_raises(call, TransferError, what, TRANSFER_TIMEOUT_S + SLACK_S)
    await require_old_weights(subject, f"after {what}")
    commit = subject.endpoint.commit_weight_update(update.ref)
    await subject.require_refused(commit, f"a commit after {what}")


def _with_another_bit(weights: ReferenceWeights) -> ReferenceWeights:
    """Return a copy of the weights in which one element of the last tensor has the opposite sign.

    Every encoding preserves signs.
    """
    name, tensor = list(weights.tensors.items())[-1]
    damaged = tensor.clone().contiguous()
    damaged.view(-1).view(torch.uint8)[damaged.element_size() - 1] ^= 0x80
    return ReferenceWeights(f"{weights.label}, damaged", {**weights.tensors, name: damaged})

"""Level ``sharded``: updates in which each of several senders sends a part of every bucket."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from inflight.conformance.checks import check, look_at, skip
from inflight.conformance.endpoint.aftermath import (
    require_all_whole,
    require_old_weights,
    require_serving,
    wait_until_settled,
)
from inflight.conformance.endpoint.connections import answer_to
from inflight.conformance.endpoint.cutting import cut_tensors, halve_tensors
from inflight.conformance.endpoint.http import require_error_body
from inflight.conformance.endpoint.loras import SPEC, make_lora, merge_lora
from inflight.conformance.endpoint.needs import STORES
from inflight.conformance.endpoint.publishing import SteppedPublisher, specs_of
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.endpoint.waiting import SLACK_S
from inflight.conformance.reference import ReferenceWeights
from inflight.errors import TransferError
from inflight.http import routes
from inflight.types import WeightBucket
from inflight.wire import EndpointState, TransportName, WeightUpdate

LEVEL = "sharded"
_NUM_TOKENS = 200
_LATE_S = 0.3
"""How long to wait for a part that never arrives."""
_ARRIVAL = (
    "whether the endpoint waits for the part of each sender, and compares all parts before a bucket counts as received"
)


@check("U-66", "updates sharded", deadline_s=90)
@look_at("where the boxes of a part lie within a bucket: rows, columns, stripes, whole tensors, and parts without any")
async def several_senders(subject: EndpointSubject) -> None:
    """If several senders each send a part of an update, the weights are the same as if one sender had sent everything.
    This holds for full, partial and LoRA updates, staged or not, under every policy and over every transport."""
    reference, capabilities = subject.reference, subject.capabilities
    turns = [reference.perturbed("B"), reference.weights]
    cases: list[dict[str, Any]] = [{"in_flight": policy} for policy in subject.pausing_policies()]
    if capabilities.staging:
        cases += [{**case, "staged": True} for case in cases]
    publisher = subject.another_publisher(num_senders=3)
    for i, case in enumerate(cases):
        running = await subject.start_running(2, max_tokens=min(_NUM_TOKENS, subject.remaining_tokens()))
        await publisher.publish(turns[i % 2], bucket_bytes=(1, turns[0].size_bytes // 3)[i % 2], **case)
        await subject.require_serves(turns[i % 2], f"after parts of three senders, {_words(case)}")
        await require_all_whole(running, "a request that ran while parts arrived")
    if capabilities.partial_updates:
        await _publish_final_norm(subject, publisher)
    if capabilities.lora:
        await publisher.publish(reference.weights, keep=True)
        lora = make_lora(reference.weights, seed=1)
        await publisher.publish(lora, lora=SPEC)
        await subject.require_serves(merge_lora(reference.weights, lora), "after a LoRA in parts")
    publisher.lose_group()
    halves = halve_tensors(specs_of(turns[0]), swapped=False)  # of the same shape, which can be mistaken for each other
    for i, transport in enumerate((None, *_stores(subject))):
        publisher = subject.another_publisher(transport=transport, num_senders=2)
        await publisher.publish(turns[i % 2], bucket_bytes=turns[0].size_bytes // 3, shardings=halves)
        await subject.require_serves(turns[i % 2], f"after parts of two senders over {transport or 'a process group'}")
        publisher.lose_group()


async def _publish_final_norm(subject: EndpointSubject, publisher: SteppedPublisher) -> None:
    reference = subject.reference
    await publisher.publish(reference.weights)
    doubled = reference.with_final_norm(2.0, "A with its final norm doubled")
    alone = ReferenceWeights("its final norm", {reference.final_norm: doubled.tensors[reference.final_norm]})
    frozen = tuple(name for name in reference.weights.tensors if name != reference.final_norm)
    await publisher.publish(alone, frozen=frozen)
    await subject.require_serves(doubled, "after parts of the final norm, all else frozen")


def _words(case: dict[str, Any]) -> str:
    return ", ".join("staged" if value is True else str(value) for value in case.values())


def _stores(subject: EndpointSubject) -> list[TransportName]:
    return [store for store in STORES if store != "ipc" and subject.missing(store) is None]


@check("U-67", "updates sharded", deadline_s=60)
@look_at("which bytes of its base a part changes as a delta, and when the base is replaced")
async def encoded_parts(subject: EndpointSubject) -> None:
    """Parts may be sent in bfloat16 or as deltas, or some as deltas and others raw: the weights are those that whole
    buckets would give, and deltas that are aborted leave their base unchanged."""
    encodings, publisher = subject.capabilities.encodings, subject.another_publisher(num_senders=2)
    if not {"bfloat16", "delta"} & set(encodings):
        skip("neither bfloat16 nor delta is supported")
    if "bfloat16" in encodings:
        other = subject.reference.perturbed("B")
        halves = {name: tensor.bfloat16().to(tensor.dtype) for name, tensor in other.tensors.items()}
        await publisher.publish(other, encodings=("bfloat16",), bucket_bytes=other.size_bytes // 3)
        await subject.require_serves(ReferenceWeights("B in bfloat16", halves), "after parts in bfloat16")
    if "delta" in encodings:
        await _publish_deltas(subject, publisher)


async def _publish_deltas(subject: EndpointSubject, publisher: SteppedPublisher) -> None:
    weights, other = subject.reference.weights, subject.reference.perturbed("B")
    norm = subject.reference.final_norm
    third = ReferenceWeights("B with its final norm negated", {**other.tensors, norm: -other.tensors[norm]})
    bucket_bytes = weights.size_bytes // 3
    options: dict[str, Any] = {"keep": True, "bucket_bytes": bucket_bytes}
    base = await publisher.request(weights, session_id="base", shardings=(), **options)
    await publisher.complete(base, weights)
    options |= {"encodings": ("delta",)}
    first = await publisher.request(other, base=base.ref, session_id="first", **options)
    await _send_some_raw(publisher, first, other, weights)
    await publisher.commit(first)
    await subject.require_serves(other, "after deltas in parts")
    dropped = await publisher.request(weights, base=first.ref, session_id="dropped", **options)
    await publisher.send_all(dropped, weights, other)
    await publisher.abort(dropped)
    publisher.lose_group()
    await wait_until_settled(subject, "after deltas in parts that were aborted")
    await subject.require_serves(other, "after deltas in parts that were aborted")
    last = await publisher.request(third, base=first.ref, session_id="last", **options)
    await _send_some_raw(publisher, last, third, other)
    await publisher.commit(last)
    await subject.require_serves(third, "after deltas in parts to the base of those that were aborted")


async def _send_some_raw(
    publisher: SteppedPublisher, update: WeightUpdate, weights: ReferenceWeights, base: ReferenceWeights
) -> None:
    """Send two parts of each bucket as deltas, except that the first sender sends bucket 0 raw, and the second one
    bucket 1."""
    for index in range(len(update.buckets)):
        parts = [publisher.part(update, weights, index, i, None if i == index else base) for i in range(2)]
        await publisher.send_parts(update, parts)


@check("U-68", "updates sharded", deadline_s=60, look_at=_ARRIVAL)
async def missing_part(subject: EndpointSubject) -> None:
    """If one of several senders stops before it has sent its part of a bucket, receive_weights raises TransferError
    within its timeout, nothing can be committed, and the old weights stay in service."""
    other = subject.reference.perturbed("B")
    for transport in (None, *_stores(subject)[:1]):
        for silent, num_sent in ((1, 0), (0, 2)):
            publisher = subject.another_publisher(transport=transport, num_senders=2)
            staged = bool(num_sent) and subject.capabilities.staging
            update = await publisher.request(other, bucket_bytes=other.size_bytes // 3, staged=staged)
            for index in range(num_sent):
                await publisher.send(update, other, index)
            when = f"after sender {silent} of 2 had sent {num_sent} of {len(update.buckets)} buckets"
            late = publisher.send_parts(
                update, _parts(publisher, update, other, num_sent), silent=[silent], timeout_s=_LATE_S
            )
            await subject.require_raises(late, TransferError, f"{when}, receiving the next one", _LATE_S + SLACK_S)
            await subject.require_refused(subject.endpoint.commit_weight_update(update.ref), f"{when}, the commit")
            await require_old_weights(subject, when)
            publisher.lose_group()


def _parts(
    publisher: SteppedPublisher, update: WeightUpdate, weights: ReferenceWeights, index: int
) -> list[WeightBucket]:
    return [publisher.part(update, weights, index, sender) for sender in range(len(publisher.senders))]


@check("U-69", "updates sharded", deadline_s=40, look_at=_ARRIVAL)
async def damaged_part(subject: EndpointSubject) -> None:
    """A part whose bytes do not match its checksum, or that another sender sent in its place, raises TransferError, and
    the old weights stay in service."""
    other = subject.reference.perturbed("B")
    halves = halve_tensors(specs_of(other), swapped=False)
    for what, is_exchanged in (("a damaged part", False), ("two parts of the same shape that were exchanged", True)):
        publisher = subject.another_publisher(num_senders=2)
        update = await publisher.request(other, bucket_bytes=1, shardings=halves)
        index = next(i for i, sharding in enumerate(halves) if sharding.senders[0])
        for before in range(index):
            await publisher.send(update, other, before)
        first, second = _parts(publisher, update, other, index)
        sent = [replace(first, tensors=second.tensors), replace(second, tensors=first.tensors)]
        if not is_exchanged:
            sent = [first, replace(second, tensors=tuple(tensor.clone() for tensor in second.tensors))]
            sent[1].tensors[-1].view(-1)[-1] += 1.0
        await subject.require_raises(publisher.send_parts(update, sent), TransferError, what)
        await require_old_weights(subject, f"after {what}")
        publisher.lose_group()


@check("U-70", "updates sharded", deadline_s=40)
@look_at("whether the checksum of a part includes the places to which the endpoint itself assigns it")
async def misplaced_part(subject: EndpointSubject) -> None:
    """A part whose sender assigns it to places other than those announced raises TransferError, even if its shape and
    its bytes are correct, and the old weights stay in service."""
    other = subject.reference.perturbed("B")
    halves, swapped = (halve_tensors(specs_of(other), swapped=swapped) for swapped in (False, True))
    publisher = subject.another_publisher(num_senders=2)
    update = await publisher.request(other, shardings=halves)
    believed = publisher.announcement(other, shardings=swapped)
    what = "parts of senders that exchanged their places"
    call = publisher.send_parts(update, _parts(publisher, believed, other, 0))
    await subject.require_raises(call, TransferError, what)
    await require_old_weights(subject, f"after {what}")


@check("U-71", "url updates sharded")
@look_at("whether each sharding is compared with the shapes of its tensors before anything else")
async def gaps_and_overlaps(subject: EndpointSubject) -> None:
    """An update whose senders together do not send every element of every tensor exactly once is refused before
    anything is paused."""
    weights = subject.reference.weights
    publisher = subject.another_publisher(num_senders=2)
    await publisher.form_group()
    announced = publisher.announcement(weights).model_dump(mode="json")
    ((first,), (second,)) = announced["manifest"]["shardings"][0]["senders"]  # the rows of a tensor, in two parts
    (start, stop), *rest = second
    faults = {
        "a slice sent twice": [[first, [[start, start + 1], *rest]], [second]],
        "a slice sent by nobody": [[first], [[[start + 1, stop], *rest]]],
        "a tensor sent by both": [[first, second], [first, second]],
        "a box outside its tensor": [[first], [[[start, stop + 1], *rest]]],
        "a tensor sent by nobody": [[], []],
    }
    for what, senders in faults.items():
        announced["manifest"]["shardings"][0] = {"senders": senders}
        body = json.dumps(announced).encode()
        answer = await answer_to(subject, "POST", routes.REQUEST_WEIGHT_UPDATE.path, body, subject.opened.token)
        require_error_body(answer, tuple(range(400, 500)), f"an update with {what}")
        await subject.require_state(EndpointState.READY, f"after an update with {what} was refused")
    await subject.require_serves(weights, "after the refusals")


@check("U-72", "updates sharded", deadline_s=40)
@look_at("whether the number of senders is compared for the group, the update and every bucket")
async def number_of_parts(subject: EndpointSubject) -> None:
    """A bucket that is offered in more or fewer parts than the update has senders is refused and does not end the
    update, and an update whose number of senders differs from its group's is refused when it is requested."""
    other = subject.reference.perturbed("B")
    publisher = subject.another_publisher(num_senders=2)
    await publisher.form_group()
    for num in (3, 4):
        wrong = publisher.announcement(other, shardings=cut_tensors(specs_of(other), num))
        what = f"an update of {num} senders over a group of two"
        await subject.require_refused(subject.endpoint.request_weight_update(wrong), what)
        await subject.require_state(EndpointState.READY, f"after {what} was refused")
    update = await publisher.request(other)
    parts = _parts(publisher, update, other, 0)
    for offered in (parts[:1], [*parts, parts[0]]):
        call = publisher.send_parts(update, offered, silent=range(3))
        await subject.require_refused(call, f"a bucket in {len(offered) if len(offered) > 1 else 0} parts")
    await publisher.send_parts(update, parts)
    for number in range(1, len(update.buckets)):
        await publisher.send_parts(update, _parts(publisher, update, other, number))
    await publisher.commit(update)
    await subject.require_serves(other, "after the right number of parts")


@check("U-73", "updates sharded", deadline_s=60)
@look_at("whether the session is compared for every sender, or only for the first")
async def older_session(subject: EndpointSubject) -> None:
    """A part that a sender stored for an earlier session is not taken for one of the open session: receive_weights
    raises TransferError within its timeout, and the old weights stay in service."""
    if not (stores := _stores(subject)):
        skip("no transport that stores parts is offered")
    weights, other = subject.reference.weights, subject.reference.perturbed("B")
    for store in stores:
        publisher = subject.another_publisher(transport=store, num_senders=2)
        publisher.version = (await subject.endpoint.weight_version()).version
        first = await publisher.request(weights, session_id="first")
        await publisher.send_all(first, weights)
        answer = await subject.endpoint.commit_weight_update(first.ref)  # the senders are not notified of the commit
        subject.publisher.version = publisher.version = first.version
        require_serving(answer, first.version, "the commit of the first session")
        second = publisher.announcement(other, session_id="second")
        publisher.begin_on(second, 0)
        await subject.endpoint.request_weight_update(second)
        parts = [publisher.part(second, other, 0, 0), publisher.part(first, weights, 0, 1)]
        call = publisher.send_parts(second, parts, silent=[1], timeout_s=_LATE_S)
        what = f"a part of an earlier session over {store}"
        await subject.require_raises(call, TransferError, what, _LATE_S + SLACK_S)
        await require_old_weights(subject, f"after {what}")
        publisher.lose_group()

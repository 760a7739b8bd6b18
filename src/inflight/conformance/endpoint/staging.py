"""Level ``control``: staged updates, during which sampling continues until the commit."""

from __future__ import annotations

import math

from inflight.conformance.checks import check, look_at, require
from inflight.conformance.endpoint.aftermath import (
    require_all_whole,
    require_old_weights,
    require_serving,
    require_undisturbed,
)
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.endpoint.waiting import SERVED_S, SLACK_S, within
from inflight.wire import Completion, EndpointState, GenerateRequest, InFlightPolicy

LEVEL = "control"
_NUM_TOKENS = 300
"""Initial number of tokens of each running request: the request must still be running when the commit arrives."""
_NUM_TOKENS_UNDISTURBED = 100
_LEASE_S = 1.2
_UNIFORM_TOLERANCE = 1e-3
"""Tolerance of a logprob if all logits are zero. Every dtype represents zero exactly, so only the softmax rounds."""


@check("E-45", "updates spans staging", deadline_s=60)
@look_at("whether buckets are received separately from the model and off the sampling thread, and what calls the pause")
async def sampling_continues(subject: EndpointSubject) -> None:
    """While a staged update arrives, the state is staging and sampling continues from the old weights; only the commit
    pauses sampling, and spans record where the weights changed."""
    policy = subject.pausing_policies()[0]
    for num_tokens in subject.lengths(_NUM_TOKENS):
        if num_both := await _stage_and_commit(subject, policy, num_tokens):
            break
        await subject.publisher.publish(subject.reference.weights)
    subject.note(**{"running requests with tokens of both versions": num_both})
    require(num_both, f"no request, of up to {num_tokens} tokens, was still running when the commit arrived")
    if InFlightPolicy.ABORT in subject.capabilities.in_flight_policies:
        await _stage_and_abort_requests(subject)


async def _stage_and_abort_requests(subject: EndpointSubject) -> None:
    """Require that a staged update under abort ends running requests at its commit, and not before."""
    publisher, weights = subject.publisher, subject.reference.weights
    running = await subject.start_running(_num_leaving_one_slot(subject))
    update = await publisher.request(weights, staged=True, in_flight=InFlightPolicy.ABORT)
    await publisher.send_all(update, weights)
    await require_undisturbed(running, "before a staged update under abort was committed, a request")
    left = [task for _, task in running if not task.done()]
    subject.note(**{"running when a staged update under abort was committed": len(left)})
    await publisher.commit(update)
    for task in left:
        response = await within(SLACK_S, task, "a request that ran when a staged update under abort was committed")
        reason = response.completions[0].finish_reason
        words = f"a request that ran when a staged update under abort was committed ended with {reason!r}"
        require(reason == "abort", words)


async def _stage_and_commit(subject: EndpointSubject, policy: InFlightPolicy, num_tokens: int) -> int:
    """Zero the endpoint's final norm by an update while requests run; return how many have tokens of both versions."""
    zeros = subject.reference.with_final_norm(0.0, "A with its final norm zeroed")
    publisher = subject.publisher
    before = publisher.version
    await publisher.form_group()
    running = await subject.start_running(_num_leaving_one_slot(subject), max_tokens=num_tokens)
    update = await publisher.request(zeros, staged=True, in_flight=policy, bucket_bytes=zeros.size_bytes // 3)
    meanwhile: list[tuple[GenerateRequest, Completion]] = []
    for num_arrived in range(len(update.buckets) + 1):
        if num_arrived:
            await publisher.send(update, zeros, num_arrived - 1)
        when = f"while a staged update is open and {num_arrived} of {len(update.buckets)} buckets have arrived"
        found = await subject.endpoint.weight_version()
        require(
            (found.state, found.version, found.updating_to) == (EndpointState.STAGING, before, update.version),
            f"{when}, the state is {found.state} at version {found.version}, updating to {found.updating_to}; it "
            f"should be staging at {before}, updating to {update.version}",
        )
        if subject.capabilities.max_concurrent_sequences > len(running):
            meanwhile.append(await within(SERVED_S, subject.ask(max_tokens=4), f"{when}, a request"))
    answer = await publisher.commit(update)
    require_serving(answer, update.version, "the commit")
    require(answer.run_id == update.run_id, f"the commit of run {update.run_id!r} returned run {answer.run_id!r}")
    late = await subject.ask()
    whole = await require_all_whole(running, "a request that ran while an update was staged and committed")
    for asked in meanwhile:
        _require_two_weights(subject, *asked, {before: 1.0}, "a request that arrived while an update was staged")
    _require_two_weights(subject, *late, {update.version: 0.0}, "a request that arrived after the commit")
    factors = {before: 1.0, update.version: 0.0}
    num_both = 0
    for (request, _), completion in zip(running, whole, strict=True):
        _require_two_weights(subject, request, completion, factors, "a request that ran through the update")
        num_both += len(completion.version_spans) > 1
    return num_both


def _require_two_weights(
    subject: EndpointSubject, request: GenerateRequest, completion: Completion, factors: dict[int, float], what: str
) -> None:
    """Require that spans contain only the versions in ``factors``, and that each token has its version's logprob.

    That is the logprob under the old weights if the version's factor is 1, and -ln V if it is 0.
    """
    versions = [span.version for span in completion.version_spans for _ in range(span.start, span.end)]
    require(set(versions) <= set(factors), f"spans of {what} name versions {sorted(set(versions))}")
    old, prompt = subject.reference.weights, request.prompt_token_ids
    expected = subject.reference.logprobs(old, prompt, completion.token_ids, request.sampling).tolist()
    uniform = -math.log(subject.capabilities.vocab_size)
    for index, version in enumerate(versions):
        is_old = factors[version] == 1.0
        wanted, tolerance = (expected[index], subject.tolerance) if is_old else (uniform, _UNIFORM_TOLERANCE)
        found = completion.logprobs[index]
        require(
            abs(found - wanted) <= tolerance,
            f"token {index} of {what} is labelled version {version}: its logprob is {found:.4f}, but under that "
            f"version it is {wanted:.4f} (the old weights give {expected[index]:.4f}, -ln V is {uniform:.4f})",
        )


@check("E-46", "updates staging", deadline_s=60)
@look_at("what the end of an update undoes: a pause that never happened, requests, tensors that arrived")
async def abandoned_update(subject: EndpointSubject) -> None:
    """A staged update that is aborted, or whose lease expires, disturbs no running request, and the old weights stay in
    service."""
    policy, publisher = subject.pausing_policies()[0], subject.publisher
    other = subject.reference.perturbed("B")
    for ending in ("an abort", "the end of its lease"):
        await publisher.form_group()
        running = await subject.start_running(_num_leaving_one_slot(subject), max_tokens=_NUM_TOKENS_UNDISTURBED)
        lease_s = 20.0 if ending == "an abort" else _LEASE_S
        options = {"staged": True, "in_flight": policy, "lease_s": lease_s}
        update = await publisher.request(other, bucket_bytes=other.size_bytes // 2, **options)
        await publisher.send(update, other, 0)
        if ending == "an abort":
            await publisher.abort(update)
        when = f"after a staged update ended by {ending}"
        await require_old_weights(subject, when, seconds=lease_s + SLACK_S)
        what = f"a request that ran while a staged update ended by {ending}"
        for (request, _), completion in zip(running, await require_all_whole(running, what), strict=True):
            versions = {span.version for span in completion.version_spans}
            require(versions == {publisher.version}, f"spans of {what} name versions {sorted(versions)}")
            subject.require_sampled_from(subject.reference.weights, request, completion, what)
        await subject.require_refused(publisher.commit(update), f"a commit {when}")
        publisher.lose_group()
    await publisher.publish(other, staged=True, in_flight=policy)
    await subject.require_serves(other, "after a staged update that was committed")


def _num_leaving_one_slot(subject: EndpointSubject) -> int:
    return max(1, min(2, subject.capabilities.max_concurrent_sequences - 1))

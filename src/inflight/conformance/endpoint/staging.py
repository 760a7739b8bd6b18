"""Level control, updates that are staged: sampling goes on while they arrive, and is held by the commit only."""

from __future__ import annotations

import math

from inflight.conformance.checks import check, require
from inflight.conformance.endpoint.aftermath import SLACK_S, require_old_weights, settled, within
from inflight.conformance.endpoint.holds import SERVED_S, require_all_whole
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.wire import Completion, EndpointState, GenerateRequest, InFlightPolicy, WeightUpdate

LEVEL = "control"
_NUM_TOKENS = 300
"""Of each running request at first: it has to be there still when the commit comes."""
_NUM_TOKENS_UNDISTURBED = 100
_LEASE_S = 1.2
_UNIFORM_TOLERANCE = 1e-3
"""Of a logprob where all logits are zero, which every dtype computes with: what is left is the softmax's rounding."""


@check(
    "E-45",
    needs=("updates", "spans", "staging"),
    deadline_s=60,
    look_at="whether buckets arrive beside the model and off the sampling thread, and who calls the hold",
)
async def sampling_goes_on(subject: EndpointSubject) -> None:
    """While a staged update arrives the state is staging and sampling goes on from the old weights; only the commit
    holds, and spans say where it was."""
    policy = subject.pausing_policies()[0]
    for num_tokens in subject.lengths(_NUM_TOKENS):
        if num_both := await _stage_and_commit(subject, policy, num_tokens):
            break
        await subject.publisher.publish(subject.reference.weights)
    subject.note(**{"running requests with tokens of both versions": num_both})
    require(num_both, f"no request, of up to {num_tokens} tokens, was still there when the commit came")


async def _stage_and_commit(subject: EndpointSubject, policy: InFlightPolicy, num_tokens: int) -> int:
    """Bring the endpoint to zeros while requests run; return how many of them have tokens of both versions."""
    zeros = subject.reference.with_final_norm(0.0, "A with its final norm zeroed")
    publisher = subject.publisher
    before = publisher.version
    await publisher.form_group()
    running = await subject.start_running(_num_beside_another(subject), max_tokens=num_tokens)
    update = await publisher.request(zeros, staged=True, in_flight=policy, bucket_bytes=zeros.size_bytes // 3)
    meanwhile: list[tuple[GenerateRequest, Completion]] = []
    for num_arrived in range(len(update.buckets) + 1):
        if num_arrived:
            await publisher.send(update, zeros, num_arrived - 1)
        when = f"while a staged update is open and {num_arrived} of {len(update.buckets)} buckets have arrived"
        await _require_staging(subject, update, when)
        request = subject.request(max_tokens=4)
        response = await within(SERVED_S, subject.endpoint.generate(request), f"{when}, a request")
        meanwhile.append((request, response.completions[0]))
    answer = await publisher.commit(update)
    require(
        (answer.state, answer.version, answer.run_id) == (EndpointState.READY, update.version, update.run_id),
        f"the commit answered {answer.state} at version {answer.version} of run {answer.run_id!r}",
    )
    late = subject.request()
    after = (await subject.endpoint.generate(late)).completions[0]
    whole = await require_all_whole(running, "a request that ran while an update was staged and committed")
    for request, completion in meanwhile:
        what = "a request that came while an update was staged"
        _require_two_weights(subject, request, completion, {before: 1.0}, what)
    _require_two_weights(subject, late, after, {update.version: 0.0}, "a request that came after the commit")
    factors = {before: 1.0, update.version: 0.0}
    num_both = 0
    for (request, _), completion in zip(running, whole, strict=True):
        _require_two_weights(subject, request, completion, factors, "a request that ran through the update")
        num_both += len(completion.version_spans) > 1
    return num_both


def _require_two_weights(
    subject: EndpointSubject, request: GenerateRequest, completion: Completion, factors: dict[int, float], what: str
) -> None:
    """Require that spans name these versions only, and tokens have their logprobs: of the old weights, or -ln V."""
    versions = [span.version for span in completion.version_spans for _ in range(span.start, span.end)]
    require(set(versions) <= set(factors), f"spans of {what} name versions {sorted(set(versions))}")
    expected = subject.reference.logprobs(
        subject.reference.weights, request.prompt_token_ids, completion.token_ids, request.sampling
    ).tolist()
    uniform = -math.log(subject.capabilities.vocab_size)
    for index, version in enumerate(versions):
        is_old = factors[version] == 1.0
        wanted, tolerance = (expected[index], subject.tolerance) if is_old else (uniform, _UNIFORM_TOLERANCE)
        found = completion.logprobs[index]
        require(
            abs(found - wanted) <= tolerance,
            f"token {index} of {what} is said to be of version {version}: its logprob is {found:.4f}, under that "
            f"version it is {wanted:.4f} (the old weights give {expected[index]:.4f}, -ln V is {uniform:.4f})",
        )


@check(
    "E-46",
    needs=("updates", "staging"),
    deadline_s=60,
    look_at="what the end of an update undoes: a hold that there was not, requests, tensors that arrived",
)
async def given_up(subject: EndpointSubject) -> None:
    """A staged update that is aborted, or whose lease ends, disturbs no running request, and the old weights serve
    on."""
    policy, publisher = subject.pausing_policies()[0], subject.publisher
    other = subject.reference.perturbed("B")
    update: WeightUpdate | None = None
    for ending in ("an abort", "the end of its lease"):
        await publisher.form_group()
        running = await subject.start_running(_num_beside_another(subject), max_tokens=_NUM_TOKENS_UNDISTURBED)
        lease_s = 20.0 if ending == "an abort" else _LEASE_S
        update = await publisher.request(
            other, staged=True, in_flight=policy, lease_s=lease_s, bucket_bytes=other.size_bytes // 2
        )
        await publisher.send(update, other, 0)
        if ending == "an abort":
            await publisher.abort(update)
        when = f"after a staged update ended by {ending}"
        await settled(subject, when, lease_s + SLACK_S)
        await require_old_weights(subject, when)
        what = f"a request that ran while a staged update ended by {ending}"
        for (request, _), completion in zip(running, await require_all_whole(running, what), strict=True):
            versions = {span.version for span in completion.version_spans}
            require(versions == {publisher.version}, f"spans of {what} name versions {sorted(versions)}")
            subject.require_sampled_from(subject.reference.weights, request, completion, what)
        await subject.require_refused(publisher.commit(update), f"a commit {when}")
        publisher.lose_group()
    await publisher.publish(other, staged=True, in_flight=policy)
    await subject.require_serves(other, "after a staged update that was committed")


async def _require_staging(subject: EndpointSubject, update: WeightUpdate, when: str) -> None:
    found = await subject.endpoint.weight_version()
    require(
        (found.state, found.version, found.updating_to)
        == (EndpointState.STAGING, subject.publisher.version, update.version),
        f"{when}, the state is {found.state} at version {found.version}, updating to {found.updating_to}; it should "
        f"be staging at {subject.publisher.version}, updating to {update.version}",
    )


def _num_beside_another(subject: EndpointSubject) -> int:
    return max(1, min(2, subject.capabilities.max_concurrent_sequences - 1))

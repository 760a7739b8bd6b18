"""Level ``weights``: updates of a mixture of experts, whose matrices many implementations merge into larger ones."""

from __future__ import annotations

import re
from itertools import product

from inflight.conformance.checks import check, look_at, require, skip
from inflight.conformance.endpoint.aftermath import wait_until_settled
from inflight.conformance.endpoint.routing import start_mixture
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.reference import ReferenceCheckpoint, ReferenceWeights
from inflight.contracts import InferenceEndpoint
from inflight.wire import Capabilities, EndpointState

LEVEL = "weights"
_NUM_TOKENS = 24
_EVEN_EXPERT = re.compile(r"\.experts\.\d*[02468]\.")
"""Matches the names of the matrices of every other expert."""


@check("U-76", "fresh updates", deadline_s=90)
@look_at("matrices of experts that are assembled in the memory of the served ones, or that keep a part of the old ones")
async def experts_change_with_the_commit(subject: EndpointSubject) -> None:
    """In a mixture of experts, an update changes nothing before its commit, whether or not it is staged, and an aborted
    one changes nothing at all. After the commit, logprobs are those of the new weights. The same applies to an update
    of only some experts."""
    if subject.is_coarse:
        skip("it computes in 16 bits, whose rounding changes which experts the routers choose")
    path, endpoint, can = await start_mixture(subject)
    reference = ReferenceCheckpoint(path)
    reference.cast(can.dtype)
    publisher, served = subject.publisher_to(endpoint, can), reference.weights
    gaps: dict[str, float] = {}
    cases = product((False, True) if can.staging else (False,), (True, False))
    for number, (staged, is_aborted) in enumerate(cases):
        kind = "a staged update" if staged else "an update"
        new = reference.perturbed(f"weights of {kind}", seed=10 + number)
        options = {"staged": staged, "session_id": f"session-{number}", "bucket_bytes": new.size_bytes // 3}
        update = await publisher.request(new, **options)
        await publisher.send_all(update, new)
        if staged:
            when = f"before {kind} is {'aborted' if is_aborted else 'committed'}"
            gaps[when] = await _gap(subject, endpoint, reference, served, when)
        when = f"after {kind} that was aborted" if is_aborted else f"after {kind}"
        if is_aborted:
            await publisher.abort(update)
            publisher.lose_group()
            if (await wait_until_settled(subject, when, endpoint=endpoint)).state is EndpointState.POISONED:
                continue
        else:
            await publisher.commit(update)
            served = new
        gaps[when] = await _gap(subject, endpoint, reference, served, when)
    if can.partial_updates:
        await _update_some_experts(subject, endpoint, can, reference, served, gaps)
    subject.note(largest_differences=gaps)


async def _update_some_experts(
    subject: EndpointSubject,
    endpoint: InferenceEndpoint,
    can: Capabilities,
    reference: ReferenceCheckpoint,
    served: ReferenceWeights,
    gaps: dict[str, float],
) -> None:
    """Require that an update of every other expert changes nothing before its commit or if it is aborted, and
    only those experts after its commit; add the differences to ``gaps``."""
    publisher = subject.publisher_to(endpoint, can)
    await publisher.publish(served, keep=True)  # an engine may need what the update leaves out
    new = reference.perturbed("B", seed=20).tensors
    sent = {name: tensor for name, tensor in new.items() if _EVEN_EXPERT.search(name)}
    frozen = tuple(name for name in new if name not in sent)
    part, changed = ReferenceWeights("even experts", sent), ReferenceWeights("A and B", {**served.tensors, **sent})
    what = "an update of some experts"
    for number, is_aborted in enumerate((True, False)):
        options = {"staged": can.staging, "session_id": f"part-{number}", "frozen": frozen}
        update = await publisher.request(part, **options)
        await publisher.send_all(update, part)
        if can.staging:
            when = f"before {what} is {'aborted' if is_aborted else 'committed'}"
            gaps[when] = await _gap(subject, endpoint, reference, served, when)
        if is_aborted:
            await publisher.abort(update)
            publisher.lose_group()
            when = f"after {what} was aborted"
            if (await wait_until_settled(subject, when, endpoint=endpoint)).state is EndpointState.POISONED:
                return
            gaps[when] = await _gap(subject, endpoint, reference, served, when)
        else:
            await publisher.commit(update)
            gaps[f"after {what}"] = await _gap(subject, endpoint, reference, changed, f"after {what}")


async def _gap(
    subject: EndpointSubject,
    endpoint: InferenceEndpoint,
    reference: ReferenceCheckpoint,
    weights: ReferenceWeights,
    when: str,
) -> float:
    """Return the largest difference between logprobs and those of ``weights``; fail if it exceeds the tolerance."""
    prompt = [token % reference.vocab_size for token in subject.prompt()]
    request = subject.request(prompt, max_tokens=_NUM_TOKENS)
    completion = (await endpoint.generate(request)).completions[0]
    gap = subject.gap(weights, request, completion, reference)
    require(gap <= subject.tolerance, f"{when}, logprobs of a mixture of experts differ by up to {gap:.3g} nats")
    return gap

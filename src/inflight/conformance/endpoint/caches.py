"""Level caches: which weights computed the keys and values that tokens attend to after an update."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from inflight.conformance.checks import check, require
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.reference import Weights, chosen, distribution
from inflight.wire import Completion, GenerateRequest, InFlightPolicy

LEVEL = "caches"
_PREFIX_LENGTH = 64
_NUM_TOKENS = 400
_LONG_LENGTH = 1100
"""Of a prompt that fills several pages of any size that engines have: 16 to 1024 tokens."""
_GROUP = 4


@check(
    "U-30",
    needs=("updates",),
    deadline_s=40,
    look_at="whether cached prefixes are dropped, or keyed by version, when weights change, under every policy",
)
async def prefix(subject: EndpointSubject) -> None:
    """A request that comes after an update sees nothing of older weights, whatever prefix was cached under them."""
    reference = subject.reference
    prompt = subject.prompt(min(_PREFIX_LENGTH, subject.capabilities.max_model_len // 2))
    turns = [reference.perturbed("B"), reference.weights]
    for i, policy in enumerate((*subject.capabilities.in_flight_policies, subject.capabilities.in_flight_policies[0])):
        before, after = turns[(i + 1) % 2], turns[i % 2]
        await subject.require_serves(before, f"before update {i + 1}", prompt)
        await subject.publisher.publish(after, in_flight=policy)
        request = subject.request(prompt, max_tokens=4)
        completion = (await subject.endpoint.generate(request)).completions[0]
        ids = [*prompt, *completion.token_ids]
        fresh = distribution(reference.logits(after, prompt, completion.token_ids), request.sampling)
        leaked_TV = reference.mixed_logits([(before, len(prompt) - 1), (after, len(ids) - 1)], ids, len(prompt) - 1)
        gap = subject.difference(completion.logprobs, chosen(fresh, completion.token_ids))
        gap_leaked = subject.difference(completion.logprobs, chosen(distribution(leaked_TV), completion.token_ids))
        subject.note(**{f"difference from a fresh start, {policy}": gap, f"from a stale prefix, {policy}": gap_leaked})
        require(
            gap <= subject.tolerance,
            f"after an update under {policy}, a prompt seen before gets logprobs that differ by up to {gap:.3g} from a "
            f"fresh start under the new weights; from those with keys and values of the old ones by {gap_leaked:.3g}",
        )


@check(
    "U-33",
    needs=("updates",),
    deadline_s=40,
    look_at="pages that are larger than the prompts you tested with, and hashes of prefixes that lack the version",
)
async def long_prefix(subject: EndpointSubject) -> None:
    """The same holds of a prompt of a thousand tokens, so that cached pages of any size are dropped."""
    prompt = _long_prompt(subject)
    turns = [subject.reference.perturbed("B"), subject.reference.weights]
    for i, policy in enumerate((*subject.capabilities.in_flight_policies, subject.capabilities.in_flight_policies[0])):
        before, after = turns[(i + 1) % 2], turns[i % 2]
        await subject.require_serves(before, f"before update {i + 1}", prompt)
        await subject.publisher.publish(after, in_flight=policy)
        await _require_fresh(
            subject, prompt, after, f"after an update under {policy}, a prompt of {len(prompt)} tokens"
        )


@check(
    "U-34",
    needs=("updates",),
    deadline_s=60,
    look_at="whether blocks that are in use are dropped from the prefix cache too, not only free ones",
)
async def held_prefix(subject: EndpointSubject) -> None:
    """The same holds while requests that began before the update still run with this prompt: what they keep is theirs
    alone, also under keep."""
    prompt = _long_prompt(subject)
    turns = [subject.reference.perturbed("B"), subject.reference.weights]
    for i, policy in enumerate(subject.pausing_policies()):
        running = await subject.start_running(_GROUP, prompts=[prompt] * _GROUP)
        await subject.publisher.publish(turns[i], in_flight=policy)
        what = f"after an update under {policy}, the prompt of {len(running)} requests that still run"
        await _require_fresh(subject, prompt, turns[i], what, n=_GROUP)
        num_running = sum(not task.done() for _, task in running)
        subject.note(**{f"still running when their prompt came again, {policy}": num_running})
        require(num_running, "the requests that held the prompt had ended before it came again: nothing could be told")
        for _, task in running:
            task.cancel()
        await asyncio.gather(*(task for _, task in running), return_exceptions=True)


async def _require_fresh(
    subject: EndpointSubject, prompt: Sequence[int], weights: Weights, what: str, *, n: int = 1
) -> None:
    """Require that a prompt gets the logprobs of a fresh start under these weights."""
    request = subject.request(prompt, n=n, max_tokens=4)
    gap = 0.0
    for completion in (await subject.endpoint.generate(request)).completions:
        expected = subject.reference.logprobs(weights, prompt, completion.token_ids, request.sampling)
        gap = max(gap, subject.difference(completion.logprobs, expected))
    subject.note(**{f"{what}: difference from a fresh start": gap})
    require(
        gap <= subject.tolerance,
        f"{what} gets logprobs that differ by up to {gap:.3g} from a fresh start under the new weights",
    )


def _long_prompt(subject: EndpointSubject) -> tuple[int, ...]:
    return subject.prompt(min(_LONG_LENGTH, subject.capabilities.max_model_len * 5 // 8), seed=3)


@check(
    "U-31",
    needs=("updates", "recompute", "spans"),
    deadline_s=40,
    look_at="whether the keys and values of running requests are dropped before sampling goes on",
)
async def recomputed(subject: EndpointSubject) -> None:
    """Under recompute, running requests go on with keys and values computed again under the new weights."""
    gaps = await _swap(subject, InFlightPolicy.RECOMPUTE)
    require(
        gaps["recomputed"] <= subject.tolerance,
        f"after the swap, logprobs differ by up to {gaps['recomputed']:.3g} from those with keys and values computed "
        f"again, and by {gaps['kept']:.3g} from those with the old ones kept",
    )


@check(
    "U-32",
    needs=("updates", "keep", "spans"),
    deadline_s=40,
    look_at="whether something clears or preempts the cache during the hold, as a flush between updates does",
)
async def kept(subject: EndpointSubject) -> None:
    """Under keep, running requests go on with the keys and values that older weights computed."""
    gaps = await _swap(subject, InFlightPolicy.KEEP)
    require(
        gaps["kept"] <= subject.tolerance,
        f"after the swap, logprobs differ by up to {gaps['kept']:.3g} from those with the old keys and values kept, "
        f"and by {gaps['recomputed']:.3g} from those with all of them computed again",
    )


async def _swap(subject: EndpointSubject, policy: InFlightPolicy) -> dict[str, float]:
    """Swap A for B under running requests; return the largest difference of later logprobs from both expectations."""
    reference = subject.reference
    other = reference.perturbed("B")
    for num_tokens in subject.lengths(_NUM_TOKENS):
        running = await subject.start_running(2, max_tokens=num_tokens)
        old = subject.publisher.version
        await subject.publisher.publish(other, in_flight=policy)
        answers = [(request, (await task).completions[0]) for request, task in running]
        if all(completion.version_spans[-1].version == old + 1 for _, completion in answers):
            break
        await subject.publisher.publish(reference.weights)  # too fast, or too few tokens: once more, with longer ones
    gaps = {"kept": 0.0, "recomputed": 0.0}
    num_after = 0
    for request, completion in answers:
        require(
            [span.version for span in completion.version_spans] == [old, old + 1],
            f"the update did not fall into the request: spans {completion.version_spans}",
        )
        start = completion.version_spans[1].start
        num_after += num_tokens - start
        for name, logits_TV in _expectations(subject, request, completion, other):
            expected_T = chosen(distribution(logits_TV, request.sampling), completion.token_ids)
            gap = subject.difference(completion.logprobs[start:], expected_T[start:])
            gaps[name] = max(gaps[name], gap)
    subject.note(**{f"largest difference if {name}": gap for name, gap in gaps.items()}, tokens=num_after)
    return gaps


def _expectations(
    subject: EndpointSubject, request: GenerateRequest, completion: Completion, other: Weights
) -> list[tuple[str, torch.Tensor]]:
    reference, prompt = subject.reference, request.prompt_token_ids
    old, new = (span.version for span in completion.version_spans)
    versions = {old: reference.weights, new: other}
    return [
        ("kept", reference.kept_logits(versions, completion.version_spans, prompt, completion.token_ids)),
        ("recomputed", reference.logits(other, prompt, completion.token_ids)),
    ]

"""Level caches, several clients of one server: what one of them knows of it, another one changes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import torch

from inflight.conformance.checks import check, require
from inflight.conformance.endpoint.aftermath import within
from inflight.conformance.endpoint.subject import EndpointSubject, cancelled_at_the_end
from inflight.conformance.reference import Weights, chosen, distribution
from inflight.contracts import InferenceEndpoint
from inflight.wire import Completion, GenerateRequest, InFlightPolicy

LEVEL = "caches"
_PREFIX_LENGTH = 330
"""Engines cache prefixes by pages of up to 256 tokens."""
_NUM_UPDATES = 3
_NUM_RUNNING = 3
_NUM_TOKENS = 300
"""Of each request that runs while weights change."""
_ENDS_S = 20.0

_Answers = list[tuple[GenerateRequest, Completion]]


@check(
    "U-26",
    needs=("updates",),
    deadline_s=60,
    look_at="whether a client keys cached prefixes by a version that it remembers; ask the engine, compare with its "
    "answer",
)
async def others_updates(subject: EndpointSubject) -> None:
    """A request sees nothing of older weights in a prefix that it shares with others, whichever client published and
    whatever runs behind that prefix."""
    policies = subject.pausing_policies()
    sampler = await subject.another_client()
    serves = subject.reference.weights
    for policy in policies:
        serves = await _publish_while_sampling(subject, sampler, policy, serves)


async def _publish_while_sampling(
    subject: EndpointSubject, sampler: InferenceEndpoint, policy: InFlightPolicy, before: Weights
) -> Weights:
    """Publish some versions under ``policy``, sampling behind one prefix all the while; return the last weights."""
    publisher, answers, over = subject.publisher, _Answers(), asyncio.Event()
    prefix = subject.prompt(min(_PREFIX_LENGTH, subject.capabilities.max_model_len // 2), seed=7)
    published = {publisher.version: before}
    clients = (sampler, *([sampler, subject.endpoint] * _NUM_RUNNING))
    num_running = min(_NUM_RUNNING, subject.capabilities.max_concurrent_sequences - 1)
    await sampler.generate(subject.request((*prefix, 0), max_tokens=1))
    running = [
        asyncio.ensure_future(_sample_on(subject, clients[i], (*prefix, i), answers, over)) for i in range(num_running)
    ]
    await subject.enter(cancelled_at_the_end(running))
    for i in range(_NUM_UPDATES):
        await _until_sampling(subject, running)
        after = subject.reference.perturbed(f"{policy} {i}", seed=10 + len(published) + publisher.version)
        await publisher.publish(after, in_flight=policy)
        published[publisher.version] = after
        for name, client in (("another client", sampler), ("the publisher's own client", subject.endpoint)):
            request = subject.request((*prefix, 10 * i + 10), max_tokens=4)
            completion = (await client.generate(request)).completions[0]
            _require_fresh(subject, before, after, request, completion, f"{name}, update {i + 1} under {policy}")
        before = after
    over.set()
    await within(_ENDS_S, asyncio.gather(*running), f"the requests that ran during updates under {policy}")
    if subject.capabilities.version_binding == "spans":
        _require_as_the_policy_says(subject, published, answers, policy)
    return before


async def _sample_on(
    subject: EndpointSubject, client: InferenceEndpoint, prompt: tuple[int, ...], answers: _Answers, over: asyncio.Event
) -> None:
    """Ask for one long completion after another until it is over."""
    room = subject.capabilities.max_model_len - len(prompt)
    while not over.is_set():
        request = subject.request(prompt, max_tokens=min(_NUM_TOKENS, room))
        answers.append((request, (await client.generate(request)).completions[0]))


async def _until_sampling(subject: EndpointSubject, running: list[asyncio.Task[None]]) -> None:
    """Wait until requests are being decoded."""

    async def poll() -> None:
        while running and (await subject.endpoint.weight_version()).num_running == 0:
            for task in running:
                if task.done():
                    task.result()
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.05)  # some tokens, so that the update falls into completions

    await within(_ENDS_S, poll(), "a request to be decoded")


def _require_fresh(
    subject: EndpointSubject,
    before: Weights,
    after: Weights,
    request: GenerateRequest,
    completion: Completion,
    where: str,
) -> None:
    """Require that nothing of older weights is in what was sampled behind the shared prefix."""
    reference, prompt = subject.reference, request.prompt_token_ids
    ids = [*prompt, *completion.token_ids]
    fresh_TV = reference.logits(after, prompt, completion.token_ids)
    stale_TV = reference.mixed_logits([(before, len(prompt) - 1), (after, len(ids) - 1)], ids, len(prompt) - 1)
    gap, gap_stale = (
        subject.difference(completion.logprobs, chosen(distribution(logits_TV, request.sampling), completion.token_ids))
        for logits_TV in (fresh_TV, stale_TV)
    )
    subject.note(**{f"difference from a fresh start, {where}": gap, f"from the prefix of before, {where}": gap_stale})
    require(
        gap <= subject.tolerance,
        f"{where}: a prompt whose first {len(prompt) - 1} tokens were seen before gets logprobs that differ by up to "
        f"{gap:.3g} from a fresh start under the new weights; from those with keys and values of the weights just "
        f"before by {gap_stale:.3g}",
    )


def _require_as_the_policy_says(
    subject: EndpointSubject, published: Mapping[int, Weights], answers: _Answers, policy: InFlightPolicy
) -> None:
    """Require of every completion that the keys and values behind each token are those that the policy says."""
    reference, largest, num_updated = subject.reference, 0.0, 0
    for request, completion in answers:
        prompt, spans, ids = request.prompt_token_ids, completion.version_spans, completion.token_ids
        num_updated += len(spans) > 1
        if policy is InFlightPolicy.KEEP:
            logits_TV = reference.kept_logits(published, spans, prompt, ids)
        else:
            parts = [reference.logits(published[s.version], prompt, ids)[s.start : s.end] for s in spans]
            logits_TV = torch.cat(parts)
        gap = subject.difference(completion.logprobs, chosen(distribution(logits_TV, request.sampling), ids))
        largest = max(largest, gap)
        require(
            gap <= subject.tolerance,
            f"a request that ran while another client published has logprobs that differ by up to {gap:.3g} from what "
            f"{policy} says for its spans {spans}",
        )
    subject.note(**{f"largest difference of {len(answers)} requests that ran, {policy}": largest})
    require(num_updated > 0, f"no update under {policy} fell into a request")

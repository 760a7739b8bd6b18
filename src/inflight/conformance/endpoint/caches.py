"""Level ``caches``: which weights computed the keys and values that tokens attend to after an update."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import torch

from inflight.base.tasks import cancel_and_wait
from inflight.conformance.checks import check, fail, look_at, require, skip
from inflight.conformance.endpoint.forms import assembled
from inflight.conformance.endpoint.kinds import UpdateChain, supported_kinds
from inflight.conformance.endpoint.subject import DueLogits, EndpointSubject
from inflight.conformance.endpoint.waiting import until, within
from inflight.conformance.reference import ReferenceCheckpoint, ReferenceWeights, chosen, distribution
from inflight.contracts import InferenceEndpoint
from inflight.wire import Completion, CompletionChunk, GenerateRequest, InFlightPolicy

LEVEL = "caches"
_PREFIX_LENGTH = 64
_LONG_LENGTH = 1100
"""Length of a prompt that fills several pages on any engine; pages hold 16 to 1024 tokens."""
_GROUP = 4
_SHARED_LENGTH = 330
"""Length of the prefix that several clients share: engines cache prefixes in pages of up to 256 tokens."""
_MOST_SLOTS, _NUM_TOKENS_OF_A_GROUP = 64, 80
"""Maximum number of slots that a check fills with completions of one request, and the length of each completion."""
_NUM_RUNNING = 2
_NUM_TOKENS_OF_A_CLIENT = 300
"""Number of tokens of each request that runs while weights change."""
_NUM_TRIES = 3
_NUM_AFTER = 260
"""Number of tokens after an update that fill a page of most engines."""
_FEWEST_JUDGED, _JUDGED_S = 4, 8.0
"""At least this many answers to requests that ran during updates are judged, and more of them for this many seconds."""
_ENDS_S = 20.0

_UNSEEN = 987
"""Seed of a prompt that no other check sends."""
_CACHED = "what was cached for the prompt is used again"
_NOT_CACHED = "the weights that the endpoint serves are not those of the update, whatever is cached"


class SentAnswer(NamedTuple):
    """A request, its completion, and the last version that had been published when the request was sent."""

    version: int
    request: GenerateRequest
    completion: Completion
    was_aborted: bool = False


@check("U-30", "updates", deadline_s=60)
@look_at("whether cached prefixes are dropped, or keyed by version, with every kind of update, under every policy")
async def prefix(subject: EndpointSubject) -> None:
    """A request that arrives after an update of any kind uses nothing that older weights computed, whatever prefix was
    cached under them."""
    prompt, chain = subject.prompt(min(_PREFIX_LENGTH, subject.context_len // 2)), UpdateChain(subject)
    policies = subject.capabilities.in_flight_policies
    kinds = supported_kinds(subject, turn=2)
    for i in range(max(len(kinds), len(policies) + 1)):
        kind, policy = kinds[i % len(kinds)], policies[i % len(policies)]
        before = chain.served
        request, first = await subject.ask(prompt, max_tokens=4)
        subject.require_sampled_from(before, request, first, f"a request before {kind.name} under {policy}")
        after = await chain.publish(kind, policy)
        # The continuation comes first; otherwise, it could use what the new weights compute for the prompt.
        for asked, what in (
            ((*prompt, *first.token_ids, prompt[0]), "a prompt that continues a completion of the old weights"),
            (prompt, "a prompt seen before"),
        ):
            request, completion = await subject.ask(asked, max_tokens=4)
            words = f"after {kind.name} under {policy}, {what}"
            await _require_nothing_stale(subject, before, after, request, completion, words)


async def _updates(
    subject: EndpointSubject, prompt: Sequence[int]
) -> AsyncIterator[tuple[InFlightPolicy, ReferenceWeights, ReferenceWeights]]:
    """Send the prompt and then update the weights, under each policy in turn; yield the policy and the old and new
    weights."""
    turns = [subject.reference.perturbed("B"), subject.reference.weights]
    policies = subject.capabilities.in_flight_policies
    for i, policy in enumerate((*policies, policies[0])):
        before, after = turns[(i + 1) % 2], turns[i % 2]
        await subject.require_serves(before, f"before update {i + 1}", prompt)
        await subject.publisher.publish(after, in_flight=policy)
        yield policy, before, after


async def _require_nothing_stale(
    subject: EndpointSubject,
    before: ReferenceWeights,
    after: ReferenceWeights,
    request: GenerateRequest,
    completion: Completion,
    what: str,
) -> None:
    """Require that a request uses nothing that the previous weights computed.

    The endpoint has seen all tokens of the prompt except the last one before the update.
    """
    gap = subject.gap(after, request, completion)
    subject.note(**{f"difference from a fresh start, {what}": gap})
    if gap <= subject.tolerance:
        return
    prompt, ids = request.prompt_token_ids, (*request.prompt_token_ids, *completion.token_ids)
    seen = len(prompt) - 1
    stale_TV = subject.reference.mixed_logits([(before, seen), (after, len(ids) - 1)], ids, seen)
    stale_T = chosen(distribution(stale_TV, request.sampling), completion.token_ids)
    unseen = await subject.gap_now(after, subject.prompt(len(prompt), seed=_UNSEEN))
    fail(
        f"{what}: logprobs differ by up to {gap:.3g} from a fresh start under the new weights, and by up to "
        f"{subject.difference(completion.logprobs, stale_T):.3g} from those with keys and values of the old weights "
        f"for the {seen} tokens seen before. A prompt of the same length that was not seen before differs by up to "
        f"{unseen:.3g}: {_NOT_CACHED if unseen > subject.tolerance else _CACHED}"
    )


@check("U-33", "updates", deadline_s=40)
@look_at("pages that are larger than the prompts you tested with, and hashes of prefixes that lack the version")
async def long_prefix(subject: EndpointSubject) -> None:
    """A request that arrives after an update uses no cached page of a prompt of a thousand tokens, whatever the size of
    the pages."""
    prompt = _long_prompt(subject)
    async for policy, _, after in _updates(subject, prompt):
        what = f"after an update under {policy}, a prompt of {len(prompt)} tokens"
        await _require_fresh(subject, prompt, after, what)


@check("U-34", "updates", deadline_s=90)
@look_at("whether blocks that are in use are dropped from the prefix cache too, not only free ones")
async def held_prefix(subject: EndpointSubject) -> None:
    """A request that arrives after an update uses nothing that older weights computed for its prompt, even if requests
    that began before the update still run with this prompt, or if the prompt was being computed when the update
    arrived. Under keep, only those earlier requests continue with the cache that they keep."""
    prompt = _long_prompt(subject)
    # Served weights would hide a cache that is not renewed, so every update brings the others.
    turns = cycle([subject.reference.perturbed("B"), subject.reference.weights])
    num_slots = subject.capabilities.max_concurrent_sequences
    if num_slots < 2:
        skip("one sequence runs at a time: no request holds a prompt while it is sent again")
    for i, policy in enumerate(subject.pausing_policies()):
        for _ in range(_NUM_TRIES):
            weights, computed = next(turns), subject.prompt(len(prompt), seed=30 + i)
            running = await subject.start_running(max(1, min(_GROUP, num_slots - 2)), prompt=prompt)
            begun = subject.begin(subject.generate(computed, max_tokens=1))
            await subject.publisher.publish(weights, in_flight=policy)
            what = f"after an update under {policy}, the prompt of {len(running)} requests that still run"
            await _require_fresh(subject, prompt, weights, what, n=_GROUP)
            num_running = sum(not task.done() for _, task in running)
            await cancel_and_wait(*(task for _, task in running))
            await within(
                _ENDS_S, begun, f"a request whose prompt was being computed when an update under {policy} arrived"
            )
            what = f"after an update under {policy}, a prompt that was being computed when it arrived"
            await _require_fresh(subject, (*computed, 0), weights, what)
            if num_running:
                break
        subject.note(**{f"still running when their prompt was sent again, {policy}": num_running})
        require(
            num_running,
            f"in {_NUM_TRIES} tries, the requests that held the prompt ended before it was sent again: the check is "
            "inconclusive",
        )
        if num_slots <= _MOST_SLOTS and subject.capabilities.streaming:
            await _require_late_completions_fresh(subject, policy, turns)
        await _require_fresh_under_the_same_version(subject, policy, prompt, next(turns))


async def _require_fresh_under_the_same_version(
    subject: EndpointSubject, policy: InFlightPolicy, prompt: Sequence[int], weights: ReferenceWeights
) -> None:
    """Require that a prompt is computed again after another training run has published other weights under the version
    that is already served, even if a request with this prompt began before that update and ended after it."""
    version, prompt = subject.publisher.version, (*prompt[:-2], 1)
    subject.publisher.lose_group()
    another = subject.another_publisher()
    ((_, task),) = await subject.start_running(1, prompt=prompt, max_tokens=_NUM_TOKENS_OF_A_GROUP)
    await another.publish(weights, version=version, in_flight=policy)
    is_running = not task.done()
    await within(_ENDS_S, task, f"a request that ran while the served version was published again under {policy}")
    subject.note(**{f"running while the served version was published again under {policy}": is_running})
    what = f"after an update under {policy} with the version that was already served, the prompt of an ended request"
    await _require_fresh(subject, prompt, weights, what)
    another.lose_group()


async def _require_late_completions_fresh(
    subject: EndpointSubject, policy: InFlightPolicy, turns: Iterator[ReferenceWeights]
) -> None:
    """Require that completions that wait for a slot during an update use nothing that running ones have computed.

    Another request keeps a slot until the update is over; all other slots sample completions when the update begins, so
    that no prompt is being computed.
    """
    num_slots, prompt = subject.capabilities.max_concurrent_sequences, subject.prompt(40, seed=35)
    for length in subject.lengths(_NUM_TOKENS_OF_A_GROUP):
        ((_, blocking),) = await subject.start_running(1)
        num_tokens = min(length, subject.remaining_tokens(prompt))
        request = subject.request(prompt, n=num_slots + 1, max_tokens=num_tokens, seed=36, stream=True)
        chunks: list[CompletionChunk] = []
        reading = subject.begin(_read(subject, request, chunks))
        what = f"fewer than {num_slots - 1} of {num_slots + 1} completions began"
        await until(lambda: len(_begun(chunks)) >= num_slots - 1, _ENDS_S, what, [reading])  # noqa: B023
        begun, weights = _begun(chunks), next(turns)
        await subject.publisher.publish(weights, in_flight=policy)
        await cancel_and_wait(blocking)
        await within(2 * _ENDS_S, reading, f"a stream of {num_slots + 1} completions")
        waited = [assembled(i, [it for it in chunks if it.index == i]) for i in range(num_slots + 1) if i not in begun]
        version = subject.publisher.version
        late = [it for it in waited if [span.version for span in it.version_spans] == [version]]
        if late:
            break
    subject.note(**{f"completions that waited during an update under {policy}": len(late)})
    for completion in late:
        gap = subject.gap(weights, request, completion)
        words = f"a completion that waited during an update under {policy}, while others of its request ran,"
        require(gap <= subject.tolerance, f"{words} has logprobs that differ by up to {gap:.3g} from a fresh start")


def _begun(chunks: Sequence[CompletionChunk]) -> set[int]:
    return {chunk.index for chunk in chunks if chunk.token_ids}


async def _read(subject: EndpointSubject, request: GenerateRequest, chunks: list[CompletionChunk]) -> None:
    async for chunk in subject.streaming.generate_stream(request):
        chunks.append(chunk)


async def _require_fresh(
    subject: EndpointSubject, prompt: Sequence[int], weights: ReferenceWeights, what: str, *, n: int = 1
) -> None:
    """Require that the logprobs of a prompt's completion match those of a fresh start under these weights."""
    request = subject.request(prompt, n=n, max_tokens=4)
    completions = (await subject.endpoint.generate(request)).completions
    gap = max(subject.gap(weights, request, completion) for completion in completions)
    subject.note(**{f"{what}: difference from a fresh start": gap})
    words = f"{what} gets logprobs that differ by up to {gap:.3g} from a fresh start under the new weights"
    require(gap <= subject.tolerance, words)


def _long_prompt(subject: EndpointSubject) -> tuple[int, ...]:
    return subject.prompt(min(_LONG_LENGTH, subject.context_len * 5 // 8), seed=3)


@check("U-26", "updates", deadline_s=180)
@look_at(
    "whether a client keys cached prefixes by a version that it remembers (ask the engine, compare with its answer), "
    "and whether all kinds of update treat running requests alike"
)
async def others_updates(subject: EndpointSubject) -> None:
    """A request uses nothing that older weights computed for a prefix that it shares with others, whichever client
    published the update, whatever its kind, and whatever else runs with that prefix. Running requests continue as the
    policy prescribes."""
    policies = subject.pausing_policies()
    sampler = await subject.another_client()
    chain = UpdateChain(subject)
    for policy in policies:
        await _publish_while_sampling(subject, sampler, policy, chain)


async def _publish_while_sampling(
    subject: EndpointSubject, sampler: InferenceEndpoint, policy: InFlightPolicy, chain: UpdateChain
) -> None:
    """Publish an update of each kind under ``policy`` while requests with one prefix run."""
    answers: list[SentAnswer] = []
    num_answers, over = 0, asyncio.Event()
    prefix = subject.prompt(min(_SHARED_LENGTH, subject.context_len // 2), seed=7)
    clients = (sampler, subject.endpoint) * _NUM_RUNNING
    num_running = min(_NUM_RUNNING, subject.capabilities.max_concurrent_sequences - 1)
    await sampler.generate(subject.request((*prefix, 0), max_tokens=1))

    async def sample_on(i: int) -> None:
        """Request one long completion after another until the publishes are done."""
        prompt = (*prefix, i)
        max_tokens = min(_NUM_TOKENS_OF_A_CLIENT, subject.remaining_tokens(prompt) - 8)
        while not over.is_set():
            version = subject.publisher.version
            answers.append(SentAnswer(version, *await subject.ask(prompt, endpoint=clients[i], max_tokens=max_tokens)))

    running = [subject.begin(sample_on(i)) for i in range(num_running)]
    is_recompute = policy is InFlightPolicy.RECOMPUTE
    kinds = supported_kinds(subject, turn=0 if is_recompute else 1)
    for i, kind in enumerate(kinds if is_recompute else kinds[::2]):
        await within(_ENDS_S, _until_sampling(clients[:2], running), "a request to be decoded")
        before = chain.served
        after = await chain.publish(kind, policy)
        named = {"another client": sampler, "the publisher's own client": subject.endpoint}
        for name, client in list(named.items())[sampler is subject.endpoint :]:
            asked = await subject.ask((*prefix, 10 * i + 10), endpoint=client, max_tokens=4)
            await _require_nothing_stale(subject, before, after, *asked, f"{name}, after {kind.name} under {policy}")
        if answers and len(answers) > num_answers:
            num_answers, latest = len(answers), answers[-1]
            ended = (*latest.request.prompt_token_ids, *latest.completion.token_ids)
            turn = [*ended, *subject.prompt(3)][: subject.context_len - 4]
            await _require_fresh(subject, turn, after, f"a second turn after {kind.name} under {policy}")
    over.set()
    await within(_ENDS_S, asyncio.gather(*running), f"the requests that ran during updates under {policy}")
    for answer in answers[len(answers) - num_running :]:  # which ended after the last update
        ended = (*answer.request.prompt_token_ids, *answer.completion.token_ids)
        turn = [*ended, *subject.prompt(3)][: subject.context_len - 4]
        await _require_fresh(
            subject, turn, chain.served, f"a second turn of a request that ran through {policy} updates"
        )
    await _require_fresh_second_turn(subject, policy, chain)
    if running and subject.capabilities.version_binding == "spans":
        _require_as_the_policy_says(subject, chain.published, answers, policy)


async def _require_fresh_second_turn(subject: EndpointSubject, policy: InFlightPolicy, chain: UpdateChain) -> None:
    """Require that a second turn uses nothing that its first turn computed from older keys and values.

    The first turn runs through an update, and then samples as many tokens as a page of a cache holds.
    """
    binding = subject.capabilities.version_binding
    for i in range(_NUM_TRIES):  # if tokens are sampled fast, the update may arrive too late
        running = await subject.start_running(1, prompt=subject.prompt(seed=71), max_tokens=2 * _NUM_AFTER << i)
        ((request, answer),) = running
        after = await chain.publish(supported_kinds(subject)[0], policy)
        response = await within(_ENDS_S, answer, f"a request that ran through an update under {policy}")
        (completion,) = response.completions
        last, num_tokens = completion.version_spans[-1], len(completion.token_ids)
        subject.note(**{f"tokens sampled after an update under {policy}": last.end - last.start})
        if binding != "spans" or 0 < last.start <= num_tokens - min(_NUM_AFTER, num_tokens // 2):
            break
    turn = [*request.prompt_token_ids, *completion.token_ids, *subject.prompt(3)][: subject.context_len - 4]
    await _require_fresh(subject, turn, after, f"a second turn of a request that ran through an update under {policy}")


async def _until_sampling(clients: Sequence[InferenceEndpoint], running: Sequence[asyncio.Task[Any]]) -> None:
    """Return once requests are being decoded. An adapter may count only its own client's requests."""
    while running and not any([(await client.weight_version()).num_running for client in clients]):
        for task in running:
            if task.done():
                task.result()
        await asyncio.sleep(0.002)
    await asyncio.sleep(0.02)  # some tokens are sampled, so that the update happens during completions


def due_logits(
    published: Mapping[int, ReferenceWeights], answer: SentAnswer, policy: InFlightPolicy
) -> DueLogits | None:
    """Return a function that computes the logits from which the tokens of an answer must have been sampled under this
    policy; None if the answer does not determine them.

    Under keep, they are not determined if the first token was sampled with a later version than the one under which the
    request was sent: the beginning of the prompt may have been computed with the older weights.
    """
    spans, ids, prompt = answer.completion.version_spans, answer.completion.token_ids, answer.request.prompt_token_ids

    def kept(reference: ReferenceCheckpoint, dtype: str) -> torch.Tensor:
        return reference.kept_logits(published, spans, prompt, ids, dtype)

    def recomputed(reference: ReferenceCheckpoint, dtype: str) -> torch.Tensor:
        """Return the logits of each span's tokens, with all keys and values computed by the span's version."""
        return torch.cat(
            [reference.logits(published[it.version], prompt, ids[: it.end], dtype=dtype)[it.start :] for it in spans]
        )

    if policy is InFlightPolicy.KEEP:
        return kept if spans and spans[0].version == answer.version else None
    return recomputed if spans else None


def _require_as_the_policy_says(
    subject: EndpointSubject,
    published: Mapping[int, ReferenceWeights],
    answers: Sequence[SentAnswer],
    policy: InFlightPolicy,
) -> None:
    """Require that the keys and values that each token attends to are those that the policy prescribes.

    With a large model, only as many answers are judged as a few seconds allow, beginning with those that contain tokens
    from the most versions.
    """
    largest, num_updated, num_judged = 0.0, 0, 0
    began = time.monotonic()
    for answer in sorted(answers, key=lambda it: -len(it.completion.version_spans)):
        if num_judged >= _FEWEST_JUDGED and time.monotonic() - began > _JUDGED_S:
            break
        if (logits := due_logits(published, answer, policy)) is None:
            continue
        request, completion = answer.request, answer.completion
        spans, ids = completion.version_spans, completion.token_ids
        num_updated += len(spans) > 1
        num_judged += 1
        gap = subject.gap_to(logits, request, completion)
        largest = max(largest, gap)
        if gap <= subject.tolerance:
            continue
        exact_T = chosen(distribution(logits(subject.reference, "float32"), request.sampling), ids)
        wrong_T = (torch.tensor(completion.logprobs, dtype=torch.float64) - exact_T).abs() > subject.tolerance
        first = next(it for it in spans if bool(wrong_T[it.start : it.end].any()))
        fail(
            f"a request that ran during updates has logprobs that differ by up to {gap:.3g} from those that {policy} "
            f"prescribes, beginning with its tokens {first.start} to {first.end - 1}, of "
            f"{published[first.version].label}; before them it had tokens of {spans.index(first)} other versions"
        )
    words = f"largest difference of {num_judged} of {len(answers)} requests that ran, {policy}"
    subject.note(**{words: largest})
    require(num_updated > 0, f"no update under {policy} happened during a request")

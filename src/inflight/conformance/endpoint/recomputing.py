"""Level ``caches``: whether running requests keep or recompute keys and values when an update arrives, and whether
their random number sequence continues."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

from inflight.conformance.checks import check, fail, look_at, require
from inflight.conformance.endpoint.caches import SentAnswer, due_logits
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.reference import ReferenceWeights
from inflight.wire import Completion, GenerateRequest, InFlightPolicy

LEVEL = "caches"
_MANY, _N = 32, 2
"""Number of running completions, and how many of them belong to each request."""
_NUM_SWAPPED = 400
"""Number of tokens of the few requests whose keys and values are compared with both ways of computing them."""
_NUM_TOKENS = 160
"""Number of tokens of each of many running requests: enough for each to still be running when the update arrives."""
_PREFILLED, _PREFILLED_LENGTH, _TOKENS_BEHIND = 8, 1500, 6
"""Requests whose prompts take an engine many steps: their number, the length of their prompts, and their max_tokens."""
_PREFILLED_S = 4.0
"""Seconds that the prompts of these requests may take in total; slow endpoints receive shorter prompts."""
_SHARES = (0.15, 0.35, 0.55, 0.75)
"""When the updates arrive, as fractions of the time that those requests take without an update."""
_NUMBERS, _NUM_DRAWS, _TRIES = 4, 400, 6
_FALSE_ALARM = 1e-6

Answers = list[tuple[GenerateRequest, Completion]]


@check("U-31", "updates recompute spans", deadline_s=40)
@look_at("whether the keys and values of running requests are dropped before sampling continues")
async def recompute_under_new_weights(subject: EndpointSubject) -> None:
    """Under recompute, running requests continue with keys and values recomputed under the new weights."""
    await _swap(subject, InFlightPolicy.RECOMPUTE)


@check("U-32", "updates keep spans", deadline_s=40)
@look_at("whether something clears or preempts the cache during the pause, as a flush between updates does")
async def keep_old_keys_and_values(subject: EndpointSubject) -> None:
    """Under keep, running requests continue with the keys and values that older weights computed."""
    await _swap(subject, InFlightPolicy.KEEP)


async def _swap(subject: EndpointSubject, policy: InFlightPolicy) -> None:
    """Swap A for B while requests run; require that later logprobs are those that the policy prescribes."""
    reference, other = subject.reference, subject.reference.perturbed("B")
    answers = await answers_across_an_update(
        subject, other, policy, num=2, num_tokens=_NUM_SWAPPED, staged=subject.capabilities.staging
    )
    old = subject.publisher.version - 1
    kept, recomputed = "the old keys and values kept", "all keys and values computed again"
    due, other_way = (kept, recomputed) if policy is InFlightPolicy.KEEP else (recomputed, kept)
    gaps = {kept: 0.0, recomputed: 0.0}
    num_after = 0
    versions_of = {old: reference.weights, old + 1: other}
    for request, completion in answers:
        spans = completion.version_spans
        versions = [span.version for span in spans]
        require(versions == [old, old + 1], f"the update did not happen during the request: spans {spans}")
        num_after += len(completion.token_ids) - spans[1].start
        answer = SentAnswer(old, request, completion)
        for name, way in ((kept, InFlightPolicy.KEEP), (recomputed, InFlightPolicy.RECOMPUTE)):
            logits = due_logits(versions_of, answer, way)
            assert logits is not None
            gap = subject.gap_to(logits, request, completion, spans[1].start, is_exact=name != due)
            gaps[name] = max(gaps[name], gap)
    subject.note(**{f"largest difference from {name}": gap for name, gap in gaps.items()}, tokens=num_after)
    require(
        gaps[due] <= subject.tolerance,
        f"after the swap, logprobs differ by up to {gaps[due]:.3g} from those with {due}, and by "
        f"{gaps[other_way]:.3g} from those with {other_way}",
    )


async def answers_across_an_update(
    subject: EndpointSubject,
    weights: ReferenceWeights,
    policy: InFlightPolicy,
    *,
    num: int,
    num_tokens: int,
    n: int = 1,
    staged: bool = False,
) -> Answers:
    """Publish ``weights`` while requests for ``n`` completions each run; return all completions.

    All of them end with tokens of the new version, unless even the longest requests tried were too short.
    """
    for length in subject.lengths(num_tokens):
        running = await subject.start_running(num, max_tokens=length, n=n)
        old = subject.publisher.version
        await subject.publisher.publish(weights, in_flight=policy, staged=staged)
        answers = [(request, completion) for request, task in running for completion in (await task).completions]
        if all(completion.version_spans[-1].version > old for _, completion in answers):
            break
        await subject.publisher.publish(subject.reference.weights)
    return answers


@check("U-35", "updates recompute spans", deadline_s=60)
@look_at(
    "an incomplete list of running requests, requests with equal prompts that are recomputed as one, and chunks of "
    "prompts that were prefilled before the pause"
)
async def everything_recomputed(subject: EndpointSubject) -> None:
    """Under recompute, every running request is recomputed, however many run, and even if the update has the version
    that is already served. A request whose prompt is being prefilled when the update arrives keeps nothing that the old
    weights computed either."""
    reference, publisher = subject.reference, subject.publisher
    other = reference.perturbed("B")
    largest, num_tokens = 0.0, 0
    recompute = InFlightPolicy.RECOMPUTE
    answers = await answers_across_an_update(
        subject, other, recompute, num=subject.pace.fewer(_MANY) // _N, num_tokens=_NUM_TOKENS, n=_N
    )
    for i, (request, completion) in enumerate(answers):
        num, gap = _after_the_update(subject, request, completion, publisher.version, other)
        require(
            num, f"the update did not happen during completion {i} of {len(answers)}: spans {completion.version_spans}"
        )
        num_tokens, largest = num_tokens + num, max(largest, gap)
        require(gap <= subject.tolerance, f"of {len(answers)} completions that ran during the update, {_off(i, gap)}")
    subject.note(**{"running": len(answers), "tokens after the update": num_tokens, "largest difference": largest})
    await _recomputed_while_prefilled(subject, (reference.weights, other))
    await _recomputed_under_the_same_version(subject)


async def _recomputed_while_prefilled(subject: EndpointSubject, turns: Sequence[ReferenceWeights]) -> None:
    publisher = subject.publisher
    started = time.monotonic()
    await asyncio.gather(*(subject.endpoint.generate(request) for request in _long_requests(subject, 0)))
    usual_s = time.monotonic() - started
    largest, num_after = 0.0, []
    for turn, share in enumerate(_SHARES[:: 2 if subject.pace.is_slow else 1]):
        weights = turns[turn % 2]
        requests = _long_requests(subject, turn + 1)
        tasks = [subject.begin(subject.endpoint.generate(request)) for request in requests]
        await asyncio.sleep(share * usual_s)
        await publisher.publish(weights, in_flight=InFlightPolicy.RECOMPUTE)
        num_after.append(0)
        for i, (request, task) in enumerate(zip(requests, tasks, strict=True)):
            completion = (await task).completions[0]
            num, gap = _after_the_update(subject, request, completion, publisher.version, weights)
            num_after[-1] += num == len(completion.token_ids)
            largest = max(largest, gap)
            require(
                gap <= subject.tolerance,
                f"of {len(requests)} requests with prompts of {len(request.prompt_token_ids)} tokens that were being "
                f"prefilled when the update arrived, {_off(i, gap)}",
            )
    subject.note(
        **{"prompts prefilled or waiting when updates arrived": num_after, "largest difference there": largest}
    )


async def _recomputed_under_the_same_version(subject: EndpointSubject) -> None:
    """Require that running requests are recomputed if another training run publishes other weights under the version
    that is already served.

    The logprob of a request's last token shows which weights computed its keys and values.
    """
    other, version = subject.reference.perturbed("C", seed=2), subject.publisher.version
    subject.publisher.lose_group()
    another = subject.another_publisher()
    for length in subject.lengths(_NUM_TOKENS):
        running = await subject.start_running(2, max_tokens=length)
        await another.publish(other, version=version, in_flight=InFlightPolicy.RECOMPUTE)
        continued = [not task.done() for _, task in running]
        answers = [(request, (await task).completions[0]) for request, task in running]
        if any(continued):
            break
        await another.publish(subject.reference.weights, version=version)
    for i, ((request, completion), has_continued) in enumerate(zip(answers, continued, strict=True)):
        if has_continued:
            gap = subject.gap(other, request, completion, start=len(completion.token_ids) - 1)
            words = f"of {len(answers)} completions during which the served version was published again, {_off(i, gap)}"
            require(gap <= subject.tolerance, words)
    subject.note(**{"running while the served version was published again": sum(continued)})


def _off(index: int, gap: float) -> str:
    return (
        f"the one at index {index} continues with logprobs that differ by up to {gap:.3g} from those with all keys and "
        "values computed under the new weights"
    )


def _long_requests(subject: EndpointSubject, turn: int) -> list[GenerateRequest]:
    """Return requests with long prompts that the endpoint has not seen before."""
    num = min(_PREFILLED, subject.capabilities.max_concurrent_sequences)
    length = min(
        _PREFILLED_LENGTH, subject.context_len - 2 * _TOKENS_BEHIND, subject.pace.prompt_len(_PREFILLED_S / num)
    )
    first = 1000 + 100 * turn
    seeds = range(first, first + num)
    return [subject.request(subject.prompt(length, seed=seed), max_tokens=_TOKENS_BEHIND) for seed in seeds]


def _after_the_update(
    subject: EndpointSubject, request: GenerateRequest, completion: Completion, version: int, weights: ReferenceWeights
) -> tuple[int, float]:
    """Return how many tokens have this version, and the largest difference of their logprobs from a fresh start's."""
    start = next((span.start for span in completion.version_spans if span.version == version), None)
    if start is None:
        return 0, 0.0
    return len(completion.token_ids) - start, subject.gap(weights, request, completion, start=start)


@check("U-36", "updates spans", deadline_s=90)
@look_at("what is recreated when a request is queued for recomputation: its seeded generator must not be")
async def random_numbers_continue(subject: EndpointSubject) -> None:
    """A request that continues after an update draws new random numbers and reuses none of the earlier ones."""
    # Draws from a uniform distribution show the random numbers themselves.
    policies = subject.pausing_policies()
    uniform = subject.reference.with_final_norm(0.0, "uniform")
    await subject.publisher.publish(uniform)
    for policy in policies:
        drawn = await _drawn_across_an_update(subject, policy, uniform)
        _require_no_run_twice(subject, policy, [completion.token_ids for completion in drawn])


async def _drawn_across_an_update(
    subject: EndpointSubject, policy: InFlightPolicy, weights: ReferenceWeights
) -> list[Completion]:
    """Return completions with enough tokens before and after an update.

    If one has too few, another attempt is made with an update at another time, or with longer requests.
    """
    few = 2 * _run_length(subject)
    delay_s, num_tokens = 0.05, min(_NUM_DRAWS, 16 * few)
    for _ in range(_TRIES):
        running = await subject.start_running(_NUMBERS, max_tokens=num_tokens)
        started = time.monotonic()
        await asyncio.sleep(delay_s)
        await subject.publisher.publish(weights, in_flight=policy)
        drawn = [(await task).completions[0] for _, task in running]
        version = subject.publisher.version
        new = [[span for span in it.version_spans if span.version == version] for it in drawn]
        too_early = any(spans and spans[0].start < few for spans in new)
        too_late = any(not spans or spans[0].end - spans[0].start < few for spans in new)
        if not too_early and not too_late:
            return drawn
        if too_early:
            delay_s = (time.monotonic() - started) / 3
        else:
            num_tokens = min(2 * num_tokens, subject.lengths(1)[-1])
    fail(
        f"in {_TRIES} attempts, no update under {policy} fell into the middle of requests of up to {num_tokens} tokens"
    )


def _run_length(subject: EndpointSubject) -> int:
    """Return the length of token runs at which any run occurs twice by chance in only one of a million checks."""
    num_pairs = (_NUMBERS * subject.capabilities.max_model_len) ** 2 / 2
    return math.ceil(math.log(num_pairs / _FALSE_ALARM) / math.log(subject.capabilities.vocab_size))


def _require_no_run_twice(subject: EndpointSubject, policy: str, drawn: Sequence[tuple[int, ...]]) -> None:
    length = _run_length(subject)
    first: dict[tuple[int, ...], tuple[int, int]] = {}
    for index, tokens in enumerate(drawn):
        for start in range(len(tokens) - length + 1):
            where = first.setdefault(tokens[start : start + length], (index, start))
            require(
                where == (index, start),
                f"under {policy}, tokens {start} to {start + length - 1} of request {index} are those from token "
                f"{where[1]} on of request {where[0]}, though all tokens are equally likely: the same random numbers "
                "were used twice",
            )
    subject.note(**{f"runs of {length} tokens under {policy}, all different": len(first)})

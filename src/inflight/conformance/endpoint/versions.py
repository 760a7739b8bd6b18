"""Level versions: whether each token's reported version is that of the weights that it was sampled from.

The two colours: policies A and B differ in the sign of the final norm only, so what is likely under one is unlikely
under the other, and each token betrays its weights. Keys and values do not depend on that norm, so that one forward of
the reference says for every in-flight policy what each token's logprob has to be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from inflight.conformance.checks import check, fail, require
from inflight.conformance.endpoint.holds import Running, start
from inflight.conformance.endpoint.subject import EndpointSubject, cancelled_at_the_end
from inflight.conformance.reference import Weights, chosen, distribution
from inflight.contracts import StreamingEndpoint
from inflight.wire import (
    Completion,
    CompletionChunk,
    GenerateRequest,
    InFlightPolicy,
    VersionSpan,
)

LEVEL = "versions"
_SHARPNESS = 4.0
"""Factor on the final norm of both colours: few tokens are likely under both then."""
_NUM_UPDATES = 4
_NUM_TOKENS = 600
"""Of each running request: enough for a few updates."""
_DECISIVE = 5.0
"""Difference of a token's logprobs under A and B, in nats, beyond which its colour is certain."""
_LOOK_AT = "when the version of a token is noted: at its sampling, in the step that used the weights, not at admission"


def two_colours(subject: EndpointSubject) -> tuple[Weights, Weights]:
    """Return A and B, whose logits are each other's negatives."""
    reference = subject.reference
    return reference.with_final_norm(_SHARPNESS, "A"), reference.with_final_norm(-_SHARPNESS, "B")


def check_spans(
    subject: EndpointSubject, request: GenerateRequest, completion: Completion, weights: Mapping[int, Weights]
) -> tuple[int, int]:
    """Require that every token was sampled from the version that its span names; return tokens, and decisive ones."""
    if not completion.token_ids:
        return 0, 0
    first = next(iter(weights.values()))
    logits_TV = subject.reference.logits(first, request.prompt_token_ids, completion.token_ids)
    sign = {v: 1.0 if w.label == first.label else -1.0 for v, w in weights.items()}
    by_sign = {s: chosen(distribution(s * logits_TV, request.sampling), completion.token_ids) for s in (1.0, -1.0)}
    versions = [span.version for span in completion.version_spans for _ in range(span.start, span.end)]
    require(set(versions) <= set(sign), f"spans name versions {sorted(set(versions))}, published were {sorted(sign)}")
    signs_T = torch.tensor([sign[version] for version in versions])
    claimed_T = torch.where(signs_T > 0, by_sign[1.0], by_sign[-1.0])
    other_T = torch.where(signs_T > 0, by_sign[-1.0], by_sign[1.0])
    found_T = torch.tensor(completion.logprobs, dtype=torch.float64)
    wrong_T = (found_T - claimed_T).abs() > _SHARPNESS * subject.tolerance
    betrayed_T = other_T - claimed_T > _DECISIVE
    if bool((wrong_T | betrayed_T).any()):
        index = int((wrong_T | betrayed_T).nonzero()[0])
        fail(
            f"token {index} of {len(versions)} is said to be of version {versions[index]}, which is "
            f"{weights[versions[index]].label}: its logprob was {found_T[index]:.3f}, it is {claimed_T[index]:.3f} "
            f"under that version and {other_T[index]:.3f} under the other; spans {_short(completion.version_spans)}",
        )
    return len(versions), int(((claimed_T - other_T).abs() > _DECISIVE).sum())


@check("U-20", needs=("updates", "spans", "keep"), deadline_s=40, look_at=_LOOK_AT, policy=InFlightPolicy.KEEP)
@check(
    "U-21", needs=("updates", "spans", "recompute"), deadline_s=40, look_at=_LOOK_AT, policy=InFlightPolicy.RECOMPUTE
)
async def spans_while_requests_go_on(subject: EndpointSubject, policy: InFlightPolicy) -> None:
    """Under {policy}, every token's span names the version whose weights it was sampled from, over any number of
    updates."""
    colours = two_colours(subject)
    publisher = subject.publisher
    await publisher.publish(colours[0])
    published = {publisher.version: colours[0]}
    running = await subject.start_running(4, max_tokens=min(_NUM_TOKENS, subject.capabilities.max_model_len // 2))
    for i in range(_NUM_UPDATES):
        await asyncio.sleep(0.03)
        running += await start(subject, 4, 24)
        await publisher.publish(colours[(i + 1) % 2], in_flight=policy)
        published[publisher.version] = colours[(i + 1) % 2]
    seen = await _check_all(subject, running, published)
    require(len(seen) > 2, f"the running requests saw versions {sorted(seen)} only: nothing was in flight")


@check("U-22", needs=("updates", "drain"), deadline_s=40, look_at=_LOOK_AT, policy=InFlightPolicy.DRAIN)
@check("U-23", needs=("updates", "abort"), deadline_s=40, look_at=_LOOK_AT, policy=InFlightPolicy.ABORT)
async def spans_of_requests_that_end(subject: EndpointSubject, policy: InFlightPolicy) -> None:
    """Under {policy}, a completion has tokens of one version only, and names it."""
    colours = two_colours(subject)
    publisher = subject.publisher
    await publisher.publish(colours[0])
    published = {publisher.version: colours[0]}
    for i in range(_NUM_UPDATES):
        running = await subject.start_running(4, max_tokens=200)
        await publisher.publish(colours[(i + 1) % 2], in_flight=policy)
        published[publisher.version] = colours[(i + 1) % 2]
        for request, task in running:
            completion = (await task).completions[0]
            versions = [span.version for span in completion.version_spans]
            require(
                len(versions) < 2, f"a request that ran before a hold by {policy} has tokens of versions {versions}"
            )
            require(
                versions in ([], [publisher.version - 1]),
                f"a request that ran before version {publisher.version} was published names {versions}",
            )
            check_spans(subject, request, completion, published)
    await _check_all(subject, await start(subject, 4, 24), published)


@check("U-24", needs=("updates", "spans", "streaming"), deadline_s=40, look_at=_LOOK_AT)
async def streamed_versions(subject: EndpointSubject) -> None:
    """Every chunk of a stream names the version that sampled its tokens."""
    colours = two_colours(subject)
    publisher, endpoint = subject.publisher, subject.endpoint
    assert isinstance(endpoint, StreamingEndpoint)
    await publisher.publish(colours[0])
    published = {publisher.version: colours[0]}
    request = subject.request(max_tokens=min(_NUM_TOKENS, subject.capabilities.max_model_len // 2), stream=True)
    chunks: list[CompletionChunk] = []

    async def read() -> None:
        async for chunk in endpoint.generate_stream(request):
            chunks.append(chunk)

    reading = asyncio.ensure_future(read())
    await subject.enter(cancelled_at_the_end([reading]))
    for i in range(2):
        seen = len(chunks)
        while len(chunks) < seen + 4 and not reading.done():  # noqa: ASYNC110 - it is the reader that ends
            await asyncio.sleep(0.002)
        await publisher.publish(colours[(i + 1) % 2])
        published[publisher.version] = colours[(i + 1) % 2]
    await reading
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    versions = [chunk.version for chunk in chunks for _ in chunk.token_ids]
    edges = [0, *(i for i in range(1, len(versions)) if versions[i] != versions[i - 1]), len(versions)]
    completion = Completion(
        index=0,
        token_ids=tuple(tokens),
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        version_spans=tuple(VersionSpan(version=versions[a], start=a, end=b) for a, b in pairwise(edges)),
        finish_reason="length",
    )
    subject.note(chunks=len(chunks), spans=_short(completion.version_spans))
    require(len(completion.version_spans) > 1, "the stream had ended before the first update")
    check_spans(subject, request, completion, published)


@check("U-25", needs=("updates",), deadline_s=40, look_at=_LOOK_AT)
async def single_version(subject: EndpointSubject) -> None:
    """A completion that ran under one version names that version, whatever the version binding."""
    colours = two_colours(subject)
    for i in range(3):
        answer = await subject.publisher.publish(colours[i % 2])
        running = await start(subject, 4, 16)
        await _check_all(subject, running, {answer.version: colours[i % 2]})


def _short(spans: Sequence[VersionSpan]) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in spans]


async def _check_all(
    subject: EndpointSubject,
    running: Running,
    published: Mapping[int, Weights],
) -> set[int]:
    """Require exact spans of every completion; return the versions that they name."""
    num_tokens = num_decisive = 0
    seen: set[int] = set()
    for request, task in running:
        completion = (await task).completions[0]
        tokens, decisive = check_spans(subject, request, completion, published)
        num_tokens, num_decisive = num_tokens + tokens, num_decisive + decisive
        seen |= {span.version for span in completion.version_spans}
    subject.note(**{"tokens": num_tokens, "tokens of one colour": num_decisive, "versions named": sorted(seen)})
    require(num_decisive > num_tokens / 4, f"only {num_decisive} of {num_tokens} tokens tell their colour")
    return seen

"""Level ``versions``: whether each token's reported version is that of the weights from which it was sampled.

The two colours are the weights A and B, which differ only in the sign of the final norm. A token that is likely under
one is therefore unlikely under the other, and thus shows from which weights it was sampled. Keys and values do not
depend on that norm, so one forward pass of the reference gives every token's logprob under any in-flight policy.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

import torch

from inflight.conformance.checks import check, fail, require
from inflight.conformance.endpoint.forms import assembled, chat_choices, chat_chunks
from inflight.conformance.endpoint.holding import held_up
from inflight.conformance.endpoint.rounding import moved_by_rounding
from inflight.conformance.endpoint.subject import EndpointSubject, Running
from inflight.conformance.endpoint.waiting import SERVED_S, SLOWNESS, until, within
from inflight.conformance.reference import ReferenceWeights, chosen, distribution
from inflight.wire import (
    ChatCompletionRequest,
    Completion,
    CompletionChunk,
    GenerateRequest,
    InFlightPolicy,
    VersionSpan,
)

LEVEL = "versions"
_SHARPNESS = 4.0
"""Factor applied to the final norm of both colours, so that few tokens are likely under both."""
_NUM_UPDATES, _NUM_TRIES = 4, 3
_NUM_TOKENS = 600
"""Number of tokens of each running request: enough for a few updates."""
_NUM_STREAMS, _NUM_STREAMED_UPDATES, _NUM_CHUNKS = 4, 6, 3
"""Numbers of simultaneous streams, of updates while they run, and of chunks of each stream before the next update."""
_SAMPLED_S = 0.05
"""Time between two updates during which a chat completion is sampled."""
_NUM_ENDED = 200
"""Number of tokens of each request that ends before an update."""
_NUM_LONG, _NUM_SHORT = 4, 12
"""Numbers of long requests, and of clients whose short requests end around each update."""
_MOST_SEVERAL, _NUM_TOKENS_OF_SEVERAL = 66, 100
"""Largest number of completions of one request, of which some wait for a slot on most endpoints, and their length."""
_MOST_SHORT, _NUM_LATEST = 4, 3
"""Largest number of tokens of a short request, and how many of each client's latest short requests are compared."""
_DECISIVE = 5.0
"""A token's colour is certain if its logprobs under A and B differ by at least this many nats."""
_IMPOSSIBLE = 1e-9
"""Total probability below which no token is sampled by chance: a check samples about ten thousand tokens. Where logits
are small, tokens of the other colour are occasionally sampled."""
_MOVED = 0.75
"""The share of a completion's tokens that rounding may change too much: a sharp model amplifies rounding."""
_LOOK_AT = (
    "when the version of a token is recorded: it must be in the step that samples the token, neither at admission "
    "nor when the completion ends"
)


async def publish_next(
    subject: EndpointSubject,
    published: dict[int, ReferenceWeights],
    policy: InFlightPolicy | None = None,
    *,
    staged: bool = False,
    is_held_up: bool = False,
) -> None:
    """Publish the next of A and B, whose logits are each other's negatives, and add its version to ``published``.

    If ``is_held_up``, the endpoint is `held_up` during the commit.
    """
    colour = _next_colour(subject)
    update = await subject.publisher.request(colour, in_flight=policy, staged=staged)
    await subject.publisher.send_all(update, colour)
    async with held_up(subject) if is_held_up else contextlib.nullcontext():
        await subject.publisher.commit(update)
    published[subject.publisher.version] = colour


def _next_colour(subject: EndpointSubject) -> ReferenceWeights:
    is_a = subject.publisher.version % 2 == 0
    return subject.reference.with_final_norm(_SHARPNESS if is_a else -_SHARPNESS, "A" if is_a else "B")


def check_spans(
    subject: EndpointSubject,
    request: GenerateRequest,
    completion: Completion,
    weights: Mapping[int, ReferenceWeights],
    what: str = "",
) -> tuple[int, int]:
    """Require that every token was sampled from the version that its span reports; ``what`` names the completion in a
    failure.

    Return the number of tokens, and how many of them show their colour despite rounding.
    """
    if not completion.token_ids:
        return 0, 0
    first = next(iter(weights.values()))
    logits_TV = subject.reference.logits(first, request.prompt_token_ids, completion.token_ids)
    sign = {v: 1.0 if w.label == first.label else -1.0 for v, w in weights.items()}
    of_sign = {s: distribution(s * logits_TV, request.sampling) for s in (1.0, -1.0)}
    by_sign = {s: chosen(logprobs_TV, completion.token_ids) for s, logprobs_TV in of_sign.items()}
    tails = {s: _tail(logprobs_TV, by_sign[s]) for s, logprobs_TV in of_sign.items()}
    versions = [span.version for span in completion.version_spans for _ in range(span.start, span.end)]
    require(
        set(versions) <= set(sign), f"spans name versions {sorted(set(versions))}, but {sorted(sign)} were published"
    )
    signs_T = torch.tensor([sign[version] for version in versions])
    claimed_T = torch.where(signs_T > 0, by_sign[1.0], by_sign[-1.0])
    other_T = torch.where(signs_T > 0, by_sign[-1.0], by_sign[1.0])
    found_T = torch.tensor(completion.logprobs, dtype=torch.float64)
    wrong_T = (found_T - claimed_T).abs() > _SHARPNESS * subject.tolerance
    tail_T = torch.where(signs_T > 0, tails[1.0], tails[-1.0])
    wrong_T |= (other_T - claimed_T > _DECISIVE) & (tail_T < _IMPOSSIBLE)
    moved_T = torch.zeros_like(wrong_T)
    if bool(wrong_T.any()) and subject.is_coarse:
        dtype = subject.capabilities.dtype
        logits_TV = subject.reference.logits(first, request.prompt_token_ids, completion.token_ids, dtype=dtype)
        for s, exact_T in by_sign.items():
            rounded_T = chosen(distribution(s * logits_TV, request.sampling), completion.token_ids)
            moved_T |= moved_by_rounding(rounded_T - exact_T, _SHARPNESS * subject.tolerance, dtype, _MOVED)
        wrong_T &= ~moved_T
    if bool(wrong_T.any()):
        index = int(wrong_T.nonzero()[0])
        fail(
            f"token {index} of {len(versions)}{what and f' of {what}'} is labelled version {versions[index]}, which is "
            f"{weights[versions[index]].label}: its logprob was {found_T[index]:.3f}, it is {claimed_T[index]:.3f} "
            f"under that version and {other_T[index]:.3f} under the other; spans {_short(completion.version_spans)}"
        )
    return len(versions), int((((claimed_T - other_T).abs() > _DECISIVE) & ~moved_T).sum())


def _tail(logprobs_TV: torch.Tensor, chosen_T: torch.Tensor) -> torch.Tensor:
    """Return the total probability [T] of the tokens that are no likelier than the chosen one."""
    return torch.where(logprobs_TV <= chosen_T[:, None], logprobs_TV.exp(), 0.0).sum(dim=1)


@check("U-20", "updates spans keep", deadline_s=90, look_at=_LOOK_AT, policy=InFlightPolicy.KEEP)
@check("U-21", "updates spans recompute", deadline_s=90, look_at=_LOOK_AT, policy=InFlightPolicy.RECOMPUTE)
async def spans_while_requests_continue(subject: EndpointSubject, policy: InFlightPolicy) -> None:
    """Under {policy}, every token's span names the version whose weights it was sampled from, across any number of
    updates, including in chat completions."""
    num_slots = subject.capabilities.max_concurrent_sequences
    for _ in range(_NUM_TRIES):  # a slow engine may still be reading prompts when the updates arrive
        published: dict[int, ReferenceWeights] = {}
        await publish_next(subject, published)
        running = await subject.start_running(
            max(1, min(_NUM_LONG, num_slots - 1)), max_tokens=min(_NUM_TOKENS, subject.context_len // 2)
        )
        for _ in range(subject.pace.fewer(_NUM_UPDATES)):
            running += await _publish_while_requests_end(subject, published, policy)
        seen = await _check_all(subject, running, published)
        if any(len(task.result().completions[0].version_spans) > 1 for _, task in running):
            await _check_several(subject, policy)
            if subject.capabilities.chat:
                await _check_chat(subject, policy)
            return
    fail(f"no request has tokens of several of the versions {sorted(seen)}: nothing was in flight")


async def _check_several(subject: EndpointSubject, policy: InFlightPolicy) -> None:
    """Require that each completion of one request has its own spans, even if it begins after an update."""
    num, prompt = min(_MOST_SEVERAL, subject.capabilities.max_concurrent_sequences + 2), subject.prompt(seed=24)
    for num_tokens in subject.lengths(min(_NUM_TOKENS_OF_SEVERAL, subject.context_len // 2)):
        published: dict[int, ReferenceWeights] = {}
        await publish_next(subject, published)
        ((request, answer),) = await subject.start_running(1, prompt=prompt, n=num, max_tokens=num_tokens)
        for i in range(2):
            await asyncio.sleep(_SAMPLED_S * SLOWNESS.get())
            await publish_next(subject, published, policy, is_held_up=i == 1)
        completions = (await within(2 * SERVED_S, answer, f"a request for {num} completions")).completions
        for completion in completions[-_NUM_LATEST:]:
            check_spans(subject, request, completion, published)
        if any(len(completion.version_spans) > 1 for completion in completions):
            return
    fail(f"a request for {num} completions has none with tokens of several versions: none was in flight")


async def _check_chat(subject: EndpointSubject, policy: InFlightPolicy) -> None:
    """Require that the spans of a chat completion name the versions that its tokens were sampled from."""
    for _ in range(_NUM_TRIES):
        published: dict[int, ReferenceWeights] = {}
        await publish_next(subject, published)
        chat, as_ids = await _long_chat(subject)
        answer = subject.begin(subject.endpoint.chat_completion(chat))
        while not answer.done() and (await subject.endpoint.weight_version()).num_running == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        for i in range(2):
            await publish_next(subject, published, policy, is_held_up=i == 1)
            await asyncio.sleep(_SAMPLED_S * SLOWNESS.get())
        (completion,) = chat_choices(await answer)
        subject.note(spans_of_a_chat=_short(completion.version_spans))
        check_spans(subject, as_ids, completion, published, "a chat completion")
        if len(completion.version_spans) > 1:
            return
    fail("no chat completion has tokens of several versions: none was in flight during an update")


async def _publish_while_requests_end(
    subject: EndpointSubject, published: dict[int, ReferenceWeights], policy: InFlightPolicy
) -> Running:
    """Publish the next version while so many short requests run that some end in the last step before the update.

    Return the requests that ran at about that time.
    """
    latest: list[Running] = []
    is_published = False

    async def client(number: int) -> None:
        own: Running = []
        latest.append(own)
        while not is_published:
            num_tokens = 1 + (number + len(own)) % _MOST_SHORT
            own += subject.start(1, num_tokens)
            await own[-1][1]

    num_slots = subject.capabilities.max_concurrent_sequences
    num_clients = max(1, min(_NUM_SHORT, num_slots - _NUM_LONG))
    clients = [subject.begin(client(number)) for number in range(num_clients)]
    if num_slots > 1:  # meanwhile, the long requests sample tokens too
        is_busy = "short requests next to long ones were not answered"
        await until(lambda: sum(map(len, latest)) > 2 * num_clients, SERVED_S, is_busy, clients)
    else:
        await asyncio.sleep(0.03 * SLOWNESS.get())
    await publish_next(subject, published, policy)
    is_published = True
    await asyncio.gather(*clients)
    return [pair for own in latest for pair in own[-_NUM_LATEST:]]


@check("U-22", "updates drain", deadline_s=40, look_at=_LOOK_AT, policy=InFlightPolicy.DRAIN)
@check("U-23", "updates abort", deadline_s=40, look_at=_LOOK_AT, policy=InFlightPolicy.ABORT)
async def spans_of_requests_that_end(subject: EndpointSubject, policy: InFlightPolicy) -> None:
    """Under {policy}, a completion has tokens of only one version, and names it, even if the update is staged."""
    published: dict[int, ReferenceWeights] = {}
    await publish_next(subject, published)
    for i in range(subject.pace.fewer(_NUM_UPDATES)):
        num_tokens = min(subject.pace.shortened(_NUM_ENDED), subject.context_len // 4)
        running = await subject.start_running(4, max_tokens=num_tokens)
        await publish_next(subject, published, policy, staged=subject.capabilities.staging and i % 2 == 1)
        version = subject.publisher.version
        in_flight = 0
        for request, task in running:
            completion = (await task).completions[0]
            named = [span.version for span in completion.version_spans]
            require(len(named) < 2, f"a request that ran before a pause by {policy} has tokens of versions {named}")
            check_spans(subject, request, completion, published)
            in_flight += named in ([], [version - 1])
        # Not all of them: a request that was sent before a pause may reach the engine after it.
        require(in_flight > 0, f"no request that ran before version {version} was published names {version - 1}")
    await _check_all(subject, subject.start(4, 24), published)


class _Stream:
    """A stream of one completion, and the chunks that have arrived."""

    def __init__(self, what: str, request: GenerateRequest, source: AsyncIterator[CompletionChunk]) -> None:
        self.what, self.request, self._source = what, request, source
        self.chunks: list[CompletionChunk] = []
        self.may_read = asyncio.Event()
        """Cleared while the client does not read."""
        self.may_read.set()

    async def read(self) -> None:
        async for chunk in self._source:
            self.chunks.append(chunk)
            await self.may_read.wait()


@check("U-24", "updates spans streaming", deadline_s=60, look_at=_LOOK_AT)
async def streamed_versions(subject: EndpointSubject) -> None:
    """Every chunk of a stream, including a chat stream, names the version whose weights its tokens were sampled from,
    even if the client does not read while an update arrives."""
    num_slots, is_chat = subject.capabilities.max_concurrent_sequences, subject.capabilities.chat
    if num_slots == 1:
        await _check_streams(subject, 1, is_chat=False)
    if num_slots > 1 or is_chat:
        await _check_streams(subject, min(_NUM_STREAMS, num_slots), is_chat=is_chat)


async def _check_streams(subject: EndpointSubject, num: int, *, is_chat: bool) -> None:
    """Require correct versions in ``num`` simultaneous streams, of which the last is a chat stream if ``is_chat``."""
    for number in range(_NUM_TRIES):  # on a busy machine, streams may end before the updates arrive
        published: dict[int, ReferenceWeights] = {}
        num_tokens = _NUM_TOKENS << number
        await publish_next(subject, published)
        streams = [_started_stream(subject, i, num_tokens) for i in range(num - is_chat)]
        if is_chat:
            streams.append(await _started_chat_stream(subject, num_tokens))
        reading = [subject.begin(stream.read()) for stream in streams]
        for i in range(_NUM_STREAMED_UPDATES):
            seen = [len(stream.chunks) for stream in streams]
            pairs = list(zip(streams, reading, seen, strict=True))
            while any(len(it.chunks) < count + _NUM_CHUNKS and not task.done() for it, task, count in pairs):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            for stream in streams if i % 2 == 0 else ():
                stream.may_read.clear()
            await asyncio.sleep(_SAMPLED_S)
            await publish_next(subject, published, is_held_up=i % 2 == 1)
            await asyncio.sleep(_SAMPLED_S)
            for stream in streams:
                stream.may_read.set()
        await asyncio.gather(*reading)
        ended_early = ""
        for stream in streams:
            completion = assembled(0, stream.chunks)
            spans = completion.version_spans
            subject.note(**{f"chunks and spans of {stream.what}": (len(stream.chunks), _short(spans))})
            check_spans(subject, stream.request, completion, published, stream.what)
            if len(spans) < 2:
                ended_early = stream.what
        if not ended_early:
            return
    fail(f"all tokens of {ended_early} have one version: it had ended before the first update")


def _started_stream(subject: EndpointSubject, seed: int, num_tokens: int) -> _Stream:
    num_tokens = min(num_tokens, subject.context_len // 2)
    request = subject.request(subject.prompt(seed=seed), max_tokens=num_tokens, seed=seed, stream=True)
    return _Stream(f"stream {seed}", request, subject.streaming.generate_stream(request))


async def _started_chat_stream(subject: EndpointSubject, num_tokens: int) -> _Stream:
    chat, as_ids = await _long_chat(subject, num_tokens, stream=True)
    return _Stream("a chat stream", as_ids, _chunks_of_chat(subject, chat))


async def _chunks_of_chat(subject: EndpointSubject, chat: ChatCompletionRequest) -> AsyncIterator[CompletionChunk]:
    num_tokens = 0
    async for event in subject.streaming.chat_completion_stream(chat):
        for chunk in chat_chunks([event], 0):
            yield chunk.model_copy(update={"start": num_tokens})
            num_tokens += len(chunk.token_ids)


async def _long_chat(
    subject: EndpointSubject, num_tokens: int = _NUM_TOKENS, *, stream: bool = False
) -> tuple[ChatCompletionRequest, GenerateRequest]:
    """Return a chat request that stays in flight during a few updates, and a request with the ids of its rendered
    messages."""
    num_tokens = min(num_tokens, subject.context_len // 2)
    chat = subject.chat_request(max_tokens=num_tokens, ignore_eos=True, stream=stream)
    rendered = (await subject.endpoint.chat_completion(subject.chat_request(max_tokens=1))).prompt_token_ids
    return chat, subject.request(rendered).model_copy(update={"sampling": chat.sampling()})


@check("U-25", "updates", deadline_s=40, look_at=_LOOK_AT)
async def single_version(subject: EndpointSubject) -> None:
    """A completion that ran under one version names that version, whatever version binding the endpoint reports."""
    for _ in range(3):
        published: dict[int, ReferenceWeights] = {}
        await publish_next(subject, published)
        await _check_all(subject, subject.start(4, 16), published)


def _short(spans: Sequence[VersionSpan]) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in spans]


async def _check_all(subject: EndpointSubject, running: Running, published: Mapping[int, ReferenceWeights]) -> set[int]:
    """Require that the spans of every completion are exact; return the versions that they contain."""
    num_tokens = num_decisive = 0
    seen: set[int] = set()
    for request, task in running:
        completion = (await task).completions[0]
        tokens, decisive = check_spans(subject, request, completion, published)
        num_tokens, num_decisive = num_tokens + tokens, num_decisive + decisive
        seen |= {span.version for span in completion.version_spans}
    subject.note(**{"tokens": num_tokens, "tokens of one colour": num_decisive, "versions named": sorted(seen)})
    require(num_decisive > num_tokens / 4, f"only {num_decisive} of {num_tokens} tokens show their colour")
    return seen

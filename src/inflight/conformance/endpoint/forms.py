"""Level ``tokens``: complete answers, streams, chat completions and chat streams contain the same tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from inflight.base.shortened import shortened
from inflight.conformance.checks import check, look_at, require
from inflight.conformance.endpoint.aftermath import until_running
from inflight.conformance.endpoint.endings import prompt_near_the_end
from inflight.conformance.endpoint.repeats import require_repeated
from inflight.conformance.endpoint.stop_strings import NEVER, plain_text
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.endpoint.waiting import SERVED_S, SLACK_S, within
from inflight.wire import (
    AbortRequests,
    ChatCompletion,
    ChatCompletionChunk,
    ChatMessage,
    Completion,
    CompletionChunk,
    VersionSpan,
)

LEVEL = "tokens"
_NUM_WAITING = 3
"""Number of completions of a stream that are waiting for a slot when it is aborted."""
_MAX_SLOTS = 256
_NUM_CHATS = 3
"""Number of chats that are streamed, so that the text of some completions ends within a character."""


@check("E-23", "chat", deadline_s=40)
@look_at("whether prompt_token_ids are the ids that were used, and whether chat has its own sampling defaults")
async def chat_is_generate(subject: EndpointSubject) -> None:
    """A chat completion carries the tokens that generate returns for the token ids of the rendered chat, and its text
    is what these tokens decode to."""
    drawn = {"temperature": 0.9, "top_p": 0.95, **subject.repeatable(3)}
    request = subject.chat_request(n=4, max_tokens=24, logprobs=True, **drawn)
    chat = await subject.endpoint.chat_completion(request)
    as_ids = subject.request(chat.prompt_token_ids).model_copy(update={"sampling": request.sampling()})
    generated = await subject.endpoint.generate(as_ids)
    choices = chat_choices(chat)
    require(len(choices) == 4, f"n=4 returned {len(choices)} choices")
    require_repeated(subject, zip(choices, generated.completions, strict=True), "chat and generate")
    for choice, completion in zip(choices, generated.completions, strict=True):
        if choice.token_ids == completion.token_ids:
            words = f"chat ended with {choice.finish_reason!r}, generate with {completion.finish_reason!r}"
            require(choice.finish_reason == completion.finish_reason, words)
    await _require_chat_stopped(subject, chat, drawn)
    await _require_chat_filtered(subject, chat, drawn)
    await _require_whole_chat(subject, chat)
    num_completion = sum(len(choice.token_ids) for choice in choices)
    counts = (len(chat.prompt_token_ids), num_completion, len(chat.prompt_token_ids) + num_completion)
    usage = (chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens)
    require(usage == counts, f"usage counts {usage} tokens (prompt, completion, total), but there are {counts}")
    for given in chat.choices:
        found = None if given.logprobs is None else tuple(token.logprob for token in given.logprobs.content)
        require(found == given.token_logprobs, "logprobs in the OpenAI shape are not token_logprobs")
        if subject.known_reference is not None and (tokenizer := subject.known_reference.tokenizer) is not None:
            text = tokenizer.decode(list(given.token_ids), skip_special_tokens=True)
            content = given.message.content
            require(content == text, f"the message is {content!r}, but its tokens decode to {text!r}")


async def _require_whole_chat(subject: EndpointSubject, chat: ChatCompletion) -> None:
    """Require that all messages of a chat are rendered: earlier messages change its token ids."""
    request = subject.chat_request(max_tokens=1)
    rendered = {chat.prompt_token_ids}
    for first, second in (("Name two lakes.", "Yes."), ("Name two peaks.", "Yes."), ("Name two peaks.", "No.")):
        earlier = ChatMessage(role="user", content=first), ChatMessage(role="assistant", content=second)
        longer = request.model_copy(update={"messages": (*earlier, *request.messages)})
        rendered.add((await subject.endpoint.chat_completion(longer)).prompt_token_ids)
    require(len(rendered) == 4, f"4 chats that end with the same message have {len(rendered)} different prompts")


async def _require_chat_stopped(subject: EndpointSubject, chat: ChatCompletion, drawn: dict[str, Any]) -> None:
    """Require that stop strings and the temperature have the same effect on a chat completion as in generate."""
    if not (stops := _plain_pairs(chat)):
        return
    request = subject.chat_request(n=4, max_tokens=24, stop=stops, **drawn)
    stopped = await subject.endpoint.chat_completion(request)
    as_ids = subject.request(chat.prompt_token_ids).model_copy(update={"sampling": request.sampling()})
    generated = await subject.endpoint.generate(as_ids)
    what = f"chat and generate, with the stop strings {list(stops)}"
    require_repeated(subject, zip(chat_choices(stopped), generated.completions, strict=True), what)


async def _require_chat_filtered(subject: EndpointSubject, chat: ChatCompletion, drawn: dict[str, Any]) -> None:
    """Require that top_k and min_p have the same effect on a chat completion as in generate.

    Each is the only filter of its request: an engine may refuse several filters together.
    """
    for name, value in (("top_k", 3), ("min_p", 0.3)):
        request = subject.chat_request(n=4, max_tokens=24, **{**drawn, "top_p": 1.0, name: value})
        filtered = await subject.endpoint.chat_completion(request)
        as_ids = subject.request(chat.prompt_token_ids).model_copy(update={"sampling": request.sampling()})
        generated = await subject.endpoint.generate(as_ids)
        what = f"chat and generate, with {name}={value}"
        require_repeated(subject, zip(chat_choices(filtered), generated.completions, strict=True), what)


def _plain_pairs(chat: ChatCompletion) -> tuple[str, ...]:
    """Return a stop string of two plain characters from the text of each choice that contains one."""
    texts = [it.message.content for it in chat.choices]
    pairs = ([text[i : i + 2] for i in range(4, len(text) - 1)] for text in texts)
    plain = [[pair for pair in of if pair.isascii() and pair.isprintable() and " " not in pair] for of in pairs]
    return tuple(of[0] for of in plain if of)


@check("E-24", "streaming", deadline_s=40)
@look_at("whether a chunk repeats or skips tokens, and what is sent when a completion ends")
async def stream_is_generate(subject: EndpointSubject) -> None:
    """A stream carries, in contiguous chunks, what generate returns, including the token that ends the completion. The
    last chunk, and no other, has the finish reason, even if the completion was still waiting when its stream was
    aborted."""
    same = subject.repeatable(7)
    whole = await subject.endpoint.generate(subject.request(n=4, max_tokens=24, **same))
    streamed, is_split = await _streamed(subject, subject.prompt(), 4, max_tokens=24, **same)
    _require_same(subject, whole.completions, streamed, "whole and streamed")
    stops = tuple(completion.token_ids[9] for completion in whole.completions)
    cases: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
        "with stop tokens": (subject.prompt(), {"stop_token_ids": stops, "max_tokens": 24}),
        "of one token": (subject.prompt(), {"max_tokens": 1}),
        "under top_k": (subject.prompt(), {"top_k": 4, "max_tokens": 24}),
        "under top_p": (subject.prompt(), {"top_p": 0.6, "max_tokens": 24}),
    }
    if subject.known_reference is not None and subject.known_reference.eos_token_ids:
        prompt, temperature, _ = prompt_near_the_end(subject)
        at_eos = {"temperature": temperature, "ignore_eos": False, "max_tokens": 24}
        cases["with an end of sequence"] = (prompt, at_eos if subject.capabilities.seeds else {**at_eos, **same})
    if subject.known_reference is not None and (tokenizer := subject.known_reference.tokenizer) is not None:
        words = tuple(filter(None, (plain_text(tokenizer, it.token_ids, 2) for it in whole.completions)))
        if words:
            cases["with stop strings"] = (subject.prompt(), {"stop": words, "max_tokens": 24})
    for what, (prompt, sampling) in cases.items():
        sampling = {**same, **sampling}
        whole = await subject.endpoint.generate(subject.request(prompt, n=4, **sampling))
        streamed, was_split = await _streamed(subject, prompt, 4, **sampling)
        _require_same(subject, whole.completions, streamed, f"whole and streamed, {what}")
        is_split |= was_split
    # In each single stream, a server that is faster than its client may combine all tokens.
    problem = f"in each of {1 + len(cases)} streams, completions of up to 24 tokens arrived in one chunk each"
    require(is_split, problem)
    if subject.capabilities.partial_rollouts:
        await _require_waiting_ended(subject)


async def _require_waiting_ended(subject: EndpointSubject) -> None:
    """Require that each completion of an aborted stream ends with a finish reason, even one that is still waiting."""
    num_slots = subject.capabilities.max_concurrent_sequences
    if num_slots > _MAX_SLOTS:
        return
    num = num_slots + _NUM_WAITING
    request = subject.request(n=num, max_tokens=subject.remaining_tokens(), stream=True)
    chunks: list[CompletionChunk] = []

    async def read() -> None:
        async for chunk in subject.streaming.generate_stream(request):
            chunks.append(chunk)

    reading = subject.begin(read())
    what = f"a stream of {num} completions, of which {num_slots} run at a time"
    await until_running(subject, num_slots, SERVED_S, f"{what}, did not fill the slots")
    abort = AbortRequests(request_ids=(request.request_id,))
    await within(SLACK_S, subject.aborting.abort_requests(abort), f"abort_requests of {what},")
    await within(SLACK_S, reading, f"{what}, which was aborted")
    ended = {chunk.index for chunk in chunks if chunk.finish_reason is not None}
    without = [index for index in range(num) if index not in ended]
    require(
        not without, f"{what}, was aborted, and completions {shortened(without, 8)} have no chunk with a finish reason"
    )


async def _streamed(
    subject: EndpointSubject, prompt: Sequence[int], n: int, **sampling: Any
) -> tuple[list[Completion], bool]:
    """Return the completions of a stream, and whether any of them arrived in several chunks.

    Require that the chunks are contiguous and belong to the request.
    """
    request = subject.request(prompt, n=n, stream=True, **sampling)
    chunks = [chunk async for chunk in subject.streaming.generate_stream(request)]
    wrong = {chunk.request_id for chunk in chunks} - {request.request_id}
    require(not wrong, f"chunks of request {request.request_id!r} carry the ids {sorted(wrong)}")
    streamed = [assembled(index, [chunk for chunk in chunks if chunk.index == index]) for index in range(n)]
    require(len(chunks) == sum(chunk.index in range(n) for chunk in chunks), f"chunks of n={n} have a larger index")
    subject.note(chunks=len(chunks), tokens=sum(len(completion.token_ids) for completion in streamed))
    return streamed, len(chunks) > n


@check("E-29", "chat streaming", deadline_s=40)
@look_at("text that may still change (a partial character, the beginning of a stop string) is held back, then sent")
async def chat_stream_is_chat(subject: EndpointSubject) -> None:
    """A chat stream carries the tokens and the text of a chat completion, even if the text ends within a character or
    at the beginning of a stop string."""
    for seed in range(7, 7 + _NUM_CHATS):
        same = {"n": 4, "max_tokens": 24, **subject.repeatable(seed)}
        whole = await _require_chat_streamed(subject, same)
        begun = tuple(it.message.content[-1:] + NEVER for it in whole.choices)
        for stops in (_plain_pairs(whole), begun):
            if stops:
                await _require_chat_streamed(subject, {**same, "stop": stops})


async def _require_chat_streamed(subject: EndpointSubject, sampling: dict[str, Any]) -> ChatCompletion:
    """Require that a chat completion is the same whether streamed or not; return the one that was not streamed."""
    whole = await subject.endpoint.chat_completion(subject.chat_request(**sampling))
    stream = subject.streaming.chat_completion_stream(subject.chat_request(**sampling, stream=True))
    events = [event async for event in stream]
    streamed = [assembled(index, chat_chunks(events, index)) for index in range(4)]
    subject.note(events=len(events), tokens=sum(len(completion.token_ids) for completion in streamed))
    _require_same(subject, chat_choices(whole), streamed, "chat and streamed chat")
    for choice, completion in zip(whole.choices, streamed, strict=True):
        deltas = [c.delta for event in events for c in event.choices if c.index == choice.index]
        text = "".join(delta.content for delta in deltas)
        if choice.token_ids == completion.token_ids:
            require(
                text == choice.message.content, f"the deltas contain {text!r}, the message {choice.message.content!r}"
            )
        require(deltas[0].role == "assistant", f"the first delta has the role {deltas[0].role!r}")
    return whole


def _require_same(
    subject: EndpointSubject, whole: Sequence[Completion], streamed: Sequence[Completion], what: str
) -> None:
    require(len(whole) == len(streamed), f"n={len(streamed)} returned {len(whole)} completions")
    require_repeated(subject, zip(whole, streamed, strict=True), what)
    for one, other in zip(whole, streamed, strict=True):
        if one.token_ids == other.token_ids:
            require(one.finish_reason == other.finish_reason, f"{what}: {one.finish_reason} and {other.finish_reason}")
            words = f"{what}: the spans are {one.version_spans} and {other.version_spans}"
            require(one.version_spans == other.version_spans, words)


def assembled(index: int, chunks: Sequence[CompletionChunk]) -> Completion:
    """Return the completion in these chunks. Require that they are contiguous and that only the last one ends it."""
    require(chunks, f"completion {index} has no chunk")
    token_ids: list[int] = []
    logprobs: list[float] = []
    for chunk in chunks:
        come, num_tokens, num_logprobs = len(token_ids), len(chunk.token_ids), len(chunk.logprobs)
        words = f"a chunk of completion {index} starts at token {chunk.start}, but {come} tokens came before it"
        require(chunk.start == come, words)
        require(num_logprobs == num_tokens, f"a chunk has {num_tokens} tokens and {num_logprobs} logprobs")
        token_ids += chunk.token_ids
        logprobs += chunk.logprobs
    reasons = [chunk.finish_reason for chunk in chunks]
    early = [i for i, reason in enumerate(reasons[:-1]) if reason is not None]
    words = f"only the last of {len(chunks)} chunks may have a finish reason"
    require(not early, f"{words}, but these have one, counted from 0: {shortened(early, 3)}")
    require(reasons[-1] is not None, f"the last chunk of completion {index} has no finish reason")
    versions = [chunk.version for chunk in chunks for _ in chunk.token_ids]
    edges = [i for i in range(1, len(versions)) if versions[i] != versions[i - 1]]
    spans = [VersionSpan(version=versions[a], start=a, end=b) for a, b in pairwise([0, *edges, len(versions)]) if b]
    return Completion(
        index=index,
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
        version_spans=tuple(spans),
        finish_reason=reasons[-1] or "abort",
    )


def chat_choices(chat: ChatCompletion) -> list[Completion]:
    """Return the choices of a chat completion as completions."""
    fields = {"index", "token_ids", "version_spans", "finish_reason"}
    return [Completion(logprobs=c.token_logprobs, **c.model_dump(include=fields)) for c in chat.choices]


def chat_chunks(events: Iterable[ChatCompletionChunk], index: int) -> list[CompletionChunk]:
    """Return one choice of a chat stream as completion chunks. Chat chunks have no ``start``; it is computed from the
    preceding tokens."""
    chunks: list[CompletionChunk] = []
    start = 0
    for event, choice in ((e, c) for e in events for c in e.choices if c.index == index):
        same = choice.model_dump(include={"index", "token_ids", "version", "finish_reason"})
        chunks.append(CompletionChunk(request_id=event.id, start=start, logprobs=choice.token_logprobs, **same))
        start += len(choice.token_ids)
    return chunks

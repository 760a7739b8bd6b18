"""Chat in OpenAI's format, implemented on top of token ids."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pydantic

from inflight.base.requirements import require
from inflight.base.validation import describe_problems
from inflight.errors import InvalidRequestError
from inflight.wire import (
    Capabilities,
    ChatAnswer,
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatLogprobs,
    ChatTokenLogprob,
    ChatUsage,
    Completion,
    GenerateRequest,
    GenerateResponse,
    Needs,
    PromptImage,
)

_MOST_LOGPROBS = 64 * 1024
"""Maximum number of tokens whose text, bytes and logprob one response lists, at about a kilobyte per token."""


def check_chat(request: ChatCompletionRequest, can: Capabilities, *, streamed: bool = False) -> None:
    """Raise `UnsupportedError` if the endpoint does not support chat, streaming, or images in the messages.

    Raises `InvalidRequestError` if a different model is requested, if ``max_tokens`` leaves no room for a prompt, or if
    logprobs in OpenAI's format are to be streamed. Call this before the messages are rendered.
    """
    require(can, replace(Needs.of_chat(request), streaming=streamed), "this endpoint")
    if request.model != can.model:
        raise InvalidRequestError(
            f"model {request.model!r} is not served by this server; the served model is {can.model!r}"
        )
    max_tokens = request.sampling().max_tokens or 1
    if max_tokens >= can.max_model_len:
        raise InvalidRequestError(
            f"max_tokens {max_tokens} leaves no room for the messages, because prompt and completion have at most "
            f"{can.max_model_len} tokens together: lower max_tokens"
        )
    if streamed and request.logprobs:
        raise InvalidRequestError(
            "logprobs=true cannot be streamed: leave it out, and read token_logprobs, which every chunk has"
        )


def generate_request_of(
    request: ChatCompletionRequest, prompt_token_ids: Iterable[int], images: Iterable[PromptImage] = ()
) -> GenerateRequest:
    """Return the request for the rendered messages. Raises `InvalidRequestError` if it would be invalid."""
    try:
        return GenerateRequest(
            request_id=f"chatcmpl-{uuid.uuid4().hex}",
            prompt_token_ids=tuple(prompt_token_ids),
            images=tuple(images),
            sampling=request.sampling(),
            stream=request.stream,
        )
    except pydantic.ValidationError as error:
        raise InvalidRequestError(describe_problems(error)) from error


def check_logprobs(request: ChatCompletionRequest, max_tokens: int) -> None:
    """Raise `InvalidRequestError` if completions of ``max_tokens`` tokens have too many logprobs for one response."""
    if request.logprobs and request.n * max_tokens > _MOST_LOGPROBS:
        raise InvalidRequestError(
            f"logprobs=true lists the text of at most {_MOST_LOGPROBS} tokens, but the request has {request.n} "
            f"completions of up to {max_tokens} tokens: lower n or max_tokens, or read token_logprobs, which every "
            "answer has"
        )


def before_stop(text: str, stop: Iterable[str]) -> str:
    """Return the text before the first occurrence of a stop string."""
    cuts = [text.index(s) for s in stop if s in text]
    return text[: min(cuts)] if cuts else text


def chat_completion_of(
    request: ChatCompletionRequest,
    generated: GenerateRequest,
    response: GenerateResponse,
    texts: Sequence[str],
    pieces: Sequence[Sequence[str]],
) -> ChatCompletion:
    """Return a response in OpenAI's format.

    ``texts`` are the decoded completions, without special tokens. If the request asks for logprobs, ``pieces`` are the
    decoded tokens of each completion.
    """
    num_prompt, num_sampled = len(generated.prompt_token_ids), sum(len(c.token_ids) for c in response.completions)
    return ChatCompletion(
        id=response.request_id,
        created=int(time.time()),
        model=request.model,
        choices=tuple(
            ChatChoice(
                index=completion.index,
                message=ChatAnswer(role="assistant", content=before_stop(text, generated.sampling.stop)),
                finish_reason=completion.finish_reason,
                logprobs=_logprobs(completion, pieces[i]) if request.logprobs else None,
                token_ids=completion.token_ids,
                token_logprobs=completion.logprobs,
                version_spans=completion.version_spans,
            )
            for i, (completion, text) in enumerate(zip(response.completions, texts, strict=True))
        ),
        usage=ChatUsage(prompt_tokens=num_prompt, completion_tokens=num_sampled, total_tokens=num_prompt + num_sampled),
        prompt_token_ids=generated.prompt_token_ids,
    )


def _logprobs(completion: Completion, pieces: Sequence[str]) -> ChatLogprobs:
    return ChatLogprobs(
        content=tuple(
            ChatTokenLogprob(token=piece, logprob=logprob, bytes=tuple(piece.encode()))
            for piece, logprob in zip(pieces, completion.logprobs, strict=True)
        )
    )

"""Chat in the OpenAI shape, around token ids. Knows neither tokenizers nor engines."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence

import pydantic

from inflight.errors import InvalidRequestError, UnsupportedError
from inflight.wire import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    ChatUsage,
    Completion,
    GenerateRequest,
    GenerateResponse,
)


def check_chat(request: ChatCompletionRequest, *, model: str, offers_chat: bool) -> None:
    """Raise `UnsupportedError` if no chat is offered, `InvalidRequestError` if another model is asked for."""
    if not offers_chat:
        raise UnsupportedError("no chat messages are rendered here; use token ids")
    if request.model != model:
        raise InvalidRequestError(f"model {request.model!r} is not served here, {model!r} is")


def generate_request_of(request: ChatCompletionRequest, prompt_token_ids: Iterable[int]) -> GenerateRequest:
    """Return the request whose messages were rendered to these ids. Raises `InvalidRequestError` if they are none."""
    try:
        return GenerateRequest(
            request_id=f"chatcmpl-{uuid.uuid4().hex}",
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=request.sampling(),
            stream=request.stream,
        )
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise InvalidRequestError(f"{where}: {problem['msg']} (got {problem['input']!r})") from error


def before_stop(text: str, stop: Iterable[str]) -> str:
    """Return the text before the first stop string."""
    cuts = [text.index(s) for s in stop if s in text]
    return text[: min(cuts)] if cuts else text


def chat_completion_of(
    request: ChatCompletionRequest,
    generated: GenerateRequest,
    response: GenerateResponse,
    texts: Sequence[str],
    pieces: Sequence[Sequence[str]],
) -> ChatCompletion:
    """Return the OpenAI shape of what was generated.

    ``texts`` are the decoded completions, without special tokens; ``pieces`` those of each token, where the request
    asks for logprobs.
    """
    completions, has_logprobs = response.completions, bool(request.logprobs)
    num_prompt, num_sampled = len(generated.prompt_token_ids), sum(len(c.token_ids) for c in completions)
    return ChatCompletion(
        id=response.request_id,
        created=int(time.time()),
        model=request.model,
        choices=tuple(
            ChatChoice(
                index=completion.index,
                message=ChatMessage(role="assistant", content=before_stop(text, generated.sampling.stop)),
                finish_reason=completion.finish_reason,
                logprobs=_logprobs(completion, pieces[i]) if has_logprobs else None,
                token_ids=completion.token_ids,
                token_logprobs=completion.logprobs,
                version_spans=completion.version_spans,
            )
            for i, (completion, text) in enumerate(zip(completions, texts, strict=True))
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

"""Chat over SGLang's own tokenizer: its routes render messages to token ids and decode token ids to text."""

from __future__ import annotations

import time
from collections.abc import Sequence

from inflight.errors import InvalidRequestError
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
from inflight_sglang.routes import SglangRoutes, words_of


async def rendered(routes: SglangRoutes, request: ChatCompletionRequest) -> tuple[int, ...]:
    """Return the token ids of the messages behind the model's template. Raises `InvalidRequestError` if it refuses."""
    messages = [{"role": message.role, "content": message.content} for message in request.messages]
    status, answer = await routes.ask("POST", "/v1/tokenize", {"model": request.model, "messages": messages})
    if status != 200:
        raise InvalidRequestError(f"SGLang refused the messages: {words_of(answer)}")
    return tuple(answer["tokens"])


async def chat_completion_of(
    routes: SglangRoutes, request: ChatCompletionRequest, generated: GenerateRequest, response: GenerateResponse
) -> ChatCompletion:
    """Return the OpenAI shape of what was generated."""
    completions = response.completions
    texts = await _decoded(routes, [c.token_ids for c in completions], skip_special_tokens=True)
    choices = []
    for completion, text in zip(completions, texts, strict=True):
        pieces = await _decoded(routes, [[token] for token in completion.token_ids if request.logprobs])
        choices.append(_choice(completion, _cut(text, generated.sampling.stop), pieces if request.logprobs else None))
    num_prompt, num_sampled = len(generated.prompt_token_ids), sum(len(c.token_ids) for c in completions)
    return ChatCompletion(
        id=response.request_id,
        created=int(time.time()),
        model=request.model,
        choices=tuple(choices),
        usage=ChatUsage(prompt_tokens=num_prompt, completion_tokens=num_sampled, total_tokens=num_prompt + num_sampled),
        prompt_token_ids=generated.prompt_token_ids,
    )


async def _decoded(
    routes: SglangRoutes, token_ids: Sequence[Sequence[int]], *, skip_special_tokens: bool = False
) -> list[str]:
    """Return the text of each of these; SGLang decodes no empty ones."""
    asked = [list(ids) for ids in token_ids if ids]
    if not asked:
        return [""] * len(token_ids)
    answer = await routes.post("/v1/detokenize", {"tokens": asked, "skip_special_tokens": skip_special_tokens})
    texts = iter(answer["text"])
    return [str(next(texts)) if ids else "" for ids in token_ids]


def _cut(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    cuts = [text.index(s) for s in stop if s in text]
    return text[: min(cuts)] if cuts else text


def _choice(completion: Completion, text: str, pieces: Sequence[str] | None) -> ChatChoice:
    content = None
    if pieces is not None:
        content = tuple(
            ChatTokenLogprob(token=piece, logprob=logprob, bytes=tuple(piece.encode()))
            for piece, logprob in zip(pieces, completion.logprobs, strict=True)
        )
    return ChatChoice(
        index=completion.index,
        message=ChatMessage(role="assistant", content=text),
        finish_reason=completion.finish_reason,
        logprobs=None if content is None else ChatLogprobs(content=content),
        token_ids=completion.token_ids,
        token_logprobs=completion.logprobs,
        version_spans=completion.version_spans,
    )

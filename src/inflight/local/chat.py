"""Chat on top of tokens: rendering messages with the tokenizer's template, and the OpenAI shape of the answer."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

import pydantic

from inflight.errors import InvalidRequestError
from inflight.wire import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    ChatUsage,
    Completion,
    CompletionChunk,
    GenerateRequest,
    GenerateResponse,
)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """A Hugging Face tokenizer that has a chat template."""

    tokenizer: Any

    def render(self, request: ChatCompletionRequest) -> GenerateRequest:
        """Return the request with the messages as token ids. Raises `InvalidRequestError` if the template refuses."""
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise what they like
            raise InvalidRequestError(f"the chat template refused the messages: {error}") from error
        token_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        try:
            return GenerateRequest(
                request_id=f"chatcmpl-{uuid.uuid4().hex}",
                prompt_token_ids=tuple(token_ids),
                sampling=request.sampling(),
                stream=request.stream,
            )
        except pydantic.ValidationError as error:
            problem = error.errors(include_url=False, include_context=False)[0]
            where = ".".join(map(str, problem["loc"]))
            raise InvalidRequestError(f"{where}: {problem['msg']} (got {problem['input']!r})") from error

    def text(self, completion: Completion, stop: tuple[str, ...]) -> str:
        """Return the completion's text without special tokens, cut before the first stop string."""
        text: str = self.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
        cuts = [text.index(s) for s in stop if s in text]
        return text[: min(cuts)] if cuts else text


def chat_completion_of(
    chat: ChatFormat, request: ChatCompletionRequest, generated: GenerateRequest, response: GenerateResponse
) -> ChatCompletion:
    """Return the OpenAI shape of a generated answer."""
    num_prompt = len(generated.prompt_token_ids)
    num_completion = sum(len(completion.token_ids) for completion in response.completions)
    return ChatCompletion(
        id=response.request_id,
        created=int(time.time()),
        model=request.model,
        choices=tuple(_choice(chat, request, completion) for completion in response.completions),
        usage=ChatUsage(
            prompt_tokens=num_prompt, completion_tokens=num_completion, total_tokens=num_prompt + num_completion
        ),
        prompt_token_ids=generated.prompt_token_ids,
    )


def _choice(chat: ChatFormat, request: ChatCompletionRequest, completion: Completion) -> ChatChoice:
    logprobs = None
    if request.logprobs:
        tokens = [chat.tokenizer.decode([token_id]) for token_id in completion.token_ids]
        logprobs = ChatLogprobs(
            content=tuple(
                ChatTokenLogprob(token=token, logprob=logprob, bytes=tuple(token.encode()))
                for token, logprob in zip(tokens, completion.logprobs, strict=True)
            )
        )
    return ChatChoice(
        index=completion.index,
        message=ChatMessage(role="assistant", content=chat.text(completion, request.sampling().stop)),
        finish_reason=completion.finish_reason,
        logprobs=logprobs,
        token_ids=completion.token_ids,
        token_logprobs=completion.logprobs,
        version_spans=completion.version_spans,
    )


class ChatChunkWriter:
    """Turns streamed tokens into streamed text, one request at a time.

    Text is held back while it may still change: an unfinished character, or the beginning of a stop string.
    """

    def __init__(self, chat: ChatFormat, request: ChatCompletionRequest) -> None:
        self._chat = chat
        self._request = request
        self._stop = request.sampling().stop
        self._created = int(time.time())
        self._token_ids: dict[int, list[int]] = {}
        self._written: dict[int, str] = {}

    def write(self, chunk: CompletionChunk) -> ChatCompletionChunk:
        """Return the next chunk of the stream."""
        token_ids = self._token_ids.setdefault(chunk.index, [])
        token_ids += chunk.token_ids
        first = chunk.index not in self._written
        written = self._written.setdefault(chunk.index, "")
        text = self._stable_text(token_ids, finished=chunk.finish_reason is not None)
        self._written[chunk.index] = max(written, text, key=len)
        choice = ChatChunkChoice(
            index=chunk.index,
            delta=ChatDelta(role="assistant" if first else None, content=text[len(written) :]),
            finish_reason=chunk.finish_reason,
            token_ids=chunk.token_ids,
            token_logprobs=chunk.logprobs,
            version=chunk.version,
        )
        return ChatCompletionChunk(
            id=chunk.request_id, created=self._created, model=self._request.model, choices=(choice,)
        )

    def _stable_text(self, token_ids: list[int], finished: bool) -> str:
        text: str = self._chat.tokenizer.decode(token_ids, skip_special_tokens=True)
        cuts = [text.index(s) for s in self._stop if s in text]
        if cuts:
            return text[: min(cuts)]
        if finished:
            return text
        text = text.rstrip("\ufffd")
        held = max((n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        return text[: len(text) - held]

"""Answers in the formats of OpenAI's chat and completions, and of vLLM's generate, as JSON values.

Each dialect of the proxy implements `AnswerFormat`.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from inflight.environments.proxy.answers import Answer, AnswerPiece
from inflight.environments.proxy.requests import ChatRequest, CompletionRequest, ProxyGenerateRequest, Request
from inflight.environments.tools.tool_calls import openai_tool_calls
from inflight.errors import InflightError
from inflight.http.routes import STATUS_OF_CODE

_MAX_ERROR_CHARACTERS = 4000

Pieces = Callable[[Sequence[int]], list[str]]
"""Returns the text of each token, decoded separately."""


class AnswerFormat(Protocol):
    """Writes one answer for its client: whole, or as the events of a stream."""

    is_named: bool = False
    """Whether each event's ``type`` is also its SSE event name; such a stream ends without ``[DONE]``."""

    @abstractmethod
    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return a whole answer."""

    @abstractmethod
    def piece(self, piece: AnswerPiece) -> list[dict[str, Any]]:
        """Return the events of a piece; empty if it has nothing that the client requested."""

    @abstractmethod
    def end(self, answer: Answer, *, has_streamed: bool) -> list[dict[str, Any]]:
        """Return the events that end an answer. They contain the answer's tokens if none were streamed."""

    def failed(self, error: InflightError) -> list[dict[str, Any]]:
        """Return the events that end a failed stream."""
        return [error_json(error)[1]]


class OpenAIFormat(AnswerFormat):
    """The formats of OpenAI's chat completions and completions."""

    def __init__(self, request: ChatRequest | CompletionRequest, model: str, pieces: Pieces) -> None:
        self._request = request
        self._model = model
        self._pieces = pieces
        self._is_chat = isinstance(request, ChatRequest)
        self._kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        self._has_begun = False

    def whole(self, answer: Answer) -> dict[str, Any]:
        said = {"message": answer.message} if self._is_chat else {"text": answer.text}
        choice = _choice(self._request, answer, said, self._pieces)
        kind = "chat.completion" if self._is_chat else "text_completion"
        return _opening(answer.id, kind, self._model, choice) | _facts(self._request, answer)

    def piece(self, piece: AnswerPiece) -> list[dict[str, Any]]:
        is_first, self._has_begun = not self._has_begun, True
        wants_tokens = piece.chunk is not None and bool(self._request.return_token_ids or self._request.wants_logprobs)
        if not (piece.text or wants_tokens or (is_first and self._is_chat)):
            return []
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        said = {"delta": delta | {"content": piece.text}} if self._is_chat else {"text": piece.text}
        choice: dict[str, Any] = {"index": 0, **said, "logprobs": None, "finish_reason": None}
        if piece.chunk is not None:
            if self._request.wants_logprobs:
                choice["logprobs"] = _logprobs(self._is_chat, piece.chunk.token_ids, piece.chunk.logprobs, self._pieces)
            if self._request.return_token_ids:
                choice["token_ids"] = piece.chunk.token_ids
                choice["token_logprobs"] = piece.chunk.logprobs
                choice["version"] = piece.chunk.version
        return [self._chunk(piece.id, [choice])]

    def end(self, answer: Answer, *, has_streamed: bool) -> list[dict[str, Any]]:
        delta: dict[str, Any] = {}
        if answer.tool_calls:
            calls = openai_tool_calls(answer.tool_calls)
            delta = {"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]}
        said = {"delta": delta} if self._is_chat else {"text": ""}
        choice: dict[str, Any] = {"index": 0, **said, "logprobs": None, "finish_reason": answer.finish_reason}
        completion = answer.completion
        if not has_streamed and self._request.wants_logprobs:
            choice["logprobs"] = _logprobs(self._is_chat, completion.token_ids, completion.logprobs, self._pieces)
        facts: dict[str, Any] = {}
        if self._request.return_token_ids:
            facts["prompt_token_ids"] = answer.prompt_token_ids
            choice["version_spans"] = spans_json(answer)
            if not has_streamed:
                choice |= {"token_ids": completion.token_ids, "token_logprobs": completion.logprobs}
        chunks = [self._chunk(answer.id, [choice]) | facts]
        options = self._request.stream_options
        if options is not None and options.include_usage:
            chunks.append(self._chunk(answer.id, []) | {"usage": _usage(answer)})
        return chunks

    def _chunk(self, completion_id: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": completion_id,
            "object": self._kind,
            "created": int(time.time()),
            "model": self._model,
            "choices": choices,
        }


def _opening(completion_id: str, kind: str, model: str, choice: dict[str, Any]) -> dict[str, Any]:
    return {"id": completion_id, "object": kind, "created": int(time.time()), "model": model, "choices": [choice]}


def _choice(
    request: ChatRequest | CompletionRequest, answer: Answer, said: dict[str, Any], pieces: Pieces
) -> dict[str, Any]:
    completion = answer.completion
    choice = {"index": 0, **said, "logprobs": None, "finish_reason": answer.finish_reason}
    if request.wants_logprobs:
        is_chat = isinstance(request, ChatRequest)
        choice["logprobs"] = _logprobs(is_chat, completion.token_ids, completion.logprobs, pieces)
    if request.return_token_ids:
        choice["token_ids"] = completion.token_ids
        choice["token_logprobs"] = completion.logprobs
        choice["version_spans"] = spans_json(answer)
    return choice


def _facts(request: ChatRequest | CompletionRequest, answer: Answer) -> dict[str, Any]:
    tokens = {"prompt_token_ids": answer.prompt_token_ids} if request.return_token_ids else {}
    return {"usage": _usage(answer), **tokens}


def _usage(answer: Answer) -> dict[str, int]:
    num_prompt, num_sampled = len(answer.prompt_token_ids), answer.completion.num_tokens
    return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled}


def error_json(error: InflightError, status: int | None = None) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status of an error, and the error in OpenAI's format."""
    code = error.code
    status = (
        status or {"context_full": 400, "episode_over": 409, "busy": 429}.get(code) or STATUS_OF_CODE.get(code, 500)
    )
    code = {"context_full": "context_length_exceeded", "unauthorized": "invalid_api_key"}.get(code, code)
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = str(error)[:_MAX_ERROR_CHARACTERS]
    return status, {"error": {"message": message, "type": kind, "param": None, "code": code}}


def tokens_json(answer: Answer) -> dict[str, Any]:
    """Return the fields of an answer that training needs."""
    completion = answer.completion
    return {
        "prompt_token_ids": answer.prompt_token_ids,
        "token_ids": completion.token_ids,
        "token_logprobs": completion.logprobs,
        "version_spans": spans_json(answer),
    }


def spans_json(answer: Answer) -> list[dict[str, int]]:
    """Return the version spans of an answer."""
    return [{"version": it.version, "start": it.start, "end": it.end} for it in answer.completion.version_spans]


def _logprobs(is_chat: bool, token_ids: Sequence[int], logprobs: Sequence[float], pieces: Pieces) -> dict[str, Any]:
    texts = pieces(token_ids)
    if not is_chat:
        offsets = [sum(map(len, texts[:i])) for i in range(len(texts))]
        return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": offsets}
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, logprobs, strict=True)
        ]
    }


class GenerateFormat(AnswerFormat):
    """The format of vLLM's ``generate`` route."""

    def __init__(self, request: ProxyGenerateRequest, model: str) -> None:
        self._request = request
        self._model = model
        self._has_begun = False

    def whole(self, answer: Answer) -> dict[str, Any]:
        return _generated(self._request, answer, self._model)

    def piece(self, piece: AnswerPiece) -> list[dict[str, Any]]:
        chunk = piece.chunk
        if chunk is None or not chunk.token_ids:
            return []
        is_first, self._has_begun = not self._has_begun, True
        facts: dict[str, Any] = {}
        if is_first and self._request.return_token_ids:
            facts["prompt_token_ids"] = self._request.token_ids
        logprobs = _token_logprobs(self._request, chunk.token_ids, chunk.logprobs)
        return [_generate_chunk(piece.id, chunk.token_ids, logprobs) | facts]

    def end(self, answer: Answer, *, has_streamed: bool) -> list[dict[str, Any]]:
        completion = answer.completion
        token_ids, logprobs = ((), ()) if has_streamed else (completion.token_ids, completion.logprobs)
        said = _token_logprobs(self._request, token_ids, logprobs)
        last = _generate_chunk(answer.id, token_ids, said, answer.finish_reason, _weight_versions(answer))
        if not has_streamed and self._request.return_token_ids:
            last["prompt_token_ids"] = answer.prompt_token_ids
        options = self._request.stream_options
        if options is None or not options.include_usage:
            return [last]
        usage = {"request_id": answer.id, "output_mode": "tokens", "choices": [], "usage": _usage(answer)}
        return [last, usage]


def format_of(request: Request, model: str, pieces: Pieces) -> AnswerFormat:
    """Return the format of the answer to a chat, completions or generate request."""
    if isinstance(request, ProxyGenerateRequest):
        return GenerateFormat(request, model)
    return OpenAIFormat(request, model, pieces)


def _generate_chunk(
    request_id: str,
    token_ids: Sequence[int],
    logprobs: dict[str, Any] | None,
    finish_reason: str | None = None,
    weight_versions: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    choice = {
        "index": 0,
        "finish_reason": finish_reason,
        "token_ids": token_ids,
        "logprobs": logprobs,
        "weight_versions": weight_versions,
    }
    return {"request_id": request_id, "output_mode": "tokens", "choices": [choice]}


def _weight_versions(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"version": str(span.version), "start": span.start, "end": span.end} for span in answer.completion.version_spans
    ]


def _token_logprobs(
    request: ProxyGenerateRequest, token_ids: Sequence[int], logprobs: Sequence[float]
) -> dict[str, Any] | None:
    if request.sampling_params.logprobs is None:
        return None
    # `token_id` is what vLLM 0.32 sends; the client of verifiers 0.4 reads the placeholder of earlier releases.
    return {
        "content": [
            {"token_id": token_id, "token": f"token_id:{token_id}", "logprob": logprob, "top_logprobs": []}
            for token_id, logprob in zip(token_ids, logprobs, strict=True)
        ]
    }


def _generated(request: ProxyGenerateRequest, answer: Answer, model: str) -> dict[str, Any]:
    completion = answer.completion
    choice = {
        "index": 0,
        "finish_reason": answer.finish_reason,
        "token_ids": completion.token_ids,
        "logprobs": _token_logprobs(request, completion.token_ids, completion.logprobs),
        "weight_versions": _weight_versions(answer),
    }
    return {
        "request_id": answer.id,
        "output_mode": "tokens",
        "model": model,
        "created": int(time.time()),
        "choices": [choice],
        "usage": _usage(answer),
        "prompt_token_ids": answer.prompt_token_ids if request.return_token_ids else None,
        "prompt_logprobs": None,
    }

"""Anthropic's ``/v1/messages``: converts requests to chat requests, and answers to Anthropic's messages and events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from inflight.environments.proxy.answers import Answer, AnswerPiece
from inflight.environments.proxy.contents import image_part, shown, text_in
from inflight.environments.proxy.formats import AnswerFormat, error_json, tokens_json
from inflight.environments.proxy.requests import ChatRequest, ProxyBody, chat_request
from inflight.errors import InflightError, InvalidRequestError
from inflight.wire import Items, StopString, TokenCount

_BILLING = "x-anthropic-billing-header:"
"""Prefix of a line in Claude Code's system prompt that changes with each request."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
_ON_SERVERS = ("advisor_", "code_execution_", "mcp_", "tool_search_", "web_fetch_", "web_search_")
"""Prefixes of the types of tools that Anthropic's servers run."""
_EMPTY: dict[str, Any] = {"type": "object", "properties": {}}
_SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "bash_": {"type": "object", "properties": {"command": {"type": "string"}, "restart": {"type": "boolean"}}},
    "text_editor_": {
        "type": "object",
        "properties": {
            **{name: {"type": "string"} for name in ("command", "path", "file_text", "old_str", "new_str")},
            "insert_line": {"type": "integer"},
            "view_range": {"type": "array", "items": {"type": "integer"}},
        },
    },
}
"""Parameters of Anthropic's predefined tools that the client runs, keyed by the prefix of the tool's type."""


class MessagesChat(ChatRequest):
    """A request to ``/v1/messages``, converted to a chat request."""

    id_prefix: ClassVar[str] = "msg_"
    is_converted: ClassVar[bool] = True


class ToolChoice(BaseModel):
    """How the model may use tools; a call is never forced."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None

    @model_validator(mode="after")
    def _has_name(self) -> ToolChoice:
        if self.type == "tool" and not self.name:
            raise ValueError("tool_choice has the type 'tool', but no name: add the name of the tool")
        return self


class MessagesRequest(ProxyBody):
    """Body of ``/v1/messages`` and ``/v1/messages/count_tokens``."""

    _ignored: ClassVar[frozenset[str]] = frozenset(
        (
            "betas",
            "cache_control",
            "context_management",
            "diagnostics",
            "inference_geo",
            "metadata",
            "service_tier",
            "speed",
            "thinking",
            "user_profile_id",
            "workspace_id",
        )
    )

    model: str | None = Field(default=None, max_length=1024)
    messages: Items[dict[str, Any]] = Field(min_length=1)
    max_tokens: TokenCount | None = None
    system: str | Items[dict[str, Any]] | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    output_config: dict[str, Any] | None = None
    """The field ``format``, the only one that would change the answer, is refused."""
    stop_sequences: Annotated[Items[StopString], Field(max_length=64)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def as_chat(self) -> MessagesChat:
        """Return this request as a chat request. Raises `InvalidRequestError` if something cannot be converted."""
        if (self.output_config or {}).get("format") is not None:
            raise InvalidRequestError("output_config.format is not supported: omit it")
        system = "".join(_system_texts(self.system))
        messages = [{"role": "system", "content": system}] if system else []
        for number, message in enumerate(self.messages):
            messages += _chat_messages(message, f"messages.{number}")
        tools = [tool for number, it in enumerate(self.tools or ()) if (tool := _tool(it, f"tools.{number}"))]
        return chat_request(
            MessagesChat,
            model=self.model,
            messages=messages,
            tools=tools or None,
            tool_choice=self._tool_choice() if tools else None,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
        )

    def _tool_choice(self) -> Any:
        match self.tool_choice:
            case ToolChoice(type="any"):
                return "required"
            case ToolChoice(type="tool", name=name):
                return {"type": "function", "function": {"name": name}}
            case ToolChoice(type="none"):
                return "none"
        return "auto"


# ---------------------------------------------------------------------------------------------------------------
# Requests


def _system_texts(system: str | Sequence[Mapping[str, Any]] | None) -> Iterator[str]:
    """Yield the texts of a system prompt, without the billing line."""
    for block in [{"type": "text", "text": system}] if isinstance(system, str) else system or ():
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise InvalidRequestError(f"system contains {str(block)[:80]!r}: only text blocks are supported")
        lines = block["text"].splitlines(keepends=True)
        yield "".join(line for line in lines if not line.startswith(_BILLING))


def _chat_messages(message: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """Yield the chat messages that one message converts to; each tool result becomes a separate message."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidRequestError(f"{where}.role is {role!r}, but must be 'user', 'assistant' or 'system'")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where}.content is a {type(content).__name__}, but must be a string or a list")
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(content):
        at = f"{where}.content.{number}"
        match block:
            case {"type": "tool_result", "tool_use_id": str(call_id)}:
                yield {"role": "tool", "tool_call_id": call_id, "content": _parts(block.get("content"), at)}
            case {"type": "tool_result"}:
                raise InvalidRequestError(f"{at}.tool_use_id is {block.get('tool_use_id')!r}, but must be a string")
            case {"type": "tool_use", "id": str(call_id), "name": str(called)}:
                function = {"name": called, "arguments": json.dumps(block.get("input") or {})}
                calls.append({"id": call_id, "type": "function", "function": function})
            case {"type": "tool_use"}:
                raise InvalidRequestError(f"{at} is {shown(block)}, but must have an id and a name, both strings")
            case {"type": "thinking" | "redacted_thinking"}:  # not shown to the model again
                pass
            case _:
                parts.append(_part(block, at))
    if role == "assistant":
        if any(part["type"] != "text" for part in parts):
            raise InvalidRequestError(
                f"{where}.content contains an image, but the assistant's messages may contain only text and tool calls"
            )
        text = "".join(part["text"] for part in parts)
        yield {"role": role, "content": text or None, **({"tool_calls": calls} if calls else {})}
    elif parts:
        yield {"role": role, "content": parts}
    elif all(block.get("type") != "tool_result" for block in content):
        raise InvalidRequestError(
            f"{where}.content is {shown(content)}, which contains nothing for the model to see: send a string, or a "
            "list with at least one text, image or tool_result block"
        )


def _parts(content: Any, where: str) -> Any:
    """Return the content of a tool's result as the content of a chat message."""
    if not isinstance(content, list):
        return content or ""
    return [_part(block, f"{where}.content.{number}") for number, block in enumerate(content)]


def _part(block: Any, where: str) -> dict[str, Any]:
    match block:
        case {"type": "text"}:
            return {"type": "text", "text": text_in(block, "text", where)}
        case {"type": "image", "source": {"type": "base64", "media_type": str(kind), "data": str(data)}}:
            return image_part(f"data:{kind};base64,{data}", f"{where}.source")
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return image_part(url, f"{where}.source.url")
        case {"type": "image"}:
            raise InvalidRequestError(
                f"{where}.source is {shown(block.get('source'))}, but must have the type 'base64' with media_type "
                "and data, or the type 'url' with a data URL: send the image itself, because the proxy fetches nothing"
            )
    found = block.get("type") if isinstance(block, Mapping) else None
    raise InvalidRequestError(
        f"{where} has the type {str(found)[:80]!r}: only text, image, thinking, tool_use and tool_result are supported"
    )


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Return a tool in the format of chat; None for one that Anthropic's servers run."""
    kind, name = str(tool.get("type") or "custom"), tool.get("name")
    schema = next((schema for begin, schema in _SCHEMAS.items() if kind.startswith(begin)), None)
    if kind.startswith(_ON_SERVERS):
        return None
    if kind != "custom" and schema is None:
        raise InvalidRequestError(f"{where} has the type {kind[:80]!r}, which is not supported")
    if not isinstance(name, str):
        raise InvalidRequestError(f"{where}.name is {name!r}, but must be a string")
    parameters = tool.get("input_schema") or schema or _EMPTY
    function = {"name": name, "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": function}


# ---------------------------------------------------------------------------------------------------------------
# Answers


def as_messages_error(status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an error from OpenAI's format to Anthropic's format."""
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}


class MessagesFormat(AnswerFormat):
    """Anthropic's messages. Token ids, logprobs and version spans are additional fields."""

    is_named = True

    def __init__(self, model: str) -> None:
        self._model = model
        self._num_blocks = 0
        self._open: str | None = None
        """The type of the block that is being streamed."""
        self._has_begun = False

    def whole(self, answer: Answer) -> dict[str, Any]:
        usage = _usage(len(answer.prompt_token_ids), answer.completion.num_tokens)
        message = self._message(answer.id, _blocks(answer), usage)
        return message | _ending(answer) | tokens_json(answer)

    def piece(self, piece: AnswerPiece) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if not self._has_begun:
            self._has_begun = True
            message = self._message(piece.id, [], _usage(piece.num_prompt_tokens, 0))
            events.append({"type": "message_start", "message": message | {"stop_reason": None, "stop_sequence": None}})
        if piece.reasoning:
            events += self._delta("thinking", {"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.text:
            events += self._delta("text", {"type": "text_delta", "text": piece.text})
        return events

    def end(self, answer: Answer, *, has_streamed: bool) -> list[dict[str, Any]]:
        events = self._close()
        for call in answer.tool_calls:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            events += self._begin(block)
            partial = json.dumps(call.arguments, ensure_ascii=False)
            events += self._delta("tool_use", {"type": "input_json_delta", "partial_json": partial})
            events += self._close()
        if not self._num_blocks:
            events += [*self._begin({"type": "text", "text": ""}), *self._close()]
        ending = {"type": "message_delta", "delta": _ending(answer)} | tokens_json(answer)
        ending["usage"] = _usage(len(answer.prompt_token_ids), answer.completion.num_tokens)
        return [*events, ending, {"type": "message_stop"}]

    def failed(self, error: InflightError) -> list[dict[str, Any]]:
        return [as_messages_error(*error_json(error))]

    def _message(self, message_id: str, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        found = {"id": message_id, "type": "message", "role": "assistant", "model": self._model}
        return found | {"content": content, "usage": usage}

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._close()
        self._open = block["type"]
        self._num_blocks += 1
        return [*events, {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}]

    def _delta(self, kind: str, delta: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events for a delta, which first open a block of this type unless one is already open."""
        empty = {"thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}}
        events = [] if self._open == kind else self._begin({"type": kind, **empty[kind]})
        return [*events, {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}]

    def _close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._num_blocks - 1}]


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    blocks += [{"type": "tool_use", "id": it.id, "name": it.name, "input": it.arguments} for it in answer.tool_calls]
    return blocks or [{"type": "text", "text": ""}]


def _ending(answer: Answer) -> dict[str, Any]:
    if answer.stop is not None and not answer.tool_calls:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
    return {"stop_reason": _STOP_REASONS[answer.finish_reason], "stop_sequence": None}


def _usage(num_prompt_tokens: int, num_tokens: int) -> dict[str, int]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": num_prompt_tokens, "output_tokens": num_tokens, **cached}

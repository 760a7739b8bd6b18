"""OpenAI's ``/v1/responses``: converts its requests to chat requests, and answers to its items and events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from inflight.environments.proxy.answers import Answer, AnswerPiece
from inflight.environments.proxy.formats import AnswerFormat, error_json, tokens_json
from inflight.environments.proxy.requests import ChatRequest, ProxyBody, chat_request
from inflight.errors import InflightError, InvalidRequestError
from inflight.types import ToolCall
from inflight.wire import Items, TokenCount

_SHELL = {"command": {"type": "array", "items": {"type": "string"}}, "timeout_ms": {"type": "integer"}}
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Parameters of a custom tool, whose input is a single string."""
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
Conversations = MutableMapping[str, Sequence[dict[str, Any]]]
"""The chat messages up to and including each answer, keyed by the answer's id."""


class ResponsesChat(ChatRequest):
    """A request to ``/v1/responses``, converted to a chat request."""

    id_prefix: ClassVar[str] = "resp_"
    is_converted: ClassVar[bool] = True


class ResponsesRequest(ProxyBody):
    """Body of ``/v1/responses``."""

    _ignored: ClassVar[frozenset[str]] = frozenset(
        (
            "access_programs",
            "client_metadata",
            "include",
            "max_tool_calls",
            "metadata",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "reasoning",
            "safety_identifier",
            "service_tier",
            "store",
            "stream_options",
            "truncation",
            "user",
        )
    )

    model: str | None = Field(default=None, max_length=1024)
    input: str | Items[dict[str, Any]]
    instructions: str | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: TokenCount | None = None
    previous_response_id: str | None = Field(default=None, max_length=1024)
    text: dict[str, Any] | None = None
    background: Literal[False] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Literal[0] | None = None

    def as_chat(self, conversations: Conversations) -> ResponsesChat:
        """Return this request as a chat request. Raises `InvalidRequestError`, which names what cannot be converted."""
        form = (self.text or {}).get("format") or {"type": "text"}
        if form.get("type") != "text":
            raise InvalidRequestError(f"text.format is {str(form)[:80]!r}: only the type 'text' is supported")
        earlier: Sequence[dict[str, Any]] = ()
        if self.previous_response_id is not None:
            if self.previous_response_id not in conversations:
                raise InvalidRequestError(
                    f"previous_response_id {self.previous_response_id!r} is not the id of an answer of this episode"
                )
            earlier = conversations[self.previous_response_id]
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tools = [tool for number, it in enumerate(self.tools or ()) for tool in _tools(it, f"tools.{number}")]
        return chat_request(
            ResponsesChat,
            model=self.model,
            messages=[*system, *earlier, *self._messages()],
            tools=tools or None,
            tool_choice=self.tool_choice if tools else None,
            max_tokens=self.max_output_tokens,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
        )

    def _messages(self) -> list[dict[str, Any]]:
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[dict[str, Any]] = []
        for number, item in enumerate(self.input):
            message = _message(item, f"input.{number}")
            if message is None:
                continue
            last = messages[-1] if messages else {}
            if message["role"] == "assistant" == last.get("role"):  # the text and the calls of one answer
                last["content"] = (last["content"] or "") + (message["content"] or "") or None
                last["tool_calls"] = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
            else:
                messages.append(message)
        return messages


# ---------------------------------------------------------------------------------------------------------------
# Requests


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Return an item as a message of a chat; None for reasoning, which is not shown to the model again."""
    match item:
        case {"type": "reasoning"}:
            return None
        case {"type": "function_call", "call_id": str(call_id), "name": str(name)}:
            return _calling(call_id, name, item.get("arguments") or "{}")
        case {"type": "custom_tool_call", "call_id": str(call_id), "name": str(name)}:
            return _calling(call_id, name, json.dumps({"input": item.get("input") or ""}))
        case {"type": "local_shell_call", "call_id": str(call_id), "action": {"command": command}}:
            return _calling(call_id, "local_shell", json.dumps({"command": command}))
        case {
            "type": "function_call_output" | "custom_tool_call_output" | "local_shell_call_output",
            "call_id": str(call_id),
        }:
            return {"role": "tool", "tool_call_id": call_id, "content": _content(item.get("output"), f"{where}.output")}
        case {"role": "assistant"}:
            parts = _content(item.get("content"), f"{where}.content")
            text = parts if isinstance(parts, str) else "".join(part.get("text", "") for part in parts)
            return {"role": "assistant", "content": text}
        case {"role": "user" | "system" | "developer" as role}:
            return {"role": role, "content": _content(item.get("content"), f"{where}.content")}
    kind = item.get("type")
    raise InvalidRequestError(
        f"{where} has the type {str(kind)[:80]!r}: only messages, reasoning, and the calls and outputs of functions, "
        "custom tools and the local shell are supported"
    )


def _calling(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _content(content: Any, where: str) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} is a {type(content).__name__}, but must be a string or a list")
    return [_part(part, f"{where}.{number}") for number, part in enumerate(content)]


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    text = part.get(_PARTS[kind]) if kind in _PARTS else None
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"{where} has the type {str(kind)[:80]!r}: only text, refusals, and input_image with an image_url are "
            "supported"
        )
    return {"type": "text", "text": text}


def _tools(tool: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """Yield a tool, or those of a namespace, in the format of chat; nothing if the type is not supported."""
    match tool:
        case {"type": "function", "name": str(name)}:
            parameters = tool.get("parameters") or {"type": "object", "properties": {}}
        case {"type": "custom", "name": str(name)}:
            parameters = _INPUT
        case {"type": "local_shell"}:
            name, parameters = "local_shell", {"type": "object", "properties": _SHELL, "required": ["command"]}
        case {"type": "namespace", "tools": list(inner)}:
            for number, one in enumerate(inner):
                yield from _tools(one, f"{where}.tools.{number}")
            return
        case {"type": "function" | "custom"}:
            raise InvalidRequestError(f"{where}.name is {tool.get('name')!r}, but must be a string")
        case _:
            return
    function = {"name": name, "description": tool.get("description") or "", "parameters": parameters}
    yield {"type": "function", "function": function}


# ---------------------------------------------------------------------------------------------------------------
# Answers


class ResponsesFormat(AnswerFormat):
    """OpenAI's responses. Token ids, logprobs and version spans are additional fields."""

    is_named = True

    def __init__(
        self, request: ResponsesRequest, chat: ResponsesChat, model: str, conversations: Conversations
    ) -> None:
        self._request = request
        self._chat = chat
        self._model = request.model or model
        self._conversations = conversations
        self._kinds = {it.get("name", it.get("type")): it.get("type") for it in request.tools or ()}
        self._namespaces = {
            one.get("name"): it.get("name")
            for it in request.tools or ()
            if it.get("type") == "namespace"
            for one in it.get("tools") or ()
        }
        self._created = int(time.time())
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        """The items that have been streamed completely."""
        self._streamed: dict[str, Any] | None = None
        """The reasoning or the message that is being streamed."""
        self._text = ""

    def whole(self, answer: Answer) -> dict[str, Any]:
        self._keep(answer)
        items = []
        if answer.reasoning:
            items.append(_reasoning(answer.id, answer.reasoning))
        if answer.text or not answer.tool_calls:
            items.append(_said(answer.id, answer.text))
        return self._finished(answer, [*items, *map(self._call, answer.tool_calls)])

    def piece(self, piece: AnswerPiece) -> list[dict[str, Any]]:
        events = []
        if not self._num_events:
            response = self._response(piece.id, "in_progress", [])
            events += self._event("response.created", response=response)
            events += self._event("response.in_progress", response=response)
        for kind, text in (("reasoning", piece.reasoning), ("message", piece.text)):
            if text:
                events += self._delta(piece.id, kind, text)
        return events

    def end(self, answer: Answer, *, has_streamed: bool) -> list[dict[str, Any]]:
        events = self._close()
        if not self._items and not answer.tool_calls:
            events += [*self._delta(answer.id, "message", ""), *self._close()]
        for call in answer.tool_calls:
            events += self._called(self._call(call))
        self._keep(answer)
        response = self._finished(answer, self._items)
        return [*events, *self._event(f"response.{response['status']}", response=response)]

    def failed(self, error: InflightError) -> list[dict[str, Any]]:
        said = error_json(error)[1]["error"]
        response = self._response("", "failed", self._items)
        return self._event("response.failed", response=response | {"error": said})

    # ------------------------------------------------------------------------------------------------------ streaming

    def _event(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        self._num_events += 1
        return [{"type": kind, "sequence_number": self._num_events - 1, **fields}]

    def _delta(self, answer_id: str, kind: str, text: str) -> list[dict[str, Any]]:
        """Return the events that add text to the streamed reasoning or message, which they open if necessary."""
        events: list[dict[str, Any]] = []
        if self._streamed is None or self._streamed["type"] != kind:
            events += self._close()
            item = _reasoning(answer_id, "") if kind == "reasoning" else _said(answer_id, "")
            self._streamed, self._text = item, ""
            begun = item | ({"summary": []} if kind == "reasoning" else {"content": [], "status": "in_progress"})
            at = {"output_index": len(self._items)}
            events += self._event("response.output_item.added", item=begun, **at)
            part, place = self._part("")
            added = "reasoning_summary_part" if kind == "reasoning" else "content_part"
            events += self._event(f"response.{added}.added", part=part, **place)
        self._text += text
        _, place = self._part("")
        name = "reasoning_summary_text" if kind == "reasoning" else "output_text"
        if kind == "message":
            place["logprobs"] = []
        return [*events, *(self._event(f"response.{name}.delta", delta=text, **place) if text else ())]

    def _part(self, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the content part with this text, and the fields that locate it in the streamed item."""
        assert self._streamed is not None
        place = {"item_id": self._streamed["id"], "output_index": len(self._items)}
        if self._streamed["type"] == "reasoning":
            return {"type": "summary_text", "text": text}, place | {"summary_index": 0}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}, place | {"content_index": 0}

    def _close(self) -> list[dict[str, Any]]:
        item = self._streamed
        if item is None:
            return []
        part, place = self._part(self._text)
        if item["type"] == "reasoning":
            item["summary"] = [part]
            events = self._event("response.reasoning_summary_text.done", text=self._text, **place)
            events += self._event("response.reasoning_summary_part.done", part=part, **place)
        else:
            item["content"] = [part]
            events = self._event("response.output_text.done", text=self._text, logprobs=[], **place)
            events += self._event("response.content_part.done", part=part, **place)
        events += self._event("response.output_item.done", item=item, output_index=len(self._items))
        self._items.append(item)
        self._streamed = None
        return events

    def _called(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a call."""
        at = {"output_index": len(self._items)}
        text = {"function_call": "arguments", "custom_tool_call": "input"}.get(item["type"])
        begun = item | {"status": "in_progress"} | ({text: ""} if text else {})
        events = self._event("response.output_item.added", item=begun, **at)
        if text:
            kind = f"response.{item['type']}_{text}"
            at_item = at | {"item_id": item["id"]}
            events += self._event(f"{kind}.delta", delta=item[text], **at_item)
            named = {"name": item["name"]} if text == "arguments" else {}
            events += self._event(f"{kind}.done", **{text: item[text]}, **named, **at_item)
        events += self._event("response.output_item.done", item=item, **at)
        self._items.append(item)
        return events

    # ------------------------------------------------------------------------------------------------------- responses

    def _call(self, call: ToolCall) -> dict[str, Any]:
        """Return the item for a call; its type follows that of the tool in the request."""
        arguments, kind = call.arguments, self._kinds.get(call.name)
        common = {"id": f"fc_{call.id}", "call_id": call.id, "status": "completed"}
        if kind == "custom" and isinstance(arguments.get("input"), str):
            return {"type": "custom_tool_call", **common, "name": call.name, "input": arguments["input"]}
        if kind == "local_shell" and isinstance(arguments.get("command"), list):
            action = {"type": "exec", "command": arguments["command"], "env": {}}
            return {"type": "local_shell_call", **common, "action": action}
        text = json.dumps(arguments, ensure_ascii=False)
        item = {"type": "function_call", **common, "name": call.name, "arguments": text}
        return item | ({"namespace": self._namespaces[call.name]} if call.name in self._namespaces else {})

    def _keep(self, answer: Answer) -> None:
        """Store the conversation without the instructions, which apply to a single request."""
        num_instructions = int(bool(self._request.instructions))
        self._conversations[answer.id] = (*self._chat.messages[num_instructions:], dict(answer.message))

    def _finished(self, answer: Answer, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        is_cut = answer.finish_reason == "length"
        response = self._response(answer.id, "incomplete" if is_cut else "completed", items)
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        num_prompt, num_sampled = len(answer.prompt_token_ids), answer.completion.num_tokens
        response["usage"] = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_sampled,
        }
        return response | tokens_json(answer)

    def _response(self, response_id: str, status: str, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        request = self._request
        return {
            "id": response_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": {},
            "model": self._model,
            "output": list(items),
            "parallel_tool_calls": True,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": list(request.tools or ()),
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _reasoning(answer_id: str, text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": f"rs_{answer_id}", "summary": [{"type": "summary_text", "text": text}]}


def _said(answer_id: str, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    found = {"type": "message", "id": f"msg_{answer_id}", "role": "assistant", "status": "completed"}
    return found | {"content": [part]}

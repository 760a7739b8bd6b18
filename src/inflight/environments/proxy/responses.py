"""OpenAI's ``/v1/responses``: converts its requests to chat requests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from inflight.environments.proxy.answers import ChatTurn
from inflight.environments.proxy.contents import image_part, shown, text_in
from inflight.environments.proxy.requests import ChatRequest, ProxyBody, chat_request
from inflight.errors import InvalidRequestError
from inflight.wire import Items, TokenCount

_SHELL = {"command": {"type": "array", "items": {"type": "string"}}, "timeout_ms": {"type": "integer"}}
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Parameters of a custom tool, whose input is a single string."""
_ON_SERVERS = ("code_interpreter", "file_search", "image_generation", "mcp", "tool_search", "web_search")
"""Prefixes of the types of tools that OpenAI's servers run."""
_ANSWER = re.compile(r"^(?:msg|fc)_(resp_\d+)")
"""Matches the id of an item of an answer, which contains the id of the answer."""
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_NEEDED = {
    "function_call": "call_id, name and arguments as strings",
    "custom_tool_call": "call_id and name as strings",
    "local_shell_call": "call_id as a string and an action with a command",
    **dict.fromkeys(
        ("function_call_output", "custom_tool_call_output", "local_shell_call_output"), "call_id as a string"
    ),
}
"""The required fields of an item, by the item's type."""
FindTurn = Callable[[str], ChatTurn | None]
"""Returns the turn that ended with an answer, by the answer's id."""


def _known_tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    """Return a choice of a known form. Raises ``ValueError`` for others."""
    match choice:
        case (
            str()
            | {"type": "function" | "custom", "name": str()}
            | {"type": "allowed_tools", "tools": [*_]}
            | {"type": "local_shell"}
        ):
            return choice
        case {"type": str(kind)} if kind.startswith(_ON_SERVERS):
            return choice
    raise ValueError(
        f"{shown(choice)} is not supported: send 'auto', 'none' or 'required', or an object with the type 'function' "
        "or 'custom' and a name, the type 'allowed_tools' and tools, or the type of a predefined tool"
    )


ResponsesToolChoice = Annotated[
    Literal["auto", "none", "required"] | dict[str, Any], AfterValidator(_known_tool_choice)
]


class ResponsesChat(ChatRequest):
    """A request to ``/v1/responses``, converted to a chat request."""

    id_prefix: ClassVar[str] = "resp_"
    is_converted: ClassVar[bool] = True
    previous: str | None = None
    num_instructions: int = 0
    """Number of messages at the beginning that apply only to this request."""

    @property
    def continues(self) -> str | None:
        return self.previous


class ResponsesRequest(ProxyBody):
    """Body of ``/v1/responses``."""

    _ignored: ClassVar[frozenset[str]] = frozenset(
        (
            "access_programs",
            "client_metadata",
            "include",
            "max_tool_calls",
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
    tool_choice: ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: TokenCount | None = None
    metadata: dict[str, Any] | None = None
    previous_response_id: str | None = Field(default=None, max_length=1024)
    text: dict[str, Any] | None = None
    background: Literal[False] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Literal[0] | None = None

    def as_chat(self, find_turn: FindTurn) -> ResponsesChat:
        """Return this request as a chat request. Raises `InvalidRequestError` if something cannot be converted."""
        form = (self.text or {}).get("format") or {"type": "text"}
        if not isinstance(form, Mapping) or form.get("type") != "text":
            raise InvalidRequestError(f"text.format is {str(form)[:80]!r}: only the type 'text' is supported")
        try:  # the response repeats them
            json.dumps([self.tools, self.metadata], allow_nan=False)
        except ValueError as error:
            raise InvalidRequestError("tools or metadata contains a number that is not finite") from error
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages = [*system, *self._earlier(find_turn), *self._messages()]
        if not messages:
            raise InvalidRequestError("input has no messages: send a string, or a list with at least one message")
        declared = [*declared_tools(self.tools or (), "tools")]
        names = [one.name for one in declared]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InvalidRequestError(f"tools has two tools named {twice!r}, so their calls would be ambiguous")
        tools = [one.as_chat() for one in declared]
        return chat_request(
            ResponsesChat,
            model=self.model,
            previous=self.previous_response_id,
            num_instructions=len(system),
            messages=messages,
            tools=tools or None,
            tool_choice=self._tool_choice() if tools else None,
            max_tokens=self.max_output_tokens,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
        )

    def _tool_choice(self) -> Any:
        match self.tool_choice:
            case {"type": "allowed_tools"}:
                return {"type": "allowed_tools", "allowed_tools": self.tool_choice}
            case {"type": _, **named}:
                return {"type": "function", "function": {"name": str(named.get("name", ""))}}
        return self.tool_choice

    def _earlier(self, find_turn: FindTurn) -> Sequence[Mapping[str, Any]]:
        """Return the messages up to and including the answer that the request continues from."""
        if self.previous_response_id is None:
            return ()
        turn = find_turn(self.previous_response_id)
        if turn is None or not isinstance(turn.request, ResponsesChat):
            raise InvalidRequestError(
                f"previous_response_id {self.previous_response_id!r} is not the id of an answer of this episode"
            )
        return [*turn.request.messages[turn.request.num_instructions :], turn.answer.message]

    def _messages(self) -> list[dict[str, Any]]:
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[dict[str, Any]] = []
        answers: dict[str, dict[str, Any]] = {}
        """The message of each answer, by the answer's id."""
        for number, item in enumerate(self.input):
            message = _message(item, f"input.{number}")
            if message is None:
                continue
            last = messages[-1] if messages else {}
            answer_id = _answer_of(item) if message["role"] == "assistant" else None
            if answer_id in answers:
                _add(answers[answer_id], message)
            elif message["role"] == "assistant" == last.get("role") and answer_id is None:
                _add(last, message)  # the text and the calls of one answer, if its items have lost their ids
            else:
                messages.append(message)
                if answer_id is not None:
                    answers[answer_id] = message
        return messages


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Return an item as a chat message; None for reasoning, which is not shown to the model again."""
    match item:
        case {"type": "reasoning"}:
            return None
        case {"type": "function_call", "call_id": str(call_id), "name": str(name), "arguments": str(arguments)}:
            return _calling(call_id, name, arguments or "{}")
        case {"type": "custom_tool_call", "call_id": str(call_id), "name": str(name)}:
            return _calling(call_id, name, json.dumps({"input": item.get("input") or ""}))
        case {"type": "local_shell_call", "call_id": str(call_id), "action": {"command": _}}:
            shell = {name: item["action"][name] for name in _SHELL if name in item["action"]}
            return _calling(call_id, "local_shell", json.dumps(shell))
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
    if isinstance(kind, str) and kind in _NEEDED:
        raise InvalidRequestError(f"{where} is {shown(item)}, but an item of type {kind!r} must have {_NEEDED[kind]}")
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
    if kind == "input_image":
        if not isinstance(part.get("image_url"), str):
            raise InvalidRequestError(
                f"{where}.image_url is {shown(part.get('image_url'))}, but must be a string with a data URL: send "
                "the image itself, because the proxy stores no files"
            )
        return image_part(part["image_url"], f"{where}.image_url")
    if not isinstance(kind, str) or kind not in _PARTS:
        raise InvalidRequestError(
            f"{where} has the type {str(kind)[:80]!r}: only text, refusals, and input_image with an image_url are "
            "supported"
        )
    return {"type": "text", "text": text_in(part, _PARTS[kind], where)}


def _answer_of(item: Mapping[str, Any]) -> str | None:
    """Return the id of the answer to which an item belongs, if the item's own id contains it."""
    found = _ANSWER.match(item["id"]) if isinstance(item.get("id"), str) else None
    return None if found is None else found[1]


def _add(message: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add another item of an answer to the answer's message."""
    message["content"] = (message["content"] or "") + (more["content"] or "") or None
    message["tool_calls"] = [*message.get("tool_calls", []), *more.get("tool_calls", [])]


@dataclass(frozen=True, slots=True)
class DeclaredTool:
    """A tool that is offered to the model."""

    name: str
    kind: str
    description: str
    parameters: Mapping[str, Any]
    namespace: str | None = None

    def as_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def declared_tools(tools: Any, where: str, namespace: str | None = None) -> Iterator[DeclaredTool]:
    """Yield the tools to offer to the model, including those in namespaces.

    Tools that OpenAI's servers would run are omitted.

    Raises `InvalidRequestError` for any other tool.
    """
    if not isinstance(tools, list | tuple):
        raise InvalidRequestError(f"{where} is a {type(tools).__name__}, but must be a list")
    for number, tool in enumerate(tools):
        at = f"{where}.{number}"
        match tool:
            case {"type": "namespace", "name": str(name), "tools": inner}:
                yield from declared_tools(inner, f"{at}.tools", name)
                continue
            case {"type": "function" as kind, "name": str(name)}:
                parameters = tool.get("parameters") or {"type": "object", "properties": {}}
            case {"type": "custom" as kind, "name": str(name)}:
                parameters = _INPUT
            case {"type": "local_shell" as kind}:
                name, parameters = "local_shell", {"type": "object", "properties": _SHELL, "required": ["command"]}
            case {"type": str(kind)} if kind.startswith(_ON_SERVERS):
                continue
            case _:
                raise InvalidRequestError(
                    f"{at} is {str(tool)[:80]!r}: only functions and custom tools with a name, local_shell, "
                    "namespaces, and tools of OpenAI's servers are supported"
                )
        yield DeclaredTool(name, kind, tool.get("description") or "", parameters, namespace)

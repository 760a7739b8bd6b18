"""Answers in the format of OpenAI's ``/v1/responses``: items and events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from inflight.environments.proxy.answers import Answer, AnswerPiece
from inflight.environments.proxy.formats import AnswerFormat, error_json, tokens_json
from inflight.environments.proxy.responses import ResponsesRequest, declared_tools
from inflight.errors import InflightError
from inflight.types import ToolCall
from inflight.wire import SamplingParams


class ResponsesFormat(AnswerFormat):
    """OpenAI's responses. Token ids, logprobs and version spans are additional fields."""

    is_named = True

    def __init__(self, request: ResponsesRequest, model: str, sampling: SamplingParams) -> None:
        """``sampling`` contains the sampling settings in force."""
        self._request = request
        self._sampling = sampling
        self._model = request.model or model
        self._tools = {one.name: one for one in declared_tools(request.tools or (), "tools")}
        self._created = int(time.time())
        self._num_events = 0
        self._id = f"resp_{secrets.token_hex(12)}"
        """The id of the answer once it is known; before that, the id of a response that fails without an answer."""
        self._items: list[dict[str, Any]] = []
        """The items that have been streamed completely."""
        self._streamed: dict[str, Any] | None = None
        """The reasoning or the message that is being streamed."""
        self._text = ""

    def whole(self, answer: Answer) -> dict[str, Any]:
        items = []
        if answer.reasoning:
            items.append(_reasoning(answer.id, answer.reasoning))
        if answer.text or not answer.tool_calls:
            items.append(_said(answer.id, answer.text, _status(answer)))
        return self._finished(answer, [*items, *(self._call(answer.id, call) for call in answer.tool_calls)])

    def piece(self, piece: AnswerPiece) -> list[dict[str, Any]]:
        events = []
        if not self._num_events:
            self._id = piece.id
            events += self._created_events()
        for kind, text in (("reasoning", piece.reasoning), ("message", piece.text)):
            if text:
                events += self._delta(piece.id, kind, text)
        return events

    def end(self, answer: Answer, *, has_streamed: bool) -> list[dict[str, Any]]:
        events = self._close(_status(answer))
        if not answer.tool_calls and all(item["type"] != "message" for item in self._items):
            events += [*self._delta(answer.id, "message", ""), *self._close(_status(answer))]
        for call in answer.tool_calls:
            events += self._called(self._call(answer.id, call))
        response = self._finished(answer, self._items)
        return [*events, *self._event(f"response.{response['status']}", response=response)]

    def failed(self, error: InflightError) -> list[dict[str, Any]]:
        said = error_json(error)[1]["error"]
        events = [] if self._num_events else self._created_events()
        events += self._close("incomplete")
        response = self._response(self._id, "failed", self._items)
        return [*events, *self._event("response.failed", response=response | {"error": said})]

    # ------------------------------------------------------------------------------------------------------ streaming

    def _event(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        self._num_events += 1
        return [{"type": kind, "sequence_number": self._num_events - 1, **fields}]

    def _created_events(self) -> list[dict[str, Any]]:
        response = self._response(self._id, "in_progress", [])
        events = self._event("response.created", response=response)
        return [*events, *self._event("response.in_progress", response=response)]

    def _delta(self, answer_id: str, kind: str, text: str) -> list[dict[str, Any]]:
        """Return the events that add text to the streamed reasoning or message, opening it first if necessary."""
        events: list[dict[str, Any]] = []
        if self._streamed is None or self._streamed["type"] != kind:
            events += self._close()
            item = _reasoning(answer_id, "") if kind == "reasoning" else _said(answer_id, "", "in_progress")
            self._streamed, self._text = item, ""
            begun = item | ({"summary": []} if kind == "reasoning" else {"content": []})
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

    def _close(self, status: str = "completed") -> list[dict[str, Any]]:
        """Return the events that end the streamed item. A message receives ``status``."""
        item = self._streamed
        if item is None:
            return []
        part, place = self._part(self._text)
        if item["type"] == "reasoning":
            item["summary"] = [part]
            events = self._event("response.reasoning_summary_text.done", text=self._text, **place)
            events += self._event("response.reasoning_summary_part.done", part=part, **place)
        else:
            item |= {"content": [part], "status": status}
            events = self._event("response.output_text.done", text=self._text, logprobs=[], **place)
            events += self._event("response.content_part.done", part=part, **place)
        events += self._event("response.output_item.done", item=item, output_index=len(self._items))
        self._items.append(item)
        self._streamed = None
        return events

    def _called(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a tool call."""
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

    def _call(self, answer_id: str, call: ToolCall) -> dict[str, Any]:
        """Return the item for a call; its type follows that of the tool in the request."""
        arguments, tool = call.arguments, self._tools.get(call.name)
        kind = None if tool is None else tool.kind
        common = {"id": f"fc_{answer_id}_{call.id}", "call_id": call.id, "status": "completed"}
        if kind == "custom" and isinstance(arguments.get("input"), str):
            return {"type": "custom_tool_call", **common, "name": call.name, "input": arguments["input"]}
        if kind == "local_shell" and isinstance(arguments.get("command"), list):
            action = {"type": "exec", "command": arguments["command"], "env": {}}
            action |= {"timeout_ms": arguments["timeout_ms"]} if "timeout_ms" in arguments else {}
            return {"type": "local_shell_call", **common, "action": action}
        text = json.dumps(arguments, ensure_ascii=False)
        item = {"type": "function_call", **common, "name": call.name, "arguments": text}
        return item | ({"namespace": tool.namespace} if tool is not None and tool.namespace is not None else {})

    def _finished(self, answer: Answer, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        response = self._response(answer.id, _status(answer), items)
        if response["status"] == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        num_prompt, num_sampled = len(answer.prompt_token_ids), answer.completion.num_tokens
        response["usage"] = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": answer.num_reasoning_tokens},
            "total_tokens": num_prompt + num_sampled,
        }
        return response | tokens_json(answer)

    def _response(self, response_id: str, status: str, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        request, sampling = self._request, self._sampling
        return {
            "id": response_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": sampling.max_tokens,
            "metadata": request.metadata or {},
            "model": self._model,
            "output": list(items),
            "parallel_tool_calls": True,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": True,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none" if request.tool_choice == "none" else "auto",
            "tools": list(request.tools or ()),
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _reasoning(answer_id: str, text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": f"rs_{answer_id}", "summary": [{"type": "summary_text", "text": text}]}


def _status(answer: Answer) -> str:
    return "completed" if answer.completion.finish_reason == "stop" else "incomplete"


def _said(answer_id: str, text: str, status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    found = {"type": "message", "id": f"msg_{answer_id}", "role": "assistant", "status": status}
    return found | {"content": [part]}

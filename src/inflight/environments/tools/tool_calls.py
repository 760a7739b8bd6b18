"""Tool calls in a model's output, in the two notations of open models.

In the first, a reply contains ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` any number of times, among
other text (Hermes, Qwen). In the second, the reply is one JSON object ``{"name": ..., "parameters": {...}}`` (Llama 3).
"""

from __future__ import annotations

import json
import re
from typing import Any

from inflight.types import ToolCall

_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_TAG = "<tool_call>"
_PYTHON_TAG = "<|python_tag|>"


def split_tool_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Return a reply without its calls, and the calls. Text that cannot be parsed as a call stays in the reply."""
    calls: list[ToolCall] = []

    def taken(match: re.Match[str]) -> str:
        call = _call(match.group(1), len(calls))
        if call is None:
            return match.group(0)
        calls.append(call)
        return ""

    rest = _TAGGED.sub(taken, text)
    if calls:
        return rest.strip(), tuple(calls)
    whole = text.strip().removeprefix(_PYTHON_TAG)
    call = _call(whole, 0) if whole.startswith("{") else None
    return (text, ()) if call is None else ("", (call,))


def before_calls(text: str) -> str:
    """Return the prefix of a reply that cannot become part of a call, however the reply continues.

    White space at either end may still change, because it is stripped from a reply with calls.
    """
    if text[:1].isspace() or text.startswith("{") or text[: len(_PYTHON_TAG)] == _PYTHON_TAG[: len(text)]:
        return ""
    before, tag, _ = text.partition(_TAG)
    held = 0 if tag else max((n for n in range(1, len(_TAG)) if before.endswith(_TAG[:n])), default=0)
    return before[: len(before) - held].rstrip()


def openai_tool_calls(calls: tuple[ToolCall, ...] | list[ToolCall]) -> list[dict[str, Any]]:
    """Return calls in the format of OpenAI's chat completions, with arguments as JSON text."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in calls
    ]


def _loaded(text: str) -> Any:
    """Return a JSON value. Also raises ``ValueError`` for numbers and strings that JSON in UTF-8 cannot represent."""
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def _call(text: str, number: int) -> ToolCall | None:
    try:
        value = _loaded(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # some models write JSON within JSON
        try:
            arguments = _loaded(arguments)
        except (ValueError, RecursionError):
            return None
    return ToolCall(f"call_{number}", value["name"], arguments) if isinstance(arguments, dict) else None

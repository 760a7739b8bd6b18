"""The tool-calling loop: the model replies, its calls are executed, and it receives their results.

A call that cannot be executed is not an error of the run: the model receives a message that describes the problem.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from inflight.contracts import Conversation
from inflight.errors import TaskError
from inflight.types import Message, Reply, ToolCall

Tools = Mapping[str, Callable[..., Any]]
"""Functions by the names under which the model calls them. Functions that are not async run in threads."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The replies and tool calls until the model stopped calling tools or ran out of turns."""

    replies: tuple[Reply, ...]
    messages: tuple[Message, ...]
    """All replies, with the results of tools between them, in OpenAI's format."""
    num_calls: int
    num_unknown: int
    """Number of calls to unknown tools."""
    num_failed: int
    """Number of calls with invalid arguments, or during which the tool raised."""
    is_cut: bool
    """Whether the last reply calls tools that were not executed because no turn was left."""


async def use_tools(conversation: Conversation, *messages: Message | str, tools: Tools, max_turns: int) -> ToolUse:
    """Send messages and execute the model's calls, until it calls no tool or has had ``max_turns`` turns.

    The calls of one reply are executed one after the other, in order. Raises the same errors as `Conversation.say` and
    `call_tool`.
    """
    said: list[Message] = []
    outcomes: list[str] = []
    replies: list[Reply] = []
    while True:
        reply = await conversation.say(*messages)
        replies.append(reply)
        said.append(_as_message(reply))
        if not reply.tool_calls or len(replies) >= max_turns:
            break
        results = [await call_tool(call, tools) for call in reply.tool_calls]
        answers = [message for message, _ in results]
        outcomes += [outcome for _, outcome in results]
        said += answers
        messages = tuple(answers)
    return ToolUse(
        replies=tuple(replies),
        messages=tuple(said),
        num_calls=len(outcomes),
        num_unknown=outcomes.count("unknown"),
        num_failed=outcomes.count("failed"),
        is_cut=bool(reply.tool_calls),
    )


async def call_tool(call: ToolCall, tools: Tools) -> tuple[Message, str]:
    """Execute one call; return the message with its result, and ``done``, ``failed`` or ``unknown``.

    The message has TRL's format: the result as text, or ``{'error': ...}``. A `TaskError` that the tool raises
    propagates, because it means that the environment has failed, not the call.
    """
    tool = tools.get(call.name)
    if tool is None:
        result: Any = {"error": f"unknown tool {call.name}"}
        outcome = "unknown"
    else:
        try:
            inspect.signature(tool).bind(**call.arguments)
            if inspect.iscoroutinefunction(tool):
                result = await tool(**call.arguments)
            else:
                result = await asyncio.to_thread(tool, **call.arguments)
                if inspect.isawaitable(result):
                    result = await result
            outcome = "done"
        except TaskError:
            raise
        except Exception as error:  # tools are user code
            result, outcome = {"error": str(error) or repr(error)}, "failed"
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": str(result)}, outcome


def _as_message(reply: Reply) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in reply.tool_calls
        ]
    return message

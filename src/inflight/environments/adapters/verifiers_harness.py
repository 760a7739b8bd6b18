"""A verifiers harness that runs in this process; other harnesses are programs that are installed for each episode.

It plays the same episodes as the library's own ``null`` harness: a prompt, and the tools of the taskset over MCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatLoop"]

_CONNECT_S = 60.0


class ChatLoopConfig(vf.HarnessConfig):  # type: ignore[misc]
    """The configuration of `ChatLoop`, which has no options of its own."""


class ChatLoop(vf.Harness[ChatLoopConfig]):  # type: ignore[misc]
    """Calls the model until a reply has no tool calls, the agent's `max_turns` is reached, or the task stops the
    episode.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None, max_retries=0)
            )
            create: Any = client.chat.completions.create
            tools: list[Any] = []
            dispatch: dict[str, Any] = {}
            servers: dict[str, Any] = {}
            if mcp_urls:
                specs = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
                config = {"mcpServers": specs}
                tools, dispatch, servers = await asyncio.wait_for(connect_mcp(config, stack, set()), _CONNECT_S)
            while True:
                answer = await create(model=ctx.model, messages=messages, **({"tools": tools} if tools else {}))
                said = answer.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                if not said.tool_calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in said.tool_calls:
                    result = await _result(call, dispatch, servers)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def _result(call: Any, dispatch: dict[str, Any], servers: dict[str, Any]) -> Any:
    name = call.function.name
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError as error:
        return f"error: the arguments are not JSON: {error}"
    if not isinstance(arguments, dict):
        return f"error: the arguments are a {type(arguments).__name__}, not an object"
    if name not in dispatch:
        return f"error: unknown tool {name!r}"
    return await call_mcp(servers, dispatch, name, arguments)

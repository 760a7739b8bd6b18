"""An agent of the OpenAI Agents SDK, whose default is ``/v1/responses``; runs in the environment of the SDK."""

from __future__ import annotations

import asyncio
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def main() -> None:
    """Print the agent's last answer, or stream it."""
    set_tracing_disabled(disabled=True)
    agent = Agent(name="calculator", instructions="Be brief.", tools=[multiply], model="m")
    if "--stream" in sys.argv:
        streamed = Runner.run_streamed(agent, "What is 6 * 7?")
        async for _ in streamed.stream_events():
            pass
        print(streamed.final_output)
    else:
        print((await Runner.run(agent, "What is 6 * 7?")).final_output)


asyncio.run(main())

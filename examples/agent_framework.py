"""An agent of a framework, as in the framework's documentation, that is trained through the recording proxy.

    pip install openai-agents

It is a command like `agent.py`: ``command = ["python", "examples/agent_framework.py"]`` in ``task.params``. The items
have ``a`` and ``b``, and the reward is 1 if the answer names their product. Any framework that takes an OpenAI base URL
works the same.
"""

from __future__ import annotations

import asyncio
import json
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def main() -> None:
    set_tracing_disabled(True)
    item = json.loads(sys.stdin.readline())
    agent = Agent(
        name="calculator",
        instructions="Use the tool for every product.",
        tools=[multiply],
        model=OpenAIChatCompletionsModel(model="policy", openai_client=AsyncOpenAI()),
    )
    result = await Runner.run(agent, f"What is {item['a']} * {item['b']}?", max_turns=4)
    print(json.dumps({"reward": float(str(item["a"] * item["b"]) in str(result.final_output))}))


if __name__ == "__main__":
    asyncio.run(main())

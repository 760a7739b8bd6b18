"""Requests of real agents, kept without their texts: the shapes that later releases of the proxy have to accept."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parent / "recorded"
_LONGEST = 60
CALLS: dict[str, dict[str, Any]] = {
    "claude_code": {"name": "Bash", "arguments": {"command": "expr 6 \\* 7", "description": "multiply"}},
    "codex": {"name": "exec_command", "arguments": {"cmd": "expr 6 \\* 7"}},
    "agents_sdk": {"name": "multiply", "arguments": {"a": 6, "b": 7}},
    "streamed_agents_sdk": {"name": "multiply", "arguments": {"a": 6, "b": 7}},
}
"""The call of a tool that the script makes, by agent."""


def texts_of(name: str) -> list[str]:
    """Return the two answers that the script gives to an agent."""
    return [f"I will compute it.\n<tool_call>\n{json.dumps(CALLS[name])}\n</tool_call>", "It is 42."]


def without_texts(value: Any, keep: tuple[str, ...] = ()) -> Any:
    """Return a JSON value in which each long text is replaced by a short one: equal texts by equal ones.

    Descriptions and the schemas of tools are left out. Texts that begin with one of ``keep`` stay.
    """
    if isinstance(value, dict):
        is_tool = "input_schema" in value or "parameters" in value or value.get("type") == "namespace"
        return {
            key: {"type": "object"} if key in ("input_schema", "parameters") else without_texts(one, keep)
            for key, one in value.items()
            if not (is_tool and key == "description")
        }
    if isinstance(value, list):
        return [without_texts(one, keep) for one in value]
    if isinstance(value, str) and len(value) > _LONGEST and not value.startswith(keep or "\0"):
        return f"[{len(value)} characters, {blake2b(value.encode(), digest_size=4).hexdigest()}]"
    return value


def read(name: str) -> list[dict[str, Any]]:
    """Return the requests of an agent, each with the path that it was sent to."""
    requests: list[dict[str, Any]] = json.loads((DIRECTORY / f"{name}.json").read_text())
    return requests


def write(name: str, requests: list[dict[str, Any]]) -> None:
    """Keep the requests of an agent."""
    DIRECTORY.mkdir(exist_ok=True)
    text = json.dumps(without_texts(requests, ("x-anthropic-billing-header:",)), indent=1, ensure_ascii=False)
    (DIRECTORY / f"{name}.json").write_text(text + "\n")

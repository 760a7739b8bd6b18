"""Finds the conversation that a client continues, using the messages that the client sends.

A client of OpenAI's API sends the whole history with every request. A request continues a conversation if it begins
with that conversation's messages, including the model's answers, unchanged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.environments.transcripts import Transcript
from inflight.types import Message

Tools = Sequence[Mapping[str, Any]]


@dataclass(slots=True, eq=False)
class _Node:
    """One history of messages, up to and including some message."""

    transcript: Transcript | None = None
    """The conversation up to the last answer that ended here."""
    next: dict[bytes, _Node] = field(default_factory=dict)


class Histories:
    """The conversations of one episode, each stored under the messages that its client has seen."""

    def __init__(self) -> None:
        self._root = _Node()

    def find(self, history: Sequence[bytes]) -> tuple[Transcript, int] | None:
        """Return the longest conversation that a history continues, and how many messages it covers."""
        node, found = self._root, None
        for number, message in enumerate(history):
            if (later := node.next.get(message)) is None:
                break
            node = later
            if node.transcript is not None:
                found = node.transcript, number
        return found

    def add(self, history: Sequence[bytes], transcript: Transcript) -> None:
        """Store a conversation under the history that its client has seen; the last message is the model's answer."""
        node = self._root
        for message in history:
            node = node.next.setdefault(message, _Node())
        node.transcript = transcript


def history_of(messages: Sequence[Message], tools: Tools) -> list[bytes]:
    """Return the digests that identify a history: one for the tools, and one for each message."""
    return [_digest(list(tools)), *map(identity, messages)]


def identity(message: Message) -> bytes:
    """Return a digest that is equal for equivalent messages.

    Absent, None and empty fields are equivalent, and white space in the arguments of a call is ignored.
    """
    said = _without_nothing(message)
    said["tool_calls"] = [_without_nothing(call) | _function_of(call) for call in message.get("tool_calls") or ()]
    return _digest(said)


def _function_of(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return {}
    return {"function": _without_nothing(function) | {"arguments": read_arguments(function.get("arguments"))}}


def read_arguments(arguments: Any) -> Any:
    """Parse the arguments of a call, which clients send as JSON text. Text that is not JSON is returned unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _without_nothing(value: Any) -> Any:
    """Return a JSON value without the keys whose values are None or empty, at any depth."""
    if isinstance(value, Mapping):
        kept = {key: _without_nothing(one) for key, one in value.items()}
        return {key: one for key, one in kept.items() if one is not None and one not in ("", [], {})}
    return [_without_nothing(one) for one in value] if isinstance(value, list | tuple) else value


def _digest(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()

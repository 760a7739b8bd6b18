"""Reasoning in ``<think>`` tags before an answer.

Tool calls inside the reasoning are not parsed. Some clients receive the reasoning separately.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Literal

from inflight.environments.tools.tool_calls import before_calls, split_tool_calls
from inflight.types import ToolCall

OPENS, CLOSES = "<think>", "</think>"

Reasoning = Literal["kept", "split"]
"""``kept``: reasoning stays in the text, with its tags. ``split``: it is returned separately."""


def opens_reasoning(prompt: str) -> bool:
    """Return whether a rendered prompt ends with the tag that opens the reasoning."""
    return prompt.rstrip().endswith(OPENS)


def split_reasoning(text: str, *, is_open: bool, is_whole: bool) -> tuple[str, str]:
    """Return the reasoning at the beginning of a reply, and the text after it.

    ``is_open`` states that the prompt already ends with the opening tag. If the reply is still incomplete
    (``is_whole`` is False), only the parts that can no longer change are returned.
    """
    begun = text.lstrip()
    if not is_open and not begun.startswith(OPENS):
        is_undecided = not is_whole and OPENS.startswith(begun)
        return "", "" if is_undecided else text
    thought, is_closed, rest = begun.removeprefix(OPENS).partition(CLOSES)
    if not is_closed:
        return (thought.strip(), "") if is_whole else ("", "")
    return thought.strip(), rest.lstrip()


def num_reasoning_tokens(token_ids: Sequence[int], plain: Callable[[Sequence[int]], str]) -> int:
    """Return the number of tokens up to and including the closing tag, or of all tokens if the tag is missing.

    ``plain`` decodes tokens.
    """
    return bisect.bisect_left(range(len(token_ids)), True, key=lambda n: CLOSES in plain(token_ids[:n]))


def whole_reply(
    said: str, reasoning: Reasoning, *, is_open: bool, may_call: bool
) -> tuple[str, str, tuple[ToolCall, ...]]:
    """Return the reasoning (empty if it is kept), the text and the tool calls of a whole reply."""
    thought, kept = "", ""
    if reasoning == "split":
        thought, said = split_reasoning(said, is_open=is_open, is_whole=True)
    elif may_call:
        kept, said = _behind_reasoning(said, is_open=is_open)
    text, calls = split_tool_calls(said) if may_call else (said, ())
    return thought, (kept + text).rstrip() if calls else kept + text, calls


def certain_reply(said: str, reasoning: Reasoning, *, is_open: bool, may_call: bool) -> tuple[str, str]:
    """Return the parts of an incomplete reply's reasoning and text that can no longer change."""
    thought, kept = "", ""
    if reasoning == "split":
        thought, said = split_reasoning(said, is_open=is_open, is_whole=False)
    elif may_call:
        kept, said = _behind_reasoning(said, is_open=is_open)
    return thought, (kept + before_calls(said)).rstrip() if may_call else said


def _behind_reasoning(said: str, *, is_open: bool) -> tuple[str, str]:
    """Return a reply's reasoning with its tags and the white space after them, and the text that follows.

    The text is empty if the reasoning has no closing tag.
    """
    if not is_open and not said.lstrip().startswith(OPENS):
        return "", said
    thought, closes, rest = said.partition(CLOSES)
    num_spaces = len(rest) - len(rest.lstrip())
    return thought + closes + rest[:num_spaces], rest[num_spaces:]

"""Reasoning in ``<think>`` tags before an answer, for clients that receive it separately from the text."""

from __future__ import annotations

from typing import Literal

OPENS, _CLOSES = "<think>", "</think>"

Reasoning = Literal["kept", "split", "opened"]
"""``kept``: reasoning stays in the text. ``split``: it is returned separately. ``opened``: the same, and the prompt
already ends with the opening tag."""


def split_reasoning(text: str, reasoning: Reasoning, *, is_whole: bool) -> tuple[str, str]:
    """Return the reasoning at the beginning of a reply, and the text after it.

    If the reply is still incomplete, only the part that can no longer change is returned.
    """
    if reasoning == "kept":
        return "", text
    begun = text.lstrip()
    if reasoning == "split" and not begun.startswith(OPENS):
        is_undecided = not is_whole and OPENS.startswith(begun)
        return "", "" if is_undecided else text
    thought, is_closed, rest = begun.removeprefix(OPENS).partition(_CLOSES)
    if not is_closed:
        return (thought.strip(), "") if is_whole else ("", "")
    return thought.strip(), rest.lstrip()

"""Tokenizing texts whose length clients choose, with memory proportional to the size of the context.

A tokenizer needs about a hundred bytes for each character and each token. A text that cannot fit is therefore refused
before it is tokenized, and long texts are tokenized one at a time.
"""

from __future__ import annotations

import threading
from typing import Any

from inflight.errors import ContextFullError

LONG_TEXT = 16 * 1024
"""Texts of up to this many characters are tokenized without being checked, because they need little memory."""
_MOST_PER_TOKEN = 32
"""Largest average number of characters per token: prose has four, and code has fewer."""
_SLACK = 64
"""Largest number of additional tokens that result from cutting a text in two."""
_one_at_a_time = threading.Lock()


def tokenise(tokenizer: Any, text: str, max_tokens: int | None, *, add_special_tokens: bool = False) -> list[int]:
    """Return the tokens of a text. Raises `ContextFullError` if it cannot fit in a context of ``max_tokens``.

    A text that is only slightly too long is still tokenized. Blocks: call it in a thread if the text is long.
    """
    if len(text) <= LONG_TEXT:
        return _ids(tokenizer, text, add_special_tokens)
    with _one_at_a_time:
        if max_tokens is not None:
            _refuse_too_long(tokenizer, text, max_tokens)
        return _ids(tokenizer, text, add_special_tokens)


def _refuse_too_long(tokenizer: Any, text: str, max_tokens: int) -> None:
    num_tokens = 0
    if len(text) <= LONG_TEXT + _MOST_PER_TOKEN * max_tokens:
        for start in range(0, len(text), LONG_TEXT):
            num_tokens += len(_ids(tokenizer, text[start : start + LONG_TEXT], False)) - _SLACK
            if num_tokens > max_tokens:
                break
        else:
            return
    raise ContextFullError(
        f"the rendered text of {len(text)} characters does not fit in the context of {max_tokens} tokens: shorten it"
    )


def _ids(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    return ids

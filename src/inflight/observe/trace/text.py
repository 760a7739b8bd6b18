"""The text of each token of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_OVERLAP = 8
"""Tokens that are decoded again as context for the tokens after them, because some tokenizers join neighbours."""
_UNFINISHED = "\ufffd"


def pieces_of(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> list[str]:
    """Return what each token adds to the text; a token within a character adds nothing, and its last one all of it."""
    pieces: list[str] = []
    read = 0
    for end in range(1, len(token_ids) + 1):
        start = max(0, read - _OVERLAP)
        before, after = decode(token_ids[start:read]), decode(token_ids[start:end])
        is_last = end == len(token_ids)
        is_whole = after.startswith(before) and (is_last or not after.endswith(_UNFINISHED))
        pieces.append(after[len(before) :] if is_whole else "")
        read = end if is_whole else read
    return pieces

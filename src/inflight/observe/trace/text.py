"""The text of each token of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_OVERLAP = 8
"""Number of tokens that are decoded again as context, because some tokenizers join adjacent tokens."""
_UNFINISHED = "\ufffd"


def pieces_of(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds. If several tokens form one character, the last of them adds the whole
    character.
    """
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

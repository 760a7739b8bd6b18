"""Text of tokens that arrive one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inflight.http.chat import before_stop

_OVERLAP = 8
"""Number of tokens that are decoded again with the following tokens, because some tokenizers merge neighbours."""
_UNFINISHED = "\ufffd"


class StreamedText:
    """Collects the text of one completion, and returns the part that no later token changes.

    It holds back an unfinished character and the beginning of a stop string. Each call decodes a few of the last tokens
    only, so that the cost of a token does not grow with the completion.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        self._read = 0
        """Tokens whose text is in ``_text``."""
        self._text = ""
        self._is_stopped = False

    def add(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the text so far that no later token can change."""
        self._token_ids += token_ids
        if not self._is_stopped:
            self._text += self._new_text()
            before = before_stop(self._text, self._stop)
            self._is_stopped = len(before) < len(self._text)
            self._text = before
        if self._is_stopped:
            return self._text
        held = max((n for s in self._stop for n in range(1, len(s)) if self._text.endswith(s[:n])), default=0)
        return self._text[: len(self._text) - held]

    def whole(self) -> str:
        """Return the text of all tokens that were added, up to a stop string, decoded at once."""
        return before_stop(self._decode(self._token_ids), self._stop)

    def _new_text(self) -> str:
        """Return the text of the tokens not yet decoded, unless it ends within a character."""
        start = max(0, self._read - _OVERLAP)
        before, after = self._decode(self._token_ids[start : self._read]), self._decode(self._token_ids[start:])
        if after.endswith(_UNFINISHED) or not after.startswith(before):
            return ""
        self._read = len(self._token_ids)
        return after[len(before) :]

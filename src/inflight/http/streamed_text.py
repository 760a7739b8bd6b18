"""Decodes the text of tokens that arrive one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inflight.http.chat import before_stop

_OVERLAP = 8
"""Number of tokens that are decoded again with the following tokens, because some tokenizers merge neighbours."""
_UNFINISHED = "\ufffd"


class StreamedText:
    """Collects the text of one completion, and returns the part that later tokens can no longer change.

    It holds back an incomplete character and the beginning of a stop string. Each call decodes only the last few
    tokens, so that the cost per token does not grow with the completion.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        self._read = 0
        """Number of tokens whose text is in ``_text``."""
        self._text = ""
        self._is_stopped = False

    def add(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return all text so far that later tokens can no longer change."""
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
        """Return the text of all added tokens, decoded together, up to a stop string."""
        return before_stop(self._decode(self._token_ids), self._stop)

    def _new_text(self) -> str:
        """Return the text of the tokens not yet decoded, or an empty string if it ends within a character."""
        start = max(0, self._read - _OVERLAP)
        before, after = self._decode(self._token_ids[start : self._read]), self._decode(self._token_ids[start:])
        if after.endswith(_UNFINISHED) or not after.startswith(before):
            return ""
        self._read = len(self._token_ids)
        return after[len(before) :]

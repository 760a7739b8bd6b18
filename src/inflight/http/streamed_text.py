"""Decodes tokens that arrive one by one, into plain text and into chat chunks in OpenAI's format."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import NamedTuple

from inflight.http.chat import before_stop
from inflight.wire import ChatChunkChoice, ChatCompletionChunk, ChatCompletionRequest, ChatDelta, CompletionChunk

_OVERLAP = 8
"""Number of tokens that are decoded again with the following tokens, because some tokenizers merge neighbours."""
_UNFINISHED = "\ufffd"


class _Boundary(NamedTuple):
    """A point between two tokens that is not inside a character."""

    num_tokens: int
    num_chars: int
    """Length of the text of the tokens before the boundary."""


class StreamedText:
    """Collects the text of one completion, and returns the part that later tokens can no longer change.

    It holds back an incomplete character and the beginning of a stop string. New tokens are decoded in one call, from a
    boundary shortly before them, so that the cost per token does not grow with the completion. The text between the
    boundary and the new tokens is known already, and shows where the new text begins.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self.token_ids: list[int] = []
        self._text = ""
        self._is_stopped = False
        self._boundaries = deque([_Boundary(0, 0)])
        """Boundaries in order. Decoding begins at the first, and the last is the end of ``_text``."""
        self._proven = self._boundaries[0]
        """The last boundary from which decoding reproduced the known text."""

    def add(self, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
        """Add tokens, and return the part of the text that no later token can change."""
        return self.certain(decode(self.extend(token_ids)))

    def extend(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Add tokens, and return the tokens to decode; pass their text to `certain`."""
        self.token_ids += token_ids
        return self.token_ids[self._boundaries[0].num_tokens :]

    def certain(self, decoded: str) -> str:
        """Return the part of the text that no later token can change."""
        if not self._is_stopped:
            self._note(decoded)
            before = before_stop(self._text, self._stop)
            self._is_stopped = len(before) < len(self._text)
            self._text = before
        if self._is_stopped:
            return self._text
        held = max((n for s in self._stop for n in range(1, len(s)) if self._text.endswith(s[:n])), default=0)
        return self._text[: len(self._text) - held]

    def _note(self, decoded: str) -> None:
        """Add the text of the tokens not yet decoded, unless the text ends within a character."""
        begin = self._boundaries[0]
        known = self._text[begin.num_chars :]
        if decoded.endswith(_UNFINISHED):
            return
        for before in (known, known.removeprefix(" ")):  # some tokenizers omit a space at the beginning
            if decoded.startswith(before):
                self._proven = begin
                self._text += decoded[len(before) :]
                self._boundaries.append(_Boundary(len(self.token_ids), len(self._text)))
                self._move()
                return
        if self._proven != begin:  # the text depends on earlier tokens: decode the new tokens again, with those
            self._boundaries.appendleft(self._proven)

    def _move(self) -> None:
        """Begin decoding at a later boundary if enough text is known after it.

        White space alone is not enough: it would not show whether the tokenizer omits a space at the beginning.
        """
        while len(self._boundaries) > 1:
            num_tokens, num_chars = self._boundaries[1]
            if self._boundaries[-1].num_tokens - num_tokens < _OVERLAP or not self._text[num_chars:].strip():
                return
            self._boundaries.popleft()


async def chat_chunks_of(
    request: ChatCompletionRequest,
    chunks: AsyncGenerator[CompletionChunk, None],
    decode: Callable[[Sequence[int]], Awaitable[str]],
) -> AsyncGenerator[ChatCompletionChunk, None]:
    """Yield streamed tokens with their text.

    ``decode`` returns the text of tokens, without special tokens. It is called once for each chunk.
    """
    created, stop = int(time.time()), request.sampling().stop
    texts = [StreamedText(stop) for _ in range(request.n)]
    written = [""] * request.n
    begun: set[int] = set()
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            text, before = texts[chunk.index], written[chunk.index]
            latest = text.extend(chunk.token_ids)
            if chunk.finish_reason is None:
                certain = text.certain(await decode(latest))
            else:
                certain = before_stop(await decode(text.token_ids), stop)
            written[chunk.index] = max(before, certain, key=len)
            choice = ChatChunkChoice(
                index=chunk.index,
                delta=ChatDelta(role=None if chunk.index in begun else "assistant", content=certain[len(before) :]),
                finish_reason=chunk.finish_reason,
                token_ids=chunk.token_ids,
                token_logprobs=chunk.logprobs,
                version=chunk.version,
            )
            begun.add(chunk.index)
            yield ChatCompletionChunk(id=chunk.request_id, created=created, model=request.model, choices=(choice,))

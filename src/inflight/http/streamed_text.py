"""Text of tokens that arrive one by one, alone and in the OpenAI format."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from inflight.http.chat import before_stop
from inflight.wire import ChatChunkChoice, ChatCompletionChunk, ChatCompletionRequest, ChatDelta, CompletionChunk

_OVERLAP = 8
"""Number of tokens that are decoded again with the following tokens, because some tokenizers merge neighbours."""
_UNFINISHED = "\ufffd"


class StreamedText:
    """Collects the text of one completion, and returns the part that later tokens can no longer change.

    It holds back an incomplete character and the beginning of a stop string. Each call decodes only the last few
    tokens, so that the cost per token does not grow with the completion.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self.token_ids: list[int] = []
        self._read = 0
        """Number of tokens whose text is in ``_text``."""
        self._text = ""
        self._is_stopped = False

    def add(self, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
        """Add tokens, and return the text so far that no later token can change."""
        return self.certain(*map(decode, self.extend(token_ids)))

    def extend(self, token_ids: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Add tokens, and return the two sequences of tokens whose texts `certain` takes."""
        self.token_ids += token_ids
        start = max(0, self._read - _OVERLAP)
        return self.token_ids[start : self._read], self.token_ids[start:]

    def certain(self, before: str, after: str) -> str:
        """Return the text so far that no later token can change."""
        if not self._is_stopped:
            self._text += self._new_text(before, after)
            before = before_stop(self._text, self._stop)
            self._is_stopped = len(before) < len(self._text)
            self._text = before
        if self._is_stopped:
            return self._text
        held = max((n for s in self._stop for n in range(1, len(s)) if self._text.endswith(s[:n])), default=0)
        return self._text[: len(self._text) - held]

    def _new_text(self, before: str, after: str) -> str:
        """Return the text of the tokens not yet decoded, unless it ends within a character."""
        if after.endswith(_UNFINISHED) or not after.startswith(before):
            return ""
        self._read = len(self.token_ids)
        return after[len(before) :]


async def chat_chunks_of(
    request: ChatCompletionRequest,
    chunks: AsyncGenerator[CompletionChunk, None],
    decode: Callable[[Sequence[Sequence[int]]], Awaitable[Sequence[str]]],
) -> AsyncGenerator[ChatCompletionChunk, None]:
    """Yield streamed tokens with their text. ``decode`` returns the text of each sequence, without special tokens."""
    created, stop = int(time.time()), request.sampling().stop
    texts = [StreamedText(stop) for _ in range(request.n)]
    written = [""] * request.n
    begun: set[int] = set()
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            text, before = texts[chunk.index], written[chunk.index]
            decoded, longer = await decode(text.extend(chunk.token_ids))
            certain = text.certain(decoded, longer)
            if chunk.finish_reason is not None:  # all tokens, decoded at once
                (whole,) = await decode([text.token_ids])
                certain = before_stop(whole, stop)
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

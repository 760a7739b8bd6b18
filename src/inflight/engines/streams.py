"""The tokens that an engine's server streams, as the contract's chunks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.base.tasks import cancel_and_wait, start
from inflight.engines.version_labels import spans_of
from inflight.wire import CompletionChunk, FinishReason, GenerateRequest, VersionSpan


@dataclass(slots=True)
class _UnreadChunk:
    """Consecutive tokens of one completion and of one version that the caller has not read yet."""

    index: int
    start: int
    version: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class TokenStream:
    """The chunks of one request, which are kept until the caller reads them.

    An abort therefore does not wait for a slow caller. Tokens that nobody has read form one chunk for each completion
    and version, so that they need no more memory than the completions themselves. ``version`` returns the version of a
    completion without tokens.
    """

    def __init__(self, request: GenerateRequest, version: Callable[[], int]) -> None:
        self._request = request
        self._version = version
        self._num_tokens = [0] * request.sampling.n
        self._unread: deque[_UnreadChunk] = deque()
        self._last: dict[int, _UnreadChunk] = {}
        """The last unread chunk of each completion."""
        self._was_changed = asyncio.Event()

    def num_tokens(self, index: int) -> int:
        """Return how many tokens of a completion have been added."""
        return self._num_tokens[index]

    def add(
        self,
        index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        labelled: Iterable[Mapping[str, Any]] | None,
        finish_reason: FinishReason | None,
    ) -> None:
        """Add tokens of a completion. ``labelled`` contains the labels of all of its tokens so far; see `spans_of`."""
        begin, end = self._num_tokens[index], self._num_tokens[index] + len(token_ids)
        self._num_tokens[index] = end
        spans: Sequence[VersionSpan] = spans_of(labelled, end)
        parts = [(span.version, max(span.start, begin), span.end) for span in spans if span.end > begin]
        if not parts and finish_reason is not None:
            parts = [(spans[-1].version if spans else self._version(), end, end)]
        for version, first, last in parts:
            chunk = self._last.get(index)
            if chunk is None or chunk.version != version:
                chunk = self._last[index] = _UnreadChunk(index, first, version)
                self._unread.append(chunk)
            chunk.token_ids += token_ids[first - begin : last - begin]
            chunk.logprobs += logprobs[first - begin : last - begin]
            chunk.finish_reason = finish_reason if last == end else None
        self._was_changed.set()

    async def read(self, sample: Callable[[], Coroutine[Any, Any, None]]) -> AsyncGenerator[CompletionChunk, None]:
        """Yield the chunks that ``sample`` adds. Its exceptions propagate, and closing the iterator cancels it."""
        task = start(sample())
        task.add_done_callback(lambda _: self._was_changed.set())
        try:
            while self._unread or not task.done():
                if self._unread:
                    yield self._take()
                else:
                    self._was_changed.clear()
                    await self._was_changed.wait()
            await task
        finally:
            await cancel_and_wait(task)

    def _take(self) -> CompletionChunk:
        chunk = self._unread.popleft()
        if self._last[chunk.index] is chunk:
            del self._last[chunk.index]
        return CompletionChunk(
            request_id=self._request.request_id,
            index=chunk.index,
            start=chunk.start,
            token_ids=tuple(chunk.token_ids),
            logprobs=tuple(chunk.logprobs),
            version=chunk.version,
            finish_reason=chunk.finish_reason,
        )

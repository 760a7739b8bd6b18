"""The tokens that an engine's server streams, as the contract's chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from inflight.base.tasks import cancel_and_wait, start
from inflight.engines.version_labels import spans_of
from inflight.wire import CompletionChunk, FinishReason, GenerateRequest, VersionSpan


class TokenStream:
    """The chunks of one request, which are kept until the caller reads them.

    An abort therefore does not wait for a slow caller. ``version`` returns the version of a completion without tokens.
    """

    def __init__(self, request: GenerateRequest, version: Callable[[], int]) -> None:
        self._request = request
        self._version = version
        self._num_tokens = [0] * request.sampling.n
        self._chunks: asyncio.Queue[CompletionChunk | None] = asyncio.Queue()

    def num_tokens(self, index: int) -> int:
        """Return how many tokens of a completion were added."""
        return self._num_tokens[index]

    def add(
        self,
        index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        labelled: Iterable[Mapping[str, Any]] | None,
        finish_reason: FinishReason | None,
    ) -> None:
        """Add tokens of a completion. ``labelled`` labels all of its tokens so far, see `spans_of`."""
        begin, end = self._num_tokens[index], self._num_tokens[index] + len(token_ids)
        self._num_tokens[index] = end
        spans: Sequence[VersionSpan] = spans_of(labelled, end)
        parts = [(span.version, max(span.start, begin), span.end) for span in spans if span.end > begin]
        if not parts and finish_reason is not None:
            parts = [(spans[-1].version if spans else self._version(), end, end)]
        for version, first, last in parts:
            chunk = CompletionChunk(
                request_id=self._request.request_id,
                index=index,
                start=first,
                token_ids=tuple(token_ids[first - begin : last - begin]),
                logprobs=tuple(logprobs[first - begin : last - begin]),
                version=version,
                finish_reason=finish_reason if last == end else None,
            )
            self._chunks.put_nowait(chunk)

    async def read(self, sample: Callable[[], Coroutine[Any, Any, None]]) -> AsyncGenerator[CompletionChunk, None]:
        """Yield the chunks that ``sample`` adds. Raises its exception, and ends it when the iterator is closed."""
        task = start(sample())
        task.add_done_callback(lambda _: self._chunks.put_nowait(None))
        try:
            while (chunk := await self._chunks.get()) is not None:
                yield chunk
            await task
        finally:
            await cancel_and_wait(task)

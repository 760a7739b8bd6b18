"""Requests to an engine whose weights change while they run: what fits, when to send, and which prefixes to reuse.

An engine's prefix cache outlives an update under ``keep``. Each request therefore carries the label of the weights as
the key of its prefixes, so that it never continues a prefix that other weights computed. Knows no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from inflight.engines.labels import began_under_another
from inflight.errors import BusyError, InvalidRequestError, ProtocolError
from inflight.wire import GenerateRequest

Item = TypeVar("Item")


def check_fit(request: GenerateRequest, *, max_model_len: int, vocab_size: int) -> None:
    """Raise `InvalidRequestError` if a request is too long for the model, or has token ids outside its vocabulary."""
    num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    room = max_model_len - num_prompt
    if room < 1 or (max_tokens or 1) > room:
        raise InvalidRequestError(
            f"{num_prompt} prompt tokens and max_tokens {max_tokens} exceed max_model_len {max_model_len}"
        )
    largest = max(request.prompt_token_ids)
    if largest >= vocab_size:
        raise InvalidRequestError(f"token id {largest} is outside the vocabulary of {vocab_size} tokens")


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn errors from reading a malformed answer into `ProtocolError`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ProtocolError(f"{path} did not answer with a completion: {error!r}") from error


class RequestGate:
    """The requests of one client, which wait for ``is_open`` while it changes the engine's weights."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.num_sent = 0
        """Completions sent and not yet answered."""
        self._ids: set[str] = set()

    @property
    def has_requests(self) -> bool:
        """Whether requests run, or wait for the gate."""
        return bool(self._ids)

    def refuse_if_busy(self) -> None:
        """Raise `BusyError` if requests run, or wait for the gate."""
        if self._ids:
            raise BusyError(f"{len(self._ids)} requests run or wait: memory can be released once they have ended")

    async def sample(
        self,
        request: GenerateRequest,
        label: Callable[[], Awaitable[str]],
        send: Callable[[Mapping[int, str]], Awaitable[list[Item]]],
        labelled: Callable[[Item], Iterable[Mapping[str, Any]] | None],
    ) -> list[Item]:
        """Return what the engine samples for each completion, never behind a prefix that other weights computed.

        ``label`` asks the engine for the label of its weights, and raises if they cannot be sampled from. ``send``
        takes the cache key of each completion by its index, and samples those completions. ``labelled`` returns what
        `began_under_another` takes. Raises `InvalidRequestError` for the id of a running request.
        """
        if request.request_id in self._ids:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use by a running request")
        self._ids.add(request.request_id)
        try:
            current = await self._passed(label)
            items = await self._sent(send, dict.fromkeys(range(request.sampling.n), current))
            with reading("the engine"):
                late = [i for i, item in enumerate(items) if began_under_another(labelled(item), current)]
            if late:
                await self._passed(label)  # an update under way goes first
                again = await self._sent(send, {index: uuid.uuid4().hex for index in late})
                for index, item in zip(late, again, strict=True):
                    items[index] = item
            return items
        finally:
            self._ids.discard(request.request_id)

    async def _passed(self, label: Callable[[], Awaitable[str]]) -> str:
        """Return the label of the engine's weights, once requests may be sent.

        Asks for each request, because any other client may have changed the weights.
        """
        while True:
            await self.is_open.wait()
            current = await label()
            if self.is_open.is_set():
                return current

    async def _sent(
        self, send: Callable[[Mapping[int, str]], Awaitable[list[Item]]], cache_keys: Mapping[int, str]
    ) -> list[Item]:
        self.num_sent += len(cache_keys)
        try:
            return await send(cache_keys)
        finally:
            self.num_sent -= len(cache_keys)

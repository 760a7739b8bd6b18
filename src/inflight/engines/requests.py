"""Requests to an engine whose weights change while they run: limits, when to send them, and how to end them.

An engine's prefix cache survives an update with the policy ``keep``. Each request therefore carries the label of the
weights as the key of its cached prefixes, so that it never continues a prefix that other weights computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from inflight.base.tasks import any_of
from inflight.engines.version_labels import began_under_another
from inflight.errors import BusyError, InvalidRequestError, ProtocolError
from inflight.wire import Completion, GenerateRequest, ScoreRequest

Item = TypeVar("Item")

_MAX_SCORINGS = 5
_AGAIN_S = 0.05
"""Seconds after which an engine is asked again to end a request that it has not answered."""


@dataclass(frozen=True, slots=True)
class SentRequest:
    """The engine's request for one completion."""

    name: str
    """The engine's name for the request: unique, and not a prefix of another name."""
    cache_key: str
    """Completions with different keys do not share cached prefixes."""
    label: str | None = None
    """The label of the weights, if the key is shared: a completion whose first token has another label is sampled
    again."""


class Unsampled(Enum):
    """Takes the place of the engine's response for a completion for which nothing was sampled."""

    PAUSED = "paused"
    """The engine is paused, and has refused the request instead of keeping it until sampling resumes."""


def check_scored(request: ScoreRequest, *, max_model_len: int, vocab_size: int) -> None:
    """Raise `InvalidRequestError` if a request has too many tokens for the model, or ids outside its vocabulary.

    Engines sample one more token after those that they score.
    """
    if (num_tokens := len(request.token_ids)) >= max_model_len:
        raise InvalidRequestError(
            f"the request has {num_tokens} tokens to score, but this server scores at most {max_model_len - 1}: "
            "shorten it"
        )
    largest = max(request.token_ids + tuple(token for row in request.candidates for token in row))
    if largest >= vocab_size:
        raise InvalidRequestError(f"token id {largest} is outside the vocabulary of {vocab_size} tokens")


def check_fit(request: GenerateRequest, *, max_model_len: int, vocab_size: int) -> None:
    """Raise `InvalidRequestError` if a request is too long for the model, or has token ids outside its vocabulary."""
    num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    room = max_model_len - num_prompt
    if room < 1 or (max_tokens or 1) > room:
        raise InvalidRequestError(
            f"{num_prompt} prompt tokens and max_tokens {max_tokens} exceed max_model_len {max_model_len}: shorten "
            "the prompt, or lower max_tokens"
        )
    largest = max(request.prompt_token_ids)
    if largest >= vocab_size:
        raise InvalidRequestError(f"token id {largest} is outside the vocabulary of {vocab_size} tokens")


@contextlib.contextmanager
def protocol_errors(path: str) -> Iterator[None]:
    """Convert errors from parsing a malformed response into `ProtocolError`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ProtocolError(f"{path} did not answer with a completion: {error!r}") from error


@dataclass(eq=False, slots=True)
class _RunningRequest:
    """One request of this client."""

    asked: Mapping[int, SentRequest] = field(default_factory=dict)
    """The completions, by index, that were sent to the engine and have not been answered."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class RequestGate:
    """The requests of one client, which wait for ``is_open`` while the client changes the engine's weights."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.is_open.set()
        self._running: dict[str, _RunningRequest] = {}

    @property
    def has_requests(self) -> bool:
        """Whether requests are running or waiting for the gate."""
        return bool(self._running)

    @property
    def num_sent(self) -> int:
        """Number of completions requested from the engine and not yet returned."""
        return sum(len(running.asked) for running in self._running.values())

    def refuse_if_busy(self) -> None:
        """Raise `BusyError` if requests are running or waiting for the gate."""
        if self._running:
            raise BusyError(
                f"{len(self._running)} requests are running or waiting: memory can be released only after they "
                "have ended"
            )

    async def sample(
        self,
        request: GenerateRequest,
        label: Callable[[], Awaitable[str]],
        send: Callable[[Mapping[int, SentRequest]], Awaitable[Sequence[Item | Unsampled]]],
        labelled: Callable[[Item], Iterable[Mapping[str, Any]] | None],
        resumed: Callable[[], Awaitable[None]] | None = None,
    ) -> list[Item | None]:
        """Return the engine's response for each completion. None of them continues a cached prefix of other weights.

        An item is None if its completion was aborted before any token was sampled for it. ``label`` asks the engine for
        the label of its weights, and raises an error if they cannot be sampled from. ``send`` receives the completions
        by their index and samples them. ``labelled`` returns the labels of an item's tokens in the format that
        `began_under_another` accepts. ``resumed`` returns once an engine that has answered `Unsampled` samples again;
        it is None if the engine never gives that answer. Raises `InvalidRequestError` for the id of a running request.
        """
        items: list[Item | None] = [None] * request.sampling.n
        with self._register(request.request_id) as running:
            current = await self._wait_at_gate(label, running)
            if current is None:
                return items
            keys = dict.fromkeys(range(request.sampling.n), current)
            found = await _sent(send, running, _sent_requests(request.request_id, keys, current))
            again: dict[int, str] = {}
            for index, item in enumerate(found):
                with protocol_errors("the engine"):
                    if isinstance(item, Unsampled) or began_under_another(labelled(item), current):
                        again[index] = uuid.uuid4().hex
                    else:
                        items[index] = item
            while again:
                if any(isinstance(item, Unsampled) for item in found):
                    await _unless_aborted(running, resumed)
                if await self._wait_at_gate(label, running) is None:  # an update in progress takes precedence
                    break
                found = await _sent(send, running, _sent_requests(request.request_id, again))
                for index, item in zip(tuple(again), found, strict=True):
                    if not isinstance(item, Unsampled):
                        items[index] = item
                        del again[index]
            return items

    async def score(
        self,
        request_id: str,
        label: Callable[[], Awaitable[str]],
        send: Callable[[Mapping[int, SentRequest]], Awaitable[Sequence[Item | Unsampled]]],
        labelled: Callable[[Item], Iterable[Mapping[str, Any]] | None],
        resumed: Callable[[], Awaitable[None]] | None = None,
    ) -> tuple[Item, str]:
        """Return the engine's response to one request, and the label of the weights that computed all of it.

        The engine samples one token after the scored ones. If this token's label equals the label before the request,
        the weights did not change in between. The parameters are those of `sample`. Raises `BusyError` if the weights
        change during every attempt, and `InvalidRequestError` if the id belongs to a running request or if this request
        is aborted.
        """
        with self._register(request_id) as running:
            num_scorings = 0
            while num_scorings < _MAX_SCORINGS:
                current = await self._wait_at_gate(label, running)
                if current is None:
                    break
                (item,) = await _sent(send, running, _sent_requests(request_id, {0: current}))
                if isinstance(item, Unsampled):
                    await _unless_aborted(running, resumed)
                    continue
                num_scorings += 1
                with protocol_errors("the engine"):
                    labels = list(labelled(item) or ())
                    if not labels and not running.aborted.is_set():
                        raise ValueError("the sampled token has no version label")
                    if labels and not began_under_another(labels, current):
                        return item, current
            if running.aborted.is_set():
                raise InvalidRequestError(f"request {request_id!r} was aborted before its tokens were scored")
            raise BusyError(
                f"the weights changed during each of {_MAX_SCORINGS} attempts to score request {request_id!r}: send "
                "it again later"
            )

    @contextlib.contextmanager
    def _register(self, request_id: str) -> Iterator[_RunningRequest]:
        if request_id in self._running:
            raise InvalidRequestError(f"request id {request_id!r} is in use by a running request")
        running = self._running[request_id] = _RunningRequest()
        try:
            yield running
        finally:
            del self._running[request_id]
            running.over.set()

    async def abort(self, request_ids: Iterable[str], end: Callable[[Sequence[str]], Awaitable[None]]) -> None:
        """End requests, and return once they have ended.

        ``end`` asks the engine to end the completions whose names it receives. It is called repeatedly until all of the
        requests have ended, because an engine ignores the names of completions that have not arrived yet.
        """
        aborted = [running for i in request_ids if (running := self._running.get(i)) is not None]
        for running in aborted:
            running.aborted.set()
        while aborted := [running for running in aborted if not running.over.is_set()]:
            if names := [asked.name for running in aborted for asked in running.asked.values()]:
                await end(names)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_S):
                    for running in aborted:
                        await running.over.wait()

    async def _wait_at_gate(self, label: Callable[[], Awaitable[str]], running: _RunningRequest) -> str | None:
        """Return the label of the engine's weights, once requests may be sent; None if ``running`` was aborted.

        The label is fetched for each request, because another client may have changed the weights.
        """
        while True:
            await _first_of(self.is_open, running.aborted)
            if running.aborted.is_set():
                return None
            current = await label()
            if self.is_open.is_set():
                return None if running.aborted.is_set() else current


def unsampled_completion(index: int) -> Completion:
    """Return a completion that was aborted before anything was sampled for it."""
    return Completion(index=index, token_ids=(), logprobs=(), version_spans=(), finish_reason="abort")


def _sent_requests(request_id: str, cache_keys: Mapping[int, str], label: str | None = None) -> dict[int, SentRequest]:
    """Return the engine's requests for the completions with these indices."""
    name = f"{len(request_id)}:{request_id}/{uuid.uuid4().hex[:12]}/"
    return {index: SentRequest(f"{name}{index}.", key, label) for index, key in cache_keys.items()}


async def _sent(
    send: Callable[[Mapping[int, SentRequest]], Awaitable[Sequence[Item | Unsampled]]],
    running: _RunningRequest,
    asked: Mapping[int, SentRequest],
) -> Sequence[Item | Unsampled]:
    running.asked = asked
    try:
        return await send(asked)
    finally:
        running.asked = {}


async def _unless_aborted(running: _RunningRequest, resumed: Callable[[], Awaitable[None]] | None) -> None:
    """Return once the engine has resumed or ``running`` has been aborted."""
    assert resumed is not None, (
        "the engine refused a request while it was paused, but its endpoint cannot report when it resumes"
    )
    await any_of(resumed(), running.aborted.wait())


async def _first_of(*events: asyncio.Event) -> None:
    """Return once one of these events has happened."""
    if any(event.is_set() for event in events):
        return
    await any_of(*(event.wait() for event in events))

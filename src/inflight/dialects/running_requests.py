"""The requests that a dialect has sent to its endpoints, so that a client can end them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inflight.base.tasks import cancel_and_wait, finish_all, start
from inflight.contracts import AbortingEndpoint, InferenceEndpoint, ScoringEndpoint
from inflight.dialects.directory_updates import DirectoryUpdates
from inflight.dialects.serving import EndpointPool
from inflight.engines.requests import unsampled_completion
from inflight.errors import DeadlineError, UnsupportedError, UpdateAbortedError
from inflight.http.incoming_requests import run_while_connected
from inflight.wire import (
    AbortRequests,
    ChatCompletion,
    ChatCompletionRequest,
    GenerateRequest,
    GenerateResponse,
    InFlightPolicy,
    ScoreRequest,
    ScoreResponse,
)

_ANSWER_S = 0.5
"""How long, in seconds, endpoints may take to answer requests that a pause has ended."""
_REFUSING = (InFlightPolicy.DRAIN, InFlightPolicy.ABORT)


T = TypeVar("T")


@dataclass(slots=True)
class _RunningRequest:
    """One request of a client, under the name that the client uses."""

    name: str
    endpoint: InferenceEndpoint
    calling: asyncio.Task[Any]
    num_completions: int
    is_ended: bool = False
    """Whether this class ended the request, without a token."""


class RunningRequests:
    """Sends requests to the endpoints of ``pool``. ``updates`` is None if clients cannot pause sampling."""

    def __init__(self, pool: EndpointPool, updates: DirectoryUpdates | None) -> None:
        self._pool = pool
        self._updates = updates
        self._draining: set[asyncio.Task[None]] = set()
        """Pauses that wait until no request runs."""
        self._running: dict[str, _RunningRequest] = {}
        """The running requests, by the ids that the endpoints use."""

    @property
    def num_completions(self) -> int:
        """The number of completions that the running requests asked for."""
        return sum(running.num_completions for running in self._running.values())

    def refusal(self) -> Response | None:
        """Return the answer that refuses new requests, or None if they are accepted.

        As in vLLM 0.33, new requests are refused during a pause that ends running requests or lets them finish. With
        ``keep``, they wait.
        """
        policy = None if self._updates is None else self._updates.pause_policy
        return self.paused_answer() if self._draining or policy in _REFUSING else None

    def paused_answer(self) -> Response:
        """Return the answer to a request that the client has to send again."""
        message = "sampling is paused; send the request again after it is resumed"
        error = {"message": message, "type": "ServiceUnavailableError", "param": None, "code": 503}
        return JSONResponse({"error": error}, 503)

    async def generate(self, request: Request, asked: GenerateRequest, name: str | None) -> GenerateResponse:
        """Return the completions for a client's request. The request ends if the client disconnects."""
        answer = await self._run(request, lambda it: it.generate(asked), asked.request_id, name, asked.sampling.n)
        if answer is None:
            nothing = [unsampled_completion(index) for index in range(asked.sampling.n)]
            return GenerateResponse(request_id=asked.request_id, completions=tuple(nothing))
        return answer

    async def chat(self, request: Request, asked: ChatCompletionRequest) -> ChatCompletion | None:
        """Return a chat completion, or None if the request was ended before the endpoint answered."""
        request_id = f"chat-{uuid.uuid4().hex}"
        return await self._run(request, lambda it: it.chat_completion(asked), request_id, None, asked.n)

    async def _run(
        self,
        request: Request,
        call: Callable[[InferenceEndpoint], Awaitable[T]],
        request_id: str,
        name: str | None,
        num: int,
    ) -> T | None:
        """Return the answer of the least loaded endpoint, or None if this class ended the request."""
        with self._pool.least_loaded() as endpoint:
            calling = start(run_while_connected(request, call(endpoint)))
            running = self._running[request_id] = _RunningRequest(name or request_id, endpoint, calling, num)
            try:
                await asyncio.wait({calling})
            finally:
                del self._running[request_id]
                await cancel_and_wait(calling)
        return None if running.is_ended else calling.result()

    async def pause(self, updates: DirectoryUpdates, in_flight: InFlightPolicy) -> None:
        """Pause sampling on the endpoints, and ensure that every running request is handled as the policy requires.

        With ``drain``, requests that have already arrived finish first, and new ones are refused until then. With
        ``abort``, requests that reached an endpoint after its pause began end without a token. Raises `DeadlineError`
        if requests do not finish within the time limit of an update, and the errors of `DirectoryUpdates.pause`.
        """
        if in_flight is InFlightPolicy.DRAIN:
            draining = start(self._wait_until_idle(updates.timeout_s))
            self._draining.add(draining)
            try:
                await asyncio.wait({draining})
                if draining.cancelled():
                    raise UpdateAbortedError("sampling was resumed before the running requests had ended")
                draining.result()
                await updates.pause(in_flight)
            finally:
                self._draining.discard(draining)
                await cancel_and_wait(draining)
            return
        await updates.pause(in_flight)
        if in_flight is InFlightPolicy.ABORT:
            await self._end_all()

    async def resume(self, updates: DirectoryUpdates) -> None:
        """End a pause, even one that still waits for requests."""
        await cancel_and_wait(*self._draining)
        await updates.resume()

    async def _wait_until_idle(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while calls := {running.calling for running in self._running.values()}:
            await asyncio.wait(calls, timeout=max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline and any(not call.done() for call in calls):
                raise DeadlineError(f"{len(self._running)} requests were still running after {timeout_s:g} s")
            await asyncio.sleep(0)  # their callers forget them

    async def _end_all(self) -> None:
        """Return once no request is running. Called after a pause that ends running requests.

        Requests that endpoints received after the pause began would wait there; after `_ANSWER_S` they are ended
        without a token.
        """
        calls = {running.calling: running for running in self._running.values()}
        if not calls:
            return
        _, late = await asyncio.wait(calls, timeout=_ANSWER_S)
        for calling in late:
            calls[calling].is_ended = True
        await cancel_and_wait(*late)

    async def score(self, request: Request, asked: ScoreRequest) -> ScoreResponse:
        """Return the logprobs of given tokens. Raises `UnsupportedError` if the endpoint does not support scoring."""
        with self._pool.least_loaded() as endpoint:
            if not isinstance(endpoint, ScoringEndpoint) or not (await endpoint.capabilities()).scoring:
                raise UnsupportedError(f"{endpoint.name} does not support scoring, which prompt_logprobs require")
            return await run_while_connected(request, endpoint.score(asked))

    async def abort(self, names: Collection[str]) -> None:
        """End the running requests with these names, or all running requests if no names are given.

        Raises `UnsupportedError` if an endpoint cannot end requests.
        """
        ids: dict[InferenceEndpoint, list[str]] = {}
        for request_id, running in self._running.items():
            if not names or running.name in names:
                ids.setdefault(running.endpoint, []).append(request_id)
        calls = []
        for endpoint, found in ids.items():
            if not isinstance(endpoint, AbortingEndpoint) or not (await endpoint.capabilities()).partial_rollouts:
                raise UnsupportedError(f"{endpoint.name} cannot end running requests")
            calls.append(endpoint.abort_requests(AbortRequests(request_ids=tuple(found))))
        await finish_all(*calls)

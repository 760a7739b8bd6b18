"""Generation over vLLM's route for token ids, for endpoints with and without inflight's plug-in."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from inflight.base.tasks import run_together
from inflight.engines.attached import AttachedEndpoint
from inflight.engines.requests import SentRequest, Unsampled, protocol_errors
from inflight.engines.routes import EngineRoutes
from inflight.engines.streams import TokenStream
from inflight.engines.version_labels import began_under_another
from inflight.errors import DeadlineError
from inflight.wire import Capabilities, GenerateRequest, GenerateResponse, SamplingParams
from inflight_vllm.requests import (
    GENERATE,
    bodies_of,
    check_placed,
    check_request,
    check_sampling,
    choices_of,
    is_refused_for_now,
    response_of,
    tokens_of,
    version_labels_of,
)

LABEL = "/weight_info"
_RESUMED_S = 0.05
"""Seconds between checks of whether a server that refuses requests during a pause has resumed."""


class _RefusedForNowError(Exception):
    """vLLM has refused a stream that may be sent again."""


class GeneratingEndpoint(AttachedEndpoint):
    """One server with vLLM's routes; ``requests`` is used for sampling, and ``routes`` for everything else."""

    def __init__(
        self, routes: EngineRoutes, requests: EngineRoutes, *, close_s: float, generate_timeout_s: float
    ) -> None:
        super().__init__(routes, label_path=LABEL, close_s=close_s)
        self._requests = requests
        self._generate_timeout_s = generate_timeout_s
        self._speculates = False  # set by `_attach`
        self._resuming = asyncio.Lock()
        self._sampled_at = 0.0
        """The time at which the server last reported that it was not paused."""

    def _check_sampling(self, sampling: SamplingParams, can: Capabilities) -> None:
        check_sampling(sampling, can, speculates=self._speculates)

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Return the completions. Cancelling the call closes its connection, which ends the request in vLLM."""
        can = await self.capabilities()
        check_request(request, can, speculates=self._speculates)

        async def send(asked: Mapping[int, SentRequest]) -> list[Any]:
            bodies = bodies_of(request, can, asked)
            answers = await run_together(*(self._sampled(body) for body in bodies))
            check_placed(request, [answer for answer in answers if answer is not Unsampled.PAUSED])
            return [
                choice
                for body, answer in zip(bodies, answers, strict=True)
                for choice in (
                    [answer] * body["sampling_params"]["n"] if answer is Unsampled.PAUSED else choices_of([answer])
                )
            ]

        return response_of(request, await self._sample(request, send))

    async def _stream(self, request: GenerateRequest, stream: TokenStream) -> list[Any]:
        can = await self.capabilities()
        check_request(request, can, speculates=self._speculates)

        async def send(asked: Mapping[int, SentRequest]) -> list[Any]:
            indices = iter(asked)
            calls = []
            for body in bodies_of(request, can, asked):
                group = [next(indices) for _ in range(body["sampling_params"]["n"])]
                calls.append(self._read(request, body, group, asked, stream))
            return list(itertools.chain(*await run_together(*calls)))

        return await self._sample(request, send)

    async def _read(
        self,
        request: GenerateRequest,
        body: Mapping[str, Any],
        indices: Sequence[int],
        asked: Mapping[int, SentRequest],
        stream: TokenStream,
    ) -> list[Any]:
        """Add what vLLM streams, and return the last part of each completion.

        If other weights sampled the first token of a completion, its first part is returned without being added, and
        the completion is sampled again. So is a completion that vLLM refused because it is paused.
        """
        last: dict[int, Any] = {}
        others: set[int] = set()
        is_placed = False

        def refusal_of(path: str, status: int, answer: Any) -> Exception:
            if is_refused_for_now(status, answer) and not any(map(stream.num_tokens, indices)):
                return _RefusedForNowError()
            return self._requests.refusal_of(path, status, answer)

        events = self._requests.events(GENERATE, {**body, "stream": True}, self._generate_timeout_s, refusal_of)
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    if not is_placed:
                        check_placed(request, [event])
                        is_placed = True
                    with protocol_errors(GENERATE):
                        for choice in event["choices"]:
                            index = indices[choice["index"]]
                            if index in others:
                                continue
                            last[index], (token_ids, logprobs) = choice, tokens_of(choice)
                            labels, label = version_labels_of(choice), asked[index].label
                            if label and not stream.num_tokens(index) and began_under_another(labels, label):
                                others.add(index)
                            else:
                                stream.add(index, token_ids, logprobs, labels, choice["finish_reason"])
                    if len(others) == len(indices):
                        break
        except _RefusedForNowError:
            return [Unsampled.PAUSED] * len(indices)
        with protocol_errors(GENERATE):
            if any(last[index]["finish_reason"] is None for index in indices if index not in others):
                raise ValueError("the stream ended before its completions")
            return [last[index] for index in indices]

    async def _sample(
        self, request: GenerateRequest, send: Callable[[Mapping[int, SentRequest]], Awaitable[Sequence[Any]]]
    ) -> list[Any]:
        deadline = time.monotonic() + self._generate_timeout_s

        async def label() -> str:
            return await self._label(self._generate_timeout_s)  # the engine answers once it has loaded its weights

        async def resumed() -> None:
            await self._wait_until_resumed(deadline)

        return await self._gate.sample(request, label, send, version_labels_of, resumed)

    async def _sampled(self, body: Mapping[str, Any]) -> Any:
        """Return vLLM's answer, or `Unsampled.PAUSED` if vLLM is paused and has refused the request."""
        status, answer = await self._requests.ask("POST", GENERATE, body, self._generate_timeout_s)
        if is_refused_for_now(status, answer):
            return Unsampled.PAUSED
        return self._requests.answer_of(GENERATE, status, answer)

    async def _wait_until_resumed(self, deadline: float) -> None:
        """Return once the server samples again; requests that wait at the same time share the polling.

        Raises the same errors as `_label` if the engine will not resume, and `DeadlineError` after ``deadline``.
        """
        await asyncio.sleep(_RESUMED_S)
        began = time.monotonic()
        async with self._resuming:
            while True:
                asked = time.monotonic()
                if asked > deadline:
                    raise DeadlineError(
                        f"the server was paused and refused a request for {self._generate_timeout_s:g} s", self.name
                    )
                if self._sampled_at >= began:
                    return
                await self._label(self._generate_timeout_s)
                if not (await self._routes.get("/is_paused")).get("is_paused"):
                    self._sampled_at = asked
                else:
                    await asyncio.sleep(_RESUMED_S)

    async def aclose(self) -> None:
        await super().aclose()
        await self._requests.aclose()

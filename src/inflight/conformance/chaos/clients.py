"""Clients that keep a server busy while its weights change, and what must be true of every answer they get.

No answer may be lost: a request ends with all of its tokens, or as the schedule explains.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from inflight.conformance.chaos.faults import FaultyEndpoint
from inflight.conformance.chaos.palette import VOCAB_SIZE, Palette
from inflight.conformance.chaos.servers import EmbeddedServer, Incarnation
from inflight.errors import InflightError, PoisonedError, UnreachableError
from inflight.wire import GenerateRequest, GenerateResponse, SamplingParams

_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Conversation:
    """One request and how it ended. ``life`` is the server's life in which it began, None if it was down."""

    server: EmbeddedServer
    request: GenerateRequest
    life: Incarnation | None
    response: GenerateResponse | None
    error: InflightError | None
    saw_death: bool
    """The server died, or came back, while it went on."""


class Client:
    """Asks one server for one completion after another, until `stop`."""

    def __init__(self, endpoint: FaultyEndpoint, server: EmbeddedServer, number: int, random_: random.Random) -> None:
        self._endpoint = endpoint
        self._server = server
        self._number = number
        self._random = random_
        self._is_stopped = False
        self.conversations: list[Conversation] = []

    def stop(self) -> None:
        """Have the present request be the last one."""
        self._is_stopped = True

    async def run(self) -> None:
        """Converse; runs in the fleet's loop."""
        while not self._is_stopped:
            request = GenerateRequest(
                request_id=f"client-{self._number}-{len(self.conversations)}",
                prompt_token_ids=tuple(self._random.choices(range(VOCAB_SIZE), k=4)),
                sampling=SamplingParams(max_tokens=self._random.randint(15, 40), n=self._random.choice((1, 2, 3))),
            )
            life, response, error = self._server.life, None, None
            try:
                response = await self._endpoint.generate(request)
            except InflightError as raised:
                error = raised
            saw_death = life is not self._server.life or life is None
            self.conversations.append(Conversation(self._server, request, life, response, error, saw_death))
            await asyncio.sleep(_PAUSE_S)


def problems_of(conversation: Conversation, palette: Palette) -> list[str]:
    """Return what is wrong with how a request ended."""
    name, response = conversation.request.request_id, conversation.response
    was_torn = conversation.life is not None and conversation.life.was_torn
    if response is None:
        error = conversation.error
        explained = (
            conversation.saw_death
            or (isinstance(error, UnreachableError) and "lost: " in str(error))
            or (isinstance(error, PoisonedError) and was_torn)
        )
        return [] if explained else [f"{name} was lost: {error!r}"]
    problems = []
    may_be_aborted = conversation.saw_death or was_torn or conversation.server.num_aborting_updates > 0
    for completion in response.completions:
        wanted = conversation.request.sampling.max_tokens
        if completion.finish_reason == "abort":
            if not may_be_aborted:
                problems.append(f"{name} was aborted after {len(completion.token_ids)} tokens, for no reason")
        elif completion.finish_reason != "length" or len(completion.token_ids) != wanted:
            num = len(completion.token_ids)
            problems.append(f"{name} ended with {num} of {wanted} tokens: {completion.finish_reason}")
        covered = [span.version for span in completion.version_spans for _ in range(span.start, span.end)]
        if len(covered) != len(completion.token_ids):
            problems.append(f"{name}: spans cover {len(covered)} of {len(completion.token_ids)} tokens")
        for i, (version, token, logprob) in enumerate(
            zip(covered, completion.token_ids, completion.logprobs, strict=False)
        ):
            if not palette.is_sampled_from(version, token, logprob):
                problems.append(f"{name}: token {i} says version {version}, its logprob {logprob:.4f} says otherwise")
                break
    return problems

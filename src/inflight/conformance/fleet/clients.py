"""Clients that keep a server busy while its weights change, and the requirements on every answer.

No answer may be lost: a request ends with all of its tokens unless the schedule explains why it does not.
"""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import dataclass

from inflight.conformance.fleet.faults import FaultyEndpoint
from inflight.conformance.fleet.palette import Palette
from inflight.conformance.fleet.servers import TestedServer
from inflight.errors import InflightError, PoisonedError, UnreachableError
from inflight.wire import Capabilities, GenerateRequest, GenerateResponse, SamplingParams


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and how it ended."""

    server: TestedServer
    request: GenerateRequest
    response: GenerateResponse | None
    error: InflightError | None
    saw_break: bool
    """Whether the server was down, died, restarted or lost its connections during the request."""


async def converse(
    endpoint: FaultyEndpoint,
    name: str,
    random_: random.Random,
    vocab_size: int,
    is_over: threading.Event,
    conversations: list[Exchange],
    pause_s: float,
) -> None:
    """Send one request after another until ``is_over`` is set, and append each finished request to ``conversations``.

    ``pause_s`` is the time between two requests.
    """
    server = endpoint.server
    while not is_over.is_set():
        request = GenerateRequest(
            request_id=f"{name}-{len(conversations)}",
            prompt_token_ids=tuple(random_.choices(range(vocab_size), k=4)),
            sampling=SamplingParams(max_tokens=random_.randint(15, 40), n=random_.choice((1, 2, 3)), ignore_eos=True),
        )
        was_up, num_breaks = server.is_up, server.num_breaks
        response, error = None, None
        try:
            response = await endpoint.generate(request)
        except InflightError as raised:
            error = raised
        saw_break = not was_up or num_breaks != server.num_breaks
        conversations.append(Exchange(server, request, response, error, saw_break))
        await asyncio.sleep(pause_s)


def problems_of(conversation: Exchange, palette: Palette, capabilities: Capabilities, *, may_abort: bool) -> list[str]:
    """Return what is wrong with the way a request ended. ``may_abort`` means that an update used the policy
    ``abort``."""
    name, response, server = conversation.request.request_id, conversation.response, conversation.server
    if response is None:
        error = conversation.error
        explained = (
            conversation.saw_break
            or (isinstance(error, UnreachableError) and "lost: " in str(error))
            or (isinstance(error, PoisonedError) and server.was_torn)
        )
        return [] if explained else [f"{name} was lost: {error!r}"]
    problems = []
    may_abort = may_abort or conversation.saw_break or server.was_torn
    for completion in response.completions:
        wanted = conversation.request.sampling.max_tokens
        if completion.finish_reason == "abort":
            if not may_abort:
                problems.append(f"{name} was aborted after {len(completion.token_ids)} tokens without a reason")
        elif completion.finish_reason != "length" or len(completion.token_ids) != wanted:
            num = len(completion.token_ids)
            problems.append(f"{name} ended with {num} of {wanted} tokens and finish reason {completion.finish_reason}")
        versions = [span.version for span in completion.version_spans for _ in range(span.start, span.end)]
        for i, (version, token, logprob) in enumerate(
            zip(versions, completion.token_ids, completion.logprobs, strict=True)
        ):
            is_bound = capabilities.version_binding == "spans"
            if not palette.is_sampled_from(version if is_bound else None, token, logprob):
                problems.append(f"{name}: token {i} is labelled version {version}, but has the logprob {logprob:.4f}")
                break
    return problems

"""Level ``caches``: many kinds of requests run concurrently while updates of all kinds arrive.

Other checks vary one thing at a time. This one draws everything at random, always from the same seed, and requires each
answer to be what the contract prescribes for that request alone.
"""

from __future__ import annotations

import asyncio
import random
import string
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from inflight.base.shortened import shortened
from inflight.base.tasks import cancel_and_wait
from inflight.conformance.checks import check, fail, look_at, require
from inflight.conformance.endpoint.aftermath import wait_until_settled
from inflight.conformance.endpoint.caches import SentAnswer, due_logits
from inflight.conformance.endpoint.forms import assembled
from inflight.conformance.endpoint.kinds import UpdateChain, UpdateKind, supported_kinds
from inflight.conformance.endpoint.scoring import require_scores_of_spans, score_the_end
from inflight.conformance.endpoint.stop_strings import completing
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.endpoint.waiting import within
from inflight.conformance.reference import chosen, distribution
from inflight.contracts import InferenceEndpoint
from inflight.errors import InvalidRequestError
from inflight.rollouts import continuation
from inflight.wire import (
    AbortRequests,
    Completion,
    CompletionChunk,
    EndpointState,
    GenerateRequest,
    InFlightPolicy,
    ScoreRequest,
    ScoreResponse,
)

LEVEL = "caches"
_SEED = 75
_NUM_CLIENTS, _NUM_UPDATES = 12, 26
"""Number of clients that sample concurrently, and number of updates under each policy while they do."""
_MOST_TOKENS, _MOST_COMPLETIONS = 90, 3
_PREFIX_LENGTHS = (1, 17, 64, 130)
"""Lengths of prefixes that prompts share: below, at and above the usual page sizes."""
_CONTINUED = 0.5
"""Share of aborted completions that are continued."""
_STOPS = 12
"""Number of stop tokens of a request that has any."""
_STOP_STRINGS = 4
"""Number of stop strings, of one letter each, of a request that has any."""
_ABANDONED = 0.3
"""Share of updates that are preceded by another update, which is aborted once all of it has arrived."""
_PAUSE_S = 0.03
"""Longest time between two updates."""
_ENDS_S = 30.0
_JUDGED_S = 10.0
"""How long answers are judged under each policy, beginning with those that contain tokens from the most versions."""


@check("U-75", "updates spans", deadline_s=180)
@look_at("what differs between this request and one that runs alone: neighbours, updates, requests that ended early")
async def mixed_requests(subject: EndpointSubject) -> None:
    """However requests, updates of any kind, aborts, continuations and refused calls are mixed, every request ends as
    it would alone, and each of its tokens has the logprob that the token's version and the policy prescribe."""
    chain, clients = UpdateChain(subject), (subject.endpoint, await subject.another_client())
    first, policies = supported_kinds(subject)[0], subject.pausing_policies()
    can_abandon = await _abandon(subject, chain, first, policies[0])
    await chain.publish(first, policies[0])  # what was kept before may be lost, and the endpoint may be POISONED
    for policy in policies:
        traffic = _Traffic(subject, clients, chain, policy, _ABANDONED if can_abandon else 0.0)
        await traffic.run()
        traffic.judge()


async def _abandon(subject: EndpointSubject, chain: UpdateChain, kind: UpdateKind, policy: InFlightPolicy) -> bool:
    """Send an update and abort it once all of it has arrived; return whether the endpoint serves the old weights."""
    sent = await chain.send(kind, policy)
    await sent.publisher.abort(sent.update)
    sent.publisher.lose_group()
    version = await wait_until_settled(subject, f"after {kind.name} that was aborted once all of it had arrived")
    return version.state is not EndpointState.POISONED


class _Traffic:
    """Clients that send random requests while updates arrive, and their answers."""

    def __init__(
        self,
        subject: EndpointSubject,
        endpoints: Sequence[InferenceEndpoint],
        chain: UpdateChain,
        policy: InFlightPolicy,
        abandoned: float,
    ) -> None:
        """``abandoned`` is the share of updates that are preceded by another update, which is aborted."""
        self._subject, self._endpoints, self._chain, self._policy = subject, endpoints, chain, policy
        self._abandoned, self._num_abandoned = abandoned, 0
        self._random = random.Random(f"{_SEED}-{policy}")
        self._answers: list[SentAnswer] = []
        tokenizer = subject.reference.tokenizer if subject.capabilities.chat else None
        special = "" if tokenizer is None else "".join(tokenizer.all_special_tokens)
        self._letters = [] if tokenizer is None else [it for it in string.ascii_letters if it not in special]
        """Letters that may be stop strings. The contract does not specify whether special tokens have text."""
        self._free_ids: list[str] = []
        """Ids of requests that have ended."""
        self._is_over = False
        self._scores: list[tuple[ScoreRequest, ScoreResponse]] = []
        self._num_aborted = self._num_continued = self._num_cancelled = self._num_refused = 0

    async def run(self) -> None:
        """Publish updates while the clients sample; return once all requests have ended."""
        subject, pace = self._subject, self._subject.pace
        clients = [subject.begin(self._client()) for _ in range(pace.fewer(_NUM_CLIENTS))]
        kinds = supported_kinds(subject)
        self._random.shuffle(kinds)
        for i in range(pace.fewer(_NUM_UPDATES)):
            num_before = len(self._answers)
            await asyncio.sleep(self._random.uniform(0.0, _PAUSE_S) * pace.slowness)
            if self._random.random() < self._abandoned:
                self._num_abandoned += 1
                kind = self._random.choice(kinds)
                require(
                    await _abandon(subject, self._chain, kind, self._policy),
                    f"the endpoint is POISONED after {kind.name} that was aborted once all of it had arrived",
                )
            await self._chain.publish(kinds[i % len(kinds)], self._policy)
            if i % 3 == 2:
                await within(_ENDS_S, self._until(lambda: len(self._answers) > num_before, clients), "an answer")  # noqa: B023
        self._is_over = True
        await within(_ENDS_S, asyncio.gather(*clients), "requests that ran while updates arrived")

    async def _until(self, holds: Callable[[], bool], clients: list[asyncio.Task[None]]) -> None:
        while not holds():
            for client in clients:
                if client.done():
                    client.result()
            await asyncio.sleep(0.005)

    async def _client(self) -> None:
        """Send one random request after another until the updates are over."""
        actions = (self._complete, self._complete, self._complete, self._stream, self._abort, self._cancel, self._other)
        while not self._is_over:
            await self._random.choice(actions)()

    async def _complete(self) -> None:
        await self._note(await self._ask(self._request()), was_aborted=False)

    async def _ask(self, request: GenerateRequest) -> tuple[int, GenerateRequest, list[Completion]]:
        version = self._subject.publisher.version
        return version, request, list((await self._random.choice(self._endpoints).generate(request)).completions)

    async def _stream(self) -> None:
        subject = self._subject
        if not subject.capabilities.streaming:
            return await self._complete()
        request, version = self._request().model_copy(update={"stream": True}), subject.publisher.version
        chunks: list[CompletionChunk] = [chunk async for chunk in subject.streaming.generate_stream(request)]
        by_index = [[it for it in chunks if it.index == i] for i in range(request.sampling.n)]
        completions = [assembled(i, own) for i, own in enumerate(by_index)]
        await self._note((version, request, completions), was_aborted=False)

    async def _abort(self) -> None:
        subject = self._subject
        if not subject.capabilities.partial_rollouts:
            return await self._complete()
        request = self._request()
        asking = subject.begin(self._ask(request))
        await asyncio.sleep(self._random.uniform(0.0, _PAUSE_S))
        await subject.aborting.abort_requests(AbortRequests(request_ids=(request.request_id,)))
        self._num_aborted += 1
        _, _, completions = answer = await asking
        await self._note(answer, was_aborted=True)
        for completion in completions:
            left = (request.sampling.max_tokens or 0) - len(completion.token_ids)
            if completion.finish_reason == "abort" and left > 0 and self._random.random() < _CONTINUED:
                self._num_continued += 1
                rest = continuation(request, completion, f"{request.request_id}-rest-{self._num_continued}")
                await self._note(await self._ask(rest), was_aborted=False)

    async def _cancel(self) -> None:
        asking = self._subject.begin(self._ask(self._request()))
        await asyncio.sleep(self._random.uniform(0.0, _PAUSE_S))
        await cancel_and_wait(asking)
        self._num_cancelled += 1

    async def _other(self) -> None:
        """Score a prompt, or make a call that is refused."""
        subject = self._subject
        if subject.capabilities.scoring and self._random.random() < 0.5:
            self._scores.append(await score_the_end(subject, self._prompt() + subject.prompt(2, seed=5)))
            return
        too_long = subject.request(subject.prompt(subject.capabilities.max_model_len + 1), max_tokens=1)
        await subject.require_raises(
            subject.endpoint.generate(too_long), InvalidRequestError, "a prompt that is too long"
        )
        self._free_ids.append(too_long.request_id)
        self._num_refused += 1

    async def _note(self, answer: tuple[int, GenerateRequest, list[Completion]], *, was_aborted: bool) -> None:
        version, request, completions = answer
        require(
            len(completions) == request.sampling.n,
            f"a request for {request.sampling.n} completions was answered with {len(completions)}",
        )
        self._free_ids.append(request.request_id)
        self._answers += [SentAnswer(version, request, completion, was_aborted) for completion in completions]

    def _prompt(self) -> tuple[int, ...]:
        """Return a prompt that shares a prefix with others, or that continues a completion."""
        subject, draw = self._subject, self._random
        room = subject.context_len - _MOST_TOKENS - 4
        if self._answers and draw.random() < 0.3:
            earlier = draw.choice(self._answers[-20:])
            continued = (*earlier.request.prompt_token_ids, *earlier.completion.token_ids, draw.randrange(8))
            if len(continued) <= room:
                return continued
        prefix = subject.prompt(min(draw.choice(_PREFIX_LENGTHS), room - 3), seed=_SEED)
        return (*prefix, *subject.prompt(draw.choice((1, 2, 3)), seed=draw.randrange(12)))

    def _request(self) -> GenerateRequest:
        subject, draw = self._subject, self._random
        sampling: dict[str, Any] = {
            "max_tokens": draw.randint(1, _MOST_TOKENS),
            "n": draw.choice((1, 1, 1, 2, _MOST_COMPLETIONS)),
            # Rounding decides which tokens are the likeliest, and a low temperature magnifies it.
            "temperature": draw.choice((1.0, 1.0, 0.6, 1.5) if subject.is_coarse else (1.0, 1.0, 0.6, 1.5, 0.3, 0.0)),
            "seed": draw.choice((None, draw.randrange(1 << 40))),
            "ignore_eos": draw.random() < 0.7,
        }
        if sampling["temperature"] == 0.0:
            sampling["n"] = 1  # some engines refuse several completions that would all be the same
        if draw.random() < 0.3:
            sampling["stop_token_ids"] = tuple(draw.sample(range(subject.capabilities.vocab_size), _STOPS))
        if draw.random() < 0.2 and len(self._letters) >= _STOP_STRINGS:
            sampling["stop"] = tuple(draw.sample(self._letters, _STOP_STRINGS))
        if draw.random() < 0.2 and not subject.is_coarse:  # rounding changes which tokens are the likeliest
            sampling["top_k"] = draw.choice((2, 20))
        request = subject.request(self._prompt(), **sampling)
        if self._free_ids and draw.random() < 0.2:
            request = request.model_copy(update={"request_id": self._free_ids.pop(0)})
        return request

    def judge(self) -> None:
        """Require that every answer is what the contract prescribes."""
        subject, began, largest, num_judged = self._subject, time.monotonic(), 0.0, 0
        for answer in self._answers:
            self._require_ended(answer)
        for scored in self._scores:
            require_scores_of_spans(subject, self._chain.published, *scored)
        by_versions = sorted(self._answers, key=lambda it: -len(it.completion.version_spans))
        for answer in by_versions:
            if time.monotonic() - began > _JUDGED_S:
                break
            if (logits := due_logits(self._chain.published, answer, self._policy)) is not None:
                gap = subject.gap_to(logits, answer.request, answer.completion)
                largest, num_judged = max(largest, gap), num_judged + 1
                if gap > subject.tolerance:
                    self._fail(answer, gap, logits(subject.reference, "float32"))
        words = {
            "answers": len(self._answers),
            "judged": num_judged,
            "of several versions": sum(len(it.completion.version_spans) > 1 for it in self._answers),
            "aborted": self._num_aborted,
            "continued": self._num_continued,
            "cancelled": self._num_cancelled,
            "refused": self._num_refused,
            "scored": len(self._scores),
            "updates aborted": self._num_abandoned,
            "largest difference": largest,
        }
        subject.note(**{f"under {self._policy}": words})

    def _require_ended(self, answer: SentAnswer) -> None:
        request, completion, reason = answer.request, answer.completion, answer.completion.finish_reason
        ids, sampling = completion.token_ids, request.sampling
        ends = set(sampling.stop_token_ids)
        ends |= set() if sampling.ignore_eos else self._subject.reference.eos_token_ids
        words = f"a completion of at most {sampling.max_tokens} tokens, with the stop tokens {sorted(ends)}"
        words += f" and the stop strings {sampling.stop}," if sampling.stop else ","
        ending = {i for i, token in enumerate(ids) if token in ends}
        for stop in sampling.stop:
            ending |= set(completing(self._subject.reference.tokenizer, stop, completion))
        early = sorted(ending - {len(ids) - 1})
        require(not early, f"{words} continued after token {early[:1]}")
        is_stopped, is_long = bool(ending), len(ids) == sampling.max_tokens
        due = {"stop"} if is_stopped else {"abort"} if answer.was_aborted and not is_long else set()
        is_due = reason in (due | {"length"} if is_long else due)
        require(is_due, f"{words} has {len(ids)} tokens, the last of which is {ids[-1:]}, and ended with {reason!r}")
        num_spanned = completion.version_spans[-1].end if completion.version_spans else 0
        require(
            len(completion.logprobs) == len(ids) == num_spanned,
            f"{words} has {len(ids)} tokens, {len(completion.logprobs)} logprobs, and spans up to {num_spanned}",
        )

    def _fail(self, answer: SentAnswer, gap: float, logits_TV: torch.Tensor) -> None:
        request, completion = answer.request, answer.completion
        exact_T = chosen(distribution(logits_TV, request.sampling), completion.token_ids)
        gaps_T = (torch.tensor(completion.logprobs, dtype=torch.float64) - exact_T).abs()
        wrong = (gaps_T > self._subject.tolerance).nonzero()[:, 0].tolist()
        spans = [(it.start, it.end, self._chain.published[it.version].label) for it in completion.version_spans]
        fail(
            f"completion {completion.index} of a request with a prompt of {len(request.prompt_token_ids)} tokens and "
            f"{request.sampling} has logprobs that differ by up to {gap:.3g} from those that {self._policy} "
            f"prescribes, at its tokens {shortened(wrong, 8)}; its spans (start, end, weights) are {spans}"
        )

"""The endpoint under check, with helpers for requests, publishes and expectations."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from inflight.base.tasks import cancel_and_wait, start
from inflight.conformance.checks import fail, require, skip
from inflight.conformance.endpoint.failing import FailingEngine
from inflight.conformance.endpoint.needs import offers_of
from inflight.conformance.endpoint.opening import OpenedEndpoint, open_target
from inflight.conformance.endpoint.pace import Pace
from inflight.conformance.endpoint.publishing import SteppedPublisher
from inflight.conformance.endpoint.rounding import largest_difference, roundings, unexplained_difference
from inflight.conformance.endpoint.waiting import SLACK_S, SLOWNESS, within
from inflight.conformance.models import make_tiny_model
from inflight.conformance.reference import ReferenceCheckpoint, ReferenceWeights, chosen, distribution
from inflight.conformance.targets import EndpointTarget
from inflight.contracts import AbortingEndpoint, InferenceEndpoint, ReleasingEndpoint, StreamingEndpoint
from inflight.errors import InflightError, UpdateRefusedError
from inflight.wire import (
    Capabilities,
    ChatCompletionRequest,
    ChatMessage,
    Completion,
    EndpointState,
    GenerateRequest,
    GenerateResponse,
    InFlightPolicy,
    SamplingParams,
    TransportName,
)

T = TypeVar("T")
DueLogits = Callable[[ReferenceCheckpoint, str], torch.Tensor]
"""Computes, with a reference and in a dtype, the logits [T, V] from which the tokens of a completion must have been
sampled."""
Running = list[tuple[GenerateRequest, asyncio.Task[GenerateResponse]]]
"""Sent requests, each with the task that waits for its answer."""

TOLERANCES = {"float64": 5e-4, "float32": 5e-4, "float16": 0.05, "bfloat16": 0.25}
"""Largest difference between logprobs that count as equal, by the engine's dtype; the reference uses float32. Logits of
about 10 have a resolution of 1e-6, 0.01 and 0.06 in the last three dtypes, and are rounded in two layers."""
ROUNDINGS = 2.0
"""Tolerance in 16 bits, as a multiple of the largest rounding error that transformers itself shows over a prompt."""


class EndpointSubject:
    """The endpoint under check: one object for all checks, with a new publisher for each check."""

    capabilities: Capabilities
    """What the endpoint reported when it was opened."""
    opened: OpenedEndpoint
    publisher: SteppedPublisher
    """The trainer side, with a new run for every check."""
    pace: Pace
    """How fast the endpoint was when it was opened."""
    rounding: float = 0.0
    """Tolerance that the model needs in the endpoint's dtype: deep models round more often than the kit's own."""
    can_fail: FailingEngine | None
    """The engine whose apply can be made to fail, if the kit could install one."""

    def __init__(self, target: EndpointTarget, directory: Path, start_deadline_s: float) -> None:
        self.target = target
        self.directory = directory
        """Directory for files; it lasts as long as the kit."""
        self.evidence: dict[str, Any] = {}
        self.asked: list[GenerateRequest] = []
        """The requests that `request` returned in this check."""
        self._start_deadline_s = start_deadline_s
        self._num_requests = 0
        self._per_check = contextlib.AsyncExitStack()
        self._across_checks = contextlib.AsyncExitStack()
        self._shared: tuple[Path, OpenedEndpoint] | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        model = target.model
        if model is None and target.url is None:
            model = make_tiny_model(directory / "model")
        self.known_reference = None if model is None else ReferenceCheckpoint(model)

    def missing(self, *needs: str) -> str | None:
        """Return why a check with these needs cannot be run; None if it can."""
        knows_model, can_fail = self.known_reference is not None, self.can_fail is not None
        offers = offers_of(self.capabilities, self.opened, knows_model=knows_model, can_fail=can_fail)
        return next((reason for is_met, reason in map(offers.__getitem__, needs) if not is_met), None)

    @property
    def endpoint(self) -> InferenceEndpoint:
        return self.opened.endpoint

    @property
    def streaming(self) -> StreamingEndpoint:
        """The endpoint, if it supports streaming. Fails the check if the streaming methods are missing."""
        if not isinstance(self.endpoint, StreamingEndpoint):
            fail(f"streaming is reported as supported, but {type(self.endpoint).__name__} has no generate_stream")
        return self.endpoint

    @property
    def aborting(self) -> AbortingEndpoint:
        """The endpoint, if it supports partial rollouts. Fails the check if the method is missing."""
        if not isinstance(self.endpoint, AbortingEndpoint):
            fail(f"partial_rollouts is reported as supported, but {type(self.endpoint).__name__} has no abort_requests")
        return self.endpoint

    @property
    def releasing(self) -> ReleasingEndpoint:
        """The endpoint, if it supports releasing memory. Fails the check if the methods are missing."""
        if not isinstance(self.endpoint, ReleasingEndpoint):
            fail(f"releases_memory is reported as supported, but {type(self.endpoint).__name__} has no release_memory")
        return self.endpoint

    @property
    def reference(self) -> ReferenceCheckpoint:
        """The served checkpoint, for checks that need ``model``."""
        assert self.known_reference is not None
        return self.known_reference

    @property
    def tolerance(self) -> float:
        """Largest difference between logprobs that count as equal: set by the user, or derived from dtype and model."""
        return self.target.tolerance or max(self.tiny_tolerance, self.rounding)

    @property
    def tiny_tolerance(self) -> float:
        """The tolerance for the tiny models that the kit creates for some checks."""
        return self.target.tolerance or TOLERANCES.get(self.capabilities.dtype, 0.25)

    @property
    def is_coarse(self) -> bool:
        """Whether the endpoint computes in 16 bits."""
        return self.capabilities.dtype in ("float16", "bfloat16")

    def note(self, **evidence: Any) -> None:
        """Add to the evidence of the current check."""
        self.evidence.update(evidence)

    async def enter(self, context: contextlib.AbstractAsyncContextManager[T]) -> T:
        """Enter a context that is exited when the current check ends, however it ends."""
        return await self._per_check.enter_async_context(context)

    def begin(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a call, which is cancelled if it is still running when the current check ends."""
        task = start(call)
        self._tasks.append(task)
        return task

    async def fresh(self, model: Path) -> OpenedEndpoint:
        """Return another endpoint that serves ``model`` until the current check ends. Needs ``fresh``."""
        await self.close_shared()
        return await self.enter(self._open(model))

    async def shared(self, model: Path) -> OpenedEndpoint:
        """Return another endpoint that serves ``model`` and that consecutive checks share. Needs ``fresh``.

        The endpoint is closed when a check fails, calls `fresh`, or asks for another model. A check that changes the
        endpoint's weights must call `close_shared`.
        """
        if self._shared is None or self._shared[0] != model:
            await self.close_shared()
            self._shared = model, await self._across_checks.enter_async_context(self._open(model))
        return self._shared[1]

    async def close_shared(self) -> None:
        """Close the endpoint that `shared` returned last. Idempotent."""
        self._shared = None
        await self._across_checks.aclose()

    def _open(self, model: Path) -> contextlib.AbstractAsyncContextManager[OpenedEndpoint]:
        return open_target(self.target, model, self.directory, self._start_deadline_s)

    def another_publisher(
        self,
        *,
        run_id: str | None = None,
        incarnation: int = 0,
        transport: TransportName | None = None,
        num_senders: int = 1,
    ) -> SteppedPublisher:
        """Return another trainer side for this check, of a new run or of ``run_id``. Its versions continue those of
        `publisher`."""
        directory = self.directory / "updates" if transport == "file" else None
        other = SteppedPublisher(
            self.endpoint,
            self.capabilities,
            self.publisher.version,
            run_id=run_id,
            incarnation=incarnation,
            transport=transport,
            directory=directory,
            num_senders=num_senders,
        )
        self.publisher.touched = True
        self._per_check.callback(other.lose_group)
        return other

    def publisher_to(self, endpoint: InferenceEndpoint, capabilities: Capabilities) -> SteppedPublisher:
        """Return the trainer side of a run that publishes to an endpoint from `fresh`, for this check."""
        publisher = SteppedPublisher(endpoint, capabilities)
        self._per_check.callback(publisher.lose_group)
        return publisher

    async def another_connection(self) -> InferenceEndpoint:
        """Return another client that lasts until the check ends, or the same endpoint if it does not speak HTTP."""
        return self.endpoint if self.opened.url is None else await self.another_client()

    async def another_client(self) -> InferenceEndpoint:
        """Return another client of the server, created like the first one, that lasts until the current check ends.

        If no other client can be created, the first one is returned.
        """
        if self.opened.connect is None:
            return self.endpoint
        return await self.enter(contextlib.aclosing(self.opened.connect()))

    def prompt(self, length: int = 12, seed: int = 0) -> tuple[int, ...]:
        """Return random ids from the whole vocabulary. No text would be encoded as these ids."""
        return tuple(random.Random(seed).choices(range(self.capabilities.vocab_size), k=length))

    @property
    def context_len(self) -> int:
        """Context length that checks use: all of it, or the part that an endpoint of this pace fills in time."""
        return self.pace.context_len(self.capabilities.max_model_len)

    def remaining_tokens(self, prompt: Sequence[int] | None = None) -> int:
        """Return how many tokens fit in `context_len` after ``prompt``, which defaults to what `prompt` returns."""
        return self.context_len - len(self.prompt() if prompt is None else prompt)

    def lengths(self, num_tokens: int) -> list[int]:
        """Return lengths to try in turn, beginning with ``num_tokens`` or fewer, because an engine may be too fast for
        the first length; the longest is tried twice, because this process may have been held up the first time."""
        first, longest = self.pace.shortened(num_tokens), self.remaining_tokens()
        return [*(length for length in (first, 4 * first) if length < longest), longest, longest]

    def request(self, prompt: Sequence[int] | None = None, *, stream: bool = False, **sampling: Any) -> GenerateRequest:
        """Return a request with a new id: by default 8 tokens from seed 7, with ignore_eos."""
        self._num_requests += 1
        settings = self._supported_sampling({"max_tokens": 8, "ignore_eos": True, "seed": 7, **sampling})
        request = GenerateRequest(
            request_id=f"check-{id(self):x}-{self._num_requests}",
            prompt_token_ids=tuple(self.prompt() if prompt is None else prompt),
            sampling=SamplingParams(**settings),
            stream=stream,
        )
        self.asked.append(request)
        return request

    def chat_request(self, **options: Any) -> ChatCompletionRequest:
        """Return a chat request to the reported model: by default 8 tokens from seed 7."""
        message = ChatMessage(role="user", content="Name three rivers.")
        settings = self._supported_sampling({"max_tokens": 8, "seed": 7, **options})
        return ChatCompletionRequest(model=self.capabilities.model, messages=(message,), **settings)

    def _supported_sampling(self, sampling: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters, without a seed if the endpoint does not support seeds."""
        return sampling if self.capabilities.seeds else {**sampling, "seed": None}

    def repeatable(self, seed: int) -> dict[str, Any]:
        """Return parameters under which a prompt gets the same tokens again: a seed, or else greedy decoding."""
        return {"seed": seed} if self.capabilities.seeds else {"temperature": 0.0}

    def pausing_policies(self) -> list[InFlightPolicy]:
        """Return the supported policies under which requests survive an update; skip the check if there is none."""
        policies = (InFlightPolicy.KEEP, InFlightPolicy.RECOMPUTE)
        if supported := [policy for policy in policies if policy in self.capabilities.in_flight_policies]:
            return supported
        skip("neither keep nor recompute is supported: no request continues across an update")

    async def ask(
        self, prompt: Sequence[int] | None = None, *, endpoint: InferenceEndpoint | None = None, **sampling: Any
    ) -> tuple[GenerateRequest, Completion]:
        """Return a request and its first completion."""
        request = self.request(prompt, **sampling)
        return request, (await (endpoint or self.endpoint).generate(request)).completions[0]

    async def generate(self, prompt: Sequence[int] | None = None, **sampling: Any) -> Completion:
        """Return the first completion of a request."""
        return (await self.ask(prompt, **sampling))[1]

    async def seconds_to_fill_the_context(self) -> float:
        """Return how long a request that fills the context takes, after an equal one has warmed the endpoint up."""
        await self.generate(max_tokens=self.remaining_tokens())
        started = time.monotonic()
        await self.generate(max_tokens=self.remaining_tokens())
        return time.monotonic() - started

    def start(self, num: int, max_tokens: int) -> Running:
        """Start requests, whether or not they can run now, and return them."""
        requests = [self.request(self.prompt(seed=i), max_tokens=max_tokens, seed=i) for i in range(num)]
        return [(request, self.begin(self.endpoint.generate(request))) for request in requests]

    async def start_running(
        self,
        num: int = 4,
        *,
        max_tokens: int | None = None,
        prompt: Sequence[int] | None = None,
        **sampling: Any,
    ) -> Running:
        """Start long requests and return them once all are being decoded.

        There are at most as many as the endpoint decodes at a time. By default, they fill the context and so outlast a
        few updates. Requests of ``max_tokens`` that end too early are started again, four times as long.
        """
        num = min(num, self.capabilities.max_concurrent_sequences)
        deadline = time.monotonic() + 8.0 * SLOWNESS.get()
        while True:
            running: Running = []
            for i in range(num):
                asked = self.prompt(seed=100 + i) if prompt is None else prompt
                longest = min(max_tokens or self.remaining_tokens(asked), self.remaining_tokens(asked))
                request = self.request(asked, **{"max_tokens": longest, "seed": 100 + i, **sampling})
                running.append((request, self.begin(self.endpoint.generate(request))))
            tasks = [task for _, task in running]
            if await self._are_running(tasks, deadline):
                return running
            if max_tokens is None or max_tokens >= self.context_len:
                fail("a request that fills the context had ended before the others were being decoded")
            max_tokens *= 4
            await asyncio.gather(*tasks)

    async def _are_running(self, tasks: Sequence[asyncio.Task[GenerateResponse]], deadline: float) -> bool:
        """Return True once all requests are being decoded, or False if one has already ended."""
        while (await self.endpoint.weight_version()).num_running < len(tasks):
            if ended := [task for task in tasks if task.done()]:
                ended[0].result()
                return False
            require(time.monotonic() < deadline, f"{len(tasks)} requests were not being decoded in time (num_running)")
            await asyncio.sleep(0.002)
        return True

    def difference(self, found: Sequence[float], expected: torch.Tensor) -> float:
        """Return the largest difference between logprobs; infinite if one of them is not finite."""
        return largest_difference(torch.tensor(list(found), dtype=torch.float64), expected.double())

    def gap(
        self,
        weights: ReferenceWeights,
        request: GenerateRequest,
        completion: Completion,
        reference: ReferenceCheckpoint | None = None,
        start: int = 0,
    ) -> float:
        """Return the largest difference between the logprobs of a completion, from ``start`` on, and those under
        ``weights``."""
        prompt, ids = request.prompt_token_ids, completion.token_ids

        def logits(reference: ReferenceCheckpoint, dtype: str) -> torch.Tensor:
            return reference.logits(weights, prompt, ids, dtype=dtype)

        return self.gap_to(logits, request, completion, start, reference)

    def gap_to(
        self,
        logits: DueLogits,
        request: GenerateRequest,
        completion: Completion,
        start: int = 0,
        reference: ReferenceCheckpoint | None = None,
        *,
        is_exact: bool = False,
    ) -> float:
        """Return the largest difference between the logprobs of a completion, from ``start`` on, and those of
        ``logits``.

        If an endpoint that computes in 16 bits exceeds the tolerance, tokens whose logprobs are moved by rounding alone
        are left out, unless ``is_exact``.
        """
        reference, dtype = reference or self.reference, self.capabilities.dtype

        def logprobs(reference: ReferenceCheckpoint, dtype: str = "float32") -> torch.Tensor:
            return chosen(distribution(logits(reference, dtype), request.sampling), completion.token_ids)[start:]

        found_T, exact_T = torch.tensor(completion.logprobs, dtype=torch.float64)[start:], logprobs(reference)
        gap = largest_difference(found_T, exact_T)
        if gap <= self.tolerance or is_exact or not self.is_coarse:
            return gap
        rounded = (logprobs(*it) for it in roundings(reference, dtype))
        return unexplained_difference(found_T, exact_T, rounded, self.tolerance, dtype)

    async def gap_now(self, weights: ReferenceWeights, prompt: Sequence[int] | None = None) -> float:
        """Return the `gap` of a fresh seeded request."""
        return self.gap(weights, *await self.ask(prompt))

    async def require_serves(self, weights: ReferenceWeights, when: str, prompt: Sequence[int] | None = None) -> None:
        """Require that a fresh request samples from exactly ``weights``; the difference becomes evidence."""
        gap = await self.gap_now(weights, prompt)
        self.note(**{f"largest logprob difference from {weights.label}, {when}": gap})
        require(
            gap <= self.tolerance,
            f"{when}, logprobs differ by up to {gap:.3g} from those of weights {weights.label} "
            f"(tolerance {self.tolerance:g})",
        )

    def require_sampled_from(
        self, weights: ReferenceWeights, request: GenerateRequest, completion: Completion, what: str
    ) -> None:
        """Require that every token of ``what`` has the logprob that ``weights`` give it."""
        gap = self.gap(weights, request, completion)
        words = f"the logprobs of {what} differ by up to {gap:.3g} from those of weights {weights.label}"
        require(gap <= self.tolerance, words)

    async def require_state(self, state: EndpointState, when: str) -> None:
        """Require that the endpoint reports ``state``."""
        found = (await self.endpoint.weight_version()).state
        require(found is state, f"{when}, the state is {found}, not {state}")

    async def require_raises(
        self,
        call: Any,
        kinds: type[InflightError] | tuple[type[InflightError], ...],
        what: str,
        within_s: float = SLACK_S,
    ) -> None:
        """Require that awaiting ``call`` raises one of ``kinds`` in time; the error and the seconds become evidence."""
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        names = " or ".join(kind.__name__ for kind in kinds)
        started = time.monotonic()
        try:
            answer = await within(within_s, call, what)
        except kinds as error:
            self.note(**{what.rstrip(","): f"{error} ({time.monotonic() - started:.2g} s)"})
            return
        except (InflightError, ValueError) as error:
            fail(f"{what} raised {type(error).__name__} ({error}) where {names} is required")
        fail(f"{what} was accepted (answer: {str(answer)[:200]}) where {names} is required")

    async def require_refused(self, call: Any, what: str) -> None:
        """Require that awaiting ``call`` raises `UpdateRefusedError`."""
        await self.require_raises(call, UpdateRefusedError, what)

    async def leave(self) -> None:
        """End the calls that the check started, and exit the contexts that it entered."""
        tasks, self._tasks = self._tasks, []
        stack, self._per_check = self._per_check, contextlib.AsyncExitStack()
        await cancel_and_wait(*tasks)
        await stack.aclose()

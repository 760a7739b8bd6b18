"""The endpoint under check, with what checks ask of it: requests, publishes, expectations. Knows no single check."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from inflight.conformance.checks import CheckSkipped, fail, require, skip
from inflight.conformance.endpoint.failing import FailingEngine, engines_that_fail
from inflight.conformance.endpoint.opening import Opened, opened
from inflight.conformance.endpoint.publishing import SteppedPublisher
from inflight.conformance.judge import Hung
from inflight.conformance.models import make_tiny_model
from inflight.conformance.reference import Reference, Weights
from inflight.conformance.targets import EndpointTarget
from inflight.contracts import InferenceEndpoint, StreamingEndpoint
from inflight.errors import InflightError, UpdateRefusedError
from inflight.wire import (
    Backend,
    Capabilities,
    ChatCompletionRequest,
    ChatMessage,
    Completion,
    Encoding,
    EndpointState,
    GenerateRequest,
    GenerateResponse,
    InFlightPolicy,
    SamplingParams,
)

TOLERANCES = {"float64": 5e-4, "float32": 5e-4, "float16": 0.05, "bfloat16": 0.25}
"""Largest difference of a logprob that counts as equal, by the dtype an engine computes in: logits of about 10 have a
resolution of 1e-6, 0.01 and 0.06, and two layers of rounding lie before them. The reference computes in float32."""

ENCODINGS: tuple[Encoding, ...] = ("bfloat16", "float8", "delta")
STORES: tuple[Backend, ...] = ("shm", "file", "http")

_READY_WAIT_S = 8.0
_IDLE_WAIT_S = 3.0
_TOKEN_WAIT_S = 15.0
_GONE_WAIT_S = 1.0
"""For what did not come back before the check before."""
_CLEAN_UP_S = 8.0
_RESTORE_S = 15.0


class EndpointSubject:
    """An endpoint under check, in this process. Satisfies `inflight.conformance.judge.Subject`."""

    def __init__(self, target: EndpointTarget, directory: Path, start_deadline_s: float) -> None:
        self.target = target
        self.directory = directory
        """For files; its content lasts as long as the kit."""
        self._start_deadline_s = start_deadline_s
        self._runner = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        self._per_check = contextlib.AsyncExitStack()
        self.evidence: dict[str, Any] = {}
        self._num_requests = 0
        self._unknown_weights = False
        self._is_suspect = False
        """The check before failed: see whether the endpoint still generates."""
        self._gone: Exception | None = None
        """Why the endpoint did not come back before the check before."""
        self.opened: Opened
        """The endpoint with its URL and process, if it has any."""
        self._failing: FailingEngine | None = None
        self.capabilities: Capabilities
        """What the endpoint declared when it was opened."""
        self.publisher: SteppedPublisher
        """The trainer side; a new run for every check."""
        model = target.model
        if model is None and target.url is None:
            model = make_tiny_model(directory / "model")
        self._reference = None if model is None else Reference(model)

    @classmethod
    def open(
        cls, target: EndpointTarget, directory: Path, start_deadline_s: float, *, is_suspect: bool = False
    ) -> EndpointSubject:
        """Return the subject of a target, answering. Raises what opening it raises.

        ``is_suspect`` says that a check before, in another process, ended in a way that the endpoint may not survive.
        """
        subject = cls(target, directory, start_deadline_s)
        subject._is_suspect = is_suspect
        try:
            subject._runner.run(subject._open())
        except BaseException:
            subject._runner.close()
            raise
        return subject

    # ------------------------------------------------------------------------------------------- for the judge

    @property
    def facts(self) -> Mapping[str, Any]:
        """See `Subject.facts`."""
        flags = {str(key): str(value) for key, value in self.target.options.items()}
        if self._reference is not None:
            flags["model"] = str(self.target.model or "the kit's own")
        return {
            "implementation": self.capabilities.engine,
            "implementation_version": self.capabilities.engine_version,
            "capabilities": self.capabilities.model_dump(mode="json"),
            "flags": flags,
        }

    def missing(self, needs: tuple[str, ...]) -> str | None:
        """See `Subject.missing`. Needs are the keys below, and any policy, transport that stores, or encoding."""
        declared = self.capabilities
        unknown = None if self._reference is not None else "the served checkpoint is not known; give it with --model"
        reasons = {
            "model": unknown,
            "updates": unknown,
            "streaming": None if declared.streaming else "streaming is not declared",
            "chat": None if declared.chat else "chat is not declared",
            "seeds": None if declared.seeds else "seeds are not declared",
            "spans": None if declared.version_binding == "spans" else f"version binding is {declared.version_binding}",
            "fresh": None if self.target.url is None else "the kit cannot start another server of a URL; see --serve",
            "url": None if self.opened.url is not None else "not a server that speaks HTTP",
            "process": None if self.opened.process is not None else "not a server that the kit started; see --serve",
            "failing": None
            if self._failing is not None
            else "it takes weights in another process, or not by an UpdateReceiver: no apply can be made to fail",
            "staging": None if declared.staging else "staging is not declared",
            "partial_updates": None if declared.partial_updates else "partial updates are not declared",
        }
        for encoding in ENCODINGS:
            reasons[encoding] = None if encoding in declared.encodings else f"encoding {encoding} is not declared"
        for store in STORES:
            reasons[store] = self._why_not_stored(store)
        for policy in InFlightPolicy:
            is_declared = policy in declared.in_flight_policies
            reasons[policy.value] = None if is_declared else f"in-flight policy {policy} is not declared"
        return next((reason for need in needs if (reason := reasons[need]) is not None), None)

    def _why_not_stored(self, store: Backend) -> str | None:
        """Return why the kit cannot bring weights over a transport that stores; None if it can."""
        if store not in self.capabilities.transports:
            return f"transport {store} is not declared"
        host = urlsplit(self.opened.url or "").hostname
        if host not in (None, "localhost", "127.0.0.1", "::1"):
            return f"the endpoint at {host} may not see what the kit stores on this host"
        return None

    def prepare(self) -> None:
        """See `Subject.prepare`: the endpoint is READY, idle and serves the checkpoint's weights.

        One that the kit made is made anew if it does not come back, once; what is gone then is not waited for again.
        """
        if self._gone is not None and self.target.url is None:
            raise self._gone
        try:
            self._runner.run(self._prepare())
        except Exception as error:
            self._gone = error
            raise
        self._gone = None

    def call(self, function: Callable[[Any], Any], deadline_s: float) -> None:
        """See `Subject.call`."""
        try:
            self._runner.run(self._call(function, deadline_s))
        except CheckSkipped:
            raise
        except Exception:
            self._is_suspect = True
            raise

    def close(self) -> None:
        """See `Subject.close`. A server that goes on is left with the weights of its checkpoint."""
        if self.target.url is not None and self._reference is not None and self._unknown_weights:
            with contextlib.suppress(Exception):
                self._runner.run(asyncio.wait_for(self._prepare(), _RESTORE_S))
        with contextlib.suppress(Exception):
            self._runner.run(asyncio.wait_for(self._stack.aclose(), _CLEAN_UP_S))
        with contextlib.suppress(Exception):
            self._runner.close()

    # ------------------------------------------------------------------------------------------- what is checked

    @property
    def endpoint(self) -> InferenceEndpoint:
        """The endpoint."""
        return self.opened.endpoint

    @property
    def streaming(self) -> StreamingEndpoint:
        """The endpoint, whose streaming methods must be there. Only for checks that need ``streaming``."""
        if not isinstance(self.endpoint, StreamingEndpoint):
            fail(f"streaming is declared, but {type(self.endpoint).__name__} has no generate_stream")
        return self.endpoint

    @property
    def failing(self) -> FailingEngine:
        """What can make an apply of the endpoint fail. Only for checks that need ``failing``."""
        assert self._failing is not None
        return self._failing

    @property
    def reference(self) -> Reference:
        """The served checkpoint. Only for checks that need ``model``."""
        assert self._reference is not None
        return self._reference

    @property
    def tolerance(self) -> float:
        """Largest difference of a logprob that counts as equal."""
        return self.target.tolerance or TOLERANCES.get(self.capabilities.dtype, 0.25)

    def note(self, **evidence: Any) -> None:
        """Add to the evidence of the present check."""
        self.evidence.update(evidence)

    async def enter(self, context: contextlib.AbstractAsyncContextManager[Any]) -> Any:
        """Enter a context that is left when the present check ends, however it ends."""
        return await self._per_check.enter_async_context(context)

    async def fresh(self, model: Path) -> Opened:
        """Start another endpoint that serves ``model``, until the present check ends. Needs ``fresh``."""
        found: Opened = await self.enter(opened(self.target, model, self.directory, self._start_deadline_s))
        return found

    def another_publisher(
        self, *, run_id: str | None = None, epoch: int = 0, backend: Backend | None = None
    ) -> SteppedPublisher:
        """Return another trainer side, until the present check ends: of another run, if ``run_id`` does not name one.

        Its versions go on from this run's.
        """
        other = SteppedPublisher(
            self.endpoint,
            self.capabilities,
            self.publisher.version,
            run_id=run_id,
            epoch=epoch,
            backend=backend,
            directory=self.directory / "updates" if backend == "file" else None,
        )
        self.publisher.touched = True
        self._per_check.callback(other.lose_group)
        return other

    async def another_connection(self) -> InferenceEndpoint:
        """Return the same endpoint, by a client of its own where it speaks HTTP, until the present check ends."""
        if self.opened.url is None:
            return self.endpoint
        client: InferenceEndpoint = await self.enter(contextlib.aclosing(self.opened.another_client()))
        return client

    async def another_client(self) -> InferenceEndpoint:
        """Return a further client of the server, made as the first one was, until the present check ends.

        Without a server there is one client only, and it is returned.
        """
        if self.opened.connect is None:
            return self.endpoint
        client: InferenceEndpoint = await self.enter(contextlib.aclosing(self.opened.connect()))
        return client

    # ------------------------------------------------------------------------------------------------- generation

    def prompt(self, length: int = 12, seed: int = 0) -> tuple[int, ...]:
        """Return ids that no text would encode to, from all over the vocabulary."""
        return tuple(random.Random(seed).choices(range(self.capabilities.vocab_size), k=length))

    def request(self, prompt: Sequence[int] | None = None, *, stream: bool = False, **sampling: Any) -> GenerateRequest:
        """Return a request with an id of its own; 8 tokens from seed 7 that ignore the end, unless told otherwise."""
        self._num_requests += 1
        params = SamplingParams(**self._declared({"max_tokens": 8, "ignore_eos": True, "seed": 7, **sampling}))
        return GenerateRequest(
            request_id=f"check-{id(self):x}-{self._num_requests}",
            prompt_token_ids=tuple(self.prompt() if prompt is None else prompt),
            sampling=params,
            stream=stream,
        )

    def _declared(self, sampling: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters without a seed where none may be asked for."""
        return sampling if self.capabilities.seeds else {**sampling, "seed": None}

    def pausing_policies(self) -> list[InFlightPolicy]:
        """Return the declared policies under which requests go on after an update; skips if there is none."""
        policies = (InFlightPolicy.KEEP, InFlightPolicy.RECOMPUTE)
        if declared := [policy for policy in policies if policy in self.capabilities.in_flight_policies]:
            return declared
        skip("neither keep nor recompute is declared: no request runs on across an update")

    def repeatable(self, seed: int) -> dict[str, Any]:
        """Return parameters under which a prompt gets the same tokens again: a seed, else greedy decoding."""
        return {"seed": seed} if self.capabilities.seeds else {"temperature": 0.0}

    def chat_request(self, **options: Any) -> ChatCompletionRequest:
        """Return a chat request to the declared model; 8 tokens from seed 7, unless told otherwise."""
        message = ChatMessage(role="user", content="Name three rivers.")
        settings = self._declared({"max_tokens": 8, "seed": 7, **options})
        return ChatCompletionRequest(model=self.capabilities.model, messages=(message,), **settings)

    async def generate(self, prompt: Sequence[int] | None = None, **sampling: Any) -> Completion:
        """Return the first completion of a request."""
        response = await self.endpoint.generate(self.request(prompt, **sampling))
        return response.completions[0]

    def lengths(self, num_tokens: int) -> list[int]:
        """Return lengths to try in turn, from ``num_tokens`` up, where an engine may be too fast for the first."""
        longest = self.capabilities.max_model_len - len(self.prompt())
        return [*(length for length in (num_tokens, 4 * num_tokens) if length < longest), longest]

    async def start_running(
        self,
        num: int = 4,
        *,
        max_tokens: int | None = None,
        prompts: Sequence[Sequence[int]] | None = None,
        **sampling: Any,
    ) -> list[tuple[GenerateRequest, asyncio.Task[GenerateResponse]]]:
        """Start long requests and return once all are being decoded; what is left of them is cancelled with the check.

        They are no more than the endpoint decodes at a time. By default they run to the end of the context, so that
        they outlast a few updates. Requests of ``max_tokens`` that ended before the endpoint could be asked what it
        runs are started again, four times as long: the requests that are returned say how long they are.
        """
        num = min(num, self.capabilities.max_concurrent_sequences)
        deadline = time.monotonic() + 8.0
        while True:
            requests = []
            for i in range(num):
                prompt = self.prompt(seed=100 + i) if prompts is None else prompts[i]
                room = self.capabilities.max_model_len - len(prompt)
                longest = min(max_tokens or room, room)
                requests.append(self.request(prompt, **{"max_tokens": longest, "seed": 100 + i, **sampling}))
            tasks = [asyncio.ensure_future(self.endpoint.generate(request)) for request in requests]
            await self.enter(cancelled_at_the_end(tasks))
            if await self._are_running(tasks, deadline):
                return list(zip(requests, tasks, strict=True))
            if max_tokens is None or max_tokens >= self.capabilities.max_model_len:
                fail("a request that fills the context had ended before the others were being decoded")
            max_tokens *= 4
            await asyncio.gather(*tasks)

    async def _are_running(self, tasks: Sequence[asyncio.Task[GenerateResponse]], deadline: float) -> bool:
        """Return True once all are being decoded, False if one had ended before."""
        num = len(tasks)
        while (await self.endpoint.weight_version()).num_running < num:
            if ended := [task for task in tasks if task.done()]:
                ended[0].result()
                return False
            require(time.monotonic() < deadline, f"{num} requests were not being decoded within 8 s (num_running)")
            await asyncio.sleep(0.002)
        return True

    # ----------------------------------------------------------------------------------------------- expectations

    def difference(self, found: Sequence[float], expected: torch.Tensor) -> float:
        """Return the largest difference between logprobs, infinite where one of them is not finite."""
        gap = (torch.tensor(list(found), dtype=torch.float64) - expected.double()).abs()
        return float(torch.nan_to_num(gap, nan=float("inf")).max())

    async def difference_from(
        self, weights: Weights, prompt: Sequence[int] | None = None, endpoint: InferenceEndpoint | None = None
    ) -> float:
        """Return by how much the logprobs of a fresh seeded request differ from those under ``weights``, at most."""
        request = self.request(prompt)
        completion = (await (endpoint or self.endpoint).generate(request)).completions[0]
        expected = self.reference.logprobs(weights, request.prompt_token_ids, completion.token_ids, request.sampling)
        return self.difference(completion.logprobs, expected)

    async def require_serves(self, weights: Weights, when: str, prompt: Sequence[int] | None = None) -> None:
        """Require that a fresh request samples from ``weights``, whole; the difference becomes evidence."""
        gap = await self.difference_from(weights, prompt)
        self.note(**{f"largest logprob difference from {weights.label}, {when}": gap})
        require(
            gap <= self.tolerance,
            f"{when}, logprobs differ by up to {gap:.3g} from those of weights {weights.label} "
            f"(tolerance {self.tolerance:g})",
        )

    def require_sampled_from(
        self, weights: Weights, request: GenerateRequest, completion: Completion, what: str
    ) -> None:
        """Require that every token of ``what`` has the logprob that ``weights`` give it."""
        expected = self.reference.logprobs(weights, request.prompt_token_ids, completion.token_ids, request.sampling)
        gap = self.difference(completion.logprobs, expected)
        require(
            gap <= self.tolerance,
            f"the logprobs of {what} differ by up to {gap:.3g} from those of weights {weights.label}",
        )

    async def require_state(self, state: EndpointState, when: str) -> None:
        """Require that the endpoint says that it is in ``state``."""
        found = (await self.endpoint.weight_version()).state
        require(found is state, f"{when}, the state is {found}, not {state}")

    async def require_raises(self, call: Any, kinds: tuple[type[InflightError], ...], what: str) -> InflightError:
        """Require that awaiting ``call`` raises one of ``kinds``; return it."""
        names = " or ".join(kind.__name__ for kind in kinds)
        try:
            answer = await call
        except kinds as error:
            return error
        except (InflightError, ValueError) as error:
            fail(f"{what} raised {type(error).__name__} ({error}) where {names} is due")
        fail(f"{what} was accepted (answer: {str(answer)[:200]}) where {names} is due")

    async def require_refused(self, call: Any, what: str) -> InflightError:
        """Require that awaiting ``call`` raises `UpdateRefusedError`; return it."""
        return await self.require_raises(call, (UpdateRefusedError,), what)

    # ---------------------------------------------------------------------------------------------------- inside

    async def _open(self) -> None:
        model = None if self._reference is None else self._reference.path
        with engines_that_fail() as made:
            self.opened = await self._stack.enter_async_context(
                opened(self.target, model, self.directory, self._start_deadline_s)
            )
        self._failing = made[-1] if made else None
        async with asyncio.timeout(self._start_deadline_s):
            self.capabilities = await self.endpoint.capabilities()
            version = await self.endpoint.weight_version()
        if self._reference is not None:
            self._reference.cast(self.capabilities.dtype)
        self._unknown_weights = version.run_id is not None or version.version != 0

    async def _reopen(self) -> None:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._stack.aclose(), _CLEAN_UP_S)
        self._stack = contextlib.AsyncExitStack()
        await self._open()

    async def _prepare(self) -> None:
        try:
            usable = await self._comes_back()
            if usable and self._is_suspect:
                await self._require_generates()
        except Exception:  # an adapter around a dead engine may raise anything
            if self.target.url is not None:
                raise
            usable = False
        if not usable and self.target.url is None:
            await self._reopen()
            if self._is_suspect:
                await self._require_generates()
        elif not usable:
            version = await self.endpoint.weight_version()
            fail(f"before this check the endpoint was {version.state} with {version.num_running} requests running")
        self._is_suspect = False
        served = (await self.endpoint.weight_version()).version
        self.publisher = SteppedPublisher(self.endpoint, self.capabilities, served)
        if self._reference is not None and self._unknown_weights:
            await self.publisher.publish(self._reference.weights)
            self.publisher.lose_group()
            self.publisher = SteppedPublisher(self.endpoint, self.capabilities, self.publisher.version)
            self._unknown_weights = False

    async def _comes_back(self) -> bool:
        """Return True once the endpoint is READY and idle, False if that takes too long."""
        started = time.monotonic()
        patience_s = _READY_WAIT_S if self._gone is None else _GONE_WAIT_S
        while True:
            try:
                async with asyncio.timeout(patience_s):
                    version = await self.endpoint.weight_version()
            except TimeoutError:
                fail(f"weight_version() gave no answer within {patience_s:g} s")
            waited_s = time.monotonic() - started
            is_ready = version.state is EndpointState.READY
            if is_ready and (version.num_running == 0 or (self.target.url and waited_s > _IDLE_WAIT_S)):
                return True
            if version.state is EndpointState.POISONED or waited_s > patience_s:
                return False
            if is_ready and waited_s > _IDLE_WAIT_S:
                return False
            await asyncio.sleep(0.01)

    async def _require_generates(self) -> None:
        """Require a token, whichever: an engine may be dead behind an endpoint that says READY."""
        try:
            async with asyncio.timeout(_TOKEN_WAIT_S if self._gone is None else _GONE_WAIT_S):
                await self.endpoint.generate(self.request(max_tokens=1))
        except TimeoutError:
            fail("generate() gave no token in time")

    async def _call(self, function: Callable[[Any], Any], deadline_s: float) -> None:
        check = asyncio.ensure_future(function(self))
        done, _ = await asyncio.wait([check], timeout=deadline_s)
        try:
            if not done:
                stacks = _task_stacks()
                check.cancel()
                await asyncio.wait([check], timeout=_CLEAN_UP_S)
                raise Hung(f"it did not end within its deadline of {deadline_s:g} s", stacks)
        finally:
            await self._clean_up()
        check.result()

    async def _clean_up(self) -> None:
        """Leave what the check entered; after any update the checkpoint's weights must be published again."""
        stack, self._per_check = self._per_check, contextlib.AsyncExitStack()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stack.aclose(), _CLEAN_UP_S)
        self.publisher.lose_group()
        self._unknown_weights = self._unknown_weights or self.publisher.touched


@contextlib.asynccontextmanager
async def cancelled_at_the_end(tasks: Sequence[asyncio.Task[Any]]) -> AsyncIterator[None]:
    """Cancel the tasks on the way out, and wait for them."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _task_stacks() -> str:
    """Return where every task of the running loop waits."""
    parts = []
    for task in asyncio.all_tasks():
        frames = task.get_stack(limit=12)
        if task is asyncio.current_task() or not frames:
            continue
        lines = traceback.format_list(
            [traceback.FrameSummary(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in frames]
        )
        parts.append(f"task {task.get_name()} ({task.get_coro()}):\n{''.join(lines)}")
    return "\n".join(parts) or "no task is waiting"

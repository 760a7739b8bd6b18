"""One endpoint of a run, which attributes the failure of a request to the item, the request or the endpoint."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import pydantic

from inflight.base.validation import describe_problems
from inflight.contracts import AbortingEndpoint, InferenceEndpoint, StreamingEndpoint
from inflight.environments.moving import without_unsupported_seed
from inflight.errors import (
    DeadlineError,
    EndpointError,
    InflightError,
    InvalidRequestError,
    ProtocolError,
    UnsupportedError,
)
from inflight.wire import (
    MAX_ABORTED,
    AbortRequests,
    Capabilities,
    Completion,
    CompletionChunk,
    DraftCounts,
    EndpointState,
    GenerateRequest,
    SamplingParams,
    WeightVersion,
)

_HEALTHY_S = 5.0
"""How long an endpoint may take to report that it is healthy."""


class UnusableItem(Exception):  # noqa: N818 - an outcome, not an error
    """No endpoint can sample this item; the message states why."""


class SlowRequest(Exception):  # noqa: N818 - an outcome, not an error
    """The request took too long on a healthy endpoint."""


@dataclass(slots=True, eq=False)
class SamplingEndpoint:
    """One endpoint of a run, and the version that was last published to it."""

    endpoint: InferenceEndpoint
    known_capabilities: Capabilities | None = None
    """The endpoint's capabilities; None until it has reported them."""
    version: int | None = None
    drafted: list[DraftCounts] = field(default_factory=list)
    """Draft counts of answered completions, if the endpoint reports them; shared by the endpoints of an actor."""
    on_idle: Callable[[], None] | None = None
    """Called once the endpoint is retired and has no running requests."""
    run_id: str | None = None
    """The run whose versions the endpoint may sample from; if None, any run."""
    _num_arrived: int = 0
    """Number of requests whose run had to be checked; the first ``_num_checked`` are known to have used this run's
    weights.
    """
    _num_checked: int = 0
    _checking: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        return self.endpoint.name

    async def capabilities(self) -> Capabilities:
        """Return the capabilities of the endpoint, which are requested once."""
        if self.known_capabilities is None:
            self.known_capabilities = await self.endpoint.capabilities()
        return self.known_capabilities

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests early, so that they return their partial completions. Raises `EndpointError`."""
        if not isinstance(self.endpoint, AbortingEndpoint):
            raise UnsupportedError(f"{self.name} reports partial_rollouts but has no abort_requests")
        for start in range(0, len(request_ids), MAX_ABORTED):
            ids = tuple(request_ids[start : start + MAX_ABORTED])
            await self.endpoint.abort_requests(AbortRequests(request_ids=ids))

    async def sample(self, request: GenerateRequest) -> tuple[Completion, ...]:
        """Return the completions of one request. The seed is left out if the endpoint does not support seeds.

        Raises `UnusableItem` if the request is refused, `SlowRequest` if it is late and the endpoint is healthy, and
        `EndpointError` for anything else.
        """
        version = self.version
        async with self._translate_errors():
            completions = (
                await self.endpoint.generate(without_unsupported_seed(request, await self.capabilities()))
            ).completions
            await self._check_run()
        _check_versions(self.name, version, [span.version for it in completions for span in it.version_spans])
        self.drafted += [it.draft_counts for it in completions if it.draft_counts is not None]
        return completions

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        """Yield the tokens of one completion as they are sampled. The endpoint must support streaming.

        Closing the iterator ends the request. Raises the same errors as `sample`.
        """
        version = self.version
        if not isinstance(self.endpoint, StreamingEndpoint):
            raise UnsupportedError(f"{self.name} does not support streaming")
        async with self._translate_errors():
            streamed = without_unsupported_seed(request, await self.capabilities()).model_copy(update={"stream": True})
            chunks: Any = self.endpoint.generate_stream(streamed)
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    if chunk.token_ids:
                        _check_versions(self.name, version, [chunk.version])
                    if chunk.finish_reason is not None:
                        await self._check_run()
                    yield chunk

    async def _check_run(self) -> None:
        """Raise `EndpointError` if tokens that have arrived may come from another run's weights.

        The endpoint is asked after the tokens have arrived; one answer covers all tokens that arrived before it was
        requested. A trainer never takes an endpoint back from another run, so an endpoint that belongs to this run now
        also belonged to it when it sampled the tokens.
        """
        if self.run_id is None:
            return
        self._num_arrived += 1
        number = self._num_arrived
        async with self._checking:
            if self._num_checked >= number:
                return
            num_arrived, answer = self._num_arrived, await version_of(self.endpoint, _HEALTHY_S)
            if answer is None:
                raise EndpointError(
                    f"it did not report within {_HEALTHY_S:g} s which run's weights it sampled from", self.name
                )
            if answer.run_id not in (None, self.run_id):
                raise EndpointError(
                    f"it serves version {answer.version} of run {answer.run_id!r}, which has taken over the server: "
                    "give each run its own servers",
                    self.name,
                )
            self._num_checked = num_arrived

    @contextlib.asynccontextmanager
    async def _translate_errors(self) -> AsyncIterator[None]:
        """Convert exceptions raised in the body to the errors that `sample` raises."""
        try:
            yield
        except InvalidRequestError as error:
            raise UnusableItem(f"the request was refused: {error}") from error
        except DeadlineError as error:
            answer = await version_of(self.endpoint, _HEALTHY_S)
            if answer is not None and answer.state is not EndpointState.POISONED:
                raise SlowRequest(str(error)) from error
            raise
        except EndpointError:
            raise
        except Exception as error:  # endpoints may be user code
            raise EndpointError(
                f"the endpoint's generate failed: {type(error).__name__}: {error}", self.name
            ) from error


def request_of(
    request_id: str, prompt_token_ids: tuple[int, ...], sampling: SamplingParams, *, routed_experts: bool = False
) -> GenerateRequest:
    """Return a request. Raises `UnusableItem` if the prompt does not form a valid request."""
    try:
        return GenerateRequest(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            routed_experts=routed_experts,
        )
    except pydantic.ValidationError as error:
        raise UnusableItem(f"its prompt does not form a valid request: {describe_problems(error)}") from error


def _check_versions(name: str, version: int | None, sampled: Collection[int]) -> None:
    """Raise `ProtocolError` if a token is older than the version published before the request."""
    oldest = min(sampled, default=version)
    if version is not None and oldest is not None and oldest < version:
        raise ProtocolError(
            f"version {version} was published to it, but it sampled from version {oldest}: another server has taken "
            "its place",
            name,
        )


async def version_of(endpoint: InferenceEndpoint, timeout_s: float) -> WeightVersion | None:
    """Return which version an endpoint serves; None if it does not answer in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await endpoint.weight_version()
    except (TimeoutError, InflightError):
        return None

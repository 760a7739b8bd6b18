"""The requests that a dialect has sent to its endpoints, so that a client can end them."""

from __future__ import annotations

from collections.abc import Collection

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inflight.base.tasks import finish_all
from inflight.contracts import AbortingEndpoint, InferenceEndpoint, ScoringEndpoint
from inflight.dialects.directory_updates import DirectoryUpdates
from inflight.dialects.serving import EndpointPool
from inflight.errors import UnsupportedError
from inflight.http.receiving import run_while_connected
from inflight.wire import AbortRequests, GenerateRequest, GenerateResponse, InFlightPolicy, ScoreRequest, ScoreResponse

_REFUSING = (InFlightPolicy.DRAIN, InFlightPolicy.ABORT)


class RunningRequests:
    """Sends requests to the endpoints of ``pool``. ``updates`` is None where clients cannot pause sampling."""

    def __init__(self, pool: EndpointPool, updates: DirectoryUpdates | None) -> None:
        self._pool = pool
        self._updates = updates
        self._running: dict[str, tuple[str, InferenceEndpoint]] = {}
        """Name and endpoint of each running request, by the id that the endpoint knows."""

    def refusal(self) -> Response | None:
        """Return the answer to new requests while a pause lets running ones finish or ends them; otherwise None.

        vLLM 0.33 refuses them as well; with ``keep``, they wait.
        """
        if self._updates is None or self._updates.pause_policy not in _REFUSING:
            return None
        message = f"sampling is paused ({self._updates.pause_policy}); send the request again after it is resumed"
        return JSONResponse({"error": {"message": message, "code": "engine_paused"}}, 503)

    async def generate(self, request: Request, asked: GenerateRequest, name: str | None) -> GenerateResponse:
        """Return the completions of a client's request, which ends if the client disconnects."""
        with self._pool.least_loaded() as endpoint:
            self._running[asked.request_id] = (name or asked.request_id, endpoint)
            try:
                return await run_while_connected(request, endpoint.generate(asked))
            finally:
                del self._running[asked.request_id]

    async def score(self, request: Request, asked: ScoreRequest) -> ScoreResponse:
        """Return the logprobs of given tokens. Raises `UnsupportedError` where scoring is not supported."""
        with self._pool.least_loaded() as endpoint:
            if not isinstance(endpoint, ScoringEndpoint) or not (await endpoint.capabilities()).scoring:
                raise UnsupportedError(f"{endpoint.name} does not support scoring, which prompt logprobs need")
            return await run_while_connected(request, endpoint.score(asked))

    async def abort(self, names: Collection[str]) -> None:
        """End the running requests with these names, or all of them if there are none.

        Raises `UnsupportedError` if an endpoint cannot end requests.
        """
        ids: dict[InferenceEndpoint, list[str]] = {}
        for request_id, (name, endpoint) in self._running.items():
            if not names or name in names:
                ids.setdefault(endpoint, []).append(request_id)
        calls = []
        for endpoint, found in ids.items():
            if not isinstance(endpoint, AbortingEndpoint) or not (await endpoint.capabilities()).partial_rollouts:
                raise UnsupportedError(f"{endpoint.name} cannot end running requests")
            calls.append(endpoint.abort_requests(AbortRequests(request_ids=tuple(found))))
        await finish_all(*calls)

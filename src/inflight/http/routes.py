"""The routes of the contract, one record per route. The client, server and OpenAPI document are derived from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from inflight import wire

KB = 1 << 10
MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Size:
    """Maximum body size of a message: ``fixed_bytes``, plus ``token_bytes`` for each token."""

    fixed_bytes: int
    token_bytes: int = 0
    image_bytes: int = 0
    """Additional bytes if the endpoint supports images."""
    routed_bytes: int = 0
    """Additional bytes for each token whose experts are requested, including prompt tokens."""

    def bytes_for(self, num_tokens: int, *, images: bool = False, num_routed: int = 0) -> int:
        return (
            self.routed_bytes * num_routed
            + self.fixed_bytes
            + self.token_bytes * num_tokens
            + (self.image_bytes if images else 0)
        )


Response = TypeVar("Response", bound=wire.WireModel)


@dataclass(frozen=True, slots=True)
class Route(Generic[Response]):
    """One route: its request (None if it has no body), its response (None for text), and the token that it requires.

    ``control`` routes require the control token. If the server has a generation token, ``generation`` routes require
    one of the two tokens.

    ``request_size`` is based on the endpoint's context length, ``response_size`` on the number of tokens in all
    requested completions. A token id takes 16 bytes including a comma and white space; a sampled token adds its logprob
    and, at worst, a version span. Every 64 bytes of chat text are at least one token, except in runs of white space.
    """

    method: Literal["GET", "POST"]
    path: str
    operation: str
    summary: str
    request: type[wire.WireModel] | None
    response: type[Response] | None
    control: bool = False
    generation: bool = False
    needs: wire.Needs | None = None
    """The capability that the route requires of the server."""
    request_size: Size = Size(0)
    response_size: Size = Size(MB)


def _control(
    operation: str,
    summary: str,
    request: type[wire.WireModel],
    response: type[Response],
    request_size: Size = Size(64 * KB),
    needs: wire.Needs | None = None,
) -> Route[Response]:
    path = f"/{operation}"
    return Route("POST", path, operation, summary, request, response, True, needs=needs, request_size=request_size)


CAPABILITIES = Route("GET", "/capabilities", "capabilities", "The capabilities of this server", None, wire.Capabilities)
WEIGHT_VERSION = Route(
    "GET", "/weight_version", "weight_version", "The weights that are currently served", None, wire.WeightVersion
)
INIT_PROCESS_GROUP = _control(
    "init_process_group",
    "Set how weights are sent from now on: join their group, pending until it is formed, or record where they are "
    "stored",
    wire.TransportBody,
    wire.Acknowledgement,
)
REQUEST_WEIGHT_UPDATE = _control(
    "request_weight_update",
    "Announce an update, and pause sampling unless it is staged; the only call that may refuse",
    wire.WeightUpdate,
    wire.Acknowledgement,
    Size(64 * MB),  # a name and a shape for each tensor; the largest models have 100,000 tensors
)
RECEIVE_WEIGHTS = _control(
    "receive_weights", "Receive one bucket; pending until it has arrived", wire.BucketTransfer, wire.Acknowledgement
)
COMMIT_WEIGHT_UPDATE = _control(
    "commit_weight_update", "Switch to the new weights and resume", wire.UpdateRef, wire.WeightVersion
)
ABORT_WEIGHT_UPDATE = _control(
    "abort_weight_update", "End an update before it is committed", wire.UpdateRef, wire.WeightVersion
)
ABORT_REQUESTS = _control(
    "abort_requests",
    "End running requests with the tokens sampled so far",
    wire.AbortRequests,
    wire.Acknowledgement,
    Size(4 * MB),  # 1024 ids of 256 characters, each of which may take 12 bytes in JSON
    needs=wire.Needs(partial_rollouts=True),
)
RELEASE_MEMORY = Route(
    "POST",
    "/release_memory",
    "release_memory",
    "Release the memory of weights, keys and values; refused while requests run",
    None,
    wire.WeightVersion,
    True,
    needs=wire.Needs(releases_memory=True),
)
RESTORE_MEMORY = Route(
    "POST",
    "/restore_memory",
    "restore_memory",
    "Reacquire that memory, and serve the same weights again",
    None,
    wire.WeightVersion,
    True,
    needs=wire.Needs(releases_memory=True),
)
RECORD_HISTORY = _control(
    "record_history",
    "Remember finished completions, from which later requests with the same prompts take their drafts",
    wire.DraftHistory,
    wire.Acknowledgement,
    Size(64 * MB),  # four million tokens
    needs=wire.Needs(drafts=True),
)
GENERATE = Route(
    "POST",
    "/v1/generate",
    "generate",
    "Token ids in; token ids, behaviour logprobs and version spans out (server-sent events when streaming)",
    wire.GenerateRequest,
    wire.GenerateResponse,
    generation=True,
    request_size=Size(MB, 16, wire.MAX_IMAGES_LENGTH),
    response_size=Size(MB, 256, routed_bytes=4 * KB),  # 128 layers of 12 experts, in two bytes each
)
SCORE = Route(
    "POST",
    "/v1/score",
    "score",
    "Token ids in; their logprobs out, with the most likely tokens and candidates at their positions",
    wire.ScoreRequest,
    wire.ScoreResponse,
    generation=True,
    request_size=Size(MB, 16 * (1 + wire.MAX_ALTERNATIVES)),
    response_size=Size(MB, 64),  # per logprob, or per top token with its logprob
)
CHAT_COMPLETIONS = Route(
    "POST",
    "/v1/chat/completions",
    "chat_completion",
    "The OpenAI shape plus token ids, behaviour logprobs and version spans",
    wire.ChatCompletionRequest,
    wire.ChatCompletion,
    generation=True,
    request_size=Size(MB, 64, wire.MAX_IMAGES_LENGTH),
    response_size=Size(MB, 4 * KB),  # logprobs list the text and the bytes of each token
)
MODELS = Route("GET", "/v1/models", "models", "The served model", None, wire.ModelList)
HEALTH = Route("GET", "/health", "health", "200 unless the server is joining or poisoned", None, wire.Health)
METRICS: Route[Any] = Route("GET", "/metrics", "metrics", "Prometheus metrics as text", None, None)

ROUTES: tuple[Route[Any], ...] = (
    CAPABILITIES,
    WEIGHT_VERSION,
    INIT_PROCESS_GROUP,
    REQUEST_WEIGHT_UPDATE,
    RECEIVE_WEIGHTS,
    COMMIT_WEIGHT_UPDATE,
    ABORT_WEIGHT_UPDATE,
    ABORT_REQUESTS,
    RELEASE_MEMORY,
    RESTORE_MEMORY,
    RECORD_HISTORY,
    GENERATE,
    SCORE,
    CHAT_COMPLETIONS,
    MODELS,
    HEALTH,
    METRICS,
)

GENERATION_PATHS = frozenset(route.path for route in ROUTES if route.generation)

STATUS_OF_CODE = {
    "invalid_request": 400,
    "unsupported": 400,
    "unauthorized": 401,
    "update_refused": 409,
    "fenced": 409,
    "update_aborted": 409,
    "busy": 409,
    "transfer_error": 502,
    "poisoned": 503,
    "released": 503,
    "unreachable": 503,
    "deadline": 504,
}
"""HTTP status of each error code; every other code has status 500."""

REFUSED_STATUSES = (403, 404, 405, 408, 413, 415)
"""Further statuses of ``invalid_request``: request from a web page of another origin, unknown route, wrong method, body
that arrives too slowly, body that is too long, body that is not JSON.
"""

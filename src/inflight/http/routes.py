"""The routes of the contract, one record each; client, server and OpenAPI document are all derived from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from inflight import wire

KB = 1 << 10
MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Size:
    """Longest body that a message can need: ``fixed_bytes``, and so many for each token that it may speak of."""

    fixed_bytes: int
    token_bytes: int = 0

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bound for a message of ``num_tokens`` tokens."""
        return self.fixed_bytes + self.token_bytes * num_tokens


@dataclass(frozen=True, slots=True)
class Route:
    """One route: what goes in (None: no body), what comes out, and whether it takes the control token.

    ``request_size`` is for as many tokens as the context of the endpoint has, ``response_size`` for those of all
    completions that were asked for. A token id takes 16 bytes with its comma and some white space, a sampled token its
    logprob and at worst a version span besides. 64 bytes of chat text make one token at least, but for runs of blanks.
    """

    method: Literal["GET", "POST"]
    path: str
    operation: str
    summary: str
    request: type[BaseModel] | None
    response: type[BaseModel] | None
    control: bool = False
    request_size: Size = Size(0)
    response_size: Size = Size(MB)


CAPABILITIES = Route("GET", "/capabilities", "capabilities", "What this server can do", None, wire.Capabilities)
WEIGHT_VERSION = Route(
    "GET", "/weight_version", "weight_version", "Which weights are served now", None, wire.WeightVersion
)
INIT_PROCESS_GROUP = Route(
    "POST",
    "/init_process_group",
    "init_process_group",
    "Say how weights travel from now on: join their group, pending until it is formed, or note where they are stored",
    wire.TransportBody,
    wire.Acknowledgement,
    control=True,
    request_size=Size(64 * KB),
)
REQUEST_WEIGHT_UPDATE = Route(
    "POST",
    "/request_weight_update",
    "request_weight_update",
    "Announce an update, and hold sampling unless it is staged; the only call that may refuse",
    wire.WeightUpdate,
    wire.Acknowledgement,
    control=True,
    request_size=Size(64 * MB),  # a name and a shape for each tensor, of which the largest models have 100,000
)
RECEIVE_WEIGHTS = Route(
    "POST",
    "/receive_weights",
    "receive_weights",
    "Receive one bucket; pending until it has arrived",
    wire.BucketTransfer,
    wire.Acknowledgement,
    control=True,
    request_size=Size(64 * KB),
)
COMMIT_WEIGHT_UPDATE = Route(
    "POST",
    "/commit_weight_update",
    "commit_weight_update",
    "Switch to the new weights and resume",
    wire.UpdateRef,
    wire.WeightVersion,
    control=True,
    request_size=Size(64 * KB),
)
ABORT_WEIGHT_UPDATE = Route(
    "POST",
    "/abort_weight_update",
    "abort_weight_update",
    "End an update before it is committed",
    wire.UpdateRef,
    wire.WeightVersion,
    control=True,
    request_size=Size(64 * KB),
)
GENERATE = Route(
    "POST",
    "/v1/generate",
    "generate",
    "Token ids in; token ids, behaviour logprobs and version spans out (server-sent events when streaming)",
    wire.GenerateRequest,
    wire.GenerateResponse,
    request_size=Size(MB, 16),
    response_size=Size(MB, 256),
)
CHAT_COMPLETIONS = Route(
    "POST",
    "/v1/chat/completions",
    "chat_completion",
    "The OpenAI shape plus token ids, behaviour logprobs and version spans",
    wire.ChatCompletionRequest,
    wire.ChatCompletion,
    request_size=Size(MB, 64),
    response_size=Size(MB, 4 * KB),  # logprobs list the text and the bytes of each token
)
MODELS = Route("GET", "/v1/models", "models", "The served model", None, wire.ModelList)
HEALTH = Route("GET", "/health", "health", "200 while the server can generate or is being updated", None, wire.Health)
METRICS = Route("GET", "/metrics", "metrics", "Prometheus metrics as text", None, None)

ROUTES = (
    CAPABILITIES,
    WEIGHT_VERSION,
    INIT_PROCESS_GROUP,
    REQUEST_WEIGHT_UPDATE,
    RECEIVE_WEIGHTS,
    COMMIT_WEIGHT_UPDATE,
    ABORT_WEIGHT_UPDATE,
    GENERATE,
    CHAT_COMPLETIONS,
    MODELS,
    HEALTH,
    METRICS,
)

STATUS_OF_CODE = {
    "invalid_request": 400,
    "unsupported": 400,
    "unauthorized": 401,
    "update_refused": 409,
    "fenced": 409,
    "update_aborted": 409,
    "transfer_failed": 502,
    "poisoned": 503,
    "unreachable": 503,
    "deadline": 504,
}
"""HTTP status of each error code; every other one is 500."""

REFUSED_STATUSES = (404, 405, 413)
"""Further statuses of ``invalid_request``: no such route, no such method, a body that is too long."""

"""What a server reports about itself: capabilities, health and errors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from pydantic import Field

from inflight.wire.fields import PROTOCOL_VERSION, Items, Natural, TokenCount, WireModel
from inflight.wire.weights import Encoding, EndpointState, InFlightPolicy, TransportName


class Capabilities(WireModel):
    """What an endpoint can do. A request for anything not declared here is refused."""

    protocol_version: Natural = PROTOCOL_VERSION
    engine: str
    engine_version: str
    model: str
    vocab_size: TokenCount
    max_model_len: int = Field(ge=2, le=2**31 - 1)
    """Longest sequence, prompt and completion together, in tokens."""
    dtype: str
    in_flight_policies: Items[InFlightPolicy]
    transports: Items[TransportName]
    staging: bool = False
    """Whether sampling may go on while an update arrives, see `WeightUpdate.staged`."""
    encodings: Items[Encoding] = ()
    """Encodings of buckets that the endpoint understands besides ``raw``."""
    partial_updates: bool = False
    """Whether an update may leave tensors out, see `Manifest.frozen`."""
    lora: bool = False
    """Whether an update may be a LoRA, see `Manifest.lora`."""
    partial_rollouts: bool = False
    """Whether requests can be aborted with what they have, see `inflight.contracts.AbortingEndpoint`."""
    version_binding: Literal["spans", "first_token", "admission"]
    logprob_kind: Literal["processed", "raw"]
    num_ranks: int = Field(ge=1, le=65535)
    """Number of ranks that this endpoint takes in a weight group."""
    max_concurrent_sequences: TokenCount
    streaming: bool
    chat: bool
    seeds: bool = True
    """Whether a request may have a seed. If not, a request with a seed is refused."""
    releases_memory: bool = False
    """Whether the memory of weights, keys and values can be released, see `EndpointState.RELEASED`."""
    images: bool = False
    """Whether prompts may have images, see `PromptImage`."""
    drafts: bool = False
    """Whether completions of a prompt may be drafted from the `DraftHistory` that was recorded for it."""
    draft_counts: bool = False
    """Whether completions have `DraftCounts`, except in streams."""
    routed_experts: bool = False
    """Whether a request may ask which experts computed its tokens, see `RoutedExperts`."""
    manifest_digest: str | None = None
    """`Manifest.digest` of the weights that the endpoint accepts, in its own order; None if unknown."""

    def lacks(
        self,
        *,
        in_flight: InFlightPolicy | None = None,
        transport: TransportName | None = None,
        encodings: Collection[Encoding] = (),
        partial_updates: bool = False,
        lora: bool = False,
        releases_memory: bool = False,
        routed_experts: bool = False,
    ) -> str | None:
        """Return the first of these needs that is not declared, in words that follow "does not declare"."""
        if in_flight is not None and in_flight not in self.in_flight_policies:
            return f"the in-flight policy {in_flight}; it declares {', '.join(self.in_flight_policies) or 'none'}"
        if transport is not None and transport not in self.transports:
            return f"the {transport} transport; it declares {', '.join(self.transports) or 'none'}"
        for encoding in encodings:
            if encoding not in ("raw", *self.encodings):
                return f"the encoding {encoding}; it declares {', '.join(('raw', *self.encodings))}"
        if partial_updates and not self.partial_updates:
            return "partial updates"
        if lora and not self.lora:
            return "lora"
        if routed_experts and not self.routed_experts:
            return "routed_experts"
        return "releases_memory" if releases_memory and not self.releases_memory else None


class Health(WireModel):
    """Answer of ``/health``; status 200 while ``ok``, else 503."""

    ok: bool
    state: EndpointState
    version: Natural


class Acknowledgement(WireModel):
    """Empty success."""

    ok: Literal[True]


class ErrorDetail(WireModel):
    """What happened, in the OpenAI shape; ``code`` names the class in `inflight.errors`."""

    message: str
    type: str = "inflight_error"
    code: str
    param: str | None = None


class ErrorBody(WireModel):
    """Body of every answer that is not a success."""

    error: ErrorDetail

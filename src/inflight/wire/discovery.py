"""Messages in which a server describes itself: capabilities, health and errors."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from pydantic import Field

from inflight.wire.chat import ChatCompletionRequest
from inflight.wire.fields import PROTOCOL_VERSION, Items, Natural, TokenCount, WireModel
from inflight.wire.generation import GenerateRequest
from inflight.wire.scoring import ScoreRequest
from inflight.wire.weights import Encoding, EndpointState, InFlightPolicy, TransportName, WeightUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run, an update or a request requires of an endpoint. Fields at their defaults require nothing.

    A flag with the same name as a field of `Capabilities` requires that capability.
    """

    in_flight: InFlightPolicy | None = None
    transport: TransportName | None = None
    encodings: tuple[Encoding, ...] = ()
    staging: bool = False
    partial_updates: bool = False
    sharded: bool = False
    lora: bool = False
    lora_or_merged: bool = False
    """Updates of a LoRA, sent either as a LoRA or as a partial update of the merged weights."""
    partial_rollouts: bool = False
    processed_logprobs: bool = False
    dtype: str | None = None
    vocab_size: int | None = None
    streaming: bool = False
    chat: bool = False
    seeds: bool = False
    releases_memory: bool = False
    images: bool = False
    drafts: bool = False
    routed_experts: bool = False
    scoring: bool = False
    top_k: int = 0
    """The number of most likely tokens that a score request asks for."""
    candidates: bool = False

    @classmethod
    def of_update(cls, update: WeightUpdate) -> Needs:
        """Return what an endpoint has to support for an update."""
        return cls(
            in_flight=update.in_flight,
            encodings=tuple(update.encodings),
            staging=update.staged,
            partial_updates=bool(update.manifest.frozen),
            sharded=bool(update.manifest.shardings),
            lora=update.manifest.lora is not None,
        )

    @classmethod
    def of_request(cls, request: GenerateRequest) -> Needs:
        """Return what an endpoint has to support for a request."""
        return cls(
            seeds=request.sampling.seed is not None,
            images=bool(request.images),
            routed_experts=request.routed_experts,
        )

    @classmethod
    def of_score(cls, request: ScoreRequest) -> Needs:
        """Return what an endpoint has to support for a score request."""
        return cls(scoring=True, top_k=request.top_k, candidates=bool(request.candidates))

    @classmethod
    def of_chat(cls, request: ChatCompletionRequest) -> Needs:
        """Return what an endpoint has to support for a chat request."""
        return cls(chat=True, images=any(message.image_urls for message in request.messages))


class Capabilities(WireModel):
    """The capabilities of an endpoint. A request for anything else is refused."""

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
    """Whether sampling may continue while an update arrives, see `WeightUpdate.staged`."""
    encodings: Items[Encoding] = ()
    """Encodings of buckets that the endpoint supports in addition to ``raw``."""
    partial_updates: bool = False
    """Whether an update may omit tensors, see `Manifest.frozen`."""
    sharded: bool = False
    """Whether several senders may each send a part of every bucket, see `Manifest.shardings`."""
    lora: bool = False
    """Whether an update may be a LoRA, see `Manifest.lora`."""
    partial_rollouts: bool = False
    """Whether requests can be aborted and keep their tokens, see `inflight.contracts.AbortingEndpoint`."""
    version_binding: Literal["spans", "first_token", "admission"]
    logprob_kind: Literal["processed", "raw"]
    num_ranks: int = Field(ge=1, le=65535)
    """Number of ranks that this endpoint occupies in a weight group."""
    max_concurrent_sequences: TokenCount
    streaming: bool
    chat: bool
    seeds: bool = True
    """Whether a request may have a seed. If not, a request with a seed is refused."""
    releases_memory: bool = False
    """Whether the memory of the weights and the KV cache can be released, see `EndpointState.RELEASED`."""
    images: bool = False
    """Whether prompts may contain images, see `PromptImage`."""
    drafts: bool = False
    """Whether tokens of a completion may be drafted from the `DraftHistory` of its prompt (speculative decoding)."""
    draft_counts: bool = False
    """Whether completions that are not streamed have `DraftCounts`."""
    routed_experts: bool = False
    """Whether a request may ask which experts computed its tokens, see `RoutedExperts`."""
    scoring: bool = False
    """Whether tokens can be scored, see `inflight.contracts.ScoringEndpoint`."""
    max_top_k: Natural = 0
    """Maximum `ScoreRequest.top_k`."""
    candidates: bool = False
    """Whether a score request may have candidates."""
    manifest_digest: str | None = None
    """`Manifest.digest` of the weights that the endpoint accepts, in the endpoint's order; None if unknown."""

    def missing(self, needs: Needs) -> dict[str, str]:
        """Return the needs that an endpoint with these capabilities does not meet, by name.

        Each value is text that can follow the words "does not support".
        """
        found: dict[str, str] = {}
        if needs.in_flight not in (None, *self.in_flight_policies):
            supported = ", ".join(self.in_flight_policies) or "none"
            found["in_flight"] = f"the in-flight policy {needs.in_flight}; it supports {supported}"
        if needs.transport not in (None, *self.transports):
            supported = ", ".join(self.transports) or "none"
            found["transport"] = f"the {needs.transport} transport; it supports {supported}"
        encodings = ("raw", *self.encodings)
        if unknown := [encoding for encoding in needs.encodings if encoding not in encodings]:
            found["encodings"] = f"the encoding {unknown[0]}; it supports {', '.join(encodings)}"
        if needs.lora_or_merged and not (self.lora or self.partial_updates):
            found["lora_or_merged"] = "lora or partial_updates"
        if needs.processed_logprobs and self.logprob_kind != "processed":
            found["processed_logprobs"] = "processed logprobs; its raw logprobs ignore the temperature"
        if needs.dtype not in (None, self.dtype):
            found["dtype"] = f"dtype {needs.dtype}; it serves {self.model} in {self.dtype}"
        if needs.vocab_size not in (None, self.vocab_size):
            found["vocab_size"] = (
                f"a vocabulary of {needs.vocab_size} tokens; it serves {self.model} with {self.vocab_size}"
            )
        if needs.top_k > self.max_top_k:
            found["top_k"] = f"top_k {needs.top_k}; it returns at most {self.max_top_k} of the most likely tokens"
        flags = [field.name for field in fields(needs) if getattr(needs, field.name) is True]
        return found | {name: name for name in flags if getattr(self, name, True) is False}


class Health(WireModel):
    """Response of ``/health``; its HTTP status is 200 if ``ok`` is true, otherwise 503."""

    ok: bool
    state: EndpointState
    version: Natural


class Acknowledgement(WireModel):
    """The empty response of a call that succeeded."""

    ok: Literal[True]


class ErrorDetail(WireModel):
    """A description of an error in OpenAI's format; ``code`` identifies the class in `inflight.errors`."""

    message: str
    type: str = "inflight_error"
    code: str
    param: str | None = None


class ErrorBody(WireModel):
    """Body of every response to a call that failed."""

    error: ErrorDetail

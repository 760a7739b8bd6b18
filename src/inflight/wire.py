"""Messages between processes: the bodies of the contract over HTTP, as frozen pydantic models.

No tensor crosses here and nothing is pickled. Unknown keys are refused, so that two sides never disagree in silence.
The module knows nothing of HTTP, engines or trainers.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import math
import re
from collections import Counter
from collections.abc import Collection
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, RootModel, model_validator

CONTRACT_EDITION = 2
"""Edition of the contract; it grows when a peer of the previous edition would be misread."""

DTYPE_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Wire dtypes of weights, and the size of one element in bytes."""

Backend = Literal["gloo", "nccl", "shm", "file", "http"]
"""How weights travel: by broadcast in a process group, or by what the publisher stores and each endpoint reads."""

Encoding = Literal["raw", "bfloat16", "float8", "delta"]
"""How the bytes of a bucket are made from its tensors; see `inflight.weights.encoding`."""


T = TypeVar("T")

Items = Annotated[tuple[T, ...], Field(fail_fast=True)]
"""A sequence whose validation ends at its first bad element, so that a long one costs one error and not one each."""

Natural = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""A count, an index or a version: what a signed integer of 64 bits holds."""

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]

TokenCount = Annotated[int, Field(ge=1, le=2**31 - 1)]

Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
"""Of a request: signed or unsigned, of 64 bits."""

Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]
"""How long something may take: a week at most, which every clock and every wait of a system can count."""

RunId = Annotated[str, Field(min_length=1, max_length=1024)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]


def _usable_host(host: str) -> str:
    """Return ``host`` if it is an IP address or a host name in ASCII. Raises ``ValueError``."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if len(host) > 253 or not all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}", it) for it in host.split(".")):
            raise ValueError("it is neither an IP address nor a host name") from None
    return host


def _usable_url(url: str) -> str:
    """Return ``url`` if it names a host, and a port in range if any. Raises ``ValueError``."""
    if not all("!" <= character <= "~" for character in url):
        raise ValueError("it holds characters that no URL can carry; percent-encode them")
    parts = urlsplit(url)
    if parts.username is not None:
        raise ValueError("it names a user; send the token as token")
    if parts.port == 0:
        raise ValueError("port 0 is none to connect to")
    _usable_host(parts.hostname or "")
    return url


def _usable_path(path: str) -> str:
    if "\0" in path:
        raise ValueError("a path holds no NUL")
    return path


class WireModel(BaseModel):
    """Base of every message: immutable, strict about unknown keys, without infinities, and every number has bounds."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class InFlightPolicy(StrEnum):
    """What happens to running requests when weights change."""

    KEEP = "keep"
    """They pause and go on with the keys and values that older weights computed."""
    RECOMPUTE = "recompute"
    """They pause, and their keys and values are computed again under the new weights."""
    DRAIN = "drain"
    """They finish under the old weights; nothing new starts until the new ones are live."""
    ABORT = "abort"
    """They end at once with what they have, and finish reason ``abort``."""


class EndpointState(StrEnum):
    """States of an endpoint; `inflight.weights.session` holds the transitions."""

    JOINING = "joining"
    READY = "ready"
    STAGING = "staging"
    """An update arrives while sampling goes on from the weights of before."""
    HELD = "held"
    UPDATING = "updating"
    POISONED = "poisoned"


# ---------------------------------------------------------------------------------------------------------------
# Weights


class TensorSpec(WireModel):
    """One tensor as it is loaded: checkpoint name, dtype (a key of `DTYPE_SIZES`), full unsharded shape.

    ``uint8`` is for the bytes of a whole bucket, which a transport moves as one tensor.
    """

    name: str = Field(min_length=1, max_length=1024)
    dtype: Literal["float64", "float32", "bfloat16", "float16", "uint8"]
    shape: Items[Natural] = Field(max_length=64)

    @property
    def num_elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor on the wire."""
        return self.num_elements * DTYPE_SIZES.get(self.dtype, 1)


class AdapterSpec(WireModel):
    """A low-rank adapter: each adapted weight is its base plus `scale` times B A.

    The base is the weights of the endpoint's last update that was no adapter, or of the checkpoint it was started from.
    The tensors of module M are named as PEFT saves them, ``base_model.model.M.lora_A.weight`` [rank, in] and
    ``base_model.model.M.lora_B.weight`` [out, rank], and change ``M.weight`` [out, in].
    """

    rank: int = Field(ge=1, le=2**31 - 1)
    alpha: float = Field(gt=0, le=1e6)
    rslora: bool = False
    """Whether the scale is divided by the square root of the rank (arXiv 2312.03732), and not by the rank."""

    @property
    def scale(self) -> float:
        """What the product of the two matrices is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class Manifest(WireModel):
    """Every tensor of one update, in the order in which they travel; and which of the model's are left out."""

    tensors: Items[TensorSpec] = Field(min_length=1)
    adapter: AdapterSpec | None = None
    """The tensors are those of an adapter, which replaces the one before; None: they are the model's own."""
    frozen: Items[Annotated[str, Field(max_length=1024)]] = ()
    """Tensors of the model that are not sent, because they are as in the checkpoint that every server starts from."""

    @model_validator(mode="after")
    def _adapter_freezes_nothing(self) -> Manifest:
        if self.adapter is not None and self.frozen:
            raise ValueError("an adapter leaves every other tensor out: frozen must be empty")
        return self

    @model_validator(mode="after")
    def _names_are_unique(self) -> Manifest:
        names = [*(tensor.name for tensor in self.tensors), *self.frozen]
        if len(set(names)) != len(names):
            twice = sorted(name for name, count in Counter(names).items() if count > 1)
            raise ValueError(f"tensor names appear twice in the manifest: {twice[:5]}")
        return self

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole update."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    def digest(self) -> str:
        """SHA-256 over names, dtypes and shapes in order: equal digests mean equal layouts."""
        text = json.dumps([[t.name, t.dtype, list(t.shape)] for t in self.tensors], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


class BucketSpec(WireModel):
    """Tensors ``start <= i < stop`` of the manifest, sent as one message of ``size_bytes`` bytes.

    The bytes are the tensors in manifest order, row-major, without gaps.
    """

    index: Natural
    start: Natural
    stop: Natural
    size_bytes: Natural


class ProcessGroupSpec(WireModel):
    """How one endpoint joins the group that weights travel in.

    The trainer is rank 0 and hosts the store. The endpoint's ranks are ``rank`` to ``rank + num_ranks - 1`` of
    ``world_size``. The call returns once the group is formed, or fails after ``timeout_s`` seconds. ``epoch`` tells the
    incarnations of a run's trainer apart: the calls of one that another has replaced are refused.
    """

    run_id: RunId
    epoch: Natural = 0
    backend: Literal["gloo", "nccl"]
    group_name: str = Field(min_length=1, max_length=1024)
    master_address: Annotated[str, AfterValidator(_usable_host)]
    master_port: int = Field(ge=1, le=65535)
    rank: int = Field(ge=1, le=65535)
    world_size: int = Field(ge=2, le=65536)
    timeout_s: Seconds

    @model_validator(mode="after")
    def _rank_is_of_the_group(self) -> ProcessGroupSpec:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} is none of a group of {self.world_size} ranks")
        return self


class DirectorySpec(WireModel):
    """Where one endpoint reads the buckets that the publisher stores, on a file system that both of them see.

    ``shm`` is memory of this host: buckets lie in files of a directory in memory and are mapped. ``file`` is any file
    system: each update is a directory of safetensors files. ``epoch`` as in `ProcessGroupSpec`.
    """

    run_id: RunId
    epoch: Natural = 0
    backend: Literal["shm", "file"]
    directory: Annotated[str, AfterValidator(_usable_path)] = Field(min_length=1, max_length=4096)
    timeout_s: Seconds


class PullSpec(WireModel):
    """Where one endpoint fetches the files of `DirectorySpec` over HTTP, in ranges. ``token`` is the bearer token."""

    run_id: RunId
    epoch: Natural = 0
    backend: Literal["http"]
    url: Annotated[str, AfterValidator(_usable_url)] = Field(pattern=r"^https?://", max_length=2048)
    token: str = Field(pattern=r"^[!-~]+$", max_length=1024, repr=False)
    timeout_s: Seconds


TransportSpec = ProcessGroupSpec | DirectorySpec | PullSpec
"""How weights come to one endpoint."""


class TransportBody(RootModel[Annotated[TransportSpec, Field(discriminator="backend")]]):
    """Body of ``/init_process_group``: how weights come to this endpoint from now on."""


class UpdateRef(WireModel):
    """Names one update session: the version that it leads to, in the run that owns it, and which attempt it is.

    A ``session_id`` makes every call of the session idempotent: one that is repeated, or comes late, does nothing. An
    update without one is told from others by run and version only.
    """

    run_id: RunId
    version: Natural
    session_id: str = Field(default="", max_length=64, pattern=r"^[A-Za-z0-9._-]*$")


class WeightUpdate(WireModel):
    """Announces an update: the only message that an endpoint may refuse, and nothing has been sent yet.

    ``deadline_s`` bounds the preparation on the endpoint (draining, for instance). ``lease_s`` is how long the endpoint
    keeps the update open without hearing from the publisher: after that it ends it by itself, with the old weights if
    no byte was applied. ``staged`` says when sampling is held: False on acceptance, True by the commit, so that it goes
    on while buckets arrive. ``encodings`` says which may be used besides ``raw``; ``delta`` is relative to the weights
    that ``base`` names, which the endpoint must have kept. ``keep`` asks it to keep these for a later one.
    """

    run_id: RunId
    version: Natural
    session_id: str = Field(default="", max_length=64, pattern=r"^[A-Za-z0-9._-]*$")
    epoch: Natural = 0
    manifest: Manifest
    buckets: Items[BucketSpec] = Field(min_length=1)
    in_flight: InFlightPolicy
    staged: bool = False
    encodings: Items[Encoding] = Field(default=(), max_length=64)
    base: UpdateRef | None = None
    keep: bool = False
    deadline_s: Seconds
    lease_s: Seconds

    @model_validator(mode="after")
    def _buckets_cover_the_manifest(self) -> WeightUpdate:
        edges = [0, *(bucket.stop for bucket in self.buckets)]
        if edges[-1] != len(self.manifest.tensors) or any(
            bucket.index != i or bucket.start != edges[i] or bucket.stop <= bucket.start
            for i, bucket in enumerate(self.buckets)
        ):
            raise ValueError("buckets must cover the manifest's tensors in order, without gap or overlap")
        for bucket in self.buckets:
            size_bytes = sum(t.size_bytes for t in self.manifest.tensors[bucket.start : bucket.stop])
            if size_bytes != bucket.size_bytes:
                raise ValueError(f"bucket {bucket.index} says {bucket.size_bytes} bytes, its tensors have {size_bytes}")
        return self

    @model_validator(mode="after")
    def _delta_has_a_base(self) -> WeightUpdate:
        if ("delta" in self.encodings) != (self.base is not None):
            raise ValueError("encoding delta and a base come together or not at all")
        return self

    @property
    def ref(self) -> UpdateRef:
        """The name of this session."""
        return UpdateRef(run_id=self.run_id, version=self.version, session_id=self.session_id)


class BucketTransfer(WireModel):
    """Asks the endpoint to receive one bucket now; pending until it has arrived, and was compared.

    ``size_bytes`` are those that travel, None for the bucket's own (``raw``). ``checksum`` is their XXH3-128 in
    hexadecimal digits, None for no comparison.
    """

    run_id: RunId
    version: Natural
    session_id: str = Field(default="", max_length=64, pattern=r"^[A-Za-z0-9._-]*$")
    bucket_index: Natural
    encoding: Encoding = "raw"
    size_bytes: Natural | None = None
    checksum: str | None = Field(default=None, pattern=r"^[0-9a-f]{32}$")
    timeout_s: Seconds

    @property
    def ref(self) -> UpdateRef:
        """The name of the session that the bucket belongs to."""
        return UpdateRef(run_id=self.run_id, version=self.version, session_id=self.session_id)


class UpdateTimings(WireModel):
    """What the last committed update cost on this endpoint, in seconds."""

    held_s: float = Field(ge=0)
    """From the moment sampling stopped to the moment it was allowed again."""
    load_s: float = Field(ge=0)
    """Applying the received tensors to the model."""
    first_token_s: float | None = None
    """From the end of the hold to the first token of the new version; None until one is sampled."""


class WeightVersion(WireModel):
    """Which weights an endpoint serves. ``run_id`` is None while it serves the checkpoint it was started from."""

    state: EndpointState
    version: Natural
    run_id: str | None = None
    session_id: str = ""
    """Of the update that brought the served version; empty if it had none, or is not remembered."""
    owner_run_id: str | None = None
    """Run whose updates are accepted, or were last."""
    epoch: Natural = 0
    """Highest epoch that was seen of that run."""
    kept: UpdateRef | None = None
    """Update whose weights were kept as the base of a delta."""
    updating_to: Natural | None = None
    num_running: Natural = 0
    last_update: UpdateTimings | None = None


# ---------------------------------------------------------------------------------------------------------------
# Generation


class SamplingParams(WireModel):
    """How tokens are drawn. Filters apply in the order temperature, top-k, top-p, min-p.

    ``temperature=0`` is greedy decoding. ``max_tokens=None`` means up to the end of the context. ``top_k=0``,
    ``top_p=1`` and ``min_p=0`` switch a filter off. A ``seed`` makes completion i of the request depend on
    (seed, i, weights) only, whatever else runs.
    """

    n: int = Field(default=1, ge=1, le=1024)
    max_tokens: TokenCount | None = None
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, le=2**31 - 1)
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    stop: Items[StopString] = Field(default=(), max_length=64)
    stop_token_ids: Items[TokenId] = Field(default=(), max_length=4096)
    ignore_eos: bool = False
    seed: Seed | None = None


class VersionSpan(WireModel):
    """Tokens ``start <= i < end`` of one completion were sampled from ``version``."""

    version: Natural
    start: Natural
    end: Natural

    @model_validator(mode="after")
    def _is_not_empty(self) -> VersionSpan:
        if self.end <= self.start:
            raise ValueError(f"version span {self.start}..{self.end} is empty")
        return self


class GenerateRequest(WireModel):
    """Token ids in. ``request_id`` is chosen by the caller and unique among its running requests."""

    request_id: str = Field(min_length=1, max_length=256)
    prompt_token_ids: Items[TokenId] = Field(min_length=1)
    sampling: SamplingParams = SamplingParams()
    stream: bool = False


class Completion(WireModel):
    """One sampled continuation.

    ``logprobs[i]`` is the behaviour logprob of ``token_ids[i]``: natural log, of the distribution that it was sampled
    from (temperature and filters included). Under greedy decoding, it is the log-softmax of the unscaled logits. Every
    sampled token is listed, the end-of-sequence token and the tokens of a stop string too. Spans cover all tokens
    without gap or overlap.
    """

    index: Natural
    token_ids: Items[TokenId]
    logprobs: Items[float]
    version_spans: Items[VersionSpan]
    finish_reason: Literal["stop", "length", "abort"]

    @model_validator(mode="after")
    def _lengths_agree(self) -> Completion:
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens but {len(self.logprobs)} logprobs")
        check_spans(self.version_spans, len(self.token_ids))
        return self


class GenerateResponse(WireModel):
    """The completions of one request, in the order of their index."""

    request_id: str
    completions: Items[Completion] = Field(min_length=1)


class CompletionChunk(WireModel):
    """New tokens of one streamed completion. ``start`` is the index of the first of them."""

    request_id: str
    index: Natural
    start: Natural
    token_ids: Items[TokenId]
    logprobs: Items[float]
    version: Natural
    finish_reason: Literal["stop", "length", "abort"] | None = None


def check_spans(spans: tuple[VersionSpan, ...], num_tokens: int) -> None:
    """Raise ``ValueError`` unless the spans cover ``num_tokens`` tokens in order, without gap or overlap."""
    edges = [0, *(span.end for span in spans)]
    if edges[-1] != num_tokens or any(span.start != edge for span, edge in zip(spans, edges, strict=False)):
        raise ValueError(
            f"version spans {[(s.version, s.start, s.end) for s in spans]} do not cover {num_tokens} tokens"
        )
    if any(later.version == earlier.version for earlier, later in pairwise(spans)):
        raise ValueError("adjacent version spans name the same version")


# ---------------------------------------------------------------------------------------------------------------
# Chat: the OpenAI shape plus the same facts


class ChatMessage(WireModel):
    """One message of a conversation."""

    role: str = Field(max_length=256)
    content: str


class ChatCompletionRequest(WireModel):
    """Body of ``/v1/chat/completions``; a field that is not listed here is refused, never ignored."""

    model: str = Field(max_length=1024)
    messages: Items[ChatMessage] = Field(min_length=1)
    n: int = Field(default=1, ge=1, le=1024)
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, le=2**31 - 1)
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    stop: StopString | Annotated[Items[StopString], Field(max_length=64)] | None = None
    seed: Seed | None = None
    stream: bool = False
    logprobs: bool = False
    user: str | None = Field(default=None, max_length=1024)

    def sampling(self) -> SamplingParams:
        """The same request as sampling parameters."""
        stop = (self.stop,) if isinstance(self.stop, str) else (self.stop or ())
        return SamplingParams(
            n=self.n,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=stop,
            seed=self.seed,
        )


class ChatTokenLogprob(WireModel):
    """Behaviour logprob of one sampled token in the OpenAI shape."""

    token: str
    logprob: float
    bytes: Items[Annotated[int, Field(ge=0, le=255)]] | None = None
    top_logprobs: Items[dict[str, Any]] = ()


class ChatLogprobs(WireModel):
    """Logprobs of one choice in the OpenAI shape."""

    content: Items[ChatTokenLogprob]


class ChatChoice(WireModel):
    """One choice: the OpenAI shape, plus token ids, behaviour logprobs and version spans."""

    index: Natural
    message: ChatMessage
    finish_reason: Literal["stop", "length", "abort"]
    logprobs: ChatLogprobs | None = None
    token_ids: Items[TokenId]
    token_logprobs: Items[float]
    version_spans: Items[VersionSpan]


class ChatUsage(WireModel):
    """Token counts of one request."""

    prompt_tokens: Natural
    completion_tokens: Natural
    total_tokens: Natural


class ChatCompletion(WireModel):
    """Answer of ``/v1/chat/completions``: the OpenAI shape plus the ids that the prompt was rendered to."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: Natural
    model: str
    choices: Items[ChatChoice]
    usage: ChatUsage
    prompt_token_ids: Items[TokenId]


class ChatDelta(WireModel):
    """What a streamed chunk adds to a message."""

    role: str | None = None
    content: str = ""


class ChatChunkChoice(WireModel):
    """New tokens of one streamed choice; ``version`` sampled them."""

    index: Natural
    delta: ChatDelta
    finish_reason: Literal["stop", "length", "abort"] | None
    token_ids: Items[TokenId]
    token_logprobs: Items[float]
    version: Natural


class ChatCompletionChunk(WireModel):
    """One event of a streamed chat completion in the OpenAI shape."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: Natural
    model: str
    choices: Items[ChatChunkChoice]


class ModelCard(WireModel):
    """One served model in the OpenAI shape."""

    id: str
    object: Literal["model"] = "model"
    created: Natural = 0
    owned_by: str = "inflight"


class ModelList(WireModel):
    """Answer of ``/v1/models``."""

    object: Literal["list"] = "list"
    data: Items[ModelCard]


# ---------------------------------------------------------------------------------------------------------------
# Discovery


class Capabilities(WireModel):
    """What an endpoint can do; what is not declared here is refused when asked for."""

    edition: Natural = CONTRACT_EDITION
    engine: str
    engine_version: str
    model: str
    vocab_size: TokenCount
    max_model_len: int = Field(ge=2, le=2**31 - 1)
    """Longest sequence, prompt and completion together, in tokens."""
    dtype: str
    in_flight_policies: Items[InFlightPolicy]
    transports: Items[Backend]
    staging: bool = False
    """Whether sampling may go on while an update arrives, see `WeightUpdate.staged`."""
    encodings: Items[Encoding] = ()
    """Encodings of buckets that are understood besides ``raw``."""
    partial_updates: bool = False
    """Whether an update may leave tensors out, see `Manifest.frozen`."""
    adapters: bool = False
    """Whether an update may be an adapter, see `Manifest.adapter`."""
    version_binding: Literal["spans", "first_token", "admission"]
    logprob_kind: Literal["processed", "raw"]
    num_ranks: int = Field(ge=1, le=65535)
    """Ranks that this endpoint takes in a weight group."""
    max_concurrent_sequences: TokenCount
    streaming: bool
    chat: bool
    seeds: bool = True
    """Whether a request may ask for a seed; where it may not, one that does is refused."""
    manifest_digest: str | None = None
    """`Manifest.digest` of the weights that the endpoint accepts, in its own order; None if unknown."""

    def lacks(
        self,
        *,
        in_flight: InFlightPolicy | None = None,
        transport: Backend | None = None,
        encodings: Collection[Encoding] = (),
        partial_updates: bool = False,
        adapters: bool = False,
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
        return "adapters" if adapters and not self.adapters else None


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

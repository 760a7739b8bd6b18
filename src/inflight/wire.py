"""Messages between processes: the bodies of the contract over HTTP, as frozen pydantic models.

No tensor crosses here and nothing is pickled. Unknown keys are refused, so that two sides never disagree silently. The
module knows nothing of HTTP, engines or trainers.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

PROTOCOL_VERSION = 2
"""Version of the contract between peers. It grows when a peer of the previous version would be misread."""

DTYPE_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Wire dtypes of weights, with the size of one element in bytes."""

TransportName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")]
"""How weights travel: the name of an `inflight.contracts.Transport`, such as ``gloo``."""

Encoding = Literal["raw", "bfloat16", "float8", "delta"]
"""How the tensors of a bucket become bytes; see `inflight.weights.packing`."""


T = TypeVar("T")

Items = Annotated[tuple[T, ...], Field(fail_fast=True)]
"""A sequence whose validation stops at its first bad element, so that a long one yields a single error."""

Natural = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""A count, an index or a version: a non-negative signed 64-bit integer."""

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]

TokenCount = Annotated[int, Field(ge=1, le=2**31 - 1)]

Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
"""Seed of a request: signed or unsigned, 64 bits."""

Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]
"""How long something may take: at most a week, which every system clock and wait can count."""

FinishReason = Literal["stop", "length", "abort"]

RequestId = Annotated[str, Field(min_length=1, max_length=256)]
RunId = Annotated[str, Field(min_length=1, max_length=1024)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]


MAX_IMAGES = 64
"""Most images of a request."""
MAX_IMAGES_LENGTH = 16 << 20
"""Most characters of all its data URLs together: 12 MB of encoded images."""


def is_empty(value: object) -> bool:
    """Return whether a message leaves a field out, for peers that do not know it."""
    return not value


def _usable_host(host: str) -> str:
    """Return ``host`` if it is an IP address or a host name in ASCII. Raises ``ValueError``."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if len(host) > 253 or not all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}", it) for it in host.split(".")):
            raise ValueError("it is neither an IP address nor a host name") from None
    return host


def _usable_url(url: str) -> str:
    """Return ``url`` if it names a host, and a port in range if it has one. Raises ``ValueError``."""
    if not all("!" <= character <= "~" for character in url):
        raise ValueError("it holds characters that no URL can carry; percent-encode them")
    parts = urlsplit(url)
    if parts.username is not None:
        raise ValueError("it names a user; put the token in the token field")
    if parts.port == 0:
        raise ValueError("nothing can connect to port 0")
    _usable_host(parts.hostname or "")
    return url


_IMAGE_URL = re.compile(r"data:image/(?:png|jpeg|webp);base64,", re.ASCII)


def _usable_image_url(url: str) -> str:
    """Return ``url`` if it is a data URL of an image in base64. Raises ``ValueError``."""
    head = _IMAGE_URL.match(url)
    if head is None:
        raise ValueError(
            "only data URLs of PNG, JPEG and WebP images in base64 are taken (data:image/png;base64,...); nothing is "
            f"fetched from an address or a file. It begins with {url[:32]!r}"
        )
    try:
        base64.b64decode(memoryview(url.encode("ascii"))[head.end() :], validate=True)
    except ValueError as error:
        raise ValueError(f"what follows {head.group()!r} is not base64: {error}") from error
    return url


def _usable_path(path: str) -> str:
    if "\0" in path:
        raise ValueError("a path cannot contain a NUL character")
    return path


ImageUrl = Annotated[str, Field(max_length=MAX_IMAGES_LENGTH), AfterValidator(_usable_image_url)]
"""An image as a data URL: ``data:image/png;base64,...``."""


class WireModel(BaseModel):
    """Base of every message: immutable, strict about unknown keys, without infinities, with bounds on every number."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class InFlightPolicy(StrEnum):
    """What happens to running requests when weights change."""

    KEEP = "keep"
    """They pause, then go on with the keys and values that older weights computed."""
    RECOMPUTE = "recompute"
    """They pause, then their keys and values are computed again under the new weights."""
    DRAIN = "drain"
    """They finish under the old weights; nothing new starts until the new ones are live."""
    ABORT = "abort"
    """They end at once with the tokens they have, and finish reason ``abort``."""


class EndpointState(StrEnum):
    """States of an endpoint; `inflight.weights.session` holds the transitions."""

    JOINING = "joining"
    READY = "ready"
    STAGING = "staging"
    """An update arrives while sampling goes on from the old weights."""
    PAUSED = "paused"
    UPDATING = "updating"
    RELEASED = "released"
    """Its memory is given up until it is restored; it keeps its weights, and neither samples nor takes updates."""
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
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor on the wire."""
        return self.num_elements * DTYPE_SIZES.get(self.dtype, 1)


class LoraSpec(WireModel):
    """A LoRA: each adapted weight is its base plus `scale` times B A.

    The base is the weights of the endpoint's last update that was not a LoRA, or of the checkpoint it was started from.
    The tensors of module M are named as PEFT saves them, ``base_model.model.M.lora_A.weight`` [rank, in] and
    ``base_model.model.M.lora_B.weight`` [out, rank], and change ``M.weight`` [out, in].
    """

    rank: int = Field(ge=1, le=2**31 - 1)
    alpha: float = Field(gt=0, le=1e6)
    rslora: bool = False
    """Whether the scale is divided by the square root of the rank (arXiv 2312.03732) instead of the rank."""

    @property
    def scale(self) -> float:
        """The factor of the product of the two matrices."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class Manifest(WireModel):
    """Every tensor of one update, in the order in which they travel, and the tensors of the model that are left out."""

    tensors: Items[TensorSpec] = Field(min_length=1)
    lora: LoraSpec | None = None
    """Set if the tensors are those of a LoRA, which replaces the LoRA before; None if they are the model's own."""
    frozen: Items[Annotated[str, Field(max_length=1024)]] = ()
    """Tensors of the model that are not sent, because they equal those of every server's starting checkpoint."""

    @model_validator(mode="after")
    def _lora_freezes_nothing(self) -> Manifest:
        if self.lora is not None and self.frozen:
            raise ValueError("a LoRA leaves every other tensor out: frozen must be empty")
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


class TransportSpec(WireModel):
    """How weights reach one endpoint. Each transport adds what its receivers need to know.

    ``incarnation`` counts the times a run's trainer was started: calls of a replaced incarnation are refused.
    """

    run_id: RunId
    incarnation: Natural = 0
    transport: TransportName
    timeout_s: Seconds

    @property
    def group(self) -> str:
        """The name by which an engine calls the group that it joined."""
        return f"{self.transport} of {self.run_id}"


class TransportBody(TransportSpec):
    """Body of ``/init_process_group``: how weights reach this endpoint from now on.

    Its other fields depend on the transport, whose `inflight.contracts.Transport.spec_type` defines them.
    """

    model_config = ConfigDict(extra="allow")


class ProcessGroupSpec(TransportSpec):
    """How one endpoint joins the group in which weights travel.

    The trainer is rank 0 and hosts the store. The endpoint's ranks are ``rank`` to ``rank + num_ranks - 1`` of
    ``world_size``. The call returns once the group is formed, or fails after ``timeout_s`` seconds.
    """

    transport: Literal["gloo", "nccl"]
    group_name: str = Field(min_length=1, max_length=1024)
    master_address: Annotated[str, AfterValidator(_usable_host)]
    master_port: int = Field(ge=1, le=65535)
    rank: int = Field(ge=1, le=65535)
    world_size: int = Field(ge=2, le=65536)

    @property
    def group(self) -> str:
        return self.group_name

    @model_validator(mode="after")
    def _rank_is_of_the_group(self) -> ProcessGroupSpec:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} is outside a group of {self.world_size} ranks")
        return self


class DirectorySpec(TransportSpec):
    """Where one endpoint reads the buckets that the publisher stores, on a file system that both of them see.

    ``shm`` is memory of this host: buckets lie in files of a directory in memory and are mapped. ``file`` is any file
    system: each update is a directory of safetensors files.
    """

    transport: Literal["shm", "file"]
    directory: Annotated[str, AfterValidator(_usable_path)] = Field(min_length=1, max_length=4096)


class IpcSpec(TransportSpec):
    """Where one endpoint finds the memory that the publisher shares: ``place`` is the UUID of the publisher's GPU.

    ``directory`` is on the host of both, and holds the handle of the memory and where in it each bucket is.
    """

    transport: Literal["ipc"]
    directory: Annotated[str, AfterValidator(_usable_path)] = Field(min_length=1, max_length=4096)
    place: str = Field(pattern=r"^[A-Za-z0-9-]{1,64}$")


class PullSpec(TransportSpec):
    """Where one endpoint fetches the files of `DirectorySpec` over HTTP, in ranges. ``token`` is the bearer token."""

    transport: Literal["http"]
    url: Annotated[str, AfterValidator(_usable_url)] = Field(pattern=r"^https?://", max_length=2048)
    token: str = Field(pattern=r"^[!-~]+$", max_length=1024, repr=False)


class _OfUpdate(WireModel):
    """What every message about an update begins with."""

    run_id: RunId
    version: Natural
    session_id: str = Field(default="", max_length=64, pattern=r"^[A-Za-z0-9._-]*$")

    @property
    def ref(self) -> UpdateRef:
        return UpdateRef(run_id=self.run_id, version=self.version, session_id=self.session_id)


class UpdateRef(_OfUpdate):
    """Names one update session: the version that it leads to, the run that owns it, and the attempt.

    A ``session_id`` makes every call of the session idempotent: a call that is repeated, or comes late, does nothing.
    Without a ``session_id``, only run and version tell updates apart.
    """


class WeightUpdate(_OfUpdate):
    """Announces an update, before anything is sent. It is the only message that an endpoint may refuse.

    ``deadline_s`` bounds the preparation on the endpoint (draining, for instance). ``lease_s`` is how long the endpoint
    keeps the update open without hearing from the publisher. After that the endpoint ends the update by itself, with
    the old weights if no byte was applied. ``staged`` says when sampling is paused: False on acceptance, True by the
    commit, so that sampling goes on while buckets arrive. ``encodings`` lists those that may be used besides ``raw``.
    ``delta`` is relative to the weights that ``base`` names, which the endpoint must have kept. ``keep`` asks the
    endpoint to keep the weights of this update for a later delta.
    """

    incarnation: Natural = 0
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
                raise ValueError(f"bucket {bucket.index} says {bucket.size_bytes} bytes; its tensors have {size_bytes}")
        return self

    @model_validator(mode="after")
    def _delta_has_a_base(self) -> WeightUpdate:
        if ("delta" in self.encodings) != (self.base is not None):
            raise ValueError("encoding delta and a base come together or not at all")
        return self


class BucketTransfer(_OfUpdate):
    """Asks the endpoint to receive one bucket now. The call is pending until the bucket has arrived and was compared.

    ``size_bytes`` counts the bytes that travel, None for the bucket's own size (``raw``). ``checksum`` is their
    XXH3-128 in hexadecimal digits, or ``sums64:`` and 32 hexadecimal digits for bytes that travel from GPU to GPU;
    None for no comparison.
    """

    bucket_index: Natural
    encoding: Encoding = "raw"
    size_bytes: Natural | None = None
    checksum: str | None = Field(default=None, pattern=r"^(sums64:)?[0-9a-f]{32}$")
    timeout_s: Seconds


class UpdateTimings(WireModel):
    """What the last committed update cost on this endpoint, in seconds."""

    paused_s: float = Field(ge=0)
    """From the moment sampling stopped until it was allowed again."""
    load_s: float = Field(ge=0)
    """Applying the received tensors to the model."""
    first_token_s: float | None = None
    """From the end of the pause to the first token of the new version; None until one is sampled."""


class WeightVersion(WireModel):
    """Which weights an endpoint serves. ``run_id`` is None while it serves the checkpoint it was started from."""

    state: EndpointState
    version: Natural
    run_id: str | None = None
    session_id: str = ""
    """Session that sent the served version; empty if it had no name, or is not remembered."""
    owner_run_id: str | None = None
    """Run whose updates are accepted, or were most recently."""
    incarnation: Natural = 0
    """Highest incarnation seen of that run."""
    kept: UpdateRef | None = None
    """Update whose weights were kept as the base of a delta."""
    updating_to: Natural | None = None
    num_running: Natural = 0
    last_update: UpdateTimings | None = None


# ---------------------------------------------------------------------------------------------------------------
# Generation


class _Sampling(WireModel):
    """What a request says of sampling, whether it brings token ids or messages."""

    n: int = Field(default=1, ge=1, le=1024)
    max_tokens: TokenCount | None = None
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, le=2**31 - 1)
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    seed: Seed | None = None


class SamplingParams(_Sampling):
    """How tokens are drawn. Filters apply in the order temperature, top-k, top-p, min-p.

    ``temperature=0`` is greedy decoding. ``max_tokens=None`` means up to the end of the context. ``top_k=0``,
    ``top_p=1`` and ``min_p=0`` switch a filter off. With a ``seed``, completion i of the request depends only on (seed,
    i, weights), whatever else runs.
    """

    stop: Items[StopString] = Field(default=(), max_length=64)
    stop_token_ids: Items[TokenId] = Field(default=(), max_length=4096)
    ignore_eos: bool = False


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


class PromptImage(WireModel):
    """An image of a prompt, as a data URL, and the ``num_tokens`` placeholder tokens from ``start`` on that it fills.

    The same token elsewhere in the prompt is an ordinary token.
    """

    url: ImageUrl
    start: Natural
    num_tokens: TokenCount

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def check_images(images: Sequence[PromptImage], num_tokens: int) -> None:
    """Raise ``ValueError`` unless the images are in order within ``num_tokens`` tokens, and not too large together."""
    end = 0
    for index, image in enumerate(images):
        if image.start < end or image.end > num_tokens:
            raise ValueError(
                f"image {index} fills tokens {image.start} to {image.end - 1}, but must lie between token {end} and "
                f"the end of {num_tokens} tokens: images come in order and do not overlap"
            )
        end = image.end
    size = sum(len(image.url) for image in images)
    if size > MAX_IMAGES_LENGTH:
        raise ValueError(f"the images' data URLs have {size} characters together, more than {MAX_IMAGES_LENGTH}")


class GenerateRequest(WireModel):
    """Token ids in. The caller chooses ``request_id``, unique among its running requests."""

    request_id: RequestId
    prompt_token_ids: Items[TokenId] = Field(min_length=1)
    images: Items[PromptImage] = Field(default=(), max_length=MAX_IMAGES, exclude_if=is_empty)
    """Only where `Capabilities.images` is declared."""
    sampling: SamplingParams = SamplingParams()
    stream: bool = False
    routed_experts: bool = Field(default=False, exclude_if=is_empty)
    """Whether completions say which experts computed them. Only where `Capabilities.routed_experts` is declared, and
    not in a stream."""
    num_continued: Natural = 0
    """How many of the last prompt tokens are the earlier part of a completion, which this request continues. Only what
    the completion is drafted from depends on it."""

    @model_validator(mode="after")
    def _has_a_prompt(self) -> GenerateRequest:
        if self.num_continued >= len(self.prompt_token_ids):
            raise ValueError(
                f"num_continued is {self.num_continued}, but there are only {len(self.prompt_token_ids)} prompt tokens"
            )
        return self

    @model_validator(mode="after")
    def _images_are_in_the_prompt(self) -> GenerateRequest:
        check_images(self.images, len(self.prompt_token_ids))
        return self


class RoutedExperts(WireModel):
    """The experts that the routers of a mixture of experts chose for the first ``num_tokens`` tokens of a sequence.

    Row t says which experts computed token t, counting prompt and completion together, in the forward after which the
    next token was sampled. The last sampled token never went through the model, so it has no row. A row has
    ``num_chosen`` experts for each of the model's ``num_layers`` layers, those without experts included, where the
    numbers mean nothing. The largest number that ``dtype`` holds stands for "not known".
    """

    num_tokens: Natural
    num_layers: int = Field(ge=1, le=4096)
    num_chosen: int = Field(ge=1, le=4096)
    dtype: Literal["uint8", "uint16"]
    """Little-endian."""
    data: str
    """Base64 of the numbers [``num_tokens``, ``num_layers``, ``num_chosen``], row-major, without gaps."""

    @model_validator(mode="after")
    def _data_fits(self) -> RoutedExperts:
        try:
            size = len(base64.b64decode(self.data, validate=True))
        except ValueError as error:
            raise ValueError(f"the data of routed_experts is not base64: {error}") from error
        if size != self.num_tokens * self.row_bytes:
            raise ValueError(
                f"routed_experts has {size} bytes, but {self.num_tokens} rows of {self.row_bytes} bytes were announced"
            )
        return self

    @property
    def row_bytes(self) -> int:
        return self.num_layers * self.num_chosen * (1 if self.dtype == "uint8" else 2)

    def to_bytes(self) -> bytes:
        """Return the numbers, row-major."""
        return base64.b64decode(self.data)

    def followed_by(self, later: RoutedExperts) -> RoutedExperts:
        """Return these rows and, behind them, the rows of ``later`` for the tokens that have none here.

        ``later`` is of the same sequence, grown. Raises ``ValueError`` if the two are of different models.
        """
        ours, theirs = ((it.num_layers, it.num_chosen, it.dtype) for it in (self, later))
        if ours != theirs:
            raise ValueError(f"routed_experts of {theirs} (layers, experts, dtype) cannot follow those of {ours}")
        rows = self.to_bytes() + later.to_bytes()[self.num_tokens * self.row_bytes :]
        return self.model_copy(
            update={"num_tokens": len(rows) // self.row_bytes, "data": base64.b64encode(rows).decode("ascii")}
        )


def longest_record(earlier: RoutedExperts | None, later: RoutedExperts | None) -> RoutedExperts | None:
    """Return what is known of a sequence's experts from two requests, of which the later one continued it.

    Where both know a token's experts, those of the earlier one count: the next token was sampled behind them.
    """
    if earlier is None or later is None:
        return earlier or later
    return earlier.followed_by(later)


class DraftCounts(WireModel):
    """How many drafts were verified for one completion, and how many drafted tokens it has."""

    num_verifications: Natural = 0
    num_accepted: Natural = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(
            num_verifications=self.num_verifications + other.num_verifications,
            num_accepted=self.num_accepted + other.num_accepted,
        )

    @property
    def accepted_per_verification(self) -> float | None:
        """Drafted tokens that a verification accepted on average; it brought one more. None without any."""
        return self.num_accepted / self.num_verifications if self.num_verifications else None


class Completion(WireModel):
    """One sampled continuation.

    ``logprobs[i]`` is the behaviour logprob of ``token_ids[i]``: natural log, of the distribution from which it was
    sampled (temperature and filters included). Under greedy decoding, it is the log-softmax of the unscaled logits.
    Every sampled token is listed, including the end-of-sequence token and the tokens of a stop string. Spans cover all
    tokens without gap or overlap.
    """

    index: Natural
    token_ids: Items[TokenId]
    logprobs: Items[float]
    version_spans: Items[VersionSpan]
    finish_reason: FinishReason
    draft_counts: DraftCounts | None = None
    """None unless the endpoint declares them; of an aborted completion they may be missing anyway."""
    routed_experts: RoutedExperts | None = Field(default=None, exclude_if=is_empty)
    """None unless the request asked for them; of an aborted completion they may be missing anyway."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> Completion:
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens but {len(self.logprobs)} logprobs")
        check_spans(self.version_spans, len(self.token_ids))
        return self

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return len(self.token_ids)

    @property
    def first_version(self) -> int | None:
        """Version that sampled the first token; None if there is none."""
        return self.version_spans[0].version if self.version_spans else None

    @property
    def is_whole(self) -> bool:
        """Whether it ended by itself; if not, it was aborted and may be continued."""
        return self.finish_reason != "abort"


MAX_ABORTED = 1024
"""Ids in one `AbortRequests`."""


class AbortRequests(WireModel):
    """Names running requests that are to end with what they have."""

    request_ids: Items[RequestId] = Field(min_length=1, max_length=MAX_ABORTED)


class GenerateResponse(WireModel):
    """The completions of one request, in the order of their index."""

    request_id: str
    completions: Items[Completion] = Field(min_length=1)


class CompletionChunk(WireModel):
    """New tokens of one streamed completion. ``start`` is the index of the first."""

    request_id: str
    index: Natural
    start: Natural
    token_ids: Items[TokenId]
    logprobs: Items[float]
    version: Natural
    finish_reason: FinishReason | None = None


class PromptHistory(WireModel):
    """Finished completions of one prompt and the reward of each."""

    prompt_token_ids: Items[TokenId] = Field(min_length=1)
    completions: Items[Items[TokenId]] = Field(max_length=1024)
    rewards: Items[Annotated[float, Field(allow_inf_nan=False)]]

    @model_validator(mode="after")
    def _lengths_agree(self) -> PromptHistory:
        if len(self.rewards) != len(self.completions):
            raise ValueError(f"{len(self.completions)} completions but {len(self.rewards)} rewards")
        return self


class DraftHistory(WireModel):
    """What an endpoint with `Capabilities.drafts` drafts from. A draft never changes what is sampled, only how fast."""

    entries: Items[PromptHistory] = Field(min_length=1, max_length=1024)


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


class TextPart(WireModel):
    """Text in a message that has several parts."""

    type: Literal["text"]
    text: str


class ImageAddress(WireModel):
    """Where the image of an `ImagePart` is: in the URL itself."""

    url: ImageUrl


class ImagePart(WireModel):
    """An image in a message; only where `Capabilities.images` is declared."""

    type: Literal["image_url"]
    image_url: ImageAddress


class ChatMessage(WireModel):
    """One message of a conversation: a text, or parts of which some are images."""

    role: str = Field(max_length=256)
    content: str | Annotated[Items[Annotated[TextPart | ImagePart, Field(discriminator="type")]], Field(min_length=1)]

    @property
    def image_urls(self) -> tuple[str, ...]:
        """The data URLs of its images, in order."""
        if isinstance(self.content, str):
            return ()
        return tuple(part.image_url.url for part in self.content if isinstance(part, ImagePart))


class ChatAnswer(WireModel):
    """What the model says in one choice."""

    role: str
    content: str


class ChatCompletionRequest(_Sampling):
    """Body of ``/v1/chat/completions``. A field that is not listed here is refused, never ignored."""

    model: str = Field(max_length=1024)
    messages: Items[ChatMessage] = Field(min_length=1)
    max_completion_tokens: TokenCount | None = None
    stop: StopString | Annotated[Items[StopString], Field(max_length=64)] | None = None
    stream: bool = False
    logprobs: bool = False
    user: str | None = Field(default=None, max_length=1024)

    def sampling(self) -> SamplingParams:
        shared = {name: getattr(self, name) for name in _Sampling.model_fields}
        stop = (self.stop,) if isinstance(self.stop, str) else (self.stop or ())
        return SamplingParams(**shared | {"max_tokens": self.max_completion_tokens or self.max_tokens, "stop": stop})


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
    message: ChatAnswer
    finish_reason: FinishReason
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
    """Answer of ``/v1/chat/completions``: the OpenAI shape plus the token ids of the rendered prompt."""

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
    finish_reason: FinishReason | None
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

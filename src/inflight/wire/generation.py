"""Messages of generation: requests, completions, version spans, routed experts, drafts and aborts."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from inflight.wire.fields import MAX_REWARD, Items, Natural, RequestId, Seed, TokenCount, TokenId, WireModel, is_empty

FinishReason = Literal["stop", "length", "abort"]
"""Why a completion ended: a stop token or string, the token limit, or an abort."""


StopString = Annotated[str, Field(min_length=1, max_length=1024)]
"""Text that ends a completion."""


MAX_IMAGES = 64
"""Maximum number of images in a request."""


MAX_IMAGES_LENGTH = 16 << 20
"""Maximum total length of a request's data URLs in characters: 12 MB of encoded images."""


_IMAGE_URL = re.compile(r"data:image/(?:png|jpeg|webp);base64,", re.ASCII)


def _usable_image_url(url: str) -> str:
    """Return ``url`` if it is a data URL of an image in base64. Raises ``ValueError``."""
    head = _IMAGE_URL.match(url)
    if head is None:
        raise ValueError(
            "only data URLs of PNG, JPEG and WebP images in base64 are accepted (data:image/png;base64,...); "
            f"nothing is fetched from an address or a file. The given URL begins with {url[:32]!r}"
        )
    try:
        base64.b64decode(memoryview(url.encode("ascii"))[head.end() :], validate=True)
    except ValueError as error:
        raise ValueError(f"the data after {head.group()!r} is not base64: {error}") from error
    return url


ImageUrl = Annotated[str, Field(max_length=MAX_IMAGES_LENGTH), AfterValidator(_usable_image_url)]
"""An image as a data URL: ``data:image/png;base64,...``."""


class Sampling(WireModel):
    """The sampling settings of a request, whether its prompt consists of token ids or of messages."""

    n: int = Field(default=1, ge=1, le=1024)
    max_tokens: TokenCount | None = None
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, le=2**31 - 1)
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    seed: Seed | None = None
    ignore_eos: bool = False


class SamplingParams(Sampling):
    """How tokens are drawn. Filters apply in the order temperature, top-k, top-p, min-p.

    ``temperature=0`` is greedy decoding. ``max_tokens=None`` means up to the end of the context. ``top_k=0``,
    ``top_p=1`` and ``min_p=0`` switch a filter off. With a ``seed``, completion i of the request depends only on (seed,
    i, weights), regardless of other requests.
    """

    stop: Items[StopString] = Field(default=(), max_length=64)
    stop_token_ids: Items[TokenId] = Field(default=(), max_length=4096)


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
    """An image in a prompt, as a data URL. It fills ``num_tokens`` placeholder tokens from index ``start`` on.

    A placeholder token elsewhere in the prompt is an ordinary token.
    """

    url: ImageUrl
    start: Natural
    num_tokens: TokenCount

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def check_images(images: Sequence[PromptImage], num_tokens: int) -> None:
    """Raise ``ValueError`` unless the images are in order within ``num_tokens`` tokens, and small enough in total."""
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
        raise ValueError(f"the images' data URLs have {size} characters in total, more than {MAX_IMAGES_LENGTH}")


class GenerateRequest(WireModel):
    """Asks for completions of a prompt of token ids.

    The caller chooses a ``request_id``, unique among its running requests.
    """

    request_id: RequestId
    prompt_token_ids: Items[TokenId] = Field(min_length=1)
    images: Items[PromptImage] = Field(default=(), max_length=MAX_IMAGES, exclude_if=is_empty)
    """Requires `Capabilities.images`."""
    sampling: SamplingParams = SamplingParams()
    stream: bool = False
    routed_experts: bool = Field(default=False, exclude_if=is_empty)
    """Whether completions report which experts computed them. Requires `Capabilities.routed_experts`, and is refused in
    a stream.
    """
    num_continued: Natural = 0
    """Number of tokens at the end of the prompt that belong to a completion that this request continues. This number
    only affects which completions drafts come from.
    """

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

    Row t lists the experts that computed token t, counting prompt and completion together, in the forward pass after
    which the next token was sampled. The last sampled token was never an input of the model, so it has no row. A row
    has ``num_chosen`` experts for each of the model's ``num_layers`` layers; for layers without experts, these numbers
    have no meaning. The largest number that ``dtype`` holds means "unknown".
    """

    num_tokens: Natural
    num_layers: int = Field(ge=1, le=4096)
    num_chosen: int = Field(ge=1, le=4096)
    dtype: Literal["uint8", "uint16"]
    """The dtype of the numbers, little-endian."""
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
        """Return these rows followed by the rows of ``later`` for the tokens that have none here.

        ``later`` covers more tokens of the same sequence. Raises ``ValueError`` if the models differ.
        """
        ours, theirs = ((it.num_layers, it.num_chosen, it.dtype) for it in (self, later))
        if ours != theirs:
            raise ValueError(f"routed_experts of {theirs} (layers, experts, dtype) cannot follow those of {ours}")
        rows = self.to_bytes() + later.to_bytes()[self.num_tokens * self.row_bytes :]
        return self.model_copy(
            update={"num_tokens": len(rows) // self.row_bytes, "data": base64.b64encode(rows).decode("ascii")}
        )


def longest_record(earlier: RoutedExperts | None, later: RoutedExperts | None) -> RoutedExperts | None:
    """Return one record of a sequence's experts from two requests, where the later request continued the sequence.

    If both records contain a token's experts, those of the earlier request are used, because the next token was sampled
    after them.
    """
    if earlier is None or later is None:
        return earlier or later
    return earlier.followed_by(later)


class DraftCounts(WireModel):
    """How many drafts were verified for one completion, and how many drafted tokens were accepted into it."""

    num_verifications: Natural = 0
    num_accepted: Natural = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(
            num_verifications=self.num_verifications + other.num_verifications,
            num_accepted=self.num_accepted + other.num_accepted,
        )

    @property
    def accepted_per_verification(self) -> float | None:
        """Mean number of drafted tokens that a verification accepted; None without verifications."""
        return self.num_accepted / self.num_verifications if self.num_verifications else None


class Completion(WireModel):
    """One sampled continuation.

    ``logprobs[i]`` is the behaviour logprob of ``token_ids[i]``: natural log, of the distribution from which the token
    was sampled (temperature and filters included). Under greedy decoding, it is the log-softmax of the unscaled logits.
    Every sampled token is listed, including the end-of-sequence token and the tokens of a stop string. Spans cover all
    tokens without gap or overlap.
    """

    index: Natural
    token_ids: Items[TokenId]
    logprobs: Items[float]
    version_spans: Items[VersionSpan]
    finish_reason: FinishReason
    draft_counts: DraftCounts | None = None
    """The draft counts; None unless the endpoint supports them. An aborted completion may lack them."""
    routed_experts: RoutedExperts | None = Field(default=None, exclude_if=is_empty)
    """The experts; None unless the request asked for them. An aborted completion may lack them."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> Completion:
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.logprobs)} logprobs were given for {len(self.token_ids)} tokens")
        check_spans(self.version_spans, len(self.token_ids))
        return self

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return len(self.token_ids)

    @property
    def first_version(self) -> int | None:
        """Version that sampled the first token; None if there are no tokens."""
        return self.version_spans[0].version if self.version_spans else None

    @property
    def is_whole(self) -> bool:
        """Whether the completion ended normally; if not, it was aborted and may be continued."""
        return self.finish_reason != "abort"


MAX_ABORTED = 1024
"""Maximum number of ids in one `AbortRequests`."""


class AbortRequests(WireModel):
    """Asks for running requests to end with the tokens sampled so far."""

    request_ids: Items[RequestId] = Field(min_length=1, max_length=MAX_ABORTED)


class GenerateResponse(WireModel):
    """The completions of one request, in the order of their index."""

    request_id: str
    completions: Items[Completion] = Field(min_length=1)


class CompletionChunk(WireModel):
    """New tokens of one streamed completion. ``start`` is the index of the first one."""

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
    rewards: Items[Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]]

    @model_validator(mode="after")
    def _lengths_agree(self) -> PromptHistory:
        if len(self.rewards) != len(self.completions):
            raise ValueError(f"{len(self.rewards)} rewards were given for {len(self.completions)} completions")
        return self


class DraftHistory(WireModel):
    """The source of an endpoint's drafts, see `Capabilities.drafts`. Drafts change the speed, never the tokens."""

    entries: Items[PromptHistory] = Field(min_length=1, max_length=1024)


def check_spans(spans: tuple[VersionSpan, ...], num_tokens: int) -> None:
    """Raise ``ValueError`` unless the spans cover ``num_tokens`` tokens in order, without gap or overlap."""
    edges = [0, *(span.end for span in spans)]
    if edges[-1] != num_tokens or any(span.start != edge for span, edge in zip(spans, edges, strict=False)):
        raise ValueError(
            f"version spans {[(s.version, s.start, s.end) for s in spans]} do not cover {num_tokens} tokens"
        )
    if any(later.version == earlier.version for earlier, later in pairwise(spans)):
        raise ValueError("adjacent version spans have the same version; merge them")

"""Messages of the chat and model routes in OpenAI's format."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from inflight.wire.fields import Items, Natural, TokenCount, TokenId, WireModel
from inflight.wire.generation import FinishReason, ImageUrl, Sampling, SamplingParams, StopString, VersionSpan


class TextPart(WireModel):
    """Text in a message that has several parts."""

    type: Literal["text"]
    text: str


class ImageAddress(WireModel):
    """The data URL that contains the image of an `ImagePart`."""

    url: ImageUrl


class ImagePart(WireModel):
    """An image in a message. Requires `Capabilities.images`."""

    type: Literal["image_url"]
    image_url: ImageAddress


class ChatMessage(WireModel):
    """One message of a conversation: text, or a list of text and image parts."""

    role: str = Field(max_length=256)
    content: str | Annotated[Items[Annotated[TextPart | ImagePart, Field(discriminator="type")]], Field(min_length=1)]

    @property
    def image_urls(self) -> tuple[str, ...]:
        """The data URLs of the message's images, in order."""
        if isinstance(self.content, str):
            return ()
        return tuple(part.image_url.url for part in self.content if isinstance(part, ImagePart))


class ChatAnswer(WireModel):
    """The model's message in one choice."""

    role: str
    content: str


class ChatCompletionRequest(Sampling):
    """Body of ``/v1/chat/completions``. A field that is not listed here is rejected, not ignored."""

    model: str = Field(max_length=1024)
    messages: Items[ChatMessage] = Field(min_length=1)
    max_completion_tokens: TokenCount | None = None
    stop: StopString | Annotated[Items[StopString], Field(max_length=64)] | None = None
    stream: bool = False
    logprobs: bool = False
    user: str | None = Field(default=None, max_length=1024)

    def sampling(self) -> SamplingParams:
        shared = {name: getattr(self, name) for name in Sampling.model_fields}
        stop = (self.stop,) if isinstance(self.stop, str) else (self.stop or ())
        return SamplingParams(**shared | {"max_tokens": self.max_completion_tokens or self.max_tokens, "stop": stop})


class ChatTokenLogprob(WireModel):
    """Behaviour logprob of one sampled token in OpenAI's format."""

    token: str
    logprob: float
    bytes: Items[Annotated[int, Field(ge=0, le=255)]] | None = None
    top_logprobs: Items[dict[str, Any]] = ()


class ChatLogprobs(WireModel):
    """Logprobs of one choice in OpenAI's format."""

    content: Items[ChatTokenLogprob]


class ChatChoice(WireModel):
    """One choice in OpenAI's format, plus token ids, behaviour logprobs and version spans."""

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
    """Response of ``/v1/chat/completions``: OpenAI's format plus the token ids of the rendered prompt."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: Natural
    model: str
    choices: Items[ChatChoice]
    usage: ChatUsage
    prompt_token_ids: Items[TokenId]


class ChatDelta(WireModel):
    """The text that a streamed chunk adds to a message."""

    role: str | None = None
    content: str = ""


class ChatChunkChoice(WireModel):
    """The new tokens of one streamed choice, and the ``version`` that sampled them."""

    index: Natural
    delta: ChatDelta
    finish_reason: FinishReason | None
    token_ids: Items[TokenId]
    token_logprobs: Items[float]
    version: Natural


class ChatCompletionChunk(WireModel):
    """One event of a streamed chat completion in OpenAI's format."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: Natural
    model: str
    choices: Items[ChatChunkChoice]


class ModelCard(WireModel):
    """One served model in OpenAI's format."""

    id: str
    object: Literal["model"] = "model"
    created: Natural = 0
    owned_by: str = "inflight"


class ModelList(WireModel):
    """Response of ``/v1/models``."""

    object: Literal["list"] = "list"
    data: Items[ModelCard]

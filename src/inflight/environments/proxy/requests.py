"""The requests of the proxy's clients: OpenAI's chat and completions, vLLM's generate, and rewards.

The settings of the run determine how tokens are drawn, because logprobs must describe the distribution that is trained
on. Fields that only change where or how a request is handled are accepted. An unsupported field that would change the
answer is rejected by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from inflight.base.validation import describe_problems
from inflight.environments.proxy.contents import shown
from inflight.errors import InvalidRequestError
from inflight.wire import MAX_REWARD, Items, SamplingParams, StopString, TokenCount, TokenId

_DRAWN = ("temperature", "top_p", "top_k", "min_p", "seed")
"""Fields that control how tokens are drawn. The run's settings apply instead."""
_IGNORED = frozenset(
    (
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        # vLLM's
        "cache_salt",
        "priority",
        "request_id",
    )
)
"""Fields that do not change the answer."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields that are accepted only with these values, which have the same effect as omitting them."""


class ProxyBody(BaseModel):
    """Base of every request. A field that neither the class nor the tables above list is rejected, not ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    _ignored: ClassVar[frozenset[str]] = _IGNORED

    @model_validator(mode="before")
    @classmethod
    def _without_what_changes_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, values in _NEUTRAL.items():
            if name in data and name not in cls.model_fields and data[name] is not None and data[name] not in values:
                allowed = "".join(f", or send {value!r}" for value in values)
                raise ValueError(f"{name} is {str(data[name])[:80]!r}, which is not supported: omit it{allowed}")
        return {
            name: value
            for name, value in data.items()
            if name in cls.model_fields or (name not in _NEUTRAL and name not in cls._ignored)
        }


class Sampled(ProxyBody):
    """The fields of every request for tokens."""

    max_tokens: TokenCount | None = None
    stop: StopString | Annotated[Items[StopString], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[Items[TokenId], Field(max_length=4096)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, settings: SamplingParams) -> SamplingParams:
        """Return the settings of the run with the request's stop conditions and, if lower, its length limit."""
        longest = [limit for limit in (self._longest(), settings.max_tokens) if limit is not None]
        update = {
            "max_tokens": min(longest, default=None),
            "stop": self.stops(),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
        }
        return settings.model_copy(update=update)

    def _longest(self) -> int | None:
        return self.max_tokens

    def overridden(self, settings: SamplingParams) -> Iterator[str]:
        """Yield the sampling settings of the request that differ from those of the run."""
        for name in _DRAWN:
            asked, used = getattr(self, name), getattr(settings, name)
            if asked is not None and asked != used and not (name == "top_k" and asked < 1 and used == 0):
                yield f"{name}={asked:g} (the run uses {'its own value' if used is None else format(used, 'g')})"


class StreamOptions(BaseModel):
    """How an answer is streamed."""

    include_usage: bool | None = None


class _OpenAI(Sampled):
    model: str | None = Field(default=None, max_length=1024)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """vLLM's option: add the data that training needs to the answer, in the fields of `inflight.wire.ChatChoice`."""


def _known_tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    """Return a choice of a known form. Raises ``ValueError`` for others."""
    match choice:
        case (
            str()
            | {"type": "function", "function": {"name": str()}}
            | {"type": "custom", "custom": {"name": str()}}
            | {"type": "allowed_tools", "allowed_tools": {"tools": [*_]}}
        ):
            return choice
    raise ValueError(
        f"{shown(choice)} is not supported: send 'auto', 'none' or 'required', or an object such as "
        "{'type': 'function', 'function': {'name': 'NAME'}}"
    )


ToolChoice = Annotated[Literal["auto", "none", "required"] | dict[str, Any], AfterValidator(_known_tool_choice)]


class ChatRequest(_OpenAI):
    """Body of ``/v1/chat/completions``."""

    id_prefix: ClassVar[str] = "chatcmpl-"
    """Prefix of the answers' ids."""
    is_converted: ClassVar[bool] = False
    """Whether the request was converted from a dialect whose clients receive reasoning separately from the text and may
    make background calls with a different model.
    """

    messages: Items[dict[str, Any]] = Field(min_length=1)
    tools: Items[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    """A call cannot be forced, because that would change the distribution that tokens are drawn from."""
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def continues(self) -> str | None:
        """The id of the answer that the request continues from, if the client has specified it."""
        return None

    def _longest(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def overridden(self, settings: SamplingParams) -> Iterator[str]:
        yield from super().overridden(settings)
        if self.tool_choice not in (None, "auto", "none"):
            kind = self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice["type"]
            yield f"tool_choice={kind} (calls are never forced)"

    @property
    def may_call(self) -> bool:
        """Whether tool calls are to be returned separately from the text."""
        return bool(self.tools) and self.tool_choice != "none"


class CompletionRequest(_OpenAI):
    """Body of ``/v1/completions``, with one prompt: text or token ids."""

    prompt: str | Items[TokenId] | Annotated[tuple[str | Items[TokenId]], Field(min_length=1, max_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def one_prompt(self) -> str | Sequence[int]:
        prompt = self.prompt
        return prompt[0] if isinstance(prompt, tuple) and prompt and not isinstance(prompt[0], int) else prompt


class GenerateSampling(Sampled):
    """``sampling_params`` of vLLM's generate."""

    _ignored: ClassVar[frozenset[str]] = _IGNORED | {
        "detokenize",
        "include_stop_str_in_output",
        "output_kind",
        "routed_experts_prompt_start",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    }

    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None


class ProxyGenerateRequest(ProxyBody):
    """Body of vLLM's ``/inference/v1/generate``: token ids in, token ids out."""

    token_ids: Items[TokenId] = Field(min_length=1)
    sampling_params: GenerateSampling
    model: str | None = Field(default=None, max_length=1024)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens"] = "tokens"


Request = ChatRequest | CompletionRequest | ProxyGenerateRequest

Chat = TypeVar("Chat", bound=ChatRequest)


def chat_request(kind: type[Chat], **fields: Any) -> Chat:
    """Return a chat request with fields converted from another dialect. Raises `InvalidRequestError` for bad fields."""
    try:
        return kind.model_validate({name: value for name, value in fields.items() if value is not None})
    except pydantic.ValidationError as error:
        raise InvalidRequestError(f"the request body is invalid: {describe_problems(error)}") from error


Reward = Annotated[float, Field(strict=True, ge=-MAX_REWARD, le=MAX_REWARD)]
"""A finite JSON number, neither true nor "1", of at most the maximum reward in magnitude."""


class RewardRequest(ProxyBody):
    """Body of ``/reward``. ``turn`` is the ``id`` of an answer; without it, the reward applies to the episode."""

    reward: Reward
    turn: str | None = Field(default=None, max_length=256)

"""The messages of vLLM's routes, with vLLM's field names, and their conversion to the contract's messages."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inflight.base.validation import describe_problems
from inflight.errors import InvalidRequestError
from inflight.wire import (
    ChatCompletion,
    Completion,
    GenerateRequest,
    GenerateResponse,
    Items,
    SamplingParams,
    ScoreRequest,
    ScoreResponse,
    TokenId,
    VersionSpan,
)

Labels = Callable[[int], str]
"""Returns the label of a version."""


class DialectMessage(BaseModel):
    """Base class of messages in which no field may be ignored: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class EngineSampling(DialectMessage):
    """Sampling parameters under vLLM's names; unsupported ones must have their neutral values."""

    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: float | None = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    """The logprob of the sampled token is always returned and alternatives never are, so larger numbers are refused."""
    prompt_logprobs: int | None = None
    repetition_penalty: Literal[1, None] = 1
    presence_penalty: Literal[0, None] = 0
    frequency_penalty: Literal[0, None] = 0
    min_tokens: Literal[0] = 0
    logit_bias: None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True

    def sampling(self) -> SamplingParams:
        """Return these parameters in the contract's format. Raises `InvalidRequestError`."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        try:
            return SamplingParams(
                n=self.n,
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=max(self.top_k, 0),
                min_p=self.min_p or 0.0,
                seed=self.seed,
                ignore_eos=self.ignore_eos,
                stop=tuple(stop),
                stop_token_ids=tuple(self.stop_token_ids or ()),
            )
        except ValidationError as error:
            problems = describe_problems(error, SamplingParams)
            raise InvalidRequestError(f"the sampling parameters are not supported: {problems}") from error


Prompt = Annotated[Items[TokenId], Field(min_length=1)]
OnePrompt = Prompt | Annotated[tuple[Prompt], Field(max_length=1)]
"""The token ids of a prompt, which may be nested in another list."""
Text = Annotated[str, Field(min_length=1)]
Encode = Callable[[str, bool], Sequence[int]]
"""Returns the token ids of a text, with or without the special tokens that begin or end a text."""
RequestName = Annotated[str, Field(min_length=1, max_length=400, pattern=r"^[A-Za-z0-9._:/-]+$")]


class GenerateBody(DialectMessage):
    """Body of ``/inference/v1/generate``. ``cache_salt`` and ``priority`` have no effect."""

    token_ids: Prompt
    sampling_params: EngineSampling = EngineSampling()
    model: str | None = None
    request_id: RequestName | None = None
    stream: Literal[False] = False
    cache_salt: str | None = None
    priority: int = 0


class CompletionsBody(EngineSampling):
    """Body of ``/v1/completions`` for one prompt."""

    prompt: Text | OnePrompt | Annotated[tuple[Text], Field(max_length=1)]
    model: str | None = None
    request_id: RequestName | None = None
    stream: Literal[False] = False
    stream_options: None = None
    echo: Literal[False] = False
    best_of: Literal[1, None] = None
    suffix: None = None
    user: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    add_special_tokens: bool = True
    cache_salt: str | None = None
    priority: int = 0


class UpdateBody(DialectMessage):
    """Body of ``/update_weights``, with a directory in ``weight_dir`` (prime-rl) or ``update_info`` (four phases)."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    weight_dir: str | None = None
    update_info: dict[str, Any] | list[Any] | None = None
    weight_version: str | None = None


class FinishBody(DialectMessage):
    """Body of ``/finish_weight_update``."""

    weight_version: Annotated[str, Field(max_length=256)] | None = None


class VersionBody(DialectMessage):
    """Body of ``/update_weight_version``."""

    new_version: Annotated[str, Field(max_length=256)]


class AdapterBody(DialectMessage):
    """Body of ``/v1/load_lora_adapter``. With ``load_inplace``, an adapter with the same name is replaced."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class AdapterName(DialectMessage):
    """Body of ``/v1/unload_lora_adapter``."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]


class AbortBody(DialectMessage):
    """Body of ``/abort_requests``. Without ids, all running requests are aborted."""

    request_ids: Annotated[list[str], Field(max_length=1024)] = []


def generate_request(name: str | None, token_ids: Sequence[int], sampling: EngineSampling) -> GenerateRequest:
    """Return a request for completions of token ids, with an id that no other request has."""
    request_id = f"{(name or 'request')[:100]}-{uuid.uuid4().hex[:12]}"
    return GenerateRequest(request_id=request_id, prompt_token_ids=tuple(token_ids), sampling=sampling.sampling())


def token_ids_of(
    prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
    encode: Encode | None,
    *,
    specials: bool = True,
) -> tuple[int, ...]:
    """Return the token ids of a prompt, which is text, token ids, or a list with one of these.

    Raises `InvalidRequestError`.
    """
    first = prompt if isinstance(prompt, str) else prompt[0]
    if isinstance(first, int):
        return tuple(prompt)  # type: ignore[arg-type]
    if not isinstance(first, str):
        return tuple(first)
    if encode is None:
        raise InvalidRequestError(
            "a text prompt needs the model's tokenizer, but this server has none (see its --model); send token ids "
            "instead"
        )
    if not (token_ids := tuple(encode(first, specials))):
        raise InvalidRequestError(f"the prompt {first!r} has no tokens")
    return token_ids


def score_request(token_ids: Sequence[int], top_k: int) -> ScoreRequest:
    """Return a request for the logprobs of a prompt's tokens. Raises `InvalidRequestError`."""
    try:
        return ScoreRequest(request_id=f"prompt-{uuid.uuid4().hex[:16]}", token_ids=tuple(token_ids), top_k=top_k)
    except ValidationError as error:
        problems = describe_problems(error, ScoreRequest)
        raise InvalidRequestError(f"the logprobs of this prompt cannot be computed: {problems}") from error


def weight_versions_of(spans: Sequence[VersionSpan], label_of: Labels) -> list[dict[str, Any]]:
    """Return version spans in the format of vLLM and SGLang."""
    return [{"version": label_of(it.version), "start": it.start, "end": it.end} for it in spans]


def prompt_logprobs_of(token_ids: Sequence[int], scores: ScoreResponse) -> list[dict[str, dict[str, Any]] | None]:
    """Return the scores of a prompt: None for its first token, then the scored token and the likeliest ones."""
    rows: list[dict[str, dict[str, Any]] | None] = [None]
    for index, (token_id, logprob) in enumerate(zip(token_ids[1:], scores.logprobs, strict=True)):
        row: dict[str, dict[str, Any]] = {str(token_id): {"logprob": logprob, "rank": None}}
        if scores.top_token_ids:
            best = zip(scores.top_token_ids[index], scores.top_logprobs[index], strict=True)
            row |= {str(token): {"logprob": value, "rank": rank} for rank, (token, value) in enumerate(best, start=1)}
        rows.append(row)
    return rows


def generate_answer(answer: GenerateResponse, label_of: Labels) -> dict[str, Any]:
    """Return the body of the response from ``/inference/v1/generate``."""
    return {
        "request_id": answer.request_id,
        "choices": [
            {
                "index": completion.index,
                "token_ids": list(completion.token_ids),
                "logprobs": {"content": _token_logprobs(completion)},
                "finish_reason": completion.finish_reason,
                "weight_versions": weight_versions_of(completion.version_spans, label_of),
            }
            for completion in answer.completions
        ],
        "prompt_logprobs": None,
    }


def completions_answer(
    body: CompletionsBody,
    prompt: Sequence[int],
    answer: GenerateResponse,
    *,
    model: str,
    texts: Sequence[str],
    label_of: Labels,
) -> dict[str, Any]:
    """Return the body of the response from ``/v1/completions``, plus each token's id and version."""
    num_tokens = sum(len(completion.token_ids) for completion in answer.completions)
    return {
        "id": answer.request_id,
        "object": "text_completion",
        "created": 0,
        "model": model,
        "choices": [
            {
                "index": completion.index,
                "text": text,
                "token_ids": list(completion.token_ids),
                "prompt_token_ids": list(prompt) if body.return_token_ids else None,
                "logprobs": {
                    "tokens": [f"token_id:{token_id}" for token_id in completion.token_ids],
                    "token_logprobs": list(completion.logprobs),
                    "top_logprobs": None,
                    "text_offset": [],
                },
                "finish_reason": completion.finish_reason,
                "stop_reason": None,
                "weight_versions": weight_versions_of(completion.version_spans, label_of),
            }
            for completion, text in zip(answer.completions, texts, strict=True)
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": num_tokens,
            "total_tokens": len(prompt) + num_tokens,
        },
    }


def chat_answer(answer: ChatCompletion, label_of: Labels) -> dict[str, Any]:
    """Return the body of the response from ``/v1/chat/completions``, plus each token's version."""
    found = answer.model_dump(mode="json")
    for choice, sampled in zip(found["choices"], answer.choices, strict=True):
        choice["weight_versions"] = weight_versions_of(sampled.version_spans, label_of)
    return found


def server_info(dtype: str, max_model_len: int, *, model: str, lora: Mapping[str, int] | None) -> dict[str, Any]:
    """Return the part of vLLM's configuration that clients read."""
    return {
        "vllm_config": {
            "model_config": {"model": model, "dtype": f"torch.{dtype}", "max_model_len": max_model_len},
            "lora_config": None if lora is None else dict(lora),
            "parallel_config": {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        }
    }


def _token_logprobs(completion: Completion) -> list[dict[str, Any]]:
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [
        {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token_id, logprob in pairs
    ]

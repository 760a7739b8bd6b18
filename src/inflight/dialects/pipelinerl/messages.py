"""The messages of PipelineRL over HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inflight.base.validation import describe_problems
from inflight.dialects.completions import TOKEN_PREFIX
from inflight.errors import InvalidRequestError
from inflight.wire import DTYPE_SIZES, ChatCompletion, Items, Manifest, Natural, TensorSpec

UPDATE_ROUTE = "/receive_weight_update"
CHAT_ROUTE = "/v1/chat/completions"
MAX_UPDATE_BYTES = 64 << 20
"""Maximum size, in bytes, of an update message, which has a name, a shape and a dtype for each tensor."""
_TORCH = "torch."


class ParameterInfo(BaseModel):
    """One tensor that is about to be broadcast; ``dtype`` is written as in torch, for example ``torch.bfloat16``."""

    model_config = ConfigDict(frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=1024)]
    shape: Annotated[Items[Natural], Field(max_length=64)]
    dtype: Annotated[str, Field(max_length=64)]


class WeightUpdateRequest(BaseModel):
    """Body of ``POST /receive_weight_update``: the tensors of one update, in the order of their broadcasts.

    ``version`` counts the samples that the trainer has trained on. Unknown keys are ignored, as in PipelineRL.
    """

    model_config = ConfigDict(frozen=True)

    kind: Literal["weight_update_request"] = "weight_update_request"
    version: Natural
    parameters_info: Annotated[Items[ParameterInfo], Field(min_length=1)]
    timestamp: float = Field(default_factory=time.time)

    def manifest(self) -> Manifest:
        """Return the manifest of these tensors. Raises `InvalidRequestError` for an unsupported dtype."""
        for info in self.parameters_info:
            if info.dtype.removeprefix(_TORCH) not in DTYPE_SIZES:
                raise InvalidRequestError(f"{info.name} is {info.dtype}; supported dtypes are {', '.join(DTYPE_SIZES)}")
        try:
            return Manifest(
                tensors=tuple(
                    TensorSpec.model_validate(info.model_dump() | {"dtype": info.dtype.removeprefix(_TORCH)})
                    for info in self.parameters_info
                )
            )
        except ValidationError as error:
            raise InvalidRequestError(f"the tensors of the update are invalid: {describe_problems(error)}") from error


def update_request(version: int, tensors: Iterable[TensorSpec]) -> WeightUpdateRequest:
    """Return the message that announces broadcasts of these tensors."""
    return WeightUpdateRequest(
        version=version,
        parameters_info=tuple(
            ParameterInfo(name=spec.name, shape=spec.shape, dtype=f"{_TORCH}{spec.dtype}") for spec in tensors
        ),
    )


def chat_body(body: Any) -> dict[str, Any]:
    """Convert the body of a chat request from PipelineRL's client to the contract's format.

    Raises `InvalidRequestError` for requests that cannot be converted. Fields that the contract does not have are kept,
    and are refused when the result is parsed.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError("the body of a chat request must be a JSON object")
    fields = dict(body)
    fields["logprobs"] = bool(fields.get("logprobs"))
    # All tokens are listed in any case. Only with a stop string would the text differ from the request.
    with_stop = fields.pop("include_stop_str_in_output", False)
    fields.pop("skip_special_tokens", None)
    if with_stop and fields.get("stop"):
        raise InvalidRequestError(
            "include_stop_str_in_output and stop cannot be combined: on this server, texts always end before a stop "
            "string"
        )
    if fields.get("top_k") == -1:  # vLLM's value for no limit
        fields["top_k"] = 0
    return fields


def chat_answer(completion: ChatCompletion) -> dict[str, Any]:
    """Return an answer in the form that PipelineRL's client reads, with token ids instead of token texts.

    The contract's own fields, such as version spans, are kept.
    """
    answer = completion.model_dump(mode="json")
    for choice in answer["choices"]:
        pairs = zip(choice["token_ids"], choice["token_logprobs"], strict=True)
        if choice["logprobs"] is not None:
            choice["logprobs"] = {
                "content": [
                    {"token": f"{TOKEN_PREFIX}{token_id}", "logprob": logprob, "bytes": None, "top_logprobs": []}
                    for token_id, logprob in pairs
                ]
            }
        choice["message"]["tool_calls"] = []
    return answer

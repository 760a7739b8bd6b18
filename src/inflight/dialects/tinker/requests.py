"""The JSON requests of Tinker's API. Unknown keys are ignored, because later releases of the SDK may add some."""

from __future__ import annotations

import base64
import json
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from inflight.types import AdamSettings

Name = Annotated[str, Field(min_length=1, max_length=256)]
Seq = Annotated[int, Field(ge=0, le=2**62)]
MAX_TTL_S = 100 * 365 * 24 * 3600


def _without_nan(values: dict[str, Any]) -> dict[str, Any]:
    json.dumps(values, allow_nan=False)  # a ValueError that names the number
    return values


Metadata = Annotated[dict[str, Any], AfterValidator(_without_nan)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


class TinkerRequest(BaseModel):
    """Base of every request."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class CreateSession(TinkerRequest):
    """Begin a session."""

    sdk_version: str = ""
    tags: list[str] = []
    user_metadata: Metadata | None = None
    display_name: str | None = None


class OfSession(TinkerRequest):
    """A request about a session."""

    session_id: Name


class LoraConfig(TinkerRequest):
    """The LoRA of a new model."""

    rank: int = Field(default=32, ge=0, le=4096)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(OfSession):
    """Create a model in a session."""

    model_seq_id: Seq
    base_model: str
    lora_config: LoraConfig | None = None
    """If this is None or has rank 0, all weights are trained."""
    optimizer_config: dict[str, Any] | None = None
    user_metadata: Metadata | None = None

    @property
    def rank(self) -> int:
        return 0 if self.lora_config is None else self.lora_config.rank


class OfModel(TinkerRequest):
    """A request about a model."""

    model_id: Name


class NumberedCall(OfModel):
    """A call of a model; calls are executed in the order of their numbers."""

    seq_id: Seq


class AdamParams(TinkerRequest):
    """The settings of one step of AdamW."""

    learning_rate: float = Field(default=1e-4, ge=0, allow_inf_nan=False)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, gt=0, allow_inf_nan=False)
    """Must be above 0: otherwise a weight whose gradients were all 0 would become NaN."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    def settings(self) -> AdamSettings:
        """Return the settings of a step."""
        return AdamSettings(
            learning_rate=self.learning_rate,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
            max_gradient_norm=self.grad_clip_norm or None,
        )


class OptimStep(NumberedCall):
    """Take an optimizer step."""

    adam_params: dict[str, Any] | None = None
    """`AdamParams`, validated only when the call is executed, because a refused call would leave a gap in the numbers.
    """
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(NumberedCall):
    """Save the weights and the optimizer's state under a name."""

    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveWeightsForSampler(SaveWeights):
    """Save weights for sampling, under a name or for a sampling session."""

    sampling_session_seq_id: Seq | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class LoadWeights(TinkerRequest):
    """Create a model from a checkpoint, or load one into a new model."""

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: Seq | None = None
    session_id: str | None = None
    model_seq_id: Seq | None = None
    base_model: str | None = None
    optimizer_config: dict[str, Any] | None = None
    user_metadata: Metadata | None = None


class CreateSamplingSession(OfSession):
    """Begin to sample from the base model or a checkpoint."""

    sampling_session_seq_id: Seq
    base_model: str | None = None
    model_path: str | None = None


class JoinSamplingSession(TinkerRequest):
    """Request a number for another client of a sampling session, in another process."""

    sampling_session_id: Name


class TokenChunk(TinkerRequest):
    """A part of a prompt."""

    type: str = "encoded_text"
    tokens: TokenIds = []


class ModelInput(TinkerRequest):
    """A prompt."""

    chunks: list[TokenChunk]


class TensorData(TinkerRequest):
    """A tensor, dense or in the CSR format."""

    data: list[float] | str
    dtype: str = "int64"
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class TinkerSampling(TinkerRequest):
    """How tokens are drawn. A ``top_k`` of -1 disables that filter."""

    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_k: int = Field(default=-1, ge=-1)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)


class Sample(TinkerRequest):
    """Sample from a prompt, and score it if requested."""

    prompt: ModelInput
    sampling_params: TinkerSampling = TinkerSampling()
    num_samples: int = Field(default=1, ge=1, le=1024)
    sampling_session_id: str | None = None
    seq_id: Seq | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0)
    topk_sample_logprobs: int = Field(default=0, ge=0)
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = Field(default=0, ge=0)
    prompt_logprobs_last_n: int | None = Field(default=None, ge=0)
    record_stability_info: bool = False

    def token_ids(self) -> tuple[int, ...]:
        """Return the prompt's token ids. Raises ``ValueError`` for any other kind of chunk."""
        for chunk in self.prompt.chunks:
            if chunk.type != "encoded_text":
                raise ValueError(f"it has a chunk of type {chunk.type!r}, but only token ids are supported")
        return tuple(token for chunk in self.prompt.chunks for token in chunk.tokens)


class RetrieveFuture(TinkerRequest):
    """Wait for the result of a call."""

    request_id: Name
    allow_metadata_only: bool = True


class SetTtl(TinkerRequest):
    """Set the expiry time of a checkpoint."""

    ttl_seconds: int | None = Field(default=None, ge=1, le=MAX_TTL_S)


class WeightsInfo(TinkerRequest):
    """Describe a checkpoint."""

    tinker_path: str


def numbers_of(tensor: TensorData) -> Any:
    """Return the numbers of a tensor, which are a JSON list or little-endian bytes in base64."""
    if isinstance(tensor.data, str):
        return np.frombuffer(base64.b64decode(tensor.data), np.dtype(tensor.dtype).newbyteorder("<"))
    return np.array(tensor.data, np.dtype(tensor.dtype))

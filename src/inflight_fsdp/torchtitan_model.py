"""TorchTitan's models for packed segments, configured from the config.json of a Hugging Face checkpoint.

Two modules are ours: the attention over packed segments, since TorchTitan's have no backward on a CPU, and the head,
which returns logprobs and never holds all logits.

Shape suffixes: T packed tokens, N targets, H hidden; L, A, D length, heads and head size of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import model_validator
from torch import nn
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm, RoPE
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.module import Module

from inflight.attention import SegmentPlan, outside_of_graphs, segment_attention
from inflight.checkpoints import load_config
from inflight.errors import ConfigError, UnsupportedError
from inflight_fsdp.config import WorkerConfig
from inflight_fsdp.layout import Layout, Stored
from inflight_fsdp.sharded import HeadTargets

_NO_INIT = {"weight": skip_param_init, "bias": skip_param_init}
"""Weights come from a checkpoint."""
HEAD = "lm_head.weight"


class TorchTitanConfig(WorkerConfig):
    """Settings of one TorchTitan worker; the same on every rank."""

    LABEL: ClassVar[str] = "TorchTitan"

    optimizer_implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """Of TorchTitan's optimizer container."""

    @model_validator(mode="after")
    def _has_no_settings_of_fsdp(self) -> TorchTitanConfig:
        if self.reduce_dtype == "bfloat16":
            raise ValueError("reduce_dtype 'bfloat16': TorchTitan sums gradients in float32; leave it out")
        if self.float8:
            raise ValueError("float8 is for the worker 'fsdp' only; leave it out")
        return self


class TitanPolicy(nn.Module):
    """A decoder of TorchTitan as a function from packed tokens to logprobs."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self, token_ids_T: torch.Tensor, position_ids_T: torch.Tensor, plan: SegmentPlan, targets: HeadTargets
    ) -> torch.Tensor:
        """Return the logprobs [N] of the targets."""
        head = self.decoder.lm_head
        assert isinstance(head, LogprobHead)
        head.targets = targets
        try:
            logprobs_N: torch.Tensor = self.decoder(
                token_ids_T.unsqueeze(0), positions=position_ids_T.unsqueeze(0), attention_masks=plan
            )
        finally:
            head.targets = None
        return logprobs_N


# ---------------------------------------------------------------------------------------------- modules that are ours


class LogprobHead(Linear):  # type: ignore[misc]
    """Replaces TorchTitan's head: logprobs of the targets, in chunks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        """TorchTitan makes the module of the class that its settings belong to."""

    targets: HeadTargets | None = None

    def forward(self, hidden_1TH: torch.Tensor) -> torch.Tensor:
        """Return the logprobs [N] of the `targets`."""
        assert self.targets is not None
        return self.targets.logprobs(hidden_1TH, self)


class SegmentAttention(Module):  # type: ignore[misc]
    """Replaces TorchTitan's flex and varlen attention: attention over packed segments."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        """Adds whether torch's compiler may include the attention in its graphs."""

        in_graphs: bool = True

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._attend = segment_attention if config.in_graphs else outside_of_graphs(segment_attention)

    def forward(
        self,
        query_1LAD: torch.Tensor,
        key_1LAD: torch.Tensor,
        value_1LAD: torch.Tensor,
        *,
        attention_masks: SegmentPlan,
        scale: float | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Return [1, L, A, D]; TorchTitan calls the plan of segments masks."""
        query, key, value = (x.transpose(1, 2) for x in (query_1LAD, key_1LAD, value_1LAD))
        return self._attend(query, key, value, attention_masks, scale)


# ------------------------------------------------------------------------------------------ from config.json to a model


@dataclass(frozen=True, slots=True)
class Family:
    """One family of TorchTitan's registry, and what of it is translated."""

    model: Any
    block: Any
    adapter: Callable[[Any, None], Any]
    parallelize: Callable[..., Any]
    rope: Any
    rope_types: tuple[str, ...]
    has_qk_norm: bool


FAMILIES = {
    "qwen3": Family(
        model=Qwen3Model,
        block=Qwen3TransformerBlock,
        adapter=Qwen3StateDictAdapter,
        parallelize=parallelize_qwen3,
        rope=CosSinRoPE,
        rope_types=("default",),
        has_qk_norm=True,
    ),
    "llama": Family(
        model=Llama3Model,
        block=Llama3TransformerBlock,
        adapter=Llama3StateDictAdapter,
        parallelize=parallelize_llama,
        rope=ComplexRoPE,
        rope_types=("default", "llama3"),
        has_qk_norm=False,
    ),
}


def supported_config(config: TorchTitanConfig) -> Any:
    """Return the transformers config of the checkpoint. Raises `UnsupportedError` for what is not translated."""
    if config.frozen:
        raise ConfigError("the TorchTitan worker trains every parameter and does not support frozen; leave it out")
    hf = load_config(config.model_path)
    if hf.model_type not in FAMILIES:
        raise UnsupportedError(
            f"TorchTitan worker: models of type {hf.model_type!r} are not supported; supported: {', '.join(FAMILIES)}. "
            "The worker 'fsdp' trains the models of transformers"
        )
    if getattr(hf, "attention_bias", False) or getattr(hf, "mlp_bias", False):
        raise UnsupportedError(f"TorchTitan's {hf.model_type} has no biases, but {str(config.model_path)!r} does")
    if hf.hidden_act != "silu":
        raise UnsupportedError(f"TorchTitan's {hf.model_type} computes silu, not hidden_act {hf.hidden_act!r}")
    if config.optimizer != "adamw":
        raise ConfigError(f"optimizer {config.optimizer!r}: TorchTitan's container supports only adamw")
    if config.dtype == "float64":
        raise ConfigError("dtype 'float64': TorchTitan trains in float32 or bfloat16")
    return hf


def model_config_of(hf: Any, config: TorchTitanConfig) -> Decoder.Config:
    """Return TorchTitan's configuration of a transformers config. Raises `UnsupportedError` for scaled positions."""
    family = FAMILIES[hf.model_type]
    rope = _rope(hf, family)
    model: Decoder.Config = family.model.Config(
        dim=hf.hidden_size,
        vocab_size=hf.vocab_size,
        norm=_norm(hf.hidden_size, hf),
        enable_weight_tying=bool(hf.tie_word_embeddings),
        tok_embeddings=Embedding.Config(
            num_embeddings=hf.vocab_size, embedding_dim=hf.hidden_size, param_init=_NO_INIT
        ),
        lm_head=LogprobHead.Config(in_features=hf.hidden_size, out_features=hf.vocab_size, param_init=_NO_INIT),
        layers=[_layer(hf, family, rope, config) for _ in range(hf.num_hidden_layers)],
    )
    return model


def _layer(hf: Any, family: Family, rope: RoPE.Config, config: TorchTitanConfig) -> Any:
    return family.block.Config(
        attention_norm=_norm(hf.hidden_size, hf),
        ffn_norm=_norm(hf.hidden_size, hf),
        attention=make_gqa_config(
            dim=hf.hidden_size,
            n_heads=hf.num_attention_heads,
            n_kv_heads=hf.num_key_value_heads,
            head_dim=hf.head_dim,
            wqkv_param_init=_NO_INIT,
            wo_param_init=_NO_INIT,
            inner_attention=SegmentAttention.Config(in_graphs=not config.compile),
            qk_norm=_norm(hf.head_dim, hf) if family.has_qk_norm else None,
            rope=rope,
        ),
        feed_forward=make_ffn_config(
            dim=hf.hidden_size,
            hidden_dim=hf.intermediate_size,
            w1_param_init=_NO_INIT,
            w2w3_param_init=_NO_INIT,
        ),
    )


def _norm(size: int, hf: Any) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=hf.rms_norm_eps, param_init=_NO_INIT)


def _rope(hf: Any, family: Family) -> RoPE.Config:
    scaling = hf.rope_parameters
    kind = str(scaling.get("rope_type", "default"))
    if kind not in family.rope_types:
        raise UnsupportedError(
            f"TorchTitan worker: rope_type {kind!r} of {hf.model_type} is not supported; supported: "
            f"{', '.join(family.rope_types)}"
        )
    rope = family.rope.Config(
        dim=hf.head_dim, max_seq_len=hf.max_position_embeddings, theta=float(scaling["rope_theta"])
    )
    if kind == "llama3":
        rope.scaling = "llama"
        rope.scaling_factor = scaling["factor"]
        for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            setattr(rope, name, scaling[name])
    return rope


def layout_of(name: str, parameter: torch.Tensor, adapter: Any) -> Layout:
    """Return how TorchTitan's adapter writes one parameter, found by writing an empty one."""
    empty = torch.empty(parameter.shape, device="meta")
    stored = dict(adapter.to_hf({name: empty}))
    shapes = {key: tuple(tensor.shape) for key, tensor in stored.items()}
    if len(stored) == 1 and next(iter(stored.values())) is empty:
        return Layout(shapes)

    def split(whole: torch.Tensor) -> Stored:
        return cast(Stored, adapter.to_hf({name: whole}))

    def join(tensors: Stored) -> torch.Tensor:
        # The adapter wants a head, which it would otherwise take from the embedding of a tied model.
        found = adapter.from_hf({HEAD: torch.empty(0), **tensors})
        return cast(torch.Tensor, found[name])

    return Layout(shapes, split, join)

"""TorchTitan models configured from the config.json of a Hugging Face checkpoint, with their stages and layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, RMSNorm, RoPE
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config, make_moe_config, make_router_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from inflight.errors import ConfigError, UnsupportedError
from inflight.model.checkpoints import load_config
from inflight_fsdp.layout import Layout, Stored
from inflight_fsdp.torchtitan_config import TorchTitanConfig
from inflight_fsdp.torchtitan_modules import Experts, LogprobHead, Router, SegmentAttention

_NO_INIT = {"weight": skip_param_init, "bias": skip_param_init}
"""Initializers that do nothing, because weights come from a checkpoint."""
HEAD, EMBEDDING = "lm_head.weight", "tok_embeddings.weight"


# ------------------------------------------------------------------------------------------ from config.json to a model


@dataclass(frozen=True, slots=True)
class Family:
    """A model family of TorchTitan, and what its configuration supports."""

    model: Any
    block: Any
    adapter: Callable[[Any, None], Any]
    parallelize: Callable[..., Any]
    shard: Callable[..., None]
    """Sets how a model's tensors are sharded, in the model's configuration."""
    rope: Any
    rope_types: tuple[str, ...]
    has_qk_norm: bool


_QWEN3 = Family(
    model=Qwen3Model,
    block=Qwen3TransformerBlock,
    adapter=Qwen3StateDictAdapter,
    parallelize=parallelize_qwen3,
    shard=set_qwen3_sharding_config,
    rope=CosSinRoPE,
    rope_types=("default",),
    has_qk_norm=True,
)
FAMILIES = {
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "llama": Family(
        model=Llama3Model,
        block=Llama3TransformerBlock,
        adapter=Llama3StateDictAdapter,
        parallelize=parallelize_llama,
        shard=lambda model, *, enable_sp, enable_ep: set_llama3_sharding_config(model, enable_sp=enable_sp),
        rope=ComplexRoPE,
        rope_types=("default", "llama3"),
        has_qk_norm=False,
    ),
}


def supported_config(config: TorchTitanConfig) -> Any:
    """Return the transformers config of the checkpoint.

    Raises `UnsupportedError` or `ConfigError` if the model cannot be trained as configured.
    """
    if config.frozen:
        raise ConfigError("the TorchTitan worker trains every parameter and does not support frozen; omit it")
    hf = load_config(config.model_path)
    if hf.model_type not in FAMILIES:
        raise UnsupportedError(
            f"TorchTitan worker: models of type {hf.model_type!r} are not supported; supported: {', '.join(FAMILIES)}. "
            "The worker 'fsdp' trains the models of transformers"
        )
    if getattr(hf, "attention_bias", False) or getattr(hf, "mlp_bias", False):
        raise UnsupportedError(
            f"TorchTitan's {hf.model_type} has no biases, but the model in {str(config.model_path)!r} does"
        )
    if hf.hidden_act != "silu":
        raise UnsupportedError(f"TorchTitan's {hf.model_type} computes silu, not hidden_act {hf.hidden_act!r}")
    if config.optimizer != "adamw":
        raise ConfigError(
            f"optimizer {config.optimizer!r} is not supported: TorchTitan's optimizer container supports only adamw"
        )
    if config.dtype == "float64":
        raise ConfigError("dtype 'float64' is not supported: TorchTitan trains in float32 or bfloat16")
    _check_sizes(hf, config)
    return hf


def _check_sizes(hf: Any, config: TorchTitanConfig) -> None:
    """Raise `ConfigError` unless the ranks can share the model's heads, experts and layers as configured."""
    num_experts = getattr(hf, "num_experts", None) or 0
    divided = {
        "tensor_parallel": ("key-value heads", hf.num_key_value_heads),
        "expert_parallel": ("experts", num_experts),
        "context_parallel": ("attention heads", hf.num_attention_heads // config.tensor_parallel),
    }
    for name, (what, number) in divided.items():
        size = getattr(config, name)
        if size > 1 and (number == 0 or number % size):
            raise ConfigError(f"{name} {size} does not divide the model's {number} {what}")
    if config.pipeline_parallel > hf.num_hidden_layers:
        raise ConfigError(
            f"pipeline_parallel {config.pipeline_parallel}: the model has only {hf.num_hidden_layers} layers"
        )


def model_config_of(hf: Any, config: TorchTitanConfig) -> Decoder.Config:
    """Return TorchTitan's configuration for a transformers config.

    Raises `UnsupportedError` if its RoPE type is not supported.
    """
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
        layers=[_layer(hf, family, rope, config, index) for index in range(hf.num_hidden_layers)],
    )
    family.shard(model, enable_sp=False, enable_ep=config.expert_parallel > 1)
    return model


def _layer(hf: Any, family: Family, rope: RoPE.Config, config: TorchTitanConfig, index: int) -> Any:
    has_experts = _has_experts(hf, index)
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
        feed_forward=None
        if has_experts
        else make_ffn_config(
            dim=hf.hidden_size,
            hidden_dim=hf.intermediate_size,
            w1_param_init=_NO_INIT,
            w2w3_param_init=_NO_INIT,
        ),
        **({"moe": _experts(hf)} if has_experts else {}),
    )


def _has_experts(hf: Any, index: int) -> bool:
    """Return whether a layer is a mixture of experts, by the rule that Qwen3-MoE in transformers uses."""
    if not getattr(hf, "num_experts", None) or index in hf.mlp_only_layers:
        return False
    return bool((index + 1) % hf.decoder_sparse_step == 0)


def _experts(hf: Any) -> Any:
    router = make_router_config(
        dim=hf.hidden_size,
        num_experts=hf.num_experts,
        gate_param_init=_NO_INIT,
        top_k=hf.num_experts_per_tok,
        score_func="softmax",
        route_norm=hf.norm_topk_prob,
    )
    return make_moe_config(
        num_experts=hf.num_experts,
        router=Router.Config(**{field.name: getattr(router, field.name) for field in fields(router)}),
        routed_experts=RoutedExperts.Config(
            inner_experts=Experts.Config(
                dim=hf.hidden_size,
                hidden_dim=hf.moe_intermediate_size,
                num_experts=hf.num_experts,
                param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), skip_param_init),
            ),
            token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=hf.num_experts, top_k=hf.num_experts_per_tok),
        ),
        load_balance_coeff=None,
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


def keep_stage(decoder: Decoder, stage: int, num_stages: int) -> None:
    """Remove all layers but those of one pipeline stage from a decoder.

    The first stage keeps the embedding, and the last stage keeps the head.
    """
    start, stop = (len(decoder.layers) * i // num_stages for i in (stage, stage + 1))
    for index in [index for index in decoder.layers if not start <= int(index) < stop]:
        del decoder.layers[index]
    if stage > 0:
        decoder.tok_embeddings = None
    if stage < num_stages - 1:
        decoder.norm = decoder.lm_head = None
    decoder.enable_weight_tying = False


def layout_of(name: str, parameter: torch.Tensor, adapter: Any) -> Layout:
    """Return how TorchTitan's adapter stores a parameter, which is found by converting an empty tensor."""
    empty = torch.empty(parameter.shape, device="meta")
    stored = dict(adapter.to_hf({name: empty}))
    shapes = {key: tuple(tensor.shape) for key, tensor in stored.items()}
    if len(stored) == 1 and next(iter(stored.values())) is empty:
        return Layout(shapes)

    def split(whole: torch.Tensor) -> Stored:
        return cast(Stored, adapter.to_hf({name: whole}))

    def join(tensors: Stored) -> torch.Tensor:
        # The adapter needs a head. For a tied model, it would otherwise take the embedding, which may not be there.
        found = adapter.from_hf({HEAD: torch.empty(0), **tensors})
        return cast(torch.Tensor, found[name])

    return Layout(shapes, split, join)

"""Megatron-Core models configured from the config.json of a Hugging Face checkpoint, and how they are stored.

Megatron-Core fuses queries, keys and values, group by group, and the two input projections of a feed-forward block.
If they are viewed as [groups, rows of a group, H] and as [2, rows, H], the part of a tensor-parallel rank is one box.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from inflight.errors import ConfigError, UnsupportedError
from inflight.model.attention import heads_of
from inflight.model.checkpoints import load_config
from inflight_fsdp.layout import Box, Layout, Stored
from inflight_fsdp.megatron_config import MegatronConfig
from inflight_fsdp.megatron_modules import SegmentAttention

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
QK_NORMS = ("q_layernorm.weight", "k_layernorm.weight")
_FAMILIES = ("llama", "qwen2", "qwen3")
_ROPE_TYPES = ("default", "llama3")
"""The RoPE types that change only the frequencies, and change them in the same way for all lengths."""


def supported_config(config: MegatronConfig) -> Any:
    """Return the transformers config of the checkpoint.

    Raises `UnsupportedError` or `ConfigError` if the model cannot be trained as configured.
    """
    hf = load_config(config.model_path)
    if hf.model_type not in _FAMILIES:
        raise UnsupportedError(
            f"Megatron worker: models of type {hf.model_type!r} are not supported; supported: {', '.join(_FAMILIES)}. "
            "The worker 'fsdp' trains the models of transformers"
        )
    if getattr(hf, "attention_bias", False) or getattr(hf, "mlp_bias", False):
        raise UnsupportedError(
            f"Megatron worker: {str(config.model_path)!r} is a {hf.model_type} with attention_bias or mlp_bias, which "
            "is not supported; use the worker 'fsdp'"
        )
    if hf.hidden_act != "silu":
        raise UnsupportedError(f"Megatron worker: hidden_act {hf.hidden_act!r} is not supported; supported: silu")
    if (kind := hf.rope_parameters.get("rope_type", "default")) not in _ROPE_TYPES:
        raise UnsupportedError(
            f"Megatron worker: rope_type {kind!r} is not supported; supported: {', '.join(_ROPE_TYPES)}"
        )
    for name, what, number in (
        ("tensor_parallel", "key-value heads", heads_of(hf)[1]),
        ("tensor_parallel", "rows of a feed-forward projection (intermediate_size)", hf.intermediate_size),
        ("pipeline_parallel", "layers", hf.num_hidden_layers),
    ):
        if number % (size := getattr(config, name)):
            raise ConfigError(f"{name} {size} does not divide the model's {number} {what}")
    return hf


def build_stage(hf: Any, config: MegatronConfig, groups: ProcessGroupCollection) -> GPTModel:
    """Return this rank's part of a model, with its tensors on the meta device, which allocates no memory."""
    num_heads, num_kv_heads, head_dim = heads_of(hf)
    has_qk_norm = hf.model_type == "qwen3"
    dtype = getattr(torch, config.dtype)
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")  # Megatron-Core warns about its own defaults
        settings = TransformerConfig(
            num_layers=hf.num_hidden_layers,
            hidden_size=hf.hidden_size,
            num_attention_heads=num_heads,
            num_query_groups=num_kv_heads,
            kv_channels=head_dim,
            ffn_hidden_size=hf.intermediate_size,
            normalization="RMSNorm",
            layernorm_epsilon=hf.rms_norm_eps,
            qk_layernorm=has_qk_norm,
            add_bias_linear=False,
            add_qkv_bias=hf.model_type == "qwen2",
            gated_linear_unit=True,
            activation_func=F.silu,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=config.tensor_parallel,
            pipeline_model_parallel_size=config.pipeline_parallel,
            pipeline_dtype=dtype,
            params_dtype=dtype,
            bf16=config.dtype == "bfloat16",
            # Weights come from a checkpoint. Without these settings they would be created on a CUDA device, not on
            # meta.
            perform_initialization=False,
            use_cpu_initialization=True,
            # These need transformer_engine or apex.
            persist_layer_norm=False,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
        )
        spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=has_qk_norm)
        spec.submodules.self_attention.submodules.core_attention = ModuleSpec(module=SegmentAttention)
        size, stage = config.tensor_parallel, groups.pp.rank()
        gpt = GPTModel(
            config=settings,
            transformer_layer_spec=spec,
            vocab_size=-(-hf.vocab_size // size) * size,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=stage == 0,
            post_process=stage == config.pipeline_parallel - 1,
            position_embedding_type="none",  # the policy passes angles
            pg_collection=groups,
        )
    return gpt.to(dtype)


def rope_frequencies(hf: Any, device: torch.device) -> torch.Tensor:
    """Return the angles [D / 2] by which the dimensions of a head rotate from one position to the next."""
    kind = hf.rope_parameters.get("rope_type", "default")
    if kind != "default":
        frequencies: torch.Tensor = ROPE_INIT_FUNCTIONS[kind](hf, device)[0]
        return frequencies
    head_dim = heads_of(hf)[2]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    return torch.pow(float(hf.rope_parameters["rope_theta"]), -exponents)


# ----------------------------------------------------------------------------------------------- how a model is stored


@dataclass(frozen=True, slots=True)
class WholeParameter:
    """A parameter of the whole model, which tensor-parallel ranks may share."""

    shape: tuple[int, ...]
    layout: Layout
    shared_dim: int | None = None
    """Dimension that tensor-parallel ranks divide; None if each rank has the whole parameter."""

    def box(self, rank: int, num_ranks: int) -> Box:
        """Return the part that one of the tensor-parallel ranks holds."""
        each = [-(-size // num_ranks) if dim == self.shared_dim else size for dim, size in enumerate(self.shape)]
        starts = [rank * length if dim == self.shared_dim else 0 for dim, length in enumerate(each)]
        return tuple(
            slice(min(start, size), min(start + length, size))
            for start, length, size in zip(starts, each, self.shape, strict=True)
        )


def whole_parameters(hf: Any) -> dict[str, WholeParameter]:
    """Return the parameters of the whole model, under their names in a model with a single stage."""
    vocabulary = (hf.vocab_size, hf.hidden_size)
    names = [(EMBEDDING, "model.embed_tokens.weight")]
    names += [] if hf.tie_word_embeddings else [(HEAD, "lm_head.weight")]
    found = {name: WholeParameter(vocabulary, Layout({stored: vocabulary}), 0) for name, stored in names}
    found["decoder.final_layernorm.weight"] = _norm(hf.hidden_size, "model.norm")
    for index in range(hf.num_hidden_layers):
        found |= {
            f"decoder.layers.{index}.{name}": whole for name, whole in _of_layer(hf, f"model.layers.{index}").items()
        }
    return found


def _of_layer(hf: Any, stored: str) -> dict[str, WholeParameter]:
    num_heads, num_kv_heads, head_dim = heads_of(hf)
    hidden, inner = hf.hidden_size, hf.intermediate_size
    attention, mlp = f"{stored}.self_attn", f"{stored}.mlp"
    groups = (num_kv_heads, num_heads // num_kv_heads, head_dim)
    found = {
        "input_layernorm.weight": _norm(hidden, f"{stored}.input_layernorm"),
        "self_attention.linear_qkv.weight": _queries_keys_values(attention, "weight", groups, hidden),
    }
    if hf.model_type == "qwen2":
        found["self_attention.linear_qkv.bias"] = _queries_keys_values(attention, "bias", groups)
    if hf.model_type == "qwen3":
        for name in "qk":
            found[f"self_attention.{name}_layernorm.weight"] = _norm(head_dim, f"{attention}.{name}_norm")
    return found | {
        "self_attention.linear_proj.weight": _by_columns((hidden, num_heads * head_dim), f"{attention}.o_proj"),
        "pre_mlp_layernorm.weight": _norm(hidden, f"{stored}.post_attention_layernorm"),
        "mlp.linear_fc1.weight": _gate_and_up([f"{mlp}.{name}_proj.weight" for name in ("gate", "up")], inner, hidden),
        "mlp.linear_fc2.weight": _by_columns((hidden, inner), f"{mlp}.down_proj"),
    }


def _norm(size: int, stored: str) -> WholeParameter:
    return WholeParameter((size,), Layout({f"{stored}.weight": (size,)}))


def _by_columns(shape: tuple[int, int], stored: str) -> WholeParameter:
    return WholeParameter(shape, Layout({f"{stored}.weight": shape}), 1)


def _queries_keys_values(attention: str, kind: str, groups: tuple[int, int, int], *others: int) -> WholeParameter:
    """Return the parameter [groups, rows, ...] that holds the queries, the key and the value of each group in turn.

    ``groups`` contains the numbers of groups, of queries per group, and of rows per head.
    """
    num_groups, num_queries, head_dim = groups
    rows = (num_queries * head_dim, head_dim, head_dim)
    names = [f"{attention}.{name}_proj.{kind}" for name in "qkv"]

    def split(whole: torch.Tensor) -> Stored:
        pieces = torch.split(whole, list(rows), 1)
        return {name: piece.reshape(-1, *others) for name, piece in zip(names, pieces, strict=True)}

    def join(stored: Stored) -> torch.Tensor:
        return torch.cat([stored[name].reshape(num_groups, -1, *others) for name in names], 1)

    shapes = {name: (num_groups * size, *others) for name, size in zip(names, rows, strict=True)}
    return WholeParameter((num_groups, sum(rows), *others), Layout(shapes, split, join), 0)


def _gate_and_up(names: Sequence[str], inner: int, hidden: int) -> WholeParameter:
    def split(whole: torch.Tensor) -> Stored:
        return dict(zip(names, whole.unbind(0), strict=True))

    def join(stored: Stored) -> torch.Tensor:
        return torch.stack([stored[name] for name in names])

    return WholeParameter((2, inner, hidden), Layout(dict.fromkeys(names, (inner, hidden)), split, join), 1)


def parameters_of_stage(
    gpt: GPTModel, hf: Any, groups: ProcessGroupCollection
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield this rank's parameters, under their names in a model with a single stage."""
    first = groups.pp.rank() * (hf.num_hidden_layers // groups.pp.size())
    for name, parameter in gpt.named_parameters():
        if name == HEAD and hf.tie_word_embeddings:
            yield EMBEDDING, parameter  # the copy in the last stage
        elif name.startswith("decoder.layers."):
            index, rest = name.removeprefix("decoder.layers.").split(".", 1)
            yield f"decoder.layers.{first + int(index)}.{rest}", parameter
        else:
            yield name, parameter

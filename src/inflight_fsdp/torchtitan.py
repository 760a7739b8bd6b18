"""`TorchTitanWorker`: one rank of a trainer on TorchTitan's models, parallelism and optimizers. Imports torchtitan.

The model is made of TorchTitan's own modules from the config.json of a Hugging Face checkpoint, parallelised by the
function of its family, and named in checkpoints by its state-dict adapter. Two modules are ours, put in through
TorchTitan's configuration: the attention over packed segments, which has a backward on a CPU where TorchTitan's have
none, and the head, which returns logprobs and never holds all logits.

Shape suffixes: T packed tokens, N targets, H hidden; L, A, D length, heads and head size of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.utils import set_spmd_backend
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
from inflight.checkpoints import fitting_tensors, load_config, max_model_len_of
from inflight.errors import ConfigError, UnsupportedError
from inflight.losses.head import chunked_logprobs
from inflight_fsdp.agreement import on_every_rank
from inflight_fsdp.compiled import check_compiler, compile_layers
from inflight_fsdp.config import WorkerConfig, parse_config
from inflight_fsdp.layout import Layout, ShardedTensor, Stored, as_it_is
from inflight_fsdp.optimizer import ShardedOptimizer, as_sharded
from inflight_fsdp.sharded import (
    ShardedPolicy,
    ShardedWorker,
    device_of,
    in_a_group,
    storage_device_of,
    sum_gradients_over_ranks,
)
from inflight_fsdp.sharding import read_shards

_NO_INIT = {"weight": skip_param_init, "bias": skip_param_init}
"""Weights come from a checkpoint."""
_HEAD = "lm_head.weight"


class TorchTitanConfig(WorkerConfig):
    """Settings of one TorchTitan worker; the same on every rank."""

    LABEL: ClassVar[str] = "TorchTitan"

    optimizer_implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """Of TorchTitan's optimizer container."""


def create_worker(config: TorchTitanConfig | Mapping[str, object]) -> TorchTitanWorker:
    """Return this process's rank of a worker; collective over torch's default process group.

    Without a default group a group of one is made, and `TorchTitanWorker.close` ends it. Raises `ConfigError` or
    `UnsupportedError` on every rank if the settings or the model cannot be used.
    """
    settings = parse_config(config, TorchTitanConfig)
    device = device_of(settings)
    return in_a_group(device, lambda owns_group: TorchTitanWorker(settings, device, owns_group=owns_group))


class TorchTitanWorker(ShardedWorker):
    """One trainer rank. Made by `create_worker`; `inflight.contracts.TrainerWorker` says what each method does."""

    def __init__(self, config: TorchTitanConfig, device: torch.device, *, owns_group: bool) -> None:
        if config.frozen:
            raise ConfigError(
                "frozen is not known to the TorchTitan worker, which trains every parameter; leave it out"
            )
        if config.compile:
            on_every_rank(lambda: check_compiler(device), device)
        hf_config = on_every_rank(lambda: _supported_config(config), device)
        family = _FAMILIES[hf_config.model_type]
        model_config = on_every_rank(lambda: model_config_of(hf_config, config), device)
        with torch.device("meta"):
            decoder = _empty_decoder(model_config, config)
        if config.compile:
            # TorchTitan's own compiling allows no break in a layer's graph, and attention over segments is one.
            compile_layers(decoder.layers.values())
        decoder.tok_embeddings.padding_idx = hf_config.pad_token_id  # whose row has no gradient, as in transformers
        adapter = family.adapter(model_config, None)
        layouts = {name: _layout(name, parameter, adapter) for name, parameter in decoder.named_parameters()}
        wanted = {name: shape for layout in layouts.values() for name, shape in layout.shapes.items()}
        known = (_HEAD,) if hf_config.tie_word_embeddings else ()
        stored = on_every_rank(lambda: fitting_tensors(config.model_path, wanted, known=known), device)
        mesh = _parallelize(decoder, family, config, device)
        decoder.to_empty(device=storage_device_of(config, device))
        with torch.no_grad():
            decoder.init_states(buffer_device=device)  # the rotary tables; ties a tied head again
        parameters = {canonical_fqn(name): cast(DTensor, p) for name, p in decoder.named_parameters()}
        laid_out = [ShardedTensor(parameter, layouts[name]) for name, parameter in parameters.items()]
        on_every_rank(lambda: read_shards(stored, laid_out), device)
        policy = ShardedPolicy(
            module=TitanPolicy(decoder),
            mesh=mesh,
            parameters=parameters,
            layouts=layouts,
            optimizer=TitanOptimizer(decoder, parameters, config),
            model_config=hf_config.to_json_string(use_diff=True),
            context_length=max_model_len_of(hf_config),
        )
        super().__init__(config, device, policy, owns_group=owns_group)


class TitanPolicy(nn.Module):
    """A decoder of TorchTitan as a function from packed tokens to logprobs."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self,
        token_ids_T: torch.Tensor,
        position_ids_T: torch.Tensor,
        plan: SegmentPlan,
        temperature_T: torch.Tensor,
        target_rows_N: torch.Tensor,
    ) -> torch.Tensor:
        """Return [T]: logprobs of the tokens at ``target_rows_N``, 0.0 elsewhere. T is at least 1, N may be 0."""
        head = self.decoder.lm_head
        assert isinstance(head, LogprobHead)
        head.targets = Targets(
            target_rows_N,
            token_ids_T.index_select(0, target_rows_N),
            temperature_T.index_select(0, target_rows_N),
        )
        try:
            logprobs_N: torch.Tensor = self.decoder(
                token_ids_T.unsqueeze(0), positions=position_ids_T.unsqueeze(0), attention_masks=plan
            )
        finally:
            head.targets = None
        return logprobs_N.new_zeros(token_ids_T.shape[0]).index_copy(0, target_rows_N, logprobs_N)


# ---------------------------------------------------------------------------------------------- modules that are ours


@dataclass(frozen=True, slots=True)
class Targets:
    """What the head is asked for."""

    rows_N: torch.Tensor
    token_ids_N: torch.Tensor
    temperature_N: torch.Tensor


class LogprobHead(Linear):  # type: ignore[misc]
    """The head in the place of TorchTitan's: logprobs of the targets, in chunks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        """Adds how many targets' logits exist at the same time."""

        chunk_size: int = 1024

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.chunk_size = config.chunk_size
        self.targets: Targets | None = None

    def forward(self, hidden_1TH: torch.Tensor) -> torch.Tensor:
        """Return the logprobs [N] of the `targets`."""
        assert self.targets is not None
        return chunked_logprobs(
            hidden_1TH[0].index_select(0, self.targets.rows_N - 1),
            self.weight,
            self.targets.token_ids_N,
            self.targets.temperature_N,
            bias_V=self.bias,
            chunk_size=self.chunk_size,
        )


class SegmentAttention(Module):  # type: ignore[misc]
    """Attention over packed segments in the place of TorchTitan's flex and varlen attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        """Says whether it may be part of graphs that torch's compiler makes."""

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
class _Family:
    """One family of TorchTitan's registry."""

    translate: Callable[[Any, TorchTitanConfig], Decoder.Config]
    adapter: Callable[[Any, None], Any]
    parallelize: Callable[..., Any]


def _supported_config(config: TorchTitanConfig) -> Any:
    """Return the transformers config of the checkpoint. Raises `UnsupportedError` for what is not translated."""
    hf = load_config(config.model_path)
    if hf.model_type not in _FAMILIES:
        raise UnsupportedError(
            f"TorchTitan worker: models of type {hf.model_type!r} are not known; known: {', '.join(_FAMILIES)}. "
            "The worker 'fsdp' trains what transformers has"
        )
    if getattr(hf, "attention_bias", False) or getattr(hf, "mlp_bias", False):
        raise UnsupportedError(f"TorchTitan's {hf.model_type} has no biases, and {str(config.model_path)!r} has")
    if hf.hidden_act != "silu":
        raise UnsupportedError(f"TorchTitan's {hf.model_type} computes silu, not hidden_act {hf.hidden_act!r}")
    if config.optimizer != "adamw":
        raise ConfigError(f"optimizer {config.optimizer!r}: TorchTitan's container has adamw")
    if config.dtype == "float64":
        raise ConfigError("dtype 'float64': TorchTitan trains in float32 or bfloat16")
    return hf


def _norm(size: int, hf: Any) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=hf.rms_norm_eps, param_init=_NO_INIT)


def _layer(kind: Any, hf: Any, rope: RoPE.Config, config: TorchTitanConfig, *, qk_norm: bool) -> Any:
    return kind.Config(
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
            qk_norm=_norm(hf.head_dim, hf) if qk_norm else None,
            rope=rope,
        ),
        feed_forward=make_ffn_config(
            dim=hf.hidden_size,
            hidden_dim=hf.intermediate_size,
            w1_param_init=_NO_INIT,
            w2w3_param_init=_NO_INIT,
        ),
    )


def _model(kind: Any, hf: Any, layers: list[Any], config: TorchTitanConfig) -> Decoder.Config:
    model: Decoder.Config = kind.Config(
        dim=hf.hidden_size,
        vocab_size=hf.vocab_size,
        norm=_norm(hf.hidden_size, hf),
        enable_weight_tying=bool(hf.tie_word_embeddings),
        tok_embeddings=Embedding.Config(
            num_embeddings=hf.vocab_size, embedding_dim=hf.hidden_size, param_init=_NO_INIT
        ),
        lm_head=LogprobHead.Config(
            in_features=hf.hidden_size,
            out_features=hf.vocab_size,
            param_init=_NO_INIT,
            chunk_size=config.logprob_chunk_size,
        ),
        layers=layers,
    )
    return model


def _qwen3(hf: Any, config: TorchTitanConfig) -> Decoder.Config:
    _rope_kind(hf, ("default",))
    rope = CosSinRoPE.Config(dim=hf.head_dim, max_seq_len=hf.max_position_embeddings, theta=_theta(hf))
    layers = [_layer(Qwen3TransformerBlock, hf, rope, config, qk_norm=True) for _ in range(hf.num_hidden_layers)]
    return _model(Qwen3Model, hf, layers, config)


def _llama3(hf: Any, config: TorchTitanConfig) -> Decoder.Config:
    rope = ComplexRoPE.Config(dim=hf.head_dim, max_seq_len=hf.max_position_embeddings, theta=_theta(hf))
    if _rope_kind(hf, ("default", "llama3")) == "llama3":
        scaling = hf.rope_parameters
        rope.scaling = "llama"
        rope.scaling_factor = scaling["factor"]
        rope.low_freq_factor = scaling["low_freq_factor"]
        rope.high_freq_factor = scaling["high_freq_factor"]
        rope.original_max_position_embeddings = scaling["original_max_position_embeddings"]
    layers = [_layer(Llama3TransformerBlock, hf, rope, config, qk_norm=False) for _ in range(hf.num_hidden_layers)]
    return _model(Llama3Model, hf, layers, config)


def model_config_of(hf: Any, config: TorchTitanConfig) -> Decoder.Config:
    """Return TorchTitan's configuration of a transformers config. Raises `UnsupportedError` for scaled positions."""
    return _FAMILIES[hf.model_type].translate(hf, config)


def _theta(hf: Any) -> float:
    return float(hf.rope_parameters["rope_theta"])


def _rope_kind(hf: Any, known: Sequence[str]) -> str:
    """Return how the rotary embedding is scaled. Raises `UnsupportedError` unless it is ``known``."""
    kind = str(hf.rope_parameters.get("rope_type", "default"))
    if kind not in known:
        raise UnsupportedError(
            f"TorchTitan worker: rope_type {kind!r} of {hf.model_type} is not translated; known: {', '.join(known)}"
        )
    return kind


_FAMILIES = {
    "qwen3": _Family(_qwen3, Qwen3StateDictAdapter, parallelize_qwen3),
    "llama": _Family(_llama3, Llama3StateDictAdapter, parallelize_llama),
}


def _empty_decoder(model_config: Decoder.Config, config: TorchTitanConfig) -> Decoder:
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, config.stored_dtype))
    try:
        return cast(Decoder, model_config.build())
    finally:
        torch.set_default_dtype(before)


def _layout(name: str, parameter: torch.Tensor, adapter: Any) -> Layout:
    """Return how TorchTitan's adapter writes one parameter; seen by having it write an empty one."""
    empty = torch.empty(parameter.shape, device="meta")
    stored = dict(adapter.to_hf({name: empty}))
    if len(stored) == 1 and next(iter(stored.values())) is empty:
        return as_it_is(next(iter(stored)), empty)
    shapes = {key: tuple(tensor.shape) for key, tensor in stored.items()}

    def split(whole: torch.Tensor) -> Stored:
        return cast(Stored, adapter.to_hf({name: whole}))

    def join(tensors: Stored) -> torch.Tensor:
        # The adapter asks for a head, which it would make of the embedding of a tied model.
        found = adapter.from_hf({_HEAD: torch.empty(0), **tensors})
        return cast(torch.Tensor, found[name])

    return Layout(shapes, split, join)


def _parallelize(decoder: Decoder, family: _Family, config: TorchTitanConfig, device: torch.device) -> DeviceMesh:
    """Shard the decoder as TorchTitan does; return the mesh of its parameters."""
    num_ranks = dist.get_world_size()
    size = config.shard_size or num_ranks
    if num_ranks % size:
        raise ConfigError(f"shard_size {size} does not divide the {num_ranks} ranks")
    set_spmd_backend("partial_dtensor")
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=num_ranks // size,
        data_parallel_shard_degree=size,
        spmd_backend="partial_dtensor",
    )
    # Without an accelerator TorchTitan makes its meshes for CUDA.
    parallel_dims.device_type = device.type
    dims = ParallelDims.from_config(parallelism, num_ranks)
    dims.build_mesh()
    family.parallelize(
        decoder,
        parallel_dims=dims,
        training=TrainingConfig(
            dtype=cast(Any, config.stored_dtype),
            mixed_precision_param=cast(Any, config.dtype),
            # TorchTitan pins what it keeps in host memory, which takes a GPU; on a CPU there is nothing to move.
            enable_cpu_offload=config.cpu_offload and device.type != "cpu",
        ),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=FullAC.Config() if config.activation_checkpointing else None,
        dump_folder="",
    )
    sum_gradients_over_ranks(decoder)  # TorchTitan's way to do so is one that gloo cannot
    return cast(DeviceMesh, dims.get_mesh(["dp_replicate", "fsdp"] if num_ranks > size else ["fsdp"]))


# ------------------------------------------------------------------------------------------------------- the optimizer


class TitanOptimizer(ShardedOptimizer):
    """TorchTitan's optimizer container over all parameters."""

    def __init__(self, decoder: Decoder, parameters: Mapping[str, DTensor], config: TorchTitanConfig) -> None:
        self._parameters = parameters
        settings = {
            "lr": config.learning_rate,
            "betas": config.betas,
            "eps": config.eps,
            "weight_decay": config.weight_decay,
        }
        group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=settings)
        container = OptimizersContainer.Config(param_groups=[group], implementation=config.optimizer_implementation)
        self._container: Any = container.build(model_parts=[decoder])
        self._has_states = False

    @property
    def states(self) -> Mapping[str, Mapping[str, DTensor]]:
        """First and second moments, ``exp_avg`` and ``exp_avg_sq``, by parameter."""
        self._allocate()
        state_of = self._state_of
        return {
            kind: {name: state_of(parameter)[kind] for name, parameter in self._parameters.items()}
            for kind in ("exp_avg", "exp_avg_sq")
        }

    @property
    def num_steps(self) -> int:
        return int(self._state_of(next(iter(self._parameters.values())))["step"].item()) if self._has_states else 0

    def set_num_steps(self, value: int) -> None:
        """Go on as after ``value`` steps."""
        self._allocate()
        for parameter in self._parameters.values():
            self._state_of(parameter)["step"].fill_(value)

    def resume(self, states: Mapping[str, Mapping[str, DTensor]], num_steps: int) -> None:
        self.set_num_steps(num_steps)

    def step(self, gradients: Sequence[torch.Tensor], learning_rate: float) -> None:
        self._allocate()
        for optimizer in self._container:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
        for parameter, gradient in zip(self._parameters.values(), gradients, strict=True):
            parameter.grad = as_sharded(gradient, parameter)
        self._container.step()
        self._container.zero_grad()

    def _state_of(self, parameter: DTensor) -> dict[str, Any]:
        (state,) = (optimizer.state[parameter] for optimizer in self._container if parameter in optimizer.state)
        return cast(dict[str, Any], state)

    def _allocate(self) -> None:
        if self._has_states:
            return
        self._has_states = True
        self._container.state_dict()  # makes the states, by a step of zeros
        self.set_num_steps(0)

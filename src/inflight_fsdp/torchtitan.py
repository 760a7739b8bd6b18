"""`TorchTitanWorker`: one rank of a trainer that uses TorchTitan's models, parallelism and optimizers.

The model consists of TorchTitan's own modules, configured from the config.json of a Hugging Face checkpoint. For each
model family, TorchTitan has a function that parallelizes the model, and an adapter to the names and shapes of the
stored tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools.utils import set_default_dtype

from inflight.model.checkpoints import fitting_tensors
from inflight.model.checksums import check_checkpoint
from inflight.model.compiler import check_compiler
from inflight_fsdp.agreement import on_every_rank
from inflight_fsdp.compiled import compile_layers
from inflight_fsdp.config import parse_config
from inflight_fsdp.groups import shared
from inflight_fsdp.layout import ShardedTensor
from inflight_fsdp.optimizer import ShardedAdamW
from inflight_fsdp.parts import DTensorPart
from inflight_fsdp.pipeline import Pipeline
from inflight_fsdp.rows import Row
from inflight_fsdp.sharded import ShardedWorker, make_worker, sum_gradients_over_ranks
from inflight_fsdp.sharding import box_of, read_shards, shardings_of
from inflight_fsdp.torchtitan_config import TorchTitanConfig
from inflight_fsdp.torchtitan_model import (
    EMBEDDING,
    FAMILIES,
    HEAD,
    Family,
    keep_stage,
    layout_of,
    model_config_of,
    supported_config,
)
from inflight_fsdp.torchtitan_modules import TitanPolicy


def create_worker(config: TorchTitanConfig | Mapping[str, object]) -> TorchTitanWorker:
    """Return the worker of this process's rank. Collective over torch's default process group.

    Without a default group, a group of one is created, and `TorchTitanWorker.close` ends it. Raises `ConfigError` or
    `UnsupportedError` on every rank if the settings or the model cannot be used.
    """
    return make_worker(TorchTitanWorker, parse_config(config, TorchTitanConfig))


class TorchTitanWorker(ShardedWorker):
    """One trainer rank, made by `create_worker`; `inflight.contracts.TrainerWorker` states what each method does."""

    def __init__(self, config: TorchTitanConfig, device: torch.device, *, owns_group: bool) -> None:
        if config.compile:
            on_every_rank(lambda: check_compiler(device, "compile = true"), device)
        hf_config = on_every_rank(lambda: supported_config(config), device)
        family = FAMILIES[hf_config.model_type]
        model_config = on_every_rank(lambda: model_config_of(hf_config, config), device)
        with torch.device("meta"), set_default_dtype(getattr(torch, config.stored_dtype)):
            decoder: Decoder = model_config.build()
        if config.compile:
            # TorchTitan's own compilation allows no break in a layer's graph, but attention over segments breaks it.
            compile_layers(decoder.layers.values())
        adapter = family.adapter(model_config, None)
        layouts = {name: layout_of(name, parameter, adapter) for name, parameter in decoder.named_parameters()}
        shapes = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
        wanted = {name: shape for layout in layouts.values() for name, shape in layout.shapes.items()}
        known = (HEAD,) if hf_config.tie_word_embeddings else ()
        stored = on_every_rank(lambda: fitting_tensors(config.model_path, wanted, known=known), device)
        on_every_rank(lambda: check_checkpoint(config.model_path, only_weights=True), device)
        dims = _parallel_dims(config, device)
        tensor_mesh = dims.get_optional_mesh("tp")
        # The padding token's embedding has no gradient, as in transformers.
        decoder.tok_embeddings.padding_idx = _padding_row(hf_config, tensor_mesh)
        if config.pipeline_parallel > 1:
            keep_stage(decoder, dims.get_mesh("pp").get_local_rank(), config.pipeline_parallel)
        _parallelize(decoder, family, dims, config, device)
        decoder.to_empty(device="cpu" if config.cpu_offload else device)
        with torch.no_grad():
            decoder.init_states(buffer_device=device)  # fills the rotary tables, and ties a tied head again
        # In the last stage of a pipeline, a tied embedding has the name of the head.
        names = {HEAD: EMBEDDING} if hf_config.tie_word_embeddings else {}
        parameters = {
            names.get(canonical_fqn(name), canonical_fqn(name)): cast(DTensor, p)
            for name, p in decoder.named_parameters()
        }
        shardings = shardings_of({name: box_of(p) for name, p in parameters.items()}, shapes, device)
        laid_out = [ShardedTensor(p.to_local(), shardings[name], layouts[name]) for name, p in parameters.items()]
        on_every_rank(lambda: read_shards(stored, laid_out), device)
        super().__init__(
            config,
            device,
            owns_group=owns_group,
            policy=TitanPolicy(decoder, tensor_mesh),
            parts={name: DTensorPart(parameter) for name, parameter in parameters.items()},
            shardings=shardings,
            layouts=layouts,
            optimizer=_optimizer(decoder, parameters, config),
            hf_config=hf_config,
            summed_over=_tied_embedding_groups(config) if hf_config.tie_word_embeddings else {},
        )
        self._pipeline: Pipeline | None = None
        if config.pipeline_parallel > 1:
            group, dtype = dims.get_mesh("pp").get_group(), getattr(torch, config.dtype)
            self._pipeline = Pipeline(group, hf_config.hidden_size, dtype, device)
            self.num_rows = config.pipeline_chunks or 2 * config.pipeline_parallel

    def _compute(self, rows: Sequence[Row]) -> torch.Tensor:
        if self._pipeline is None:
            return super()._compute(rows)
        return self._pipeline.logprobs(rows, self._policy)


def _padding_row(hf_config: Any, tensor_mesh: DeviceMesh | None) -> int | None:
    """Return the row of the padding token in this rank's part of the embedding, or None if the part has no such row."""
    row: int | None = hf_config.pad_token_id
    if row is None or tensor_mesh is None:
        return row
    each = -(-hf_config.vocab_size // tensor_mesh.size())
    return row % each if row // each == tensor_mesh.get_local_rank() else None


def _tied_embedding_groups(config: TorchTitanConfig) -> dict[str, dist.ProcessGroup]:
    """Return the group of this rank and its peer in the first or last stage, which both have the tied embedding.

    Empty on the ranks of other stages, and without a pipeline. Collective.
    """
    num_ranks, num_stages = dist.get_world_size(), config.pipeline_parallel
    if num_stages == 1:
        return {}
    each, rank = num_ranks // num_stages, dist.get_rank()
    pairs = [[first, num_ranks - each + first] for first in range(each)]
    # torch requires every rank to create every group.
    groups = {tuple(pair): shared(("tied embedding", *pair), partial(dist.new_group, pair)) for pair in pairs}
    mine = [group for pair, group in groups.items() if rank in pair]
    return {EMBEDDING: mine[0]} if mine else {}


def _parallel_dims(config: TorchTitanConfig, device: torch.device) -> ParallelDims:
    """Return TorchTitan's meshes of all ranks; collective.

    TorchTitan does not know that ranks share rows: it sums their gradients like those of ranks with their own rows.
    """
    num_ranks = dist.get_world_size()
    num_sharing = num_ranks // (config.tensor_parallel * config.pipeline_parallel)
    size = config.shard_size or num_sharing
    set_spmd_backend("partial_dtensor")
    # Without an accelerator, TorchTitan would create its meshes for CUDA.
    parallel_dims.device_type = device.type
    sizes = {
        "dp_replicate": num_sharing // size,
        "dp_shard": size,
        "cp": 1,
        "tp": config.tensor_parallel,
        "pp": config.pipeline_parallel,
        "ep": config.expert_parallel,
    }

    def create() -> ParallelDims:
        dims = ParallelDims(**sizes, world_size=num_ranks, spmd_backend="partial_dtensor")
        dims.build_mesh()
        return dims

    return shared(("TorchTitan", device.type, *sizes.values()), create)


def _parallelize(
    decoder: Decoder, family: Family, dims: ParallelDims, config: TorchTitanConfig, device: torch.device
) -> None:
    """Shard the decoder as TorchTitan does, except that a tied head stays tied to its embedding.

    TorchTitan cuts head and embedding separately for tensor parallelism, and ties them only after FSDP2 has treated
    them as two parameters. If ranks have parts of different sizes, FSDP2 then computes with an embedding that no step
    changes.
    """
    cut = decoder.parallelize

    def cut_and_tie(dims: ParallelDims) -> None:
        cut(dims)
        if decoder.enable_weight_tying:
            decoder.tok_embeddings.weight = decoder.lm_head.weight

    decoder.parallelize = cut_and_tie
    family.parallelize(
        decoder,
        parallel_dims=dims,
        training=TrainingConfig(
            dtype=cast(Any, config.stored_dtype),
            mixed_precision_param=cast(Any, config.dtype),
            # TorchTitan pins host memory, which needs a GPU; on a CPU, nothing needs to be offloaded.
            enable_cpu_offload=config.cpu_offload and device.type != "cpu",
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        compile_config=CompileConfig(enable=False),
        ac_config=FullAC.Config() if config.activation_checkpointing else None,
        dump_folder="",
    )
    sum_gradients_over_ranks(decoder)  # TorchTitan sums them in a way that gloo does not support


def _optimizer(decoder: Decoder, parameters: Mapping[str, DTensor], config: TorchTitanConfig) -> ShardedAdamW:
    """Return the single optimizer in TorchTitan's container; it covers all parameters."""
    settings = {"lr": config.learning_rate, **config.adamw_settings}
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=settings)
    container = OptimizersContainer.Config(param_groups=[group], implementation=config.optimizer_implementation)
    (adamw,) = container.build(model_parts=[decoder])
    return ShardedAdamW(adamw, parameters)

"""`TorchTitanWorker`: one rank of a trainer on TorchTitan's models, parallelism and optimizers. Imports torchtitan.

The model consists of TorchTitan's own modules, configured from the config.json of a Hugging Face checkpoint,
parallelised by the function of its family, and named in checkpoints by its state-dict adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
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

from inflight.checkpoints import fitting_tensors
from inflight.compiler import check_compiler
from inflight_fsdp.agreement import on_every_rank
from inflight_fsdp.compiled import compile_layers
from inflight_fsdp.config import parse_config
from inflight_fsdp.layout import ShardedTensor
from inflight_fsdp.optimizer import ShardedAdamW
from inflight_fsdp.sharded import ShardedWorker, make_worker, sum_gradients_over_ranks
from inflight_fsdp.sharding import read_shards
from inflight_fsdp.torchtitan_model import (
    FAMILIES,
    HEAD,
    Family,
    TitanPolicy,
    TorchTitanConfig,
    layout_of,
    model_config_of,
    supported_config,
)


def create_worker(config: TorchTitanConfig | Mapping[str, object]) -> TorchTitanWorker:
    """Return this process's rank of a worker; collective over torch's default process group.

    Without a default group a group of one is made, and `TorchTitanWorker.close` ends it. Raises `ConfigError` or
    `UnsupportedError` on every rank if the settings or the model cannot be used.
    """
    return make_worker(TorchTitanWorker, parse_config(config, TorchTitanConfig))


class TorchTitanWorker(ShardedWorker):
    """One trainer rank. Made by `create_worker`; `inflight.contracts.TrainerWorker` says what each method does."""

    def __init__(self, config: TorchTitanConfig, device: torch.device, *, owns_group: bool) -> None:
        if config.compile:
            on_every_rank(lambda: check_compiler(device, "compile = true"), device)
        hf_config = on_every_rank(lambda: supported_config(config), device)
        family = FAMILIES[hf_config.model_type]
        model_config = on_every_rank(lambda: model_config_of(hf_config, config), device)
        with torch.device("meta"), set_default_dtype(getattr(torch, config.stored_dtype)):
            decoder: Decoder = model_config.build()
        if config.compile:
            # TorchTitan's own compiling allows no break in a layer's graph, and attention over segments breaks it.
            compile_layers(decoder.layers.values())
        decoder.tok_embeddings.padding_idx = hf_config.pad_token_id  # its row has no gradient, as in transformers
        adapter = family.adapter(model_config, None)
        layouts = {name: layout_of(name, parameter, adapter) for name, parameter in decoder.named_parameters()}
        wanted = {name: shape for layout in layouts.values() for name, shape in layout.shapes.items()}
        known = (HEAD,) if hf_config.tie_word_embeddings else ()
        stored = on_every_rank(lambda: fitting_tensors(config.model_path, wanted, known=known), device)
        mesh = _parallelize(decoder, family, config, device)
        decoder.to_empty(device="cpu" if config.cpu_offload else device)
        with torch.no_grad():
            decoder.init_states(buffer_device=device)  # the rotary tables; ties a tied head again
        parameters = {canonical_fqn(name): cast(DTensor, p) for name, p in decoder.named_parameters()}
        laid_out = [ShardedTensor(parameter, layouts[name]) for name, parameter in parameters.items()]
        on_every_rank(lambda: read_shards(stored, laid_out), device)
        super().__init__(
            config,
            device,
            owns_group=owns_group,
            policy=TitanPolicy(decoder),
            mesh=mesh,
            parameters=parameters,
            layouts=layouts,
            optimizer=_optimizer(decoder, parameters, config),
            hf_config=hf_config,
        )


def _parallelize(decoder: Decoder, family: Family, config: TorchTitanConfig, device: torch.device) -> DeviceMesh:
    """Shard the decoder as TorchTitan does; return the mesh of its parameters."""
    num_ranks = dist.get_world_size()
    size = config.shard_size or num_ranks
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
            # TorchTitan pins host memory, which needs a GPU; on a CPU there is nothing to move.
            enable_cpu_offload=config.cpu_offload and device.type != "cpu",
        ),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=FullAC.Config() if config.activation_checkpointing else None,
        dump_folder="",
    )
    sum_gradients_over_ranks(decoder)  # TorchTitan sums them in a way that gloo does not support
    return cast(DeviceMesh, dims.get_mesh(["dp_replicate", "fsdp"] if num_ranks > size else ["fsdp"]))


def _optimizer(decoder: Decoder, parameters: Mapping[str, DTensor], config: TorchTitanConfig) -> ShardedAdamW:
    """Return the one optimizer of TorchTitan's container, which is over all parameters."""
    settings = {"lr": config.learning_rate, **config.adamw_settings}
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=settings)
    container = OptimizersContainer.Config(param_groups=[group], implementation=config.optimizer_implementation)
    (adamw,) = container.build(model_parts=[decoder])
    return ShardedAdamW(adamw, parameters)

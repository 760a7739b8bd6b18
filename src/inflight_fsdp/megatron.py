"""`MegatronWorker`: one rank of a trainer that uses Megatron-Core's models, tensor parallelism and pipeline stages.

The model, its layers and their communication are Megatron-Core's, without transformer_engine. Logprobs, the sums of
gradients over ranks, AdamW, clipping, checkpoints and the pipeline schedule are those of the other workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn
from torch.utils.checkpoint import checkpoint

from inflight.model.checkpoints import fitting_tensors
from inflight.model.checksums import check_checkpoint
from inflight.types import AdamSettings, StepResult
from inflight_fsdp.agreement import on_every_rank
from inflight_fsdp.config import RankLayout, parse_config
from inflight_fsdp.groups import shared
from inflight_fsdp.layout import Box, ShardedTensor
from inflight_fsdp.megatron_config import MegatronConfig
from inflight_fsdp.megatron_model import (
    EMBEDDING,
    QK_NORMS,
    build_stage,
    parameters_of_stage,
    rope_frequencies,
    supported_config,
    whole_parameters,
)
from inflight_fsdp.megatron_modules import MegatronPolicy
from inflight_fsdp.optimizer import make_adamw
from inflight_fsdp.pipeline import Pipeline
from inflight_fsdp.rows import Row
from inflight_fsdp.sharded import ShardedWorker, make_worker
from inflight_fsdp.sharding import read_shards, shardings_of


def create_worker(config: MegatronConfig | Mapping[str, object]) -> MegatronWorker:
    """Return the worker of this process's rank, like `inflight_fsdp.create_worker`."""
    return make_worker(MegatronWorker, parse_config(config, MegatronConfig))


class MegatronWorker(ShardedWorker):
    """One trainer rank, made by `create_worker`; `inflight.contracts.TrainerWorker` states what each method does."""

    def __init__(self, config: MegatronConfig, device: torch.device, *, owns_group: bool) -> None:
        hf_config = on_every_rank(lambda: supported_config(config), device)
        is_tied = bool(hf_config.tie_word_embeddings)
        wholes = whole_parameters(hf_config)
        layouts = {name: whole.layout for name, whole in wholes.items()}
        wanted = {name: shape for layout in layouts.values() for name, shape in layout.shapes.items()}
        known = ("lm_head.weight",) if is_tied else ()
        stored = on_every_rank(lambda: fitting_tensors(config.model_path, wanted, known=known), device)
        on_every_rank(lambda: check_checkpoint(config.model_path, only_weights=True), device)
        layout = config.rank_layout(dist.get_world_size())
        groups = shared(("Megatron-Core", layout), partial(_Groups, layout))
        gpt = on_every_rank(lambda: build_stage(hf_config, config, groups.model), device)
        gpt.to_empty(device=device)
        if is_tied and gpt.pre_process and gpt.post_process:
            gpt.output_layer.weight = gpt.embedding.word_embeddings.weight
        if config.activation_checkpointing:
            for layer in gpt.decoder.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        tensor_group = groups.model.tp
        parameters = dict(parameters_of_stage(gpt, hf_config, groups.model))
        boxes = {name: wholes[name].box(tensor_group.rank(), tensor_group.size()) for name in parameters}
        parts = {
            name: _Part(parameter, boxes[name], getattr(torch, config.stored_dtype))
            for name, parameter in parameters.items()
        }
        shardings = shardings_of(boxes, {name: whole.shape for name, whole in wholes.items()}, device)
        laid_out = [ShardedTensor(part.local, shardings[name], layouts[name]) for name, part in parts.items()]
        on_every_rank(lambda: read_shards(stored, laid_out), device)
        super().__init__(
            config,
            device,
            owns_group=owns_group,
            policy=MegatronPolicy(gpt, tensor_group, rope_frequencies(hf_config, device), hf_config),
            parts=parts,
            shardings=shardings,
            layouts=layouts,
            optimizer=make_adamw(parts, config),
            hf_config=hf_config,
            summed_over={name: group for name in parts if (group := groups.summing(name, is_tied)) is not None},
        )
        self._parts = parts
        self._compute_with_masters()
        self._pipeline: Pipeline | None = None
        if config.pipeline_parallel > 1:
            self._pipeline = Pipeline(groups.model.pp, hf_config.hidden_size, getattr(torch, config.dtype), device)
            self.num_rows = config.pipeline_chunks or 2 * config.pipeline_parallel

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        super().load(path, optimizer=optimizer)
        self._compute_with_masters()

    def _compute(self, rows: Sequence[Row]) -> torch.Tensor:
        if self._pipeline is None:
            return super()._compute(rows)
        return self._pipeline.logprobs(rows, self._policy)

    def _update(self, settings: AdamSettings | None) -> StepResult:
        result = super()._update(settings)
        self._compute_with_masters()
        return result

    def _compute_with_masters(self) -> None:
        for part in self._parts.values():
            part.compute_with_master()


class _Groups:
    """The process groups of this rank. Every rank creates all groups, because torch requires it.

    Ranks are numbered as `RankLayout` describes: S stages, D shares of the data, T ranks that share tensors.
    """

    def __init__(self, layout: RankLayout) -> None:
        ranks_SDT = torch.arange(layout.num_ranks).view(layout.stages, layout.data_size, layout.tensor)
        self.model = ProcessGroupCollection(
            tp=_group_of(ranks_SDT.flatten(0, 1)),
            cp=_group_of(ranks_SDT.view(-1, 1)),
            pp=_group_of(ranks_SDT.flatten(1).T),
            embd=None,  # the worker ties embeddings itself
        )
        self._data = _group_of(ranks_SDT.transpose(1, 2).flatten(0, 1)) if layout.data_size > 1 else None
        self._stage = _group_of(ranks_SDT.flatten(1)) if layout.data_size * layout.tensor > 1 else None
        ends_TDE = ranks_SDT[[0, -1]].permute(2, 1, 0)
        self._ends = _group_of(ends_TDE.flatten(1)) if layout.stages > 1 else None

    def summing(self, name: str, is_tied: bool) -> dist.ProcessGroup | None:
        """Return the ranks over which a parameter's gradients are summed, or None if no sum is needed."""
        if name == EMBEDDING and is_tied and self._ends is not None:
            return self._ends  # the first and the last stage both have the embedding
        if name.endswith(QK_NORMS):
            return self._stage  # tensor-parallel ranks normalize their own heads
        return self._data


def _group_of(ranks: torch.Tensor) -> dist.ProcessGroup:
    """Create a process group for each row of ``ranks``, and return the group of the row that contains this rank."""
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(ranks.tolist())[0]  # type: ignore[no-untyped-call]
    return group


class _Part:
    """This rank's box of a parameter, with a copy in the stored dtype if layers compute in a different one.

    The gradients of all backward passes are summed in the stored dtype.
    """

    is_trained = True

    def __init__(self, parameter: nn.Parameter, box: Box, stored_dtype: torch.dtype) -> None:
        self._lengths = [part.stop - part.start for part in box]
        self._computed = self._boxed(parameter.detach())
        self.local = self._computed.to(stored_dtype)
        self._sum: torch.Tensor | None = None
        parameter.register_post_accumulate_grad_hook(self._take_gradient)  # type: ignore[no-untyped-call]

    @property
    def gradient(self) -> torch.Tensor:
        return torch.zeros_like(self.local) if self._sum is None else self._sum

    def clear_gradient(self) -> None:
        self._sum = None

    def compute_with_master(self) -> None:
        """Copy the stored weights to the weights that layers compute with."""
        if self.local is not self._computed:
            self._computed.copy_(self.local)

    def _boxed(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the box in a tensor of the parameter's shape; any rows after it are padding to equal sizes."""
        return whole.view(-1, *self._lengths[1:])[: self._lengths[0]]

    def _take_gradient(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradient = self._boxed(parameter.grad).to(self.local.dtype)
        self._sum = gradient if self._sum is None else self._sum.add_(gradient)
        parameter.grad = None

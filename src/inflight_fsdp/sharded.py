"""`ShardedWorker`: one rank of a trainer that holds a part of each parameter, whatever cut them.

It knows neither transformers' models nor torchtitan's, neither DTensors nor ZeRO: what those differ in are the
arguments it is made with.

Shape suffixes: T packed tokens, N targets, H hidden, V vocabulary.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from inflight.base.transfer_time import with_transfer_s
from inflight.contracts import (
    BackgroundSaver,
    ImageWorker,
    ModelParallelWorker,
    PartialWeightSource,
    ReplayingWorker,
)
from inflight.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteError,
    PrecisionWarning,
    TrainerError,
    UnsupportedError,
)
from inflight.model.attention import segment_kernel_in_words
from inflight.model.checkpoints import max_model_len_of
from inflight.types import MicroBatch, StepResult, WeightBucket
from inflight.wire import BucketSpec, TensorSpec
from inflight_fsdp.background import BackgroundSave, copy_to_host, make_save_group
from inflight_fsdp.checkpoint import TrainerState, load_checkpoint, save_checkpoint
from inflight_fsdp.config import WorkerConfig
from inflight_fsdp.devices import device_of
from inflight_fsdp.layout import Layout, ShardedTensor, Sharding
from inflight_fsdp.optimizer import ShardedAdamW, clip, global_norm, learning_rate_at
from inflight_fsdp.parts import Part
from inflight_fsdp.rounding import lost_share, spread_sample
from inflight_fsdp.rows import PackedImages, Row, head_exchange, rows_of, summed_for_all
from inflight_fsdp.sharding import gather_on_first

_SAVE_S = 1800.0
"""Longest wait for a save of a small model."""
_LOG = logging.getLogger("inflight.worker")
_TOLD_STEPS = 3
"""Steps after which a worker with bfloat16 masters reports how many updates were lost."""
Worker = TypeVar("Worker", bound="ShardedWorker")


class ShardedWorker(ModelParallelWorker, PartialWeightSource, BackgroundSaver, ImageWorker, ReplayingWorker):
    """One trainer rank."""

    num_rows: int = 1
    """Rows that a micro-batch is cut into."""

    def __init__(
        self,
        config: WorkerConfig,
        device: torch.device,
        *,
        owns_group: bool,
        policy: nn.Module,
        parts: Mapping[str, Part],
        shardings: Mapping[str, Sharding],
        layouts: Mapping[str, Layout],
        optimizer: ShardedAdamW,
        hf_config: Any,
        summed_over: Mapping[str, dist.ProcessGroup] | None = None,
    ) -> None:
        """Take over a sharded model.

        ``policy`` takes a `Row` and returns logprobs [N], which depend on every parameter even if N is 0, so that every
        rank takes part in the same collectives. ``parts`` are of the parameters of which this rank has one, by the
        trainer's names; ``shardings`` and ``layouts`` are of all parameters, on every rank in the same order. What is
        not trained is not published either. ``optimizer`` updates the trained parts, in the same order.
        ``summed_over`` are the parameters that this rank computes with apart from the ranks of a group: their gradients
        are still to be summed.
        """
        self._config = config
        self._device = device
        self._owns_group = owns_group
        self._policy = policy
        self._parts = dict(parts)
        self._trained = {name: part for name, part in self._parts.items() if part.is_trained}
        self._has_gradients = False
        self._layouts = dict(layouts)
        self._shardings = dict(shardings)
        self._optimizer = optimizer
        self._summed_over = summed_over or {}
        self._ranks = config.rank_layout(dist.get_world_size())
        self._exchange = head_exchange(self._ranks, device)
        self._nothing = torch.empty(0, dtype=getattr(torch, config.stored_dtype), device=device)
        """Held of parameters that are on other ranks."""
        self._owned = [name for name in self._trained if self.rank in self._shardings[name].owners]
        """Parameters of whose parts this rank answers for its own."""
        self._wire_dtype = config.wire_dtype or config.dtype
        self._model_config: str = hf_config.to_json_string(use_diff=True)
        self._context_length = max_model_len_of(hf_config)
        self._parameter_of = {stored: name for name, layout in self._layouts.items() for stored in layout.shapes}
        self._split: tuple[str, dict[str, torch.Tensor]] = ("", {})
        self._version = 0
        size_bytes = sum(math.prod(shape) for layout in layouts.values() for shape in layout.shapes.values())
        size_bytes *= 3 * getattr(torch, config.stored_dtype).itemsize  # with both moments
        self._longest_save_s = with_transfer_s(_SAVE_S, size_bytes)
        self._save_group: dist.ProcessGroup | None = None
        self._begun_save: BackgroundSave | None = None
        self._lost_shares: list[float] = []
        """Of the first steps, until they are reported."""
        if self.rank == 0:
            kernel = segment_kernel_in_words(hf_config, getattr(torch, config.dtype), device)
            _LOG.info("trainer's attention in %s on %s: %s", config.dtype, device, kernel)
        if config.stored_dtype == "bfloat16":
            self._warn(
                "master_dtype 'bfloat16': weights and moments have 8 significant bits, so an update smaller than 1/512 "
                f"of its weight is rounded away. After {_TOLD_STEPS} steps the worker reports how many were; "
                "master_dtype 'float32' keeps them"
            )

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @property
    def data_parallel_rank(self) -> int:
        return self._ranks.data_rank(self.rank)

    @property
    def data_parallel_size(self) -> int:
        return self._ranks.data_size

    @property
    def version(self) -> int:
        return self._version

    @property
    def takes_images(self) -> bool:
        is_whole = self._exchange is None and self.num_rows == 1
        return is_whole and bool(getattr(self._policy, "takes_images", False))

    @property
    def replays_routing(self) -> bool:
        return getattr(self._policy, "routing_shape", None) is not None

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Return logprobs on the device of the batch, which may differ from the worker's.

        Raises `TrainerError` for a segment longer than the model's context and for experts that the model does not
        have, `UnsupportedError` for images that the model does not take and for experts that this worker does not
        replay, before any collective.
        """
        images = self._images_of(batch)
        if batch.routed_experts_TLK is not None:
            self._check_experts(batch.routed_experts_TLK, batch.num_tokens)
        lengths = batch.segment_lengths
        if lengths and (longest := max(lengths)) > self._context_length:
            raise TrainerError(
                f"segment {lengths.index(longest)} of the micro-batch has {longest} tokens, but the model's context is "
                f"{self._context_length} (max_position_embeddings): leave it out, or sample shorter completions"
            )
        rows = rows_of(batch, self.num_rows, self._exchange, self._config.logprob_chunk_size, self._device)
        if images is not None:
            rows = [replace(rows[0], images=images)]
        logprobs_N = self._compute(rows)
        places_N = torch.cat([row.places_N for row in rows])
        # Without tokens the result must still depend on the parameters, hence one place more.
        logprobs_T = logprobs_N.new_zeros(batch.num_tokens + 1).index_copy(0, places_N, logprobs_N)
        if self._exchange is not None:
            logprobs_T = summed_for_all(logprobs_T, self._exchange.group)
        return logprobs_T[: batch.num_tokens].to(batch.token_ids_T.device)

    def _compute(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return the logprobs of the rows' targets, one row after another."""
        return torch.cat([self._policy(row) for row in rows])

    def _images_of(self, batch: MicroBatch) -> PackedImages | None:
        if batch.image_rows_M is None:
            return None
        if not self.takes_images:
            raise UnsupportedError(
                "the micro-batch has images, but this worker takes none: its model has no vision tower, or several "
                "ranks share a row"
            )
        moved = {name: tensor.to(self._device) for name, tensor in batch.image_tensors.items()}
        return PackedImages(batch.image_rows_M.to(self._device), moved)

    def _check_experts(self, experts_TLK: torch.Tensor, num_tokens: int) -> None:
        shape: tuple[int, int, int] | None = getattr(self._policy, "routing_shape", None)
        if shape is None:
            raise UnsupportedError(
                "the micro-batch has routed_experts_TLK, but this worker replays none: its model has no routers that "
                "are known, or its layers are compiled"
            )
        *of_token, num_experts = shape
        if experts_TLK.shape != (num_tokens, *of_token):
            raise TrainerError(
                f"routed_experts_TLK is {list(experts_TLK.shape)}, but the micro-batch has {num_tokens} tokens and the "
                f"model {of_token[0]} layers with {of_token[1]} experts for each"
            )
        if num_tokens and (largest := int(experts_TLK.max())) >= num_experts:
            raise TrainerError(f"routed_experts_TLK names expert {largest}, but the model has {num_experts} in a layer")

    def backward(self, loss: torch.Tensor) -> None:
        self._has_gradients = True
        loss.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self) -> StepResult:
        """Raise `TrainerError`, with nothing changed, if `backward` was not called since the last step."""
        if not self._has_gradients:
            raise TrainerError(f"step at version {self._version} without a gradient: call backward first")
        return self._update()

    def _update(self) -> StepResult:
        by_name = {name: part.gradient for name, part in self._trained.items()}
        for name, group in self._summed_over.items():
            dist.all_reduce(by_name[name], group=group)
        gradients, owned = list(by_name.values()), [by_name[name] for name in self._owned]
        norm = global_norm(owned, self._device)
        self._clear_gradients()
        if not math.isfinite(norm):
            raise self._refused(norm)
        clip(gradients, norm, self._config.max_gradient_norm)
        learning_rate = learning_rate_at(self._version, self._config)
        self._forget_whole_parameters()
        is_watched = self._config.stored_dtype == "bfloat16" and learning_rate != 0.0
        before = spread_sample(self._owned_shards()) if is_watched else []
        self._optimizer.step(gradients, learning_rate)
        self._version += 1
        if not is_watched:
            return StepResult(self._version, norm, learning_rate)
        lost = lost_share(before, spread_sample(self._owned_shards()), spread_sample(owned), self._device)
        self._tell_lost_share(lost)
        return StepResult(self._version, norm, learning_rate, rounded_away=lost)

    def _refused(self, norm: float) -> NonFiniteError:
        return NonFiniteError(
            f"the gradient norm of the step from version {self._version} is {norm}; weights and optimizer are "
            "unchanged, and the gradients were discarded"
        )

    def parameter_specs(self) -> Sequence[TensorSpec]:
        """Frozen parameters are left out."""
        return [
            TensorSpec(name=name, dtype=self._wire_dtype, shape=shape)
            for layout in self._published.values()
            for name, shape in layout.shapes.items()
        ]

    def frozen_names(self) -> Sequence[str]:
        frozen = (layout for name, layout in self._layouts.items() if name not in self._published)
        return [name for layout in frozen for name in layout.shapes]

    @property
    def _published(self) -> Mapping[str, Layout]:
        """The layouts of trained parameters, of this rank or of others."""
        frozen = self._parts.keys() - self._trained.keys()
        return {name: layout for name, layout in self._layouts.items() if name not in frozen}

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        """Yielded tensors share no memory with the parameters."""
        specs = self.parameter_specs()
        self._split = ("", {})
        for bucket in buckets:
            part = specs[bucket.start : bucket.stop]
            tensors = [self._gather(spec.name) for spec in part]
            yield WeightBucket(bucket.index, tuple(part), tuple(t for t in tensors if t is not None))
        self._split = ("", {})

    def save(self, path: Path) -> None:
        """Every rank writes its shards. A directory that is not a checkpoint of a worker is not replaced.

        Waits for a save in the background; if that fails, its error is raised and nothing is written.
        """
        self.finish_save(self._longest_save_s)
        save_checkpoint(path, self._saved_state())

    def begin_save(self, path: Path) -> None:
        """The copy takes as much host memory as the shards and their moments."""
        self.finish_save(self._longest_save_s)
        if self._save_group is None:
            self._save_group = make_save_group(self._longest_save_s)
        state = copy_to_host(self._saved_state())
        write = partial(save_checkpoint, path.absolute(), state, self._save_group)
        self._begun_save = BackgroundSave(path, write)

    def finish_save(self, timeout_s: float) -> None:
        begun = self._begun_save
        if begun is None:
            return
        if not begun.wait(timeout_s):
            raise CheckpointError(
                f"the save to {begun.path} is still running after {timeout_s:g} s; an earlier one there is intact"
            )
        self._begun_save = None
        if begun.failure is not None:
            raise begun.failure

    @property
    def save_pending(self) -> bool:
        return self._begun_save is not None and self._begun_save.is_running

    def load(self, path: Path) -> None:
        """Every rank reads its shards from ``path``; gradients are cleared.

        Waits for a save in the background, which may be to ``path``; `finish_save` still reports how it ended.
        """
        self._wait_for_save()
        states = self._optimizer.states
        version, num_steps = load_checkpoint(path, self._state(states))
        self._optimizer.resume(states, num_steps)
        self._version = version
        self._clear_gradients()
        self._forget_whole_parameters()

    def close(self) -> None:
        """Wait for a save in the background, and end the process groups that this worker made. Idempotent.

        Call `finish_save` before to learn how the save ended.
        """
        self._wait_for_save()
        if self._save_group is not None and dist.is_initialized():
            dist.destroy_process_group(self._save_group)
        self._save_group = None
        if self._owns_group:
            self._owns_group = False
            dist.destroy_process_group()

    def _wait_for_save(self) -> None:
        if self._begun_save is not None:
            self._begun_save.wait(self._longest_save_s)

    def _saved_state(self) -> TrainerState:
        """Return what a checkpoint holds now; every rank calls it."""
        return self._state(self._optimizer.states)

    @torch.no_grad()
    def _state(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> TrainerState:
        weights = [self._sharded(name) for name in self._layouts]
        moments = [
            ShardedTensor(tensors.get(name, self._nothing), self._shardings[name], layout.suffixed(f".{kind}"))
            for kind, tensors in states.items()
            for name, layout in self._published.items()
        ]
        num_steps, model_path = self._optimizer.num_steps, self._config.model_path
        return TrainerState(weights, moments, self._version, num_steps, self._model_config, model_path, self._device)

    def _sharded(self, name: str) -> ShardedTensor:
        part = self._parts.get(name)
        local = self._nothing if part is None else part.local
        return ShardedTensor(local, self._shardings[name], self._layouts[name])

    @torch.no_grad()
    def _gather(self, name: str) -> torch.Tensor | None:
        """Return one stored tensor in wire dtype, in memory of its own, on rank 0, None elsewhere; collective.

        If the parameter is stored as several tensors, the others are kept until they are asked for.
        """
        owner = self._parameter_of[name]
        layout = self._layouts[owner]
        dtype: torch.dtype = getattr(torch, self._wire_dtype)
        if layout.split is None:
            return gather_on_first(self._sharded(owner), dtype, self._device)
        if self._split[0] != owner:
            whole = gather_on_first(self._sharded(owner), dtype, self._device)
            self._split = (owner, {} if whole is None else dict(layout.stored(whole)))
        tensor = self._split[1].pop(name, None)
        return None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)

    def _owned_shards(self) -> list[torch.Tensor]:
        return [self._trained[name].local for name in self._owned]

    def _tell_lost_share(self, share: float | None) -> None:
        """Warn once, after the first steps."""
        if share is None or len(self._lost_shares) == _TOLD_STEPS:
            return
        self._lost_shares.append(share)
        if len(self._lost_shares) == _TOLD_STEPS:
            self._warn(
                f"{sum(self._lost_shares) / _TOLD_STEPS:.1%} of the updates of {_TOLD_STEPS} steps were rounded away "
                "with master_dtype 'bfloat16'; master_dtype 'float32' keeps them"
            )

    def _warn(self, text: str) -> None:
        if self.rank == 0:
            warnings.warn(text, PrecisionWarning, stacklevel=2)

    def _clear_gradients(self) -> None:
        for part in self._parts.values():
            part.clear_gradient()
        self._has_gradients = False

    def _forget_whole_parameters(self) -> None:
        """Reshard layers that a forward without a backward left whole, so that nothing computes with old values."""
        for module in fsdp_modules(self._policy):
            module.reshard()


def fsdp_modules(module: nn.Module) -> Iterator[FSDPModule]:
    """Yield every module that has a group of shards of its own."""
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def sum_gradients_over_ranks(module: nn.Module) -> None:
    """Make ranks sum gradients, not average them, in a way that every backend supports."""
    for part in fsdp_modules(module):
        # The factor alone becomes a premultiplied sum, which gloo cannot do; the forced sum alone divides by the ranks.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def make_worker(kind: Callable[..., Worker], config: WorkerConfig) -> Worker:
    """Return this rank's worker in torch's default process group, or in a group of one that it then owns.

    Called with the settings, the device and ``owns_group``. A group of one uses no network.
    """
    device = device_of(config.device)
    owns_group = not dist.is_initialized()
    if owns_group:
        if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
            raise ConfigError(
                f"WORLD_SIZE is {ranks} but torch.distributed is not initialised: call "
                "torch.distributed.init_process_group() on every rank before the worker is made"
            )
        backend = "gloo" if device.type == "cpu" else "nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        config.rank_layout(dist.get_world_size())
        return kind(config, device, owns_group=owns_group)
    except BaseException:
        if owns_group:
            dist.destroy_process_group()
        raise

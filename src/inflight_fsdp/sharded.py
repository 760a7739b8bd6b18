"""`ShardedWorker`: one rank of a trainer whose ranks hold parts of the parameters, with any sharding library.

Shape suffixes: T packed tokens, N targets, H hidden, V vocabulary.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from inflight import wire
from inflight.base.transfer_time import with_transfer_s
from inflight.contracts import (
    AdjustableWorker,
    BackgroundSaver,
    ImageWorker,
    ModelParallelWorker,
    PartialWeightSource,
    PrefixSharingWorker,
    ReplayingWorker,
    ShardedWeightSource,
    TargetScoringWorker,
)
from inflight.errors import (
    ConfigError,
    NonFiniteError,
    TrainerError,
    UnsupportedError,
)
from inflight.model.attention import describe_segment_kernel
from inflight.model.checkpoints import max_model_len_of
from inflight.types import AdamSettings, MicroBatch, StepResult, WeightBucket
from inflight.wire import BucketSpec, TensorSpec
from inflight_fsdp.background import BackgroundSaves
from inflight_fsdp.checkpoint import TrainerState, load_checkpoint, save_checkpoint
from inflight_fsdp.config import WorkerConfig
from inflight_fsdp.devices import device_of
from inflight_fsdp.exchange import RankExchange, Readers
from inflight_fsdp.groups import forget_groups
from inflight_fsdp.layout import Layout, Sharding
from inflight_fsdp.optimizer import ShardedAdamW, clip, global_norm, learning_rate_at
from inflight_fsdp.parameters import ShardedParameters
from inflight_fsdp.parts import ParameterPart
from inflight_fsdp.rounding import LostUpdates, lost_share, spread_sample
from inflight_fsdp.rows import PackedImages, Row, head_exchange, rows_of, sum_over_group

_SAVE_S = 1800.0
"""Longest wait, in seconds, for a save of a small model."""
_LOG = logging.getLogger("inflight.worker")
Worker = TypeVar("Worker", bound="ShardedWorker")


class ShardedWorker(
    ModelParallelWorker,
    PartialWeightSource,
    ShardedWeightSource,
    BackgroundSaver,
    ImageWorker,
    PrefixSharingWorker,
    ReplayingWorker,
    AdjustableWorker,
    TargetScoringWorker,
):
    """One trainer rank."""

    num_rows: int = 1
    """Number of rows into which a micro-batch is cut."""

    def __init__(
        self,
        config: WorkerConfig,
        device: torch.device,
        *,
        owns_group: bool,
        policy: nn.Module,
        parts: Mapping[str, ParameterPart],
        shardings: Mapping[str, Sharding],
        layouts: Mapping[str, Layout],
        optimizer: ShardedAdamW,
        hf_config: Any,
        summed_over: Mapping[str, dist.ProcessGroup] | None = None,
    ) -> None:
        """Build a worker around a sharded model.

        ``policy`` receives a `Row` and returns logprobs [N], which depend on every parameter even if N is 0, so that
        every rank takes part in the same collectives. ``parts`` holds the parameters of which this rank has a part,
        under the trainer's names; ``shardings`` and ``layouts`` cover all parameters, in the same order on every rank.
        Parameters that are not trained are not published either. ``optimizer`` updates the trained parts, in the same
        order. ``summed_over`` contains the parameters whose gradients the model's own library does not sum over all
        ranks, each with the group over which this worker must sum them.
        """
        self._config = config
        self._device = device
        self._owns_group = owns_group
        self._policy = policy
        stored_dtype: torch.dtype = getattr(torch, config.stored_dtype)
        self._parameters = ShardedParameters(
            parts,
            shardings,
            layouts,
            rank=self.rank,
            stored_dtype=stored_dtype,
            wire_dtype=config.wire_dtype or config.dtype,
            device=device,
        )
        self._has_gradients = False
        self._optimizer = optimizer
        self._summed_over = summed_over or {}
        self._ranks = config.rank_layout(dist.get_world_size())
        self._exchange = head_exchange(self._ranks, device)
        self._model_config: str = hf_config.to_json_string(use_diff=True)
        self._context_length = max_model_len_of(hf_config)
        self._version = 0
        num_elements = sum(math.prod(shape) for layout in layouts.values() for shape in layout.shapes.values())
        size_bytes = 3 * num_elements * stored_dtype.itemsize  # with both moments
        self._saves = BackgroundSaves(with_transfer_s(_SAVE_S, size_bytes))
        self._between_ranks = RankExchange()
        self._readers = Readers()
        self._lost_updates = LostUpdates(warns=self.rank == 0) if config.stored_dtype == "bfloat16" else None
        if self.rank == 0:
            kernel = describe_segment_kernel(hf_config, getattr(torch, config.dtype), device)
            _LOG.info("trainer's attention in %s on %s: %s", config.dtype, device, kernel)

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
    def shares_prefixes(self) -> bool:
        return True

    @property
    def scores_target_ids(self) -> bool:
        return True

    @property
    def takes_step_settings(self) -> bool:
        return True

    @property
    def replays_routing(self) -> bool:
        return getattr(self._policy, "routing_shape", None) is not None

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Return logprobs on the device of the batch, which may differ from the worker's.

        Raises `TrainerError` for a segment longer than the model's context and for experts that the model does not
        have, and `UnsupportedError` for images that the model does not accept and for experts that this worker cannot
        replay. All of these are raised before any collective call.
        """
        images = self._images_of(batch)
        if batch.routed_experts_TLK is not None:
            self._check_experts(batch.routed_experts_TLK, batch.num_tokens)
        lengths = batch.segment_lengths
        if lengths and (longest := max(lengths)) > self._context_length:
            raise TrainerError(
                f"segment {lengths.index(longest)} of the micro-batch has {longest} tokens, but the model's context "
                f"is {self._context_length} (max_position_embeddings): omit the segment, or sample shorter "
                "completions"
            )
        rows = rows_of(batch, self.num_rows, self._exchange, self._config.logprob_chunk_size, self._device, images)
        logprobs_N = self._compute(rows)
        places_N = torch.cat([row.places_N for row in rows])
        # The result must depend on the parameters even without tokens, hence one more element.
        shape = (batch.num_tokens + 1, *logprobs_N.shape[1:])
        logprobs_T = logprobs_N.new_zeros(shape).index_copy(0, places_N, logprobs_N)
        if self._exchange is not None:
            logprobs_T = sum_over_group(logprobs_T, self._exchange.group)
        return logprobs_T[: batch.num_tokens].to(batch.token_ids_T.device)

    def _compute(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return the logprobs of the rows' targets, one row after another."""
        return torch.cat([self._policy(row) for row in rows])

    def _images_of(self, batch: MicroBatch) -> PackedImages | None:
        if batch.image_rows_M is None:
            return None
        if not self.takes_images:
            raise UnsupportedError(
                "the micro-batch has images, but this worker does not accept any: its model has no vision tower, or "
                "several ranks share a row"
            )
        moved = {name: tensor.to(self._device) for name, tensor in batch.image_tensors.items()}
        return PackedImages(batch.image_rows_M.to(self._device), moved)

    def _check_experts(self, experts_TLK: torch.Tensor, num_tokens: int) -> None:
        shape: tuple[int, int, int] | None = getattr(self._policy, "routing_shape", None)
        if shape is None:
            raise UnsupportedError(
                "the micro-batch has routed_experts_TLK, but this worker cannot replay routing: its model has no "
                "supported routers, or its layers are compiled"
            )
        *of_token, num_experts = shape
        if experts_TLK.shape != (num_tokens, *of_token):
            raise TrainerError(
                f"routed_experts_TLK is {list(experts_TLK.shape)}, but must be [{num_tokens}, {of_token[0]}, "
                f"{of_token[1]}]: the micro-batch has {num_tokens} tokens, and the model {of_token[0]} layers with "
                f"{of_token[1]} experts per token"
            )
        if num_tokens and (largest := int(experts_TLK.max())) >= num_experts:
            raise TrainerError(
                f"routed_experts_TLK names expert {largest}, but the model has only {num_experts} experts per layer"
            )

    def backward(self, loss: torch.Tensor) -> None:
        self._has_gradients = True
        loss.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, settings: AdamSettings | None = None) -> StepResult:
        """Take a step. Raises `TrainerError`, and changes nothing, if `backward` was not called since the last step."""
        if not self._has_gradients:
            raise TrainerError(f"step was called at version {self._version} without a gradient: call backward first")
        return self._update(settings)

    def _update(self, settings: AdamSettings | None) -> StepResult:
        parameters = self._parameters
        by_name = {name: part.gradient for name, part in parameters.trained.items()}
        for name, group in self._summed_over.items():
            dist.all_reduce(by_name[name], group=group)
        gradients, owned = list(by_name.values()), [by_name[name] for name in parameters.owned]
        norm = global_norm(owned, self._device)
        self._clear_gradients()
        if not math.isfinite(norm):
            raise self._non_finite_error(norm)
        clip(gradients, norm, (settings or self._config).max_gradient_norm)
        learning_rate = learning_rate_at(self._version, self._config) if settings is None else settings.learning_rate
        self._forget_whole_parameters()
        watch = self._lost_updates if learning_rate != 0.0 else None
        before = [] if watch is None else spread_sample(parameters.owned_shards())
        self._readers.wait("the step")
        self._optimizer.step(gradients, learning_rate, settings)
        self._version += 1
        if watch is None:
            return StepResult(self._version, norm, learning_rate)
        lost = lost_share(before, spread_sample(parameters.owned_shards()), spread_sample(owned), self._device)
        watch.note(lost)
        return StepResult(self._version, norm, learning_rate, rounded_away=lost)

    def _non_finite_error(self, norm: float) -> NonFiniteError:
        return NonFiniteError(
            f"the gradient norm of the step from version {self._version} is {norm}; weights and optimizer are "
            "unchanged, and the gradients were discarded"
        )

    def parameter_specs(self) -> Sequence[TensorSpec]:
        """Return the specs of the tensors to publish; frozen parameters are omitted."""
        return self._parameters.specs()

    def frozen_names(self) -> Sequence[str]:
        return self._parameters.frozen_names()

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        """Yield the full tensors, which share no memory with the parameters."""
        return self._parameters.gather(self.parameter_specs(), buckets)

    def shardings(self) -> Sequence[wire.Sharding]:
        return self._parameters.wire_shardings() if self.world_size > 1 else ()

    def local_weights(self, buckets: Sequence[BucketSpec]) -> Generator[WeightBucket, None, None]:
        with self._readers.reading():
            yield from self._parameters.local(self.parameter_specs(), buckets)

    def exchange(self, message: bytes, timeout_s: float) -> Sequence[bytes]:
        """Exchange messages with the other ranks. The first call forms a group of all ranks."""
        return self._between_ranks.exchange(message, timeout_s)

    def save(self, path: Path) -> None:
        """Write a checkpoint, with every rank writing its shards. Only an earlier checkpoint of a worker is replaced.

        Waits for any background save; if that save fails, its error is raised and nothing is written.
        """
        self._saves.finish()
        save_checkpoint(path, self._saved_state())

    def begin_save(self, path: Path) -> None:
        """Begin a save; its copy uses as much host memory as the shards and their moments."""
        self._saves.finish()
        self._saves.begin(path, self._saved_state())

    def finish_save(self, timeout_s: float) -> None:
        self._saves.finish(timeout_s)

    @property
    def save_pending(self) -> bool:
        return self._saves.is_running

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        """Load a checkpoint, with every rank reading its shards from ``path``, and clear the gradients.

        Waits for any background save, which may be writing to ``path``; `finish_save` still reports how it ended.
        """
        self._saves.wait()
        self._readers.wait("loading")
        if optimizer:
            states = self._optimizer.states
            self._version, num_steps = load_checkpoint(path, self._state(states))
            self._optimizer.resume(states, num_steps)
        else:
            load_checkpoint(path, self._state({}))
            self._optimizer.reset()
            self._version = 0
        self._clear_gradients()
        self._forget_whole_parameters()

    def close(self) -> None:
        """Wait for any background save, and end the process groups that this worker created. Idempotent.

        Call `finish_save` first to find out how the save ended.
        """
        self._saves.close()
        self._between_ranks.close()
        if self._owns_group:
            self._owns_group = False
            forget_groups()
            dist.destroy_process_group()

    def _saved_state(self) -> TrainerState:
        """Return the current state to save; every rank must call this."""
        return self._state(self._optimizer.states)

    @torch.no_grad()
    def _state(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> TrainerState:
        weights = [self._parameters.sharded(name) for name in self._parameters.layouts]
        moments = self._parameters.moments(states)
        num_steps, model_path = self._optimizer.num_steps, self._config.model_path
        return TrainerState(weights, moments, self._version, num_steps, self._model_config, model_path, self._device)

    def _clear_gradients(self) -> None:
        self._parameters.clear_gradients()
        self._has_gradients = False

    def _forget_whole_parameters(self) -> None:
        """Reshard layers that a forward pass without a backward pass left gathered.

        Otherwise the next forward pass would compute with the old values.
        """
        for module in fsdp_modules(self._policy):
            module.reshard()


def fsdp_modules(module: nn.Module) -> Iterator[FSDPModule]:
    """Yield every module that has its own group of shards."""
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def sum_gradients_over_ranks(module: nn.Module) -> None:
    """Make ranks sum gradients instead of averaging them, in a way that every backend supports."""
    for part in fsdp_modules(module):
        # The factor alone becomes a premultiplied sum, which gloo lacks; the forced sum alone still averages.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def make_worker(kind: Callable[..., Worker], config: WorkerConfig) -> Worker:
    """Return this rank's worker in torch's default process group, or in a group of one that it then owns.

    The worker class is called with the settings, the device and ``owns_group``. A group of one uses no network.
    """
    device = device_of(config.device)
    owns_group = not dist.is_initialized()
    if owns_group:
        if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
            raise ConfigError(
                f"WORLD_SIZE is {ranks} but torch.distributed is not initialized: call "
                "torch.distributed.init_process_group() on every rank before the worker is created"
            )
        backend = "gloo" if device.type == "cpu" else "nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        config.rank_layout(dist.get_world_size())
        return kind(config, device, owns_group=owns_group)
    except BaseException:
        if owns_group:
            forget_groups()
            dist.destroy_process_group()
        raise

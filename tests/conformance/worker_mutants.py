"""Faulty trainer workers, each wrong in one way that a check must catch: `FsdpWorker` and a few lines.

As a target: ``tests.conformance.worker_mutants:KIND`` with the option ``mutant=NAME``; ``mutant_file`` names a file
that contains the name, so that one session of ranks can check them all.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from inflight.contracts import PartialWeightSource, WorkerKind
from inflight.errors import CheckpointError, NonFiniteError, TrainerError, TransferError
from inflight.types import FREE_EXPERT, AdamSettings, MicroBatch, StepResult, WeightBucket
from inflight.wire import BucketSpec, LoraSpec, Sharding, TensorSpec
from inflight_fsdp import background, checkpoint, rows
from inflight_fsdp.config import WorkerConfig, parse_config
from inflight_fsdp.layout import ShardedTensor
from inflight_fsdp.lora_worker import FsdpLoraWorker
from inflight_fsdp.optimizer import global_norm, learning_rate_at
from inflight_fsdp.rows import Row
from inflight_fsdp.worker import FsdpWorker

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def create_worker(config: Mapping[str, Any]) -> FsdpWorker:
    """Return this rank of the mutant that the options name."""
    options = dict(config)
    name = options.pop("mutant", "")
    if file := options.pop("mutant_file", ""):
        name = Path(file).read_text()
    kind = MUTANTS[name].kind if name else FsdpLoraWorker if "lora" in options else FsdpWorker
    if issubclass(kind, FsdpLoraWorker) and "lora" not in options:
        kind = FsdpWorker
    return kind(parse_config(options, WorkerConfig), torch.device("cpu"), owns_group=False)


class MutantKind(WorkerKind):
    trains_lora = True

    def create(self, settings: Mapping[str, object]) -> FsdpWorker:
        return create_worker(settings)


KIND = MutantKind()
_PROCESS = os.getpid()


def is_tied(worker: FsdpWorker) -> bool:
    return bool(worker._policy.causal_lm.config.tie_word_embeddings)


def gradients_of(worker: FsdpWorker) -> list[torch.Tensor]:
    """This rank's shards of the gradients, to be changed in place."""
    return [p.grad.to_local() for p in parameters_of(worker).values() if p.grad is not None]  # type: ignore[attr-defined]


def parameters_of(worker: FsdpWorker) -> dict[str, DTensor]:
    return {name: part.parameter for name, part in worker._parameters.parts.items()}  # type: ignore[attr-defined]


def trained_of(worker: FsdpWorker) -> dict[str, DTensor]:
    return {name: part.parameter for name, part in worker._parameters.trained.items()}  # type: ignore[attr-defined]


class GatheringMutant(FsdpWorker):
    """Each stored tensor is gathered by `gathered`, which returns what the worker would by default."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._gather_rightly = self._parameters._gather
        self._parameters._gather = self.gathered  # type: ignore[method-assign]

    def gathered(self, name: str) -> torch.Tensor | None:
        return self._gather_rightly(name)


def scale_gradients(worker: FsdpWorker, factor: float) -> None:
    with torch.no_grad():
        for gradient in gradients_of(worker):
            gradient.mul_(factor)


def every_target(batch: MicroBatch) -> MicroBatch:
    return replace(batch, loss_mask_T=batch.position_ids_T > 0)


def as_one_segment(batch: MicroBatch) -> MicroBatch:
    if not batch.num_tokens:
        return batch
    return replace(batch, segment_lengths=(batch.num_tokens,), position_ids_T=torch.arange(batch.num_tokens))


# ---------------------------------------------------------------------------------------------------------------
# Discovery


class VersionOfOne(FsdpWorker):
    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._version = 1


class SpecsWithBarrier(FsdpWorker):
    def parameter_specs(self) -> Sequence[TensorSpec]:
        dist.barrier()
        return super().parameter_specs()


class WrappersInNames(GatheringMutant):
    def parameter_specs(self) -> Sequence[TensorSpec]:
        return [spec.model_copy(update={"name": f"_orig_mod.{spec.name}"}) for spec in super().parameter_specs()]

    def gathered(self, name: str) -> torch.Tensor | None:
        return super().gathered(name.removeprefix("_orig_mod."))


# ---------------------------------------------------------------------------------------------------------------
# Forward


class HalfPrecision(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        return super().forward(batch).bfloat16().float()


class TiedHeadScaled(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        factor = math.sqrt(32) if is_tied(self) else 1.0
        return super().forward(replace(batch, temperature_T=batch.temperature_T * factor))


class TemperatureIgnored(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        return super().forward(replace(batch, temperature_T=torch.ones_like(batch.temperature_T)))


class TemperatureAfterSoftmax(TemperatureIgnored):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        return super().forward(batch) / batch.temperature_T


class ShiftedByOne(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        return torch.where(batch.loss_mask_T, super().forward(every_target(batch)).roll(-1), 0.0)


class MaskIgnored(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        return super().forward(every_target(batch))


class BatchDimension(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        return super().forward(batch)[None]


class Float16Logprobs(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        return super().forward(batch).half()


class Detached(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        return super().forward(batch).detach()


@contextlib.contextmanager
def logprobs_by(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Logprobs are made of the logits [N, V] and temperatures [N, 1] by ``change``."""

    def changed(
        hidden_NH: torch.Tensor, weight_VH: torch.Tensor, ids_N: torch.Tensor, temperature_N: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        logprobs_NV = change(hidden_NH @ weight_VH.T, temperature_N[:, None])
        return logprobs_NV.gather(1, ids_N.reshape(len(ids_N), -1)).reshape(ids_N.shape)

    right = rows.chunked_logprobs
    rows.chunked_logprobs = changed
    try:
        yield
    finally:
        rows.chunked_logprobs = right


class FirstChunksTemperatures(FsdpWorker):
    """Every chunk of 1,024 targets is computed with the temperatures of the first chunk."""

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        right = rows.chunked_logprobs

        def changed(
            hidden_NH: torch.Tensor,
            weight_VH: torch.Tensor,
            ids_N: torch.Tensor,
            temperature_N: torch.Tensor,
            **own: Any,
        ) -> torch.Tensor:
            return right(hidden_NH, weight_VH, ids_N, temperature_N[torch.arange(len(temperature_N)) % 1024], **own)

        rows.chunked_logprobs = changed
        try:
            return super().forward(batch)
        finally:
            rows.chunked_logprobs = right


class LogitsClamped(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        with logprobs_by(lambda logits, temperature: (logits.clamp(-50, 50) / temperature).log_softmax(-1)):
            return super().forward(batch)


class LogitsSoftCapped(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        with logprobs_by(lambda logits, temperature: (100 * (logits / 100).tanh() / temperature).log_softmax(-1)):
            return super().forward(batch)


class LogprobsBounded(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        return super().forward(batch).clamp(min=-80.0)


class ProbabilitiesShifted(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        with logprobs_by(lambda logits, temperature: ((logits / temperature).softmax(-1) + 1e-10).log()):
            return super().forward(batch)


class LargestLogitFromZero(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        def logprobs(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
            divided = logits / temperature
            largest = divided.amax(-1, keepdim=True).clamp(min=0.0)
            return divided - largest - (divided - largest).exp().sum(-1, keepdim=True).log()

        with logprobs_by(logprobs):
            return super().forward(batch)


class _UnshiftedLogSoftmax(torch.autograd.Function):
    """A log-softmax whose gradient is computed from exponentials of logits from which no maximum is subtracted."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits.log_softmax(-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (logits,) = ctx.saved_tensors
        exponentials = logits.exp()
        return gradient - exponentials / exponentials.sum(-1, keepdim=True) * gradient.sum(-1, keepdim=True)


class GradientUnshifted(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        with logprobs_by(lambda logits, temperature: _UnshiftedLogSoftmax.apply(logits / temperature)):
            return super().forward(batch)


class TemperatureBounded(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        return super().forward(replace(batch, temperature_T=batch.temperature_T.clamp(0.1, 2.0)))


# ---------------------------------------------------------------------------------------------------------------
# Packing


class PositionsLost(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        positions_T = torch.where(batch.segment_ids_T == 0, batch.position_ids_T, 0)
        return super().forward(replace(batch, position_ids_T=positions_T))


class Leak(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        return super().forward(as_one_segment(batch))


class ImagesReversed(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        turned = {name: tensor.flip(0) for name, tensor in batch.image_tensors.items()}
        return super().forward(replace(batch, image_tensors=turned))


class TowerFrozen(FsdpWorker):
    def step(self) -> StepResult:
        for name, parameter in parameters_of(self).items():
            if "vision_tower" in name:
                parameter.grad = None
        return super().step()


class ImagesByPlace(FsdpWorker):
    """Rows of images are used as indices of computed tokens instead of packed ones."""

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        if batch.prefix_ids_T is not None and batch.image_rows_M is not None:
            first_C = batch.prefix_ids_T.unique()
            batch = replace(batch, image_rows_M=first_C[batch.image_rows_M.clamp(max=len(first_C) - 1)])
        return super().forward(batch)


class PrefixesByLastToken(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        if batch.prefix_ids_T is not None:
            batch = replace(batch, prefix_ids_T=batch.token_ids_T * batch.num_tokens + batch.position_ids_T)
        return super().forward(batch)


class FirstOfSharedOnly(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        logprobs_T = super().forward(batch)
        if batch.prefix_ids_T is None:
            return logprobs_T
        return torch.where(batch.segment_ids_T == 0, logprobs_T, logprobs_T.detach())


class TreesByShape(FsdpWorker):
    """All micro-batches of the same shape are computed with the tree of shared prefixes of the first one."""

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        if batch.prefix_ids_T is not None:
            trees = vars(self).setdefault("_trees", {})
            shape = batch.segment_lengths, len(batch.prefix_ids_T.unique())
            batch = replace(batch, prefix_ids_T=trees.setdefault(shape, batch.prefix_ids_T))
        return super().forward(batch)


class SiblingsSeen(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        if batch.prefix_ids_T is None:
            return super().forward(batch)
        return super().forward(as_one_segment(replace(batch, prefix_ids_T=None)))


class ExpertsIgnored(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        return super().forward(replace(batch, routed_experts_TLK=None))


class ExpertsOfTheTokenBefore(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        experts_TLK = batch.routed_experts_TLK
        return super().forward(
            replace(batch, routed_experts_TLK=None if experts_TLK is None else experts_TLK.roll(1, dims=0))
        )


class ExpertsByPlace(FsdpWorker):
    """The i-th token that is computed has the experts of the i-th packed token."""

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        if batch.prefix_ids_T is None or batch.routed_experts_TLK is None:
            return super().forward(batch)
        first_C = batch.prefix_ids_T.unique()
        experts_TLK = batch.routed_experts_TLK.clone()
        experts_TLK[first_C] = batch.routed_experts_TLK[: len(first_C)]
        return super().forward(replace(batch, routed_experts_TLK=experts_TLK))


class RouterFrozen(FsdpWorker):
    def step(self) -> StepResult:
        for name, parameter in parameters_of(self).items():
            if name.endswith("mlp.gate.weight"):
                parameter.grad = None
        return super().step()


class LeakyGradient(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        leaky_T = super().forward(as_one_segment(batch))
        with torch.no_grad():
            clean_T = super().forward(batch)
        return leaky_T + (clean_T - leaky_T).detach()


class ConstantForNothing(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        return super().forward(batch) if batch.loss_mask_T.any() else torch.zeros(batch.num_tokens)


# ---------------------------------------------------------------------------------------------------------------
# Gradients


class NormAfterClipping(FsdpWorker):
    def step(self) -> StepResult:
        result = super().step()
        return replace(result, gradient_norm=min(result.gradient_norm, 1.0))


class TinyGradientsSkipped(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        logprobs_T = super().forward(batch)
        if logprobs_T.requires_grad:
            logprobs_T.register_hook(lambda gradient_T: torch.where(gradient_T.abs() <= 1e-6, 0.0, gradient_T))
        return logprobs_T


class GradientAtTemperatureOne(FsdpWorker):
    """The gradient of the logits is not divided by the temperature."""

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        logprobs_T = super().forward(batch)
        undivided_T = logprobs_T * batch.temperature_T.to(logprobs_T.device)
        return undivided_T + (logprobs_T - undivided_T).detach()


class TiedHeadDetached(FsdpWorker):
    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        causal_lm = self._policy.causal_lm
        if is_tied(self):
            embedding = causal_lm.get_input_embeddings()
            causal_lm.get_output_embeddings = lambda: SimpleNamespace(weight=embedding.weight.detach(), bias=None)


class MicroBatchMean(FsdpWorker):
    _num_backwards = 0

    def backward(self, loss: torch.Tensor) -> None:
        self._num_backwards += 1
        super().backward(loss)

    def step(self) -> StepResult:
        scale_gradients(self, 1 / max(1, self._num_backwards))
        self._num_backwards = 0
        return super().step()


class LaterForwardOnly(FsdpWorker):
    """Only the latest forward's backward is reduced."""

    _num_forwards = 0

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        logprobs_T = super().forward(batch)
        if not logprobs_T.requires_grad:
            return logprobs_T
        self._num_forwards += 1
        number = self._num_forwards
        logprobs_T.register_hook(lambda gradient_T: gradient_T * (number == self._num_forwards))
        return logprobs_T


class RankMean(FsdpWorker):
    def step(self) -> StepResult:
        scale_gradients(self, 1 / self.world_size)
        return super().step()


class BusyRanksOnly(FsdpWorker):
    """Weights a rank by the number of ranks with targets."""

    _has_targets = False

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        self._has_targets |= bool(batch.loss_mask_T.any())
        return super().forward(batch)

    def step(self) -> StepResult:
        num_busy = torch.tensor(float(self._has_targets))
        dist.all_reduce(num_busy)
        scale_gradients(self, self.world_size / max(1.0, float(num_busy)))
        self._has_targets = False
        return super().step()


class LocalClipping(FsdpWorker):
    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._config = self._config.model_copy(update={"max_gradient_norm": None})

    def step(self) -> StepResult:
        gradients = gradients_of(self)
        norm = global_norm(gradients, self._device)
        local = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        scale_gradients(self, min(1.0, 1.0 / local))
        return replace(super().step(), gradient_norm=norm)


class CountedByEach(FsdpWorker):
    """Reports that its ranks compute the same micro-batches, but sums the gradients of all of them."""

    @property
    def data_parallel_rank(self) -> int:
        return 0

    @property
    def data_parallel_size(self) -> int:
        return 1


# ---------------------------------------------------------------------------------------------------------------
# Steps


class StaleResult(FsdpWorker):
    def step(self) -> StepResult:
        result = super().step()
        return replace(result, version=result.version - 1)


class NormOfOneRank(FsdpWorker):
    def step(self) -> StepResult:
        squares = sum(float(gradient.square().sum()) for gradient in gradients_of(self))
        return replace(super().step(), gradient_norm=math.sqrt(squares))


class NoUpdate(FsdpWorker):
    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._optimizer.step = lambda gradients, learning_rate: None  # type: ignore[method-assign]


class GradientsKept(FsdpWorker):
    def step(self) -> StepResult:
        kept = [None if p.grad is None else p.grad.clone() for p in parameters_of(self).values()]
        result = super().step()
        for parameter, gradient in zip(parameters_of(self).values(), kept, strict=True):
            parameter.grad = gradient
        return result


class EmptyStep(FsdpWorker):
    def step(self) -> StepResult:
        if gradients_of(self):
            return super().step()
        self._version += 1
        return StepResult(self._version, 0.0, self._config.learning_rate)


class NonFiniteSkipped(FsdpWorker):
    def step(self) -> StepResult:
        try:
            return super().step()
        except NonFiniteError:
            return StepResult(self._version, math.nan, 0.0)


class NonFiniteZeroed(FsdpWorker):
    def step(self) -> StepResult:
        for gradient in gradients_of(self):
            gradient.nan_to_num_(0.0)
        return super().step()


class NonFiniteCounted(FsdpWorker):
    """Its optimizer counts a step that was refused."""

    def step(self) -> StepResult:
        try:
            return super().step()
        except NonFiniteError:
            self._optimizer.set_num_steps(self._optimizer.num_steps + 5)
            raise


class RefusedGradientsKept(FsdpWorker):
    """Keeps the gradients of a step that was refused."""

    def step(self) -> StepResult:
        gradients = {name: p.grad for name, p in trained_of(self).items()}
        try:
            return super().step()
        except NonFiniteError:
            for name, parameter in trained_of(self).items():
                parameter.grad = gradients[name]
            self._has_gradients = True
            raise


class RefusedStepForgets(FsdpWorker):
    """A refused step resets the optimizer, which does not show before the first step."""

    def step(self) -> StepResult:
        try:
            return super().step()
        except NonFiniteError:
            for states in self._optimizer.states.values():
                for state in states.values():
                    state.zero_()
            self._optimizer.set_num_steps(0)
            raise


class OverflowTaken(FsdpWorker):
    """Checks only for NaN; clipping by an infinite norm makes every gradient 0."""

    def step(self) -> StepResult:
        gradients = gradients_of(self)
        norm = global_norm(gradients, self._device) if gradients else 0.0
        if not math.isinf(norm):
            return super().step()
        for gradient in gradients:
            gradient.zero_()
        return replace(super().step(), gradient_norm=norm)


class NonFiniteOnOneRank(NonFiniteSkipped):
    def step(self) -> StepResult:
        result = super().step()
        if math.isnan(result.gradient_norm) and self.rank == self.world_size - 1:
            raise NonFiniteError("only the rank whose loss it was reports it")
        return result


# ---------------------------------------------------------------------------------------------------------------
# Numbers of a step


class NeverClips(FsdpWorker):
    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._config = self._config.model_copy(update={"max_gradient_norm": None})


class ClipsEachTensor(NeverClips):
    """Each gradient has a norm of at most 1; the reported norm is that of all before."""

    def step(self, settings: AdamSettings | None = None) -> StepResult:
        norm = global_norm(gradients_of(self), self._device)
        for gradient in gradients_of(self):
            self.change(gradient)
        return replace(super().step(), gradient_norm=norm)

    def change(self, gradient: torch.Tensor) -> None:
        gradient.mul_(1.0 / max(1.0, float(gradient.norm())))


class ClipsElements(ClipsEachTensor):
    def change(self, gradient: torch.Tensor) -> None:
        gradient.clamp_(-1.0, 1.0)


class ClipsByLargest(ClipsEachTensor):
    """The largest element counts as the norm."""

    def step(self, settings: AdamSettings | None = None) -> StepResult:
        self._largest = max((float(gradient.abs().max()) for gradient in gradients_of(self)), default=0.0)
        return super().step()

    def change(self, gradient: torch.Tensor) -> None:
        gradient.mul_(1.0 / max(1.0, self._largest))


class ClipsTwiceTheNorm(NeverClips):
    """The limit is that of another worker."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._config = self._config.model_copy(update={"max_gradient_norm": 2.0})


class ClipsToOne(NeverClips):
    """The limit is a constant in the code, whatever is configured."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._config = self._config.model_copy(update={"max_gradient_norm": 1.0})


class NoneClipsToOne(FsdpWorker):
    """A limit of None is treated as a limit of 1."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        if self._config.max_gradient_norm is None:
            self._config = self._config.model_copy(update={"max_gradient_norm": 1.0})


class ZeroNormDivides(FsdpWorker):
    """The factor of clipping is 1 / norm, also for a norm of 0."""

    def step(self, settings: AdamSettings | None = None) -> StepResult:
        if all(not gradient.any() for gradient in gradients_of(self)):
            scale_gradients(self, math.nan)
        return super().step()


class ZeroStepsSkipped(FsdpWorker):
    """A step whose gradient is 0 counts, and changes nothing."""

    def step(self, settings: AdamSettings | None = None) -> StepResult:
        if not gradients_of(self) or any(gradient.any() for gradient in gradients_of(self)):
            return super().step()
        self._clear_gradients()
        self._version += 1
        return StepResult(self._version, 0.0, learning_rate_at(self._version - 1, self._config))


class GradientsInBfloat16(FsdpWorker):
    def step(self, settings: AdamSettings | None = None) -> StepResult:
        for gradient in gradients_of(self):
            gradient.copy_(gradient.bfloat16())
        return super().step(settings)


class OptimizerAnew(FsdpWorker):
    """Every step has a new optimizer."""

    def step(self, settings: AdamSettings | None = None) -> StepResult:
        result = super().step(settings)
        self._optimizer.reset()
        return result


class LargeEpsilon(FsdpWorker):
    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._optimizer._own_settings["eps"] = 1e-4


class MomentsInBfloat16(FsdpWorker):
    def step(self, settings: AdamSettings | None = None) -> StepResult:
        result = super().step()
        for states in self._optimizer.states.values():
            for state in states.values():
                state.copy_(state.bfloat16())
        return result


class SecondMomentsInBfloat16(FsdpWorker):
    def step(self, settings: AdamSettings | None = None) -> StepResult:
        result = super().step()
        for state in self._optimizer.states["exp_avg_sq"].values():
            state.copy_(state.bfloat16())
        return result


class ChangedAfterStep(FsdpWorker):
    """`changed` returns what a parameter is after each step, from what it was before and after it."""

    @torch.no_grad()
    def step(self, settings: AdamSettings | None = None) -> StepResult:
        before = {name: p.to_local().clone() for name, p in parameters_of(self).items()}
        result = super().step()
        for name, parameter in parameters_of(self).items():
            parameter.to_local().copy_(self.changed(name, before[name], parameter.to_local().clone()))
        return result

    def changed(self, name: str, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return after


class WeightsInBfloat16(ChangedAfterStep):
    def changed(self, name: str, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return after.bfloat16().float()


class ChangesInBfloat16(ChangedAfterStep):
    def changed(self, name: str, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return before + (after - before).bfloat16().float()


class TiedSteppedTwice(ChangedAfterStep):
    def changed(self, name: str, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return 2 * after - before if is_tied(self) and name == EMBEDDING else after


class HeadNotStepped(ChangedAfterStep):
    def changed(self, name: str, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return before if name == HEAD else after


class NormsNotStepped(ChangedAfterStep):
    def changed(self, name: str, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return before if name.endswith("norm.weight") else after


class SteppedAtRate(FsdpWorker):
    """The optimizer uses another learning rate than is reported."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        right = self._optimizer.step
        self._optimizer.step = lambda gradients, rate, settings=None: right(gradients, self.rate(), settings)

    def rate(self) -> float:
        return learning_rate_at(max(0, self._version - 1), self._config)


class FirstRateKept(SteppedAtRate):
    def rate(self) -> float:
        return self._config.learning_rate


class RateOfTheNextStep(FsdpWorker):
    """Reports and uses the learning rate of another step."""

    def step(self, settings: AdamSettings | None = None) -> StepResult:
        if settings is not None or not self._has_gradients:
            return super().step(settings)
        version = self._version
        self._version = self.counted()
        result = super().step()
        self._version = version + 1
        return replace(result, version=version + 1)

    def counted(self) -> int:
        return self._version + 1


class ScheduleRestarts(RateOfTheNextStep):
    """Counts the steps since the last load."""

    _loaded = 0

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        super().load(path, optimizer=optimizer)
        self._loaded = self._version

    def counted(self) -> int:
        return self._version - self._loaded


class RefusedStepsScheduled(RateOfTheNextStep):
    """The schedule also counts steps that were refused."""

    _refused = 0

    def step(self, settings: AdamSettings | None = None) -> StepResult:
        version = self._version
        try:
            return super().step(settings)
        except NonFiniteError:
            self._refused += 1
            self._version = version
            raise

    def counted(self) -> int:
        return self._version + self._refused


class ScheduleStandsStill(RateOfTheNextStep):
    def counted(self) -> int:
        return 0


class FullRateAfterTheEnd(RateOfTheNextStep):
    """Every step after the end of the schedule has the full rate."""

    def counted(self) -> int:
        total = self._config.total_steps
        return self._config.warmup_steps if total is not None and self._version >= total else self._version


class ReportedAtRate(SteppedAtRate):
    """A step reports the rate that it was taken with."""

    def step(self, settings: AdamSettings | None = None) -> StepResult:
        rate = self.rate()
        result = super().step(settings)
        return result if settings is not None else replace(result, learning_rate=rate)


class CosineFromTheStart(ReportedAtRate):
    """The cosine schedule counts the steps of the warm-up as part of the decay."""

    def rate(self) -> float:
        config = self._config
        if config.schedule != "cosine" or config.total_steps is None or self._version < config.warmup_steps:
            return learning_rate_at(self._version, config)
        progress = min(1.0, self._version / config.total_steps)
        return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))


class WarmUpFromZero(SteppedAtRate):
    def step(self, settings: AdamSettings | None = None) -> StepResult:
        rate = self.rate()
        return replace(super().step(), learning_rate=rate)

    def rate(self) -> float:
        return learning_rate_at(self._version - 1, self._config) if self._version else 0.0


class NoBiasCorrection(FsdpWorker):
    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._optimizer.set_num_steps(10**6)


class DecayOfTorch(FsdpWorker):
    """Weights decay by AdamW's default in torch, whatever is configured."""

    decay = 0.01

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._optimizer._own_settings["weight_decay"] = self.decay


class DecayCoupled(DecayOfTorch):
    decay = 0.0

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        right, by = self._optimizer.step, self._config.weight_decay
        self._optimizer.step = lambda gradients, rate, settings=None: right(
            [g + by * p.to_local() for g, p in zip(gradients, parameters_of(self).values(), strict=True)],
            rate,
            settings,
        )


class NoDecay(DecayOfTorch):
    decay = 0.0


class RowsLeftOut(FsdpWorker):
    """Rows of an untied embedding without a gradient keep their values and moments, as in a sparse optimizer."""

    @torch.no_grad()
    def step(self, settings: AdamSettings | None = None) -> StepResult:
        embedding = parameters_of(self)[EMBEDDING]
        if is_tied(self) or embedding.grad is None:
            return super().step(settings)
        states = self._optimizer.states
        changed = [embedding.to_local(), *(states[kind][EMBEDDING] for kind in states)]
        unused_R = ~embedding.grad.to_local().any(dim=1)  # type: ignore[attr-defined]
        kept = [tensor[unused_R] for tensor in changed]
        result = super().step(settings)
        for tensor, old in zip(changed, kept, strict=True):
            tensor[unused_R] = old
        return result


class BetasExchanged(FsdpWorker):
    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._optimizer._own_settings["betas"] = (0.999, 0.9)


class ZerosKept(FsdpWorker):
    """Gradients are set to zero after a step, and the next step takes them for gradients."""

    def step(self, settings: AdamSettings | None = None) -> StepResult:
        result = super().step(settings)
        self._keep_zeros()
        return result

    def _keep_zeros(self) -> None:
        for parameter in parameters_of(self).values():
            parameter.grad = torch.zeros_like(parameter)
        self._has_gradients = True


class ZerosKeptIfRefused(ZerosKept):
    def step(self, settings: AdamSettings | None = None) -> StepResult:
        try:
            return FsdpWorker.step(self, settings)
        except NonFiniteError:
            self._keep_zeros()
            raise


# ---------------------------------------------------------------------------------------------------------------
# Gathering


class WrongDtype(GatheringMutant):
    def gathered(self, name: str) -> torch.Tensor | None:
        full = super().gathered(name)
        return None if full is None else full.bfloat16()


class IndexLost(FsdpWorker):
    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        return (replace(bucket, index=0) for bucket in super().gather_weights(buckets))


class HangInGather(FsdpWorker):
    """Rank 0 waits forever, and the others wait for rank 0."""

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        for bucket in super().gather_weights(buckets):
            while self.rank == 0:
                time.sleep(0.1)
            yield bucket


class EveryRankHolds(GatheringMutant):
    @torch.no_grad()
    def gathered(self, name: str) -> torch.Tensor | None:
        return parameters_of(self)[name].full_tensor().clone()


class HeadDropped(FsdpWorker):
    def parameter_specs(self) -> Sequence[TensorSpec]:
        return [spec for spec in super().parameter_specs() if spec.name != HEAD]


class TiedHeadTwice(GatheringMutant):
    def parameter_specs(self) -> Sequence[TensorSpec]:
        specs = list(super().parameter_specs())
        if is_tied(self):
            embedding = next(spec for spec in specs if spec.name == EMBEDDING)
            specs.append(embedding.model_copy(update={"name": HEAD}))
        return specs

    def gathered(self, name: str) -> torch.Tensor | None:
        return super().gathered(EMBEDDING if is_tied(self) and name == HEAD else name)


class TiedHeadOld(GatheringMutant):
    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._old = super().gathered(EMBEDDING) if is_tied(self) else None

    def gathered(self, name: str) -> torch.Tensor | None:
        full = super().gathered(name)
        return self._old if name == EMBEDDING and self._old is not None else full


class SharedStaging(FsdpWorker):
    """Tensors of one bucket and shape are copied into the same memory."""

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        for bucket in super().gather_weights(buckets):
            staging: dict[torch.Size, torch.Tensor] = {}
            tensors = [staging.setdefault(t.shape, torch.empty_like(t)).copy_(t) for t in bucket.tensors]
            yield replace(bucket, tensors=tuple(tensors))


class StagingReused(FsdpWorker):
    """All buckets are copied into the same memory."""

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        staging = torch.empty(max(bucket.size_bytes for bucket in buckets), dtype=torch.uint8)
        for bucket in super().gather_weights(buckets):
            views, offset = [], 0
            for tensor in bucket.tensors:
                view = staging[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                views.append(view.copy_(tensor))
                offset += tensor.nbytes
            yield replace(bucket, tensors=tuple(views))


class ParametersYielded(GatheringMutant):
    @torch.no_grad()
    def gathered(self, name: str) -> torch.Tensor | None:
        return parameters_of(self)[name].to_local()


class GatherCached(FsdpWorker):
    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        if not hasattr(self, "_cached"):
            self._cached = list(super().gather_weights(buckets))
        return iter(self._cached)


class EverythingFirst(FsdpWorker):
    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        return iter(list(super().gather_weights(buckets)))


# ---------------------------------------------------------------------------------------------------------------
# Boxes of every rank


class ShardingsWithBarrier(FsdpWorker):
    def shardings(self) -> Sequence[Sharding]:
        dist.barrier()
        return super().shardings()


class ReversedShardings(FsdpWorker):
    """Ranks are in reverse order."""

    def shardings(self) -> Sequence[Sharding]:
        return [Sharding(senders=sharding.senders[::-1]) for sharding in super().shardings()]


class OwnRankFirst(ReversedShardings):
    """Each rank lists itself as the first one."""

    def shardings(self) -> Sequence[Sharding]:
        return super().shardings() if self.rank else FsdpWorker.shardings(self)


class SentTwice(FsdpWorker):
    """The last rank also sends what the first one sends of the first tensor."""

    def shardings(self) -> Sequence[Sharding]:
        first, *others = super().shardings()
        return [Sharding(senders=(*first.senders[:-1], first.senders[-1] + first.senders[0])), *others]


class SentByNobody(FsdpWorker):
    """The last rank sends nothing of the first tensor."""

    def shardings(self) -> Sequence[Sharding]:
        first, *others = super().shardings()
        return [Sharding(senders=(*first.senders[:-1], ())), *others]


class FirstRankSends(FsdpWorker):
    """Rank 0 sends everything, as if it had a copy of it."""

    def shardings(self) -> Sequence[Sharding]:
        none = ((),) * (self.world_size - 1)
        return [Sharding(senders=(sum(sharding.senders, ()), *none)) for sharding in super().shardings()]


class EqualBoxesExchanged(FsdpWorker):
    """The first two boxes of the same shape are exchanged."""

    def local_weights(self, buckets: Sequence[BucketSpec]) -> Generator[WeightBucket, None, None]:
        found = list(super().local_weights(buckets))
        tensors = [tensor for bucket in found for tensor in bucket.tensors if tensor.dim() == 2]
        one, other = next((a, b) for i, b in enumerate(tensors) for a in tensors[:i] if a.shape == b.shape)
        for bucket in found:
            exchanged = [other if it is one else one if it is other else it for it in bucket.tensors]
            yield replace(bucket, tensors=tuple(exchanged))


class BoxesUncast(FsdpWorker):
    """Boxes have the dtype of the parameters, not that of the wire."""

    def __init__(self, config: WorkerConfig, *arguments: Any, **others: Any) -> None:
        super().__init__(config.model_copy(update={"wire_dtype": "bfloat16"}), *arguments, **others)

    def local_weights(self, buckets: Sequence[BucketSpec]) -> Generator[WeightBucket, None, None]:
        for bucket in super().local_weights(buckets):
            yield replace(bucket, tensors=tuple(tensor.float() for tensor in bucket.tensors))


class ColumnsAsRows(FsdpWorker):
    """Of tensors that ranks hold by rows, columns are announced, and the rows are sent."""

    def shardings(self) -> Sequence[Sharding]:
        return [self._turned(sharding) for sharding in super().shardings()]

    def _turned(self, sharding: Sharding) -> Sharding:
        boxes = [box for boxes in sharding.senders for box in boxes]
        if len({tuple(stop - start for start, stop in box) for box in boxes}) > 1 or len(boxes[0]) != 2:
            return sharding
        num_rows, width = boxes[-1][0][1], boxes[0][1][1] // len(boxes)
        return Sharding(
            senders=tuple((((0, num_rows), (i * width, (i + 1) * width)),) for i in range(len(sharding.senders)))
        )

    def local_weights(self, buckets: Sequence[BucketSpec]) -> Generator[WeightBucket, None, None]:
        shapes = [
            [stop - start for start, stop in it] for all_of in self.shardings() for it in all_of.senders[self.rank]
        ]
        left = iter(shapes)
        for bucket in super().local_weights(buckets):
            yield replace(bucket, tensors=tuple(tensor.reshape(next(left)) for tensor in bucket.tensors))


class LocalWithBarrier(FsdpWorker):
    def local_weights(self, buckets: Sequence[BucketSpec]) -> Generator[WeightBucket, None, None]:
        for bucket in super().local_weights(buckets):
            dist.barrier()
            yield bucket


class BoxesKept(FsdpWorker):
    """Boxes are copied once."""

    def local_weights(self, buckets: Sequence[BucketSpec]) -> Generator[WeightBucket, None, None]:
        if not hasattr(self, "_kept"):
            found = list(super().local_weights(buckets))
            self._kept = [replace(bucket, tensors=tuple(it.clone() for it in bucket.tensors)) for bucket in found]
        yield from self._kept


class StepsWhileRead(FsdpWorker):
    """A step does not wait for what is being read."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._readers.wait = lambda what: None  # type: ignore[method-assign]


class CountsBeforeItWaits(FsdpWorker):
    """While a step waits for readers of the weights, the version is already that of the next weights."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        wait = self._readers.wait

        def counted(what: str) -> None:
            self._version += 1
            try:
                wait(what)
            finally:
                self._version -= 1

        self._readers.wait = counted  # type: ignore[method-assign]


class BoxesShareMemory(FsdpWorker):
    """Boxes of one bucket and shape are copied into the same memory."""

    def local_weights(self, buckets: Sequence[BucketSpec]) -> Generator[WeightBucket, None, None]:
        for bucket in super().local_weights(buckets):
            memory: dict[torch.Size, torch.Tensor] = {}
            tensors = [memory.setdefault(t.shape, torch.empty_like(t)).copy_(t) for t in bucket.tensors]
            yield replace(bucket, tensors=tuple(tensors))


class PatientExchange(FsdpWorker):
    def exchange(self, message: bytes, timeout_s: float) -> Sequence[bytes]:
        return super().exchange(message, timeout_s + 6.0)


class NamelessExchange(FsdpWorker):
    def exchange(self, message: bytes, timeout_s: float) -> Sequence[bytes]:
        try:
            return super().exchange(message, timeout_s)
        except TransferError as error:
            raise TransferError("the ranks have lost each other") from error


class MessagesCut(FsdpWorker):
    """Rank 0 receives at most as many bytes from each rank as it sends."""

    def exchange(self, message: bytes, timeout_s: float) -> Sequence[bytes]:
        own = len(message) if self.rank == 0 else None
        return [it[:own] for it in super().exchange(message, timeout_s)]


class FirstExchangeWaits(FsdpWorker):
    """The first exchange waits for all ranks, however long that takes."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        ranks = self._between_ranks
        ranks._form = lambda _: setattr(ranks, "_group", dist.new_group(backend="gloo"))  # type: ignore[method-assign]


class GroupOfOneRank(FsdpWorker):
    """A rank forms the group of the exchange although another one may have left."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        ranks, form = self._between_ranks, self._between_ranks._form

        def form_twice(deadline: float) -> None:
            ranks._until(deadline, 0, lambda left: dist.new_group(backend="gloo", timeout=left))
            form(deadline)

        ranks._form = form_twice  # type: ignore[method-assign]


# ---------------------------------------------------------------------------------------------------------------
# Checkpoints


class VersionLost(FsdpWorker):
    def load(self, path: Path) -> None:
        super().load(path)
        self._version = 0


class PendingGradientsKept(FsdpWorker):
    def load(self, path: Path) -> None:
        kept = [None if p.grad is None else p.grad.clone() for p in parameters_of(self).values()]
        super().load(path)
        for parameter, gradient in zip(parameters_of(self).values(), kept, strict=True):
            parameter.grad = gradient


class PendingGradientsKeptByWeights(FsdpWorker):
    """Gradients are cleared only by a load that includes the optimizer."""

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        kept = {name: p.grad for name, p in trained_of(self).items()}, self._has_gradients
        super().load(path, optimizer=optimizer)
        if not optimizer:
            gradients, self._has_gradients = kept
            for name, parameter in trained_of(self).items():
                parameter.grad = gradients[name]


class WholeParametersKept(FsdpWorker):
    """A load keeps layers gathered by a forward pass that no backward pass followed."""

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        self._forget_whole_parameters = lambda: None  # type: ignore[method-assign]
        super().load(path, optimizer=optimizer)
        del self._forget_whole_parameters


class WholeParametersKeptByLoadOfWeights(WholeParametersKept):
    """Like `WholeParametersKept`, but only if the weights are loaded alone."""

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        (FsdpWorker if optimizer else WholeParametersKept).load(self, path, optimizer=optimizer)


class WholeParametersKeptByStep(FsdpWorker):
    """A step keeps layers gathered by a forward pass between the backward pass and the step."""

    def step(self, settings: AdamSettings | None = None) -> StepResult:
        self._forget_whole_parameters = lambda: None  # type: ignore[method-assign]
        try:
            return super().step(settings)
        finally:
            del self._forget_whole_parameters


class SaveClears(FsdpWorker):
    """A save clears the gradients, to free memory for its copies."""

    def save(self, path: Path) -> None:
        self._clear_gradients()
        super().save(path)


class MomentsLost(FsdpWorker):
    def load(self, path: Path) -> None:
        super().load(path)
        for states in self._optimizer.states.values():
            for state in states.values():
                state.zero_()
        self._optimizer.set_num_steps(0)


class MomentsKept(FsdpWorker):
    """The moments of a checkpoint are loaded only before the first step."""

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        own = [(state, state.clone()) for states in self._optimizer.states.values() for state in states.values()]
        num_steps = self._optimizer.num_steps
        super().load(path, optimizer=optimizer)
        if num_steps > 0:
            for state, value in own:
                state.copy_(value)


class CountLost(FsdpWorker):
    def load(self, path: Path, *, optimizer: bool = True) -> None:
        super().load(path, optimizer=optimizer)
        self._optimizer.set_num_steps(0)


class MomentsSavedInBfloat16(FsdpWorker):
    def load(self, path: Path, *, optimizer: bool = True) -> None:
        super().load(path, optimizer=optimizer)
        for states in self._optimizer.states.values():
            for state in states.values():
                state.copy_(state.bfloat16())


class NoConfig(FsdpWorker):
    def save(self, path: Path) -> None:
        super().save(path)
        if self.rank == 0:
            (path / "config.json").unlink()


class RanksRecorded(FsdpWorker):
    """Records on how many ranks a checkpoint was saved."""

    def save(self, path: Path) -> None:
        super().save(path)
        if self.rank == 0:
            (path / "ranks.json").write_text(json.dumps(self.world_size))
        dist.barrier()

    def ranks_of(self, path: Path) -> int:
        return int(json.loads((path / "ranks.json").read_text()))


class NotOnFewerRanks(RanksRecorded):
    def load(self, path: Path) -> None:
        if self.ranks_of(path) > self.world_size:
            raise CheckpointError("saved on more ranks")
        super().load(path)


class NotOnMoreRanks(RanksRecorded):
    def load(self, path: Path) -> None:
        if self.ranks_of(path) < self.world_size:
            raise CheckpointError("saved on fewer ranks")
        super().load(path)


class VersionFirst(FsdpWorker):
    def load(self, path: Path) -> None:
        if (path / "trainer.json").is_file():
            self._version = json.loads((path / "trainer.json").read_text())["version"]
        super().load(path)


@contextlib.contextmanager
def replaced(module: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    """During the block, a module has these functions instead of its own."""
    right = {name: getattr(module, name) for name in functions}
    vars(module).update(functions)
    try:
        yield
    finally:
        vars(module).update(right)


class MissingTensorsKept(FsdpWorker):
    """Tensors that a checkpoint lacks keep their values."""

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        right = checkpoint._read_shards

        def of_those_there(file: Path, tensors: Sequence[Any]) -> Any:
            with safe_open(file, framework="pt") as stored:
                names = set(stored.keys())
            return right(file, [part for part in tensors if part.layout.shapes.keys() <= names])

        with replaced(checkpoint, _read_shards=of_those_there, checksums_in=lambda _: {}):
            super().load(path, optimizer=optimizer)


class JsonErrorsEscape(FsdpWorker):
    """Errors of the library that reads a small file are not translated."""

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        if (path / "trainer.json").is_file():
            json.loads((path / "trainer.json").read_text())
        super().load(path, optimizer=optimizer)


class CountersGuessed(FsdpWorker):
    """Without readable counters, the weights are loaded as version 0."""

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        try:
            json.loads((path / "trainer.json").read_text())
        except json.JSONDecodeError:
            guessed = {"version": 0, "optimizer_steps": 0}
            with replaced(checkpoint, _read_counters=lambda _: guessed, checksums_in=lambda _: {}):
                return super().load(path, optimizer=optimizer)
        except OSError:
            pass
        return super().load(path, optimizer=optimizer)


class SmallFileEscapes(FsdpWorker):
    """Errors in writing a small file are not translated."""

    def save(self, path: Path) -> None:
        path.with_name(f"{path.name}.version").write_text(str(self._version))
        super().save(path)


class FailuresOfOthersIgnored(FsdpWorker):
    """Only the rank whose disk is full reports that a save failed."""

    def save(self, path: Path) -> None:
        try:
            super().save(path)
        except CheckpointError as error:
            if not re.search(r": rank \d+: .*No space left", str(error)):
                raise


class OverwritesInPlace(FsdpWorker):
    def save(self, path: Path) -> None:
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        super().save(path)


class RemovedBeforeRenamed(FsdpWorker):
    """The old checkpoint is removed once the new one is written, but not yet in its place."""

    def save(self, path: Path) -> None:
        fresh = path.with_name(f"{path.name}.fresh")
        super().save(fresh)
        if path.exists():
            shutil.rmtree(path)
        fresh.rename(path)


class FileByFile(FsdpWorker):
    """Files are replaced one by one, each atomically."""

    def save(self, path: Path) -> None:
        fresh = path.with_name(f"{path.name}.fresh")
        super().save(fresh)
        for file in sorted(it for it in fresh.rglob("*") if it.is_file()):
            (path / file.relative_to(fresh)).parent.mkdir(parents=True, exist_ok=True)
            file.rename(path / file.relative_to(fresh))
        shutil.rmtree(fresh)


class OptimizerLast(FsdpWorker):
    """The optimizer's file follows once the rest is in its place, and until then load() does without it."""

    def save(self, path: Path) -> None:
        aside = path.with_name(f"{path.name}.optimizer")
        super().save(path)
        (path / "trainer" / "optimizer.safetensors").rename(aside)
        aside.rename(path / "trainer" / "optimizer.safetensors")

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        if (path / "trainer" / "optimizer.safetensors").exists() or not path.exists():
            return super().load(path, optimizer=optimizer)
        super().load(path, optimizer=False)
        self._version = json.loads((path / "trainer.json").read_text())["version"]
        return None


class LeavesALock(FsdpWorker):
    """A save that has ended in the middle looks like one that is under way."""

    def save(self, path: Path) -> None:
        lock = path.with_name(f"{path.name}.lock")
        try:
            lock.touch(exist_ok=False)
        except FileExistsError as error:
            raise CheckpointError(f"{path} is being saved by another process") from error
        super().save(path)
        lock.unlink()


class TrustsLeftovers(FsdpWorker):
    """What an earlier save had written is taken for this one's."""

    def save(self, path: Path) -> None:
        fresh = path.with_name(f".{path.name}.new")
        if (fresh / "trainer.json").exists():
            fresh.rename(path)
        else:
            super().save(path)


class OldRemovedFirst(FsdpWorker):
    """A save begins by removing what earlier saves have left next to the path."""

    def save(self, path: Path) -> None:
        if self.rank == 0:
            for left in path.parent.glob(f".{path.name}.*"):
                shutil.rmtree(left)
        super().save(path)


class LeftoverPreferred(FsdpWorker):
    """A previous checkpoint that an interrupted save left next to the path is loaded instead of the one at the path."""

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        previous = path.with_name(f".{path.name}.old")
        super().load(previous if previous.exists() else path, optimizer=optimizer)


class LiveStateSaved(FsdpWorker):
    """A save in the background does not copy the state first."""

    def begin_save(self, path: Path) -> None:
        with replaced(background, copy_to_host=lambda state: state):
            super().begin_save(path)


class LiveLoraSaved(FsdpLoraWorker):
    """A save in the background copies everything but the LoRA first."""

    def begin_save(self, path: Path) -> None:
        copy = background.copy_to_host
        with replaced(background, copy_to_host=lambda state: replace(copy(state), lora=state.lora)):
            super().begin_save(path)


class FailureSwallowed(FsdpWorker):
    def finish_save(self, timeout_s: float) -> None:
        try:
            super().finish_save(timeout_s)
        except CheckpointError:
            if self.save_pending:
                raise


class NeverPending(FsdpWorker):
    @property
    def save_pending(self) -> bool:
        return False


class FinishedAtOnce(FsdpWorker):
    """`finish_save` does not wait."""

    def finish_save(self, timeout_s: float) -> None:
        if not self.save_pending:
            super().finish_save(timeout_s)


class SavedAtTheEnd(FsdpWorker):
    """`begin_save` only notes the path, and `finish_save` saves."""

    _begun: Path | None = None

    def begin_save(self, path: Path) -> None:
        self._begun = path

    def finish_save(self, timeout_s: float) -> None:
        path, self._begun = self._begun, None
        if path is not None:
            self.save(path)

    @property
    def save_pending(self) -> bool:
        return self._begun is not None


# ---------------------------------------------------------------------------------------------------------------
# LoRA


class AttentionOnly(FsdpLoraWorker):
    """Targets in MLPs are left out."""

    def __init__(self, config: WorkerConfig, *arguments: Any, **others: Any) -> None:
        assert config.lora is not None
        targets = tuple(target for target in config.lora.targets if target != "down_proj")
        attention = config.lora.model_copy(update={"targets": targets})
        super().__init__(config.model_copy(update={"lora": attention}), *arguments, **others)


class AdapterDescribed(FsdpLoraWorker):
    """`described` changes what adapter_config.json contains."""

    def _state(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> checkpoint.TrainerState:
        state = super()._state(states)
        changed = json.loads(state.lora_config) | self.described()
        return replace(state, lora_config=json.dumps(changed))

    def described(self) -> dict[str, object]:
        return {"lora_alpha": self.lora_spec().scale}


class AlphaCut(AdapterDescribed):
    def described(self) -> dict[str, object]:
        return {"lora_alpha": int(self.lora_spec().alpha)}


class TargetsOfAdapterLost(AdapterDescribed):
    def described(self) -> dict[str, object]:
        return {"target_modules": ["q_proj", "v_proj"]}


class LoraKeptOnceTrained(FsdpLoraWorker):
    """A load replaces only a LoRA that has not been trained."""

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        kept = [parameter.to_local().clone() for parameter in trained_of(self).values()] if self._version else []
        super().load(path, optimizer=optimizer)
        with torch.no_grad():
            for parameter, old in zip(trained_of(self).values(), kept, strict=False):
                parameter.to_local().copy_(old)


class DropoutContinued(FsdpLoraWorker):
    """A load does not reset the number of forward passes, which seeds dropout."""

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        num_forwards = self._num_forwards
        super().load(path, optimizer=optimizer)
        self._num_forwards = num_forwards


class MergedBySave(FsdpLoraWorker):
    """A save merges the LoRA into the base weights in place."""

    @torch.no_grad()
    def _merge_part(self, name: str) -> ShardedTensor:
        part = super()._merge_part(name)
        self._parameters.sharded(name).local.copy_(part.local)
        return part


class MergedOnce(FsdpLoraWorker):
    """A source of merged weights keeps those of its first use."""

    def merged(self, bucket_bytes: int) -> PartialWeightSource:
        source, kept = super().merged(bucket_bytes), list[WeightBucket]()
        right = source.gather_weights

        def gather(buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
            kept.extend([] if kept else right(buckets))
            return iter(kept)

        source.gather_weights = gather  # type: ignore[method-assign]
        return source


class MergedAtScaleOne(FsdpLoraWorker):
    """Merged weights include the product of B and A without its scale."""

    def merged(self, bucket_bytes: int) -> PartialWeightSource:
        source: Any = super().merged(bucket_bytes)
        plain = SimpleNamespace(
            lora_spec=lambda: LoraSpec(rank=self._lora.rank, alpha=self._lora.rank), gather_weights=self.gather_weights
        )
        source._source = plain
        return source  # type: ignore[no-any-return]


class AlphaIgnored(FsdpLoraWorker):
    """Adds the product of A and B as if alpha were the rank."""

    def __init__(self, config: WorkerConfig, *arguments: Any, **others: Any) -> None:
        assert config.lora is not None
        plain = config.lora.model_copy(update={"alpha": float(config.lora.rank)})
        super().__init__(config.model_copy(update={"lora": plain}), *arguments, **others)
        self._lora = config.lora


class HalfTrained(FsdpLoraWorker):
    """A has no gradient."""

    def step(self) -> StepResult:
        for name, parameter in trained_of(self).items():
            if "lora_A" in name and parameter.grad is not None:
                parameter.grad = None
        return super().step()


class BaseDecays(FsdpLoraWorker):
    """Weight decay reaches weights that are not trained."""

    def step(self) -> StepResult:
        result = super().step()
        with torch.no_grad():
            for name, parameter in parameters_of(self).items():
                if name.endswith("norm.weight"):
                    parameter.to_local().mul_(0.99)
        return result


class MergedAtEachStep(FsdpLoraWorker):
    """The LoRA is merged into the base weights at every step, and training continues from there."""

    def step(self) -> StepResult:
        result = super().step()
        with torch.no_grad():
            for layer in self._changed:
                name = f"{layer}.weight"
                parameters_of(self)[name].to_local().copy_(self._merge_part(name).local)
        return result


class NormsGathered(FsdpLoraWorker):
    """Publishes the norms of the base in addition to the LoRA."""

    def parameter_specs(self) -> Sequence[TensorSpec]:
        norms = [n for n in self._parameters.layouts if n.endswith("norm.weight")]
        more = [TensorSpec(name=n, dtype="float32", shape=self._parameters.shardings[n].shape) for n in norms]
        return [*super().parameter_specs(), *more]


class LoraOfNoise(FsdpLoraWorker):
    """B begins at random, so that a new LoRA changes the model."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        with torch.no_grad():
            for name, parameter in trained_of(self).items():
                if "lora_B" in name:
                    parameter.to_local().fill_(0.01)


class SameVersionNotLoaded(FsdpWorker):
    """The weights of a checkpoint are not loaded if it has the version of the worker."""

    def load(self, path: Path, **others: Any) -> None:
        version = self.version
        kept = [parameter.to_local().clone() for parameter in parameters_of(self).values()]
        super().load(path, **others)
        if self.version == version:
            with torch.no_grad():
                for parameter, old in zip(parameters_of(self).values(), kept, strict=True):
                    parameter.to_local().copy_(old)


class LoraOfEqualRows(FsdpLoraWorker):
    """All rows of each matrix A are equal."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        with torch.no_grad():
            for name, parameter in trained_of(self).items():
                local = parameter.to_local()
                if "lora_A" in name and len(local):
                    local.copy_(local[:1].expand_as(local).clone())


class LoraKeptByVersion(FsdpLoraWorker):
    """Rank 0 keeps what it gathered last, and gathers again only once the version has changed."""

    _kept: tuple[int, list[WeightBucket]] = (-1, [])

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        if self._kept[0] != self.version:
            found = list(super().gather_weights(buckets))
            self._kept = self.version, [replace(it, tensors=tuple(t.clone() for t in it.tensors)) for it in found]
        return iter(self._kept[1])


class LoraNotRead(FsdpLoraWorker):
    """Reads only the counters: the weights next to config.json are those of the base."""

    def load(self, path: Path) -> None:
        kept = [parameter.to_local().clone() for parameter in trained_of(self).values()]
        super().load(path)
        with torch.no_grad():
            for parameter, old in zip(trained_of(self).values(), kept, strict=True):
                parameter.to_local().copy_(old)


class NoAdapterFiles(FsdpLoraWorker):
    """Keeps its LoRA in a place that no other program reads."""

    def save(self, path: Path) -> None:
        super().save(path)
        if self.rank == 0:
            (path / "adapter").rename(path / "own")

    def load(self, path: Path) -> None:
        if self.rank == 0:
            (path / "own").rename(path / "adapter")
        super().load(path)
        if self.rank == 0:
            (path / "adapter").rename(path / "own")


@dataclass(frozen=True)
class Mutant:
    kind: type[FsdpWorker]
    caught_by: str
    fault: str
    num_ranks: int = 1
    hangs: bool = False


# ---------------------------------------------------------------------------------------------------------------
# Given targets


class FirstTargetOnly(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        if batch.target_ids_TK is not None:
            batch = replace(batch, target_ids_TK=batch.target_ids_TK[:, :1].expand_as(batch.target_ids_TK))
        return super().forward(batch)


class FirstTargetLearns(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        logprobs = super().forward(batch)
        if batch.target_ids_TK is None:
            return logprobs
        return torch.cat([logprobs[:, :1], logprobs[:, 1:].detach()], dim=1)


class TargetsAtTemperatureOne(FsdpWorker):
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        if batch.target_ids_TK is not None:
            batch = replace(batch, temperature_T=torch.ones_like(batch.temperature_T))
        return super().forward(batch)


class TargetsIgnored(FsdpWorker):
    @property
    def scores_target_ids(self) -> bool:
        return False

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        return super().forward(replace(batch, target_ids_TK=None))


# ---------------------------------------------------------------------------------------------------------------
# Settings of a step


class RateOnly(FsdpWorker):
    def step(self, settings: AdamSettings | None = None) -> StepResult:
        if settings is not None:
            own = self._config
            settings = replace(settings, betas=own.betas, eps=own.eps, weight_decay=own.weight_decay)
        return super().step(settings)


class ClipsAsConfigured(FsdpWorker):
    def step(self, settings: AdamSettings | None = None) -> StepResult:
        if settings is not None:
            settings = replace(settings, max_gradient_norm=self._config.max_gradient_norm)
        return super().step(settings)


class SettingsStick(FsdpWorker):
    """Later steps without settings use all of them except the learning rate and the clipping norm."""

    def step(self, settings: AdamSettings | None = None) -> StepResult:
        result = super().step(settings)
        if settings is not None:
            own = self._optimizer._own_settings
            own.update({name: getattr(settings, name) for name in own})
        return result


class _Sticks(FsdpWorker):
    """Later steps without settings use a part of the last settings; the configured learning rate is reported."""

    _latest: AdamSettings | None = None

    def step(self, settings: AdamSettings | None = None) -> StepResult:
        self._latest = settings or self._latest
        if settings is not None or self._latest is None:
            return super().step(settings)
        own, rate = self._config, learning_rate_at(self._version, self._config)
        configured = AdamSettings(rate, own.betas, own.eps, own.weight_decay, own.max_gradient_norm)
        return replace(super().step(self.mixed(configured, self._latest)), learning_rate=rate)

    def mixed(self, configured: AdamSettings, latest: AdamSettings) -> AdamSettings:
        raise NotImplementedError


class RateSticks(_Sticks):
    def mixed(self, configured: AdamSettings, latest: AdamSettings) -> AdamSettings:
        return replace(configured, learning_rate=latest.learning_rate)


class BetasStick(_Sticks):
    def mixed(self, configured: AdamSettings, latest: AdamSettings) -> AdamSettings:
        return replace(configured, betas=latest.betas)


class KeepsMoments(FsdpWorker):
    def load(self, path: Path, *, optimizer: bool = True) -> None:
        super().load(path)
        self._version = self._version if optimizer else 0


class KeepsTheVersion(FsdpWorker):
    def load(self, path: Path, *, optimizer: bool = True) -> None:
        version = self._version
        super().load(path, optimizer=optimizer)
        self._version = self._version if optimizer else version


class SettingsIgnored(FsdpWorker):
    @property
    def takes_step_settings(self) -> bool:
        return False

    def step(self, settings: AdamSettings | None = None) -> StepResult:
        return super().step()


# ---------------------------------------------------------------------------------------------------------------
# Edges: second calls, zeros, and what happens between two calls


class ManySegmentsMerged(FsdpWorker):
    """Segments after the first 64 of a micro-batch are one segment."""

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        lengths = batch.segment_lengths
        if len(lengths) > 64:
            batch = replace(batch, segment_lengths=(*lengths[:64], sum(lengths[64:])))
        return super().forward(batch)


class LaterChunksUnlearned(FsdpWorker):
    """Only the first 1,024 targets of a micro-batch have a gradient."""

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        logprobs_T = super().forward(batch)
        if logprobs_T.dim() == 2:
            return logprobs_T
        is_first_T = batch.loss_mask_T.cumsum(0) <= 1024
        return torch.where(is_first_T, logprobs_T, logprobs_T.detach())


class UnscaledAfterOne(FsdpWorker):
    """If the first target has temperature 1, no target is scaled."""

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        first_T = batch.temperature_T[batch.loss_mask_T]
        if len(first_T) and first_T[0] == 1:
            batch = replace(batch, temperature_T=torch.ones_like(batch.temperature_T))
        return super().forward(batch)


class PartsAddedTwice(FsdpWorker):
    """Targets in the first 4,096 tokens of the vocabulary have their gradient in the following part as well."""

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        logprobs_T = super().forward(batch)
        if logprobs_T.dim() == 2 or int(batch.token_ids_T.max()) < 4096:
            return logprobs_T
        is_early_T = batch.token_ids_T < 4096
        return torch.where(is_early_T, 2.0 * logprobs_T - logprobs_T.detach(), logprobs_T)


class CancellingUnlearned(FsdpWorker):
    """Positions whose targets' gradients add up to zero have none."""

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        logprobs_TK = super().forward(batch)
        if logprobs_TK.dim() == 2:
            logprobs_TK.register_hook(lambda grad_TK: grad_TK * (grad_TK.sum(1, keepdim=True).abs() > 1e-6))
        return logprobs_TK


class GatherClears(FsdpWorker):
    """A gather clears the gradients, to free memory for its copies."""

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        self._parameters.clear_gradients()
        return super().gather_weights(buckets)


class WarmUpOfDecaysOnly(ReportedAtRate):
    """The constant schedule has no warm-up."""

    def rate(self) -> float:
        config = self._config
        return config.learning_rate if config.schedule == "constant" else learning_rate_at(self._version, config)


class WarmUpOfOneAtLeast(WarmUpOfDecaysOnly):
    """A schedule without a warm-up decays as if it had one of a single step."""

    def rate(self) -> float:
        config = self._config
        return learning_rate_at(self._version, config.model_copy(update={"warmup_steps": max(1, config.warmup_steps)}))


class ZeroSettingsIgnored(FsdpWorker):
    """A weight decay of 0 in the settings of a step stands for the worker's own."""

    def step(self, settings: AdamSettings | None = None) -> StepResult:
        if settings is not None:
            settings = replace(settings, weight_decay=settings.weight_decay or self._config.weight_decay)
        return super().step(settings)


class ZeroRateIgnored(FsdpWorker):
    """A learning rate of 0 in the settings of a step stands for the worker's own."""

    def step(self, settings: AdamSettings | None = None) -> StepResult:
        if settings is not None:
            settings = replace(settings, learning_rate=settings.learning_rate or self._config.learning_rate)
        return super().step(settings)


class NoStepsNotResumed(FsdpWorker):
    """The number of steps in a checkpoint is not loaded if it is 0."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        right = self._optimizer.resume
        self._optimizer.resume = lambda states, count: right(states, count) if count else None  # type: ignore


class TiedHeadScaledByLoad(FsdpWorker):
    """After a load, a tied head scales its logits."""

    _is_loaded = False

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        self._is_loaded = self._version > 0
        super().load(path, optimizer=optimizer)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        factor = math.sqrt(32) if self._is_loaded and is_tied(self) else 1.0
        return super().forward(replace(batch, temperature_T=batch.temperature_T * factor))


class OptimizerResetFirst(FsdpWorker):
    """A load begins by resetting the optimizer, whether or not the checkpoint can be read."""

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        self._optimizer.reset()
        super().load(path, optimizer=optimizer)


class OptimizerResetBeforeWeights(FsdpWorker):
    """A load of the weights alone resets the optimizer before it reads them."""

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        if not optimizer:
            self._optimizer.reset()
        super().load(path, optimizer=optimizer)


class StepsWithSettingsUncounted(RateOfTheNextStep):
    """The schedule does not count steps with settings."""

    _num_uncounted = 0

    def step(self, settings: AdamSettings | None = None) -> StepResult:
        result = super().step(settings)
        self._num_uncounted += settings is not None
        return result

    def counted(self) -> int:
        return self._version - self._num_uncounted


class ReadByOne(FsdpWorker):
    """The end of one iterator of `local_weights` counts as the end of all."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        readers = self._readers
        reading = readers.reading

        @contextlib.contextmanager
        def one_reading() -> Iterator[None]:
            with reading():
                try:
                    yield
                finally:
                    readers._num_readers = 1

        readers.reading = one_reading  # type: ignore[method-assign]


class LeavesInterruptedSaves(FsdpWorker):
    """A save does not remove the files that an interrupted save has left."""

    def save(self, path: Path) -> None:
        left = path.with_name(f".{path.name}.new")
        if self.rank == 0 and left.exists():
            left.rename(path.with_name(f".{path.name}.left"))
        super().save(path)


class SingleTargetSqueezed(FsdpWorker):
    """Logprobs of one given token per position have one dimension."""

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        logprobs = super().forward(batch)
        return logprobs.squeeze(1) if batch.target_ids_TK is not None else logprobs


class FullContextRefused(FsdpWorker):
    """A segment with as many tokens as the model has positions is refused."""

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        if max(batch.segment_lengths) >= 2048:
            raise TrainerError("a segment is longer than the model's context")
        return super().forward(batch)


class PartlyRecordedIsFree(FsdpWorker):
    """A token without recorded experts in one layer is routed freely in all layers."""

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        if (experts_TLK := batch.routed_experts_TLK) is not None:
            is_free_T11 = (experts_TLK == FREE_EXPERT).flatten(1).any(1)[:, None, None]
            batch = replace(batch, routed_experts_TLK=experts_TLK.masked_fill(is_free_T11, FREE_EXPERT))
        return super().forward(batch)


class MomentsFoundOnce(FsdpWorker):
    """Saves and loads use the moments that existed when they were first looked up."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        optimizer: Any = self._optimizer
        kind, found = type(optimizer), dict[str, Any]()
        states = property(lambda it: found.setdefault("states", kind.states.fget(it)))
        optimizer.__class__ = type("Remembering", (kind,), {"states": states})


class LoadsWeightsDuringReads(FsdpWorker):
    """A load of the weights alone does not wait for open iterators over the weights."""

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        wait = self._readers.wait
        if not optimizer:
            self._readers.wait = lambda *arguments: None  # type: ignore[method-assign]
        try:
            super().load(path, optimizer=optimizer)
        finally:
            self._readers.wait = wait  # type: ignore[method-assign]


class LoadsWeightsDuringSaves(FsdpWorker):
    """A load of the weights alone does not wait for a background save."""

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        wait = self._saves.wait
        if not optimizer:
            self._saves.wait = lambda *arguments: None  # type: ignore[method-assign]
        try:
            super().load(path, optimizer=optimizer)
        finally:
            self._saves.wait = wait  # type: ignore[method-assign]


class LeavesSavesOfOtherProcesses(FsdpWorker):
    """A save does not remove the files that an interrupted save of another process has left."""

    def save(self, path: Path) -> None:
        left = path.with_name(f".{path.name}.new")
        if self.rank == 0 and os.getpid() != _PROCESS and left.exists():
            left.rename(path.with_name(f".{path.name}.{_PROCESS}.new"))
        super().save(path)


class KeepsTheOldOne(FsdpWorker):
    """A save does not remove the checkpoint that it replaces."""

    def save(self, path: Path) -> None:
        is_there = path.exists()
        super().save(path)
        if self.rank == 0 and is_there:
            shutil.copytree(path, path.with_name(f".{path.name}.replaced"), dirs_exist_ok=True)


class LoadedByThoseThatCan(FsdpWorker):
    """A rank that cannot read a checkpoint does not keep the others from loading it."""

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        with replaced(checkpoint, first_failure=lambda failure, device, group=None: failure):
            super().load(path, optimizer=optimizer)


class LoadsDuringASave(FsdpWorker):
    """A load does not wait for a save in the background."""

    def load(self, path: Path, *, optimizer: bool = True) -> None:
        self._saves.wait = lambda: None  # type: ignore[method-assign]
        super().load(path, optimizer=optimizer)
        del self._saves.wait


class SecondSaveDropped(FsdpWorker):
    """A save in the background that begins during another one is dropped."""

    def begin_save(self, path: Path) -> None:
        if not self.save_pending:
            super().begin_save(path)


class LoadsWhileRead(FsdpWorker):
    """A load does not wait for what is being read."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        wait = self._readers.wait
        self._readers.wait = lambda what: None if what == "loading" else wait(what)  # type: ignore[method-assign]


class WaitsForClosed(FsdpWorker):
    """A step waits for a read that was closed early."""

    def local_weights(self, buckets: Sequence[BucketSpec]) -> Generator[WeightBucket, None, None]:
        reading = self._readers.reading()
        vars(self).setdefault("never_collected", []).append(reading)
        reading.__enter__()
        yield from self._parameters.local(self.parameter_specs(), buckets)
        reading.__exit__(None, None, None)

    def step(self, settings: AdamSettings | None = None) -> StepResult:
        return super().step(settings)


class LongMessagesCut(FsdpWorker):
    """An exchange transfers no more than 4 KiB of each message."""

    def exchange(self, message: bytes, timeout_s: float) -> Sequence[bytes]:
        return super().exchange(message[:4096], timeout_s)


class DropoutIgnored(FsdpLoraWorker):
    """Dropout is configured but never applied."""

    def __init__(self, config: WorkerConfig, *arguments: Any, **others: Any) -> None:
        assert config.lora is not None
        settings = config.lora.model_copy(update={"dropout": 0.0})
        super().__init__(config.model_copy(update={"lora": settings}), *arguments, **others)


class SameDropoutAgain(FsdpLoraWorker):
    """Every forward pass applies the same dropout."""

    def _compute(self, rows: Sequence[Row]) -> torch.Tensor:
        self._num_forwards = 0
        return super()._compute(rows)


class SameDropoutEachStep(FsdpLoraWorker):
    """The forward passes of every step apply the dropout of the first step."""

    _is_computing = False

    @property
    def version(self) -> int:
        return 0 if self._is_computing else super().version

    def _compute(self, rows: Sequence[Row]) -> torch.Tensor:
        self._is_computing = True
        try:
            return super()._compute(rows)
        finally:
            self._is_computing = False


class SeedIgnored(FsdpLoraWorker):
    """A new LoRA does not depend on the seed."""

    def __init__(self, config: WorkerConfig, *arguments: Any, **others: Any) -> None:
        assert config.lora is not None
        settings = config.lora.model_copy(update={"seed": 0})
        super().__init__(config.model_copy(update={"lora": settings}), *arguments, **others)


MUTANTS = {
    "version_of_one": Mutant(VersionOfOne, "W-01", "a new worker is at version 1"),
    "specs_with_barrier": Mutant(
        SpecsWithBarrier, "W-02", "`parameter_specs` waits for all ranks", num_ranks=2, hangs=True
    ),
    "wrappers_in_names": Mutant(WrappersInNames, "W-03", "names carry the prefix of torch.compile"),
    "half_precision": Mutant(HalfPrecision, "W-04", "logprobs are rounded to bfloat16"),
    "tied_head_scaled": Mutant(TiedHeadScaled, "W-05", "a tied head scales its logits"),
    "temperature_ignored": Mutant(TemperatureIgnored, "W-06", "logprobs are computed at temperature 1"),
    "temperature_after_softmax": Mutant(
        TemperatureAfterSoftmax, "W-06", "logprobs, not logits, are divided by the temperature"
    ),
    "first_chunks_temperatures": Mutant(
        FirstChunksTemperatures, "W-06", "each chunk of 1,024 targets has the temperatures of the first chunk"
    ),
    "logits_clamped": Mutant(LogitsClamped, "W-04", "logits are clamped at 50"),
    "logits_soft_capped": Mutant(LogitsSoftCapped, "W-04", "logits are soft-capped at 100"),
    "logprobs_bounded": Mutant(LogprobsBounded, "W-04", "no logprob is below -80"),
    "probabilities_shifted": Mutant(ProbabilitiesShifted, "W-04", "1e-10 is added to probabilities"),
    "largest_logit_from_zero": Mutant(
        LargestLogitFromZero, "W-04", "the maximum that is subtracted from logits is at least 0"
    ),
    "gradient_unshifted": Mutant(
        GradientUnshifted, "W-15", "the gradient is computed from exponentials that overflow for large logits"
    ),
    "temperature_bounded": Mutant(TemperatureBounded, "W-06", "temperatures are at least 0.1 and at most 2"),
    "shift_by_one": Mutant(ShiftedByOne, "W-07", "index t holds the logprob of token t + 1"),
    "mask_ignored": Mutant(MaskIgnored, "W-08", "every token has a logprob"),
    "batch_dimension": Mutant(BatchDimension, "W-09", "the shape is [1, T]"),
    "float16_logprobs": Mutant(Float16Logprobs, "W-09", "logprobs are float16"),
    "detached": Mutant(Detached, "W-10", "logprobs have no gradient"),
    "positions_lost": Mutant(PositionsLost, "W-11", "positions after the first segment are all 0"),
    "leak": Mutant(Leak, "W-12", "segments attend to earlier segments"),
    "prefixes_by_last_token": Mutant(
        PrefixesByLastToken, "W-62", "tokens share a prefix if they are equal and have equal positions"
    ),
    "first_of_shared_only": Mutant(
        FirstOfSharedOnly, "W-62", "only one of the segments that share a prefix has a gradient"
    ),
    "trees_by_shape": Mutant(
        TreesByShape, "W-79", "the tree of shared prefixes is cached by segment lengths and number of computed tokens"
    ),
    "siblings_seen": Mutant(SiblingsSeen, "W-62", "segments that share a prefix see each other"),
    "images_reversed": Mutant(ImagesReversed, "W-46", "the last image of a micro-batch fills the first placeholders"),
    "images_by_place": Mutant(
        ImagesByPlace, "W-46", "images after a shared prefix are shifted by the tokens that are not computed again"
    ),
    "tower_frozen": Mutant(TowerFrozen, "W-46", "the vision tower gets no gradient"),
    "experts_of_the_token_before": Mutant(
        ExpertsOfTheTokenBefore, "W-60", "each token is computed with the experts of the token before it"
    ),
    "experts_by_place": Mutant(
        ExpertsByPlace, "W-60", "recorded experts after a shared prefix are those of other tokens"
    ),
    "router_frozen": Mutant(RouterFrozen, "W-60", "the routers get no gradient"),
    "experts_ignored": Mutant(ExpertsIgnored, "W-61", "a worker that cannot replay recorded experts ignores them"),
    "leaky_gradient": Mutant(LeakyGradient, "W-13", "only the backward pass sees other segments"),
    "constant_for_nothing": Mutant(
        ConstantForNothing, "W-14", "`forward` returns a constant without a gradient for a batch without targets"
    ),
    "tiny_gradients_skipped": Mutant(
        TinyGradientsSkipped, "W-15", "targets with gradients of at most 1e-6 are skipped"
    ),
    "gradient_at_temperature_1": Mutant(
        GradientAtTemperatureOne, "W-15", "the gradient of the logits is not divided by the temperature"
    ),
    "norm_after_clipping": Mutant(NormAfterClipping, "W-15", "the reported gradient norm is the norm after clipping"),
    "tied_head_detached": Mutant(TiedHeadDetached, "W-16", "a tied head gives the embedding no gradient"),
    "first_target_only": Mutant(FirstTargetOnly, "W-66", "only the first of the given tokens is scored"),
    "first_target_learns": Mutant(FirstTargetLearns, "W-66", "only the first of the given tokens has a gradient"),
    "targets_at_temperature_one": Mutant(TargetsAtTemperatureOne, "W-66", "given tokens are scored at temperature 1"),
    "targets_ignored": Mutant(TargetsIgnored, "W-67", "a worker that does not support target ids ignores them"),
    "rate_only": Mutant(RateOnly, "W-63", "of the settings of a step, only the learning rate is used"),
    "clips_as_configured": Mutant(
        ClipsAsConfigured, "W-63", "gradients are clipped to the worker's configured norm instead of the step's"
    ),
    "settings_stick": Mutant(
        SettingsStick,
        "W-63",
        "later steps without settings use the weight decay, betas and epsilon of the last settings",
    ),
    "rate_sticks": Mutant(
        RateSticks, "W-63", "later steps without settings use the learning rate of the last settings"
    ),
    "betas_stick": Mutant(BetasStick, "W-63", "later steps without settings use the betas of the last settings"),
    "keeps_moments": Mutant(KeepsMoments, "W-64", "a load without the optimizer also loads the optimizer's state"),
    "whole_parameters_kept_by_load_of_weights": Mutant(
        WholeParametersKeptByLoadOfWeights,
        "W-64",
        "a load of the weights alone keeps parameters that an earlier forward pass gathered",
        num_ranks=2,
    ),
    "keeps_the_version": Mutant(KeepsTheVersion, "W-64", "a load without the optimizer does not change the version"),
    "settings_ignored": Mutant(
        SettingsIgnored, "W-65", "a worker that does not support settings of a step ignores them"
    ),
    "micro_batch_mean": Mutant(MicroBatchMean, "W-17", "gradients are averaged over micro-batches"),
    "rank_mean": Mutant(RankMean, "W-18", "gradients are averaged over ranks", num_ranks=2),
    "busy_ranks_only": Mutant(
        BusyRanksOnly, "W-19", "gradients are multiplied by the ratio of all ranks to ranks with targets", num_ranks=2
    ),
    "local_clipping": Mutant(LocalClipping, "W-20", "each rank clips by the norm of its own shards", num_ranks=2),
    "counted_by_each": Mutant(
        CountedByEach, "W-45", "the gradients of ranks that compute the same micro-batches are summed", num_ranks=2
    ),
    "later_forward_only": Mutant(
        LaterForwardOnly, "W-42", "of two forward passes, only the backward pass of the later one counts"
    ),
    "stale_result": Mutant(StaleResult, "W-21", "a step reports the previous version"),
    "norm_of_one_rank": Mutant(NormOfOneRank, "W-21", "each rank reports the norm of its own shards", num_ranks=2),
    "no_update": Mutant(NoUpdate, "W-22", "a step changes no weight"),
    "gradients_kept": Mutant(GradientsKept, "W-23", "a step does not clear the gradients"),
    "empty_step": Mutant(EmptyStep, "W-24", "a step without a gradient increments the version"),
    "non_finite_skipped": Mutant(NonFiniteSkipped, "W-25", "a NaN gradient is silently skipped"),
    "non_finite_zeroed": Mutant(NonFiniteZeroed, "W-25", "NaNs in gradients become 0"),
    "non_finite_counted": Mutant(NonFiniteCounted, "W-25", "the optimizer counts the refused step"),
    "refused_gradients_kept": Mutant(RefusedGradientsKept, "W-25", "gradients of a refused step are kept"),
    "refused_step_forgets": Mutant(RefusedStepForgets, "W-25", "a refused step resets the optimizer"),
    "non_finite_on_one_rank": Mutant(
        NonFiniteOnOneRank, "W-25", "only the rank with the NaN raises an error", num_ranks=2
    ),
    "refused_steps_scheduled": Mutant(RefusedStepsScheduled, "W-25", "the schedule counts refused steps"),
    "overflow_taken": Mutant(OverflowTaken, "W-43", "an infinite gradient norm is treated as finite"),
    "zeros_kept": Mutant(ZerosKept, "W-24", "gradients are zeroed after a step, not removed"),
    "zeros_kept_if_refused": Mutant(ZerosKeptIfRefused, "W-25", "gradients of a refused step are zeroed, not removed"),
    "never_clips": Mutant(NeverClips, "W-74", "gradients are never clipped"),
    "clips_each_tensor": Mutant(ClipsEachTensor, "W-74", "each tensor's gradient is clipped by its own norm"),
    "clips_elements": Mutant(ClipsElements, "W-74", "each element of the gradient is clipped"),
    "clips_by_largest": Mutant(ClipsByLargest, "W-74", "gradients are clipped by their largest element"),
    "clips_twice_the_norm": Mutant(
        ClipsTwiceTheNorm, "W-74", "gradients are clipped to a norm of 2 instead of the configured one"
    ),
    "clips_to_one": Mutant(ClipsToOne, "W-74", "gradients are clipped to a norm of 1, regardless of the configuration"),
    "none_clips_to_one": Mutant(
        NoneClipsToOne, "W-74", "gradients are clipped to a norm of 1 if `max_gradient_norm` is None"
    ),
    "zero_norm_divides": Mutant(ZeroNormDivides, "W-74", "a gradient of 0 is divided by its norm"),
    "zero_steps_skipped": Mutant(ZeroStepsSkipped, "W-74", "a step with a gradient of 0 changes nothing"),
    "gradients_in_bfloat16": Mutant(GradientsInBfloat16, "W-74", "gradients are bfloat16"),
    "optimizer_anew": Mutant(OptimizerAnew, "W-74", "every step begins without moments"),
    "large_epsilon": Mutant(LargeEpsilon, "W-74", "epsilon is 1e-4"),
    "moments_in_bfloat16": Mutant(MomentsInBfloat16, "W-74", "moments are bfloat16"),
    "second_moments_in_bfloat16": Mutant(SecondMomentsInBfloat16, "W-74", "second moments are bfloat16"),
    "weights_in_bfloat16": Mutant(WeightsInBfloat16, "W-74", "weights are bfloat16 after each step"),
    "changes_in_bfloat16": Mutant(ChangesInBfloat16, "W-74", "the change of each step is rounded to bfloat16"),
    "tied_stepped_twice": Mutant(TiedSteppedTwice, "W-74", "tied weights are stepped twice"),
    "head_not_stepped": Mutant(HeadNotStepped, "W-74", "the head has a gradient but never changes"),
    "norms_not_stepped": Mutant(NormsNotStepped, "W-74", "norms have gradients but never change"),
    "rate_of_the_step_before": Mutant(SteppedAtRate, "W-74", "a step uses the learning rate of the previous step"),
    "first_rate_kept": Mutant(FirstRateKept, "W-74", "the learning rate of the schedule is reported but not used"),
    "no_bias_correction": Mutant(NoBiasCorrection, "W-74", "moments are not corrected for their initial value of 0"),
    "decay_of_torch": Mutant(DecayOfTorch, "W-74", "weights decay by 0.01, regardless of the configuration"),
    "no_decay": Mutant(NoDecay, "W-74", "weights do not decay, regardless of the configuration"),
    "rows_left_out": Mutant(
        RowsLeftOut, "W-74", "rows of the embedding without a gradient in a step do not change in that step"
    ),
    "decay_coupled": Mutant(DecayCoupled, "W-74", "weight decay is added to the gradient"),
    "betas_exchanged": Mutant(BetasExchanged, "W-74", "the two betas are exchanged"),
    "rate_of_the_next_step": Mutant(RateOfTheNextStep, "W-75", "the schedule is one step ahead"),
    "warm_up_from_zero": Mutant(WarmUpFromZero, "W-75", "the schedule is one step behind"),
    "full_rate_after_the_end": Mutant(
        FullRateAfterTheEnd, "W-75", "steps after `total_steps` have the full learning rate"
    ),
    "cosine_from_the_start": Mutant(
        CosineFromTheStart, "W-75", "the cosine has already fallen when the decay begins, as it starts with the warm-up"
    ),
    "schedule_stands_still": Mutant(ScheduleStandsStill, "W-75", "the schedule stays at its first step"),
    "wrong_dtype": Mutant(WrongDtype, "W-26", "tensors are bfloat16, but their specs are float32"),
    "index_lost": Mutant(IndexLost, "W-26", "every bucket has index 0"),
    "hang_in_gather": Mutant(HangInGather, "W-26", "rank 0 hangs between two buckets", num_ranks=2, hangs=True),
    "every_rank_holds": Mutant(EveryRankHolds, "W-27", "every rank holds full tensors", num_ranks=2),
    "head_dropped": Mutant(HeadDropped, "W-28", "`lm_head` of an untied model is not gathered"),
    "tied_head_twice": Mutant(TiedHeadTwice, "W-29", "a tied head is sent in addition to its embedding"),
    "tied_head_old": Mutant(TiedHeadOld, "W-29", "a tied embedding is gathered with its initial values"),
    "shared_staging": Mutant(SharedStaging, "W-30", "tensors of one shape share memory within a bucket"),
    "staging_reused": Mutant(StagingReused, "W-31", "all buckets share memory"),
    "parameters_yielded": Mutant(ParametersYielded, "W-32", "yielded tensors are the parameters themselves"),
    "gather_cached": Mutant(GatherCached, "W-33", "the second gather yields what the first one did"),
    "whole_parameters_kept_by_step": Mutant(
        WholeParametersKeptByStep,
        "W-33",
        "after a step, forward passes use parameters that were gathered between the backward pass and the step",
        num_ranks=2,
    ),
    "everything_first": Mutant(EverythingFirst, "W-34", "the whole model is gathered before the first bucket"),
    "shardings_with_barrier": Mutant(ShardingsWithBarrier, "W-68", "`shardings` waits for all ranks", 2, hangs=True),
    "own_rank_first": Mutant(OwnRankFirst, "W-68", "each rank lists itself first", num_ranks=2),
    "sent_twice": Mutant(SentTwice, "W-69", "two ranks send the same box", num_ranks=2),
    "sent_by_nobody": Mutant(SentByNobody, "W-69", "no rank sends a box", num_ranks=2),
    "first_rank_sends": Mutant(FirstRankSends, "W-69", "rank 0 sends the boxes that every rank holds", num_ranks=3),
    "reversed_shardings": Mutant(ReversedShardings, "W-70", "ranks are listed in reverse order", num_ranks=2),
    "equal_boxes_exchanged": Mutant(EqualBoxesExchanged, "W-70", "two boxes of one shape are exchanged", num_ranks=2),
    "boxes_uncast": Mutant(BoxesUncast, "W-70", "boxes are not in the wire dtype", num_ranks=2),
    "columns_as_rows": Mutant(ColumnsAsRows, "W-70", "columns are announced, but rows are sent", num_ranks=2),
    "local_with_barrier": Mutant(
        LocalWithBarrier, "W-71", "`local_weights` waits for all ranks", num_ranks=2, hangs=True
    ),
    "boxes_kept": Mutant(BoxesKept, "W-72", "`local_weights` always yields the boxes of its first call", num_ranks=2),
    "steps_while_read": Mutant(StepsWhileRead, "W-72", "a step changes boxes that are being read", num_ranks=2),
    "counts_before_it_waits": Mutant(
        CountsBeforeItWaits, "W-72", "the version increases before a step has waited for readers", num_ranks=2
    ),
    "boxes_share_memory": Mutant(BoxesShareMemory, "W-70", "boxes of one shape share memory within a bucket", 2),
    "patient_exchange": Mutant(PatientExchange, "W-73", "an exchange waits longer than its timeout", num_ranks=2),
    "nameless_exchange": Mutant(NamelessExchange, "W-73", "the error of an exchange names no rank", num_ranks=2),
    "messages_cut": Mutant(MessagesCut, "W-73", "rank 0 receives no more bytes from a rank than it sends", num_ranks=2),
    "first_exchange_waits": Mutant(FirstExchangeWaits, "W-73", "the first exchange waits forever", 2, hangs=True),
    "group_of_one_rank": Mutant(
        GroupOfOneRank, "W-73", "a rank forms a process group that the other ranks do not form", num_ranks=2
    ),
    "version_lost": Mutant(VersionLost, "W-35", "a loaded worker is at version 0"),
    "whole_parameters_kept": Mutant(
        WholeParametersKept, "W-35", "after a load, forward passes use parameters that were gathered before it"
    ),
    "save_clears": Mutant(SaveClears, "W-36", "`save` clears the gradients"),
    "moments_lost": Mutant(MomentsLost, "W-36", "loading a checkpoint resets the optimizer"),
    "moments_kept": Mutant(MomentsKept, "W-36", "a load after the first step keeps the worker's own moments"),
    "count_lost": Mutant(CountLost, "W-36", "loading a checkpoint resets the optimizer's step count"),
    "moments_saved_in_bfloat16": Mutant(MomentsSavedInBfloat16, "W-36", "moments are saved in bfloat16"),
    "schedule_restarts": Mutant(ScheduleRestarts, "W-36", "loading a checkpoint restarts the schedule"),
    "no_config": Mutant(NoConfig, "W-37", "a checkpoint has no config.json"),
    "not_on_fewer_ranks": Mutant(NotOnFewerRanks, "W-38", "a checkpoint saved by more ranks is refused", num_ranks=2),
    "not_on_more_ranks": Mutant(NotOnMoreRanks, "W-39", "a checkpoint saved by fewer ranks is refused", num_ranks=2),
    "version_first": Mutant(VersionFirst, "W-40", "`load` sets the version before it has read the weights"),
    "missing_tensors_kept": Mutant(
        MissingTensorsKept, "W-40", "tensors that a checkpoint lacks silently keep their values"
    ),
    "json_errors_escape": Mutant(JsonErrorsEscape, "W-40", "a truncated JSON file is reported as JSONDecodeError"),
    "counters_guessed": Mutant(CountersGuessed, "W-40", "a checkpoint with truncated counters is loaded as version 0"),
    "small_file_escapes": Mutant(SmallFileEscapes, "W-41", "a small file that cannot be written raises OSError"),
    "failures_of_others_ignored": Mutant(
        FailuresOfOthersIgnored, "W-41", "only the rank whose disk is full reports that a save failed", num_ranks=2
    ),
    "overwrites_in_place": Mutant(OverwritesInPlace, "W-41", "`save` removes the previous checkpoint first"),
    "removed_before_renamed": Mutant(
        RemovedBeforeRenamed, "W-76", "`save` removes the old checkpoint before it renames the new one"
    ),
    "file_by_file": Mutant(FileByFile, "W-76", "`save` replaces one file after another"),
    "optimizer_last": Mutant(
        OptimizerLast, "W-76", "a checkpoint without its optimizer file is loaded without an error"
    ),
    "leaves_interrupted_saves": Mutant(
        LeavesInterruptedSaves, "W-76", "a save does not remove what an interrupted one has left next to the path"
    ),
    "leaves_saves_of_other_processes": Mutant(
        LeavesSavesOfOtherProcesses, "W-76", "a save does not remove what one of another process has left"
    ),
    "leaves_a_lock": Mutant(LeavesALock, "W-76", "an interrupted save blocks later ones"),
    "trusts_leftovers": Mutant(TrustsLeftovers, "W-76", "`save` treats the files of an interrupted save as its own"),
    "old_removed_first": Mutant(
        OldRemovedFirst, "W-76", "`save` first removes the checkpoint that an interrupted save left next to the path"
    ),
    "leftover_preferred": Mutant(
        LeftoverPreferred,
        "W-76",
        "`load` reads the checkpoint that an interrupted save left next to the path, not the one at the path",
    ),
    "live_state_saved": Mutant(LiveStateSaved, "W-77", "a save in the background writes what training has changed"),
    "background_failure_swallowed": Mutant(
        FailureSwallowed, "W-77", "`finish_save` returns although the save has failed"
    ),
    "single_target_squeezed": Mutant(
        SingleTargetSqueezed, "W-66", "logprobs of one given token per position have one dimension"
    ),
    "full_context_refused": Mutant(
        FullContextRefused, "W-04", "a segment with as many tokens as the model has positions is refused"
    ),
    "partly_recorded_is_free": Mutant(
        PartlyRecordedIsFree, "W-60", "a token without experts in one layer is routed freely in all of them"
    ),
    "moments_found_once": Mutant(
        MomentsFoundOnce, "W-64", "after `load(optimizer=False)`, a save writes the moments of before"
    ),
    "weights_loaded_during_saves": Mutant(
        LoadsWeightsDuringSaves, "W-77", "`load(optimizer=False)` does not wait for a background save"
    ),
    "never_pending": Mutant(NeverPending, "W-77", "`save_pending` is false during a save"),
    "finished_at_once": Mutant(FinishedAtOnce, "W-77", "`finish_save` does not wait for the save"),
    "saved_at_the_end": Mutant(SavedAtTheEnd, "W-77", "the state is saved only by `finish_save`"),
    "attention_only": Mutant(AttentionOnly, "W-49", "targets in MLPs are left out"),
    "alpha_cut": Mutant(AlphaCut, "W-50", "adapter_config.json has the integer part of alpha"),
    "alpha_is_scale": Mutant(AdapterDescribed, "W-50", "adapter_config.json has the scale as its `lora_alpha`"),
    "targets_of_adapter_lost": Mutant(
        TargetsOfAdapterLost, "W-50", "adapter_config.json does not list all layers of the LoRA"
    ),
    "lora_kept_once_trained": Mutant(
        LoraKeptOnceTrained, "W-50", "`load` after the first step keeps the worker's own LoRA"
    ),
    "dropout_continued": Mutant(
        DropoutContinued, "W-50", "`load` does not reset the number of forward passes, which seeds dropout"
    ),
    "live_lora_saved": Mutant(LiveLoraSaved, "W-50", "a background save writes a LoRA that training has changed"),
    "merged_by_save": Mutant(MergedBySave, "W-50", "`save` merges the LoRA into the worker's own base weights"),
    "merged_once": Mutant(MergedOnce, "W-78", "merged weights are those of the first gather"),
    "merged_at_scale_one": Mutant(MergedAtScaleOne, "W-78", "the LoRA is merged without its scale"),
    "alpha_ignored": Mutant(AlphaIgnored, "W-47", "a LoRA is added without its scale"),
    "half_trained": Mutant(HalfTrained, "W-47", "matrix A of the LoRA gets no gradient"),
    "base_decays": Mutant(BaseDecays, "W-48", "norms decay while a LoRA is trained"),
    "merged_at_each_step": Mutant(MergedAtEachStep, "W-48", "each step is merged into the weights under the LoRA"),
    "norms_gathered": Mutant(NormsGathered, "W-49", "norms are listed in addition to the LoRA"),
    "same_version_not_loaded": Mutant(
        SameVersionNotLoaded, "W-35", "a checkpoint of the version that the worker has is not loaded"
    ),
    "lora_of_equal_rows": Mutant(LoraOfEqualRows, "W-49", "all rows of matrix A of a new LoRA are equal"),
    "lora_of_noise": Mutant(LoraOfNoise, "W-49", "matrix B of a new LoRA is not zero"),
    "lora_kept_by_version": Mutant(
        LoraKeptByVersion, "W-50", "the LoRA is gathered again only once the version has changed"
    ),
    "lora_not_read": Mutant(LoraNotRead, "W-50", "`load` leaves the LoRA unchanged"),
    "no_adapter_files": Mutant(NoAdapterFiles, "W-50", "the LoRA is not saved as PEFT's files"),
    "pending_gradients_kept": Mutant(PendingGradientsKept, "W-44", "`load` keeps earlier gradients"),
    "pending_gradients_kept_by_weights": Mutant(
        PendingGradientsKeptByWeights, "W-44", "`load` keeps earlier gradients if it loads the weights alone"
    ),
    "many_segments_merged": Mutant(
        ManySegmentsMerged, "W-11", "segments after the first 64 of a micro-batch are one segment"
    ),
    "later_chunks_unlearned": Mutant(
        LaterChunksUnlearned, "W-15", "only the first 1,024 targets of a micro-batch have a gradient"
    ),
    "unscaled_after_one": Mutant(UnscaledAfterOne, "W-06", "no target is scaled if the first one has temperature 1"),
    "parts_added_twice": Mutant(
        PartsAddedTwice, "W-15", "the gradients of a vocabulary that is computed in parts are added twice"
    ),
    "cancelling_unlearned": Mutant(
        CancellingUnlearned, "W-66", "positions whose targets' gradients add up to zero have none"
    ),
    "gather_clears": Mutant(GatherClears, "W-33", "a gather clears the gradients"),
    "warm_up_of_decays_only": Mutant(WarmUpOfDecaysOnly, "W-75", "the constant schedule has no warm-up"),
    "warm_up_of_one_at_least": Mutant(
        WarmUpOfOneAtLeast, "W-75", "a schedule without a warm-up decays as if it had one of a single step"
    ),
    "zero_settings_ignored": Mutant(
        ZeroSettingsIgnored, "W-63", "a weight decay of 0 in the settings of a step stands for the worker's own"
    ),
    "zero_rate_ignored": Mutant(
        ZeroRateIgnored, "W-63", "a learning rate of 0 in the settings of a step stands for the worker's own"
    ),
    "no_steps_not_resumed": Mutant(
        NoStepsNotResumed, "W-36", "the number of steps in a checkpoint is not loaded if it is 0"
    ),
    "tied_head_scaled_by_load": Mutant(TiedHeadScaledByLoad, "W-35", "after a load, a tied head scales its logits"),
    "optimizer_reset_first": Mutant(
        OptimizerResetFirst, "W-40", "`load` resets the optimizer before it reads the checkpoint"
    ),
    "keeps_the_old_one": Mutant(KeepsTheOldOne, "W-41", "`save` does not remove the checkpoint that it replaces"),
    "loaded_by_those_that_can": Mutant(
        LoadedByThoseThatCan, "W-40", "`load` fails only on the ranks that cannot read the checkpoint", num_ranks=2
    ),
    "loads_during_a_save": Mutant(LoadsDuringASave, "W-77", "`load` does not wait for a save in the background"),
    "second_save_dropped": Mutant(
        SecondSaveDropped, "W-77", "`begin_save` does nothing if an earlier save is still in progress"
    ),
    "read_by_one": Mutant(
        ReadByOne, "W-72", "the end of one iterator of `local_weights` counts as the end of all", num_ranks=2
    ),
    "steps_with_settings_uncounted": Mutant(
        StepsWithSettingsUncounted, "W-75", "the schedule does not count steps with settings"
    ),
    "optimizer_reset_before_weights": Mutant(
        OptimizerResetBeforeWeights, "W-40", "a load of the weights alone resets the optimizer before it reads them"
    ),
    "loads_while_read": Mutant(LoadsWhileRead, "W-72", "`load` changes boxes that are being read", num_ranks=2),
    "waits_for_closed": Mutant(
        WaitsForClosed, "W-72", "a step waits for a read that was closed early", num_ranks=2, hangs=True
    ),
    "weights_loaded_during_reads": Mutant(
        LoadsWeightsDuringReads, "W-72", "`load(optimizer=False)` does not wait for open iterators", num_ranks=2
    ),
    "long_messages_cut": Mutant(LongMessagesCut, "W-73", "messages are cut after 4 KiB", num_ranks=2),
    "dropout_ignored": Mutant(DropoutIgnored, "W-50", "dropout is configured but not applied"),
    "same_dropout_each_step": Mutant(
        SameDropoutEachStep, "W-50", "the forward passes of every step apply the dropout of the first step"
    ),
    "same_dropout_again": Mutant(SameDropoutAgain, "W-50", "every forward pass applies the same dropout"),
    "seed_ignored": Mutant(SeedIgnored, "W-49", "a new LoRA does not depend on the seed"),
}

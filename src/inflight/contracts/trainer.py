"""The Protocols of a trainer worker and of the weights that it publishes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from inflight.types import AdamSettings, MicroBatch, StepResult, WeightBucket
from inflight.wire import (
    BucketSpec,
    LoraSpec,
    Sharding,
    TensorSpec,
)

if TYPE_CHECKING:
    import torch


@runtime_checkable
class WeightSource(Protocol):
    """One rank's source of weights for a publish. All ranks make the same calls in the same order."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Return this worker's rank, 0 <= rank < world_size. Rank 0 sends the weights."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Return the number of ranks."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Return the number of optimizer steps taken so far, which is the version that a publish would carry."""

    @abstractmethod
    def parameter_specs(self) -> Sequence[TensorSpec]:
        """Return each tensor's checkpoint name, wire dtype and full shape, in gather order. Never communicates."""

    @abstractmethod
    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        """Yield full tensors bucket by bucket, in the order of `parameter_specs`.

        Collective: every rank must exhaust the iterator. Buckets hold tensors only on rank 0. The tensors of a bucket
        are valid until two more buckets have been requested.
        """


@runtime_checkable
class PartialWeightSource(WeightSource, Protocol):
    """A source that omits the tensors that training does not change; `parameter_specs` does not list them."""

    @abstractmethod
    def frozen_names(self) -> Sequence[str]:
        """Return the names of the omitted tensors, whose values are still the checkpoint's. Never communicates."""


@runtime_checkable
class ShardedWeightSource(WeightSource, Protocol):
    """A source whose ranks can each send the boxes of tensors that they hold, instead of gathering them on rank 0.

    With one rank, nothing is gathered, and forward and backward passes may run in another thread while `gather_weights`
    is iterated, as they may during `local_weights`; the caller keeps `TrainerWorker.step` from running meanwhile.
    """

    @abstractmethod
    def shardings(self) -> Sequence[Sharding]:
        """Return, for each tensor of `parameter_specs`, which boxes each rank sends; empty if tensors must be gathered.

        The result is the same on every rank. Never communicates.
        """

    @abstractmethod
    def local_weights(self, buckets: Sequence[BucketSpec]) -> Generator[WeightBucket, None, None]:
        """Yield, for each bucket, the boxes that this rank sends, in the order of the tensors and then of their boxes.

        Never communicates, so a failing rank does not block the others. A yielded tensor is in the wire dtype, and may
        be the trainer's own memory. Meanwhile, forward and backward passes may run in another thread;
        `TrainerWorker.step` and `TrainerWorker.load` wait until the iterator is exhausted or closed.
        """

    @abstractmethod
    def exchange(self, message: bytes, timeout_s: float) -> Sequence[bytes]:
        """Return all ranks' messages in rank order on rank 0, and only rank 0's message elsewhere; collective.

        Raises `TransferError` within ``timeout_s`` seconds if a rank does not answer. The error names the rank, and
        the source then exchanges nothing more.
        """


@runtime_checkable
class LoraSource(WeightSource, Protocol):
    """A source whose tensors are those of a LoRA, under the names that `LoraSpec` defines."""

    @abstractmethod
    def lora_spec(self) -> LoraSpec:
        """Return how endpoints merge the LoRA. Never communicates."""


@runtime_checkable
class MergingLoraSource(LoraSource, Protocol):
    """A source of a LoRA that can also merge it, for endpoints that support partial updates but not LoRAs."""

    @abstractmethod
    def merged(self, bucket_bytes: int) -> PartialWeightSource:
        """Return a source of the weights that the LoRA changes, with the LoRA merged into them; rank 0 only.

        Gathering from the result makes the same collective calls as gathering from this source with buckets of
        ``bucket_bytes``. The other ranks can therefore always gather the LoRA, whichever source rank 0 publishes.
        """


@runtime_checkable
class TrainerWorker(WeightSource, Protocol):
    """One trainer rank: everything that inflight needs from it. All ranks make the same calls in the same order.

    With several ranks, each is a process that has formed torch's default process group before it calls
    `WorkerKind.create`. ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` are set, and no ``MASTER_ADDR`` is needed.
    """

    @abstractmethod
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Return trainer logprobs [T] of the packed targets: float32, differentiable, 0.0 where there is no target.

        They are natural logarithms at each token's own temperature, on the batch's device. If the model is in float64,
        so are the logprobs. Segments do not attend to each other. Several forward passes may precede their backward
        passes, which may run in any order.
        """

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of a scalar. Gradients are summed over ranks and micro-batches, never averaged.

        Ranks without tokens pass a zero that depends on their parameters, as every result of `forward` does.
        """

    @abstractmethod
    def step(self, settings: AdamSettings | None = None) -> StepResult:
        """Clip the gradients, update the parameters, advance the schedule and ``version``, and clear the gradients.

        ``settings`` replace the worker's own settings for this step, including its schedule; see `AdjustableWorker`.

        Raises `NonFiniteError` on every rank if the gradient norm is not finite, or overflows: the gradients are
        cleared, and parameters, optimizer, schedule and version are unchanged. Raises `TrainerError` if there is no
        gradient.
        """

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write weights, optimizer, schedule and version atomically; the directory is also a loadable HF checkpoint.

        Raises `CheckpointError` on every rank if saving fails; the earlier checkpoint at ``path`` is then still intact.
        """

    @abstractmethod
    def load(self, path: Path, *, optimizer: bool = True) -> None:
        """Load a checkpoint that `save` wrote, on any number of ranks, and discard all accumulated gradients.

        If ``optimizer`` is False, only the weights are loaded, as if the worker had been created with them: its version
        is 0, and its optimizer has taken no step; see `AdjustableWorker`.

        If `CheckpointError` is raised, nothing was loaded.
        """


@runtime_checkable
class ModelParallelWorker(TrainerWorker, Protocol):
    """A `TrainerWorker` in which several ranks compute the same micro-batches together.

    Ranks with the same ``data_parallel_rank`` receive the same micro-batches. On each of them `forward` returns all
    logprobs, and each computes the same loss and passes it to `backward`, which counts it once. With a worker that is
    not a `ModelParallelWorker`, every rank has its own micro-batches. `data_ranks_of` handles both cases.
    """

    @property
    @abstractmethod
    def data_parallel_rank(self) -> int:
        """Return the index of this rank's share of the data, 0 <= data_parallel_rank < data_parallel_size."""

    @property
    @abstractmethod
    def data_parallel_size(self) -> int:
        """Return the number of shares; each is computed by ``world_size / data_parallel_size`` ranks."""


@runtime_checkable
class ImageWorker(Protocol):
    """A `TrainerWorker` that reports whether its model accepts images. A worker without this property accepts none."""

    @property
    @abstractmethod
    def takes_images(self) -> bool:
        """Return whether `TrainerWorker.forward` accepts `MicroBatch.image_tensors`.

        If not, `forward` raises `UnsupportedError` for batches with images. Other ranks may receive micro-batches with
        images while this rank's have none, and vice versa.
        """


@runtime_checkable
class PrefixSharingWorker(Protocol):
    """A `TrainerWorker` that computes a shared prefix once.

    A worker without this property computes every segment separately.
    """

    @property
    @abstractmethod
    def shares_prefixes(self) -> bool:
        """Return whether `TrainerWorker.forward` computes tokens with equal `MicroBatch.prefix_ids_T` only once.

        If so, logprobs and gradients equal those of separate segments: the gradient of a shared token is the sum over
        its segments. If not, a run sends no such ids, and ignores shared prefixes when it fills micro-batches.
        """


@runtime_checkable
class AdjustableWorker(Protocol):
    """A `TrainerWorker` whose optimizer another program can control. Other workers always use their own settings."""

    @property
    @abstractmethod
    def takes_step_settings(self) -> bool:
        """Return whether `TrainerWorker.step` accepts settings and `TrainerWorker.load` can omit the optimizer.

        If not, such calls raise `UnsupportedError`.
        """


@runtime_checkable
class TargetScoringWorker(Protocol):
    """A `TrainerWorker` that can score any target tokens. One without this property scores only the packed tokens."""

    @property
    @abstractmethod
    def scores_target_ids(self) -> bool:
        """Return whether `TrainerWorker.forward` accepts `MicroBatch.target_ids_TK`, for which it returns [T, K].

        If not, `forward` raises `UnsupportedError` for batches with targets.
        """


@runtime_checkable
class ReplayingWorker(Protocol):
    """A `TrainerWorker` that reports whether it replays the experts of a rollout. Other workers do not."""

    @property
    @abstractmethod
    def replays_routing(self) -> bool:
        """Return whether `TrainerWorker.forward` accepts `MicroBatch.routed_experts_TLK`.

        If not, `forward` raises `UnsupportedError` for batches with recorded experts. These replace the experts that
        the model's routers would choose; the current routers still compute their weights. Other ranks may receive
        micro-batches with a record while this rank's have none, and vice versa.
        """


@runtime_checkable
class BackgroundSaver(Protocol):
    """A `TrainerWorker` that can save a checkpoint in the background while it trains.

    At most one save is in progress. Meanwhile, every method of `TrainerWorker` may be called; `save` and `load` first
    wait for that save to end.
    """

    @abstractmethod
    def begin_save(self, path: Path) -> None:
        """Begin to save the current state, as `TrainerWorker.save` does; collective.

        Returns once the state is copied; later changes are not saved. First waits for any earlier save to end. If that
        save failed, its `CheckpointError` is raised on every rank and no new save begins.
        """

    @abstractmethod
    def finish_save(self, timeout_s: float) -> None:
        """Return once the checkpoint is complete, or immediately if no save is pending. Not collective.

        Raises `CheckpointError` once if the save failed: the earlier checkpoint at the path is still intact, and the
        state of training is unaffected. Also raises `CheckpointError` if the save takes longer than ``timeout_s``
        seconds: it is then still pending, and the call may be repeated.
        """

    @property
    @abstractmethod
    def save_pending(self) -> bool:
        """Return whether a save is in progress on this rank; False once it has succeeded or failed. Never waits."""


Phase = Literal["training", "sampling"]
"""The phases of a run in which trainers and servers alternate on the same GPUs."""


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """One part of the GPU memory of a process, per GPU."""

    name: str
    size_bytes: int
    remedy: str = ""
    """How to reduce this part."""
    phase: Phase | None = None
    """The phase in which the process needs this part; None means both."""


@dataclass(frozen=True, slots=True)
class TrainingLoad:
    """The load that a run puts on each rank."""

    num_ranks: int
    tokens_per_micro_batch: int
    untrained_models: tuple[Path, ...] = ()
    """Other checkpoints that each rank holds in order to compute logprobs: the initial model, and teachers."""


@runtime_checkable
class WorkerKind(Protocol):
    """A kind of trainer: it creates the workers, and reports what a run must know before it starts the ranks.

    A configuration refers to it by an entry point in the group ``inflight.workers``, or by ``module:attribute``.
    """

    trains_lora: bool = False
    """Whether workers accept the setting ``lora``, which makes each of them a `LoraSource`."""

    @abstractmethod
    def create(self, settings: Mapping[str, object]) -> TrainerWorker:
        """Return the worker of this process's rank. Collective over torch's default process group.

        A run sets ``model_path``, ``dtype``, ``wire_dtype``, ``master_dtype``, ``total_steps``, the fields of
        `inflight.model.optimizer_settings.OptimizerSettings`, the options in ``train.trainer_options``, and, if they
        are configured, ``device`` and ``lora``. Raises `ConfigError` or `UnsupportedError` on every rank if the
        settings or the model cannot be used.
        """

    def memory(self, settings: Mapping[str, object], load: TrainingLoad) -> Sequence[MemoryTerm] | None:
        """Return the estimated GPU memory of the rank that needs the most, without its CUDA context; None if unknown.

        Terms for the phase ``sampling`` are omitted if trainers and servers do not alternate. Raises `ConfigError`
        if the settings or the model cannot be used.
        """
        return None


class DataRanks(NamedTuple):
    """The index of a rank's share of the data, counted from 0, and the number of shares."""

    rank: int
    size: int


def data_ranks_of(worker: TrainerWorker) -> DataRanks:
    """Return a worker's share of the data. Each rank has its own share, unless several ranks compute one together."""
    if isinstance(worker, ModelParallelWorker):
        return DataRanks(worker.data_parallel_rank, worker.data_parallel_size)
    return DataRanks(worker.rank, worker.world_size)

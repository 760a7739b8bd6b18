"""The contracts of inflight as Protocols, and nothing else.

An endpoint is one inference server seen from outside: its methods are async. A worker is one trainer rank: its methods
are sync and SPMD, every rank makes the same calls in the same order. Whoever satisfies these Protocols, and the
sentences of docs/contract.md, can be joined to whoever else does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from inflight.types import MicroBatch, StepResult, TaskItem, WeightBucket
from inflight.wire import (
    AdapterSpec,
    BucketSpec,
    BucketTransfer,
    Capabilities,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    CompletionChunk,
    GenerateRequest,
    GenerateResponse,
    TensorSpec,
    TransportSpec,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
)

if TYPE_CHECKING:
    import torch


@runtime_checkable
class InferenceEndpoint(Protocol):
    """The whole of what inflight asks of an inference server.

    docs/contract.md has the table of its states. A failure after the first byte was applied leads to POISONED, where
    `generate` raises `PoisonedError`; the only ways out are a complete update or a restart. Calls of an update whose
    session has a name are idempotent. Every method may raise `UnreachableError`, `DeadlineError` or `ProtocolError`,
    after which the state is unknown.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Return what reports and errors call this endpoint: its URL, or a name unique in the process."""

    @abstractmethod
    async def capabilities(self) -> Capabilities:
        """Return what this endpoint can do. Constant over its life."""

    @abstractmethod
    async def init_process_group(self, spec: TransportSpec) -> None:
        """Take weights as ``spec`` says from now on, leaving any earlier group; returns when all ranks have joined.

        Pending until then, so that the sender joins concurrently. The run that owns the group is the only one whose
        updates are accepted from now on. Raises `TransferError` if the group is not formed in ``spec.timeout_s``: the
        endpoint then belongs to no group and serves as before. Raises `FencedError` if a later epoch of the run's
        trainer has called.
        """

    @abstractmethod
    async def request_weight_update(self, update: WeightUpdate) -> None:
        """Accept an update and hold sampling as ``update.in_flight`` says; when this returns no token is being sampled.

        A staged update is accepted only, and sampling goes on. Raises `UpdateRefusedError` if the manifest does not fit
        the model, the version is not newer, the run does not own the group, another update is open, or the drain did
        not end before ``update.deadline_s``: the old weights serve on and nothing may be sent.
        """

    @abstractmethod
    async def receive_weights(self, bucket: BucketTransfer) -> None:
        """Receive one bucket and compare its checksum; pending while the sender sends it. Buckets come in order.

        Raises `TransferError`, or `UpdateRefusedError` if no such update is open: see `abort_weight_update` for what
        is true then.
        """

    @abstractmethod
    async def commit_weight_update(self, ref: UpdateRef) -> WeightVersion:
        """Switch to the new weights and resume: every later token is sampled from ``ref.version``.

        Sampling is held here, as ``in_flight`` says, if the update is staged. Raises `UpdateRefusedError` if buckets
        are missing, or if a drain does not end in time: the update is over then and the old weights serve on. A failure
        while applying raises `PoisonedError`.
        """

    @abstractmethod
    async def abort_weight_update(self, ref: UpdateRef) -> WeightVersion:
        """End the update. If no byte was applied the old weights serve on (READY), otherwise POISONED.

        Idempotent: without an open update it returns the present version.
        """

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Return the completions of one prompt: token ids, behaviour logprobs, version spans, finish reason.

        Raises `InvalidRequestError` if the prompt does not fit. Cancelling the call ends the request on the endpoint.
        """

    @abstractmethod
    async def chat_completion(self, request: ChatCompletionRequest) -> ChatCompletion:
        """Return the OpenAI shape plus the facts of `generate`. Raises `UnsupportedError` if chat is not declared."""

    @abstractmethod
    async def weight_version(self) -> WeightVersion:
        """Return which weights are served now, and the state."""

    @abstractmethod
    async def aclose(self) -> None:
        """Release what this object holds; a remote server goes on. Called last.

        Where a context manager made the endpoint, it is left after this call.
        """


@runtime_checkable
class StreamingEndpoint(InferenceEndpoint, Protocol):
    """An endpoint that declares ``streaming``."""

    @abstractmethod
    def generate_stream(self, request: GenerateRequest) -> AsyncIterator[CompletionChunk]:
        """Yield tokens as they are sampled; the last chunk of each completion carries its finish reason."""

    @abstractmethod
    def chat_completion_stream(self, request: ChatCompletionRequest) -> AsyncIterator[ChatCompletionChunk]:
        """Yield text as it is sampled, in the OpenAI shape. Raises `UnsupportedError` if chat is not declared."""


@runtime_checkable
class WeightSource(Protocol):
    """The whole of what a publish asks of a trainer rank. All ranks make the same calls in the same order."""

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
        """Return the number of optimizer steps behind the present weights: the version a publish would carry."""

    @abstractmethod
    def parameter_specs(self) -> Sequence[TensorSpec]:
        """Return checkpoint names, wire dtypes and full shapes in gather order. Never communicates."""

    @abstractmethod
    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        """Yield full tensors bucket by bucket, in the order of `parameter_specs`; collective: every rank exhausts it.

        On rank 0 buckets hold tensors, on the others none. A yielded tensor is valid until the next one is asked for
        and the one after it.
        """


@runtime_checkable
class PartialWeightSource(WeightSource, Protocol):
    """A source that leaves out what training does not change; its `parameter_specs` list the others only."""

    @abstractmethod
    def frozen_names(self) -> Sequence[str]:
        """Return the names of the tensors that are left out: they are as in the checkpoint. Never communicates."""


@runtime_checkable
class AdapterSource(WeightSource, Protocol):
    """A source whose tensors are those of a low-rank adapter, by the names that `AdapterSpec` says."""

    @abstractmethod
    def adapter_spec(self) -> AdapterSpec:
        """Return how endpoints merge the adapter. Never communicates."""


@runtime_checkable
class TrainerWorker(WeightSource, Protocol):
    """The whole of what inflight asks of one trainer rank. All ranks make the same calls in the same order.

    Of several ranks, each is a process in which torch's default process group has been formed before the factory is
    called; ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` are set, and no ``MASTER_ADDR`` is needed.
    """

    @abstractmethod
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Return trainer logprobs [T] of the packed targets: float32, differentiable, 0.0 where no target is.

        Natural log, at each token's own temperature, on the batch's device. Segments do not see each other. Float64
        models return float64. Several forwards may come before their backwards, which may come in any order.
        """

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of a scalar: summed over ranks and micro-batches, never averaged.

        Ranks without tokens pass a zero that depends on their parameters, as `forward` of any batch does.
        """

    @abstractmethod
    def step(self) -> StepResult:
        """Clip, update the parameters, advance the schedule, clear gradients; ``version`` grows by one.

        Raises `NonFiniteError` on every rank if the gradient norm is not finite, by an overflow too: parameters,
        optimizer, schedule and version are then as before, gradients are cleared. Raises `TrainerError` if there is no
        gradient.
        """

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write weights, optimizer, schedule and version, atomically; the directory is a loadable HF checkpoint too.

        Raises `CheckpointError` on every rank; what was at ``path`` before is still whole.
        """

    @abstractmethod
    def load(self, path: Path) -> None:
        """Read what `save` wrote, on any number of ranks, and drop the gradients of every `backward` before.

        Raises `CheckpointError`; nothing was loaded then.
        """


@runtime_checkable
class BackgroundSaver(Protocol):
    """What a `TrainerWorker` may have besides: a save that training need not wait for.

    At most one save is under way. While it is, every method of `TrainerWorker` may be called; `save` and `load` wait
    for it first.
    """

    @abstractmethod
    def begin_save(self, path: Path) -> None:
        """Begin what `TrainerWorker.save` does, with the present state; collective.

        Returns once that state is copied: whatever changes afterwards is not saved. It first waits for an earlier save;
        if that one failed its `CheckpointError` is raised on every rank, and nothing was begun.
        """

    @abstractmethod
    def finish_save(self, timeout_s: float) -> None:
        """Return once the save that was begun stands at its path; at once if none was begun since. Not collective.

        Raises `CheckpointError`, once, if it failed: what was at the path before is still whole, and training's state
        is what it would be without the save. Raises `CheckpointError` too if it goes on after ``timeout_s`` seconds: it
        is pending still, and the call may be repeated.
        """

    @property
    @abstractmethod
    def save_pending(self) -> bool:
        """Return whether a save is under way on this rank; False once it ended, well or not. Never waits."""


@runtime_checkable
class WeightSender(Protocol):
    """The trainer's end of a transport. Used by rank 0 only; its blocking calls run outside the event loop."""

    @property
    @abstractmethod
    def is_collective(self) -> bool:
        """Return whether a bucket is received while it is sent, by all at once. False: once it was sent, by each alone.

        Where it is not, an endpoint that fails costs the others nothing.
        """

    @abstractmethod
    def specs(self, run_id: str, num_ranks: Sequence[int], timeout_s: float) -> Sequence[TransportSpec]:
        """Open a new group for endpoints that take ``num_ranks[i]`` ranks each; return the spec for each of them."""

    @abstractmethod
    def join(self) -> None:
        """Join the group just opened; blocks until every rank has joined. Raises `TransferError` after the timeout."""

    @abstractmethod
    def begin(self, update: WeightUpdate) -> None:
        """Note that the buckets sent from now on are those of ``update``. Raises `TransferError`."""

    @abstractmethod
    def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        """Send one bucket; blocks until it has left. Raises `TransferError`; the group is unusable then."""

    @abstractmethod
    def end(self, *, is_done: bool) -> None:
        """Note that the update is over. ``is_done`` says that no endpoint will read any of it again."""

    @abstractmethod
    def abort(self) -> None:
        """End any pending call from another thread and give the group up. Idempotent."""


@runtime_checkable
class WeightReceiver(Protocol):
    """One endpoint rank's end of a transport. Its blocking calls run outside the event loop."""

    @abstractmethod
    def join(self) -> None:
        """Join the group; blocks until every rank has joined. Raises `TransferError` after the timeout."""

    @abstractmethod
    def begin(self, ref: UpdateRef) -> None:
        """Note that the buckets to receive are those of this update, from the first on.

        The memory of all tensors returned so far is taken back: coming ones may lie there.
        """

    @abstractmethod
    def receive(self, specs: Sequence[TensorSpec], timeout_s: float) -> list[torch.Tensor]:
        """Return the tensors of the next bucket, in order. Raises `TransferError`; the group is unusable then."""

    @abstractmethod
    def abort(self) -> None:
        """End any pending call from another thread and give the group up. Idempotent."""


@runtime_checkable
class ReceivesAhead(Protocol):
    """What a `WeightReceiver` may offer besides: the next bucket travels while the one that arrived is compared."""

    @abstractmethod
    def receive_ahead(self, specs: Sequence[TensorSpec], timeout_s: float) -> None:
        """Have the next bucket arrive in the background; the next `receive` returns it, or raises what went wrong.

        Returns at once. At most one bucket is ahead; ``specs`` are those of that `receive`, and ``timeout_s`` is how
        long its sender may take to begin and to end.
        """


@runtime_checkable
class Task(Protocol):
    """Problems and how to score an answer. Deterministic: item i is the same in every process."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name that configurations use."""

    @abstractmethod
    def item(self, index: int) -> TaskItem:
        """Return problem ``index``, for any index from 0; the order of training is the order of indices."""

    @abstractmethod
    def score(self, item: TaskItem, completion: str) -> float:
        """Return the reward of a completion's text. Whatever it raises stops the run as a `TaskError`."""

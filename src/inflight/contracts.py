"""The contracts of inflight as Protocols, and nothing else.

An endpoint is one inference server seen from outside; its methods are async. A worker is one trainer rank; its methods
are sync and SPMD: every rank makes the same calls in the same order. Any endpoint and any worker that satisfy these
Protocols and the sentences of docs/contract.md work together.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from inflight.scheduling import Decision, Event
from inflight.types import Group, Message, MicroBatch, Reply, Sample, StepResult, TaskItem, Tool, WeightBucket
from inflight.wire import (
    AbortRequests,
    BucketSpec,
    BucketTransfer,
    Capabilities,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    CompletionChunk,
    DraftHistory,
    GenerateRequest,
    GenerateResponse,
    LoraSpec,
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
    `generate` raises `PoisonedError` until a complete update or a restart. Calls of an update whose session has a name
    are idempotent. Every method may raise `UnreachableError`, `DeadlineError` or `ProtocolError`, after which the state
    is unknown.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name of this endpoint in reports and errors: its URL, or a name that is unique in the process."""

    @abstractmethod
    async def capabilities(self) -> Capabilities:
        """Return what this endpoint can do, which never changes during its life."""

    @abstractmethod
    async def init_process_group(self, spec: TransportSpec) -> None:
        """Leave any earlier group and take weights as ``spec`` says; returns when all ranks have joined.

        The sender joins concurrently. From now on the endpoint accepts updates only from the run that owns the group.
        Raises `TransferError` if the group is not formed in ``spec.timeout_s``: the endpoint then belongs to no group
        and serves as before. Raises `FencedError` if a later incarnation of the run's trainer has called.
        """

    @abstractmethod
    async def request_weight_update(self, update: WeightUpdate) -> None:
        """Accept an update and pause sampling as ``update.in_flight`` says; on return no token is being sampled.

        If the update is staged, sampling goes on. Raises `UpdateRefusedError` if the manifest does not fit
        the model, the version is not newer, the run does not own the group, another update is open, or the drain did
        not end before ``update.deadline_s``: the old weights serve on and nothing may be sent.
        """

    @abstractmethod
    async def receive_weights(self, bucket: BucketTransfer) -> None:
        """Receive one bucket, while the sender sends it, and compare its checksum. Buckets come in order.

        Raises `TransferError`, or `UpdateRefusedError` if no such update is open; `abort_weight_update` says what the
        endpoint serves then.
        """

    @abstractmethod
    async def commit_weight_update(self, ref: UpdateRef) -> WeightVersion:
        """Switch to the new weights and resume: every later token is sampled from ``ref.version``.

        A staged update pauses sampling here, as ``in_flight`` says. Raises `UpdateRefusedError` if buckets are missing,
        or if a drain does not end in time: the update is then over and the old weights serve on. Raises `PoisonedError`
        if applying the weights fails.
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
        """Return a completion in the OpenAI format, with token ids, logprobs and version spans.

        Raises `UnsupportedError` if chat is not declared.
        """

    @abstractmethod
    async def weight_version(self) -> WeightVersion:
        """Return which weights are served now, and the state."""

    @abstractmethod
    async def aclose(self) -> None:
        """Release what this object holds; a remote server goes on. Called last.

        If a context manager made the endpoint, the manager exits after this call.
        """


@runtime_checkable
class StreamingEndpoint(InferenceEndpoint, Protocol):
    """An endpoint that declares ``streaming``."""

    @abstractmethod
    def generate_stream(self, request: GenerateRequest) -> AsyncIterator[CompletionChunk]:
        """Yield tokens as they are sampled; the last chunk of each completion carries its finish reason."""

    @abstractmethod
    def chat_completion_stream(self, request: ChatCompletionRequest) -> AsyncIterator[ChatCompletionChunk]:
        """Yield text as it is sampled, in the OpenAI format. Raises `UnsupportedError` if chat is not declared."""


@runtime_checkable
class AbortingEndpoint(InferenceEndpoint, Protocol):
    """An endpoint that declares ``partial_rollouts``."""

    @abstractmethod
    async def abort_requests(self, requests: AbortRequests) -> None:
        """End these requests: each `generate` returns what it has sampled so far.

        Completions that had not finished get the finish reason ``abort``; without a token, they have no span. Ids that
        are not running are ignored. Returns once no further token of these requests will be sampled, which an engine
        may delay until the pause of an update ends.
        """


@runtime_checkable
class ReleasingEndpoint(InferenceEndpoint, Protocol):
    """An endpoint that declares ``releases_memory``. Both calls may be repeated, and then change nothing."""

    @abstractmethod
    async def release_memory(self) -> WeightVersion:
        """Give up the memory of weights, keys and values; on return others may take it, and the state is RELEASED.

        The endpoint keeps its weights elsewhere, under the same version, and forgets cached prefixes. Raises
        `BusyError` if requests run or wait, or an update is open, and `PoisonedError` if the weights are torn: nothing
        changed. After any other error the state may be RELEASED, and `restore_memory` leads out.
        """

    @abstractmethod
    async def restore_memory(self) -> WeightVersion:
        """Take the memory back; on return the same weights are served as before the release.

        Raises `EndpointError` if the memory cannot be had: the state is still RELEASED.
        """


@runtime_checkable
class DraftingEndpoint(InferenceEndpoint, Protocol):
    """An endpoint that declares ``drafts``."""

    @abstractmethod
    async def record_history(self, history: DraftHistory) -> None:
        """Remember finished completions; later requests with one of these prompts take their drafts from them.

        Replaces what was remembered of those prompts. Raises `UnsupportedError` if drafts are not declared.
        """


@runtime_checkable
class WeightSource(Protocol):
    """The whole of what a publish needs from a trainer rank. All ranks make the same calls in the same order."""

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
    """A source that leaves out tensors that training does not change; `parameter_specs` does not list them."""

    @abstractmethod
    def frozen_names(self) -> Sequence[str]:
        """Return the names of the tensors that are left out, which are as in the checkpoint. Never communicates."""


@runtime_checkable
class LoraSource(WeightSource, Protocol):
    """A source whose tensors are those of a LoRA, under the names that `LoraSpec` defines."""

    @abstractmethod
    def lora_spec(self) -> LoraSpec:
        """Return how endpoints merge the LoRA. Never communicates."""


@runtime_checkable
class MergingLoraSource(LoraSource, Protocol):
    """A source of a LoRA that can also merge it, for endpoints that declare partial updates but no LoRA."""

    @abstractmethod
    def merged(self, bucket_bytes: int) -> PartialWeightSource:
        """Return the weights under the LoRA as a source; rank 0 only.

        Its gathering makes the collective calls of this source's with buckets of ``bucket_bytes``, so that the other
        ranks gather the LoRA, whichever of the two rank 0 publishes.
        """


@runtime_checkable
class TrainerWorker(WeightSource, Protocol):
    """The whole of what inflight asks of one trainer rank. All ranks make the same calls in the same order.

    With several ranks, each is a process that has formed torch's default process group before it calls the factory.
    ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` are set, and no ``MASTER_ADDR`` is needed.
    """

    @abstractmethod
    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Return trainer logprobs [T] of the packed targets: float32, differentiable, 0.0 where there is no target.

        Natural log, at each token's own temperature, on the batch's device. Segments do not see each other. Float64
        models return float64. Several forwards may come before their backwards, and the backwards in any order.
        """

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of a scalar: summed over ranks and micro-batches, never averaged.

        Ranks without tokens pass a zero that depends on their parameters, as `forward` of any batch does.
        """

    @abstractmethod
    def step(self) -> StepResult:
        """Clip, update the parameters, advance the schedule, clear gradients; ``version`` grows by one.

        Raises `NonFiniteError` on every rank if the gradient norm is not finite, or overflows: gradients are cleared,
        and parameters, optimizer, schedule and version stay as they were. Raises `TrainerError` if there is no
        gradient.
        """

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write weights, optimizer, schedule and version, atomically; the directory is a loadable HF checkpoint too.

        Raises `CheckpointError` on every rank; the earlier checkpoint at ``path`` is then still whole.
        """

    @abstractmethod
    def load(self, path: Path) -> None:
        """Read what `save` wrote, on any number of ranks, and drop the gradients of every `backward` before.

        Raises `CheckpointError`, with nothing loaded.
        """


@runtime_checkable
class ModelParallelWorker(TrainerWorker, Protocol):
    """A `TrainerWorker` of which several ranks compute the same micro-batches together.

    Ranks with the same ``data_parallel_rank`` get the same micro-batches. On each of them `forward` returns all
    logprobs, and each computes the same loss and passes it to `backward`, which counts it once. A worker that is not a
    `ModelParallelWorker` gives every rank micro-batches of its own; `inflight.data_ranks.data_ranks_of` is right for
    both.
    """

    @property
    @abstractmethod
    def data_parallel_rank(self) -> int:
        """Return which share of the data this rank computes, 0 <= data_parallel_rank < data_parallel_size."""

    @property
    @abstractmethod
    def data_parallel_size(self) -> int:
        """Return the number of shares; each is computed by ``world_size / data_parallel_size`` ranks."""


@runtime_checkable
class ImageWorker(Protocol):
    """A `TrainerWorker` that says whether its model takes images. One that does not say takes none."""

    @property
    @abstractmethod
    def takes_images(self) -> bool:
        """Return whether `TrainerWorker.forward` takes `MicroBatch.image_tensors`; if not, it refuses them.

        Raises `UnsupportedError` then. A micro-batch without images may come beside others' with images.
        """


@runtime_checkable
class ReplayingWorker(Protocol):
    """A `TrainerWorker` that says whether it replays the experts of a rollout. One that does not say does not."""

    @property
    @abstractmethod
    def replays_routing(self) -> bool:
        """Return whether `TrainerWorker.forward` takes `MicroBatch.routed_experts_TLK`; if not, it refuses them.

        Raises `UnsupportedError` then. The recorded experts take the place of those that the model's routers would
        choose, weighted by what the routers, as they are now, give them. A micro-batch without a record may come beside
        others' with one.
        """


@runtime_checkable
class BackgroundSaver(Protocol):
    """A `TrainerWorker` that can also save while it trains.

    At most one save is under way. Meanwhile every method of `TrainerWorker` may be called; `save` and `load` wait for
    it first.
    """

    @abstractmethod
    def begin_save(self, path: Path) -> None:
        """Begin to save the present state, as `TrainerWorker.save` does; collective.

        Returns once the state is copied; later changes are not saved. Waits for an earlier save first. If that save
        failed, its `CheckpointError` is raised on every rank and no new save begins.
        """

    @abstractmethod
    def finish_save(self, timeout_s: float) -> None:
        """Return once the save has written its path, or at once if there is none to finish. Not collective.

        Raises `CheckpointError`, once, if the save failed: the earlier checkpoint at the path is still whole, and the
        state of training is unaffected. Also raises `CheckpointError` if the save goes on after ``timeout_s`` seconds:
        it is then still pending, and the call may be repeated.
        """

    @property
    @abstractmethod
    def save_pending(self) -> bool:
        """Return whether a save is under way on this rank; False once it succeeded or failed. Never waits."""


@runtime_checkable
class WeightSender(Protocol):
    """The trainer's end of a transport. Used by rank 0 only; its blocking calls run outside the event loop."""

    @property
    @abstractmethod
    def is_collective(self) -> bool:
        """Return whether all endpoints receive a bucket at once, while it is sent.

        False: each endpoint reads a bucket by itself after it was sent, so one that fails does not affect the others.
        """

    @abstractmethod
    def specs(self, run_id: str, num_ranks: Sequence[int], timeout_s: float) -> Sequence[TransportSpec]:
        """Open a new group and return a spec for each endpoint; endpoint i takes ``num_ranks[i]`` ranks."""

    @abstractmethod
    def join(self) -> None:
        """Join the group just opened; blocks until every rank has joined. Raises `TransferError` after the timeout."""

    @abstractmethod
    def begin(self, update: WeightUpdate) -> None:
        """Prepare to send the buckets of ``update``. Raises `TransferError`."""

    @abstractmethod
    def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        """Send one bucket; blocks until it has left. Raises `TransferError`; the group is unusable then."""

    @abstractmethod
    def end(self, *, is_done: bool) -> None:
        """End the update. ``is_done`` says that no endpoint will read any of it again."""

    @abstractmethod
    def abort(self) -> None:
        """End a call that is pending in another thread, and give up the group. Idempotent."""


@runtime_checkable
class WeightReceiver(Protocol):
    """One endpoint rank's end of a transport. Its blocking calls run outside the event loop."""

    @abstractmethod
    def join(self) -> None:
        """Join the group; blocks until every rank has joined. Raises `TransferError` after the timeout."""

    @abstractmethod
    def begin(self, ref: UpdateRef) -> None:
        """Prepare to receive the buckets of this update, from the first.

        Tensors returned so far stay as they are: an endpoint may serve from them, or decode a delta against them.
        Memory may be used again only once nothing refers to it.
        """

    @abstractmethod
    def receive(self, specs: Sequence[TensorSpec], timeout_s: float) -> list[torch.Tensor]:
        """Return the tensors of the next bucket, in order. Raises `TransferError`; the group is unusable then."""

    @abstractmethod
    def abort(self) -> None:
        """End a call that is pending in another thread, and give up the group. Idempotent."""


@runtime_checkable
class ReceivesAhead(Protocol):
    """A `WeightReceiver` that can also receive the next bucket while the last one is compared."""

    @abstractmethod
    def receive_ahead(self, specs: Sequence[TensorSpec], timeout_s: float) -> None:
        """Start to receive the next bucket in the background; the next `receive` returns it, or raises what failed.

        Returns at once. At most one bucket is ahead; ``specs`` are those of that `receive`, and ``timeout_s`` bounds
        how long the sender may take to begin and to end.
        """


@runtime_checkable
class SendsFromDevice(Protocol):
    """A `WeightSender` that may send buckets from where they were gathered, instead of from host memory."""

    @property
    @abstractmethod
    def sends_from_device(self) -> bool:
        """Return whether it does. Its buckets' checksums are then computed on their device, on both sides."""


@runtime_checkable
class Transport(Protocol):
    """One way for weights to travel: how its two ends are made. Values of it hold no state.

    The entry point group ``inflight.transports`` names them. Making a value loads no torch.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name of the entry point, such as ``gloo``; the specs of its sender carry it as ``transport``."""

    @property
    @abstractmethod
    def spec_type(self) -> type[TransportSpec]:
        """Return the type of its specs. A server reads with it what a stranger sends: every field needs its bounds."""

    @property
    @abstractmethod
    def needs_gpu(self) -> bool:
        """Return whether both ends are on a GPU."""

    @abstractmethod
    def sender(self, *, address: str, directory: Path | None) -> WeightSender:
        """Return the trainer's end.

        ``address`` is this machine's address as the endpoints see it. Where the transport stores buckets, they lie in
        ``directory``, or in one that the sender makes if that is None. Raises `ConfigError`.
        """

    @abstractmethod
    def receiver(self, spec: TransportSpec, *, rank: int, device: torch.device | None) -> WeightReceiver:
        """Return the end of one rank of an endpoint, for a spec of `spec_type`.

        ``rank`` counts the endpoint's own ranks from 0, and ``device`` is where they have their weights.
        """


@runtime_checkable
class Task(Protocol):
    """Problems and how to score an answer, in one turn. Deterministic: item i is the same in every process."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name for reports and errors."""

    @abstractmethod
    def item(self, index: int) -> TaskItem:
        """Return problem ``index``, for any index from 0; a run trains in the order of indices."""

    @abstractmethod
    def score(self, item: TaskItem, completion: str) -> float:
        """Return the reward of a completion's text. An exception stops the run as a `TaskError`."""


class Conversation(Protocol):
    """One token stream of an episode. Sampled tokens are kept as they are; only new text is tokenised."""

    @abstractmethod
    async def say(self, *messages: Message | str) -> Reply:
        """Append messages and return what the model answers; a text is a message of the user.

        Raises `ContextFullError` if the answer has no room, `InvalidRequestError` if the chat template refuses a
        message: nothing was appended. Where an endpoint fails, the turn is sampled on another one.
        """

    @abstractmethod
    async def observe(self, token_ids: Sequence[int]) -> Reply:
        """Append tokens as they are and return what the model answers. Raises as `say`."""

    @abstractmethod
    def reward_turn(self, reward: float) -> None:
        """Give the last turn a reward of its own, which counts if the run assigns credit by turn."""

    @abstractmethod
    def reward(self, reward: float) -> None:
        """Give the conversations of this role another reward than the rest of the episode."""


class Episode(Protocol):
    """One play of an environment, as the environment sees it: who answers, and what is recorded."""

    @property
    @abstractmethod
    def seed(self) -> int:
        """Return a seed that differs between the episodes of a run, and is the same when one is played again."""

    @abstractmethod
    def conversation(self, *, system: str = "", tools: Sequence[Tool] = (), role: str = "") -> Conversation:
        """Begin a conversation; an episode may have several, at the same time too.

        ``tools`` are what the model may call; carrying it out is up to the environment. Conversations with different
        roles are compared apart.
        """

    @abstractmethod
    async def openai_url(self, role: str = "") -> str:
        """Return a base URL for clients of OpenAI's API, whose calls become part of this episode.

        It ends with ``/e/KEY/v1``, where KEY is a secret that stands for the episode and the role, and may also be sent
        as the API key. Roles have URLs of their own, and what is posted there is the reward of that role. Raises
        `UnsupportedError` where no proxy is served.
        """

    @property
    @abstractmethod
    def posted_reward(self) -> float | None:
        """Return the reward that a client has posted for the episode, or the mean of its roles'; None if none has."""


@runtime_checkable
class Environment(Protocol):
    """Start states, and how an episode is played from one. `Task` is the short form for one prompt and one answer."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name for reports and errors."""

    @abstractmethod
    def item(self, index: int) -> TaskItem:
        """Return start state ``index``, for any index from 0. Deterministic: the same in every process."""

    @abstractmethod
    async def play(self, item: TaskItem, episode: Episode) -> float:
        """Play one episode and return its reward.

        Many plays run at once in one event loop: use threads or processes for what blocks. A play is cancelled if it
        takes too long. An exception, or a reward that is not finite, costs this episode only.
        """


@runtime_checkable
class StalenessPolicy(Protocol):
    """Which tokens and groups are too old to train on, and how much may be under way. Deterministic, without I/O."""

    @abstractmethod
    def mask(self, token_versions: Sequence[int], trainer_version: int) -> Sequence[bool]:
        """Return, for each token of one completion, whether a step from ``trainer_version`` trains on it."""

    @abstractmethod
    def max_outstanding_groups(self, groups_per_step: float) -> int:
        """Return how many groups may be in flight, or finished but not trained, at once; at least 1.

        ``groups_per_step`` is an average. One more group is admitted where none is in flight and no step is ready.
        """

    def trainable(self, waiting: Sequence[int], oldest: int, groups_per_step: float) -> Sequence[bool]:
        """Return which of the waiting groups a step may be made of; by default all of them.

        Groups are given by the order in which they were offered; ``oldest`` is the first one that is sampled or scored,
        or the next to be offered if none is. Groups before it must be allowed, or nothing might ever be trained.
        """
        return [True] * len(waiting)

    def can_train(self, first_version: int, trainer_version: int) -> bool:
        """Return whether a completion whose first token ``first_version`` sampled may still be trained on.

        That is, whether `mask` may keep any of its tokens, those included that are not sampled yet, in a step from
        ``trainer_version`` or a later one. By default it may. If no completion of a group may, sampling of the group
        ends, and the group is dropped.
        """
        return True

    def after_step(self, version: int, effective_sample_size: float | None) -> None:
        """Take note of a step that led to ``version``; nothing by default. Raises `TrainerError` to stop the run.

        ``effective_sample_size`` is that of the step's importance ratios, as a share between 0 and 1; None: the loss
        has no ratios.
        """
        return

    def state(self) -> dict[str, Any]:
        """Return, as JSON values, what a later `restore` needs; nothing by default."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned. Called before anything else."""
        return


@runtime_checkable
class Scheduler(Protocol):
    """Which completions run where and when. Deterministic, without I/O: no clock, thread, file or randomness.

    `inflight.scheduling` has the events that it is told and the decisions that it answers. The live run and a simulator
    drive the same objects. It is constructed with ``group_size`` (completions per item), ``history`` (a `HistoryStore`,
    which the run fills), ``seed`` and parameters of its own.
    """

    surplus: float = 1.0
    """How many times as many groups as a step needs it may be offered in conventional mode."""

    @abstractmethod
    def tell(self, event: Event) -> None:
        """Take note of an event. Events come in the order of their times."""

    @abstractmethod
    def num_wanted(self) -> int:
        """Return how many more items to offer now; the staleness policy may allow fewer."""

    @abstractmethod
    def decide(self, time_s: float) -> Sequence[Decision]:
        """Return what to do now; empty: nothing until the next event. Each decision counts as carried out."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return, as JSON values, what a later `restore` needs: neither items nor endpoints, which are told again."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned. Called before anything is told."""

    def metrics(self) -> Mapping[str, float]:
        """Return figures of its own for the row of the last step, and begin anew; none by default."""
        return {}


@runtime_checkable
class LengthPredictor(Protocol):
    """How long the completions of a prompt will be. Deterministic, without I/O."""

    @abstractmethod
    def predict(self, prompt: str, finished: Sequence[int]) -> float | None:
        """Return the expected length in tokens; None if nothing is known.

        ``prompt`` identifies the prompt as in `inflight.scheduling.Offered`; ``finished`` are the lengths of those of
        its group that have finished.
        """


@runtime_checkable
class BatchComposer(Protocol):
    """Which finished groups make up the next optimizer step. Deterministic, without I/O."""

    @abstractmethod
    def compose(self, groups: Sequence[Group], num_tokens: Sequence[int]) -> Sequence[int]:
        """Return the indices of the groups of a step, none twice; an empty sequence waits for more groups.

        ``groups`` are those that wait, oldest first, and ``num_tokens[i]`` counts the tokens of ``groups[i]`` that a
        step would train on. Called again whenever a group arrives; sampling pauses while a step is ready.
        """

    def accepts(self, group: Group) -> bool:
        """Return whether a finished group may be trained on; by default any.

        Others are dropped, and further items are sampled.
        """
        return True

    def shaped(self, samples: Sequence[Sample], version: int) -> Sequence[Sample]:
        """Return what a step trains on, of the samples of the groups that it is made of; by default all of them.

        ``version`` is that of the step. A sample may come back with more of its tokens masked, several times, or not at
        all; denominators count the groups as they were.
        """
        return samples

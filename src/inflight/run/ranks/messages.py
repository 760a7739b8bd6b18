"""The messages between the run and its trainer ranks.

The run sends a request to every rank. A rank sends any number of status messages, and then its answer. The tensors of
micro-batches are sent with the request, by name.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    field_serializer,
)

from inflight.errors import TrainerError
from inflight.observe.trace import events
from inflight.run.config import RunConfig
from inflight.types import MicroBatch
from inflight.weights.send.fleet import MemberState, StateChange


class Message(BaseModel):
    """The base of every message, which is immutable, rejects unknown fields, and keeps NaN and infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


# ---------------------------------------------------------------------------------------------------------------
# Requests of the run


class Members(Message):
    """The servers that a publish updates."""

    urls: tuple[str, ...] = ()
    ask_all: bool = False
    """Whether the publish retries every server that was left out, without waiting for the server's backoff."""


class Start(Message):
    """Load the model or a checkpoint, and update the servers to its weights. Answered by `Ready`."""

    type: Literal["start"] = "start"
    config: RunConfig
    run_id: str
    members: Members | None
    """The servers to update; None if the run never publishes."""
    checkpoint: Path | None
    rendezvous: str
    """``HOST:PORT`` of rank 0's store, through which the ranks connect; empty for a single rank."""

    @field_serializer("config")
    def _as_written(self, config: RunConfig) -> dict[str, Any]:
        """Omit unset fields, because a section may reject two fields together even if both have their defaults."""
        return config.model_dump(mode="json", exclude_unset=True)


class Train(Message):
    """Take one optimizer step on the micro-batches sent with this message. Answered by `Trained`."""

    type: Literal["train"] = "train"
    segment_lengths: tuple[tuple[int, ...], ...]
    """Segment lengths of each micro-batch."""
    num_groups: int
    """The number of groups in the whole step; ``num_sequences`` also covers the whole step."""
    num_sequences: int
    publish: Members | None
    """The servers to which the new version is published; None if it is not published."""
    returns_logprobs: bool = False
    """Whether the answer includes the trainer logprobs."""


class Accumulate(Message):
    """Compute a loss of Tinker's API on the micro-batches sent with this message, and accumulate its gradient.

    Answered by `Accumulated`. Tensors named ``inputs.I.NAME`` are the loss inputs of micro-batch I.
    """

    type: Literal["accumulate"] = "accumulate"
    segment_lengths: tuple[tuple[int, ...], ...]
    loss_fn: str
    settings: dict[str, float]
    forward_only: bool
    """Whether gradients stay unchanged."""


class OptimizerStep(Message):
    """Take one optimizer step with these settings of `AdamSettings`. Answered by `Stepped`, which may be a refusal."""

    type: Literal["optimizer_step"] = "optimizer_step"
    settings: dict[str, Any]


class Load(Message):
    """Load a checkpoint. Answered by `Done`, which may be a refusal."""

    type: Literal["load"] = "load"
    path: Path
    optimizer: bool


class PublishAs(Message):
    """Publish the current weights to some servers, under a version of the caller's choice. Answered by `Done`."""

    type: Literal["publish_as"] = "publish_as"
    urls: tuple[str, ...]
    version: int
    regroup: bool
    """Whether another publisher may have taken over the servers since the last publish."""


class PublishPresent(Message):
    """Publish the current version, for the first time or again. Answered by `Done`.

    If the current version is being published in a thread, that publish is awaited instead.
    """

    type: Literal["publish"] = "publish"
    members: Members


class Save(Message):
    """Write a checkpoint, or start writing it if the run saves in the background. Answered by `Done`."""

    type: Literal["save"] = "save"
    path: Path


class FinishSave(Message):
    """Wait until the pending checkpoint is complete. Answered by `Done`."""

    type: Literal["finish_save"] = "finish_save"


Request = Annotated[
    Start | Train | Accumulate | OptimizerStep | Load | PublishAs | PublishPresent | Save | FinishSave,
    Field(discriminator="type"),
]


# ---------------------------------------------------------------------------------------------------------------
# Replies of a rank


class PublishResult(Message):
    """The duration of a publish and the servers that it reached. No server is listed when servers pull."""

    span: tuple[float, float]
    """Start and end, in wall-clock seconds."""
    is_published: bool = True
    """False if no server could be reached."""
    version: int
    size_bytes: int
    sent_bytes: int
    gather_s: float
    wire_s: float
    total_s: float
    pause_s: float = 0.0
    load_s: float = 0.0
    first_token_s: float | None = None
    paused_s: dict[str, float] = {}
    """Seconds that each endpoint was paused."""
    outcomes: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    """Messages for the user about servers that were left out."""
    states: dict[str, MemberState] = {}
    """The state of every member, by endpoint name."""
    changes: tuple[StateChange, ...] = ()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Names of the endpoints that hold the version."""
        return tuple(name for name, state in self.states.items() if state is MemberState.HEALTHY)

    @property
    def removed(self) -> tuple[str, ...]:
        """Names of the members that do not hold the version."""
        return tuple(name for name in self.states if name not in self.endpoints)

    def event_fields(self) -> dict[str, Any]:
        """Return the fields of this publish's `events.WeightsPublished`."""
        return self.model_dump(include=set(events.WeightsPublished.model_fields))

    def metrics(self) -> dict[str, Any]:
        """Return the fields that this publish contributes to a row of metrics."""
        gb_per_s = self.sent_bytes / 1e9 / self.wire_s if self.wire_s > 0 else None
        return {**self.event_fields(), "gb_per_s": gb_per_s}


class Here(Message):
    """The first message of a rank, after the handshake."""

    type: Literal["here"] = "here"
    rendezvous: str = ""
    """``HOST:PORT`` of the store that rank 0 hosts for the others."""


class StatusMessage(Message):
    """The rank has begun an activity. The answer to the request follows later."""

    type: Literal["doing"] = "doing"
    what: str


class Failed(Message):
    """The request raised an exception, and the rank ends."""

    type: Literal["failed"] = "failed"
    code: str | None
    """Code of an `InflightError`; None for any other exception."""
    message: str
    traceback: str
    blames_another_rank: bool


def _encoded(values: npt.NDArray[np.float32]) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")


def _decoded(value: Any) -> Any:
    return np.frombuffer(base64.b64decode(value), "<f4") if isinstance(value, str) else value


Floats = Annotated[
    npt.NDArray[np.float32],
    InstanceOf(),
    BeforeValidator(_decoded),
    PlainSerializer(_encoded, return_type=str),
]
"""A float32 array; in JSON, the base64 encoding of its little-endian bytes."""


class RankAnswer(Message):
    """The base of the answers to successful requests."""

    version: int
    published: PublishResult | None = None
    """Rank 0's result of a publish that has ended since the last answer; None on the other ranks."""
    saved: int | None = None
    """Version whose checkpoint this rank has completed since the last answer."""
    notes: tuple[str, ...] = ()
    """Messages for the user since the last answer: warnings of lost precision, and log messages of the worker."""
    refusal: tuple[str, str] | None = None
    """The code and message of an error that every rank raised and that changed nothing, so the ranks accept further
    requests.
    """


class Done(RankAnswer):
    """The request has succeeded."""

    type: Literal["done"] = "done"


class Ready(RankAnswer):
    """The model is loaded, and the servers hold its weights."""

    type: Literal["ready"] = "ready"
    data_rank: int
    """The share of each step's data that the rank computes; several ranks may compute one share together."""
    shares_prefixes: bool
    """Whether the worker is a `PrefixSharingWorker` that shares prefixes."""
    takes_step_settings: bool = False
    """Whether the worker is an `AdjustableWorker` that takes step settings."""
    scores_target_ids: bool = False
    """Whether the worker is a `TargetScoringWorker` that scores targets."""


class Accumulated(RankAnswer):
    """A loss was computed on all micro-batches, and its gradient was accumulated if requested."""

    type: Literal["accumulated"] = "accumulated"
    loss: float
    """Sum over the rank's micro-batches."""
    logprobs: tuple[Floats, ...]
    """Values [T * K] for each micro-batch, 0.0 where there is no target."""


class Stepped(RankAnswer):
    """An optimizer step is complete, unless this answer is a refusal."""

    type: Literal["stepped"] = "stepped"
    gradient_norm: float = 0.0
    learning_rate: float = 0.0


class Trained(RankAnswer):
    """The optimizer step that produced ``version`` is complete."""

    type: Literal["trained"] = "trained"
    gradient_norm: float
    learning_rate: float
    metrics: dict[str, list[float]]
    """Metrics in the form that `encode_metrics` returns."""
    span: tuple[float, float]
    """Start and end of training, without the publish after it, but with the wait for a publish that overlaps it."""
    logprobs: tuple[Floats, ...] = ()
    """Trainer logprobs [T] of each micro-batch before the step, 0.0 where there is no target; empty if not
    requested."""


Reply = Annotated[
    Here | StatusMessage | Failed | Done | Ready | Accumulated | Stepped | Trained, Field(discriminator="type")
]


# ---------------------------------------------------------------------------------------------------------------
# Micro-batches

_TENSORS = tuple(it.name for it in fields(MicroBatch) if it.name not in ("segment_lengths", "image_tensors"))


def tensors_of(batches: Iterable[MicroBatch]) -> dict[str, torch.Tensor]:
    """Return the tensors of micro-batches, named by index and field."""
    named: dict[str, torch.Tensor | None] = {}
    for i, batch in enumerate(batches):
        named |= {f"{i}.{name}": getattr(batch, name) for name in _TENSORS}
        named |= {f"{i}.image_tensors.{name}": tensor for name, tensor in batch.image_tensors.items()}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def micro_batches_of(segment_lengths: Sequence[Sequence[int]], tensors: Mapping[str, torch.Tensor]) -> list[MicroBatch]:
    """Return the micro-batches whose tensors `tensors_of` returned. Raises `TrainerError` if the tensors do
    not form micro-batches.
    """
    parts: list[dict[str, Any]] = [{"segment_lengths": tuple(lengths)} for lengths in segment_lengths]
    try:
        for key, tensor in tensors.items():
            index, name, *of_images = key.split(".", 2)
            part = parts[int(index)]
            if of_images:
                part.setdefault(name, {})[of_images[0]] = tensor
            else:
                part[name] = tensor
        return [MicroBatch(**part) for part in parts]
    except (IndexError, TypeError, ValueError) as error:
        raise TrainerError(f"the tensors of a step do not form micro-batches: {error}") from error

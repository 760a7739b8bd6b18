"""What the run and its trainer ranks say to one another.

The run sends a request to every rank. A rank says what it begins to do, any number of times, and then answers. The
tensors of micro-batches travel beside the message, by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_serializer

from inflight.errors import TrainerError
from inflight.pipeline.config import RunConfig
from inflight.types import MicroBatch
from inflight.weights.fleet import MemberState


class Message(BaseModel):
    """Base of every message: immutable, unknown fields refused, NaN and infinity kept."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


# ---------------------------------------------------------------------------------------------------------------
# What the run asks for


class Members(Message):
    """Who joins and who leaves the fleet before a publish."""

    join: tuple[str, ...] = ()
    """URLs."""
    leave: tuple[str, ...] = ()
    """Names."""
    ask_all: bool = False
    """Whether the publish asks every server that was left out, whatever its pause."""


class Start(Message):
    """Load the model, or a checkpoint, and bring the servers to its weights. Answered by `Done`."""

    type: Literal["start"] = "start"
    config: RunConfig
    run_id: str
    urls: tuple[str, ...]
    checkpoint: Path | None

    @field_serializer("config")
    def _as_written(self, config: RunConfig) -> dict[str, Any]:
        """Leave out what nobody set: a section may refuse two fields together, defaults included."""
        return config.model_dump(mode="json", exclude_unset=True)


class Train(Message):
    """Take one optimizer step on the micro-batches sent along. Answered by `Trained`."""

    type: Literal["train"] = "train"
    segment_lengths: tuple[tuple[int, ...], ...]
    """Of each micro-batch."""
    num_groups: int
    """Of the step, over all ranks; so is ``num_sequences``."""
    num_sequences: int
    publish: Members | None
    """None: the new version is not published."""


class Publish(Message):
    """Publish the present version again. Answered by `Done`."""

    type: Literal["publish"] = "publish"
    members: Members


class Save(Message):
    """Write a checkpoint, or begin to if the run saves in the background. Answered by `Done`."""

    type: Literal["save"] = "save"
    path: Path


class FinishSave(Message):
    """Wait until the checkpoint that was begun stands. Answered by `Done`."""

    type: Literal["finish_save"] = "finish_save"


Request = Annotated[Start | Train | Publish | Save | FinishSave, Field(discriminator="type")]


# ---------------------------------------------------------------------------------------------------------------
# What a rank says


class PublishFacts(Message):
    """What a publish cost, as a row of metrics holds it."""

    version: int
    size_bytes: int
    sent_bytes: int
    gb_per_s: float | None
    gather_s: float
    wire_s: float
    total_s: float
    hold_s: float = 0.0
    load_s: float = 0.0
    first_token_s: float | None = None
    held_s: dict[str, float] = {}
    """For how long each endpoint was held."""
    outcomes: dict[str, str] = {}


class Served(Message):
    """What a publish did, and whom it reached; nobody is named where servers pull."""

    span: tuple[float, float]
    """Beginning and end, in wall-clock seconds."""
    facts: PublishFacts | None
    """None if no server could be reached."""
    endpoints: tuple[str, ...] = ()
    """Names of the endpoints that hold the version."""
    lost: tuple[str, ...] = ()
    """What a person should know of servers that were left out."""
    restored: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    states: dict[str, MemberState] = {}
    changes: tuple[tuple[str, MemberState | None, MemberState], ...] = ()
    """Name, state before and state after of each endpoint whose state changed."""


class Doing(Message):
    """The rank begins something; its answer is still to come."""

    type: Literal["doing"] = "doing"
    what: str


class Failed(Message):
    """The request raised, and the rank ends."""

    type: Literal["failed"] = "failed"
    code: str | None
    """Of an `InflightError`; None for any other exception."""
    message: str
    traceback: str
    blames_another_rank: bool


class Answer(Message):
    """Base of what a rank says once it has done what a request asks for."""

    version: int
    served: Served | None = None
    """What rank 0 says of a publish, if there was one; None on the other ranks."""
    saved: int | None = None
    """Version whose checkpoint stands on this rank since the last answer."""
    warnings: tuple[str, ...] = ()
    """Of lost precision, since the last answer."""


class Done(Answer):
    """Everything is done that the request asks for."""

    type: Literal["done"] = "done"


class Trained(Answer):
    """The optimizer step that made ``version`` is taken."""

    type: Literal["trained"] = "trained"
    gradient_norm: float
    learning_rate: float
    metrics: dict[str, list[float]]
    """As `encode_metrics` returns them."""
    span: tuple[float, float]
    """Of the training, without the publish."""


Reply = Annotated[Doing | Failed | Done | Trained, Field(discriminator="type")]


# ---------------------------------------------------------------------------------------------------------------
# Micro-batches

_TENSORS = tuple(field.name for field in fields(MicroBatch) if field.name != "segment_lengths")


def tensors_of(batches: Iterable[MicroBatch]) -> dict[str, torch.Tensor]:
    """Return every tensor of some micro-batches by index and field name."""
    named = {f"{i}.{name}": getattr(batch, name) for i, batch in enumerate(batches) for name in _TENSORS}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def micro_batches_of(segment_lengths: Sequence[Sequence[int]], tensors: Mapping[str, torch.Tensor]) -> list[MicroBatch]:
    """Return the micro-batches whose `tensors_of` these are. Raises `TrainerError` if there are none such."""
    parts: list[dict[str, Any]] = [{"segment_lengths": tuple(lengths)} for lengths in segment_lengths]
    try:
        for key, tensor in tensors.items():
            index, name = key.split(".")
            parts[int(index)][name] = tensor
        return [MicroBatch(**part) for part in parts]
    except (IndexError, TypeError, ValueError) as error:
        raise TrainerError(f"the tensors of a step make no micro-batches: {error}") from error

"""The events of a run: one line of JSON each, told apart by ``kind``.

Times are seconds since the run began, without the time between its processes; `Began` says when that was. An event has
a start and an end, which are equal for what has no duration. Versions count optimizer steps. Readers ignore fields
that they do not know; `SCHEMA_VERSION` rises when a field changes its meaning or disappears.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

SCHEMA_VERSION = 1


class Event(BaseModel):
    """Base of every event. Keeps NaN and infinity, as Python's JSON does."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="constants")

    kind: str
    start_s: float
    end_s: float


class Began(Event):
    """A process of the run began, or a new file of events: the first line of each."""

    kind: Literal["began"] = "began"
    schema_version: int = SCHEMA_VERSION
    began_at: float
    """Second 0 of this process's events, in seconds since 1970."""
    version: int
    """Trained versions so far; 0 in a new run."""
    inflight: str
    config: dict[str, Any] = {}
    """The run's configuration, as in ``config.json``."""


# ---------------------------------------------------------------------------------------------------------------
# Sampling


class SampledPart(BaseModel):
    """What a request brought of one completion, or the state of one episode after it."""

    model_config = ConfigDict(frozen=True)

    number: int
    """Of the completion in its group, from 0."""
    num_tokens: int
    """So far, with what earlier requests brought."""
    spans: tuple[tuple[int, int, int], ...]
    """Start, end and version of each stretch of its tokens that one version sampled."""
    finish_reason: str
    turns: tuple[tuple[float, float, int], ...] = ()
    """Of an episode: start, end and sampled tokens of each turn. Between them its environment was at work."""


class Request(Event):
    """A request was at an endpoint: completions of one group, or an episode's stay there."""

    kind: Literal["request"] = "request"
    endpoint: str
    item: int
    request_id: str
    numbers: tuple[int, ...]
    """Completions that it asked for."""
    parts: tuple[SampledPart, ...]
    """What it brought; empty if it was lost or cancelled."""
    error: str | None = None


class Running(Event):
    """The number of groups that are being sampled or scored changed."""

    kind: Literal["running"] = "running"
    num_groups: int


class Group(Event):
    """A group is complete and has its rewards. One entry per rollout; an episode may bring several."""

    kind: Literal["group"] = "group"
    endpoint: str
    """Names of its endpoints, separated by commas."""
    item: int
    oldest: int | None
    """Oldest and newest version that sampled one of its tokens."""
    newest: int | None
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    """Sampled tokens."""


class Drop(Event):
    """The ledger settled an item that no step will train on."""

    kind: Literal["drop"] = "drop"
    reason: str
    item: int
    what: str = ""


class EpisodeFailed(Event):
    """An episode counts for nothing."""

    kind: Literal["episode failed"] = "episode failed"
    item: int
    reason: str
    what: str


# ---------------------------------------------------------------------------------------------------------------
# Training and publishing


class Train(Event):
    """An optimizer step, from the first forward to the end of the step, without the publish."""

    kind: Literal["train"] = "train"
    version: int
    """The version that it made."""
    ranks: tuple[tuple[float, float], ...]
    """Start and end on each rank."""
    items: tuple[int, ...]
    """What the ledger settled with it, in the order of the batch."""


class Publish(Event):
    """A version went to the servers. ``gather_s`` and ``wire_s`` overlap."""

    kind: Literal["publish"] = "publish"
    version: int
    size_bytes: int
    sent_bytes: int
    gather_s: float
    wire_s: float
    load_s: float
    pause_s: float
    """From the first server asked to pause to the last one resumed."""
    first_token_s: float | None
    """From the resume to the first token."""
    total_s: float
    paused_s: dict[str, float]
    """By endpoint."""
    outcomes: dict[str, str]
    """By endpoint, as `inflight.types.EndpointOutcome`."""


class Step(Event):
    """An optimizer step is complete, with all its metrics; the rows of ``metrics.jsonl``."""

    model_config = ConfigDict(frozen=True, extra="allow", ser_json_inf_nan="constants")

    kind: Literal["step"] = "step"
    version: int
    time_s: float
    """Equal to ``end_s``."""
    reward: float | None
    """Mean of the rollouts finished since the step before; None if there were none."""


class Saved(Event):
    """A checkpoint of a version is complete."""

    kind: Literal["saved"] = "saved"
    version: int


# ---------------------------------------------------------------------------------------------------------------
# Servers


class Fleet(Event):
    """Which servers came, went or changed state."""

    kind: Literal["fleet"] = "fleet"
    version: int
    restored: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    changes: tuple[tuple[str, str | None, str], ...] = ()
    """Endpoint, state before (None for a new one), state after."""
    states: dict[str, str] = {}
    """Of every member, where the publisher told them."""
    serving: tuple[str, ...] = ()


class Versions(Event):
    """Which version each server serves that pulls by itself; None: it gets no work."""

    kind: Literal["versions"] = "versions"
    trainer: int
    servers: dict[str, int | None]


class Scale(Event):
    """The run started or stopped a server of its own."""

    kind: Literal["scale"] = "scale"
    change: Literal["grow", "shrink"]
    servers: tuple[str, ...]


class MemoryTurn(Event):
    """Servers gave up their memory for the trainers, or have it back."""

    kind: Literal["released", "restored"]
    servers: tuple[str, ...]


# ---------------------------------------------------------------------------------------------------------------
# The end


class Failure(Event):
    """What ended the run, or a life of it that the run outlived."""

    kind: Literal["failure"] = "failure"
    what: str


class Ended(Event):
    """The run came to its end."""

    kind: Literal["ended"] = "ended"
    version: int
    is_interrupted: bool


AnyEvent = Annotated[
    Began
    | Request
    | Running
    | Group
    | Drop
    | EpisodeFailed
    | Train
    | Publish
    | Step
    | Saved
    | Fleet
    | Versions
    | Scale
    | MemoryTurn
    | Failure
    | Ended,
    Field(discriminator="kind"),
]

ANY_EVENT: TypeAdapter[AnyEvent] = TypeAdapter(AnyEvent)
"""Validates one event; `ANY_EVENT.json_schema()` is the schema of a line."""

"""The events of a run: one line of JSON each, distinguished by ``kind``.

Times are seconds since the run began, without the time between its processes; `RunStarted` records when that was. An
event has a start and an end, which are equal if it has no duration. Versions count optimizer steps. Readers ignore
unknown fields; `SCHEMA_VERSION` rises when a field changes its meaning or disappears.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

SCHEMA_VERSION = 1


class Event(BaseModel):
    """Base of every event. Keeps NaN and infinity, as Python's JSON does."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="constants", use_attribute_docstrings=True)

    kind: str
    start_s: float
    end_s: float


class RunStarted(Event):
    """A process of the run began, or a new file of events: the first line of each."""

    kind: Literal["run_started"] = "run_started"
    schema_version: int = SCHEMA_VERSION
    """Of the lines that follow."""
    began_at: float
    """Second 0 of this process's events, in seconds since 1970."""
    version: int
    """Trained versions so far; 0 in a new run."""
    inflight: str
    """The release that writes."""
    config: dict[str, Any] = {}
    """The run's configuration, as in ``config.json``."""


# ---------------------------------------------------------------------------------------------------------------
# Sampling


class SampledPart(BaseModel):
    """What a request brought of one completion, or the state of one episode after it."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    number: int
    """Of the completion in its group, from 0."""
    num_tokens: int
    """So far, with what earlier requests brought."""
    spans: tuple[tuple[int, int, int], ...]
    """Start, end and version of each stretch of its tokens that one version sampled."""
    finish_reason: str
    """``stop``, ``length``, ``abort`` where the rest was sampled by another request, or ``failed``."""
    turns: tuple[tuple[float, float, int], ...] = ()
    """Of an episode: start, end and sampled tokens of each turn. Between them its environment was at work."""


class RequestEnded(Event):
    """A request was at an endpoint: completions of one group, or an episode's stay there."""

    kind: Literal["request"] = "request"
    endpoint: str
    """The server's URL."""
    item: int
    """Index of the task's item, which the ledger counts."""
    request_id: str
    """As the server knew it."""
    numbers: tuple[int, ...]
    """Completions that it asked for."""
    parts: tuple[SampledPart, ...]
    """What it brought; empty if it was lost or cancelled."""
    error: str | None = None
    """Why it brought nothing; ``cancelled`` if the run wanted it no longer."""


class RunningGroups(Event):
    """The number of groups that are being sampled or scored changed."""

    kind: Literal["running_groups"] = "running_groups"
    num_groups: int


class GroupFinished(Event):
    """A group is complete and has its rewards. One entry per rollout; an episode may bring several."""

    kind: Literal["group"] = "group"
    endpoint: str
    """Names of its endpoints, separated by commas."""
    item: int
    oldest: int | None
    """Oldest and newest version that sampled one of its tokens."""
    newest: int | None
    rewards: tuple[float, ...]
    """Of each rollout."""
    lengths: tuple[int, ...]
    """Sampled tokens."""


class ItemDropped(Event):
    """The ledger settled an item that no step will train on."""

    kind: Literal["item_dropped"] = "item_dropped"
    reason: str
    """``equal rewards``, ``filtered``, ``stale``, ``unusable``, ``failed`` or ``failed episodes``."""
    item: int
    what: str = ""
    """What happened, where more is known than the reason."""


class EpisodeFailed(Event):
    """An episode counts for nothing."""

    kind: Literal["episode_failed"] = "episode_failed"
    item: int
    reason: str
    """The class of failure, by which the run counts."""
    what: str
    """What happened."""


# ---------------------------------------------------------------------------------------------------------------
# Training and publishing


class StepTrained(Event):
    """An optimizer step, from the first forward to the end of the step, without the publish."""

    kind: Literal["train"] = "train"
    version: int
    """The version that it made."""
    ranks: tuple[tuple[float, float], ...]
    """Start and end on each rank."""
    items: tuple[int, ...]
    """What the ledger settled with it, in the order of the batch."""


class WeightsPublished(Event):
    """A version went to the servers. ``gather_s`` and ``wire_s`` overlap."""

    kind: Literal["publish"] = "publish"
    version: int
    size_bytes: int
    """Of the version."""
    sent_bytes: int
    """Sent or stored, once however many servers took them."""
    gather_s: float
    """Gathering the weights from the ranks."""
    wire_s: float
    """Their way to the servers."""
    load_s: float
    """Loading, on the slowest server."""
    pause_s: float
    """From the first server asked to pause to the last one resumed."""
    first_token_s: float | None
    """From the resume to the first token, on the slowest server; None if none was sampled."""
    total_s: float
    """Seen from the publisher."""
    paused_s: dict[str, float]
    """How long each server sampled nothing."""
    outcomes: dict[str, str]
    """By endpoint, as `inflight.types.EndpointOutcome`."""


class StepCompleted(Event):
    """An optimizer step is complete, with all its metrics; the rows of ``metrics.jsonl``."""

    model_config = ConfigDict(extra="allow")

    kind: Literal["step"] = "step"
    version: int
    """The version that it made."""
    time_s: float
    """Equal to ``end_s``."""
    reward: float | None
    """Mean of the rollouts finished since the step before; None if there were none."""


class CheckpointSaved(Event):
    """A checkpoint of a version is complete."""

    kind: Literal["checkpoint_saved"] = "checkpoint_saved"
    version: int


# ---------------------------------------------------------------------------------------------------------------
# Servers


class FleetChanged(Event):
    """Which servers came, went or changed state."""

    kind: Literal["fleet_changed"] = "fleet_changed"
    version: int
    """Trained versions so far."""
    restored: tuple[str, ...] = ()
    """Known servers that hold the present version again."""
    joined: tuple[str, ...] = ()
    """New servers that hold it."""
    removed: tuple[str, ...] = ()
    """Servers that the publisher no longer knows."""
    left: tuple[str, ...] = ()
    """Servers that are no longer listed."""
    changes: tuple[tuple[str, str | None, str], ...] = ()
    """Endpoint, state before (None for a new one), state after."""
    states: dict[str, str] = {}
    """Of every member, where the publisher told them."""
    serving: tuple[str, ...] = ()
    """Those that get work."""


class ServedVersions(Event):
    """Which version each server serves that pulls by itself; None: it gets no work."""

    kind: Literal["served_versions"] = "served_versions"
    trainer: int
    """Trained versions so far."""
    servers: dict[str, int | None]


class FleetScaled(Event):
    """The run started or stopped a server of its own."""

    kind: Literal["fleet_scaled"] = "fleet_scaled"
    change: Literal["grow", "shrink"]
    servers: tuple[str, ...]
    """Those that it has started and that still run."""


class MemoryMoved(Event):
    """Servers released their memory for the trainers, or have it back."""

    kind: Literal["memory_released", "memory_restored"]
    servers: tuple[str, ...]


# ---------------------------------------------------------------------------------------------------------------
# The end


class Failure(Event):
    """What ended the run, or an incarnation of it that the run outlived."""

    kind: Literal["failure"] = "failure"
    what: str


class RunEnded(Event):
    """The run came to its end."""

    kind: Literal["run_ended"] = "run_ended"
    version: int
    is_interrupted: bool
    ledger: dict[str, Any] = {}
    """At the end, as in a step: ``trained``, ``dropped`` by reason, ``requeued``, and ``outstanding``, which no step
    will train on unless the run is resumed."""


AnyEvent = Annotated[
    RunStarted
    | RequestEnded
    | RunningGroups
    | GroupFinished
    | ItemDropped
    | EpisodeFailed
    | StepTrained
    | WeightsPublished
    | StepCompleted
    | CheckpointSaved
    | FleetChanged
    | ServedVersions
    | FleetScaled
    | MemoryMoved
    | Failure
    | RunEnded,
    Field(discriminator="kind"),
]

ANY_EVENT: TypeAdapter[AnyEvent] = TypeAdapter(AnyEvent)
"""Validates one event; `ANY_EVENT.json_schema()` is the schema of a line."""

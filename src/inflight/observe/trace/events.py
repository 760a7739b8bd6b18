"""The events of a run: one line of JSON each, distinguished by ``kind``.

Times are seconds since the run began, excluding the time between one process of the run and the next; `RunStarted`
records the wall-clock time. An event has a start and an end, which are equal if it has no duration. Versions count
optimizer steps. Readers ignore unknown fields; `SCHEMA_VERSION` increases when a field changes its meaning or
disappears.
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
    """A process of the run or a new event file began. This is the first line of every event file."""

    kind: Literal["run_started"] = "run_started"
    schema_version: int = SCHEMA_VERSION
    """Schema version of the lines that follow."""
    began_at: float
    """Second 0 of this process's events, as a Unix time in seconds."""
    version: int
    """Number of trained versions so far; 0 in a new run."""
    inflight: str
    """The release of inflight that writes the events."""
    config: dict[str, Any] = {}
    """The run's configuration, as in ``config.json``."""


# ---------------------------------------------------------------------------------------------------------------
# Sampling


class SampledPart(BaseModel):
    """The state of one completion or episode after a request."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    number: int
    """Number of the completion in its group, from 0."""
    num_tokens: int
    """Tokens sampled so far, including those of earlier requests."""
    spans: tuple[tuple[int, int, int], ...]
    """Start, end and version of each span of tokens that one version sampled."""
    finish_reason: str
    """``stop``, ``length``, ``abort`` if another request continued the completion, or ``failed``."""
    turns: tuple[tuple[float, float, int], ...] = ()
    """Start, end and number of sampled tokens of each turn of an episode. The environment runs between turns."""


class RequestEnded(Event):
    """A request to an endpoint ended: one for completions of a group, or the part of an episode that ran there."""

    kind: Literal["request"] = "request"
    endpoint: str
    """The server's URL."""
    item: int
    """Index of the task item."""
    request_id: str
    """The id of the request on the server."""
    numbers: tuple[int, ...]
    """Numbers of the requested completions in their group, from 0."""
    parts: tuple[SampledPart, ...]
    """The sampled completions; empty if the request was lost or cancelled."""
    error: str | None = None
    """Why the request returned nothing; ``cancelled`` if the run no longer needed it."""


class RunningGroups(Event):
    """The number of groups that are being sampled or scored has changed."""

    kind: Literal["running_groups"] = "running_groups"
    num_groups: int
    """Number of groups that are being sampled or scored."""


class GroupFinished(Event):
    """A group is complete and has its rewards. Lists have one entry per rollout; an episode may produce several.

    A resumed run writes the event again for groups that finished before the checkpoint and wait for a step.
    """

    kind: Literal["group"] = "group"
    endpoint: str
    """Names of the endpoints that sampled the group, separated by commas."""
    item: int
    """Index of the task item."""
    oldest: int | None
    """The oldest version that sampled one of the group's tokens; None if no token was sampled."""
    newest: int | None
    """The newest version that sampled one of the group's tokens."""
    rewards: tuple[float, ...]
    """Reward of each rollout."""
    lengths: tuple[int, ...]
    """Number of sampled tokens of each rollout."""


class ItemDropped(Event):
    """The ledger settled an item that will not be trained on."""

    kind: Literal["item_dropped"] = "item_dropped"
    reason: str
    """``equal rewards``, ``filtered``, ``stale``, ``unusable``, ``failed`` or ``failed episodes``."""
    item: int
    """Index of the task item."""
    what: str = ""
    """Details, if there are any."""


class EpisodeFailed(Event):
    """An episode failed and is not trained on."""

    kind: Literal["episode_failed"] = "episode_failed"
    item: int
    """Index of the task item."""
    reason: str
    """The kind of failure, as in the counts of ``failed_episodes``."""
    what: str
    """What happened."""


# ---------------------------------------------------------------------------------------------------------------
# Training and publishing


class StepTrained(Event):
    """An optimizer step was taken. Its time excludes the publish after it, but includes waits for overlapping ones."""

    kind: Literal["train"] = "train"
    version: int
    """The version that the step produced."""
    ranks: tuple[tuple[float, float], ...]
    """Start and end of the step on each rank."""
    items: tuple[int, ...]
    """Items that the ledger settled because of the step, in the order of the batch."""


class WeightsPublished(Event):
    """A version was published to the servers. ``gather_s`` and ``wire_s`` overlap."""

    kind: Literal["publish"] = "publish"
    version: int
    """The published version."""
    size_bytes: int
    """Size of the version in bytes."""
    sent_bytes: int
    """Bytes that were sent or stored, counted once for any number of servers."""
    gather_s: float
    """Time to gather the weights from the ranks."""
    wire_s: float
    """Time to transfer the weights to the servers."""
    load_s: float
    """Time to load the weights on the slowest server."""
    pause_s: float
    """Time from the request to pause the first server until the last server resumed."""
    first_token_s: float | None
    """Time from resuming to the first token on the slowest server; None if no token was sampled."""
    total_s: float
    """Duration of the publish as measured by the publisher."""
    paused_s: dict[str, float]
    """How long each server that reports timings was paused."""
    outcomes: dict[str, str]
    """Outcome for each endpoint: a value of `inflight.types.EndpointOutcome`."""


class StepCompleted(Event):
    """An optimizer step is complete. Its metrics are the rows of ``metrics.jsonl``."""

    model_config = ConfigDict(extra="allow")

    kind: Literal["step"] = "step"
    version: int
    """The version that the step produced."""
    time_s: float
    """Equal to ``end_s``."""
    reward: float | None
    """Mean reward of the rollouts that finished since the previous step; None if there were none."""


class CheckpointSaved(Event):
    """The checkpoint of a version is complete."""

    kind: Literal["checkpoint_saved"] = "checkpoint_saved"
    version: int
    """The version in the checkpoint."""


# ---------------------------------------------------------------------------------------------------------------
# Servers


class FleetChanged(Event):
    """Servers joined, left or changed state."""

    kind: Literal["fleet_changed"] = "fleet_changed"
    version: int
    """Number of trained versions so far."""
    restored: tuple[str, ...] = ()
    """Known servers that hold the current version again."""
    joined: tuple[str, ...] = ()
    """New servers that hold the current version."""
    removed: tuple[str, ...] = ()
    """Servers that the publisher has removed."""
    left: tuple[str, ...] = ()
    """Servers that are no longer listed."""
    changes: tuple[tuple[str, str | None, str], ...] = ()
    """Endpoint, previous state (None for a new endpoint) and new state."""
    states: dict[str, str] = {}
    """State of every member, if the publisher reported it."""
    serving: tuple[str, ...] = ()
    """Servers that receive work."""


class ServedVersions(Event):
    """The version that each server serves when servers pull; None if the server receives no work."""

    kind: Literal["served_versions"] = "served_versions"
    trainer: int
    """Number of trained versions so far."""
    servers: dict[str, int | None]
    """Served version of each server, by name."""


class FleetScaled(Event):
    """The run started or stopped one of its additional servers."""

    kind: Literal["fleet_scaled"] = "fleet_scaled"
    change: Literal["grow", "shrink"]
    """Whether a server was started or stopped."""
    servers: tuple[str, ...]
    """The additional servers that are running."""


class MemoryMoved(Event):
    """Servers released their memory for the trainers, or restored it."""

    kind: Literal["memory_released", "memory_restored"]
    servers: tuple[str, ...]
    """Names of the servers."""


# ---------------------------------------------------------------------------------------------------------------
# The end


class Failure(Event):
    """A failure ended the run, or one incarnation of it."""

    kind: Literal["failure"] = "failure"
    what: str
    """The message of the failure."""


class RunEnded(Event):
    """The run ended."""

    kind: Literal["run_ended"] = "run_ended"
    version: int
    """Number of trained versions."""
    is_interrupted: bool
    """Whether a signal ended the run."""
    ledger: dict[str, Any] = {}
    """Final counts of the ledger: ``trained``, ``dropped`` by reason, ``requeued``, and ``outstanding``, which will not
    be trained on unless the run is resumed."""


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

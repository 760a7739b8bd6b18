"""Fast-LLM's event stream: the trainer announces updates and the end of training, and every server reads all events."""

from __future__ import annotations

import json
import time
from collections import deque
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from inflight.base.validation import describe_problems
from inflight.dialects.fast_llm.redis_streams import FIRST, RedisStreams
from inflight.errors import TransferError
from inflight.wire import Natural

EVENTS = "fast_llm_events"
"""The key of the stream."""
_FIELD = "event"
_MAX_EVENT_BYTES = 64 << 10
_LOOK_S = 1.0
"""How long, in seconds, one read waits before the stream's state is checked."""


class WeightsReady(BaseModel):
    """The trainer is about to broadcast its weights. Unknown keys are ignored, as in PipelineRL.

    ``documents_seen`` counts the samples that the trainer has trained on. Fast-LLM omits it before its pull request
    #561.
    """

    model_config = ConfigDict(frozen=True)

    type: Literal["weights_ready"] = "weights_ready"
    step: Natural
    documents_seen: Natural | None = None

    @property
    def version(self) -> int:
        """The version of the weights: ``documents_seen`` or, if that is unknown, the step."""
        return self.step if self.documents_seen is None else self.documents_seen


class TrainingFinished(BaseModel):
    """Training has ended, and every rank leaves the group. Not sent if training fails."""

    model_config = ConfigDict(frozen=True)

    type: Literal["training_finished"] = "training_finished"


Event = WeightsReady | TrainingFinished
_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="type")])


def add_event(redis: RedisStreams, event: Event) -> None:
    """Add an event to the stream. Raises `TransferError`."""
    redis.add(EVENTS, {_FIELD: json.dumps(event.model_dump()).encode()})


class EventReader:
    """Reads the events that are added after its creation; earlier events belong to another trainer.

    Create it before joining the group: the trainer adds its first event once every rank has joined. Every update must
    be received, so a lost event would desynchronize the ranks. The reader therefore compares the number of events that
    it has read with the number that Redis has added.
    """

    def __init__(self, redis: RedisStreams) -> None:
        """Find the end of the stream. Raises `TransferError` or `ConfigError`."""
        self._redis = redis
        self._position, self._num_earlier = redis.state(EVENTS)
        self._num_read = 0
        self._unanswered: deque[Event] = deque()
        self._last: WeightsReady | None = None

    def next_event(self, timeout_s: float) -> Event:
        """Block until the next event, and return it.

        Raises `TransferError` if none arrives, one is unreadable, or one was lost.
        """
        deadline = time.monotonic() + timeout_s
        while not self._unanswered:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise TransferError(f"the trainer added no event to {EVENTS} for {timeout_s:g} s")
            self._look(min(remaining_s, _LOOK_S))
        return self._unanswered.popleft()

    def _look(self, wait_s: float) -> None:
        """Read events until none is left, and check that none was lost."""
        while True:
            found = self._redis.read(EVENTS, self._position, wait_s)
            if found:
                self._position = found[-1][0]
                self._num_read += len(found)
                self._unanswered += [self._parsed(entry, fields) for entry, fields in found]
            state = self._redis.state(EVENTS)
            if not found or state.last_id == self._position:
                return self._require_no_gap(*state)

    def _require_no_gap(self, last_id: str, num_added: int) -> None:
        if _number(last_id) > _number(self._position):
            return  # it was added after the read, and is read next
        if last_id != self._position and self._num_read == 0:
            self._position, self._num_earlier = FIRST, 0  # a launcher has deleted the events of an earlier run
            return
        # A stream that was deleted and created again counts from 0.
        if last_id != self._position or num_added - self._num_read not in (self._num_earlier, 0):
            raise TransferError(
                f"events were removed from {EVENTS} of {self._redis.name} before they were read: {self._num_read} "
                f"were read, and {num_added - self._num_earlier} were added. Nothing may trim or delete the stream "
                "while servers follow it; restart the trainer and the servers"
            )

    def _parsed(self, entry: str, fields: dict[bytes, bytes]) -> Event:
        text = fields.get(_FIELD.encode())
        what = f"event {entry} of {EVENTS} cannot be used, and the updates after it cannot be received: "
        if text is None or len(text) > _MAX_EVENT_BYTES:
            raise TransferError(
                what + f"it has no field {_FIELD!r}" if text is None else what + f"it has {len(text)} bytes"
            )
        try:
            event = _EVENT.validate_json(text)
        except ValidationError as error:
            raise TransferError(what + describe_problems(error)) from error
        if isinstance(event, WeightsReady):
            if self._last is not None and (event.step <= self._last.step or event.version < self._last.version):
                raise TransferError(
                    what + f"it is step {event.step} with version {event.version}, after step {self._last.step} with "
                    f"version {self._last.version}. Check whether a second trainer uses this Redis server"
                )
            self._last = event
        return event


def _number(entry: str) -> tuple[int, ...]:
    return tuple(int(part) for part in entry.split("-"))

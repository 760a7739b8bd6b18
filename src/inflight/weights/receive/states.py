"""The state machine of one endpoint's weights: which calls each state allows, and the state after each failure.

`TRANSITIONS` is the complete table, which docs/contract.md also shows.

Calls of a named session are idempotent: repeated calls have no effect, and calls of an ended session are refused. Only
calls from the latest incarnation of a run's trainer are accepted.

The state machine has no tensors, clock or lock. Its owner calls it from one thread, does the work of each transition,
and reports how the work ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from inflight.errors import BusyError, PoisonedError, ReleasedError, UpdateRefusedError
from inflight.weights.encode.buckets import manifest_difference
from inflight.weights.encode.lora_tensors import changed_names
from inflight.weights.receive.incarnations import Incarnations
from inflight.wire import BucketSpec, BucketTransfer, EndpointState, TensorSpec, UpdateRef, WeightUpdate

_NUM_REMEMBERED = 256
"""How many ended sessions are remembered, to recognize late calls."""
_RELEASED = "the endpoint's memory is released; call restore_memory to reacquire it"


class UpdateEvent(Enum):
    """The events that change the state of an endpoint; each value describes the event."""

    JOINED = "the endpoint has loaded its checkpoint"
    REQUEST = "an update is accepted, and sampling is paused for it"
    REQUEST_STAGED = "a staged update is accepted, and sampling continues"
    BUCKET = "a bucket of the update begins to arrive"
    PAUSE = "the commit of a staged update pauses sampling"
    APPLY = "all buckets have arrived, sampling is paused, and the weights are being applied"
    COMMITTED = "the new weights are applied and served"
    ENDED = "the update ends by an abort, a failure or its lease, and the old weights are intact"
    RELEASE = "the memory of weights, keys and values is being released"
    RESTORED = "the memory was reacquired, or could not be released"
    TORN = "the update ends by an abort, a failure or its lease, and the weights are torn by it or an earlier update"
    REPORTED_WHOLE = "an engine that others may change reports that its weights are whole"
    REPORTED_TORN = "an engine that others may change reports that its weights are torn"
    REPORTED_RELEASED = "an engine that others may change reports that its memory is released"


TRANSITIONS: Mapping[tuple[EndpointState, UpdateEvent], EndpointState] = {
    (EndpointState.JOINING, UpdateEvent.JOINED): EndpointState.READY,
    (EndpointState.READY, UpdateEvent.REQUEST): EndpointState.PAUSED,
    (EndpointState.READY, UpdateEvent.REQUEST_STAGED): EndpointState.STAGING,
    (EndpointState.READY, UpdateEvent.REPORTED_WHOLE): EndpointState.READY,
    (EndpointState.READY, UpdateEvent.REPORTED_TORN): EndpointState.POISONED,
    (EndpointState.READY, UpdateEvent.REPORTED_RELEASED): EndpointState.RELEASED,
    (EndpointState.READY, UpdateEvent.RELEASE): EndpointState.RELEASED,
    (EndpointState.RELEASED, UpdateEvent.RESTORED): EndpointState.READY,
    (EndpointState.RELEASED, UpdateEvent.REPORTED_WHOLE): EndpointState.READY,
    (EndpointState.RELEASED, UpdateEvent.REPORTED_TORN): EndpointState.POISONED,
    (EndpointState.RELEASED, UpdateEvent.REPORTED_RELEASED): EndpointState.RELEASED,
    (EndpointState.STAGING, UpdateEvent.BUCKET): EndpointState.STAGING,
    (EndpointState.STAGING, UpdateEvent.PAUSE): EndpointState.PAUSED,
    (EndpointState.STAGING, UpdateEvent.ENDED): EndpointState.READY,
    (EndpointState.STAGING, UpdateEvent.TORN): EndpointState.POISONED,
    (EndpointState.PAUSED, UpdateEvent.BUCKET): EndpointState.UPDATING,
    (EndpointState.PAUSED, UpdateEvent.APPLY): EndpointState.UPDATING,
    (EndpointState.PAUSED, UpdateEvent.ENDED): EndpointState.READY,
    (EndpointState.PAUSED, UpdateEvent.TORN): EndpointState.POISONED,
    (EndpointState.UPDATING, UpdateEvent.BUCKET): EndpointState.UPDATING,
    (EndpointState.UPDATING, UpdateEvent.APPLY): EndpointState.UPDATING,
    (EndpointState.UPDATING, UpdateEvent.COMMITTED): EndpointState.READY,
    (EndpointState.UPDATING, UpdateEvent.ENDED): EndpointState.READY,
    (EndpointState.UPDATING, UpdateEvent.TORN): EndpointState.POISONED,
    (EndpointState.POISONED, UpdateEvent.REQUEST): EndpointState.PAUSED,
    (EndpointState.POISONED, UpdateEvent.REQUEST_STAGED): EndpointState.STAGING,
    (EndpointState.POISONED, UpdateEvent.REPORTED_WHOLE): EndpointState.READY,
    (EndpointState.POISONED, UpdateEvent.REPORTED_TORN): EndpointState.POISONED,
    (EndpointState.POISONED, UpdateEvent.REPORTED_RELEASED): EndpointState.RELEASED,
}
"""The state after each event. If a pair is not listed, the call is refused or has no effect."""


@dataclass(slots=True, eq=False)
class OpenUpdate:
    """The state of one update, from its request to its end."""

    update: WeightUpdate
    was_torn: bool
    """Whether the weights were torn when the update was requested."""
    num_received: int = 0
    is_receiving: bool = False
    is_applying: bool = False
    is_over: bool = False


class UpdateStateMachine:
    """The state of one endpoint's weights, through any number of named sessions.

    ``expected`` lists the tensors that the endpoint's model can load; None if they are not known in this process.

    A method that raises an error changes nothing.
    """

    def __init__(self, expected: Sequence[TensorSpec] | None) -> None:
        self._expected = None if expected is None else tuple(expected)
        self._state = EndpointState.JOINING
        self._run_id: str | None = None
        self._served = UpdateRef(run_id="checkpoint", version=0)
        self._served_incarnation = 0
        self._group_run_id: str | None = None
        self._owner: str | None = None
        self._incarnations = Incarnations()
        self._over: deque[UpdateRef] = deque(maxlen=_NUM_REMEMBERED)
        self._torn_names: frozenset[str] | None = None
        self._open: OpenUpdate | None = None
        self._is_moving = False
        """Whether memory is being released or reacquired."""
        self._num_changes = 0

    @property
    def state(self) -> EndpointState:
        return self._state

    @property
    def version(self) -> int:
        """The version served now; meaningless while the state is POISONED."""
        return self._served.version

    @property
    def run_id(self) -> str | None:
        """The run that published the served version; None for the checkpoint that the endpoint started from."""
        return self._run_id

    @property
    def session_id(self) -> str:
        """The session that sent the served version; empty if it had no name or there was no session."""
        return self._served.session_id if self._served.run_id == self._run_id else ""

    @property
    def owner(self) -> str | None:
        """Run whose updates are accepted now, or were accepted most recently."""
        return self._owner

    @property
    def incarnation(self) -> int:
        """The highest incarnation of the owner so far."""
        return self._incarnations.highest(self._owner)

    @property
    def incarnations(self) -> dict[str, int]:
        """Highest incarnation of each of the 16 runs that called most recently."""
        return self._incarnations.reported()

    @property
    def update(self) -> WeightUpdate | None:
        return None if self._open is None else self._open.update

    @property
    def num_changes(self) -> int:
        """Number of ended updates, releases and restores.

        If this number increases while an engine is asked about its weights, the answer may be outdated.
        """
        return self._num_changes

    def note_joined(self) -> None:
        """Record that the endpoint holds version 0."""
        self._take(UpdateEvent.JOINED)

    def adopt_report(
        self, version: int, run_id: str | None, *, torn: bool, released: bool = False, session_id: str = ""
    ) -> None:
        """Adopt the state reported by an engine that others may change or restart, unless an update is open."""
        if self._open is not None or self._is_moving:
            return
        whole_event = UpdateEvent.REPORTED_RELEASED if released else UpdateEvent.REPORTED_WHOLE
        self._take(UpdateEvent.REPORTED_TORN if torn else whole_event)
        if (version, run_id, session_id) != (self.version, self._run_id, self.session_id):
            self._served = UpdateRef(run_id=run_id or "checkpoint", version=version, session_id=session_id)
            self._served_incarnation = self._incarnations.highest(run_id)
        self._run_id = run_id
        if not torn:
            self._torn_names = None  # replaced since; other clients' torn tensors are not known

    def fence(self, run_id: str, incarnation: int) -> None:
        """Raise `FencedError` if a later incarnation has replaced this one; otherwise record the caller as owner."""
        self._incarnations.admit(run_id, incarnation)
        self._owner = run_id

    def note_group_formed(self, run_id: str) -> None:
        """Accept only this run's updates from now on. The caller has aborted any open update."""
        self._owner = run_id
        self._group_run_id = run_id

    def note_group_lost(self) -> None:
        """Accept no update until a group is formed again."""
        self._group_run_id = None

    def request(self, update: WeightUpdate) -> OpenUpdate:
        """Open an update. If it is refused, raises `UpdateRefusedError` and changes nothing."""
        if update.run_id == self._group_run_id:
            self.fence(update.run_id, update.incarnation)
        reason = self._reason_to_refuse(update)
        if reason is not None:
            raise UpdateRefusedError(f"update to version {update.version} refused: {reason}")
        opened = OpenUpdate(update, was_torn=self.is_torn)
        self._take(UpdateEvent.REQUEST_STAGED if update.staged else UpdateEvent.REQUEST)
        self._open = opened
        return opened

    @property
    def has_begun(self) -> bool:
        """Whether a bucket of the open update has been requested."""
        return self._open is not None and (self._open.is_receiving or self._open.num_received > 0)

    def is_open(self, ref: UpdateRef) -> bool:
        """Return whether the open update is this named session, so that the request is a retry."""
        return self._open is not None and bool(ref.session_id) and self._open.update.ref == ref

    def is_served(self, ref: UpdateRef) -> bool:
        """Return whether this named session's weights are served, so that the commit is a retry."""
        return bool(ref.session_id) and ref == self._served and self._state is EndpointState.READY

    def has_bucket(self, transfer: BucketTransfer) -> bool:
        """Return whether this bucket of a named session has arrived, so that the call is a retry."""
        opened = self._open if self.is_open(transfer.ref) else None
        return opened is not None and transfer.bucket_index < opened.num_received

    def is_receiving(self, transfer: BucketTransfer) -> bool:
        """Return whether this bucket of a named session is arriving."""
        opened = self._open if self.is_open(transfer.ref) else None
        return opened is not None and opened.is_receiving and transfer.bucket_index == opened.num_received

    def begin_bucket(self, transfer: BucketTransfer) -> tuple[BucketSpec, Sequence[TensorSpec]]:
        """Return the bucket that is about to arrive, and its tensors. Buckets must arrive in order, each once."""
        opened = self._require_open(transfer.ref)
        update = opened.update
        num_parts = update.manifest.num_senders if update.manifest.shardings else 0
        if len(transfer.parts) != num_parts:
            raise UpdateRefusedError(
                f"bucket {transfer.bucket_index} was offered in {len(transfer.parts)} parts, but version "
                f"{update.version} announced {num_parts}"
            )
        for sent in transfer.parts or (transfer,):
            if sent.encoding not in ("raw", *update.encodings):
                raise UpdateRefusedError(f"encoding {sent.encoding} was not announced for version {update.version}")
        if opened.is_receiving:
            raise UpdateRefusedError(f"bucket {opened.num_received} is still being received; send one bucket at a time")
        if transfer.bucket_index != opened.num_received:
            raise UpdateRefusedError(
                f"bucket {transfer.bucket_index} was offered, "
                f"but bucket {opened.num_received} of {len(update.buckets)} is next"
            )
        if transfer.bucket_index >= len(update.buckets):
            raise UpdateRefusedError(f"all {len(update.buckets)} buckets have already been received")
        self._take(UpdateEvent.BUCKET)
        opened.is_receiving = True
        bucket = update.buckets[transfer.bucket_index]
        return bucket, update.manifest.tensors[bucket.start : bucket.stop]

    def note_bucket_received(self) -> None:
        """Record that the last bucket passed to `begin_bucket` has arrived completely."""
        assert self._open is not None
        assert self._open.is_receiving
        self._open.is_receiving = False
        self._open.num_received += 1

    def require_complete(self, ref: UpdateRef) -> OpenUpdate:
        """Return the open update if all of it has arrived. Raises `UpdateRefusedError`."""
        opened = self._require_open(ref)
        if opened.is_applying:
            raise UpdateRefusedError(f"version {ref.version} is already being applied")
        if opened.num_received != len(opened.update.buckets):
            raise UpdateRefusedError(
                f"version {ref.version} cannot be committed: "
                f"only {opened.num_received} of {len(opened.update.buckets)} buckets have arrived"
            )
        return opened

    def pause(self, ref: UpdateRef) -> None:
        """Record that sampling is being paused for a staged update that has arrived completely."""
        self.require_complete(ref)
        self._take(UpdateEvent.PAUSE, f"version {ref.version} is already being committed")

    def begin_apply(self, ref: UpdateRef) -> None:
        """Record that the update is being applied: from here on, a failure leaves the endpoint POISONED.

        Raises `UpdateRefusedError` if the update is not open or not complete. The owner then calls `note_committed` or
        `abort`.
        """
        opened = self.require_complete(ref)
        self._take(UpdateEvent.APPLY, f"version {ref.version} cannot be applied: sampling is not paused")
        opened.is_applying = True

    def note_committed(self) -> None:
        """Record that every tensor was applied: the open update is now served."""
        assert self._open is not None
        assert self._open.is_applying
        self._take(UpdateEvent.COMMITTED)
        opened = self._end()
        self._served, self._served_incarnation = opened.update.ref, opened.update.incarnation
        self._run_id = opened.update.run_id
        self._torn_names = None

    def abort(self, *, torn: bool = False) -> None:
        """End the open update, if any. The old weights are whole if no byte was applied, and torn otherwise.

        ``torn`` is for an engine that applies bytes as they arrive: it states that some bytes were applied before
        `begin_apply`.
        """
        if self._open is None:
            self._num_changes += 1
            return
        has_applied = torn or self._open.is_applying
        self._take(UpdateEvent.TORN if has_applied or self._open.was_torn else UpdateEvent.ENDED)
        opened = self._end()
        if has_applied:
            self._torn_names = frozenset(changed_names(opened.update.manifest)) | (self._torn_names or frozenset())

    def begin_release(self) -> None:
        """Record that memory is being released. `note_released` or `note_restored` follows.

        Raises `BusyError` if an update is open, and `PoisonedError` if the weights are torn.
        """
        self._refuse_torn()
        if self._open is not None:
            raise BusyError(
                f"memory cannot be released while the update to version {self._open.update.version} is open: commit "
                "or abort it first"
            )
        if self._state is not EndpointState.READY:
            raise BusyError(f"the endpoint is {self._state}: memory cannot be released now")
        self._take(UpdateEvent.RELEASE)
        self._is_moving = True

    def begin_restore(self) -> None:
        """Record that the memory is being reacquired. `note_restored` follows, or `note_released` if that fails."""
        self._is_moving = True

    def note_released(self) -> None:
        """Record that the memory is released, or still released."""
        self._is_moving = False
        self._num_changes += 1

    def note_restored(self) -> None:
        """Record that the endpoint has its memory, because it was reacquired or could not be released."""
        self._take(UpdateEvent.RESTORED)
        self._is_moving = False
        self._num_changes += 1

    def forbid(self, ref: UpdateRef) -> None:
        """Refuse this named session from now on: it was aborted, and a late request would otherwise reopen it."""
        if ref.session_id:
            self._remember(ref)

    @property
    def is_torn(self) -> bool:
        """Whether the weights are torn: an update failed while being applied, and no complete update has followed."""
        return self._state is EndpointState.POISONED or (self._open is not None and self._open.was_torn)

    def refuse_to_sample(self) -> None:
        """Raise `PoisonedError` or `ReleasedError` if a request can be sampled neither now nor after a pause.

        While an update is being applied to whole weights, nothing is raised: a request that arrives then waits.
        """
        self._refuse_torn()
        if self._state is EndpointState.RELEASED:
            raise ReleasedError(f"{_RELEASED}, and version {self.version} is served again")

    def _refuse_torn(self) -> None:
        if self.is_torn:
            raise PoisonedError(
                f"the weights are torn: an update after version {self.version} failed while it was applied. Publish "
                "a complete update, or restart the server"
            )

    def _take(self, event: UpdateEvent, refusal: str | None = None) -> None:
        """Change the state according to the table; without a transition, raise an error with the text ``refusal``."""
        after = TRANSITIONS.get((self._state, event))
        if after is None and refusal is not None:
            raise UpdateRefusedError(refusal)
        if after is None:
            raise AssertionError(f"the event {event.name} is not possible in state {self._state.name}")
        self._state = after

    def _end(self) -> OpenUpdate:
        opened, self._open = self._open, None
        assert opened is not None
        opened.is_over = True
        self._remember(opened.update.ref)
        self._num_changes += 1
        return opened

    def _remember(self, ref: UpdateRef) -> None:
        if ref not in self._over:  # an abort forbids the session before it ends the update
            self._over.append(ref)

    def _require_open(self, ref: UpdateRef) -> OpenUpdate:
        if self._open is None:
            raise UpdateRefusedError(f"no update is open (the call is for version {ref.version}); request one first")
        update = self._open.update
        if ref != update.ref:
            attempt = "" if ref.session_id == update.session_id else f", session {ref.session_id or 'unnamed'!r}"
            raise UpdateRefusedError(
                f"the open update is version {update.version} of run {update.run_id!r}, "
                f"not version {ref.version} of run {ref.run_id!r}{attempt}"
            )
        return self._open

    def _reason_to_refuse(self, update: WeightUpdate) -> str | None:
        if self._state is EndpointState.JOINING:
            return "the endpoint is still joining"
        if update.session_id and update.ref in self._over:
            return f"its session {update.session_id!r} has ended"
        if self._state is EndpointState.RELEASED:
            return _RELEASED
        if self._open is not None:
            return f"the update to version {self._open.update.version} is still open"
        if self._group_run_id is None:
            return "no weight group is formed; call init_process_group first"
        if update.run_id != self._group_run_id:
            return (
                f"run {update.run_id!r} does not own the weight group, which run {self._group_run_id!r} formed: stop "
                "one of the two, or form the group again"
            )
        is_older = (update.incarnation, update.version) < (self._served_incarnation, self.version)
        if self._run_id == update.run_id and is_older:
            return f"version {self.version} of this run is already served: publish that version or a higher one"
        if self.is_torn and update.manifest.lora is not None:
            return "the weights are torn, and a LoRA needs intact weights as its base; send all weights"
        if self.is_torn and not self._makes_whole(update):
            return "the weights are torn, and the update omits tensors that the failed update changed; send all weights"
        return None if self._expected is None else manifest_difference(self._expected, update.manifest)

    def _makes_whole(self, update: WeightUpdate) -> bool:
        """Return whether an update, which may omit tensors, replaces every tensor that may be torn."""
        if not update.manifest.frozen:
            return True
        sent = {tensor.name for tensor in update.manifest.tensors}
        return self._torn_names is not None and self._torn_names <= sent

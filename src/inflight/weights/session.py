"""The state machine of one endpoint's weights: which call is allowed when, and what a failure leaves behind.

`TRANSITIONS` is the whole of it; docs/contract.md shows the same table.

Calls of a session that has a name are idempotent: what is repeated has no effect, and what comes for a session that is
over is refused. Of one run only the latest incarnation of the trainer, by its epoch, is listened to.

It holds no tensors, no clock and no lock: its owner calls it from one thread, does the work that a transition stands
for, and tells it how the work ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from inflight.errors import FencedError, PoisonedError, TransferError, UpdateRefusedError
from inflight.types import WeightBucket
from inflight.weights.adapters import changed_names
from inflight.weights.buckets import manifest_difference
from inflight.wire import BucketSpec, BucketTransfer, EndpointState, TensorSpec, UpdateRef, WeightUpdate

_NUM_REMEMBERED = 256
"""Sessions that are over and still known by name, and runs whose epochs are: as many as calls may come late."""


class Event(Enum):
    """What changes the state of an endpoint; each value says what has happened."""

    JOINED = "the endpoint has loaded its checkpoint"
    REQUEST = "an update is accepted, and sampling is held for it"
    REQUEST_STAGED = "a staged update is accepted, and sampling goes on"
    BUCKET = "a bucket of the update begins to arrive"
    HOLD = "the commit of a staged update holds sampling"
    APPLY = "all buckets have arrived, sampling is held, and the weights are being applied"
    COMMITTED = "the new weights are applied and served"
    ENDED = "the update ends by an abort, a failure or its lease, and the old weights are whole"
    TORN = "the update ends in one of these ways, and the weights are torn, by it or by an update before it"
    FOUND = "an engine that others may change says that its weights are whole"
    FOUND_TORN = "an engine that others may change says that its weights are torn"


TRANSITIONS: Mapping[tuple[EndpointState, Event], EndpointState] = {
    (EndpointState.JOINING, Event.JOINED): EndpointState.READY,
    (EndpointState.READY, Event.REQUEST): EndpointState.HELD,
    (EndpointState.READY, Event.REQUEST_STAGED): EndpointState.STAGING,
    (EndpointState.READY, Event.FOUND): EndpointState.READY,
    (EndpointState.READY, Event.FOUND_TORN): EndpointState.POISONED,
    (EndpointState.STAGING, Event.BUCKET): EndpointState.STAGING,
    (EndpointState.STAGING, Event.HOLD): EndpointState.HELD,
    (EndpointState.STAGING, Event.ENDED): EndpointState.READY,
    (EndpointState.STAGING, Event.TORN): EndpointState.POISONED,
    (EndpointState.HELD, Event.BUCKET): EndpointState.UPDATING,
    (EndpointState.HELD, Event.APPLY): EndpointState.UPDATING,
    (EndpointState.HELD, Event.ENDED): EndpointState.READY,
    (EndpointState.HELD, Event.TORN): EndpointState.POISONED,
    (EndpointState.UPDATING, Event.BUCKET): EndpointState.UPDATING,
    (EndpointState.UPDATING, Event.APPLY): EndpointState.UPDATING,
    (EndpointState.UPDATING, Event.COMMITTED): EndpointState.READY,
    (EndpointState.UPDATING, Event.ENDED): EndpointState.READY,
    (EndpointState.UPDATING, Event.TORN): EndpointState.POISONED,
    (EndpointState.POISONED, Event.REQUEST): EndpointState.HELD,
    (EndpointState.POISONED, Event.REQUEST_STAGED): EndpointState.STAGING,
    (EndpointState.POISONED, Event.FOUND): EndpointState.READY,
    (EndpointState.POISONED, Event.FOUND_TORN): EndpointState.POISONED,
}
"""The state after each event. What is not listed does not happen: the call is refused, or has no effect."""


@dataclass(slots=True, eq=False)
class OpenUpdate:
    """What belongs to one update, from its request to its end."""

    update: WeightUpdate
    was_torn: bool
    """Whether the weights were torn when it was requested."""
    num_received: int = 0
    is_receiving: bool = False
    is_applying: bool = False
    is_over: bool = False


class UpdateSession:
    """Weights of one endpoint over its life. ``expected`` is what its model can load, None if that is not known here.

    Every method that is refused raises and changes nothing.
    """

    def __init__(self, expected: Sequence[TensorSpec] | None) -> None:
        self._expected = None if expected is None else tuple(expected)
        self._state = EndpointState.JOINING
        self._run_id: str | None = None
        self._served = UpdateRef(run_id="checkpoint", version=0)
        self._served_epoch = 0
        self._group_run_id: str | None = None
        self._owner: str | None = None
        self._epochs: dict[str, int] = {}
        self._over: deque[UpdateRef] = deque(maxlen=_NUM_REMEMBERED)
        self._torn_names: frozenset[str] | None = None
        self._open: OpenUpdate | None = None
        self._num_changes = 0

    @property
    def state(self) -> EndpointState:
        """Present state."""
        return self._state

    @property
    def version(self) -> int:
        """Version served now; meaningless while POISONED."""
        return self._served.version

    @property
    def run_id(self) -> str | None:
        """Run that the served version belongs to; None for the checkpoint that the endpoint started from."""
        return self._run_id

    @property
    def session_id(self) -> str:
        """Session that brought the served version; empty if it had no name, or none did."""
        return self._served.session_id if self._served.run_id == self._run_id else ""

    @property
    def owner(self) -> str | None:
        """Run whose updates are accepted, or were last."""
        return self._owner

    @property
    def epoch(self) -> int:
        """Highest epoch that was seen of the owner."""
        return 0 if self._owner is None else self._epochs.get(self._owner, 0)

    @property
    def update(self) -> WeightUpdate | None:
        """The open update, None if there is none."""
        return None if self._open is None else self._open.update

    @property
    def num_changes(self) -> int:
        """Updates that ended here: while it grows, what was asked about the weights may be answered with old news."""
        return self._num_changes

    def joined(self) -> None:
        """The endpoint holds version 0."""
        self._take(Event.JOINED)

    def expect(self, expected: Sequence[TensorSpec]) -> None:
        """From now on only updates of these tensors are accepted."""
        self._expected = tuple(expected)

    def found(self, version: int, run_id: str | None, *, torn: bool, session_id: str = "") -> None:
        """Take over what an engine that others may change or restart says of its weights, while no update is open."""
        if self._open is not None:
            return
        self._take(Event.FOUND_TORN if torn else Event.FOUND)
        if (version, run_id, session_id) != (self.version, self._run_id, self.session_id):
            self._served = UpdateRef(run_id=run_id or "checkpoint", version=version, session_id=session_id)
            self._served_epoch = 0 if run_id is None else self._epochs.get(run_id, 0)
        self._run_id = run_id
        if not torn:
            self._torn_names = None  # mended; what others tear from now on is not known here

    def fence(self, run_id: str, epoch: int) -> None:
        """Raise `FencedError` for an incarnation of a run's trainer that was replaced; note who calls otherwise."""
        highest = self._epochs.get(run_id, 0)
        if epoch < highest:
            raise FencedError(
                f"the trainer of run {run_id!r} was replaced: this call comes from its epoch {epoch}, epoch "
                f"{highest} has taken over. Stop this trainer"
            )
        self._owner = run_id
        self._epochs.pop(run_id, None)
        self._epochs[run_id] = epoch  # at the end: the run that called last is forgotten last
        if len(self._epochs) > _NUM_REMEMBERED:
            del self._epochs[next(iter(self._epochs))]

    def group_formed(self, run_id: str) -> None:
        """From now on only this run's updates are accepted. An open update must have been aborted before."""
        self._owner = run_id
        self._group_run_id = run_id

    def group_lost(self) -> None:
        """No update is accepted until a group is formed again."""
        self._group_run_id = None

    def request(self, update: WeightUpdate) -> OpenUpdate:
        """Open an update. Raises `UpdateRefusedError`, and nothing has changed then."""
        if update.run_id == self._group_run_id:
            self.fence(update.run_id, update.epoch)
        reason = self._reason_to_refuse(update)
        if reason is not None:
            raise UpdateRefusedError(f"update to version {update.version} refused: {reason}")
        opened = OpenUpdate(update, was_torn=self.is_torn)
        self._take(Event.REQUEST_STAGED if update.staged else Event.REQUEST)
        self._open = opened
        return opened

    @property
    def has_begun(self) -> bool:
        """Whether a bucket of the open update was asked for."""
        return self._open is not None and (self._open.is_receiving or self._open.num_received > 0)

    def is_open(self, ref: UpdateRef) -> bool:
        """Return whether the open update is this named session: to request it is to repeat a request."""
        return self._open is not None and bool(ref.session_id) and self._open.update.ref == ref

    def is_served(self, ref: UpdateRef) -> bool:
        """Return whether this named session's weights are served: to commit it is to repeat a commit."""
        return bool(ref.session_id) and ref == self._served and self._state is EndpointState.READY

    def has_bucket(self, transfer: BucketTransfer) -> bool:
        """Return whether a bucket of a named session has arrived: to ask for it is to repeat a call."""
        opened = self._open if self.is_open(transfer.ref) else None
        return opened is not None and transfer.bucket_index < opened.num_received

    def is_receiving(self, transfer: BucketTransfer) -> bool:
        """Return whether a bucket of a named session is arriving."""
        opened = self._open if self.is_open(transfer.ref) else None
        return opened is not None and opened.is_receiving and transfer.bucket_index == opened.num_received

    def begin_bucket(self, transfer: BucketTransfer) -> tuple[BucketSpec, Sequence[TensorSpec]]:
        """Return a bucket that begins to arrive, and its tensors. Buckets come in order, each once."""
        opened = self._require_open(transfer.ref)
        update = opened.update
        if transfer.encoding not in ("raw", *update.encodings):
            raise UpdateRefusedError(f"encoding {transfer.encoding} was not announced for version {update.version}")
        if opened.is_receiving:
            raise UpdateRefusedError(
                f"bucket {opened.num_received} is still being received; offer one bucket at a time"
            )
        if transfer.bucket_index != opened.num_received:
            raise UpdateRefusedError(
                f"bucket {transfer.bucket_index} was offered, "
                f"bucket {opened.num_received} of {len(update.buckets)} is next"
            )
        if transfer.bucket_index >= len(update.buckets):
            raise UpdateRefusedError(f"all {len(update.buckets)} buckets were received already")
        self._take(Event.BUCKET)
        opened.is_receiving = True
        bucket = update.buckets[transfer.bucket_index]
        return bucket, update.manifest.tensors[bucket.start : bucket.stop]

    def bucket_received(self) -> None:
        """The bucket last begun has arrived whole."""
        assert self._open is not None
        assert self._open.is_receiving
        self._open.is_receiving = False
        self._open.num_received += 1

    def require_complete(self, ref: UpdateRef) -> OpenUpdate:
        """Return the open update if all of it has arrived. Raises `UpdateRefusedError`."""
        opened = self._require_open(ref)
        if opened.is_applying:
            raise UpdateRefusedError(f"version {ref.version} is being applied already")
        if opened.num_received != len(opened.update.buckets):
            raise UpdateRefusedError(
                f"version {ref.version} cannot be committed: "
                f"{opened.num_received} of {len(opened.update.buckets)} buckets arrived"
            )
        return opened

    def hold(self, ref: UpdateRef) -> None:
        """Note that sampling is being held for a staged update, all of which has arrived."""
        self.require_complete(ref)
        self._take(Event.HOLD, f"version {ref.version} is being committed already")

    def begin_apply(self, ref: UpdateRef) -> None:
        """Note that the update is being applied: from here on a failure poisons.

        Raises if it is not open or not complete. Once it returned, `committed` or `abort` says how applying ended.
        """
        opened = self.require_complete(ref)
        self._take(Event.APPLY, f"version {ref.version} cannot be applied: sampling is not held")
        opened.is_applying = True

    def committed(self) -> None:
        """Every tensor was applied: the open update is what is served."""
        assert self._open is not None
        assert self._open.is_applying
        self._take(Event.COMMITTED)
        opened = self._end()
        self._served, self._served_epoch = opened.update.ref, opened.update.epoch
        self._run_id = opened.update.run_id
        self._torn_names = None

    def abort(self, *, torn: bool = False) -> None:
        """End the open update, if any: the old weights are whole if no byte was applied, torn otherwise.

        ``torn`` says that bytes were applied before `begin_apply`, by an engine that applies them as they arrive.
        """
        if self._open is None:
            self._num_changes += 1
            return
        has_applied = torn or self._open.is_applying
        self._take(Event.TORN if has_applied or self._open.was_torn else Event.ENDED)
        opened = self._end()
        if has_applied:
            self._torn_names = frozenset(changed_names(opened.update.manifest)) | (self._torn_names or frozenset())

    def never(self, ref: UpdateRef) -> None:
        """From now on a request of this named session is refused: it was aborted, and a late one would open it."""
        if ref.session_id:
            self._over.append(ref)

    @property
    def is_torn(self) -> bool:
        """Whether there are no whole weights: an update failed while it was applied, and none has made up for it."""
        return self._state is EndpointState.POISONED or (self._open is not None and self._open.was_torn)

    def refuse_if_poisoned(self) -> None:
        """Raise `PoisonedError` if there are no whole weights to sample from, now or when the hold ends.

        While an update is applied to whole weights nothing is wrong yet: a request that comes then waits.
        """
        if self.is_torn:
            raise PoisonedError(
                f"weights are torn: an update after version {self.version} failed while it was applied. "
                "Publish a complete update, or restart the server"
            )

    def _take(self, event: Event, refusal: str | None = None) -> None:
        """Change the state as the table says, or raise: ``refusal`` is for events that a caller can have come early."""
        after = TRANSITIONS.get((self._state, event))
        if after is None and refusal is not None:
            raise UpdateRefusedError(refusal)
        if after is None:
            raise AssertionError(f"{event.name} cannot happen while {self._state.name}")
        self._state = after

    def _end(self) -> OpenUpdate:
        """Drop the open update and return it."""
        opened, self._open = self._open, None
        assert opened is not None
        opened.is_over = True
        self._over.append(opened.update.ref)
        self._num_changes += 1
        return opened

    def _require_open(self, ref: UpdateRef) -> OpenUpdate:
        if self._open is None:
            raise UpdateRefusedError(f"no update is open here (asked for version {ref.version}); request one first")
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
            return f"its session {update.session_id!r} is over"
        if self._open is not None:
            return f"the update to version {self._open.update.version} is still open"
        if self._group_run_id is None:
            return "no weight group is formed; call init_process_group first"
        if update.run_id != self._group_run_id:
            return f"run {update.run_id!r} does not own the weight group, run {self._group_run_id!r} does"
        is_older = (update.epoch, update.version) < (self._served_epoch, self.version)
        if self._run_id == update.run_id and is_older:
            return f"version {self.version} of this run is served already"
        if self.is_torn and update.manifest.adapter is not None:
            return "weights are torn, and an adapter needs whole ones as its base; send all of them"
        if self.is_torn and not self._makes_whole(update):
            return "weights are torn, and it leaves out tensors that the failed update had changed; send all of them"
        return None if self._expected is None else manifest_difference(self._expected, update.manifest)

    def _makes_whole(self, update: WeightUpdate) -> bool:
        """Return whether an update that leaves tensors out replaces everything that may be torn."""
        if not update.manifest.frozen:
            return True
        sent = {tensor.name for tensor in update.manifest.tensors}
        return self._torn_names is not None and self._torn_names <= sent


def refuse_stray(bucket: WeightBucket, ref: UpdateRef | None) -> None:
    """Raise `TransferError` if a bucket belongs to another update than the one that is being sent.

    A call that was left behind by the update before may come that late, and the group is another one by then.
    """
    if bucket.ref is not None and bucket.ref != ref:
        raise TransferError(
            f"bucket {bucket.index} belongs to version {bucket.ref.version}, session {bucket.ref.session_id!r}, which "
            "is over"
        )


def transfer_failed(cause: BaseException, what: str) -> TransferError:
    """Return the `TransferError` for a lower error."""
    text = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
    return TransferError(f"{what} failed: {text}")

"""The state machine of one endpoint's weights: which call is allowed when, and what a failure leaves behind.

    JOINING -> READY(v) -> HELD(v) -> UPDATING(v to w) -> READY(w)
               READY(v) -> STAGING(v to w) -> HELD(v) -> UPDATING(v to w) -> READY(w)      a staged update
                                  any failure after the first byte was applied -> POISONED

Calls of a session that has a name are idempotent: what is repeated has no effect, and what comes for a session that is
over is refused. Of one run only the latest incarnation of the trainer, by its epoch, is listened to.

It holds no tensors, no clock and no lock: its owner calls it from one thread, does the work that a transition stands
for, and tells it how the work ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from inflight.errors import FencedError, PoisonedError, TransferError, UpdateRefusedError
from inflight.types import WeightBucket
from inflight.weights.adapters import changed_names
from inflight.weights.buckets import manifest_difference
from inflight.wire import BucketSpec, BucketTransfer, EndpointState, TensorSpec, UpdateRef, WeightUpdate

_NUM_REMEMBERED = 256
"""Sessions that are over and still known by name, and runs whose epochs are: as many as calls may come late."""


class UpdateSession:
    """Weights of one endpoint over its life. ``expected`` is what its model can load, None if that is not known here.

    Every method that is refused raises and changes nothing.
    """

    def __init__(self, expected: Sequence[TensorSpec] | None) -> None:
        self._expected = None if expected is None else tuple(expected)
        self._state = EndpointState.JOINING
        self._version = 0
        self._run_id: str | None = None
        self._served = UpdateRef(run_id="checkpoint", version=0)
        self._served_epoch = 0
        self._group_run_id: str | None = None
        self._owner: str | None = None
        self._epochs: dict[str, int] = {}
        self._over: deque[UpdateRef] = deque(maxlen=_NUM_REMEMBERED)
        self._torn_names: frozenset[str] | None = None
        self._update: WeightUpdate | None = None
        self._num_received = 0
        self._receiving = False
        self._applying = False
        self._torn = False
        self._num_changes = 0

    @property
    def state(self) -> EndpointState:
        """Present state."""
        return self._state

    @property
    def version(self) -> int:
        """Version served now; meaningless while POISONED."""
        return self._version

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
        return self._update

    @property
    def num_changes(self) -> int:
        """Updates that ended here: while it grows, what was asked about the weights may be answered with old news."""
        return self._num_changes

    def joined(self) -> None:
        """JOINING -> READY: the endpoint holds version 0."""
        self._state = EndpointState.READY

    def expect(self, expected: Sequence[TensorSpec]) -> None:
        """From now on only updates of these tensors are accepted."""
        self._expected = tuple(expected)

    def found(self, version: int, run_id: str | None, *, torn: bool, session_id: str = "") -> None:
        """Take over what an engine that others may change or restart says of its weights, while no update is open."""
        if self._update is not None:
            return
        if (version, run_id, session_id) != (self._version, self._run_id, self.session_id):
            self._served = UpdateRef(run_id=run_id or "checkpoint", version=version, session_id=session_id)
            self._served_epoch = 0 if run_id is None else self._epochs.get(run_id, 0)
        self._version, self._run_id, self._torn = version, run_id, torn
        self._state = EndpointState.POISONED if torn else EndpointState.READY

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

    def request(self, update: WeightUpdate) -> None:
        """READY or POISONED -> HELD, or STAGING. Raises `UpdateRefusedError`, and nothing has changed then."""
        if update.run_id == self._group_run_id:
            self.fence(update.run_id, update.epoch)
        reason = self._reason_to_refuse(update)
        if reason is not None:
            raise UpdateRefusedError(f"update to version {update.version} refused: {reason}")
        self._update = update
        self._num_received = 0
        self._receiving = False
        self._state = EndpointState.STAGING if update.staged else EndpointState.HELD

    @property
    def has_begun(self) -> bool:
        """Whether a bucket of the open update was asked for."""
        return self._update is not None and (self._receiving or self._num_received > 0)

    def is_open(self, ref: UpdateRef) -> bool:
        """Return whether the open update is this named session: to request it is to repeat a request."""
        return self._update is not None and bool(ref.session_id) and self._update.ref == ref

    def is_served(self, ref: UpdateRef) -> bool:
        """Return whether this named session's weights are served: to commit it is to repeat a commit."""
        return bool(ref.session_id) and ref == self._served and not self._torn and self._update is None

    def has_bucket(self, transfer: BucketTransfer) -> bool:
        """Return whether a bucket of a named session has arrived: to ask for it is to repeat a call."""
        return self.is_open(transfer.ref) and transfer.bucket_index < self._num_received

    def is_receiving(self, transfer: BucketTransfer) -> bool:
        """Return whether a bucket of a named session is arriving."""
        return self.is_open(transfer.ref) and self._receiving and transfer.bucket_index == self._num_received

    def begin_bucket(self, transfer: BucketTransfer) -> tuple[BucketSpec, Sequence[TensorSpec]]:
        """HELD or UPDATING -> UPDATING; returns the bucket and its tensors. Buckets come in order, each once."""
        update = self._open_update(transfer.ref)
        if transfer.encoding not in ("raw", *update.encodings):
            raise UpdateRefusedError(f"encoding {transfer.encoding} was not announced for version {update.version}")
        if self._receiving:
            raise UpdateRefusedError(f"bucket {self._num_received} is still being received; offer one bucket at a time")
        if transfer.bucket_index != self._num_received:
            raise UpdateRefusedError(
                f"bucket {transfer.bucket_index} was offered, "
                f"bucket {self._num_received} of {len(update.buckets)} is next"
            )
        if transfer.bucket_index >= len(update.buckets):
            raise UpdateRefusedError(f"all {len(update.buckets)} buckets were received already")
        if not update.staged:
            self._state = EndpointState.UPDATING
        self._receiving = True
        bucket = update.buckets[transfer.bucket_index]
        return bucket, update.manifest.tensors[bucket.start : bucket.stop]

    def bucket_received(self) -> None:
        """The bucket last begun has arrived whole."""
        assert self._receiving
        self._receiving = False
        self._num_received += 1

    def require_complete(self, ref: UpdateRef) -> WeightUpdate:
        """Return the open update if all of it has arrived. Raises `UpdateRefusedError`."""
        update = self._open_update(ref)
        if self._applying:
            raise UpdateRefusedError(f"version {ref.version} is being applied already")
        if self._num_received != len(update.buckets):
            raise UpdateRefusedError(
                f"version {ref.version} cannot be committed: "
                f"{self._num_received} of {len(update.buckets)} buckets arrived"
            )
        return update

    def hold(self, ref: UpdateRef) -> WeightUpdate:
        """STAGING -> HELD: all of a staged update has arrived, and sampling is being held for it."""
        update = self.require_complete(ref)
        self._state = EndpointState.HELD
        return update

    def begin_apply(self, ref: UpdateRef) -> WeightUpdate:
        """HELD or UPDATING -> UPDATING; returns the update to apply: from here on a failure poisons.

        Raises if it is not open or not complete. Once it returned, `committed` or `abort` says how applying ended.
        """
        update = self.require_complete(ref)
        self._applying = True
        self._state = EndpointState.UPDATING
        return update

    def committed(self) -> None:
        """UPDATING -> READY(w): every tensor was applied."""
        assert self._update is not None
        assert self._applying
        self._num_changes += 1
        self._version, self._run_id = self._update.version, self._update.run_id
        self._served, self._served_epoch = self._update.ref, self._update.epoch
        self._over.append(self._update.ref)
        self._update = None
        self._applying = False
        self._torn = False
        self._torn_names = None
        self._state = EndpointState.READY

    def abort(self, *, torn: bool = False) -> None:
        """End the open update, if any: READY with the old weights if no byte was applied, POISONED otherwise.

        ``torn`` says that bytes were applied before `begin_apply`, by an engine that applies them as they arrive.
        """
        self._num_changes += 1
        if self._update is not None:
            self._over.append(self._update.ref)
            if self._applying or torn:
                names = frozenset(changed_names(self._update.manifest))
                self._torn_names = names | (self._torn_names or frozenset())
        self._torn = self._torn or self._applying or (torn and self._update is not None)
        self._update = None
        self._applying = False
        if self._state in (EndpointState.STAGING, EndpointState.HELD, EndpointState.UPDATING):
            self._state = EndpointState.POISONED if self._torn else EndpointState.READY

    def never(self, ref: UpdateRef) -> None:
        """From now on a request of this named session is refused: it was aborted, and a late one would open it."""
        if ref.session_id:
            self._over.append(ref)

    @property
    def is_torn(self) -> bool:
        """Whether there are no whole weights: an update failed while it was applied, and none has made up for it."""
        return self._torn

    def refuse_if_poisoned(self) -> None:
        """Raise `PoisonedError` if there are no whole weights to sample from, now or when the hold ends.

        While an update is applied to whole weights nothing is wrong yet: a request that comes then waits.
        """
        if self._torn:
            raise PoisonedError(
                f"weights are torn: an update after version {self._version} failed while it was applied. "
                "Publish a complete update, or restart the server"
            )

    def _open_update(self, ref: UpdateRef) -> WeightUpdate:
        if self._update is None:
            raise UpdateRefusedError(f"no update is open here (asked for version {ref.version}); request one first")
        if ref != self._update.ref:
            attempt = "" if ref.session_id == self._update.session_id else f", session {ref.session_id or 'unnamed'!r}"
            raise UpdateRefusedError(
                f"the open update is version {self._update.version} of run {self._update.run_id!r}, "
                f"not version {ref.version} of run {ref.run_id!r}{attempt}"
            )
        return self._update

    def _reason_to_refuse(self, update: WeightUpdate) -> str | None:
        if self._state is EndpointState.JOINING:
            return "the endpoint is still joining"
        if update.session_id and update.ref in self._over:
            return f"its session {update.session_id!r} is over"
        if self._update is not None:
            return f"the update to version {self._update.version} is still open"
        if self._group_run_id is None:
            return "no weight group is formed; call init_process_group first"
        if update.run_id != self._group_run_id:
            return f"run {update.run_id!r} does not own the weight group, run {self._group_run_id!r} does"
        is_older = (update.epoch, update.version) < (self._served_epoch, self._version)
        if self._run_id == update.run_id and is_older:
            return f"version {self._version} of this run is served already"
        if self._torn and update.manifest.adapter is not None:
            return "weights are torn, and an adapter needs whole ones as its base; send all of them"
        if self._torn and not self._makes_whole(update):
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

"""The state machine of one endpoint's weights: which call is allowed when, and what a failure leaves behind.

    JOINING -> READY(v) -> HELD(v) -> UPDATING(v to w) -> READY(w)
                                  any failure after the first byte was applied -> POISONED

It holds no tensors, no clock and no lock: its owner calls it from one thread, does the work that a transition stands
for, and tells it how the work ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from inflight.errors import PoisonedError, TransferError, UpdateRefusedError
from inflight.weights.buckets import manifest_difference
from inflight.wire import BucketSpec, BucketTransfer, EndpointState, TensorSpec, UpdateRef, WeightUpdate


class UpdateSession:
    """Weights of one endpoint over its life. ``expected`` is what its model can load, None if that is not known here.

    Every method that is refused raises and changes nothing.
    """

    def __init__(self, expected: Sequence[TensorSpec] | None) -> None:
        self._expected = None if expected is None else tuple(expected)
        self._state = EndpointState.JOINING
        self._version = 0
        self._run_id: str | None = None
        self._group_run_id: str | None = None
        self._update: WeightUpdate | None = None
        self._num_received = 0
        self._receiving = False
        self._applying = False
        self._torn = False

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
    def update(self) -> WeightUpdate | None:
        """The open update, None if there is none."""
        return self._update

    def joined(self) -> None:
        """JOINING -> READY: the endpoint holds version 0."""
        self._state = EndpointState.READY

    def expect(self, expected: Sequence[TensorSpec]) -> None:
        """From now on only updates of these tensors are accepted."""
        self._expected = tuple(expected)

    def found(self, version: int, run_id: str | None, *, torn: bool) -> None:
        """Take over what an engine that others may change or restart says of its weights, while no update is open."""
        if self._update is not None:
            return
        self._version, self._run_id, self._torn = version, run_id, torn
        self._state = EndpointState.POISONED if torn else EndpointState.READY

    def group_formed(self, run_id: str) -> None:
        """From now on only this run's updates are accepted. An open update must have been aborted before."""
        self._group_run_id = run_id

    def group_lost(self) -> None:
        """No update is accepted until a group is formed again."""
        self._group_run_id = None

    def request(self, update: WeightUpdate) -> None:
        """READY or POISONED -> HELD. Raises `UpdateRefusedError`, and nothing has changed then."""
        reason = self._reason_to_refuse(update)
        if reason is not None:
            raise UpdateRefusedError(f"update to version {update.version} refused: {reason}")
        self._update = update
        self._num_received = 0
        self._receiving = False
        self._state = EndpointState.HELD

    def begin_bucket(self, transfer: BucketTransfer) -> tuple[BucketSpec, Sequence[TensorSpec]]:
        """HELD or UPDATING -> UPDATING; returns the bucket and its tensors. Buckets come in order, each once."""
        update = self._open_update(transfer.run_id, transfer.version)
        if self._receiving:
            raise UpdateRefusedError(f"bucket {self._num_received} is still being received; offer one bucket at a time")
        if transfer.bucket_index != self._num_received:
            raise UpdateRefusedError(
                f"bucket {transfer.bucket_index} was offered, "
                f"bucket {self._num_received} of {len(update.buckets)} is next"
            )
        if transfer.bucket_index >= len(update.buckets):
            raise UpdateRefusedError(f"all {len(update.buckets)} buckets were received already")
        self._state = EndpointState.UPDATING
        self._receiving = True
        bucket = update.buckets[transfer.bucket_index]
        return bucket, update.manifest.tensors[bucket.start : bucket.stop]

    def bucket_received(self) -> None:
        """The bucket last begun has arrived whole."""
        assert self._receiving
        self._receiving = False
        self._num_received += 1

    def begin_apply(self, ref: UpdateRef) -> WeightUpdate:
        """Return the update to apply: from here on a failure poisons. Raises if it is not open or not complete.

        Once it returned, `committed` or `abort` says how applying ended.
        """
        update = self._open_update(ref.run_id, ref.version)
        if self._applying:
            raise UpdateRefusedError(f"version {ref.version} is being applied already")
        if self._num_received != len(update.buckets):
            raise UpdateRefusedError(
                f"version {ref.version} cannot be committed: "
                f"{self._num_received} of {len(update.buckets)} buckets arrived"
            )
        self._applying = True
        return update

    def committed(self) -> None:
        """UPDATING -> READY(w): every tensor was applied."""
        assert self._update is not None
        assert self._applying
        self._version, self._run_id = self._update.version, self._update.run_id
        self._update = None
        self._applying = False
        self._torn = False
        self._state = EndpointState.READY

    def abort(self, *, torn: bool = False) -> None:
        """End the open update, if any: READY with the old weights if no byte was applied, POISONED otherwise.

        ``torn`` says that bytes were applied before `begin_apply`, by an engine that applies them as they arrive.
        """
        self._torn = self._torn or self._applying or (torn and self._update is not None)
        self._update = None
        self._applying = False
        if self._state in (EndpointState.HELD, EndpointState.UPDATING):
            self._state = EndpointState.POISONED if self._torn else EndpointState.READY

    def refuse_if_poisoned(self) -> None:
        """Raise `PoisonedError` if there are no whole weights to sample from, now or when the hold ends.

        While an update is applied to whole weights nothing is wrong yet: a request that comes then waits.
        """
        if self._torn:
            raise PoisonedError(
                f"weights are torn: an update after version {self._version} failed while it was applied. "
                "Publish a complete update, or restart the server"
            )

    def _open_update(self, run_id: str, version: int) -> WeightUpdate:
        if self._update is None:
            raise UpdateRefusedError(f"no update is open here (asked for version {version}); request one first")
        if (run_id, version) != (self._update.run_id, self._update.version):
            raise UpdateRefusedError(
                f"the open update is version {self._update.version} of run {self._update.run_id!r}, "
                f"not version {version} of run {run_id!r}"
            )
        return self._update

    def _reason_to_refuse(self, update: WeightUpdate) -> str | None:
        if self._state is EndpointState.JOINING:
            return "the endpoint is still joining"
        if self._update is not None:
            return f"the update to version {self._update.version} is still open"
        if self._group_run_id is None:
            return "no weight group is formed; call init_process_group first"
        if update.run_id != self._group_run_id:
            return f"run {update.run_id!r} does not own the weight group, run {self._group_run_id!r} does"
        if self._run_id == update.run_id and update.version < self._version:
            return f"version {self._version} of this run is served already"
        return None if self._expected is None else manifest_difference(self._expected, update.manifest.tensors)


def transfer_failed(cause: BaseException, what: str) -> TransferError:
    """Return the `TransferError` for a lower error."""
    text = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
    return TransferError(f"{what} failed: {text}")

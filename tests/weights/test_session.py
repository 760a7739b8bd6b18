"""The endpoint's state machine against a plain model of it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inflight.errors import FencedError, PoisonedError, UpdateRefusedError
from inflight.weights.encode.buckets import plan_buckets
from inflight.weights.receive.states import UpdateStateMachine
from inflight.wire import BucketTransfer, EndpointState, InFlightPolicy, Manifest, TensorSpec, UpdateRef, WeightUpdate

SPECS = tuple(TensorSpec(name=f"t{i}", dtype="float32", shape=(2,)) for i in range(3))
WRONG = (*SPECS[:2], TensorSpec(name="t2", dtype="float32", shape=(3,)))
RUNS = st.sampled_from(["run-a", "run-b"])
VERSIONS = st.integers(0, 4)
MOSTLY = st.sampled_from([True, True, True, False])


def update_to(version: int, run_id: str = "run-a", specs: tuple[TensorSpec, ...] = SPECS) -> WeightUpdate:
    return WeightUpdate(
        run_id=run_id,
        version=version,
        manifest=Manifest(tensors=specs),
        buckets=plan_buckets(specs, 8),
        in_flight=InFlightPolicy.KEEP,
        deadline_s=1,
        lease_s=1,
    )


def partial_update_to(version: int) -> WeightUpdate:
    """All tensors but the first."""
    manifest = Manifest(tensors=SPECS[1:], frozen=(SPECS[0].name,))
    return update_to(version).model_copy(update={"manifest": manifest, "buckets": plan_buckets(SPECS[1:], 8)})


class Endpoint(RuleBasedStateMachine):
    """``model_*`` is what is true of the weights; the session must know it, and refuse what does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.session = UpdateStateMachine(SPECS)
        self.session.note_joined()
        self.model_weights: tuple[str | None, int] | None = (None, 0)  # None: torn
        self.owner: str | None = None
        self.open: WeightUpdate | None = None
        self.arrived = 0
        self.receiving = False
        self.applying = False

    def visible(self) -> tuple[object, ...]:
        s = self.session
        return s.state, s.version, s.run_id, s.update

    def refused(self, call: object) -> None:
        before = self.visible()
        with pytest.raises(UpdateRefusedError):
            call()  # type: ignore[operator]
        assert self.visible() == before

    @initialize(run=RUNS)
    def form_the_first_group(self, run: str) -> None:
        self.form_group(run)

    @rule(run=RUNS)
    @precondition(lambda self: self.open is None)
    def form_group(self, run: str) -> None:
        self.session.note_group_formed(run)
        self.owner = run

    @rule()
    @precondition(lambda self: self.open is None)
    def lose_group(self) -> None:
        self.session.note_group_lost()
        self.owner = None

    @rule(run=RUNS, version=VERSIONS, fits=st.booleans(), right=MOSTLY)
    def request(self, run: str, version: int, fits: bool, right: bool) -> None:
        if right and self.owner is not None:
            run, version, fits = self.owner, self.session.version + 1, True
        update = update_to(version, run, SPECS if fits else WRONG)
        served = self.model_weights or (self.session.run_id, self.session.version)
        allowed = self.open is None and fits and self.owner == run and not (served[0] == run and version < served[1])
        if not allowed:
            self.refused(lambda: self.session.request(update))
            return
        self.session.request(update)
        self.open, self.arrived, self.receiving = update, 0, False

    @rule(run=RUNS, version=VERSIONS, index=st.integers(0, 3), right=MOSTLY)
    def begin_bucket(self, run: str, version: int, index: int, right: bool) -> None:
        if right and self.open is not None:
            run, version, index = self.open.run_id, self.open.version, self.arrived
        transfer = BucketTransfer(run_id=run, version=version, bucket_index=index, timeout_s=1)
        is_open = self.open is not None and (run, version) == (self.open.run_id, self.open.version)
        if not is_open or self.receiving or index != self.arrived or self.arrived == 3:
            self.refused(lambda: self.session.begin_bucket(transfer))
            return
        bucket, specs = self.session.begin_bucket(transfer)
        assert (bucket.index, tuple(specs)) == (index, SPECS[index : index + 1])
        self.receiving = True

    @rule()
    @precondition(lambda self: self.receiving)
    def note_bucket_received(self) -> None:
        self.session.note_bucket_received()
        self.receiving, self.arrived = False, self.arrived + 1

    @rule(run=RUNS, version=VERSIONS, right=MOSTLY)
    def begin_apply(self, run: str, version: int, right: bool) -> None:
        if right and self.open is not None:
            run, version = self.open.run_id, self.open.version
        ref = UpdateRef(run_id=run, version=version)
        is_open = self.open is not None and ref == self.open.ref
        if not is_open or self.arrived != 3 or self.applying:
            self.refused(lambda: self.session.begin_apply(ref))
            return
        self.session.begin_apply(ref)
        self.applying = True

    @rule()
    @precondition(lambda self: self.applying)
    def committed(self) -> None:
        assert self.open is not None
        self.session.note_committed()
        self.model_weights = (self.open.run_id, self.open.version)
        self.open, self.applying = None, False

    @rule()
    def abort(self) -> None:
        before = self.visible()
        self.session.abort()
        if self.open is None:
            assert self.visible() == before
        if self.applying:
            self.model_weights = None
        self.open, self.receiving, self.applying = None, False, False

    @invariant()
    def state_is_what_is_true(self) -> None:
        s = self.session
        assert s.update is self.open
        if self.open is not None:
            assert s.state in (EndpointState.PAUSED, EndpointState.UPDATING)
            assert (s.state is EndpointState.PAUSED) == (self.arrived == 0 and not self.receiving)
        else:
            assert s.state is (EndpointState.POISONED if self.model_weights is None else EndpointState.READY)
        if self.model_weights is not None:
            assert (s.run_id, s.version) == self.model_weights

    @invariant()
    def generation_is_refused_only_from_torn_weights(self) -> None:
        if self.model_weights is None:
            with pytest.raises(PoisonedError):
                self.session.refuse_to_sample()
        else:
            self.session.refuse_to_sample()


Endpoint.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
test_any_sequence_of_calls_leaves_the_state_that_is_true = Endpoint.TestCase


def test_a_joining_endpoint_refuses_updates() -> None:
    session = UpdateStateMachine(SPECS)
    session.note_group_formed("run-a")
    with pytest.raises(UpdateRefusedError, match="joining"):
        session.request(update_to(1))
    assert session.state is EndpointState.JOINING


def receive_all(session: UpdateStateMachine, update: WeightUpdate) -> None:
    session.request(update)
    for index in range(len(update.buckets)):
        session.begin_bucket(
            BucketTransfer(run_id=update.run_id, version=update.version, bucket_index=index, timeout_s=1)
        )
        session.note_bucket_received()


def test_the_version_served_may_be_published_again_but_no_older_one() -> None:
    session = UpdateStateMachine(SPECS)
    session.note_joined()
    session.note_group_formed("run-a")
    for version in (2, 2):
        receive_all(session, update_to(version))
        session.begin_apply(update_to(version).ref)
        session.note_committed()
    with pytest.raises(UpdateRefusedError, match="version 2 of this run is already served"):
        session.request(update_to(1))
    session.note_group_formed("run-b")
    with pytest.raises(UpdateRefusedError, match="does not own"):
        session.request(update_to(3))
    session.request(update_to(0, "run-b"))


def test_a_poisoned_endpoint_stays_so_through_an_aborted_update_and_is_healed_by_a_complete_one() -> None:
    session = UpdateStateMachine(SPECS)
    session.note_joined()
    session.note_group_formed("run-a")
    receive_all(session, update_to(1))
    session.begin_apply(update_to(1).ref)
    session.abort()
    assert session.state is EndpointState.POISONED
    session.request(update_to(2))
    session.abort()
    assert session.state is EndpointState.POISONED
    receive_all(session, update_to(2))
    session.begin_apply(update_to(2).ref)
    session.note_committed()
    assert (session.state, session.version) == (EndpointState.READY, 2)
    session.refuse_to_sample()


def test_weights_that_another_client_made_whole_and_tore_again_are_torn_in_unknown_places() -> None:
    session = UpdateStateMachine(SPECS)
    session.note_joined()
    session.note_group_formed("run-a")
    partial = partial_update_to(1)
    receive_all(session, partial)
    session.begin_apply(partial.ref)
    session.abort()
    session.adopt_report(2, "run-b", torn=False)
    session.adopt_report(2, "run-b", torn=True)
    with pytest.raises(UpdateRefusedError, match="weights are torn"):
        session.request(partial_update_to(3))
    session.request(update_to(3))


def test_an_old_trainer_is_refused_even_after_another_run_had_the_group() -> None:
    session = UpdateStateMachine(SPECS)
    session.note_joined()
    session.fence("a", 5)
    session.note_group_formed("a")
    session.fence("b", 1)
    session.note_group_formed("b")
    with pytest.raises(FencedError, match="incarnation 4, but incarnation 5 has taken over"):
        session.fence("a", 4)
    assert (session.owner, session.incarnation) == ("b", 1)
    session.fence("a", 5)


def test_a_run_that_returns_when_it_is_no_longer_reported_is_told_which_incarnation_to_take() -> None:
    session = UpdateStateMachine(SPECS)
    session.note_joined()
    session.fence("a", 2)
    for number in range(15):
        session.fence(f"other-{number}", 1)
    assert session.incarnations["a"] == 2
    session.fence("a", 2)  # and it is the latest caller again
    for number in range(16):
        session.fence(f"other-{number}", 1)
    assert len(session.incarnations) == 16 and "a" not in session.incarnations
    for incarnation in (1, 2):  # a trainer that sees none of its run takes 1
        with pytest.raises(FencedError, match=r"reports only its last 16 runs, .* pass incarnation=3 to"):
            session.fence("a", incarnation)
    assert session.owner == "other-15"
    session.fence("a", 3)
    assert (session.owner, session.incarnations["a"]) == ("a", 3)


def test_a_trainer_that_does_not_count_incarnations_may_return_at_any_time() -> None:
    session = UpdateStateMachine(SPECS)
    session.note_joined()
    for run_id in ("a", *map(str, range(20)), "a"):
        session.fence(run_id, 0)
    assert session.owner == "a"


def test_256_aborted_sessions_are_remembered() -> None:
    session = UpdateStateMachine(SPECS)
    session.note_joined()
    session.note_group_formed("run-a")
    updates = [update_to(1).model_copy(update={"session_id": f"attempt-{i}"}) for i in range(256)]
    for update in updates:
        session.request(update)
        session.forbid(update.ref)  # as a receiver's abort does
        session.abort()
    with pytest.raises(UpdateRefusedError, match="its session 'attempt-0' has ended"):
        session.request(updates[0])

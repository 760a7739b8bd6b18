"""The receiving half of updates against a plain model: any order of a publisher's calls, repeated, late or fenced."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inflight.errors import FencedError, InflightError, PoisonedError, TransferError, UpdateRefusedError
from inflight.weights.encode.bucket_bytes import checksum, pack
from inflight.weights.encode.buckets import plan_buckets
from inflight.weights.encode.delta import element_runs, encode_delta, find_changes
from inflight.weights.receive.receiver import ReceivingEndpoint, UpdateReceiver
from inflight.weights.receive.staged_sink import StagedSink
from inflight.wire import (
    BucketTransfer,
    Capabilities,
    DirectorySpec,
    EndpointState,
    InFlightPolicy,
    Manifest,
    TensorSpec,
    UpdateRef,
    WeightUpdate,
)
from tests.gates import SOON_S

RUN = "run"
SPECS = tuple(TensorSpec(name=f"t{i}", dtype="float32", shape=(40,)) for i in range(3))
NUM_ELEMENTS = 40
MOSTLY = st.sampled_from([True, True, True, True, False])
INCARNATIONS = st.integers(1, 3)

Tensors = dict[str, torch.Tensor]


class Wire:
    """What was sent: the bytes of each bucket of each session. Satisfies `WeightReceiver`, and damages if told to."""

    def __init__(self) -> None:
        self.sent: dict[tuple[UpdateRef, int], torch.Tensor] = {}
        self.ref: UpdateRef | None = None
        self.index = 0
        self.damage = False

    def join(self) -> None:
        pass

    def begin(self, ref: UpdateRef) -> None:
        self.ref, self.index = ref, 0

    def receive(self, specs: Sequence[TensorSpec], timeout_s: float) -> list[torch.Tensor]:
        assert self.ref is not None
        payload = self.sent[self.ref, self.index].clone()
        self.index += 1
        if self.damage:
            payload[-1] ^= 1
        return [payload]

    def abort(self) -> None:
        pass


class RecordingEndpoint(ReceivingEndpoint):
    """A model of three tensors, and whether sampling is paused. Satisfies `PausableEngine`."""

    def __init__(self, sink: StagedSink) -> None:
        self.sink = sink
        self.tensors: Tensors = {spec.name: torch.zeros(NUM_ELEMENTS) for spec in SPECS}
        self.is_paused = False
        self.tear = False
        self.updates: UpdateReceiver

    async def pause(self, update: WeightUpdate) -> None:
        assert not self.is_paused
        self.is_paused = True

    async def apply(self, update: WeightUpdate) -> None:
        assert self.is_paused, "weights change between two token steps only"
        for name, tensor in self.sink.take():
            self.tensors[name] = tensor.clone()
            if self.tear:
                raise RuntimeError("loading failed")
        self.is_paused = False

    async def resume(self) -> None:
        self.is_paused = False

    async def fail_requests(self) -> None:
        self.is_paused = False

    async def num_running(self) -> int:
        return 0

    async def receiver(self) -> UpdateReceiver:
        return self.updates


@dataclass
class Session:
    """One publish, as the trainer that made it knows it."""

    update: WeightUpdate
    tensors: Tensors
    payloads: list[tuple[str, torch.Tensor]]


DECLARED = Capabilities(
    engine="recording",
    engine_version="1",
    model="tensors",
    vocab_size=2,
    max_model_len=2,
    dtype="float32",
    in_flight_policies=tuple(InFlightPolicy),
    transports=("file",),
    staging=True,
    encodings=("delta",),
    partial_updates=True,
    version_binding="spans",
    logprob_kind="processed",
    num_ranks=1,
    max_concurrent_sequences=1,
    streaming=False,
    chat=False,
)


class Publisher(RuleBasedStateMachine):
    """``model_*`` is what must be true; a call that has no effect leaves all of it as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.wire = Wire()
        self.sink = StagedSink(lambda spec: self.wire)
        self.engine = RecordingEndpoint(self.sink)
        self.receiver = UpdateReceiver(self.engine, self.sink, SPECS, DECLARED)
        self.engine.updates = self.receiver
        self.sessions: list[Session] = []
        self.model_tensors: Tensors = dict(self.engine.tensors)
        self.served: UpdateRef | None = None
        self.served_incarnation = 0
        self.torn: set[str] = set()
        self.is_torn = False
        self.kept: Session | None = None
        self.incarnation = 0
        self.has_group = False
        self.open: Session | None = None
        self.num_arrived = 0
        self.over: set[UpdateRef] = set()

    def teardown(self) -> None:
        self.do(self.receiver.aclose())
        self.loop.close()

    def do(self, call: Coroutine[Any, Any, Any]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(SOON_S):
                return await call

        return self.loop.run_until_complete(bounded())

    def refused(self, call: Coroutine[Any, Any, Any], kind: type[InflightError] = UpdateRefusedError) -> None:
        with pytest.raises(kind):
            self.do(call)

    def ended(self, *, began: bool) -> None:
        """The open update is over without a commit."""
        assert self.open is not None
        self.over.add(self.open.update.ref)
        self.open = None
        if began:
            self.has_group = False

    @rule(incarnation=INCARNATIONS)
    def join(self, incarnation: int) -> None:
        spec = DirectorySpec(run_id=RUN, incarnation=incarnation, transport="file", directory="/", timeout_s=1)
        if incarnation < self.incarnation:
            self.refused(self.engine.init_process_group(spec), FencedError)
            return
        self.do(self.engine.init_process_group(spec))
        if self.open is not None:
            self.ended(began=False)
        self.incarnation, self.has_group = incarnation, True

    @rule(
        incarnation=INCARNATIONS,
        right=MOSTLY,
        step=st.integers(-1, 2),
        staged=st.booleans(),
        keep=st.booleans(),
        delta=st.booleans(),
        frozen=st.sampled_from([0, 0, 1]),
        seed=st.integers(0, 99),
    )
    def request(
        self, incarnation: int, right: bool, step: int, staged: bool, keep: bool, delta: bool, frozen: int, seed: int
    ) -> None:
        if right:
            incarnation, step = max(self.incarnation, 1), max(step, 0)
        version = max(0, (0 if self.served is None else self.served.version) + step)
        session = self.made(incarnation, version, staged, keep, delta, frozen, seed)
        self.sessions.append(session)
        update = session.update
        call = self.engine.request_weight_update(update)
        names = {spec.name for spec in update.manifest.tensors}
        base_fits = update.base is None or (self.kept is not None and update.base == self.kept.update.ref)
        if (
            not self.has_group
            or incarnation < self.incarnation
            or self.open is not None
            or (self.served is not None and (incarnation, version) < (self.served_incarnation, self.served.version))
            or (self.is_torn and not self.torn <= names)
            or not base_fits
        ):
            if self.has_group and incarnation > self.incarnation and base_fits:
                self.incarnation = incarnation  # it was heard, though refused
            self.refused(call)
            return
        self.do(call)
        self.incarnation = incarnation
        self.open, self.num_arrived = session, 0

    def made(
        self, incarnation: int, version: int, staged: bool, keep: bool, delta: bool, frozen: int, seed: int
    ) -> Session:
        """A publish with weights of its own; a delta if a base is kept that is cut in the same way."""
        specs = SPECS[frozen:]
        base = self.kept if delta and self.kept is not None else None
        if base is not None and base.update.manifest.tensors != specs:
            base = None
        random = torch.Generator().manual_seed(seed * 1000 + len(self.sessions))
        tensors: Tensors = {}
        for spec in specs:
            if base is None:
                tensors[spec.name] = torch.randn(NUM_ELEMENTS, generator=random)
            else:
                tensors[spec.name] = base.tensors[spec.name].clone()
                tensors[spec.name][seed % NUM_ELEMENTS] = float(torch.randn(1, generator=random))
        update = WeightUpdate(
            run_id=RUN,
            version=version,
            session_id=f"s{len(self.sessions)}",
            incarnation=incarnation,
            manifest=Manifest(tensors=specs, frozen=tuple(spec.name for spec in SPECS[:frozen])),
            buckets=plan_buckets(specs, 4 * NUM_ELEMENTS),
            in_flight=InFlightPolicy.KEEP,
            staged=staged,
            encodings=() if base is None else ("delta",),
            base=None if base is None else base.update.ref,
            keep=keep,
            deadline_s=5,
            lease_s=60,
        )
        payloads: list[tuple[str, torch.Tensor]] = []
        for spec in specs:
            flat = pack([tensors[spec.name]]).clone()
            patch = None
            if base is not None:
                patch = find_changes(flat, pack([base.tensors[spec.name]]), element_runs([spec]))
            payloads.append(("raw", flat) if patch is None else ("delta", encode_delta(patch)))
            self.wire.sent[update.ref, len(payloads) - 1] = payloads[-1][1]
        return Session(update, tensors, payloads)

    def transfer_of(self, session: Session, index: int) -> BucketTransfer:
        ref = session.update.ref
        encoding, payload = session.payloads[min(index, len(session.payloads) - 1)]
        return BucketTransfer.model_validate(
            {
                "run_id": ref.run_id,
                "version": ref.version,
                "session_id": ref.session_id,
                "bucket_index": index,
                "encoding": encoding,
                "size_bytes": payload.numel(),
                "checksum": checksum(payload),
                "timeout_s": 5,
            }
        )

    @rule(right=MOSTLY, index=st.integers(0, 3), damage=st.sampled_from([False] * 7 + [True]))
    @precondition(lambda self: self.open is not None)
    def receive(self, right: bool, index: int, damage: bool) -> None:
        session = self.open
        assert session is not None
        index = self.num_arrived if right else index
        call = self.engine.receive_weights(self.transfer_of(session, index))
        if index < self.num_arrived:
            self.do(call)  # it was there already
        elif index > self.num_arrived or index >= len(session.payloads):
            self.refused(call)
        elif damage:
            self.wire.damage = True
            self.refused(call, TransferError)
            self.wire.damage = False
            self.ended(began=True)
        else:
            self.do(call)
            self.num_arrived += 1

    @rule(tear=st.sampled_from([False] * 5 + [True]))
    @precondition(lambda self: self.open is not None)
    def commit(self, tear: bool) -> None:
        session = self.open
        assert session is not None
        ref = session.update.ref
        if self.num_arrived < len(session.payloads):
            self.refused(self.engine.commit_weight_update(ref))
            return
        self.engine.tear = tear
        names = {spec.name for spec in session.update.manifest.tensors}
        if tear:
            self.refused(self.engine.commit_weight_update(ref), PoisonedError)
            self.engine.tear = False
            self.is_torn, self.torn = True, self.torn | names
            self.over.add(ref)
        else:
            answer = self.do(self.engine.commit_weight_update(ref))
            assert (answer.version, answer.session_id) == (ref.version, ref.session_id)
            self.model_tensors = {**self.model_tensors, **session.tensors}
            self.served, self.served_incarnation = ref, session.update.incarnation
            self.is_torn, self.torn = False, set()
            self.kept = session if session.update.keep else None
            self.over.add(ref)
        self.open = None

    @rule()
    @precondition(lambda self: self.open is not None)
    def abort(self) -> None:
        assert self.open is not None
        self.do(self.engine.abort_weight_update(self.open.update.ref))
        self.ended(began=self.num_arrived > 0)

    @rule()
    @precondition(lambda self: self.open is not None)
    def repeat_the_request(self) -> None:
        assert self.open is not None
        self.do(self.engine.request_weight_update(self.open.update))

    @rule(which=st.integers(0, 99), step=st.sampled_from(["request", "receive", "commit", "abort"]))
    @precondition(lambda self: len(self.over) > 0)
    def call_late(self, which: int, step: str) -> None:
        """A call of a session that is over comes once more, and changes nothing."""
        gone = [session for session in self.sessions if session.update.ref in self.over]
        session = gone[which % len(gone)]
        ref = session.update.ref
        if step == "request":
            self.refused(self.engine.request_weight_update(session.update))
            self.hear(session.update)
        elif step == "receive":
            self.refused(self.engine.receive_weights(self.transfer_of(session, 0)))
        elif step == "commit" and ref == self.served and not self.is_torn and self.open is None:
            assert self.do(self.engine.commit_weight_update(ref)).session_id == ref.session_id
        elif step == "commit":
            self.refused(self.engine.commit_weight_update(ref))
        elif self.open is not None:
            self.refused(self.engine.abort_weight_update(ref))
        else:
            self.do(self.engine.abort_weight_update(ref))

    @rule()
    @precondition(lambda self: self.open is None and len(self.sessions) > 0)
    def abort_before_the_request_came(self) -> None:
        """The abort overtakes its request, which is refused when it comes."""
        session = self.sessions[-1]
        self.do(self.engine.abort_weight_update(session.update.ref))
        self.over.add(session.update.ref)
        self.refused(self.engine.request_weight_update(session.update))
        self.hear(session.update)

    def hear(self, update: WeightUpdate) -> None:
        """A request that is refused is heard all the same, if it comes to the state machine."""
        base_fits = update.base is None or (self.kept is not None and update.base == self.kept.update.ref)
        if self.has_group and base_fits:
            self.incarnation = max(self.incarnation, update.incarnation)

    @invariant()
    def what_is_served_is_what_was_committed(self) -> None:
        answer = self.do(self.engine.weight_version())
        served = (0, "") if self.served is None else (self.served.version, self.served.session_id)
        assert (answer.version, answer.session_id) == served
        assert answer.incarnation == self.incarnation
        assert answer.kept == (None if self.kept is None else self.kept.update.ref)
        if not self.is_torn:
            assert all(self.engine.tensors[name].equal(tensor) for name, tensor in self.model_tensors.items())

    @invariant()
    def sampling_is_paused_only_while_an_update_says_so(self) -> None:
        state = self.receiver.session.state
        assert self.engine.is_paused == (self.open is not None and not self.open.update.staged)
        if self.open is None:
            assert state is (EndpointState.POISONED if self.is_torn else EndpointState.READY)
        elif self.open.update.staged:
            assert state is EndpointState.STAGING
        else:
            assert state is (EndpointState.UPDATING if self.num_arrived else EndpointState.PAUSED)


Publisher.TestCase.settings = settings(max_examples=60, stateful_step_count=50)
test_any_order_of_a_publishers_calls_leaves_what_it_should = Publisher.TestCase


def test_requests_held_for_an_update_that_was_to_mend_torn_weights_end_with_it() -> None:
    it = Publisher()
    try:
        it.join(1)
        it.request(1, True, 1, False, False, False, 0, 0)
        for index in range(len(SPECS)):
            it.receive(True, index, False)
        it.commit(True)
        assert it.is_torn
        it.request(1, True, 1, False, False, False, 0, 0)
        assert it.engine.is_paused
        it.abort()
        it.sampling_is_paused_only_while_an_update_says_so()
    finally:
        it.teardown()

"""Every state of the endpoint's table with every event, by the calls that bring both about."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inflight.errors import BusyError, PoisonedError, UpdateRefusedError
from inflight.weights.encode.buckets import plan_buckets
from inflight.weights.receive.states import TRANSITIONS, UpdateEvent, UpdateStateMachine
from inflight.wire import BucketTransfer, EndpointState, InFlightPolicy, Manifest, TensorSpec, UpdateRef, WeightUpdate

SPECS = tuple(TensorSpec(name=f"t{i}", dtype="float32", shape=(2,)) for i in range(2))
REF = UpdateRef(run_id="run", version=1, session_id="s")
ANOTHER = UpdateRef(run_id="run", version=9, session_id="t")


def request(session: UpdateStateMachine, *, staged: bool, ref: UpdateRef = REF) -> None:
    session.request(
        WeightUpdate(
            **ref.model_dump(),
            manifest=Manifest(tensors=SPECS),
            buckets=plan_buckets(SPECS, 8),
            in_flight=InFlightPolicy.KEEP,
            staged=staged,
            deadline_s=1,
            lease_s=1,
        )
    )


def begin(session: UpdateStateMachine) -> None:
    """Have the next bucket begin to arrive."""
    num_received = sum(session.has_bucket(transfer(index)) for index in range(len(SPECS)))
    session.begin_bucket(transfer(num_received))


def transfer(index: int) -> BucketTransfer:
    return BucketTransfer(**REF.model_dump(), bucket_index=index, timeout_s=1)


def receive(session: UpdateStateMachine) -> None:
    begin(session)
    session.note_bucket_received()


CALLS: dict[str, Callable[[UpdateStateMachine], object]] = {
    "join": lambda session: session.note_joined(),
    "request": lambda session: request(session, staged=False),
    "stage": lambda session: request(session, staged=True),
    "request another": lambda session: request(session, staged=False, ref=ANOTHER),
    "stage another": lambda session: request(session, staged=True, ref=ANOTHER),
    "begin": begin,
    "receive": receive,
    "pause": lambda session: session.pause(REF),
    "apply": lambda session: session.begin_apply(REF),
    "commit": lambda session: session.note_committed(),
    "abort": lambda session: session.abort(),
    "abort torn": lambda session: session.abort(torn=True),
    "find": lambda session: session.adopt_report(7, "other", torn=False),
    "find torn": lambda session: session.adopt_report(7, "other", torn=True),
    "find another": lambda session: session.adopt_report(3, "another", torn=False),
    "find another torn": lambda session: session.adopt_report(3, "another", torn=True),
    "find released": lambda session: session.adopt_report(7, "other", torn=False, released=True),
    "find another released": lambda session: session.adopt_report(3, "another", torn=False, released=True),
    "release": lambda session: (session.begin_release(), session.note_released()),
    "restore": lambda session: session.note_restored(),
}
WHOLE_OR_TORN = ("join", "join, find torn")
UPDATES = {
    EndpointState.STAGING: ["stage", "stage, begin", "stage, receive", "stage, receive, receive"],
    EndpointState.PAUSED: ["request", "stage, receive, receive, pause"],
    EndpointState.UPDATING: [
        "request, begin",
        "request, receive",
        "request, receive, receive",
        "request, receive, receive, apply",
        "stage, receive, receive, pause, apply",
    ],
}
WAYS = {
    EndpointState.JOINING: [""],
    EndpointState.READY: ["join", "join, find torn, find", "join, stage, abort"],
    EndpointState.RELEASED: ["join, release", "join, find released", "join, release, restore, release"],
    EndpointState.POISONED: ["join, find torn", "join, request, receive, receive, apply, abort"],
    **{state: [f"{below}, {way}" for below in WHOLE_OR_TORN for way in ways] for state, ways in UPDATES.items()},
}
"""Ways into each state. Updates are requested over whole weights and over torn ones."""

EVENTS = {
    UpdateEvent.JOINED: "join",
    UpdateEvent.REQUEST: "request another",
    UpdateEvent.REQUEST_STAGED: "stage another",
    UpdateEvent.BUCKET: "begin",
    UpdateEvent.PAUSE: "pause",
    UpdateEvent.APPLY: "apply",
    UpdateEvent.COMMITTED: "commit",
    UpdateEvent.ENDED: "abort",
    UpdateEvent.TORN: "abort torn",
    UpdateEvent.REPORTED_WHOLE: "find another",
    UpdateEvent.REPORTED_TORN: "find another torn",
    UpdateEvent.REPORTED_RELEASED: "find another released",
    UpdateEvent.RELEASE: "release",
    UpdateEvent.RESTORED: "restore",
}
ASKED = (
    UpdateEvent.REQUEST,
    UpdateEvent.REQUEST_STAGED,
    UpdateEvent.BUCKET,
    UpdateEvent.PAUSE,
    UpdateEvent.APPLY,
    UpdateEvent.RELEASE,
)
"""Publishers ask for these at any time, and are refused. The other events never come at a wrong time."""


def session_by(way: str) -> UpdateStateMachine:
    session = UpdateStateMachine(SPECS)
    session.note_group_formed("run")
    for step in filter(None, way.split(", ")):
        CALLS[step](session)
    return session


def calls(state: EndpointState, way: str, event: UpdateEvent) -> list[str]:
    """Return the calls that bring an event about in a session that came into a state this way."""
    tears = state in UPDATES and ("torn" in way or "apply" in way)  # whatever ends this update
    if tears and event in (UpdateEvent.ENDED, UpdateEvent.TORN):
        return [] if event is UpdateEvent.ENDED else ["abort", "abort torn"]
    return [EVENTS[event]]


def facts(session: UpdateStateMachine) -> tuple[object, ...]:
    s = session
    buckets = [(s.has_bucket(transfer(i)), s.is_receiving(transfer(i))) for i in range(len(SPECS))]
    try:
        is_complete = s.require_complete(REF) is not None
    except UpdateRefusedError:
        is_complete = False
    return s.state, s.version, s.run_id, s.session_id, s.update, s.is_torn, s.has_begun, is_complete, buckets


def state_after(way: str, event: UpdateEvent, call: str) -> EndpointState | None:
    """Return the state that a call leads to; None if it is refused or has no effect."""
    session = session_by(way)
    before = facts(session)
    try:
        CALLS[call](session)
    except (UpdateRefusedError, BusyError, PoisonedError):
        assert event in ASKED
        assert facts(session) == before
    except AssertionError:
        assert event not in ASKED
        assert facts(session) == before
    return None if facts(session) == before else session.state


@pytest.mark.parametrize("state", EndpointState)
def test_every_way_leads_into_its_state(state: EndpointState) -> None:
    assert {session_by(way).state for way in WAYS[state]} == {state}


@pytest.mark.parametrize("event", UpdateEvent, ids=lambda event: event.name.lower())
@pytest.mark.parametrize("state", EndpointState)
def test_every_event_leads_where_the_table_says_or_has_no_effect(state: EndpointState, event: UpdateEvent) -> None:
    tried = {state_after(way, event, call) for way in WAYS[state] for call in calls(state, way, event)}
    assert tried
    assert tried - {None} == {after for pair, after in TRANSITIONS.items() if pair == (state, event)}

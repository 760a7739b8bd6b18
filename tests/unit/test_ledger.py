"""Every item is settled exactly once, over saves and restores at any point."""

from __future__ import annotations

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inflight.errors import CheckpointError, InvalidRequestError
from inflight.rollouts import Ledger


def saved_and_restored(ledger):
    return Ledger.from_json(json.loads(json.dumps(ledger.to_json())))


class LedgerMachine(RuleBasedStateMachine):
    """The model keeps every item ever seen; the ledger must agree with it."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger()
        self.state = {}
        self.dropped = {}
        self.requeued = 0
        self.saved = None

    def items(self, *states):
        return sorted(item for item, state in self.state.items() if state in states)

    @rule()
    def issue(self):
        waiting = self.items("waiting")
        expected = waiting[0] if waiting else len(self.state)
        assert self.ledger.next_item() == expected
        self.state[expected] = "issued"

    @precondition(lambda self: self.items("issued"))
    @rule(data=st.data())
    def finish(self, data):
        item = data.draw(st.sampled_from(self.items("issued")))
        self.ledger.finish(item)
        self.state[item] = "finished"

    @precondition(lambda self: self.items("issued"))
    @rule(data=st.data())
    def requeue(self, data):
        item = data.draw(st.sampled_from(self.items("issued")))
        self.ledger.requeue(item)
        self.state[item] = "waiting"
        self.requeued += 1

    @precondition(lambda self: self.items("finished"))
    @rule(data=st.data())
    def train(self, data):
        item = data.draw(st.sampled_from(self.items("finished")))
        self.ledger.train(item)
        self.state[item] = "trained"

    @precondition(lambda self: self.items("issued", "finished"))
    @rule(data=st.data(), reason=st.sampled_from(["too_old", "too_long"]))
    def drop(self, data, reason):
        item = data.draw(st.sampled_from(self.items("issued", "finished")))
        self.ledger.drop(item, reason)
        self.state[item] = "dropped"
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    @rule()
    def save(self):
        self.saved = (json.dumps(self.ledger.to_json()), dict(self.state), dict(self.dropped), self.requeued)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def crash_and_restore(self):
        text, state, dropped, self.requeued = self.saved
        self.dropped = dict(dropped)
        self.ledger = Ledger.from_json(json.loads(text))
        self.state = {i: s if s in ("trained", "dropped") else "waiting" for i, s in state.items()}

    @precondition(lambda self: self.state)
    @rule(data=st.data(), move=st.sampled_from(["finish", "requeue", "train", "drop"]))
    def illegal_transition_is_refused_and_changes_nothing(self, data, move):
        legal = {"finish": ["issued"], "requeue": ["issued"], "train": ["finished"], "drop": ["issued", "finished"]}
        item = data.draw(st.sampled_from([*self.state, len(self.state), -1]))
        if self.state.get(item) in legal[move]:
            return
        before = self.ledger.to_json()
        with pytest.raises(InvalidRequestError, match=f"item {item} cannot be"):
            getattr(self.ledger, move)(item, *(["any"] if move == "drop" else []))
        assert self.ledger.to_json() == before

    @invariant()
    def counts_agree(self):
        assert self.ledger.outstanding == len(self.items("issued", "finished"))
        assert self.ledger.num_trained == len(self.items("trained"))
        assert self.ledger.num_requeued == self.requeued
        assert dict(self.ledger.num_dropped) == self.dropped

    def teardown(self):
        """Restore and run to the end: each item that was not settled is issued once, in order, then new ones."""
        ledger = saved_and_restored(self.ledger)
        expected = [*self.items("waiting", "issued", "finished"), len(self.state), len(self.state) + 1]
        assert [ledger.next_item() for _ in expected] == expected


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40)


def test_items_are_issued_in_order():
    ledger = Ledger()
    assert [ledger.next_item() for _ in range(4)] == [0, 1, 2, 3]
    assert ledger.outstanding == 4


def test_requeued_items_come_first_and_lowest_first():
    ledger = Ledger()
    for _ in range(4):
        ledger.next_item()
    ledger.requeue(3)
    ledger.requeue(1)
    assert [ledger.next_item() for _ in range(3)] == [1, 3, 4]
    assert ledger.num_requeued == 2


def test_item_is_never_trained_twice():
    ledger = Ledger()
    ledger.next_item()
    ledger.finish(0)
    ledger.train(0)
    with pytest.raises(InvalidRequestError, match="item 0 cannot be trained: it is settled, not finished"):
        ledger.train(0)


def test_item_that_was_never_issued_is_refused():
    with pytest.raises(InvalidRequestError, match="item 7 cannot be finished: it is never issued"):
        Ledger().finish(7)


def test_ledger_stays_small_over_a_long_run():
    ledger = Ledger()
    for _ in range(10_000):
        item = ledger.next_item()
        ledger.finish(item)
        ledger.train(item)
    assert len(json.dumps(ledger.to_json())) < 200
    assert ledger.num_trained == 10_000


@pytest.mark.parametrize(
    "change",
    [
        {"next_new": 5},
        {"unsettled": [0, 0, 9]},
        {"unsettled": [1, 1]},
        {"num_trained": "many"},
        {"num_dropped": None},
        {"unsettled": None},
    ],
)
def test_saved_state_that_does_not_add_up_is_refused(change):
    ledger = Ledger()
    for _ in range(3):
        ledger.next_item()
    ledger.drop(0, "too_old")
    with pytest.raises(CheckpointError, match="the ledger"):
        Ledger.from_json({**ledger.to_json(), **change})


def test_saved_state_with_a_key_missing_is_refused():
    with pytest.raises(CheckpointError, match="KeyError"):
        Ledger.from_json({})


def test_items_that_wait_to_be_issued_again_after_a_restart_are_unsettled_but_not_outstanding() -> None:
    ledger = Ledger()
    items = [ledger.next_item() for _ in range(3)]
    ledger.finish(items[0])
    ledger.train(items[0])
    assert (ledger.outstanding, ledger.num_unsettled) == (2, 2)
    restarted = Ledger.from_json(ledger.to_json())
    assert (restarted.outstanding, restarted.num_unsettled) == (0, 2)
    restarted.next_item()
    assert (restarted.outstanding, restarted.num_unsettled) == (1, 2)

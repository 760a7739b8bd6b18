"""Slot-seconds by plain arithmetic."""

from __future__ import annotations

import pytest

from inflight.rollouts.slots import SlotAccount, SlotSeconds


def test_slot_seconds_add_up_over_changes() -> None:
    account = SlotAccount()
    account.note(10.0, "a", 4, 0, takes_work=True)
    account.note(12.0, "a", 4, 3, takes_work=True)  # 2 s with 4 free
    account.note(13.0, "b", 2, 1, takes_work=True)  # 1 s with 3 of 4
    spent = account.take(15.0)  # 2 s with 4 of 6
    assert spent == SlotSeconds(all_s=8 + 4 + 12, open_s=24, running_s=3 + 8, free_s=8 + 1 + 4)
    assert spent.utilisation == pytest.approx(11 / 24)
    assert spent.bubble_share == pytest.approx(13 / 24)
    assert account.take(15.0) == SlotSeconds()
    assert account.take(16.0) == SlotSeconds(all_s=6, open_s=6, running_s=4, free_s=2)


def test_slots_of_an_endpoint_that_takes_no_work_are_unused_and_no_bubble() -> None:
    account = SlotAccount()
    account.note(0.0, "a", 4, 4, takes_work=True)
    account.note(0.0, "b", 4, 2, takes_work=False)  # two completions still end there
    spent = account.take(1.0)
    assert (spent.utilisation, spent.bubble_share) == (6 / 8, 0.0)
    account.forget(1.0, "b")
    assert account.take(2.0).utilisation == 1.0


def test_without_slots_there_are_no_shares() -> None:
    assert SlotAccount().take(5.0).utilisation is None
    account = SlotAccount()
    account.note(0.0, "a", 4, 0, takes_work=False)
    spent = account.take(1.0)
    assert (spent.utilisation, spent.bubble_share) == (0.0, None)


def test_times_before_the_first_endpoint_count_nothing() -> None:
    """The clock's zero means nothing: an account that begins at 1e9 s has not been idle for 1e9 s."""
    account = SlotAccount()
    account.note(1e9, "a", 1, 1, takes_work=True)
    assert account.take(1e9 + 2) == SlotSeconds(all_s=2, open_s=2, running_s=2)

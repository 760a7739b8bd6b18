"""What schedulers read of the board at every event is kept as it changes; here it is counted again."""

from __future__ import annotations

import random

import pytest

from inflight.contracts.scheduling import Finished, Issue, Joined, Offered, Returned, Scored, Withdrawn
from inflight.rollouts.board import Board
from inflight.rollouts.slots import SlotAccount


@pytest.mark.parametrize("seed", range(20))
def test_counts_of_the_board_are_those_of_its_items(seed):
    draw, board, now = random.Random(seed), Board(), 0.0
    for name in ("a", "b"):
        board.observe(Joined(now, name, 24, True))
    for number in range(300):
        now += 1.0
        items = list(board.items.values())
        item = draw.choice(items) if items else None
        match draw.randrange(5):
            case 0:
                board.observe(Offered(now, number, "prompt", 3, (0, 0, 2, 0)))
            case 1 if item is not None and item.unissued and (endpoint := board.least_loaded(len(item.unissued))):
                board.record(Issue(endpoint.name, item.index, item.unissued[: draw.randrange(1, 5)]), now)
            case 2 if item is not None and item.running:
                kind = draw.choice((Finished, Returned))
                board.observe(kind(now, item.index, draw.choice(item.running), 5))
            case 3 if item is not None and draw.random() < 0.3:
                board.observe(Withdrawn(now, item.index))
            case 4 if item is not None and not item.unissued and not item.running:
                board.observe(Scored(now, item.index, "prompt", (1,) * 4, (0.0,) * 4))
        assert board.unissued() == [item for item in board.items.values() if item.unissued]
        assert board.num_open == sum(item.is_finished.count(False) for item in board.items.values())
        assert board.num_running == sum(len(item.running) for item in board.items.values())


def test_slot_seconds_are_those_of_every_endpoint():
    draw, account, endpoints = random.Random(0), SlotAccount(), {}
    all_s = open_s = running_s = free_s = 0.0
    for time_s in range(200):
        for num_slots, num_running, takes_work in endpoints.values():
            all_s, running_s = all_s + num_slots, running_s + num_running
            if takes_work:
                open_s, free_s = open_s + num_slots, free_s + num_slots - num_running
        name = draw.choice("abc")
        if draw.random() < 0.2:
            endpoints.pop(name, None)
            account.forget(time_s + 1, name)
        else:
            endpoints[name] = 8, draw.randrange(9), draw.random() < 0.7
            num_slots, num_running, takes_work = endpoints[name]
            account.note(time_s + 1, name, num_slots, num_running, takes_work=takes_work)
    taken = account.take(200)
    assert (taken.all_s, taken.open_s, taken.running_s, taken.free_s) == (all_s, open_s, running_s, free_s)
